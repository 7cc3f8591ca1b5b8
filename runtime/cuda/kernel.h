// What every kernel source includes: how kernels are launched, and the few device functions that
// all of them share. Sources are read by nvcc and, for the emulator, by a host compiler: they keep
// to the CUDA runtime's C++ interface, without <<<>>>. Where nvcc makes too little of a function of
// that interface, inline assembly of the same effect may stand beside it, under __CUDA_ARCH__.
#ifndef DIM0_RUNTIME_CUDA_KERNEL_H_
#define DIM0_RUNTIME_CUDA_KERNEL_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace dim0::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Enqueues kernel(arguments...) on `stream`. Error: what the launch returned; the kernel's own
// faults show when the stream is waited for.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// The launch's dynamic shared memory, aligned to 32 bytes, as tensor-core tiles must be. Its
// contents are undefined at first.
template <typename T>
__device__ __forceinline__ T* DynamicSharedMemory() {
  extern __shared__ __align__(32) unsigned char dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory);
}

// As many T as one 16-byte access moves.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

__host__ __device__ inline int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float ToFloat(__half value) { return __half2float(value); }

// Rounds to nearest, ties to even.
template <typename T>
__device__ __forceinline__ T FromFloat(float value);
template <>
__device__ __forceinline__ float FromFloat<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float value) {
  return __float2half_rn(value);
}

// Every lane gets the sum over the warp, in one fixed order.
template <typename T>
__device__ __forceinline__ T WarpSum(T value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

__device__ __forceinline__ float WarpMax(float value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// Every thread of a one-dimensional block of whole warps, 1024 threads at most, gets the sum over
// the block, in an order that depends on the block's size only. All threads must call it.
template <typename T>
__device__ T BlockSum(T value) {
  __shared__ T sums[kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  value = WarpSum(value);
  __syncthreads();  // an earlier call's sums have been read
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  return WarpSum(lane < warps ? sums[lane] : T(0));
}

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_KERNEL_H_
