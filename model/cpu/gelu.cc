#include "model/cpu/cpu_kernels.h"
#include "model/cpu/vector_math.h"
#include "runtime/check.h"

namespace dim0::cpu {
namespace {

// Items of a range given to one thread at the least; a multiple of the vector width, so that where
// the ranges are cut does not change which items go through the vector loop.
constexpr int64_t kGrain = 4096;

// gelu(x) = 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
constexpr float kTwiceRoot2OverPi = 1.59576912f;
constexpr float kCubic = 0.044715f;

inline float Gelu(float x) {
  const float twice_u = kTwiceRoot2OverPi * (x + kCubic * x * x * x);
  return x / (1.0f + Exp(-twice_u));
}

// gelu'(x) = s + x s (1 - s) (2u)', s = sigmoid(2u).
inline float GeluDerivative(float x) {
  // Outside [-10, 10] the derivative is 0 or 1 to 1e-35, and x^2 could overflow. NaN stays.
  x = x > 10.0f ? 10.0f : x;
  x = x < -10.0f ? -10.0f : x;
  const float square = x * x;
  const float twice_u = kTwiceRoot2OverPi * (x + kCubic * x * square);
  const float e = Exp(-twice_u);
  const float s = 1.0f / (1.0f + e);
  // 1 - s = e s, without cancellation.
  return s + x * ((e * s) * s) * kTwiceRoot2OverPi * (1.0f + 3.0f * kCubic * square);
}

bool SameShape(const Tensor& a, const Tensor& b) { return a.rows == b.rows && a.cols == b.cols; }

}  // namespace

void CpuKernels::GeluForward(Stream& stream, const Tensor& x, const Tensor& y) {
  DIM0_CHECK(SameShape(x, y));
  // About 30 operations an element, the exponential's included.
  OpInfo info{.name = "gelu_forward", .flops = 30.0 * x.size(), .bytes = 8.0 * x.size()};
  stream.Enqueue(std::move(info), [this, in = x.f32(), out = y.f32(), size = x.size()](auto&) {
    pool_.ParallelFor(size, kGrain, [=](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) out[i] = Gelu(in[i]);
    });
    return absl::OkStatus();
  });
}

void CpuKernels::GeluBackward(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& dx) {
  DIM0_CHECK(SameShape(x, dy) && SameShape(x, dx));
  OpInfo info{.name = "gelu_backward", .flops = 40.0 * x.size(), .bytes = 12.0 * x.size()};
  stream.Enqueue(std::move(info),
                 [this, grad = dy.f32(), in = x.f32(), out = dx.f32(), size = x.size()](auto&) {
                   pool_.ParallelFor(size, kGrain, [=](int64_t begin, int64_t end) {
#pragma omp simd
                     for (int64_t i = begin; i < end; ++i) out[i] = grad[i] * GeluDerivative(in[i]);
                   });
                   return absl::OkStatus();
                 });
}

}  // namespace dim0::cpu
