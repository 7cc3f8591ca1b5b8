#include "runtime/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace dim0 {
namespace {

using Words = std::array<uint32_t, 4>;

// The known answers of philox4x32-10 that Random123 publishes.
TEST(Philox, GivesThePublishedAnswers) {
  EXPECT_EQ(Philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(FillNormal, APieceIsThatPieceOfTheWhole) {
  std::vector<float> whole(1000);
  FillNormal(42, 7, 0, 0.5f, absl::MakeSpan(whole));
  for (const int64_t first : {0, 1, 2, 3, 4, 5, 333, 998}) {
    for (const int64_t count : {0, 1, 2, 3, 7, 400}) {
      if (first + count > 1000) continue;
      std::vector<float> piece(count);
      FillNormal(42, 7, first, 0.5f, absl::MakeSpan(piece));
      EXPECT_TRUE(std::equal(piece.begin(), piece.end(), whole.begin() + first));
    }
  }
}

TEST(FillNormal, HasTheMomentsOfANormalDistribution) {
  constexpr int64_t kCount = 1 << 20;
  std::vector<float> values(kCount);
  FillNormal(1, 2, 0, 2.0f, absl::MakeSpan(values));
  double sum[5] = {};
  for (const float value : values) {
    double power = 1;
    for (double& s : sum) {
      s += power;
      power *= value / 2.0;
    }
  }
  // Four standard errors of each moment of 2^20 draws.
  const double error = 4 / std::sqrt(double{kCount});
  EXPECT_NEAR(sum[1] / kCount, 0, error);
  EXPECT_NEAR(sum[2] / kCount, 1, error * std::sqrt(2));
  EXPECT_NEAR(sum[3] / kCount, 0, error * std::sqrt(15));
  EXPECT_NEAR(sum[4] / kCount, 3, error * std::sqrt(96));
}

TEST(FillNormal, SeedsAndStreamsGiveOtherNumbers) {
  std::set<float> firsts;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
    for (uint32_t stream : {0u, 1u, 2u}) {
      float value;
      FillNormal(seed, stream, 0, 1, {&value, 1});
      firsts.insert(value);
    }
  }
  EXPECT_EQ(firsts.size(), 9u);
}

TEST(FillNormal, ElementsBeyond32BitsDoNotRepeatTheFirst) {
  float low, high;
  FillNormal(3, 0, 0, 1, {&low, 1});
  FillNormal(3, 0, int64_t{4} << 32, 1, {&high, 1});
  EXPECT_NE(low, high);
}

TEST(Uniform, FillsTheUnitIntervalEvenly) {
  constexpr int kCount = 100000;
  std::vector<int> bins(10);
  for (int i = 0; i < kCount; ++i) {
    const double value = Uniform(9, 1, i);
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 1);
    ++bins[static_cast<int>(value * 10)];
  }
  for (const int count : bins) EXPECT_NEAR(count, kCount / 10, 5 * std::sqrt(kCount * 0.09));
}

}  // namespace
}  // namespace dim0
