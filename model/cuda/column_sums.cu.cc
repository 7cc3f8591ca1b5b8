#include "model/cuda/column_sums.h"

#include "model/cuda/elements.h"

namespace dim0::cuda {
namespace {

constexpr int kGroups = 8;

// 32 columns a block, a warp every kGroups-th chunk.
template <typename T>
__global__ void __launch_bounds__(kGroups* kWarpSize)
    SumOfChunksKernel(const float* partial_sums, int64_t chunks, int64_t cols, T* sums,
                      bool accumulate) {
  __shared__ float shared[kGroups][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, group = threadIdx.x / kWarpSize;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarpSize + lane;
  float sum = 0;
  if (column < cols) {
#pragma unroll 8
    for (int64_t chunk = group; chunk < chunks; chunk += kGroups) {
      sum += partial_sums[chunk * cols + column];
    }
  }
  shared[group][lane] = sum;
  __syncthreads();
  if (group > 0 || column >= cols) return;
  float total = accumulate ? ToFloat(sums[column]) : 0.0f;
  for (int g = 0; g < kGroups; ++g) total += shared[g][lane];
  sums[column] = FromFloat<T>(total);
}

template <typename T>
struct Values {
  const T* values;
  int64_t cols;

  template <int kElements>
  __device__ void operator()(int64_t row, int64_t column, float (&terms)[1][kElements]) const {
    Load(values + row * cols + column, terms[0]);
  }
};

}  // namespace

cudaError_t LaunchSumOfChunks(const float* partial_sums, int64_t chunks, int64_t cols, Array sums,
                              bool accumulate, cudaStream_t stream) {
  if (cols == 0) return cudaSuccess;
  return WithElementType(sums.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return Launch(SumOfChunksKernel<T>, dim3(static_cast<unsigned>(CeilDivide(cols, kWarpSize))),
                  dim3(kGroups * kWarpSize), 0, stream, partial_sums, chunks, cols, As<T>(sums),
                  accumulate);
  });
}

cudaError_t LaunchColumnSums(Array values, int64_t rows, int64_t cols, Array sums, bool accumulate,
                             float* workspace, cudaStream_t stream) {
  if (cols == 0) return cudaSuccess;
  const cudaError_t error = WithElementType(values.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    const bool vectors = cols % kVector<T> == 0 && AreAligned({values.data});
    return WithVector<T>(vectors, [&](auto elements) {
      return LaunchPartialColumnSums<decltype(elements)::kValue, 1>(Values<T>{As<T>(values), cols},
                                                                    rows, cols, workspace, stream);
    });
  });
  if (error != cudaSuccess) return error;
  return LaunchSumOfChunks(workspace, ColumnSumChunks(rows), cols, sums, accumulate, stream);
}

}  // namespace dim0::cuda
