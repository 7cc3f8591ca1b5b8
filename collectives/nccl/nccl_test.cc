// What NCCL's ranks do beyond the contract of every backend: calls that return before they have
// run, errors that come later, ranks in different processes.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/dtype.h"
#include "collectives/free_port.h"
#include "collectives/nccl/arithmetic.h"
#include "collectives/nccl/staged_ranks.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Groups = std::vector<std::unique_ptr<ProcessGroup>>;

constexpr absl::Duration kPatience = absl::Seconds(60);

// Floats on a rank's GPU, with a stream. Made and used on the rank's thread.
class Memory {
 public:
  Memory(int device, int64_t count, float value) : count_(count) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(float)), cudaSuccess);
    const std::vector<float> values(count, value);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count * sizeof(float), cudaMemcpyHostToDevice),
              cudaSuccess);
    // Such a copy may return before the last bytes are there, and the stream does not wait for it.
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  }
  ~Memory() {
    (void)cudaFree(data_);
    (void)cudaStreamDestroy(stream_);
  }

  float* data() const { return data_; }
  cudaStream_t stream() const { return stream_; }
  std::vector<float> Read() const {
    std::vector<float> values(count_);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count_ * sizeof(float), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  const int64_t count_;
  cudaStream_t stream_ = nullptr;
  float* data_ = nullptr;
};

CallInfo Call(const char* unit, const Memory& memory) {
  CallInfo call;
  call.unit = unit;
  call.native_stream = memory.stream();
  return call;
}

std::vector<int> Devices(int count) {
  std::vector<int> devices(count);
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

absl::StatusOr<Groups> Create(int ranks, const std::vector<int>& devices,
                              const ProcessGroupOptions& options = {}) {
  absl::StatusOr<Groups> hosts = CreateThreadRanks(ranks, {.timeout = options.timeout});
  if (!hosts.ok()) return hosts.status();
  return CreateNcclRanks(*std::move(hosts), devices, options);
}

// Runs `body` for every rank at once, on a thread each.
void RunRanks(Groups groups, const std::function<void(std::unique_ptr<ProcessGroup>)>& body) {
  std::vector<std::thread> threads;
  for (std::unique_ptr<ProcessGroup>& group : groups) {
    threads.emplace_back([&body, group = std::move(group)]() mutable { body(std::move(group)); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Whether ranks are in one process, or, as far as they know, in one each.
class NcclTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoNcclRanks(3); !why.empty()) GTEST_SKIP() << why;
  }

  // `ranks` on as many devices.
  static Groups CreateOrDie(int ranks, absl::Duration timeout = kPatience) {
    if (!GetParam()) {
      absl::StatusOr<Groups> groups = Create(ranks, Devices(ranks), {.timeout = timeout});
      EXPECT_TRUE(groups.ok()) << groups.status();
      return *std::move(groups);
    }
    const int port = FreePort();
    Groups groups(ranks);
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        auto host =
            CreateTcpRank({.rank = r, .world_size = ranks, .address = "127.0.0.1", .port = port},
                          {.timeout = timeout});
        ASSERT_TRUE(host.ok()) << host.status();
        Groups hosts;
        hosts.push_back(*std::move(host));
        auto group = CreateNcclRanks(std::move(hosts), {r}, {.timeout = timeout});
        ASSERT_TRUE(group.ok()) << group.status();
        groups[r] = std::move(group->front());
      });
    }
    for (std::thread& thread : threads) thread.join();
    return groups;
  }

  // The rank's next call comes late: when `flag` is set. Where ranks share a process its stream
  // does, since the call returns when all have made it.
  static void AwaitBeforeTheNextCall(const std::atomic<bool>& flag, const Memory& memory) {
    const auto wait = [](void* flag) {
      while (!*static_cast<std::atomic<bool>*>(flag)) absl::SleepFor(absl::Milliseconds(1));
    };
    void* const argument = const_cast<std::atomic<bool>*>(&flag);
    if (GetParam()) {
      wait(argument);
    } else {
      ASSERT_EQ(cudaLaunchHostFunc(memory.stream(), wait, argument), cudaSuccess);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Processes, NcclTest, testing::Values(false, true),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "OneEach" : "OneForAll";
                         });

