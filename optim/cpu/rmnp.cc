#include "optim/cpu/rmnp.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "runtime/cpu/elements.h"

namespace dim0::cpu {
namespace {

// Elements a thread must have before another one is woken.
constexpr int64_t kGrain = 1 << 14;

// Elements are taken a cache line at a time, counted from the row's begin. A row's squares are
// summed in as many lanes, so that the sum is the same in every shard.
constexpr int64_t kLanes = 16;

// Calls body(i, lane) for all i in [0, n), and before each full kLanes of them soon(i), which may
// prefetch.
template <typename Body, typename Soon>
inline void ForEachElement(int64_t n, Soon soon, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    soon(i);
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) body(i + lane, lane);
  }
  for (; i < n; ++i) body(i, i % kLanes);
}

// About 1.1e-19. The squares of a shorter row lose their digits in float32, or vanish, and say
// nothing of its norm.
const double kShortestNorm = std::sqrt(double{std::numeric_limits<float>::min()});

// One row, or a part of one. The sweeps below ask for what the sweep after them needs, so that
// memory is never idle; what lies past the last row is asked for in vain and does no harm.
template <typename Value, typename Gradient>
struct Row {
  Value* __restrict value;
  const Gradient* __restrict gradient;
  float* __restrict momentum;
  BFloat16* __restrict copy;  // null: none
  int64_t size;
};

// Calls body with row `row`, of the types that the matrix has.
template <typename Body>
void WithRow(const RmnpTensor& matrix, int64_t row, Body body) {
  const int64_t cols = matrix.value.cols;
  WithElements(matrix.value, [&](auto* value) {
    WithElements(matrix.gradient, [&](auto* gradient) {
      using Value = std::remove_reference_t<decltype(*value)>;
      using Gradient = std::remove_reference_t<decltype(*gradient)>;
      body(Row<Value, Gradient>{value + row * cols, gradient + row * cols,
                                matrix.momentum.f32() + row * cols,
                                static_cast<BFloat16*>(matrix.copy.at(row * cols)), cols});
    });
  });
}

template <bool kNesterov>
inline float Direction(float gradient, float momentum, float mu) {
  return kNesterov ? gradient + mu * momentum : momentum;
}

// V <- mu V + G; returns the sum of U^2.
template <bool kNesterov, typename Row>
float UpdateMomentum(const Row& row, const RmnpArguments& arguments) {
  const float scale = *arguments.gradient_scale;
  const auto mu = static_cast<float>(arguments.momentum);
  float squares[kLanes] = {};
  ForEachElement(
      row.size, [&](int64_t i) { __builtin_prefetch(row.value + i, 1); },
      [&](int64_t i, int64_t lane) {
        const float gradient = scale * static_cast<float>(row.gradient[i]);
        const float momentum = mu * row.momentum[i] + gradient;
        row.momentum[i] = momentum;
        const float direction = Direction<kNesterov>(gradient, momentum, mu);
        squares[lane] += direction * direction;
      });
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) squares[lane] += squares[lane + half];
  }
  return squares[0];
}

// Makes U again, from the gradient and the momentum that are still in the caches (in halves of an
// update, from memory), and updates the values. `squares` is the sum over the whole row.
template <bool kNesterov, typename Row>
void UpdateValues(const Row& row, float squares, double scale, const RmnpArguments& arguments) {
  const double norm = std::max({std::sqrt(double{squares}), arguments.eps, kShortestNorm});
  const double divisor = arguments.power == 0 ? norm : std::pow(norm, 1 - arguments.power);
  // Finite, so that a zero row stays zero whatever the learning rate is.
  const auto step = static_cast<float>(
      std::min(arguments.lr * scale / divisor, double{std::numeric_limits<float>::max()}));
  const auto keep = static_cast<float>(1 - arguments.lr * arguments.weight_decay);
  const float gradient_scale = *arguments.gradient_scale;
  const auto mu = static_cast<float>(arguments.momentum);
  const auto update = [&](auto has_copy) {
    ForEachElement(
        row.size,
        [&](int64_t i) {
          __builtin_prefetch(row.gradient + row.size + i, 0);
          __builtin_prefetch(row.momentum + row.size + i, 1);
        },
        [&](int64_t i, int64_t) {
          const float direction = Direction<kNesterov>(
              gradient_scale * static_cast<float>(row.gradient[i]), row.momentum[i], mu);
          const float value = keep * static_cast<float>(row.value[i]) - step * direction;
          Set(value, row.value[i]);
          if constexpr (has_copy) Set(value, row.copy[i]);
        });
  };
  if (row.copy != nullptr) {
    update(std::true_type());
  } else {
    update(std::false_type());
  }
}

// Calls body(matrix, row) for the rows of all matrices, in one parallel loop: the threads are woken
// once however small the matrices are.
template <typename Body>
void ForEachRow(ThreadPool& pool, const std::vector<RmnpTensor>& matrices, Body body) {
  int64_t elements = 0;
  for (const RmnpTensor& matrix : matrices) elements += matrix.value.size();
  pool.ParallelFor(elements, kGrain, [&](int64_t begin, int64_t end) {
    // A row is done where its first element lies.
    int64_t first = 0;
    for (const RmnpTensor& matrix : matrices) {
      const auto rows_before = [&](int64_t element) {
        const int64_t within = std::clamp<int64_t>(element - first, 0, matrix.value.size());
        return (within + matrix.value.cols - 1) / matrix.value.cols;
      };
      if (matrix.value.size() == 0) continue;
      const int64_t end_row = rows_before(end);
      for (int64_t row = rows_before(begin); row < end_row; ++row) body(matrix, row);
      first += matrix.value.size();
    }
  });
}

// Calls body(std::true_type or std::false_type), so that the choice costs nothing per element.
template <typename Body>
void WithNesterov(bool nesterov, Body body) {
  if (nesterov) {
    body(std::true_type());
  } else {
    body(std::false_type());
  }
}

}  // namespace

void UpdateRmnp(ThreadPool& pool, const std::vector<RmnpTensor>& matrices,
                const RmnpArguments& arguments) {
  WithNesterov(arguments.nesterov, [&](auto nesterov) {
    ForEachRow(pool, matrices, [&](const RmnpTensor& matrix, int64_t i) {
      WithRow(matrix, i, [&](const auto& row) {
        const float squares = UpdateMomentum<nesterov>(row, arguments);
        UpdateValues<nesterov>(row, squares, matrix.scale, arguments);
      });
    });
  });
}

void AccumulateRmnpRowSquares(ThreadPool& pool, const std::vector<RmnpTensor>& parts,
                              const RmnpArguments& arguments) {
  WithNesterov(arguments.nesterov, [&](auto nesterov) {
    ForEachRow(pool, parts, [&](const RmnpTensor& part, int64_t i) {
      WithRow(part, i, [&](const auto& row) {
        part.row_squares[i] = UpdateMomentum<nesterov>(row, arguments);
      });
    });
  });
}

void ApplyRmnp(ThreadPool& pool, const std::vector<RmnpTensor>& parts,
               const RmnpArguments& arguments) {
  WithNesterov(arguments.nesterov, [&](auto nesterov) {
    ForEachRow(pool, parts, [&](const RmnpTensor& part, int64_t i) {
      WithRow(part, i, [&](const auto& row) {
        UpdateValues<nesterov>(row, part.row_squares[i], part.scale, arguments);
      });
    });
  });
}

}  // namespace dim0::cpu
