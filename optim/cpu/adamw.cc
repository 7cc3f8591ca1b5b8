#include "optim/cpu/adamw.h"

#include <cmath>
#include <cstdint>

#include "optim/cpu/tensor_ranges.h"
#include "runtime/cpu/elements.h"

namespace dim0::cpu {
namespace {

// Elements a thread must have before another one is woken.
constexpr int64_t kGrain = 1 << 14;

// What all elements of a step share; made in float64 and rounded once.
struct Coefficients {
  float gradient_scale;
  float beta1, fresh1, beta2, fresh2;
  float step_size;        // lr / (1 - beta1^t)
  float root_correction;  // 1 / sqrt(1 - beta2^t)
  float eps;
};

Coefficients CoefficientsOf(const AdamWArguments& arguments) {
  const auto step = static_cast<double>(arguments.step);
  const auto rounded = [](double value) { return static_cast<float>(value); };
  return {.gradient_scale = *arguments.gradient_scale,
          .beta1 = rounded(arguments.beta1),
          .fresh1 = rounded(1 - arguments.beta1),
          .beta2 = rounded(arguments.beta2),
          .fresh2 = rounded(1 - arguments.beta2),
          .step_size = rounded(arguments.lr / (1 - std::pow(arguments.beta1, step))),
          .root_correction = rounded(1 / std::sqrt(1 - std::pow(arguments.beta2, step))),
          .eps = rounded(arguments.eps)};
}

// `keep` is 1 - lr wd.
template <bool kCopy, typename Value, typename Gradient>
void UpdateRange(const AdamWTensor& tensor, Value* __restrict value,
                 const Gradient* __restrict gradient, const Coefficients& c, float keep,
                 int64_t begin, int64_t end) {
  float* __restrict first = tensor.first_moment.f32();
  float* __restrict second = tensor.second_moment.f32();
  auto* __restrict copy = static_cast<BFloat16*>(tensor.copy.data);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = c.gradient_scale * static_cast<float>(gradient[i]);
    const float m = c.beta1 * first[i] + c.fresh1 * g;
    const float v = c.beta2 * second[i] + c.fresh2 * g * g;
    first[i] = m;
    second[i] = v;
    const float w = keep * static_cast<float>(value[i]) -
                    c.step_size * m / (std::sqrt(v) * c.root_correction + c.eps);
    Set(w, value[i]);
    if constexpr (kCopy) Set(w, copy[i]);
  }
}

void UpdateRange(const AdamWTensor& tensor, const Coefficients& c, float keep, int64_t begin,
                 int64_t end) {
  WithElements(tensor.value, [&](auto* value) {
    WithElements(tensor.gradient, [&](auto* gradient) {
      if (tensor.copy.rows > 0) {
        UpdateRange<true>(tensor, value, gradient, c, keep, begin, end);
      } else {
        UpdateRange<false>(tensor, value, gradient, c, keep, begin, end);
      }
    });
  });
}

}  // namespace

void UpdateAdamW(ThreadPool& pool, const std::vector<AdamWTensor>& tensors,
                 const AdamWArguments& arguments) {
  const Coefficients coefficients = CoefficientsOf(arguments);
  ForEachTensorRange(
      pool, tensors, kGrain, [&](const AdamWTensor& tensor, int64_t begin, int64_t end) {
        UpdateRange(tensor, coefficients,
                    static_cast<float>(1 - arguments.lr * tensor.weight_decay), begin, end);
      });
}

}  // namespace dim0::cpu
