#include <cfloat>
#include <cstdint>
#include <span>

#include "optim/cuda/item_table.h"
#include "optim/cuda/kernels.h"
#include "runtime/cuda/element_type.h"
#include "runtime/cuda/kernel.h"
#include "runtime/cuda/quad.h"

namespace dim0::cuda {
namespace {

// A row is one warp's, or where it is too long for that, one block's. Which of the two, and which
// thread takes which elements, depends on the row's length only; so does the order in which its
// squares are summed.
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
// A thread keeps up to so many quads of the row's direction between the sum and the update, so that
// the row passes through memory once.
constexpr int kQuadsKept = 16;
// Of which it reads so many before it works on them.
constexpr int kQuadsAtOnce = 4;
constexpr int64_t kWarpColumns = int64_t{kWarpSize} * kQuad * kQuadsKept;
constexpr int64_t kBlockColumns = int64_t{kThreads} * kQuad * kQuadsKept;

using RmnpTable = ItemTable<RmnpItem, 48>;
static_assert(sizeof(RmnpTable) + sizeof(RmnpCoefficients) + sizeof(float*) <= 4096);

int64_t RowsPerBlock(int64_t cols) { return cols <= kWarpColumns ? kWarps : 1; }

// One row as one thread sees it: this thread's quads begin at `first` and lie `step` apart.
template <typename Value, typename Gradient>
struct Row {
  Value* value;
  const Gradient* gradient;
  float* momentum;
  __nv_bfloat16* copy;
  int64_t cols, first, step;
  bool aligned;
};

// The squares of a shorter row lose their digits in float32, or vanish, and say nothing of its
// norm. About 1.1e-19.
__device__ __forceinline__ double ShortestNorm() { return sqrt(double{FLT_MIN}); }

// What a row's direction is multiplied by. Finite, so that a zero row stays zero whatever the
// learning rate is.
__device__ float StepOf(float squares, double step, const RmnpCoefficients& c) {
  const double norm = fmax(fmax(sqrt(double{squares}), c.eps), ShortestNorm());
  const double divisor = c.power == 0 ? norm : pow(norm, 1 - c.power);
  return static_cast<float>(fmin(step / divisor, double{FLT_MAX}));
}

// V <- mu V + G for the quads from i on, kQuadsAtOnce of them; u gets U and *squares its squares.
template <typename Value, typename Gradient>
__device__ __forceinline__ void UpdateMomentum(const Row<Value, Gradient>& row, int64_t i,
                                               float scale, const RmnpCoefficients& c,
                                               float (*u)[kQuad], float* squares) {
  float v[kQuadsAtOnce][kQuad];
#pragma unroll
  for (int k = 0; k < kQuadsAtOnce; ++k) {
    const int64_t at = i + k * row.step;
    if (at >= row.cols) continue;
    LoadQuad(row.gradient + at, row.cols - at, row.aligned, u[k]);
    LoadQuad(row.momentum + at, row.cols - at, row.aligned, v[k]);
  }
#pragma unroll
  for (int k = 0; k < kQuadsAtOnce; ++k) {
    const int64_t at = i + k * row.step;
    if (at >= row.cols) continue;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const float gradient = scale * u[k][j];
      v[k][j] = c.momentum * v[k][j] + gradient;
      u[k][j] = c.nesterov ? gradient + c.momentum * v[k][j] : v[k][j];
      // Behind the row's end all are zeros.
      *squares += u[k][j] * u[k][j];
    }
    StoreQuad(row.momentum + at, row.cols - at, row.aligned, v[k]);
  }
}

// W <- keep W - step U for the quads from i on.
template <typename Value, typename Gradient>
__device__ __forceinline__ void UpdateValues(const Row<Value, Gradient>& row, int64_t i, float keep,
                                             float step, const float (*u)[kQuad]) {
  float w[kQuadsAtOnce][kQuad];
#pragma unroll
  for (int k = 0; k < kQuadsAtOnce; ++k) {
    const int64_t at = i + k * row.step;
    if (at < row.cols) LoadQuad(row.value + at, row.cols - at, row.aligned, w[k]);
  }
#pragma unroll
  for (int k = 0; k < kQuadsAtOnce; ++k) {
    const int64_t at = i + k * row.step;
    if (at >= row.cols) continue;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) w[k][j] = keep * w[k][j] - step * u[k][j];
    StoreQuad(row.value + at, row.cols - at, row.aligned, w[k]);
    if (row.copy != nullptr) StoreQuad(row.copy + at, row.cols - at, row.aligned, w[k]);
  }
}

// U for the quads from i on, from the gradient and the momentum after its update.
template <typename Value, typename Gradient>
__device__ __forceinline__ void ReadDirection(const Row<Value, Gradient>& row, int64_t i,
                                              float scale, const RmnpCoefficients& c,
                                              float (*u)[kQuad]) {
#pragma unroll
  for (int k = 0; k < kQuadsAtOnce; ++k) {
    const int64_t at = i + k * row.step;
    if (at >= row.cols) continue;
    float v[kQuad];
    LoadQuad(row.gradient + at, row.cols - at, row.aligned, u[k]);
    LoadQuad(row.momentum + at, row.cols - at, row.aligned, v);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      u[k][j] = c.nesterov ? scale * u[k][j] + c.momentum * v[j] : v[j];
    }
  }
}

