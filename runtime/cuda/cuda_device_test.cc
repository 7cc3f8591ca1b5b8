// The CUDA device's streams, events, copies and measurements. On a GPU, or on the emulator's.
#include "runtime/cuda/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/steady_clock.h"
#include "runtime/allocator.h"
#include "runtime/cuda/cuda_backend.h"

namespace dim0::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status status = CheckCuda(); !status.ok()) GTEST_SKIP() << status.message();
    auto device = CudaDevice::Create(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    allocator_.emplace(device_.get());
  }

  Buffer Allocate(int64_t bytes) {
    auto buffer = allocator_->Allocate(MemoryPurpose::kActivations, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }

  std::vector<float> Read(Stream& stream, const void* data, int64_t count) {
    std::vector<float> values(count, -7);
    device_->CopyToHost(stream, values.data(), data, count * sizeof(float));
    EXPECT_TRUE(stream.Synchronize().ok());
    return values;
  }

  std::unique_ptr<CudaDevice> device_;
  std::optional<Allocator> allocator_;
};

TEST_F(CudaDeviceTest, MemoryIsZeroAtFirst) {
  const Buffer buffer = Allocate(4096 * sizeof(float));
  const auto stream = device_->NewStream("stream");
  EXPECT_EQ(Read(*stream, buffer.data(), 4096), std::vector<float>(4096, 0));
}

TEST_F(CudaDeviceTest, ACopyFromHostMayOutliveItsSource) {
  // More, and larger, copies than pinned memory holds at a time.
  constexpr int64_t kCount = int64_t{3} << 20;
  constexpr int kCopies = 9;
  std::vector<Buffer> buffers;
  for (int i = 0; i < kCopies; ++i) buffers.push_back(Allocate(kCount * sizeof(float)));
  const auto stream = device_->NewStream("stream");
  for (int i = 0; i < kCopies; ++i) {
    std::vector<float> source(kCount);
    std::iota(source.begin(), source.end(), static_cast<float>(i));
    device_->CopyFromHost(*stream, buffers[i].data(), source.data(), kCount * sizeof(float));
    source.assign(kCount, -1);
  }
  for (int i = 0; i < kCopies; ++i) {
    std::vector<float> expected(kCount);
    std::iota(expected.begin(), expected.end(), static_cast<float>(i));
    EXPECT_TRUE(Read(*stream, buffers[i].data(), kCount) == expected) << i;
  }
}

TEST_F(CudaDeviceTest, ManySmallCopiesAreEachTheirOwn) {
  constexpr int kCopies = 200;
  const Buffer buffer = Allocate(kCopies * sizeof(float));
  const auto stream = device_->NewStream("stream");
  for (int i = 0; i < kCopies; ++i) {
    const float value = static_cast<float>(i);
    device_->CopyFromHost(*stream, buffer.f32() + i, &value, sizeof(value));
  }
  std::vector<float> expected(kCopies);
  std::iota(expected.begin(), expected.end(), 0.0f);
  EXPECT_EQ(Read(*stream, buffer.data(), kCopies), expected);
}

TEST_F(CudaDeviceTest, NoBytesMayBeCopiedFromNowhere) {
  const auto stream = device_->NewStream("stream");
  device_->CopyFromHost(*stream, nullptr, nullptr, 0);
  device_->CopyToHost(*stream, nullptr, nullptr, 0);
  device_->Copy(*stream, nullptr, nullptr, 0);
  device_->Zero(*stream, nullptr, 0);
  EXPECT_TRUE(stream->Synchronize().ok());
}

TEST_F(CudaDeviceTest, AStreamWaitsForAnotherOnesEvent) {
  constexpr int64_t kCount = 1 << 20;
  const Buffer first = Allocate(kCount * sizeof(float)), second = Allocate(kCount * sizeof(float));
  const auto writer = device_->NewStream("writer", StreamPriority::kHigh);
  const auto reader = device_->NewStream("reader");
  for (int round = 0; round < 5; ++round) {
    const std::vector<float> source(kCount, static_cast<float>(round + 1));
    device_->CopyFromHost(*writer, first.data(), source.data(), kCount * sizeof(float));
    reader->Wait(writer->Record());
    device_->Copy(*reader, second.data(), first.data(), kCount * sizeof(float));
    writer->Wait(reader->Record());
    device_->Zero(*writer, first.data(), kCount * sizeof(float));
    EXPECT_EQ(Read(*reader, second.data(), kCount), source) << round;
  }
  EXPECT_TRUE(writer->Synchronize().ok());
}

TEST_F(CudaDeviceTest, AFailedOpNamesItsUnitAndReachesWhoeverWaits) {
  const auto stream = device_->NewStream("stream"), other = device_->NewStream("other");
  bool ran = false;
  const std::string unit = "h.3";
  {
    const RecordedUnit recorded(nullptr, unit, Phase::kForward);
    stream->Enqueue({.name = "breaks"},
                    [](const OpContext&) { return absl::DataLossError("a cosmic ray"); });
  }
  stream->Enqueue({.name = "later"}, [&](const OpContext&) {
    ran = true;
    return absl::OkStatus();
  });
  other->Wait(stream->Record());
  const absl::Status status = other->Record().Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("breaks (unit h.3): a cosmic ray"));
  EXPECT_FALSE(ran);
  EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CudaDeviceTest, EventsTellTheHostsTime) {
  const auto stream = device_->NewStream("stream");
  const absl::Time before = SteadyNow();
  const Event first = stream->Record();
  const Buffer buffer = Allocate(int64_t{1} << 22);
  device_->Zero(*stream, buffer.data(), int64_t{1} << 22);
  const Event second = stream->Record();
  ASSERT_TRUE(second.Wait().ok());
  const absl::Time after = SteadyNow();
  const absl::Time begin = first.points().front()->time(), end = second.points().front()->time();
  EXPECT_LE(begin, end);
  // The anchor's own inexactness.
  EXPECT_GT(begin, before - absl::Milliseconds(5));
  EXPECT_LT(end, after + absl::Milliseconds(5));
}

