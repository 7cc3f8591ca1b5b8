#include <algorithm>
#include <array>
#include <cmath>

#include "model/cpu/cpu_kernels.h"
#include "model/cpu/row_math.h"
#include "runtime/check.h"

namespace dim0::cpu {
namespace {

constexpr int32_t kIgnored = -1;

// The sum of e^x over a row as e^max * sum. Kept apart, because the logarithm of the whole, rounded
// to a float, would lose what large logits differ by.
struct SumOfExps {
  float max = kLowest;
  double sum = 0;
};

// Reads the row from memory once: each chunk's maximum is found while it is brought into L1, and
// its sum is taken from there. The sum is NaN if any x is NaN or +inf.
SumOfExps SumExps(const float* x, int64_t count) {
  // Short enough for a float32 sum of so many terms to keep its digits.
  constexpr int64_t kChunk = 512;
  SumOfExps result;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t size = std::min(kChunk, count - begin);
    const float max = Max(x + begin, size, result.max);
    if (max > result.max) result.sum *= std::exp(static_cast<double>(result.max) - max);
    result.max = max;
    result.sum += SumExp(x + begin, size, max);
  }
  return result;
}

// Adds to *loss_sum the loss of `count` rows, `row_length` elements apart, and calls finish(n,
// target, sum of exponentials) for each row n while it is in cache (the sum is that of nothing for
// a row without a target). A row's loss comes from one thread and rows are added in order, so the
// sum does not depend on the number of threads.
template <typename Finish>
void ForEachRow(ThreadPool& pool, const float* logits, const int32_t* targets, int64_t count,
                int64_t vocabulary, int64_t row_length, double* loss_sum, const Finish& finish) {
  std::array<double, 1024> losses;
  const int64_t batch = static_cast<int64_t>(losses.size());
  for (int64_t first = 0; first < count; first += batch) {
    const int64_t rows = std::min(batch, count - first);
    pool.ParallelFor(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = first + i;
        const int32_t target = targets[n];
        DIM0_CHECK(kIgnored <= target && target < vocabulary);
        losses[i] = 0;
        SumOfExps exps;
        if (target != kIgnored) {
          const float* row = logits + n * row_length;
          exps = SumExps(row, vocabulary);
          losses[i] = std::log(exps.sum) + (static_cast<double>(exps.max) - row[target]);
        }
        finish(n, target, exps);
      }
    });
    for (int64_t i = 0; i < rows; ++i) *loss_sum += losses[i];
  }
}

}  // namespace

void CpuKernels::CrossEntropyForward(Stream& stream, const Tensor& logits, int64_t vocabulary,
                                     const int32_t* targets, double* loss_sum) {
  const int64_t count = logits.rows, row_length = logits.cols;
  DIM0_CHECK(vocabulary <= row_length);
  // About 20 operations an element, the exponential's included.
  OpInfo info{.name = "cross_entropy_forward",
              .flops = 20.0 * count * vocabulary,
              .bytes = 4.0 * count * vocabulary + 4.0 * count};
  stream.Enqueue(std::move(info), [=, this, logits = logits.f32()](auto&) {
    ForEachRow(pool_, logits, targets, count, vocabulary, row_length, loss_sum,
               [](int64_t, int32_t, const SumOfExps&) {});
    return absl::OkStatus();
  });
}

void CpuKernels::CrossEntropyForwardBackward(Stream& stream, const Tensor& logits,
                                             int64_t vocabulary, const int32_t* targets,
                                             float scale, double* loss_sum) {
  const int64_t count = logits.rows, row_length = logits.cols;
  DIM0_CHECK(vocabulary <= row_length);
  OpInfo info{.name = "cross_entropy_forward_backward",
              .flops = 40.0 * count * vocabulary,
              .bytes = 8.0 * count * vocabulary + 4.0 * count};
  stream.Enqueue(std::move(info), [=, this, logits = logits.f32()](auto&) {
    ForEachRow(pool_, logits, targets, count, vocabulary, row_length, loss_sum,
               [=](int64_t n, int32_t target, const SumOfExps& exps) {
                 float* row = logits + n * row_length;
                 if (target == kIgnored) {
                   std::fill_n(row, vocabulary, 0.0f);
                   return;
                 }
                 const float max = exps.max;
                 const float factor = static_cast<float>(scale / exps.sum);
#pragma omp simd
                 for (int64_t v = 0; v < vocabulary; ++v) row[v] = Exp(row[v] - max) * factor;
                 row[target] -= scale;
               });
    return absl::OkStatus();
  });
}

}  // namespace dim0::cpu
