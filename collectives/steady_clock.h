// The time of everything that is subtracted from another time or traced: the machine's wall clock
// may be set, forwards or back, while a run goes on.
#ifndef DIM0_COLLECTIVES_STEADY_CLOCK_H_
#define DIM0_COLLECTIVES_STEADY_CLOCK_H_

#include <chrono>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dim0 {

// What the wall clock showed when the process first asked, and the time that has passed since. It
// never goes back. Thread-safe.
inline absl::Time SteadyNow() {
  struct Anchor {
    absl::Time wall = absl::Now();
    std::chrono::steady_clock::time_point steady = std::chrono::steady_clock::now();
  };
  static const Anchor anchor;
  return anchor.wall + absl::FromChrono(std::chrono::steady_clock::now() - anchor.steady);
}

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_STEADY_CLOCK_H_