TEST_F(CudaDeviceTest, ARecorderGetsOpsWaitsAndLiveMemory) {
  OpRecorder recorder;
  device_->SetRecorder(&recorder);
  const Buffer buffer = Allocate(int64_t{1} << 24);
  {
    const auto first = device_->NewStream("first"), second = device_->NewStream("second");
    device_->Zero(*first, buffer.data(), int64_t{1} << 24);
    device_->Zero(*first, buffer.data(), int64_t{1} << 24);
    second->Wait(first->Record());
    second->CountLive(MemoryPurpose::kGathered, 77);
    device_->Zero(*second, buffer.data(), 64);
    ASSERT_TRUE(second->Synchronize().ok());
  }
  device_->SetRecorder(nullptr);
  const auto streams = recorder.streams();
  ASSERT_EQ(streams.size(), 2u);
  ASSERT_EQ(streams[0]->ops().size(), 2u);
  ASSERT_EQ(streams[1]->ops().size(), 1u);
  for (const StreamRecord* stream : streams) {
    for (const RecordedOp& op : stream->ops()) {
      EXPECT_EQ(op.info.name, "zero");
      EXPECT_LE(op.begin, op.end);
      EXPECT_FALSE(op.failed);
    }
  }
  EXPECT_LE(streams[0]->ops()[0].end, streams[0]->ops()[1].begin);
  EXPECT_LE(streams[0]->ops()[1].end, streams[1]->ops()[0].end);
  ASSERT_EQ(streams[1]->memory().size(), 1u);
  EXPECT_EQ(streams[1]->memory()[0].bytes, 77);
  for (const RecordedWait& wait : streams[1]->waits()) {
    EXPECT_EQ(wait.cause.stream, "first");
    EXPECT_EQ(wait.cause.op, streams[0]->ops()[1].id);
    EXPECT_LE(wait.begin, wait.end);
  }
}

TEST_F(CudaDeviceTest, AGpuThatIsNotThereIsNamed) {
  const int count = *CountGpus();
  const auto device = CudaDevice::Create(count);
  ASSERT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(device.status().message()),
              HasSubstr(absl::StrCat("there is no GPU ", count)));
  const auto ranks = CreateLocalRanks(Backend::kCuda, count + 1, {});
  ASSERT_EQ(ranks.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(ranks.status().message()),
              HasSubstr(absl::StrCat("CUDA shows this process ", count)));
}

TEST_F(CudaDeviceTest, TheFirstErrorOfAStreamIsHeardAsItHappens) {
  std::vector<std::string> heard;
  device_->SetFailureHandler(
      [&](const absl::Status& error) { heard.emplace_back(error.message()); });
  const auto first = device_->NewStream("first"), second = device_->NewStream("second");
  const auto enqueue = [](Stream& stream, const char* name, const absl::Status& status) {
    stream.Enqueue({.name = name}, [=](const OpContext&) { return status; });
  };
  enqueue(*first, "good", absl::OkStatus());
  EXPECT_THAT(heard, IsEmpty());
  enqueue(*first, "bad", absl::DataLossError("lost"));
  EXPECT_THAT(heard, ElementsAre("bad: lost"));
  enqueue(*first, "worse", absl::DataLossError("lost more"));
  EXPECT_THAT(heard, SizeIs(1));
  second->Wait(first->Record());
  EXPECT_THAT(heard, ElementsAre("bad: lost", "bad: lost"));
  device_->SetFailureHandler(nullptr);
  enqueue(*device_->NewStream("third"), "bad", absl::DataLossError("lost"));
  EXPECT_THAT(heard, SizeIs(2));
}

TEST_F(CudaDeviceTest, MoreMemoryThanTheGpuHasIsRefused) {
  const AvailableMemory memory = *device_->Available(1, 1, 1);
  EXPECT_TRUE(memory.of_each_rank);
  EXPECT_GT(memory.bytes, 0);
  const auto buffer = allocator_->Allocate(MemoryPurpose::kActivations, int64_t{1} << 50);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  // And costs nothing of what there is.
  const Buffer usable = Allocate(1 << 20);
  EXPECT_NE(usable.data(), nullptr);
}

TEST_F(CudaDeviceTest, RatesAreMeasured) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    EXPECT_GT(device_->MeasureMatMulRate(dtype, absl::Milliseconds(20)), 0) << Name(dtype);
  }
  const auto triad = device_->MeasureTriadRate(absl::Milliseconds(20));
  ASSERT_TRUE(triad.ok()) << triad.status();
  EXPECT_GT(*triad, 0);
}

}  // namespace
}  // namespace dim0::cuda
