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

using AdamWTable = ItemTable<AdamWItem, 64>;
static_assert(sizeof(AdamWTable) + sizeof(AdamWCoefficients) + sizeof(float*) <= 4096);

template <typename Value, typename Gradient>
__global__ void __launch_bounds__(kThreads)
    AdamWKernel(const AdamWTable table, const AdamWCoefficients c, const float* gradient_scale) {
  const float scale = *gradient_scale;
  if (!isfinite(scale)) return;
  const int block = static_cast<int>(blockIdx.x);
  const int index = table.ItemOf(block);
  const AdamWItem& item = table.items[index];
  auto* const value = static_cast<Value*>(item.value);
  const auto* const gradient = static_cast<const Gradient*>(item.gradient);
  const bool aligned = IsQuadAligned(value) && IsQuadAligned(gradient) &&
                       IsQuadAligned(item.first_moment) && IsQuadAligned(item.second_moment) &&
                       IsQuadAligned(item.copy);

  int64_t i = (block - table.first_block[index]) * kElementsPerBlock + threadIdx.x * kQuad;
#pragma unroll
  for (int k = 0; k < kQuadsPerThread; ++k, i += kThreads * kQuad) {
    const int64_t count = item.size - i;
    if (count <= 0) return;
    float w[kQuad], g[kQuad], m[kQuad], v[kQuad];
    LoadQuad(gradient + i, count, aligned, g);
    LoadQuad(item.first_moment + i, count, aligned, m);
    LoadQuad(item.second_moment + i, count, aligned, v);
    LoadQuad(value + i, count, aligned, w);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const float scaled = scale * g[j];
      m[j] = c.beta1 * m[j] + c.fresh1 * scaled;
      v[j] = c.beta2 * v[j] + c.fresh2 * scaled * scaled;
      w[j] = item.keep * w[j] - c.step_size * m[j] / (sqrtf(v[j]) * c.root_correction + c.eps);
    }
    StoreQuad(item.first_moment + i, count, aligned, m);
    StoreQuad(item.second_moment + i, count, aligned, v);
    StoreQuad(value + i, count, aligned, w);
    if (item.copy != nullptr) StoreQuad(item.copy + i, count, aligned, w);
  }
}

}  // namespace

cudaError_t LaunchAdamW(ValueTypes types, std::span<const AdamWItem> items,
                        const AdamWCoefficients& coefficients, const float* gradient_scale,
                        cudaStream_t stream) {
  return WithElementType(types.value, [&](auto value_tag) {
    return WithElementType(types.gradient, [&](auto gradient_tag) {
      using Value = typename decltype(value_tag)::type;
      using Gradient = typename decltype(gradient_tag)::type;
      return LaunchTables<AdamWTable>(
          items, [](const AdamWItem& item) { return CeilDivide(item.size, kElementsPerBlock); },
          [&](const AdamWTable& table) {
            return Launch(AdamWKernel<Value, Gradient>, table.blocks(), kThreads, 0, stream, table,
                          coefficients, gradient_scale);
          });
    });
  });
}

}  // namespace dim0::cuda
