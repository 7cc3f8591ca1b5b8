#include "collectives/link.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace dim0 {
namespace {

struct Preset {
  absl::string_view name;
  double gb_per_second;
  double microseconds;
};
constexpr Preset kPresets[] = {{"pcie4", 32, 5},    {"pcie5", 64, 5},     {"nvlink4", 450, 2},
                               {"10gbe", 1.25, 30}, {"100gbe", 12.5, 10}, {"400gbe", 50, 5}};

LinkSpeed Speed(double gb_per_second, double microseconds) {
  return {gb_per_second * 1e9, absl::Microseconds(microseconds)};
}

}  // namespace

absl::StatusOr<LinkSpeed> ParseLink(absl::string_view text) {
  for (const Preset& preset : kPresets) {
    if (text == preset.name) return Speed(preset.gb_per_second, preset.microseconds);
  }
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  double gb_per_second, microseconds;
  // Below a byte a second or above a minute a hop nothing would seem to move any more.
  if (parts.size() == 2 && absl::SimpleAtod(parts[0], &gb_per_second) &&
      absl::SimpleAtod(parts[1], &microseconds) && gb_per_second >= 1e-9 &&
      std::isfinite(gb_per_second) && microseconds >= 0 && microseconds <= 60e6) {
    return Speed(gb_per_second, microseconds);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", text,
      "' is no link; give GB/s and microseconds a hop, as in 12.5,10, or one of pcie4, "
      "pcie5, nvlink4, 10gbe, 100gbe, 400gbe"));
}

void Link::Transfer(absl::Time start, int64_t bytes, int hops) {
  absl::Time end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    free_at_ = std::max(start, free_at_) +
               absl::Seconds(static_cast<double>(bytes) / speed_.bytes_per_second);
    // Others may send while this transfer's messages are on their way.
    end = free_at_ + hops * speed_.latency;
  }
  absl::SleepFor(end - absl::Now());
}

}  // namespace dim0
