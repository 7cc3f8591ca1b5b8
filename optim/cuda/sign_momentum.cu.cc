#include <cstdint>
#include <span>

#include "optim/cuda/item_table.h"
#include "optim/cuda/kernels.h"
#include "runtime/cuda/element_type.h"
#include "runtime/cuda/kernel.h"
#include "runtime/cuda/quad.h"

namespace dim0::cuda {
namespace {

constexpr int kThreads = 256;
// Each thread updates this many quads, so that several of its reads are under way at a time.
constexpr int kQuadsPerThread = 4;
constexpr int64_t kElementsPerBlock = int64_t{kThreads} * kQuad * kQuadsPerThread;

using SignMomentumTable = ItemTable<SignMomentumItem, 64>;
static_assert(sizeof(SignMomentumTable) + sizeof(SignMomentumCoefficients) + sizeof(float*) <=
              4096);

template <typename Value, typename Gradient>
__global__ void __launch_bounds__(kThreads)
    SignMomentumKernel(const SignMomentumTable table, const SignMomentumCoefficients c,
                       const float* gradient_scale) {
  const float scale = *gradient_scale;
  if (!isfinite(scale)) return;
  const int block = static_cast<int>(blockIdx.x);
  const int index = table.ItemOf(block);
  const SignMomentumItem& item = table.items[index];
  auto* const value = static_cast<Value*>(item.value);
  const auto* const gradient = static_cast<const Gradient*>(item.gradient);
  const bool aligned = IsQuadAligned(value) && IsQuadAligned(gradient) &&
                       IsQuadAligned(item.momentum) && IsQuadAligned(item.copy);

  int64_t i = (block - table.first_block[index]) * kElementsPerBlock + threadIdx.x * kQuad;
#pragma unroll
  for (int k = 0; k < kQuadsPerThread; ++k, i += kThreads * kQuad) {
    const int64_t count = item.size - i;
    if (count <= 0) return;
    float w[kQuad], g[kQuad], v[kQuad];
    LoadQuad(gradient + i, count, aligned, g);
    LoadQuad(item.momentum + i, count, aligned, v);
    LoadQuad(value + i, count, aligned, w);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      v[j] = c.momentum * v[j] + c.fresh * (scale * g[j]);
      const auto sign = static_cast<float>((v[j] > 0) - (v[j] < 0));
      w[j] = c.keep * w[j] - c.lr * sign;
    }
    StoreQuad(item.momentum + i, count, aligned, v);
    StoreQuad(value + i, count, aligned, w);
    if (item.copy != nullptr) StoreQuad(item.copy + i, count, aligned, w);
  }
}

}  // namespace

cudaError_t LaunchSignMomentum(ValueTypes types, std::span<const SignMomentumItem> items,
                               const SignMomentumCoefficients& coefficients,
                               const float* gradient_scale, cudaStream_t stream) {
  return WithElementType(types.value, [&](auto value_tag) {
    return WithElementType(types.gradient, [&](auto gradient_tag) {
      using Value = typename decltype(value_tag)::type;
      using Gradient = typename decltype(gradient_tag)::type;
      return LaunchTables<SignMomentumTable>(
          items,
          [](const SignMomentumItem& item) { return CeilDivide(item.size, kElementsPerBlock); },
          [&](const SignMomentumTable& table) {
            return Launch(SignMomentumKernel<Value, Gradient>, table.blocks(), kThreads, 0, stream,
                          table, coefficients, gradient_scale);
          });
    });
  });
}

}  // namespace dim0::cuda