TEST_P(NcclTest, ACallReturnsBeforeItHasRunAndItsStreamPassesWhenAllHaveGotThere) {
  std::atomic<bool> looked{false};
  RunRanks(CreateOrDie(2), [&](std::unique_ptr<ProcessGroup> group) {
    const Memory memory(group->rank(), 100, 1.0f + group->rank());
    auto channel = group->Open("test").value();
    float* const data = memory.data();
    // The first call connects, and so waits for the other rank.
    ASSERT_EQ(channel->Barrier(Call("start", memory)), absl::OkStatus());
    ASSERT_EQ(cudaStreamSynchronize(memory.stream()), cudaSuccess);
    if (group->rank() == 1) AwaitBeforeTheNextCall(looked, memory);
    ASSERT_EQ(channel->AllReduce(Call("u", memory), DType::kFloat32, ReduceOp::kSum, data, 100),
              absl::OkStatus());
    if (group->rank() == 0) {
      absl::SleepFor(absl::Milliseconds(20));
      EXPECT_EQ(cudaStreamQuery(memory.stream()), cudaErrorNotReady);
      looked = true;
    }
    EXPECT_THAT(memory.Read(), Each(3.0f));
    EXPECT_EQ(group->Health(), absl::OkStatus());
  });
}

TEST_P(NcclTest, ManyCallsOfSeveralChannelsMayBeUnderWayAtOnce) {
  RunRanks(CreateOrDie(3), [](std::unique_ptr<ProcessGroup> group) {
    const int me = group->rank();
    const Memory parameters(me, 3, -1.0f), gradients(me, 300, 1.0f), sums(me, 100, 0.0f);
    auto gather = group->Open("parameter").value(), reduce = group->Open("gradient").value();
    const std::vector<int64_t> ones(3, 1), hundreds(3, 100);
    for (int step = 0; step < 50; ++step) {
      const AllGatherPart part{parameters.data() + me, parameters.data(), ones};
      ASSERT_EQ(gather->AllGather(Call("g", parameters), DType::kFloat32, {&part, 1}),
                absl::OkStatus());
      const ReduceScatterPart sum{gradients.data(), sums.data(), hundreds, /*accumulate=*/step > 0};
      ASSERT_EQ(reduce->ReduceScatter(Call("r", gradients), DType::kFloat32, {&sum, 1}),
                absl::OkStatus());
    }
    (void)gradients.Read();
    EXPECT_THAT(sums.Read(), Each(150.0f));
    EXPECT_THAT(parameters.Read(), Each(-1.0f));
    EXPECT_EQ(group->Health(), absl::OkStatus());
  });
}

TEST_P(NcclTest, ARankThatDoesNotComeFailsTheGroupAtTheDeadlineAndFreesTheStreams) {
  std::atomic<int> failed{0};
  std::barrier started(3);
  RunRanks(CreateOrDie(3, absl::Milliseconds(2500)), [&](std::unique_ptr<ProcessGroup> group) {
    const Memory memory(group->rank(), 10, 1.0f);
    auto channel = group->Open("test").value();
    ASSERT_EQ(channel->Barrier(Call("start", memory)), absl::OkStatus());
    ASSERT_EQ(cudaStreamSynchronize(memory.stream()), cudaSuccess);
    started.arrive_and_wait();  // what fails later must not fail the start
    if (group->rank() == 1) {
      while (failed < 2) absl::SleepFor(absl::Milliseconds(1));
      // The others' failure is everyone's, if not at once.
      while (group->Health().ok()) absl::SleepFor(absl::Milliseconds(1));
      return;
    }
    // In one process it returns with the error already.
    (void)channel->AllReduce(Call("h.7", memory), DType::kFloat32, ReduceOp::kSum, memory.data(),
                             10);
    (void)cudaStreamSynchronize(memory.stream());  // comes back
    const absl::Status status = group->Health();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("all_reduce(unit 'h.7'"), HasSubstr("as call 2 on channel 'test'"),
                      HasSubstr("rank 1 did not arrive"), HasSubstr("2.5s")));
    EXPECT_FALSE(absl::StrContains(status.message(), "\n"));
    EXPECT_EQ(channel->Barrier(Call("later", memory)), status);
    ++failed;
    while (failed < 2) absl::SleepFor(absl::Milliseconds(1));
  });
}

