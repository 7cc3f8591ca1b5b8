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
// it takes a few rows at a time, and keeps its columns' sums for dgain and dbias in registers. They
// go to partial_sums [2][chunks][width], blockIdx.x being the chunk.
constexpr int kFusedThreads = 512;

// Rows at a time: as many as there are registers for.
template <int kElements, typename T>
inline constexpr int kFusedRows = 64 / (kElements * sizeof(T));

// How many chunks, and so blocks, there are at most: 256, or more of narrow rows, whose blocks are
// small. They then are about what 100 multiprocessors hold at once, with 512 threads each, and a
// GPU that has more of them does not run a second, short wave.
constexpr int64_t kMostChunks = 256;
constexpr int64_t kMostColumnsOfChunks = 384 * 1024;
// A shorter chunk would not be worth its rows of partial_sums.
constexpr int64_t kLeastRowsPerChunk = 8;

// Whole steps of the kernel.
int64_t RowsPerChunk(int64_t rows, int64_t width) {
  constexpr int64_t kStep = 4;
  const int64_t most_chunks = std::max(kMostChunks, kMostColumnsOfChunks / width);
  const int64_t steps = CeilDivide(CeilDivide(rows, most_chunks), kStep);
  return std::max(kLeastRowsPerChunk, steps * kStep);
}

// Elements of a row as they are stored.
template <int kElements, typename T>
struct Stored {
  Pack<T> packs[kElements / Pack<T>::kSize];

  // Nobody waits for them before they are used.
  __device__ __forceinline__ void Fetch(const T* source) {
#pragma unroll
    for (int i = 0; i < kElements / Pack<T>::kSize; ++i) {
      packs[i] = reinterpret_cast<const Pack<T>*>(source)[i];
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return ToFloat(packs[i / Pack<T>::kSize].values[i % Pack<T>::kSize]);
  }
};

// Registers would not hold a step's rows as floats until their sums are known: dy and x are fetched
// again then, from the cache.
template <int kElements, bool kAccumulate, typename T, typename P>
__global__ void __launch_bounds__(kFusedThreads)
    FusedBackwardKernel(const T* dy, const T* x, const P* gain, const float* mean,
                        const float* rstd, T* dx, int64_t rows, int64_t width,
                        int64_t rows_per_chunk, float* partial_sums) {
  constexpr int kRows = kFusedRows<kElements, T>;
  __shared__ __align__(16) float statistics[2][kRows];  // mean, rstd
  __shared__ __align__(16) float sums[kFusedThreads / kWarpSize][2][kRows];
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  const float inverse_width = 1.0f / width;
  const int64_t begin = blockIdx.x * rows_per_chunk;
  const int64_t end = min(rows, begin + rows_per_chunk);
  // Threads behind the row's end read its last elements, and the last row stands in for those
  // behind the chunk's end, so that no load hangs on a branch. Neither counts.
  const bool inside = thread * kElements < width;
  const int64_t column = min(static_cast<int64_t>(thread * kElements), width - kElements);
  float gains[kElements] = {}, gain_sums[kElements] = {}, bias_sums[kElements] = {};
  if (inside) Load(gain + column, gains);

  // The block's first threads bring the rows' statistics, one each.
  const float* statistic_source = thread % (2 * kRows) < kRows ? mean : rstd;

  for (int64_t first = begin; first < end; first += kRows) {
    const int last = static_cast<int>(min(first + kRows, end) - first) - 1;
    const float statistic = statistic_source[first + min(thread % kRows, last)];
    Stored<kElements, T> dys[kRows], xs[kRows], old_dx[kRows];
    int64_t places[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      places[n] = (first + min(n, last)) * width + column;
      dys[n].Fetch(dy + places[n]);
      xs[n].Fetch(x + places[n]);
      if constexpr (kAccumulate) old_dx[n].Fetch(dx + places[n]);
    }
    if (thread < 2 * kRows) {
      statistics[thread / kRows][thread % kRows] = thread % kRows <= last ? statistic : 0;
    }
    // What follows needs the statistics, so that all loads are under way before the first is waited
    // for.
    __syncthreads();
    float m[kRows], r[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      m[n] = statistics[0][n];
      r[n] = statistics[1][n];
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const float count = n <= last ? 1 : 0;
      float sum_g = 0, sum_gh = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float h = (xs[n][i] - m[n]) * r[n], g = dys[n][i] * gains[i];
        gain_sums[i] += dys[n][i] * h;
        bias_sums[i] += dys[n][i] * count;
        sum_g += g;
        sum_gh += g * h;
      }
      sum_g = WarpSum(sum_g);
      sum_gh = WarpSum(sum_gh);
      if (lane == 0) {
        sums[warp][0][n] = sum_g;
        sums[warp][1][n] = sum_gh;
      }
    }
    __syncthreads();
    float total_g[kRows] = {}, total_gh[kRows] = {};
#pragma unroll 2
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        total_g[n] += sums[w][0][n];
        total_gh[n] += sums[w][1][n];
      }
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      dys[n].Fetch(dy + places[n]);
      xs[n].Fetch(x + places[n]);
      const float constant = total_g[n] * inverse_width;
      const float slope = r[n] * (total_gh[n] * inverse_width);
      float result[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        result[i] = r[n] * (dys[n][i] * gains[i] - constant - (xs[n][i] - m[n]) * slope);
        if constexpr (kAccumulate) result[i] += old_dx[n][i];
      }
      if (inside && n <= last) Store(result, dx + places[n]);
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
      if (vectors && rows > 0 && width > 0 && width <= kElements * kFusedThreads) {
        const int64_t rows_per_chunk = RowsPerChunk(rows, width);
        chunks = CeilDivide(rows, rows_per_chunk);
        const int64_t threads = CeilDivide(width / kElements, kWarpSize) * kWarpSize;
        return Launch(accumulate_dx ? FusedBackwardKernel<kElements, true, T, P>
                                    : FusedBackwardKernel<kElements, false, T, P>,
                      dim3(static_cast<unsigned>(chunks)), dim3(static_cast<unsigned>(threads)), 0,
                      stream, As<T>(dy), As<T>(x), As<P>(gain), mean, rstd, As<T>(dx), rows, width,
                      rows_per_chunk, workspace);
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
  const int64_t norm_columns = std::min(CeilDivide(tokens, kLeastRowsPerChunk) * width,
                                        std::max(kMostChunks * width, kMostColumnsOfChunks));
  const int64_t bias_columns = ColumnSumChunks(tokens) * width;
  return std::max({2 * norm_columns, 4 * bias_columns, 2 * tokens});
}

}  // namespace dim0::cuda
