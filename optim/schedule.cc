#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace dim0 {

double Schedule::Factor(int64_t step) const {
  if (step < warmup_steps) return static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (kind == Kind::kConstant) return 1;
  const int64_t span = std::max<int64_t>(1, total_steps - warmup_steps);
  const double progress =
      std::clamp(static_cast<double>(step - warmup_steps) / static_cast<double>(span), 0.0, 1.0);
  return final_fraction + (1 - final_fraction) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

absl::StatusOr<Schedule::Kind> ParseSchedule(absl::string_view name) {
  if (name == "constant") return Schedule::Kind::kConstant;
  if (name == "cosine") return Schedule::Kind::kCosine;
  return absl::NotFoundError(
      absl::StrCat("--schedule=", name, " is unknown; choose constant or cosine"));
}

}  // namespace dim0
