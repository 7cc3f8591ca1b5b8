// Narrowing in two steps without rounding twice.
#ifndef DIM0_TESTS_SIMT_INCLUDE_SIMT_ROUNDING_H_
#define DIM0_TESTS_SIMT_INCLUDE_SIMT_ROUNDING_H_

#include <bit>
#include <cmath>
#include <cstdint>

namespace dim0::simt {

// The float next to `value` towards zero, its last bit set where that is not exact: rounding it
// further, to 22 bits or fewer, gives what rounding `value` itself would.
inline float DoubleToFloatOdd(double value) {
  float rounded = static_cast<float>(value);
  if (static_cast<double>(rounded) == value || value != value || std::isinf(rounded)) {
    return rounded;
  }
  if (std::fabs(static_cast<double>(rounded)) > std::fabs(value)) {
    rounded = std::nextafterf(rounded, 0.0f);
  }
  return std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) | 1u);
}

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_INCLUDE_SIMT_ROUNDING_H_
