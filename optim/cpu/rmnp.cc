#include "optim/cpu/rmnp.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace dim0::cpu {
namespace {

// Elements a thread must have before another one is woken.
constexpr int64_t kGrain = 1 << 14;

// Sums in this many lanes, whatever the alignment, so that a row's sum is the same in every shard.
constexpr int64_t kLanes = 16;

float SumOfSquares(const float* x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += x[i + j] * x[i + j];
  }
  for (; i < n; ++i) lanes[i % kLanes] += x[i] * x[i];
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// V <- mu V + scale G; out = scale G + mu V or V.
void MomentumRow(const float* __restrict gradient, float* __restrict momentum, int64_t n,
                 const RmnpArguments& a, float* __restrict out) {
  const float scale = *a.gradient_scale;
  const auto mu = static_cast<float>(a.momentum);
  const bool nesterov = a.nesterov;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = scale * gradient[i];
    const float v = mu * momentum[i] + g;
    momentum[i] = v;
    out[i] = nesterov ? g + mu * v : v;
  }
}

// U from a momentum that is up to date.
void DirectionRow(const float* __restrict gradient, const float* __restrict momentum, int64_t n,
                  const RmnpArguments& a, float* __restrict out) {
  const float scale = *a.gradient_scale;
  const auto mu = static_cast<float>(a.momentum);
  const bool nesterov = a.nesterov;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    out[i] = nesterov ? scale * gradient[i] + mu * momentum[i] : momentum[i];
  }
}

void ApplyRow(float* __restrict w, const float* __restrict direction, int64_t n, float squares,
              double scale, const RmnpArguments& a) {
  const double norm = std::max(std::sqrt(double{squares}), a.eps);
  const auto step = static_cast<float>(a.lr * scale / std::pow(norm, 1 - a.power));
  const auto keep = static_cast<float>(1 - a.lr * a.weight_decay);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = keep * w[i] - step * direction[i];
}

// Calls body(offset of the row's first element, row, scratch of one row) for all rows.
template <typename Body>
void ForEachRow(ThreadPool& pool, const RmnpTensor& matrix, Body body) {
  const int64_t cols = matrix.value.cols;
  if (cols == 0) return;
  pool.ParallelFor(matrix.value.rows, std::max<int64_t>(1, kGrain / cols),
                   [&](int64_t begin, int64_t end) {
                     std::vector<float> direction(cols);
                     for (int64_t row = begin; row < end; ++row) {
                       body(row * cols, row, direction.data());
                     }
                   });
}

}  // namespace

void UpdateRmnp(ThreadPool& pool, const std::vector<RmnpTensor>& matrices,
                const RmnpArguments& arguments) {
  for (const RmnpTensor& matrix : matrices) {
    const int64_t cols = matrix.value.cols;
    ForEachRow(pool, matrix, [&](int64_t offset, int64_t, float* direction) {
      MomentumRow(matrix.gradient.f32() + offset, matrix.momentum.f32() + offset, cols, arguments,
                  direction);
      ApplyRow(matrix.value.f32() + offset, direction, cols, SumOfSquares(direction, cols),
               matrix.scale, arguments);
    });
  }
}

void AccumulateRmnpRowSquares(ThreadPool& pool, const std::vector<RmnpTensor>& parts,
                              const RmnpArguments& arguments) {
  for (const RmnpTensor& part : parts) {
    const int64_t cols = part.value.cols;
    ForEachRow(pool, part, [&](int64_t offset, int64_t row, float* direction) {
      MomentumRow(part.gradient.f32() + offset, part.momentum.f32() + offset, cols, arguments,
                  direction);
      part.row_squares[row] = SumOfSquares(direction, cols);
    });
  }
}

void ApplyRmnp(ThreadPool& pool, const std::vector<RmnpTensor>& parts,
               const RmnpArguments& arguments) {
  for (const RmnpTensor& part : parts) {
    const int64_t cols = part.value.cols;
    ForEachRow(pool, part, [&](int64_t offset, int64_t row, float* direction) {
      DirectionRow(part.gradient.f32() + offset, part.momentum.f32() + offset, cols, arguments,
                   direction);
      ApplyRow(part.value.f32() + offset, direction, cols, part.row_squares[row], part.scale,
               arguments);
    });
  }
}

}  // namespace dim0::cpu
