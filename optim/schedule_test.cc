#include "optim/schedule.h"

#include <gtest/gtest.h>

namespace dim0 {
namespace {

TEST(Schedule, WarmUpRisesLinearlyToOne) {
  const Schedule schedule{.warmup_steps = 4, .total_steps = 10};
  EXPECT_DOUBLE_EQ(schedule.Factor(1), 0.25);
  EXPECT_DOUBLE_EQ(schedule.Factor(3), 0.75);
  EXPECT_DOUBLE_EQ(schedule.Factor(4), 1);
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 1);
}

TEST(Schedule, CosineFallsFromOneToItsFinalFraction) {
  const Schedule schedule{.kind = Schedule::Kind::kCosine,
                          .warmup_steps = 10,
                          .total_steps = 110,
                          .final_fraction = 0.1};
  EXPECT_DOUBLE_EQ(schedule.Factor(5), 0.5);
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 1);
  EXPECT_NEAR(schedule.Factor(60), 0.55, 1e-12);  // half way
  EXPECT_NEAR(schedule.Factor(110), 0.1, 1e-12);
  EXPECT_NEAR(schedule.Factor(500), 0.1, 1e-12);
}

TEST(Schedule, WithoutWarmUpTheFirstStepIsWhole) {
  EXPECT_DOUBLE_EQ(Schedule{.total_steps = 5}.Factor(1), 1);
}

TEST(Schedule, WarmUpLongerThanTheRunIsStillFinite) {
  const Schedule schedule{.kind = Schedule::Kind::kCosine, .warmup_steps = 9, .total_steps = 3};
  EXPECT_DOUBLE_EQ(schedule.Factor(3), 1.0 / 3);
}

TEST(ParseSchedule, NamesTheChoicesWhenAskedForAnother) {
  EXPECT_TRUE(ParseSchedule("cosine").ok());
  EXPECT_NE(ParseSchedule("linear").status().message().find("constant or cosine"),
            absl::string_view::npos);
}

}  // namespace
}  // namespace dim0
