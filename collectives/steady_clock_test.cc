#include "collectives/steady_clock.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace dim0 {
namespace {

TEST(SteadyNow, ShowsTheTimeOfTheWallClock) {
  EXPECT_LT(absl::AbsDuration(SteadyNow() - absl::Now()), absl::Seconds(1));
}

TEST(SteadyNow, PassesAsTimeDoes) {
  const absl::Time before = SteadyNow();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_GE(SteadyNow() - before, absl::Milliseconds(20));
}

TEST(SteadyNow, NeverGoesBackOnAnyThread) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      absl::Time last = SteadyNow();
      for (int call = 0; call < 100'000; ++call) {
        const absl::Time now = SteadyNow();
        ASSERT_LE(last, now);
        last = now;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace dim0
