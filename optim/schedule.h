// Learning-rate schedules: the factor by which every learning rate is multiplied.
#ifndef DIM0_OPTIM_SCHEDULE_H_
#define DIM0_OPTIM_SCHEDULE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dim0 {

struct Schedule {
  enum class Kind : uint8_t { kConstant, kCosine };
  Kind kind = Kind::kConstant;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double final_fraction = 0.1;  // of kCosine: the factor at total_steps

  // `step` counts from 1. Rises linearly to 1 at step warmup_steps; then stays, or falls along half
  // a cosine to final_fraction at total_steps.
  double Factor(int64_t step) const;
};

// "constant" or "cosine". Error: NotFound, listing these.
absl::StatusOr<Schedule::Kind> ParseSchedule(absl::string_view name);

}  // namespace dim0

#endif  // DIM0_OPTIM_SCHEDULE_H_
