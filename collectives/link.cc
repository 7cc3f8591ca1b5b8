#include "collectives/link.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "collectives/steady_clock.h"

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

int64_t Link::Start(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const absl::Time now = SteadyNow();
  Advance(now);
  transfers_[++last_] = {static_cast<double>(bytes), now};
  return last_;
}

void Link::WaitFor(int64_t transfer, int hops) {
  absl::Time done;
  while (true) {
    absl::Time next;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      next = Advance(SteadyNow());
      const auto it = transfers_.find(transfer);
      if (it->second.bytes_left <= 0) {
        done = it->second.done;
        transfers_.erase(it);
        break;
      }
    }
    // Nothing can make a transfer faster before the next one is done.
    absl::SleepFor(next - SteadyNow());
  }
  absl::SleepFor(done + hops * speed_.latency - SteadyNow());
}

absl::Time Link::Advance(absl::Time now) {
  while (true) {
    int active = 0;
    double least = std::numeric_limits<double>::infinity();
    for (const auto& [id, transfer] : transfers_) {
      if (transfer.bytes_left <= 0) continue;
      ++active;
      least = std::min(least, transfer.bytes_left);
    }
    if (active == 0) {
      advanced_ = now;
      return absl::InfiniteFuture();
    }
    const double rate = speed_.bytes_per_second / active;
    const absl::Time next = advanced_ + absl::Seconds(least / rate);
    const bool reached = next <= now;
    const double moved = reached ? least : rate * absl::ToDoubleSeconds(now - advanced_);
    for (auto& [id, transfer] : transfers_) {
      if (transfer.bytes_left <= 0) continue;
      // Of equal ones all are done at once, whatever the rounding.
      transfer.bytes_left -= moved;
      if (reached && transfer.bytes_left < 0.5) transfer.bytes_left = 0;
      if (transfer.bytes_left <= 0) transfer.done = next;
    }
    advanced_ = reached ? next : now;
    if (!reached) return next;
  }
}

}  // namespace dim0