TEST_P(NcclTest, ADeadlineDoesNotCountTheTimeInWhichTheStreamIsBusyWithSomethingElse) {
  std::barrier started(2);
  RunRanks(CreateOrDie(2, absl::Seconds(2)), [&](std::unique_ptr<ProcessGroup> group) {
    const Memory memory(group->rank(), 10, 1.0f);
    auto channel = group->Open("test").value();
    ASSERT_EQ(channel->Barrier(Call("start", memory)), absl::OkStatus());
    ASSERT_EQ(cudaStreamSynchronize(memory.stream()), cudaSuccess);
    started.arrive_and_wait();  // what fails later must not fail the start
    absl::Time until = SteadyNow() + absl::Seconds(4);
    const auto busy = [](void* until) {
      absl::SleepFor(*static_cast<absl::Time*>(until) - SteadyNow());
    };
    ASSERT_EQ(cudaLaunchHostFunc(memory.stream(), busy, &until), cudaSuccess);
    ASSERT_EQ(
        channel->AllReduce(Call("u", memory), DType::kFloat32, ReduceOp::kSum, memory.data(), 10),
        absl::OkStatus());
    EXPECT_THAT(memory.Read(), Each(2.0f));
    EXPECT_EQ(group->Health(), absl::OkStatus());
  });
}

TEST_P(NcclTest, ADisagreementFailsTheGroupWithBothSides) {
  const absl::Time start = SteadyNow();
  std::barrier started(3);
  RunRanks(CreateOrDie(3), [&](std::unique_ptr<ProcessGroup> group) {
    const int me = group->rank();
    const Memory memory(me, 30, 1.0f);
    auto channel = group->Open("test").value();
    ASSERT_EQ(channel->Barrier(Call("start", memory)), absl::OkStatus());
    ASSERT_EQ(cudaStreamSynchronize(memory.stream()), cudaSuccess);
    started.arrive_and_wait();  // what fails later must not fail the start
    (void)channel->Broadcast(Call(me == 2 ? "h.4" : "h.3", memory), DType::kFloat32, memory.data(),
                             10, 0);
    while (group->Health().ok() && (void(cudaStreamSynchronize(memory.stream())), true)) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    const absl::Status status = group->Health();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("called broadcast(unit 'h.3'"),
                      HasSubstr("rank 2 called broadcast(unit 'h.4'"),
                      HasSubstr("as call 2 on channel 'test'")));
    EXPECT_EQ(channel->Barrier(Call("later", memory)), status);
  });
  EXPECT_LT(SteadyNow() - start, kPatience / 2) << "they waited for the deadline";
}

TEST_P(NcclTest, AnAbortFreesTheStreamsOfEveryRank) {
  const absl::Status reason = absl::DataLossError("loss is NaN at step 12, unit h.0");
  const absl::Time start = SteadyNow();
  std::atomic<int> waiting{0};
  std::barrier started(3);
  RunRanks(CreateOrDie(3), [&](std::unique_ptr<ProcessGroup> group) {
    const Memory memory(group->rank(), 10, 1.0f);
    auto channel = group->Open("test").value();
    ASSERT_EQ(channel->Barrier(Call("start", memory)), absl::OkStatus());
    ASSERT_EQ(cudaStreamSynchronize(memory.stream()), cudaSuccess);
    started.arrive_and_wait();  // what fails later must not fail the start
    if (group->rank() == 2) {
      while (waiting < 2) absl::SleepFor(absl::Milliseconds(1));
      absl::SleepFor(absl::Milliseconds(20));
      group->Abort(reason);
    } else {
      ++waiting;
      (void)channel->Barrier(Call("u", memory));
      (void)cudaStreamSynchronize(memory.stream());
    }
    while (group->Health().ok()) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(group->Health(), reason);
    EXPECT_EQ(group->Open("opened later").value()->Barrier(Call("u", memory)), reason);
  });
  EXPECT_LT(SteadyNow() - start, kPatience / 2) << "they waited for the deadline";
}

TEST_P(NcclTest, ARankThatLeavesFailsThoseThatWaitForIt) {
  const absl::Time start = SteadyNow();
  std::barrier started(3);
  RunRanks(CreateOrDie(3), [&](std::unique_ptr<ProcessGroup> group) {
    const Memory memory(group->rank(), 10, 1.0f);
    auto channel = group->Open("test").value();
    ASSERT_EQ(channel->Barrier(Call("start", memory)), absl::OkStatus());
    ASSERT_EQ(cudaStreamSynchronize(memory.stream()), cudaSuccess);
    started.arrive_and_wait();  // what fails later must not fail the start
    if (group->rank() == 1) return;
    (void)channel->Barrier(Call("h.2", memory));
    (void)cudaStreamSynchronize(memory.stream());
    const absl::Status status = group->Health();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("barrier(unit 'h.2'"), HasSubstr("rank 1 has left")));
  });
  EXPECT_LT(SteadyNow() - start, kPatience / 2) << "they waited for the deadline";
}

