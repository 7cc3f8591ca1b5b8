#include "runtime/cuda/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/cuda/device_array.h"

namespace dim0::cuda {
namespace {

constexpr ElementType kTypes[] = {ElementType::kFloat32, ElementType::kBFloat16};
// Around a quad, a block and all blocks of a sum.
constexpr int64_t kSizes[] = {1, 3, 4, 5, 1000, 1023, 1025, 4097, 65543};

std::vector<float> Random(int64_t size, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

// As the device stores them.
std::vector<float> Rounded(ElementType type, std::vector<float> values) {
  if (type == ElementType::kBFloat16) {
    for (float& value : values) value = static_cast<float>(BFloat16(value));
  }
  return values;
}

// What rounding to the type may change of a value of this magnitude.
double RoundingOf(ElementType type, double magnitude) {
  return magnitude * (type == ElementType::kBFloat16 ? 0x1p-8 : 0x1p-23);
}

double SumOfSquares(const std::vector<float>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum;
}

class CudaKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU";
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    workspace_.resize(kSumWorkspaceBytes);
  }
  void TearDown() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  double DeviceSumOfSquares(ElementType type, const std::vector<float>& values, int shift) {
    const DeviceElements x(type, values, shift);
    const DeviceArray<uint8_t> workspace(workspace_);
    const DeviceArray<double> result({-1.0});
    EXPECT_EQ(
        LaunchSumsOfSquares(type, {{x.data(), x.size()}}, workspace.data(), result.data(), stream_),
        cudaSuccess);
    return result.Get()[0];
  }

