// LayerNorm, alone and with the addition before it. A warp has a row: it reads the row from device
// memory once and then again from its cache. Backward spreads a row over a block where it can.
#include <algorithm>

#include "model/cuda/column_sums.h"
#include "model/cuda/elements.h"
#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {
namespace {

constexpr float kEpsilon = 1e-5f;
constexpr int kWarps = 8;  // rows a block

__device__ __forceinline__ int64_t WarpRow() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
}

// Of the fused backward kernel: two blocks for each multiprocessor of a large GPU.
int64_t NormChunks(int64_t rows) { return std::clamp<int64_t>(CeilDivide(rows, 8), 1, 256); }

dim3 RowBlocks(int64_t rows) { return dim3(static_cast<unsigned>(CeilDivide(rows, kWarps))); }

// Without `delta`, x is the norm's input; with it, x + delta, which goes to `sum` (x or delta
// itself, maybe) and is normalised as rounded there, for that is what backward will see.
template <int kElements, typename T, typename P>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    LayerNormForwardKernel(const T* x, const T* delta, const P* gain, const P* bias, T* sum, T* y,
                           float* mean, float* rstd, int64_t rows, int64_t width) {
  const int64_t row = WarpRow();
  if (row >= rows) return;
  const int64_t first = threadIdx.x % kWarpSize * kElements;
  constexpr int64_t kStep = kWarpSize * kElements;
  x += row * width;
  float values[kElements];

  float total = 0;
  if (delta == nullptr) {
    for (int64_t c = first; c < width; c += kStep) {
      Load(x + c, values);
#pragma unroll
      for (int i = 0; i < kElements; ++i) total += values[i];
    }
  } else {
    delta += row * width;
    sum += row * width;
    for (int64_t c = first; c < width; c += kStep) {
      float deltas[kElements];
      Load(x + c, values);
      Load(delta + c, deltas);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        values[i] = Rounded<T>(values[i] + deltas[i]);
        total += values[i];
      }
      Store(values, sum + c);
    }
    x = sum;  // a lane reads back what it has written itself
  }
  const float m = WarpSum(total) / width;

  // The deviations are squared, not the values, so that a large mean costs no digits.
  float squares = 0;
  for (int64_t c = first; c < width; c += kStep) {
    Load(x + c, values);
#pragma unroll
    for (int i = 0; i < kElements; ++i) squares += (values[i] - m) * (values[i] - m);
  }
  const float r = 1.0f / sqrtf(WarpSum(squares) / width + kEpsilon);

  y += row * width;
  for (int64_t c = first; c < width; c += kStep) {
    float gains[kElements], biases[kElements];
    Load(x + c, values);
    Load(gain + c, gains);
    Load(bias + c, biases);
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = gains[i] * ((values[i] - m) * r) + biases[i];
    Store(values, y + c);
  }
  if (first == 0) {
    mean[row] = m;
    rstd[row] = r;
  }
}

// With h = (x - mean) * rstd and g = dy * gain, the gradient through the norm is
// rstd * (g - average(g) - h * average(g h)).
template <int kElements, typename T, typename P>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    LayerNormBackwardKernel(const T* dy, const T* x, const P* gain, const float* mean,
                            const float* rstd, T* dx, bool accumulate, int64_t rows,
                            int64_t width) {
  const int64_t row = WarpRow();
  if (row >= rows) return;
  const int64_t first = threadIdx.x % kWarpSize * kElements;
  constexpr int64_t kStep = kWarpSize * kElements;
  dy += row * width;
  x += row * width;
  dx += row * width;
  const float m = mean[row], r = rstd[row];
  float g[kElements], h[kElements], gains[kElements];

  float sum_g = 0, sum_gh = 0;
  for (int64_t c = first; c < width; c += kStep) {
    Load(dy + c, g);
    Load(x + c, h);
    Load(gain + c, gains);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      g[i] *= gains[i];
      sum_g += g[i];
      sum_gh += g[i] * ((h[i] - m) * r);
    }
  }
  const float average_g = WarpSum(sum_g) / width;
  const float average_gh = WarpSum(sum_gh) / width;

  for (int64_t c = first; c < width; c += kStep) {
    float result[kElements] = {};
    if (accumulate) Load(dx + c, result);
    Load(dy + c, g);
    Load(x + c, h);
    Load(gain + c, gains);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      result[i] += r * (g[i] * gains[i] - average_g - (h[i] - m) * r * average_gh);
    }
    Store(result, dx + c);
  }
}

