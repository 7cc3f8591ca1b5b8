#include "model/cpu/vector_math.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace dim0::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Through a loop like those of the kernels, so that what is tested is the vectorised code.
std::vector<float> ExpOf(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  const float* in = x.data();
  float* out = y.data();
  const int64_t count = static_cast<int64_t>(x.size());
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = Exp(in[i]);
  return y;
}

TEST(VectorMathTest, ExpIsWithinOneAndAHalfUnitsInTheLastPlace) {
  // Every 1009th float between -110 and 88.7, of both signs and all exponents.
  std::vector<float> x;
  for (uint32_t bits = 0; bits < std::bit_cast<uint32_t>(110.0f); bits += 1009) {
    const float value = std::bit_cast<float>(bits);
    if (value < 88.7f) x.push_back(value);
    x.push_back(-value);
  }
  const std::vector<float> y = ExpOf(x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(static_cast<double>(x[i]));
    // Between neighbouring floats at the result, or between subnormals.
    const double unit = std::max(std::ldexp(1.0, std::ilogb(expected) - 23), 0x1p-149);
    worst = std::max(worst, std::abs(y[i] - expected) / unit);
  }
  EXPECT_LE(worst, 1.5);
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST(VectorMathTest, ExpHandlesNaNInfinitiesOverflowAndUnderflow) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // A length with a vector part and a remainder.
  const std::vector<float> x = {nan,    -nan,    kInfinity, -kInfinity, 1e30f, -1e30f,
                                88.73f, -104.1f, 0.0f,      -0.0f,      nan};
  const std::vector<float> y = ExpOf(x);
  for (int i : {0, 1, 10}) EXPECT_TRUE(std::isnan(y[i])) << i;
  for (int i : {2, 4, 6}) EXPECT_EQ(y[i], kInfinity) << i;
  for (int i : {3, 5, 7}) EXPECT_EQ(y[i], 0.0f) << i;
  for (int i : {8, 9}) EXPECT_EQ(y[i], 1.0f) << i;
}

}  // namespace
}  // namespace dim0::cpu
