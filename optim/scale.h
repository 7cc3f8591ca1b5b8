// How a matrix update's length depends on the matrix's global shape [m, n].
#ifndef DIM0_OPTIM_SCALE_H_
#define DIM0_OPTIM_SCALE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace dim0 {

enum class UpdateScale : uint8_t {
  kSpectral,  // max(1, m/n)^0.5
  kMatchRms,  // 0.2 max(m, n)^0.5: the RMS of AdamW's updates, so that its lr and decay carry over
  kUnit,      // (m/n)^0.5
};

inline double ScaleOf(UpdateScale scale, int64_t m, int64_t n) {
  const double ratio = static_cast<double>(m) / static_cast<double>(n);
  switch (scale) {
    case UpdateScale::kSpectral:
      return std::sqrt(std::max(1.0, ratio));
    case UpdateScale::kMatchRms:
      return 0.2 * std::sqrt(static_cast<double>(std::max(m, n)));
    case UpdateScale::kUnit:
      return std::sqrt(ratio);
  }
  return 1;
}

}  // namespace dim0

#endif  // DIM0_OPTIM_SCALE_H_
