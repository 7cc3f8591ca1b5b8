#include "collectives/dtype.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"

namespace dim0 {
namespace {

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

BFloat16 BFloat16FromBits(uint16_t bits) {
  BFloat16 value;
  value.bits = bits;
  return value;
}

TEST(BFloat16Test, EveryBFloat16SurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = static_cast<float>(BFloat16FromBits(static_cast<uint16_t>(bits)));
    if (std::isnan(value)) {
      EXPECT_EQ(BFloat16(value).bits, bits | 0x40) << "a NaN is kept, and made quiet";
    } else {
      EXPECT_EQ(BFloat16(value).bits, bits);
    }
  }
}

TEST(BFloat16Test, RoundsToTheNearestAndTiesToEven) {
  // 1 is 0x3f80; the spacing there is 2^-7.
  EXPECT_EQ(BFloat16(1.0f + 0x1.0p-9f).bits, 0x3f80);
  EXPECT_EQ(BFloat16(1.0f + 0x1.0p-8f).bits, 0x3f80) << "a tie below an odd neighbour";
  EXPECT_EQ(BFloat16(1.0f + 0x1.000002p-8f + 0x1.0p-23f).bits, 0x3f81);
  EXPECT_EQ(BFloat16(1.0f + 0x1.8p-7f).bits, 0x3f82) << "a tie above an odd neighbour";
  EXPECT_EQ(BFloat16(-1.0f - 0x1.8p-7f).bits, 0xbf82);
}

TEST(BFloat16Test, KeepsTheSpecialValues) {
  EXPECT_EQ(BFloat16(0.0f).bits, 0x0000);
  EXPECT_EQ(BFloat16(-0.0f).bits, 0x8000);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  EXPECT_EQ(BFloat16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7f80) << "rounds to infinity";
  // A NaN whose payload is in the lower half only must not turn into an infinity.
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(FromBits(0x7f800001)))));
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(FromBits(0xffffffff)))));
}

}  // namespace
}  // namespace dim0
