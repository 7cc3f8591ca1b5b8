// What benchmarks print of repeated measurements.
#ifndef DIM0_RUNTIME_MEDIAN_H_
#define DIM0_RUNTIME_MEDIAN_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace dim0 {

// The middle value, or the mean of the two in the middle; 0 of none.
inline double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace dim0

#endif  // DIM0_RUNTIME_MEDIAN_H_
