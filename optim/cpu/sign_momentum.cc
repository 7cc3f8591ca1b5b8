#include "optim/cpu/sign_momentum.h"

#include <cstdint>

#include "optim/cpu/tensor_ranges.h"
#include "runtime/cpu/elements.h"

namespace dim0::cpu {
namespace {

// Elements a thread must have before another one is woken.
constexpr int64_t kGrain = 1 << 14;

// Made in float64 and rounded once.
struct Coefficients {
  float gradient_scale, momentum, fresh, lr, keep;
};

template <bool kCopy, typename Value, typename Gradient>
void UpdateRange(const SignMomentumTensor& tensor, Value* __restrict value,
                 const Gradient* __restrict gradient, const Coefficients& c, int64_t begin,
                 int64_t end) {
  float* __restrict momentum = tensor.momentum.f32();
  auto* __restrict copy = static_cast<BFloat16*>(tensor.copy.data);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = c.gradient_scale * static_cast<float>(gradient[i]);
    const float v = c.momentum * momentum[i] + c.fresh * g;
    momentum[i] = v;
    const auto sign = static_cast<float>((v > 0) - (v < 0));
    const float w = c.keep * static_cast<float>(value[i]) - c.lr * sign;
    Set(w, value[i]);
    if constexpr (kCopy) Set(w, copy[i]);
  }
}

}  // namespace

void UpdateSignMomentum(ThreadPool& pool, const std::vector<SignMomentumTensor>& tensors,
                        const SignMomentumArguments& arguments) {
  const Coefficients c = {.gradient_scale = *arguments.gradient_scale,
                          .momentum = static_cast<float>(arguments.momentum),
                          .fresh = static_cast<float>(1 - arguments.momentum),
                          .lr = static_cast<float>(arguments.lr),
                          .keep = static_cast<float>(1 - arguments.lr * arguments.weight_decay)};
  ForEachTensorRange(pool, tensors, kGrain,
                     [&](const SignMomentumTensor& tensor, int64_t begin, int64_t end) {
                       WithElements(tensor.value, [&](auto* value) {
                         WithElements(tensor.gradient, [&](const auto* gradient) {
                           if (tensor.copy.rows > 0) {
                             UpdateRange<true>(tensor, value, gradient, c, begin, end);
                           } else {
                             UpdateRange<false>(tensor, value, gradient, c, begin, end);
                           }
                         });
                       });
                     });
}

}  // namespace dim0::cpu
