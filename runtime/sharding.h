// Row sharding: which rows of a parameter a rank stores. One rule, no divisibility condition.
#ifndef DIM0_RUNTIME_SHARDING_H_
#define DIM0_RUNTIME_SHARDING_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dim0 {

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Rank r of N stores rows [r c, min((r+1) c, rows)) with c = ceil(rows / N); the last ranks may
// store fewer or none.
inline RowRange RowsOfRank(int64_t rows, int world_size, int rank) {
  const int64_t chunk = (rows + world_size - 1) / world_size;
  return {std::min(rank * chunk, rows), std::min((rank + 1) * chunk, rows)};
}

// The rank that stores `row`.
inline int RankOfRow(int64_t rows, int world_size, int64_t row) {
  return static_cast<int>(row / ((rows + world_size - 1) / world_size));
}

// Every rank's number of elements of a [rows, cols] parameter.
inline std::vector<int64_t> ElementsPerRank(int64_t rows, int64_t cols, int world_size) {
  std::vector<int64_t> counts(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    counts[rank] = RowsOfRank(rows, world_size, rank).size() * cols;
  }
  return counts;
}

}  // namespace dim0

#endif  // DIM0_RUNTIME_SHARDING_H_