template <typename T>
struct ParameterTerms {
  const T* dy;
  const T* x;
  const float* mean;
  const float* rstd;
  int64_t width;

  // The terms of dgain, then those of dbias.
  template <int kElements>
  __device__ void operator()(int64_t row, int64_t column, float (&terms)[2][kElements]) const {
    Load(dy + row * width + column, terms[1]);
    Load(x + row * width + column, terms[0]);
    const float m = mean[row], r = rstd[row];
#pragma unroll
    for (int i = 0; i < kElements; ++i) terms[0][i] = terms[1][i] * ((terms[0][i] - m) * r);
  }
};

// Both in one pass over dy and x, for rows that a block spans with one vector of elements a thread:
// it takes kFusedRows at a time, and keeps its columns' sums for dgain and dbias in registers. They
// go to partial_sums [2][chunks][width], blockIdx.x being the chunk.
constexpr int kFusedThreads = 512;
constexpr int kFusedRows = 4;

template <int kElements, typename T, typename P>
__global__ void __launch_bounds__(kFusedThreads)
    FusedBackwardKernel(const T* dy, const T* x, const P* gain, const float* mean,
                        const float* rstd, T* dx, bool accumulate, int64_t rows, int64_t width,
                        float* partial_sums) {
  // Two, taken in turns: who writes one has seen all threads leave the other.
  __shared__ float shared[2][2 * kFusedRows][kFusedThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const int64_t column = static_cast<int64_t>(threadIdx.x) * kElements;
  const bool inside = column < width;
  const int64_t rows_per_chunk = CeilDivide(rows, gridDim.x);
  const int64_t begin = blockIdx.x * rows_per_chunk;
  const int64_t end = min(rows, begin + rows_per_chunk);
  float gains[kElements] = {}, gain_sums[kElements] = {}, bias_sums[kElements] = {};
  if (inside) Load(gain + column, gains);

  int turn = 0;
  for (int64_t first = begin; first < end; first += kFusedRows, turn ^= 1) {
    float dys[kFusedRows][kElements] = {}, h[kFusedRows][kElements] = {};
    float r[kFusedRows] = {};
#pragma unroll
    for (int n = 0; n < kFusedRows; ++n) {
      const int64_t row = first + n;
      if (row >= end) continue;
      const float m = mean[row];
      r[n] = rstd[row];
      if (!inside) continue;
      Load(dy + row * width + column, dys[n]);
      Load(x + row * width + column, h[n]);
#pragma unroll
      for (int i = 0; i < kElements; ++i) h[n][i] = (h[n][i] - m) * r[n];
    }
#pragma unroll
    for (int n = 0; n < kFusedRows; ++n) {
      float sum_g = 0, sum_gh = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        gain_sums[i] += dys[n][i] * h[n][i];
        bias_sums[i] += dys[n][i];
        sum_g += dys[n][i] * gains[i];
        sum_gh += dys[n][i] * gains[i] * h[n][i];
      }
      sum_g = WarpSum(sum_g);
      sum_gh = WarpSum(sum_gh);
      if (lane == 0) {
        shared[turn][2 * n][warp] = sum_g;
        shared[turn][2 * n + 1][warp] = sum_gh;
      }
    }
    __syncthreads();
    if (!inside) continue;
#pragma unroll
    for (int n = 0; n < kFusedRows; ++n) {
      const int64_t row = first + n;
      if (row >= end) break;
      float average_g = 0, average_gh = 0;
      for (int w = 0; w < warps; ++w) {
        average_g += shared[turn][2 * n][w];
        average_gh += shared[turn][2 * n + 1][w];
      }
      average_g /= width;
      average_gh /= width;
      float result[kElements] = {};
      if (accumulate) Load(dx + row * width + column, result);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        result[i] += r[n] * (dys[n][i] * gains[i] - average_g - h[n][i] * average_gh);
      }
      Store(result, dx + row * width + column);
    }
  }
  if (!inside) return;
  const int64_t chunks = gridDim.x;
  Store(gain_sums, partial_sums + blockIdx.x * width + column);
  Store(bias_sums, partial_sums + (chunks + blockIdx.x) * width + column);
}

}  // namespace

