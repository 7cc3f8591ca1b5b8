#include <cmath>

#include "model/cpu/column_sums.h"
#include "model/cpu/cpu_kernels.h"
#include "model/cpu/row_math.h"
#include "runtime/check.h"

namespace dim0::cpu {
namespace {

constexpr float kEpsilon = 1e-5f;

// y = gain * (x - mean) * rstd + bias for one row of `width`, which stays in L1 for all passes.
void NormalizeRow(const float* x, const float* gain, const float* bias, int64_t width, float* y,
                  float* mean, float* rstd) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < width; ++c) sum += x[c];
  const float m = sum / width;
  // The deviations are squared, not the values, so that a large mean costs no digits.
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < width; ++c) squares += (x[c] - m) * (x[c] - m);
  const float r = 1.0f / std::sqrt(squares / width + kEpsilon);
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) y[c] = gain[c] * ((x[c] - m) * r) + bias[c];
  *mean = m;
  *rstd = r;
}

// With h = (x - mean) * rstd and g = dy * gain, the gradient through the norm is
// rstd * (g - average(g) - h * average(g h)).
void BackwardRow(const float* dy, const float* x, const float* gain, float mean, float rstd,
                 int64_t width, float* dx, Write write) {
  float sum_g = 0;
  float sum_gh = 0;
#pragma omp simd reduction(+ : sum_g, sum_gh)
  for (int64_t c = 0; c < width; ++c) {
    const float g = dy[c] * gain[c];
    sum_g += g;
    sum_gh += g * ((x[c] - mean) * rstd);
  }
  const float average_g = sum_g / width;
  const float average_gh = sum_gh / width;
  if (write == Write::kOverwrite) {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      dx[c] = rstd * (dy[c] * gain[c] - average_g - (x[c] - mean) * rstd * average_gh);
    }
  } else {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      dx[c] += rstd * (dy[c] * gain[c] - average_g - (x[c] - mean) * rstd * average_gh);
    }
  }
}

bool HasShape(const Tensor& tensor, int64_t rows, int64_t cols) {
  return tensor.rows == rows && tensor.cols == cols;
}

}  // namespace

void CpuKernels::LayerNormForward(Stream& stream, const Tensor& x, const Tensor& gain,
                                  const Tensor& bias, const Tensor& y, const Tensor& mean,
                                  const Tensor& rstd) {
  const int64_t tokens = x.rows, width = x.cols;
  DIM0_CHECK(HasShape(y, tokens, width) && gain.size() == width && bias.size() == width);
  DIM0_CHECK(mean.size() == tokens && rstd.size() == tokens);
  // Per element: one operation for the mean, three for the variance, four for y.
  OpInfo info{.name = "layer_norm_forward",
              .flops = 8.0 * tokens * width,
              .bytes = 8.0 * tokens * width + 8.0 * width + 8.0 * tokens};
  stream.Enqueue(std::move(info), [=, this, x = x.f32(), gain = gain.f32(), bias = bias.f32(),
                                   y = y.f32(), mean = mean.f32(), rstd = rstd.f32()](auto&) {
    pool_.ParallelFor(tokens, 1, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        NormalizeRow(x + n * width, gain, bias, width, y + n * width, mean + n, rstd + n);
      }
    });
    return absl::OkStatus();
  });
}

void CpuKernels::AddLayerNormForward(Stream& stream, const Tensor& x, const Tensor& delta,
                                     const Tensor& gain, const Tensor& bias, const Tensor& sum,
                                     const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const int64_t tokens = x.rows, width = x.cols;
  DIM0_CHECK(HasShape(delta, tokens, width) && HasShape(sum, tokens, width));
  DIM0_CHECK(HasShape(y, tokens, width) && gain.size() == width && bias.size() == width);
  DIM0_CHECK(mean.size() == tokens && rstd.size() == tokens);
  OpInfo info{.name = "add_layer_norm_forward",
              .flops = 9.0 * tokens * width,
              .bytes = 16.0 * tokens * width + 8.0 * width + 8.0 * tokens};
  stream.Enqueue(std::move(info),
                 [=, this, x = x.f32(), delta = delta.f32(), gain = gain.f32(), bias = bias.f32(),
                  sum = sum.f32(), y = y.f32(), mean = mean.f32(), rstd = rstd.f32()](auto&) {
                   pool_.ParallelFor(tokens, 1, [=](int64_t begin, int64_t end) {
                     for (int64_t n = begin; n < end; ++n) {
                       const int64_t row = n * width;
#pragma omp simd
                       for (int64_t c = 0; c < width; ++c)
                         sum[row + c] = x[row + c] + delta[row + c];
                       NormalizeRow(sum + row, gain, bias, width, y + row, mean + n, rstd + n);
                     }
                   });
                   return absl::OkStatus();
                 });
}

void CpuKernels::LayerNormBackward(Stream& stream, const Tensor& dy, const Tensor& x,
                                   const Tensor& gain, const Tensor& mean, const Tensor& rstd,
                                   const Tensor& dx, Write write_dx, const Tensor& dgain,
                                   const Tensor& dbias, Write write_parameters) {
  const int64_t tokens = x.rows, width = x.cols;
  DIM0_CHECK(HasShape(dy, tokens, width) && HasShape(dx, tokens, width));
  DIM0_CHECK(gain.size() == width && dgain.size() == width && dbias.size() == width);
  DIM0_CHECK(mean.size() == tokens && rstd.size() == tokens);
  // Per element: six operations for the two averages, six for dx, five for dgain and dbias; dy and
  // x are read twice.
  OpInfo info{.name = "layer_norm_backward",
              .flops = 17.0 * tokens * width,
              .bytes = (write_dx == Write::kAccumulate ? 24.0 : 20.0) * tokens * width};
  stream.Enqueue(std::move(info), [=, this, dy = dy.f32(), x = x.f32(), gain = gain.f32(),
                                   mean = mean.f32(), rstd = rstd.f32(), dx = dx.f32(),
                                   dgain = dgain.f32(), dbias = dbias.f32()](auto&) {
    // The parameters' gradients in a pass of their own, by columns, so that they need no partial
    // sums and are the same for every number of threads.
    ForColumnStrips(pool_, width, [=](int64_t begin, int64_t strip) {
      float gain_sums[kColumnStrip] = {};
      float bias_sums[kColumnStrip] = {};
      for (int64_t n = 0; n < tokens; ++n) {
        const float* dy_row = dy + n * width + begin;
        const float* x_row = x + n * width + begin;
        const float m = mean[n];
        const float r = rstd[n];
#pragma omp simd
        for (int64_t c = 0; c < strip; ++c) {
          gain_sums[c] += dy_row[c] * ((x_row[c] - m) * r);
          bias_sums[c] += dy_row[c];
        }
      }
      Store(gain_sums, strip, write_parameters, dgain + begin);
      Store(bias_sums, strip, write_parameters, dbias + begin);
    });
    pool_.ParallelFor(tokens, 1, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = n * width;
        BackwardRow(dy + row, x + row, gain, mean[n], rstd[n], width, dx + row, write_dx);
      }
    });
    return absl::OkStatus();
  });
}

}  // namespace dim0::cpu
