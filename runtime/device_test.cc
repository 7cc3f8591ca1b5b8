// Devices, streams, events and the counting allocator. Parametrised over backends as they come.
#include "runtime/device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/host_copy.h"

namespace dim0 {
namespace {

class DeviceTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { device_ = *CreateDevice(Backend::kCpu, GetParam()); }
  std::unique_ptr<Device> device_;
};

TEST(CreateDevice, RefusesFewerThanOneThread) {
  EXPECT_EQ(CreateDevice(Backend::kCpu, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(DeviceTest, StreamRunsOpsInOrder) {
  const auto stream = device_->NewStream("s");
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    stream->Enqueue({.name = "op"}, [&order, i](const OpContext&) {
      order.push_back(i);
      return absl::OkStatus();
    });
  }
  ASSERT_TRUE(stream->Synchronize().ok());
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_P(DeviceTest, EnqueueAndWaitDoNotBlockTheHost) {
  const auto first = device_->NewStream("first"), second = device_->NewStream("second");
  std::atomic<bool> go = false;
  first->Enqueue({.name = "slow"}, [&](const OpContext&) {
    while (!go) std::this_thread::yield();
    return absl::OkStatus();
  });
  bool ran = false;
  second->Wait(first->Record());
  second->Enqueue({.name = "after"}, [&](const OpContext&) {
    ran = true;
    return absl::OkStatus();
  });
  EXPECT_FALSE(go);  // reached while `slow` still runs
  go = true;
  ASSERT_TRUE(second->Synchronize().ok());
  EXPECT_TRUE(ran);
}

TEST_P(DeviceTest, WorkAfterAnEventSeesTheWorkBeforeIt) {
  const auto writer = device_->NewStream("writer"), reader = device_->NewStream("reader");
  int value = 0;
  for (int i = 1; i <= 200; ++i) {
    int seen = 0;
    writer->Enqueue({.name = "write"}, [&value, i](const OpContext&) {
      value = i;
      return absl::OkStatus();
    });
    reader->Wait(writer->Record());
    reader->Enqueue({.name = "read"}, [&](const OpContext&) {
      seen = value;
      return absl::OkStatus();
    });
    writer->Wait(reader->Record());
    ASSERT_TRUE(reader->Synchronize().ok());
    ASSERT_EQ(seen, i);
  }
}

TEST_P(DeviceTest, AnErrorSkipsLaterOpsAndTravelsAlongEvents) {
  const auto first = device_->NewStream("first"), second = device_->NewStream("second");
  bool ran = false;
  const auto mark = [&](const OpContext&) {
    ran = true;
    return absl::OkStatus();
  };
  first->Enqueue({.name = "bad"}, [](const OpContext&) { return absl::DataLossError("broken"); });
  first->Enqueue({.name = "skipped"}, mark);
  second->Wait(first->Record());
  second->Enqueue({.name = "skipped too"}, mark);
  EXPECT_EQ(second->Synchronize().message(), "broken");
  EXPECT_EQ(first->Synchronize().message(), "broken");
  EXPECT_FALSE(ran);
}

TEST_P(DeviceTest, JoinedEventPassesWhenBothHave) {
  const auto a = device_->NewStream("a"), b = device_->NewStream("b");
  std::atomic<int> done = 0;
  const auto slow = [&](const OpContext&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++done;
    return absl::OkStatus();
  };
  a->Enqueue({.name = "a"}, slow);
  b->Enqueue({.name = "b"}, slow);
  ASSERT_TRUE(Event::Join(a->Record(), b->Record()).Wait().ok());
  EXPECT_EQ(done, 2);
  EXPECT_TRUE(Event::Join(Event(), Event()).Wait().ok());
}

TEST_P(DeviceTest, EventTimesFollowTheOrderOfTheStream) {
  const auto stream = device_->NewStream("s");
  const Event before = stream->Record();
  stream->Enqueue({.name = "slow"}, [](const OpContext&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return absl::OkStatus();
  });
  const Event after = stream->Record();
  ASSERT_TRUE(after.Wait().ok());
  EXPECT_GE(after.points()[0]->time() - before.points()[0]->time(), absl::Milliseconds(10));
}

TEST_P(DeviceTest, SumOfSquaresIsExactWhereFloat64Is) {
  const auto stream = device_->NewStream("s");
  for (const int64_t size : {0, 1, 7, 8, 9, 1000, (1 << 18) - 1, (1 << 18) + 1, 3 << 18}) {
    std::vector<float> values(size);
    double expected = 0;  // of integers below 2^53: exact in any order
    for (int64_t i = 0; i < size; ++i) {
      values[i] = static_cast<float>(i % 1000 - 500);
      expected += double{values[i]} * values[i];
    }
    double sum = -1;
    device_->SumsOfSquares(*stream, {F32(values.data(), size)}, &sum);
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_EQ(sum, expected) << size;
  }
}

TEST_P(DeviceTest, GatherRowsCopiesTheNamedRowsInTheirOrder) {
  const auto stream = device_->NewStream("s");
  std::vector<float> source(7 * 3);
  std::iota(source.begin(), source.end(), 0.0f);
  const std::vector<int32_t> rows = {6, 0, 6, 2};
  std::vector<float> target(rows.size() * 3);
  device_->GatherRows(*stream, F32(source.data(), 7, 3), rows.data(), F32(target.data(), 4, 3));
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(target, std::vector<float>({18, 19, 20, 0, 1, 2, 18, 19, 20, 6, 7, 8}));
}

TEST_P(DeviceTest, AddRowsAddsToTheNamedRowsAndLeavesTheOthers) {
  const auto stream = device_->NewStream("s");
  // More rows than one thread takes: row i of 100 goes to row 3 i.
  constexpr int64_t kRows = 100, kCols = 5;
  std::vector<float> source(kRows * kCols), target(3 * kRows * kCols, 0.5f);
  std::iota(source.begin(), source.end(), 1.0f);
  std::vector<int32_t> rows(kRows);
  for (int64_t i = 0; i < kRows; ++i) rows[i] = static_cast<int32_t>(3 * i);
  device_->AddRows(*stream, F32(source.data(), kRows, kCols), rows.data(),
                   F32(target.data(), 3 * kRows, kCols));
  ASSERT_TRUE(stream->Synchronize().ok());
  for (int64_t row = 0; row < 3 * kRows; ++row) {
    for (int64_t c = 0; c < kCols; ++c) {
      EXPECT_EQ(target[row * kCols + c], row % 3 == 0 ? row / 3 * kCols + c + 1.5f : 0.5f);
    }
  }
}

TEST_P(DeviceTest, SumOfSquaresKeepsNanAndInfinity) {
  const auto stream = device_->NewStream("s");
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> values(100, 1.0f);
    values[37] = bad;
    double sum = 0;
    device_->SumsOfSquares(*stream, {F32(values.data(), 100)}, &sum);
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_FALSE(std::isfinite(sum));
  }
}

TEST_P(DeviceTest, SumOfSquaredDifferencesIsExactWhereFloat64Is) {
  const auto stream = device_->NewStream("s");
  for (const int64_t size : {0, 1, 7, 8, 9, 1000, (1 << 18) + 1}) {
    std::vector<float> a(size), b(size);
    double expected = 0;
    for (int64_t i = 0; i < size; ++i) {
      a[i] = static_cast<float>(i % 1000);
      b[i] = 16777216;  // from which float32 could not subtract 1
      expected += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    }
    double sum = -1;
    device_->SumOfSquaredDifferences(*stream, F32(a.data(), size), F32(b.data(), size), &sum);
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_NEAR(sum, expected, 1e-12 * expected) << size;
  }
}

// To nearest, ties to even, at the 8 bits of a bfloat16's fraction; not for subnormal results.
float NearestBFloat16(float value) {
  int exponent;
  const double fraction = std::frexp(value, &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8));
}

Tensor AsTensor(std::vector<BFloat16>& values, int64_t rows, int64_t cols = 1) {
  return {values.data(), DType::kBFloat16, rows, cols};
}

std::vector<BFloat16> Rounded(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

TEST_P(DeviceTest, CastRoundsToNearestAndTiesToEven) {
  const auto stream = device_->NewStream("s");
  for (const int64_t size : {0, 1, 7, 8, 9, 1000, 40001}) {
    std::vector<float> values(size), widened(size);
    for (int64_t i = 0; i < size; ++i) {
      // Every 16th is a tie.
      values[i] =
          (1 + (i * 2311 % 4096) / 4096.0f) * std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, i % 40 - 20);
    }
    std::vector<BFloat16> rounded(size);
    device_->Cast(*stream, F32(values.data(), size), AsTensor(rounded, size));
    device_->Cast(*stream, AsTensor(rounded, size), F32(widened.data(), size));
    ASSERT_TRUE(stream->Synchronize().ok());
    for (int64_t i = 0; i < size; ++i) EXPECT_EQ(widened[i], NearestBFloat16(values[i])) << i;
  }
  // 1 + 1/256 lies between 1 and 1 + 1/128, 1 + 3/256 between that and 1 + 1/64.
  std::vector<float> ties = {1 + 1 / 256.0f, 1 + 3 / 256.0f, -1 - 1 / 256.0f}, widened(3);
  std::vector<BFloat16> rounded(3);
  device_->Cast(*stream, F32(ties.data(), 3), AsTensor(rounded, 3));
  device_->Cast(*stream, AsTensor(rounded, 3), F32(widened.data(), 3));
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(widened, (std::vector<float>{1, 1 + 1 / 64.0f, -1}));
}

TEST_P(DeviceTest, CastKeepsWhatIsNotFiniteAndCopiesWithinAType) {
  const auto stream = device_->NewStream("s");
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {infinity, -infinity, std::nanf(""), -0.0f,
                               std::numeric_limits<float>::max()};
  std::vector<BFloat16> rounded(5), again(5);
  std::vector<float> widened(5), copied(5);
  device_->Cast(*stream, F32(values.data(), 5), AsTensor(rounded, 5));
  device_->Cast(*stream, AsTensor(rounded, 5), AsTensor(again, 5));
  device_->Cast(*stream, AsTensor(again, 5), F32(widened.data(), 5));
  device_->Cast(*stream, F32(values.data(), 2), F32(copied.data(), 2));
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(widened[0], infinity);
  EXPECT_EQ(widened[1], -infinity);
  EXPECT_TRUE(std::isnan(widened[2]));
  EXPECT_TRUE(widened[3] == 0 && std::signbit(widened[3]));
  EXPECT_EQ(widened[4], infinity);  // nearer than the largest bfloat16
  EXPECT_EQ(copied, (std::vector<float>{infinity, -infinity, 0, 0, 0}));
}

TEST_P(DeviceTest, BFloat16RowsAreGatheredAndAddedInFloat32) {
  const auto stream = device_->NewStream("s");
  std::vector<BFloat16> source = Rounded({1, 2, 3, 4, 5, 6});
  const std::vector<int32_t> rows = {2, 0};
  std::vector<BFloat16> target(4);
  device_->GatherRows(*stream, AsTensor(source, 3, 2), rows.data(), AsTensor(target, 2, 2));
  // 256 + 1 and 258 + 1 lie half-way between bfloat16 values.
  std::vector<BFloat16> sums = Rounded({256, 258, 7, 7, 10, 0.5f}), addends = Rounded({1, 1, 2, 3});
  const std::vector<int32_t> into = {0, 2};
  device_->AddRows(*stream, AsTensor(addends, 2, 2), into.data(), AsTensor(sums, 3, 2));
  ASSERT_TRUE(stream->Synchronize().ok());
  const auto floats = [](const std::vector<BFloat16>& values) {
    std::vector<float> widened;
    for (const BFloat16 value : values) widened.push_back(static_cast<float>(value));
    return widened;
  };
  EXPECT_EQ(floats(target), (std::vector<float>{5, 6, 1, 2}));
  EXPECT_EQ(floats(sums), (std::vector<float>{256, 260, 7, 7, 12, 3.5f}));
}

TEST_P(DeviceTest, SumsOfBFloat16SquaresAreExactWhereFloat64Is) {
  const auto stream = device_->NewStream("s");
  for (const int64_t size : {0, 1, 7, 1000, (1 << 18) + 1}) {
    std::vector<BFloat16> a, b;
    double squares[2] = {0, 0}, differences = 0;
    for (int64_t i = 0; i < size; ++i) {
      a.emplace_back(static_cast<float>(i % 256 - 128));
      b.emplace_back(static_cast<float>(i % 99));
      squares[0] += std::pow(i % 256 - 128, 2);
      squares[1] += std::pow(i % 99, 2);
      differences += std::pow(i % 256 - 128 - i % 99, 2);
    }
    double results[3] = {-1, -1, -1};
    device_->SumsOfSquares(*stream, {AsTensor(a, size), AsTensor(b, size)}, &results[0]);
    device_->SumOfSquaredDifferences(*stream, AsTensor(a, size), AsTensor(b, size), &results[2]);
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_EQ(results[0], squares[0]) << size;
    EXPECT_EQ(results[1], squares[1]) << size;
    EXPECT_EQ(results[2], differences) << size;
  }
}

TEST_P(DeviceTest, FloatsOfTheHostAreRoundedOnTheirWayAndComeBackExactly) {
  const auto stream = device_->NewStream("s");
  const std::vector<float> values = {1, 1 + 3 / 256.0f, -2.5f};
  std::vector<float> back(3), exact(3), floats(3);
  std::vector<BFloat16> halves(3);
  ASSERT_TRUE(CopyFloatsFromHost(*device_, *stream, values, AsTensor(halves, 3)).ok());
  ASSERT_TRUE(CopyFloatsToHost(*device_, *stream, AsTensor(halves, 3), absl::MakeSpan(back)).ok());
  EXPECT_EQ(back, (std::vector<float>{1, 1 + 1 / 64.0f, -2.5f}));
  const Tensor tensor = F32(floats.data(), 3);
  ASSERT_TRUE(CopyFloatsFromHost(*device_, *stream, values, tensor).ok());
  ASSERT_TRUE(CopyFloatsToHost(*device_, *stream, tensor, absl::MakeSpan(exact)).ok());
  EXPECT_EQ(exact, values);
}

TEST_P(DeviceTest, CopyMovesBytesWithinTheDevice) {
  const auto stream = device_->NewStream("s");
  const std::vector<float> source = {1, 2, 3};
  std::vector<float> target(3);
  device_->Copy(*stream, target.data(), source.data(), 2 * sizeof(float));
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(target, (std::vector<float>{1, 2, 0}));
}

TEST_P(DeviceTest, DiagonalDominanceComparesEveryStridethRowWithAllRows) {
  const auto stream = device_->NewStream("s");
  // v v^T is [[5, 2, -4, 0, 0], [2, 1, -1, 0, 0], [-4, -1, 5, 0, 0], zeros, [0, 0, 0, 0, 9]].
  const std::vector<float> v = {2, 1, 0, 1, 0, 0, -1, -2, 0, 0, 0, 0, 0, 0, 3};
  const double infinity = std::numeric_limits<double>::infinity();
  // 5 / ((2 + 4) / 4), 1 / ((2 + 1) / 4), 5 / ((4 + 1) / 4), none, 9 / 0.
  const std::vector<double> expected = {10.0 / 3, 4.0 / 3, 4, std::nan(""), infinity};
  for (const int64_t stride : {1, 2, 3, 5}) {
    // The ratios do not depend on the length of v, even where its squares have no float32.
    for (const float scale : {1.0f, 1e-30f, 1e30f, 3e37f}) {
      std::vector<float> scaled = v;
      for (float& value : scaled) value *= scale;
      const int64_t rows = (5 + stride - 1) / stride;
      std::vector<float> products(rows * 5);
      std::vector<double> ratios(rows, -1);
      device_->DiagonalDominance(*stream, F32(scaled.data(), 5, 3), stride,
                                 F32(products.data(), rows, 5), ratios.data());
      ASSERT_TRUE(stream->Synchronize().ok());
      for (int64_t r = 0; r < rows; ++r) {
        const double ratio = expected[r * stride];
        if (std::isnan(ratio)) {
          EXPECT_TRUE(std::isnan(ratios[r]));
        } else if (std::isinf(ratio)) {
          EXPECT_EQ(ratios[r], ratio);
        } else {
          EXPECT_NEAR(ratios[r], ratio, 1e-6 * ratio) << scale;
        }
      }
    }
  }
}

TEST_P(DeviceTest, ClipScaleShrinksOnlyNormsAboveTheClip) {
  const auto stream = device_->NewStream("s");
  // Two ranks of stride 3 whose last two columns count: 9 + 16 + 0 + 0 = 5 squared.
  const double stats[] = {99, 9, 16, 99, 0, 0};
  float scale = 0;
  const auto clip_to = [&](double clip) {
    device_->ClipScale(*stream, stats + 1, 2, 3, 2, clip, &scale);
    EXPECT_TRUE(stream->Synchronize().ok());
    return scale;
  };
  EXPECT_FLOAT_EQ(clip_to(2.5), 2.5 / (5 + 1e-6));
  EXPECT_EQ(clip_to(6), 1.0f);
  EXPECT_EQ(clip_to(0), 1.0f);
  EXPECT_EQ(clip_to(std::numeric_limits<double>::infinity()), 1.0f);
}

TEST_P(DeviceTest, ClipScaleOfABrokenNormIsNotFinite) {
  const auto stream = device_->NewStream("s");
  const double stats[] = {1, std::numeric_limits<double>::infinity()};
  float scale = 0;
  device_->ClipScale(*stream, stats, 2, 1, 1, 1, &scale);
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_FALSE(std::isfinite(scale));
}

TEST_P(DeviceTest, AllocatedMemoryIsZeroAndAligned) {
  for (const int64_t bytes : {1, 100, 5 << 20}) {
    const auto data = device_->Allocate(bytes);
    ASSERT_TRUE(data.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*data) % 64, 0u);
    const auto* begin = static_cast<const char*>(*data);
    EXPECT_TRUE(std::all_of(begin, begin + bytes, [](char c) { return c == 0; }));
    device_->Free(*data, bytes);
  }
}

TEST_P(DeviceTest, AnImpossibleAllocationIsAnErrorThatNamesItsPurpose) {
  Allocator allocator(device_.get());
  const auto buffer = allocator.Allocate(MemoryPurpose::kGathered, int64_t{1} << 60);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(buffer.status().message().find("gathered"), absl::string_view::npos);
}

INSTANTIATE_TEST_SUITE_P(Threads, DeviceTest, testing::Values(1, 2, 3));

TEST(Allocator, CountsCurrentAndPeakByPurpose) {
  const auto device = *CreateDevice(Backend::kCpu, 1);
  Allocator allocator(device.get());
  Buffer kept = *allocator.Allocate(MemoryPurpose::kParameters, 100);
  {
    const Buffer a = *allocator.Allocate(MemoryPurpose::kGathered, 1000);
    const Buffer b = *allocator.Allocate(MemoryPurpose::kGathered, 500);
    EXPECT_EQ(allocator.current()[MemoryPurpose::kGathered], 1500);
  }
  const Buffer c = *allocator.Allocate(MemoryPurpose::kGathered, 700);
  EXPECT_EQ(allocator.current()[MemoryPurpose::kGathered], 700);
  EXPECT_EQ(allocator.peak()[MemoryPurpose::kGathered], 1500);
  EXPECT_EQ(allocator.peak().total(), 1600);
  const Buffer moved = std::move(kept);
  EXPECT_EQ(allocator.current()[MemoryPurpose::kParameters], 100);
  EXPECT_EQ(allocator.Allocate(MemoryPurpose::kOptimizer, 0)->data(), nullptr);
}

TEST(Allocator, PlanModeCountsWithoutMemory) {
  Allocator allocator = Allocator::ForPlan();
  {
    const Buffer buffer = *allocator.Allocate(MemoryPurpose::kOptimizer, int64_t{1} << 60);
    EXPECT_EQ(buffer.data(), nullptr);
    EXPECT_EQ(buffer.bytes(), int64_t{1} << 60);
  }
  EXPECT_EQ(allocator.current().total(), 0);
  EXPECT_EQ(allocator.peak()[MemoryPurpose::kOptimizer], int64_t{1} << 60);
}

TEST(CpuDevice, NoBytesAreZeroedAndCopiedFromNowhere) {
  const auto device = *CreateDevice(Backend::kCpu, 1);
  const auto stream = device->NewStream("stream");
  device->Zero(*stream, nullptr, 0);
  device->Copy(*stream, nullptr, nullptr, 0);
  device->CopyToHost(*stream, nullptr, nullptr, 0);
  device->CopyFromHost(*stream, nullptr, nullptr, 0);
  EXPECT_TRUE(stream->Synchronize().ok());
}

}  // namespace
}  // namespace dim0