cudaError_t LaunchLayerNormForward(Array x, Array delta, Array gain, Array bias, Array sum, Array y,
                                   float* mean, float* rstd, int64_t rows, int64_t width,
                                   cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return WithElementType(x.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return WithElementType(gain.type, [&](auto parameter_tag) {
      using P = TypeOf<decltype(parameter_tag)>;
      const bool vectors = width % kVector<T, P> == 0 &&
                           AreAligned({x.data, delta.data, gain.data, bias.data, sum.data, y.data});
      return WithVector<T, P>(vectors, [&](auto elements) {
        return Launch(LayerNormForwardKernel<decltype(elements)::kValue, T, P>, RowBlocks(rows),
                      dim3(kWarps * kWarpSize), 0, stream, As<T>(x), As<T>(delta), As<P>(gain),
                      As<P>(bias), As<T>(sum), As<T>(y), mean, rstd, rows, width);
      });
    });
  });
}

cudaError_t LaunchLayerNormBackward(Array dy, Array x, Array gain, const float* mean,
                                    const float* rstd, Array dx, bool accumulate_dx, Array dgain,
                                    Array dbias, bool accumulate_parameters, int64_t rows,
                                    int64_t width, float* workspace, cudaStream_t stream) {
  int64_t chunks = 0;
  cudaError_t error = WithElementType(x.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return WithElementType(gain.type, [&](auto parameter_tag) {
      using P = TypeOf<decltype(parameter_tag)>;
      constexpr int kElements = kVector<T, P>;
      const bool vectors =
          width % kElements == 0 && AreAligned({dy.data, x.data, gain.data, dx.data, workspace});
      if (vectors && width <= kElements * kFusedThreads && rows > 0) {
        chunks = NormChunks(rows);
        const int64_t threads = CeilDivide(width / kElements, kWarpSize) * kWarpSize;
        return Launch(FusedBackwardKernel<kElements, T, P>, dim3(static_cast<unsigned>(chunks)),
                      dim3(static_cast<unsigned>(threads)), 0, stream, As<T>(dy), As<T>(x),
                      As<P>(gain), mean, rstd, As<T>(dx), accumulate_dx, rows, width, workspace);
      }
      chunks = ColumnSumChunks(rows);
      const cudaError_t error = WithVector<T, P>(vectors, [&](auto elements) {
        return LaunchPartialColumnSums<decltype(elements)::kValue, 2>(
            ParameterTerms<T>{As<T>(dy), As<T>(x), mean, rstd, width}, rows, width, workspace,
            stream);
      });
      if (error != cudaSuccess || rows == 0) return error;
      return WithVector<T, P>(vectors, [&](auto elements) {
        return Launch(LayerNormBackwardKernel<decltype(elements)::kValue, T, P>, RowBlocks(rows),
                      dim3(kWarps * kWarpSize), 0, stream, As<T>(dy), As<T>(x), As<P>(gain), mean,
                      rstd, As<T>(dx), accumulate_dx, rows, width);
      });
    });
  });
  if (error != cudaSuccess) return error;
  error = LaunchSumOfChunks(workspace, chunks, width, dgain, accumulate_parameters, stream);
  if (error != cudaSuccess) return error;
  return LaunchSumOfChunks(workspace + chunks * width, chunks, width, dbias, accumulate_parameters,
                           stream);
}

int64_t WorkspaceFloats(int64_t tokens, int64_t width) {
  // LayerNorm's two sums of each column; the bias gradients' one, of up to 4 x width columns; a
  // float64 loss a token for cross-entropy.
  const int64_t column_chunks = ColumnSumChunks(tokens);
  return std::max({2 * std::max(NormChunks(tokens), column_chunks) * width,
                   4 * column_chunks * width, 2 * tokens});
}

}  // namespace dim0::cuda
