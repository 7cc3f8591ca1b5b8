// Sums over rows, column by column: the gradients of biases and gains.
#ifndef DIM0_MODEL_CPU_COLUMN_SUMS_H_
#define DIM0_MODEL_CPU_COLUMN_SUMS_H_

#include <algorithm>
#include <cstdint>

#include "runtime/cpu/thread_pool.h"

namespace dim0::cpu {

// Columns whose running sums one pass keeps, in L1.
inline constexpr int64_t kColumnStrip = 256;

// Cuts `columns` into strips of at most kColumnStrip and calls body(begin, width) for each, over
// the pool. A column's sum is one thread's, over rows in order, so it does not depend on the cut.
template <typename Body>
void ForColumnStrips(ThreadPool& pool, int64_t columns, const Body& body) {
  // Whole cache lines, so that no two threads write one.
  constexpr int64_t kGrain = 64;
  pool.ParallelFor(columns, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; column += kColumnStrip) {
      body(column, std::min(kColumnStrip, end - column));
    }
  });
}

}  // namespace dim0::cpu

#endif  // DIM0_MODEL_CPU_COLUMN_SUMS_H_