  cudaStream_t stream_ = nullptr;
  std::vector<uint8_t> workspace_;
};

TEST_F(CudaKernelsTest, SumOfSquaresIsTheFloat64SumWhateverTheSizeTypeAndAlignment) {
  for (const ElementType type : kTypes) {
    for (const int64_t size : kSizes) {
      const std::vector<float> values = Random(size);
      const double expected = SumOfSquares(Rounded(type, values));
      const double aligned = DeviceSumOfSquares(type, values, 0);
      EXPECT_NEAR(aligned, expected, 1e-12 * expected) << size;
      // To the bit: neither the place nor the run matters.
      EXPECT_EQ(DeviceSumOfSquares(type, values, 1), aligned) << size;
      EXPECT_EQ(DeviceSumOfSquares(type, values, 0), aligned) << size;
    }
    EXPECT_EQ(DeviceSumOfSquares(type, {}, 0), 0);
  }
}

TEST_F(CudaKernelsTest, SumsOfSquaresOfManyArraysAreEachItsOwn) {
  // More arrays than one launch takes, large and small ones and some without elements.
  for (const ElementType type : kTypes) {
    std::vector<std::unique_ptr<DeviceElements>> held;
    std::vector<ConstArray> arrays;
    std::vector<double> expected;
    for (int i = 0; i < 150; ++i) {
      const int64_t size = i == 70 ? 300'001 : i % 11 == 3 ? 0 : (i * 37) % 1999;
      const std::vector<float> values = Random(size);
      held.push_back(std::make_unique<DeviceElements>(type, values, i % 3));
      arrays.push_back({held.back()->data(), held.back()->size()});
      expected.push_back(SumOfSquares(Rounded(type, values)));
    }
    const DeviceArray<uint8_t> workspace(workspace_);
    const DeviceArray<double> results(std::vector<double>(arrays.size() + 1, -1.0));
    ASSERT_EQ(LaunchSumsOfSquares(type, arrays, workspace.data(), results.data(), stream_),
              cudaSuccess);
    const std::vector<double> sums = results.Get();
    for (size_t i = 0; i < arrays.size(); ++i) {
      EXPECT_NEAR(sums[i], expected[i], 1e-12 * expected[i]) << i;
    }
    EXPECT_EQ(sums.back(), -1);
  }
}

TEST_F(CudaKernelsTest, SumOfSquaresTakesMoreElementsThanAllBlocksTakeAtOnce) {
  // All ones but for a few: the sum is exact.
  std::vector<float> values(4096 * 1024 + 4099, 1.0f);
  values[0] = 3;
  values[4096 * 1024] = 5;
  values.back() = 7;
  const double expected = static_cast<double>(values.size()) + 8 + 24 + 48;
  EXPECT_EQ(DeviceSumOfSquares(ElementType::kFloat32, values, 0), expected);
}

TEST_F(CudaKernelsTest, SumOfSquaresOfHugeAndTinyValuesStaysInRange) {
  EXPECT_NEAR(DeviceSumOfSquares(ElementType::kFloat32, {3e38f, 1e38f}, 0) / 1e76,
              SumOfSquares({3e38f, 1e38f}) / 1e76, 1e-12);
  EXPECT_NEAR(DeviceSumOfSquares(ElementType::kFloat32, {3e-38f, 1e-38f}, 0) * 1e76,
              SumOfSquares({3e-38f, 1e-38f}) * 1e76, 1e-12);
}

TEST_F(CudaKernelsTest, SumOfSquaredDifferencesTakesDifferencesInFloat64) {
  for (const ElementType type : kTypes) {
    for (const int64_t size : kSizes) {
      const std::vector<float> a = Random(size, 2), b = Random(size, 3);
      const std::vector<float> rounded_a = Rounded(type, a), rounded_b = Rounded(type, b);
      double expected = 0;
      for (int64_t i = 0; i < size; ++i) {
        const double difference = double{rounded_a[i]} - rounded_b[i];
        expected += difference * difference;
      }
      for (const int shift : {0, 1}) {
        const DeviceElements on_device_a(type, a), on_device_b(type, b, shift);
        const DeviceArray<uint8_t> workspace(workspace_);
        const DeviceArray<double> result({-1.0});
        ASSERT_EQ(LaunchSumOfSquaredDifferences(type, on_device_a.data(), on_device_b.data(), size,
                                                workspace.data(), result.data(), stream_),
                  cudaSuccess);
        EXPECT_NEAR(result.Get()[0], expected, 1e-12 * expected);
      }
    }
    const DeviceArray<uint8_t> workspace(workspace_);
    const DeviceArray<double> result({-1.0});
    ASSERT_EQ(LaunchSumOfSquaredDifferences(type, nullptr, nullptr, 0, workspace.data(),
                                            result.data(), stream_),
              cudaSuccess);
    EXPECT_EQ(result.Get()[0], 0);
  }
}

TEST_F(CudaKernelsTest, NormalizeGivesEachMatrixOfABatchTheLength) {
  constexpr double kLength = 0.75;
  const DeviceArray<uint8_t> workspace(workspace_);
  for (const ElementType from : kTypes) {
    for (const ElementType to : kTypes) {
      for (const int64_t size : {1, 7, 4100}) {
        for (const int64_t batch : {1, 3, 17}) {
          const std::vector<float> values = Random(size * batch, 4);
          const std::vector<float> rounded = Rounded(from, values);
          const DeviceElements x(from, values), out(to, std::vector<float>(size * batch, -9.0f));
          ASSERT_EQ(LaunchNormalize(from, x.data(), size, batch, kLength, to, out.data(),
                                    workspace.data(), stream_),
                    cudaSuccess);
          const std::vector<float> result = out.Get();
          for (int64_t matrix = 0; matrix < batch; ++matrix) {
            const auto begin = rounded.begin() + matrix * size;
            const double norm = std::sqrt(SumOfSquares({begin, begin + size}));
            for (int64_t i = 0; i < size; ++i) {
              const double expected = kLength * begin[i] / norm;
              ASSERT_NEAR(result[matrix * size + i], expected, RoundingOf(to, std::abs(expected)));
            }
          }
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, NormalizeGivesAMatrixTheSameBitsAloneAndInABatch) {
  constexpr int64_t kSize = 5003, kBatch = 11;
  const DeviceArray<uint8_t> workspace(workspace_);
  const std::vector<float> values = Random(kSize * kBatch, 5);
  const DeviceElements together(ElementType::kFloat32, values);
  ASSERT_EQ(LaunchNormalize(ElementType::kFloat32, together.data(), kSize, kBatch, 1,
                            ElementType::kFloat32, together.data(), workspace.data(), stream_),
            cudaSuccess);
  const std::vector<float> result = together.Get();
  for (int64_t matrix = 0; matrix < kBatch; ++matrix) {
    const auto begin = values.begin() + matrix * kSize;
    const DeviceElements alone(ElementType::kFloat32, {begin, begin + kSize});
    ASSERT_EQ(LaunchNormalize(ElementType::kFloat32, alone.data(), kSize, 1, 1,
                              ElementType::kFloat32, alone.data(), workspace.data(), stream_),
              cudaSuccess);
    EXPECT_EQ(alone.Get(), std::vector<float>(result.begin() + matrix * kSize,
                                              result.begin() + (matrix + 1) * kSize));
  }
}

TEST_F(CudaKernelsTest, NormalizeKeepsZerosAndSurvivesHugeAndTinyMatrices) {
  const DeviceArray<uint8_t> workspace(workspace_);
  const auto normalized = [&](const std::vector<float>& values) {
    const DeviceElements x(ElementType::kFloat32, values);
    EXPECT_EQ(LaunchNormalize(ElementType::kFloat32, x.data(), x.size(), 1, 1,
                              ElementType::kFloat32, x.data(), workspace.data(), stream_),
              cudaSuccess);
    return x.Get();
  };
  EXPECT_EQ(normalized({0, 0, 0}), std::vector<float>({0, 0, 0}));
  for (const float scale : {1e37f, 1e-37f}) {
    const std::vector<float> result = normalized({3 * scale, 0, -4 * scale});
    EXPECT_NEAR(result[0], 0.6f, 1e-6);
    EXPECT_NEAR(result[2], -0.8f, 1e-6);
  }
  EXPECT_EQ(LaunchNormalize(ElementType::kFloat32, nullptr, 0, 1, 1, ElementType::kFloat32, nullptr,
                            workspace.data(), stream_),
            cudaSuccess);
}

TEST_F(CudaKernelsTest, ClipScaleSumsTheColumnsAskedForAndSpotsBrokenGradients) {
  constexpr int kRanks = 3;
  constexpr int64_t kStride = 400, kCount = 300;
  std::vector<double> stats(kRanks * kStride);
  for (size_t i = 0; i < stats.size(); ++i) stats[i] = 1e-3 * static_cast<double>(i % 17);
  double squares = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int64_t i = 0; i < kCount; ++i) squares += stats[rank * kStride + i];
  }
  const auto scale = [&](const std::vector<double>& values, double clip) {
    const DeviceArray<double> on_device(values);
    const DeviceArray<float> result({-1.0f});
    EXPECT_EQ(
        LaunchClipScale(on_device.data(), kRanks, kStride, kCount, clip, result.data(), stream_),
        cudaSuccess);
    return result.Get()[0];
  };
  EXPECT_FLOAT_EQ(scale(stats, 0.5), 0.5 / (std::sqrt(squares) + 1e-6));
  EXPECT_EQ(scale(stats, 1e6), 1);
  EXPECT_EQ(scale(stats, 0), 1);
  std::vector<double> broken = stats;
  broken[kStride + kCount] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(scale(broken, 0), 1) << "a column that was not asked for";
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    broken = stats;
    broken[2 * kStride + kCount - 1] = bad;
    EXPECT_TRUE(std::isnan(scale(broken, 0)));
    EXPECT_TRUE(std::isnan(scale(broken, 1)));
  }
}

TEST_F(CudaKernelsTest, GatherRowsAndAddRowsTakeTheRowsNamed) {
  const std::vector<int32_t> rows = {6, 0, 3, 2};
  const DeviceArray<int32_t> on_device_rows(rows);
  const auto num_rows = static_cast<int64_t>(rows.size());
  constexpr int64_t kTableRows = 7;
  for (const ElementType type : kTypes) {
    for (const int64_t cols : {1, 3, 4, 6, 8, 768, 1027}) {
      for (const int shift : {0, 1}) {
        const std::vector<float> table = Rounded(type, Random(kTableRows * cols, 6));
        const std::vector<float> addends = Rounded(type, Random(num_rows * cols, 7));
        const DeviceElements source(type, table, shift);
        const DeviceElements target(type, std::vector<float>(num_rows * cols, -9.0f));
        ASSERT_EQ(LaunchGatherRows(type, source.data(), on_device_rows.data(), num_rows, cols,
                                   target.data(), stream_),
                  cudaSuccess);
        std::vector<float> gathered, sums = table;
        for (int64_t i = 0; i < num_rows; ++i) {
          for (int64_t c = 0; c < cols; ++c) {
            gathered.push_back(table[rows[i] * cols + c]);
            sums[rows[i] * cols + c] += addends[i * cols + c];
          }
        }
        EXPECT_EQ(target.Get(), gathered) << cols;

        const DeviceElements added(type, addends);
        ASSERT_EQ(LaunchAddRows(type, added.data(), on_device_rows.data(), num_rows, cols,
                                source.data(), stream_),
                  cudaSuccess);
        EXPECT_EQ(source.Get(), Rounded(type, sums)) << cols;
      }
    }
    EXPECT_EQ(LaunchGatherRows(type, nullptr, nullptr, 0, 8, nullptr, stream_), cudaSuccess);
    EXPECT_EQ(LaunchAddRows(type, nullptr, nullptr, 0, 8, nullptr, stream_), cudaSuccess);
  }
}

TEST_F(CudaKernelsTest, CastRoundsToNearestTiesToEven) {
  // Halfway cases, and what rounds to infinity or must stay what it is.
  std::vector<float> values = {
      1.00390625f, 1.01171875f, -1.00390625f, 3.4e38f,
      1e-45f,      0.0f,        -0.0f,        std::numeric_limits<float>::infinity()};
  for (const int64_t size : kSizes) {
    const std::vector<float> random = Random(size, 8);
    values.insert(values.end(), random.begin(), random.end());
    for (const ElementType from : kTypes) {
      for (const ElementType to : kTypes) {
        const DeviceElements source(from, values, 1), target(to, values);
        ASSERT_EQ(LaunchCast(from, source.data(), source.size(), to, target.data(), stream_),
                  cudaSuccess);
        EXPECT_EQ(target.Get(), Rounded(to, Rounded(from, values)));
      }
    }
  }
  const DeviceElements nan(ElementType::kFloat32, {std::nanf("")}),
      target(ElementType::kBFloat16, {0});
  ASSERT_EQ(LaunchCast(ElementType::kFloat32, nan.data(), 1, ElementType::kBFloat16, target.data(),
                       stream_),
            cudaSuccess);
  EXPECT_TRUE(std::isnan(target.Get()[0]));
}

TEST_F(CudaKernelsTest, TriadAddsAMultiple) {
  for (const int64_t size : kSizes) {
    const std::vector<float> b = Random(size, 9), c = Random(size, 10);
    const DeviceArray<float> on_device_b(b), on_device_c(c, 3);
    const DeviceArray<float> a(std::vector<float>(size, -9.0f));
    ASSERT_EQ(LaunchTriad(on_device_b.data(), 0.5f, on_device_c.data(), size, a.data(), stream_),
              cudaSuccess);
    const std::vector<float> result = a.Get();
    // Half of c is exact, so the sum is the only rounding.
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(result[i], b[i] + 0.5f * c[i]);
  }
}

TEST_F(CudaKernelsTest, FillMakesDifferentNumbersBetweenMinusOneAndOne) {
  constexpr int64_t kSize = 10007;
  const auto filled = [&](ElementType type, uint32_t seed, int shift) {
    const DeviceElements out(type, std::vector<float>(kSize, -9.0f), shift);
    EXPECT_EQ(LaunchFill(type, seed, kSize, out.data(), stream_), cudaSuccess);
    return out.Get();
  };
  const std::vector<float> values = filled(ElementType::kFloat32, 1, 0);
  EXPECT_EQ(filled(ElementType::kFloat32, 1, 1), values);
  EXPECT_EQ(filled(ElementType::kBFloat16, 1, 0), Rounded(ElementType::kBFloat16, values));
  EXPECT_NE(filled(ElementType::kFloat32, 2, 0), values);
  double sum = 0;
  for (const float value : values) {
    ASSERT_GE(value, -1);
    ASSERT_LE(value, 1);
    sum += value;
  }
  // Uniform numbers: 1/3 is the mean square, and the mean's deviation is 1 / sqrt(3 n).
  EXPECT_NEAR(SumOfSquares(values) / kSize, 1.0 / 3, 0.02);
  EXPECT_NEAR(sum / kSize, 0, 5 / std::sqrt(3.0 * kSize));
  EXPECT_GT(std::set<float>(values.begin(), values.end()).size(), size_t{kSize - 20});
}

TEST_F(CudaKernelsTest, ScaleToUnitRangeIsAPowerOfTwo) {
  const DeviceArray<uint8_t> workspace(workspace_);
  const auto scaled = [&](const std::vector<float>& values) {
    const DeviceArray<float> x(values);
    EXPECT_EQ(LaunchScaleToUnitRange(x.data(), x.size(), workspace.data(), stream_), cudaSuccess);
    return x.Get();
  };
  EXPECT_EQ(scaled({3, -5, 0.25f}), std::vector<float>({3.0f / 8, -5.0f / 8, 0.25f / 8}));
  EXPECT_EQ(scaled({0.5f}), std::vector<float>({0.5f}));
  EXPECT_EQ(scaled({1}), std::vector<float>({0.5f}));
  EXPECT_EQ(scaled({0x1p127f, -0x1.8p126f}), std::vector<float>({0.5f, -0x1.8p-2f}));
  EXPECT_EQ(scaled({0x1p-149f, 0}), std::vector<float>({0.5f, 0}));
  EXPECT_EQ(scaled({0, 0}), std::vector<float>({0, 0}));
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(scaled({4, infinity}), std::vector<float>({4, infinity}));
  for (const int64_t size : kSizes) {
    std::vector<float> values = Random(size, 11);
    values.back() = -100;  // of magnitude in [64, 128)
    std::vector<float> expected = values;
    for (float& value : expected) value /= 128;
    EXPECT_EQ(scaled(values), expected);
  }
}

TEST_F(CudaKernelsTest, DominanceRatiosLeaveTheDiagonalOutOfTheMean) {
  constexpr int64_t kM = 1003, kStride = 100, kRows = (kM + kStride - 1) / kStride;
  const std::vector<float> products = Random(kRows * kM, 12);
  const DeviceArray<float> on_device(products);
  const DeviceArray<double> ratios(std::vector<double>(kRows, -9.0));
  ASSERT_EQ(LaunchDominanceRatios(on_device.data(), kRows, kM, kStride, ratios.data(), stream_),
            cudaSuccess);
  const std::vector<double> result = ratios.Get();
  for (int64_t r = 0; r < kRows; ++r) {
    double others = 0;
    for (int64_t j = 0; j < kM; ++j) {
      if (j != r * kStride) others += std::abs(products[r * kM + j]);
    }
    const double expected = products[r * kM + r * kStride] / (others / (kM - 1));
    EXPECT_NEAR(result[r], expected, 1e-12 * std::abs(expected));
  }
}

TEST_F(CudaKernelsTest, DominanceRatiosOfOrthogonalRowsAreInfiniteAndOfZerosNaN) {
  const DeviceArray<float> products({2, 0, 0, 0});
  const DeviceArray<double> ratios({-9.0, -9.0});
  ASSERT_EQ(LaunchDominanceRatios(products.data(), 2, 2, 1, ratios.data(), stream_), cudaSuccess);
  EXPECT_TRUE(std::isinf(ratios.Get()[0]));
  EXPECT_TRUE(std::isnan(ratios.Get()[1]));
}

}  // namespace
}  // namespace dim0::cuda
