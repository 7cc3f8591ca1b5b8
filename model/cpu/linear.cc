#include <algorithm>

#include "model/cpu/column_sums.h"
#include "model/cpu/cpu_kernels.h"
#include "model/cpu/row_math.h"
#include "runtime/check.h"
#include "runtime/cpu/gemm.h"

namespace dim0::cpu {

void CpuKernels::LinearForward(Stream& stream, const Tensor& x, const Tensor& weight,
                               const Tensor& bias, const Tensor& y) {
  const int64_t tokens = x.rows, in = x.cols, out = weight.rows, y_length = y.cols;
  const bool has_bias = bias.rows > 0;
  DIM0_CHECK(weight.cols == in && y.rows == tokens && y_length >= out);
  DIM0_CHECK(!has_bias || bias.size() == out);
  OpInfo info{.name = "linear_forward",
              .flops = 2.0 * tokens * in * out,
              .bytes = 4.0 * (tokens * in + in * out + tokens * out)};
  stream.Enqueue(std::move(info), [=, this, x = x.f32(), weight = weight.f32(),
                                   bias = has_bias ? bias.f32() : nullptr, y = y.f32()](auto&) {
    // The product adds to the bias: this replaces the pass in which BLAS would have cleared y.
    if (has_bias) {
      pool_.ParallelFor(tokens, 1, [=](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) std::copy_n(bias, out, y + n * y_length);
      });
    }
    Gemm(pool_, Transpose::kNo, Transpose::kYes, tokens, out, in, 1.0f, x, in, weight, in,
         has_bias ? 1.0f : 0.0f, y, y_length);
    return absl::OkStatus();
  });
}

void CpuKernels::LinearAddForward(Stream& stream, const Tensor& x, const Tensor& weight,
                                  const Tensor& bias, const Tensor& residual, const Tensor& y) {
  const int64_t tokens = x.rows, in = x.cols, out = weight.rows;
  DIM0_CHECK(weight.cols == in && y.rows == tokens && y.cols == out);
  DIM0_CHECK(bias.size() == out && residual.rows == tokens && residual.cols == out);
  OpInfo info{.name = "linear_add_forward",
              .flops = 2.0 * tokens * in * out + 1.0 * tokens * out,
              .bytes = 4.0 * (tokens * in + in * out + 2 * tokens * out)};
  stream.Enqueue(std::move(info), [=, this, x = x.f32(), weight = weight.f32(), bias = bias.f32(),
                                   residual = residual.f32(), y = y.f32()](auto&) {
    // As in LinearForward, the product adds to what is there.
    pool_.ParallelFor(tokens, 1, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
#pragma omp simd
        for (int64_t c = 0; c < out; ++c) {
          y[n * out + c] = residual[n * out + c] + bias[c];
        }
      }
    });
    Gemm(pool_, Transpose::kNo, Transpose::kYes, tokens, out, in, 1.0f, x, in, weight, in, 1.0f, y,
         out);
    return absl::OkStatus();
  });
}

void CpuKernels::LinearGeluForward(Stream& stream, const Tensor& x, const Tensor& weight,
                                   const Tensor& bias, const Tensor& up, const Tensor& y) {
  LinearForward(stream, x, weight, bias, up);
  GeluForward(stream, up, y);
}

void CpuKernels::GeluLinearBackward(Stream& stream, const Tensor& dy, const Tensor& up,
                                    const Tensor& x, const Tensor& weight, const Tensor& dup,
                                    const Tensor& dweight, const Tensor& dbias, Write write) {
  LinearBackward(stream, dy, x, weight, dup, dweight, dbias, write);
  GeluBackward(stream, dup, up, dup);
}

void CpuKernels::LinearBackward(Stream& stream, const Tensor& dy, const Tensor& x,
                                const Tensor& weight, const Tensor& dx, const Tensor& dweight,
                                const Tensor& dbias, Write write) {
  const int64_t tokens = x.rows, in = x.cols, out = weight.rows, dy_length = dy.cols;
  const bool wants_dx = dx.rows > 0;
  const bool has_bias = dbias.rows > 0;
  DIM0_CHECK(weight.cols == in && dy.rows == tokens && dy_length >= out);
  DIM0_CHECK(!wants_dx || (dx.rows == tokens && dx.cols == in));
  DIM0_CHECK(dweight.rows == out && dweight.cols == in);
  DIM0_CHECK(!has_bias || (dbias.size() == out && dy_length == out));
  const int64_t products = wants_dx ? 2 : 1;
  // dy, and per product one operand and one result.
  OpInfo info{.name = "linear_backward",
              .flops = 2.0 * products * tokens * in * out + (has_bias ? 1.0 * tokens * out : 0.0),
              .bytes = 4.0 * (products * (tokens * out + tokens * in + in * out))};
  stream.Enqueue(std::move(info), [=, this, dy = dy.f32(), x = x.f32(), weight = weight.f32(),
                                   dx = wants_dx ? dx.f32() : nullptr, dweight = dweight.f32(),
                                   dbias = has_bias ? dbias.f32() : nullptr](auto&) {
    if (wants_dx) {
      Gemm(pool_, Transpose::kNo, Transpose::kNo, tokens, in, out, 1.0f, dy, dy_length, weight, in,
           0.0f, dx, in);
    }
    Gemm(pool_, Transpose::kYes, Transpose::kNo, out, in, tokens, 1.0f, dy, dy_length, x, in,
         write == Write::kAccumulate ? 1.0f : 0.0f, dweight, in);
    if (has_bias) {
      ForColumnStrips(pool_, out, [=](int64_t begin, int64_t width) {
        float sums[kColumnStrip] = {};
        for (int64_t n = 0; n < tokens; ++n) {
          const float* row = dy + n * out + begin;
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) sums[c] += row[c];
        }
        Store(sums, width, write, dbias + begin);
      });
    }
    return absl::OkStatus();
  });
}

}  // namespace dim0::cpu
