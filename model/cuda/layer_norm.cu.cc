// LayerNorm, alone and with the addition before it. A warp has a row: it reads the row from device
// memory once and then again from its cache.
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

}  // namespace

cudaError_t LaunchLayerNormForward(Array x, Array delta, Array gain, Array bias, Array sum, Array y,
                                   float* mean, float* rstd, int64_t rows, int64_t width,
                                   cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return WithType(x.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return WithType(gain.type, [&](auto parameter_tag) {
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
  const int64_t chunks = ColumnSumChunks(rows);
  cudaError_t error = WithType(x.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    // Before dx is written: it may be dy.
    const bool vectors = width % kVector<T> == 0 && AreAligned({dy.data, x.data});
    const cudaError_t error = WithVector<T>(vectors, [&](auto elements) {
      return LaunchPartialColumnSums<decltype(elements)::kValue, 2>(
          ParameterTerms<T>{As<T>(dy), As<T>(x), mean, rstd, width}, rows, width, workspace,
          stream);
    });
    if (error != cudaSuccess || rows == 0) return error;
    return WithType(gain.type, [&](auto parameter_tag) {
      using P = TypeOf<decltype(parameter_tag)>;
      const bool vectors =
          width % kVector<T, P> == 0 && AreAligned({dy.data, x.data, gain.data, dx.data});
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

}  // namespace dim0::cuda