template <RmnpPhase kPhase, typename Value, typename Gradient>
__global__ void __launch_bounds__(kThreads)
    RmnpKernel(const RmnpTable table, const RmnpCoefficients c, const float* gradient_scale) {
  const float scale = *gradient_scale;
  if (!isfinite(scale)) return;
  const int block = static_cast<int>(blockIdx.x);
  const int index = table.ItemOf(block);
  const RmnpItem& item = table.items[index];
  const bool by_warp = item.cols <= kWarpColumns;
  const int64_t block_of_item = block - table.first_block[index];
  const int64_t row_index =
      by_warp ? block_of_item * kWarps + threadIdx.x / kWarpSize : block_of_item;
  if (row_index >= item.rows) return;  // a whole warp, in a kernel part without barriers

  const int64_t start = row_index * item.cols;
  Row<Value, Gradient> row;
  row.value = static_cast<Value*>(item.value) + start;
  row.gradient = static_cast<const Gradient*>(item.gradient) + start;
  row.momentum = item.momentum + start;
  row.copy = item.copy == nullptr ? nullptr : item.copy + start;
  row.cols = item.cols;
  row.first = (by_warp ? threadIdx.x % kWarpSize : threadIdx.x) * kQuad;
  row.step = (by_warp ? kWarpSize : kThreads) * kQuad;
  row.aligned = IsQuadAligned(row.value) && IsQuadAligned(row.gradient) &&
                IsQuadAligned(row.momentum) && IsQuadAligned(row.copy);
  const int64_t stride = row.step * kQuadsAtOnce;

  const bool kept = kPhase == RmnpPhase::kUpdate && item.cols <= kBlockColumns;
  float u[kQuadsKept][kQuad];
  float squares = 0;
  if (kPhase == RmnpPhase::kApply) {
    squares = item.row_squares[row_index];
  } else {
    if (kept) {
#pragma unroll
      for (int k = 0; k < kQuadsKept; k += kQuadsAtOnce) {
        UpdateMomentum(row, row.first + k * row.step, scale, c, u + k, &squares);
      }
    } else {
      for (int64_t i = row.first; i < row.cols; i += stride) {
        UpdateMomentum(row, i, scale, c, u, &squares);
      }
    }
    squares = by_warp ? WarpSum(squares) : BlockSum(squares);
  }
  if (kPhase == RmnpPhase::kRowSquares) {
    if (row.first == 0) item.row_squares[row_index] = squares;
    return;
  }

  const float step = StepOf(squares, item.step, c);
  if (kept) {
#pragma unroll
    for (int k = 0; k < kQuadsKept; k += kQuadsAtOnce) {
      UpdateValues(row, row.first + k * row.step, c.keep, step, u + k);
    }
  } else {
    for (int64_t i = row.first; i < row.cols; i += stride) {
      ReadDirection(row, i, scale, c, u);
      UpdateValues(row, i, c.keep, step, u);
    }
  }
}

template <RmnpPhase kPhase>
cudaError_t LaunchPhase(ValueTypes types, std::span<const RmnpItem> items,
                        const RmnpCoefficients& coefficients, const float* gradient_scale,
                        cudaStream_t stream) {
  return WithElementType(types.value, [&](auto value_tag) {
    return WithElementType(types.gradient, [&](auto gradient_tag) {
      using Value = typename decltype(value_tag)::type;
      using Gradient = typename decltype(gradient_tag)::type;
      return LaunchTables<RmnpTable>(
          items,
          [](const RmnpItem& item) {
            return item.cols == 0 ? 0 : CeilDivide(item.rows, RowsPerBlock(item.cols));
          },
          [&](const RmnpTable& table) {
            return Launch(RmnpKernel<kPhase, Value, Gradient>, table.blocks(), kThreads, 0, stream,
                          table, coefficients, gradient_scale);
          });
    });
  });
}

}  // namespace

cudaError_t LaunchRmnp(RmnpPhase phase, ValueTypes types, std::span<const RmnpItem> items,
                       const RmnpCoefficients& coefficients, const float* gradient_scale,
                       cudaStream_t stream) {
  switch (phase) {
    case RmnpPhase::kRowSquares:
      return LaunchPhase<RmnpPhase::kRowSquares>(types, items, coefficients, gradient_scale,
                                                 stream);
    case RmnpPhase::kApply:
      return LaunchPhase<RmnpPhase::kApply>(types, items, coefficients, gradient_scale, stream);
    case RmnpPhase::kUpdate:
      break;
  }
  return LaunchPhase<RmnpPhase::kUpdate>(types, items, coefficients, gradient_scale, stream);
}

}  // namespace dim0::cuda
