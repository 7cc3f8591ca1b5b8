// Sums over rows, column by column: the gradients of biases and gains. Rows are cut into chunks by
// their number only; each chunk's sums go to a workspace, and a second kernel adds the chunks up.
#ifndef DIM0_MODEL_CUDA_COLUMN_SUMS_H_
#define DIM0_MODEL_CUDA_COLUMN_SUMS_H_

#include <algorithm>
#include <cstdint>

#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {

inline constexpr int kColumnSumWarps = 8;

// Enough chunks to keep a GPU busy, each long enough to be worth its row of the workspace.
inline int64_t ColumnSumChunks(int64_t rows) {
  return std::clamp<int64_t>(CeilDivide(rows, 4 * kColumnSumWarps), 1, 128);
}

// partial_sums [kSums][chunks][cols]: for chunk blockIdx.y, the sums of terms(row, column) over its
// rows; `terms` fills [kSums][kElements] floats for kElements columns. A lane has kElements
// columns, a warp every kColumnSumWarps-th row.
template <int kElements, int kSums, typename Terms>
__global__ void __launch_bounds__(kColumnSumWarps* kWarpSize)
    PartialColumnSumsKernel(Terms terms, int64_t rows, int64_t cols, float* partial_sums) {
  // One float of padding a lane: lanes that store kElements floats each then meet in no bank.
  constexpr int kStride = kElements == 1 ? 1 : kElements + 1;
  __shared__ float shared[kColumnSumWarps][kWarpSize * kStride];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t chunks = gridDim.y, chunk = blockIdx.y;
  const int64_t rows_per_chunk = CeilDivide(rows, chunks);
  const int64_t begin = chunk * rows_per_chunk;
  const int64_t end = min(rows, begin + rows_per_chunk);
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kWarpSize + lane) * kElements;

  float sums[kSums][kElements] = {};
  if (column < cols) {
#pragma unroll 4
    for (int64_t row = begin + warp; row < end; row += kColumnSumWarps) {
      float values[kSums][kElements];
      terms(row, column, values);
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sums[s][i] += values[s][i];
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    __syncthreads();  // the sums before have been read
#pragma unroll
    for (int i = 0; i < kElements; ++i) shared[warp][lane * kStride + i] = sums[s][i];
    __syncthreads();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarpSize * kElements;
    for (int i = threadIdx.x; i < kWarpSize * kElements && first + i < cols; i += blockDim.x) {
      float total = 0;
      for (int w = 0; w < kColumnSumWarps; ++w) {
        total += shared[w][i / kElements * kStride + i % kElements];
      }
      partial_sums[(s * chunks + chunk) * cols + first + i] = total;
    }
  }
}

template <int kElements, int kSums, typename Terms>
cudaError_t LaunchPartialColumnSums(const Terms& terms, int64_t rows, int64_t cols,
                                    float* partial_sums, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(CeilDivide(cols, kWarpSize * kElements)),
                  static_cast<unsigned>(ColumnSumChunks(rows)));
  return Launch(PartialColumnSumsKernel<kElements, kSums, Terms>, grid,
                dim3(kColumnSumWarps * kWarpSize), 0, stream, terms, rows, cols, partial_sums);
}

// sums [cols] = or += the sums over the chunks of partial_sums [chunks][cols].
cudaError_t LaunchSumOfChunks(const float* partial_sums, int64_t chunks, int64_t cols, Array sums,
                              bool accumulate, cudaStream_t stream);

}  // namespace dim0::cuda

#endif  // DIM0_MODEL_CUDA_COLUMN_SUMS_H_
