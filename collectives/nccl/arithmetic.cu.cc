#include "collectives/nccl/arithmetic.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "collectives/dtype.h"

namespace dim0::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // a grid-stride loop does the rest

constexpr int32_t kNanKey = 0x7fffffff;

// The bits of a positive float32 are in the order of the numbers, those of a negative one in the
// reverse order.
__device__ int32_t FlipNegative(int32_t bits) { return bits >= 0 ? bits : bits ^ 0x7fffffff; }

__device__ int32_t ToKey(float value) {
  return isnan(value) ? kNanKey : FlipNegative(__float_as_int(value));
}
__device__ float FromKey(int32_t key) {
  return __int_as_float(key == kNanKey ? 0x7fc00000 : FlipNegative(key));
}

__device__ float Widen(float value) { return value; }
__device__ float Widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void Store(float* to, float value) { *to = value; }
__device__ void Store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }

__device__ float Plus(float a, float b) { return a + b; }
__device__ __nv_bfloat16 Plus(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
}
// Unsigned, since they wrap around.
__device__ uint32_t Plus(uint32_t a, uint32_t b) { return a + b; }
__device__ uint64_t Plus(uint64_t a, uint64_t b) { return a + b; }

// As many T as one 16-byte access moves.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

__device__ int64_t FirstIndex() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ int64_t Stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

template <typename T>
__global__ void __launch_bounds__(kThreads) AddToVectors(T* sum, const T* term, int64_t vectors) {
  auto* const sums = reinterpret_cast<Vector<T>*>(sum);
  const auto* const terms = reinterpret_cast<const Vector<T>*>(term);
  for (int64_t i = FirstIndex(); i < vectors; i += Stride()) {
    Vector<T> a = sums[i];
    const Vector<T> b = terms[i];
    for (int k = 0; k < Vector<T>::kSize; ++k) a.values[k] = Plus(a.values[k], b.values[k]);
    sums[i] = a;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) AddToElements(T* sum, const T* term, int64_t count) {
  for (int64_t i = FirstIndex(); i < count; i += Stride()) sum[i] = Plus(sum[i], term[i]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) ToKeys(const T* values, int32_t* keys, int64_t count) {
  for (int64_t i = FirstIndex(); i < count; i += Stride()) keys[i] = ToKey(Widen(values[i]));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    FromKeys(const int32_t* keys, T* values, int64_t count) {
  for (int64_t i = FirstIndex(); i < count; i += Stride()) Store(&values[i], FromKey(keys[i]));
}

// One thread for each of `count` pieces of work, as far as the grid goes.
template <typename... Parameters>
cudaError_t LaunchOver(int64_t count, cudaStream_t stream, void (*kernel)(Parameters...),
                       Parameters... arguments) {
  if (count == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, kMaxBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename T>
cudaError_t AddTo(void* sum_data, const void* term_data, int64_t count, cudaStream_t stream) {
  T* const sum = static_cast<T*>(sum_data);
  const T* const term = static_cast<const T*>(term_data);
  int64_t done = 0;
  if ((reinterpret_cast<uintptr_t>(sum) | reinterpret_cast<uintptr_t>(term)) % 16 == 0) {
    const int64_t vectors = count / Vector<T>::kSize;
    const cudaError_t error = LaunchOver(vectors, stream, AddToVectors<T>, sum, term, vectors);
    if (error != cudaSuccess) return error;
    done = vectors * Vector<T>::kSize;
  }
  return LaunchOver(count - done, stream, AddToElements<T>, sum + done, term + done, count - done);
}

}  // namespace

cudaError_t LaunchAddTo(DType dtype, void* sum, const void* term, int64_t count,
                        cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return AddTo<float>(sum, term, count, stream);
    case DType::kBFloat16:
      return AddTo<__nv_bfloat16>(sum, term, count, stream);
    case DType::kInt32:
      return AddTo<uint32_t>(sum, term, count, stream);
    case DType::kInt64:
      return AddTo<uint64_t>(sum, term, count, stream);
    case DType::kByte:
    case DType::kFloat16:  // does not travel
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchToKeys(DType dtype, const void* values, int32_t* keys, int64_t count,
                         cudaStream_t stream) {
  if (dtype == DType::kFloat32) {
    return LaunchOver(count, stream, ToKeys<float>, static_cast<const float*>(values), keys, count);
  }
  if (dtype == DType::kBFloat16) {
    return LaunchOver(count, stream, ToKeys<__nv_bfloat16>,
                      static_cast<const __nv_bfloat16*>(values), keys, count);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchFromKeys(DType dtype, const int32_t* keys, void* values, int64_t count,
                           cudaStream_t stream) {
  if (dtype == DType::kFloat32) {
    return LaunchOver(count, stream, FromKeys<float>, keys, static_cast<float*>(values), count);
  }
  if (dtype == DType::kBFloat16) {
    return LaunchOver(count, stream, FromKeys<__nv_bfloat16>, keys,
                      static_cast<__nv_bfloat16*>(values), count);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dim0::cuda
