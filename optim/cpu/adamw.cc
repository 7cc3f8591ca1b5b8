#include "optim/cpu/adamw.h"

#include <cmath>
#include <cstdint>

namespace dim0::cpu {
namespace {

// Elements a thread must have before another one is woken.
constexpr int64_t kGrain = 1 << 14;

void UpdateRange(const AdamWTensor& tensor, const AdamWArguments& a, int64_t begin, int64_t end) {
  float* __restrict w = tensor.value.f32();
  const float* __restrict g = tensor.gradient.f32();
  float* __restrict m = tensor.first_moment.f32();
  float* __restrict v = tensor.second_moment.f32();
  const float scale = *a.gradient_scale;
  // The scalars are made in float64 and rounded once.
  const auto keep = static_cast<float>(1 - a.lr * tensor.weight_decay);
  const auto step = static_cast<double>(a.step);
  const auto step_size = static_cast<float>(a.lr / (1 - std::pow(a.beta1, step)));
  const auto root_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(a.beta2, step)));
  const auto beta1 = static_cast<float>(a.beta1), fresh1 = static_cast<float>(1 - a.beta1);
  const auto beta2 = static_cast<float>(a.beta2), fresh2 = static_cast<float>(1 - a.beta2);
  const auto eps = static_cast<float>(a.eps);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float gradient = scale * g[i];
    m[i] = beta1 * m[i] + fresh1 * gradient;
    v[i] = beta2 * v[i] + fresh2 * gradient * gradient;
    w[i] = keep * w[i] - step_size * m[i] / (std::sqrt(v[i]) * root_correction + eps);
  }
}

}  // namespace

void UpdateAdamW(ThreadPool& pool, const std::vector<AdamWTensor>& tensors,
                 const AdamWArguments& arguments) {
  for (const AdamWTensor& tensor : tensors) {
    pool.ParallelFor(tensor.value.size(), kGrain, [&](int64_t begin, int64_t end) {
      UpdateRange(tensor, arguments, begin, end);
    });
  }
}

}  // namespace dim0::cpu