TEST_P(NcclTest, ARankMayLeaveWithCallsUnderWayThatTheOthersMakeLater) {
  std::atomic<bool> leaving{false};
  RunRanks(CreateOrDie(2), [&](std::unique_ptr<ProcessGroup> group) {
    const Memory memory(group->rank(), 10, 1.0f + group->rank());
    auto channel = group->Open("test").value();
    ASSERT_EQ(channel->Barrier(Call("start", memory)), absl::OkStatus());
    if (group->rank() == 1) AwaitBeforeTheNextCall(leaving, memory);
    ASSERT_EQ(channel->Broadcast(Call("u", memory), DType::kFloat32, memory.data(), 10, /*root=*/0),
              absl::OkStatus());
    if (group->rank() == 0) {
      leaving = true;
      return;  // most likely before the data have moved
    }
    EXPECT_THAT(memory.Read(), Each(1.0f));
    EXPECT_EQ(group->Health(), absl::OkStatus());
  });
}

TEST_P(NcclTest, HostChannelsWorkBesideThem) {
  RunRanks(CreateOrDie(3), [](std::unique_ptr<ProcessGroup> group) {
    auto host = group->OpenHost("host").value();
    int64_t value = 1;
    CallInfo call;
    call.purpose = Purpose::kControl;
    ASSERT_EQ(host->AllReduce(call, DType::kInt64, ReduceOp::kSum, &value, 1), absl::OkStatus());
    EXPECT_EQ(value, 3);
    EXPECT_EQ(group->ledger().calls(Purpose::kControl), 1) << "and what the backend says is none";
    EXPECT_EQ(host->Barrier(call), absl::OkStatus());
  });
}

TEST(CreateNcclRanksTest, WhatCannotBeIsRefused) {
  if (const std::string why = WhyNoNcclRanks(2); !why.empty()) GTEST_SKIP() << why;
  const auto error = [](const absl::StatusOr<Groups>& groups) {
    EXPECT_EQ(groups.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(groups.status().message());
  };
  EXPECT_THAT(error(Create(2, {0, 0})), HasSubstr("ranks 0 and 1 are both given CUDA device 0"));
  EXPECT_THAT(error(Create(2, {0, 99})), HasSubstr("rank 1 is given CUDA device 99"));
  EXPECT_THAT(error(Create(2, {-1, 0})), HasSubstr("rank 0 is given CUDA device -1"));
  EXPECT_THAT(error(Create(2, {0})), HasSubstr("2 ranks with 1 CUDA devices"));
  EXPECT_THAT(error(CreateNcclRanks({}, {}, {})), HasSubstr("0 ranks"));
  EXPECT_THAT(error(Create(2, {0, 1}, {.link = LinkSpeed{}})), HasSubstr("link"));
}

TEST(CreateNcclRanksTest, OneGpuForTwoProcessesIsRefusedBeforeNcclSeesIt) {
  if (const std::string why = WhyNoNcclRanks(1); !why.empty()) GTEST_SKIP() << why;
  Groups hosts = CreateThreadRanks(2, {}).value();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([host = std::move(hosts[r])]() mutable {
      Groups own;
      own.push_back(std::move(host));
      absl::StatusOr<Groups> group = CreateNcclRanks(std::move(own), {0}, {});
      ASSERT_TRUE(group.ok()) << group.status();
      const Memory memory(0, 1, 0.0f);
      const absl::Status status = (*group)[0]->Open("a").value()->Barrier(Call("u", memory));
      EXPECT_THAT(std::string(status.message()), HasSubstr("ranks 0 and 1 have the same GPU"));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- Arithmetic ----

// Host values on device 0, behind `offset` elements of padding that must stay as they are.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(const std::vector<T>& values, size_t offset) : offset_(offset) {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), (values.size() + offset) * sizeof(T)),
              cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    size_ = values.size();
  }
  ~DeviceArray() { (void)cudaFree(data_); }
  T* data() const { return data_ + offset_; }
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  const size_t offset_;
  size_t size_ = 0;
  T* data_ = nullptr;
};

template <typename T, typename Make>
void TestAddTo(DType dtype, Make make) {
  for (int64_t count : {1, 3, 4, 8, 255, 1025}) {
    for (size_t offset : {0, 1, 3}) {
      std::vector<T> sum(count), term(count), expected(count);
      for (int64_t i = 0; i < count; ++i) {
        sum[i] = make(i);
        term[i] = make(1000 - 3 * i);
        expected[i] = make(1000 - 2 * i);
      }
      const DeviceArray<T> sums(sum, offset), terms(term, offset / 2);
      ASSERT_EQ(cuda::LaunchAddTo(dtype, sums.data(), terms.data(), count, nullptr), cudaSuccess);
      const std::vector<T> result = sums.Read();
      EXPECT_EQ(std::memcmp(result.data(), expected.data(), count * sizeof(T)), 0)
          << Name(dtype) << " " << count << " " << offset;
    }
  }
}

TEST(ArithmeticTest, AddsAnyNumberOfElementsAtAnyAddress) {
  if (const std::string why = WhyNoNcclRanks(1); !why.empty()) GTEST_SKIP() << why;
  TestAddTo<float>(DType::kFloat32, [](int64_t i) { return static_cast<float>(i); });
  TestAddTo<int32_t>(DType::kInt32, [](int64_t i) {
    return static_cast<int32_t>(static_cast<uint32_t>(i) << 24);
  });
  TestAddTo<int64_t>(DType::kInt64, [](int64_t i) {
    return static_cast<int64_t>(static_cast<uint64_t>(i) << 56);
  });
  // Powers of two are exact, and so are their sums here: 2^k + 2^k.
  std::vector<BFloat16> sum(77), expected(77);
  for (int i = 0; i < 77; ++i) {
    sum[i] = BFloat16(std::ldexp(1.0f, i - 40));
    expected[i] = BFloat16(std::ldexp(1.0f, i - 39));
  }
  const DeviceArray<BFloat16> sums(sum, 1), terms(sum, 0);
  ASSERT_EQ(cuda::LaunchAddTo(DType::kBFloat16, sums.data(), terms.data(), 77, nullptr),
            cudaSuccess);
  EXPECT_EQ(std::memcmp(sums.Read().data(), expected.data(), 77 * sizeof(BFloat16)), 0);
  EXPECT_EQ(cuda::LaunchAddTo(DType::kFloat32, nullptr, nullptr, 0, nullptr), cudaSuccess);
  EXPECT_NE(cuda::LaunchAddTo(DType::kByte, sums.data(), terms.data(), 1, nullptr), cudaSuccess);
}

TEST(ArithmeticTest, KeysAreInTheOrderOfTheNumbersAndGiveThemBack) {
  if (const std::string why = WhyNoNcclRanks(1); !why.empty()) GTEST_SKIP() << why;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<float> ascending = {-kInfinity, -3e38f, -1.5f, -1.0f, -tiny, -0.0f,
                                        0.0f,       tiny,   1.0f,  1.5f,  3e38f, kInfinity};
  const int64_t count = ascending.size();
  const DeviceArray<float> values(ascending, 0), back(std::vector<float>(count), 0);
  const DeviceArray<int32_t> keys(std::vector<int32_t>(count), 0);
  ASSERT_EQ(cuda::LaunchToKeys(DType::kFloat32, values.data(), keys.data(), count, nullptr),
            cudaSuccess);
  ASSERT_EQ(cuda::LaunchFromKeys(DType::kFloat32, keys.data(), back.data(), count, nullptr),
            cudaSuccess);
  const std::vector<int32_t> order = keys.Read();
  for (int64_t i = 1; i < count; ++i) EXPECT_LT(order[i - 1], order[i]) << ascending[i];
  EXPECT_EQ(std::memcmp(back.Read().data(), ascending.data(), count * sizeof(float)), 0);

  const float nan = std::numeric_limits<float>::quiet_NaN();
  const DeviceArray<float> nans({nan, -nan}, 0);
  ASSERT_EQ(cuda::LaunchToKeys(DType::kFloat32, nans.data(), keys.data(), 2, nullptr), cudaSuccess);
  ASSERT_EQ(cuda::LaunchFromKeys(DType::kFloat32, keys.data(), back.data(), 2, nullptr),
            cudaSuccess);
  EXPECT_GT(keys.Read()[0], order.back());
  EXPECT_EQ(keys.Read()[0], keys.Read()[1]);
  EXPECT_TRUE(std::isnan(back.Read()[0]));
}

}  // namespace
}  // namespace dim0
