// What every backend must do. A backend joins by adding itself to `kBackends`: it says which ranks
// of the job live in this process, and each test's body runs once per such rank.
#include "collectives/communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/dtype.h"
#include "collectives/free_port.h"
#include "collectives/ledger.h"
#include "collectives/nccl/staged_ranks.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

using Groups = std::vector<std::unique_ptr<ProcessGroup>>;

struct Backend {
  const char* name;
  absl::StatusOr<Groups> (*create)(int world_size, const ProcessGroupOptions& options);
  // Why it cannot have so many ranks here; empty if it can.
  std::string (*why_not)(int world_size) = [](int) { return std::string(); };
  // What an asynchronous backend cannot promise.
  bool meets_on_host = true;
  bool sums_in_rank_order = true;
  bool channels_in_any_order = true;
};

// Ranks as processes would be, but in threads: each has its own connection.
absl::StatusOr<Groups> CreateTcpRanks(int world_size, const ProcessGroupOptions& options) {
  const int port = FreePort();
  std::vector<absl::StatusOr<std::unique_ptr<ProcessGroup>>> ranks(world_size);
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] {
      ranks[r] = CreateTcpRank(
          {.rank = r, .world_size = world_size, .address = "127.0.0.1", .port = port}, options);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Groups groups;
  for (auto& rank : ranks) {
    if (!rank.ok()) return rank.status();
    groups.push_back(*std::move(rank));
  }
  return groups;
}

const Backend kBackends[] = {{"Threads", &CreateThreadRanks},
                             {"Tcp", &CreateTcpRanks},
                             {.name = "Nccl",
                              .create = &CreateStagedNcclRanks,
                              .why_not = &WhyNoNcclRanks,
                              .meets_on_host = false,
                              .sums_in_rank_order = false,
                              .channels_in_any_order = false}};

// Ends a test that would otherwise hang with a failure.
constexpr absl::Duration kPatience = absl::Seconds(60);

// Runs `body` for every rank at once, each on its own thread and with its own group, which goes
// when the body returns, as it does in a program.
void RunRanks(const Backend& backend, int world_size, absl::Duration timeout,
              const std::function<void(std::unique_ptr<ProcessGroup>)>& body) {
  ProcessGroupOptions options;
  options.timeout = timeout;
  absl::StatusOr<Groups> groups = backend.create(world_size, options);
  ASSERT_TRUE(groups.ok()) << groups.status();
  std::vector<std::thread> threads;
  for (std::unique_ptr<ProcessGroup>& group : *groups) {
    threads.emplace_back([&body, group = std::move(group)]() mutable { body(std::move(group)); });
  }
  for (std::thread& thread : threads) thread.join();
}

std::unique_ptr<Communicator> OpenOrDie(ProcessGroup& group, absl::string_view name) {
  absl::StatusOr<std::unique_ptr<Communicator>> communicator = group.Open(name);
  EXPECT_TRUE(communicator.ok()) << communicator.status();
  return *std::move(communicator);
}

// Runs `body` for every rank with one channel, "test".
void RunRanks(const Backend& backend, int world_size, absl::Duration timeout,
              const std::function<void(ProcessGroup&, Communicator&)>& body) {
  RunRanks(backend, world_size, timeout, [&](std::unique_ptr<ProcessGroup> group) {
    std::unique_ptr<Communicator> communicator = OpenOrDie(*group, "test");
    body(*group, *communicator);
  });
}

// Returns when all ranks have called it, once. Where an error fails the whole group, none of them
// is then still in an earlier call.
void MeetOnHost(ProcessGroup& group) {
  absl::StatusOr<std::unique_ptr<Communicator>> host = group.OpenHost("meeting");
  ASSERT_TRUE(host.ok()) << host.status();
  ASSERT_EQ((*host)->Barrier({}), absl::OkStatus());
}

// A small integer, exact in every element type.
template <typename T>
T FromInt(int value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// Rank r's element i. Small, so that sums over 8 ranks are exact in every type (bfloat16 holds
// every integer up to 256), and with a period, so that expected values are cheap at every size.
constexpr int64_t kPeriod = 31;
int Value(int r, int64_t i) { return static_cast<int>((i * 7 + r * 13) % kPeriod) - 15; }
constexpr int kUntouched = 99;

// f(0), f(1), ... for an f of the values above, which has their period.
template <typename T, typename F>
std::vector<T> Tabulate(int64_t count, F f) {
  std::vector<T> values(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = i < kPeriod ? FromInt<T>(f(i)) : values[i - kPeriod];
  }
  return values;
}

template <typename T>
std::vector<T> Values(int r, int64_t count) {
  return Tabulate<T>(count, [r](int64_t i) { return Value(r, i); });
}

// The first index at which two arrays differ in their bits, or -1. One comparison per array rather
// than one per element keeps the large sizes quick under sanitizers.
template <typename T>
int64_t FirstDifference(absl::Span<const T> a, absl::Span<const T> b) {
  if (a.size() != b.size()) return std::min(a.size(), b.size());
  if (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0) return -1;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) return i;
  }
  return -1;
}
template <typename T>
int64_t FirstDifference(const std::vector<T>& a, const std::vector<T>& b) {
  return FirstDifference(absl::MakeConstSpan(a), absl::MakeConstSpan(b));
}

int64_t Total(absl::Span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// How a tensor of some size may be spread over the ranks.
enum class Spread { kEven, kCeiling, kRagged, kLastOnly };

std::vector<int64_t> Counts(Spread spread, int64_t size, int world_size) {
  std::vector<int64_t> counts(world_size);
  const int64_t ceiling = (size + world_size - 1) / world_size;
  for (int r = 0; r < world_size; ++r) {
    switch (spread) {
      case Spread::kEven:
        counts[r] = size;
        break;
      case Spread::kCeiling:  // the sharding rule: the last ranks hold fewer or none
        counts[r] = std::clamp<int64_t>(size - r * ceiling, 0, ceiling);
        break;
      case Spread::kRagged:  // every third rank is empty
        counts[r] = r % 3 == 1 ? 0 : size / (r + 1) + r;
        break;
      case Spread::kLastOnly:
        counts[r] = r + 1 == world_size ? size : 0;
        break;
    }
  }
  return counts;
}
constexpr Spread kSpreads[] = {Spread::kEven, Spread::kCeiling, Spread::kRagged, Spread::kLastOnly};

// 2049 is one more than a multiple of any vector's or block's length; kLarge's bytes are more than
// an L2 cache holds.
constexpr int64_t kSizes[] = {0, 1, 13, 2049};
constexpr int64_t kLarge = 150001;

// Runs `body` over all sizes and spreads; the large size with the sharding rule only.
void ForSizesAndSpreads(int world_size,
                        const std::function<void(const std::vector<int64_t>& counts)>& body) {
  for (int64_t size : kSizes) {
    for (Spread spread : kSpreads) body(Counts(spread, size, world_size));
  }
  body(Counts(Spread::kCeiling, kLarge, world_size));
}

CallInfo Call(std::string unit, Purpose purpose = Purpose::kParameter) {
  CallInfo call;
  call.unit = std::move(unit);
  call.purpose = purpose;
  return call;
}

// Calls `body.template operator()<T>(dtype)` for each type.
template <typename Body>
void ForReducibleTypes(Body body) {
  body.template operator()<float>(DType::kFloat32);
  body.template operator()<BFloat16>(DType::kBFloat16);
  body.template operator()<int32_t>(DType::kInt32);
  body.template operator()<int64_t>(DType::kInt64);
}
template <typename Body>
void ForAllTypes(Body body) {
  ForReducibleTypes(body);
  body.template operator()<uint8_t>(DType::kByte);
}

void PrintTo(const Backend& backend, std::ostream* os) { *os << backend.name; }

class CommunicatorTest : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    constexpr int kMostRanks = 4;
    if (const std::string why = GetParam().why_not(kMostRanks); !why.empty()) GTEST_SKIP() << why;
  }

  void Run(int world_size, const std::function<void(ProcessGroup&, Communicator&)>& body) {
    RunRanks(GetParam(), world_size, kPatience, body);
  }
};

class CollectiveTest : public testing::TestWithParam<std::tuple<Backend, int>> {
 protected:
  void SetUp() override {
    if (const std::string why = std::get<0>(GetParam()).why_not(world_size()); !why.empty()) {
      GTEST_SKIP() << why;
    }
  }

  int world_size() const { return std::get<1>(GetParam()); }
  void Run(const std::function<void(ProcessGroup&, Communicator&)>& body) {
    RunRanks(std::get<0>(GetParam()), world_size(), kPatience, body);
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, testing::ValuesIn(kBackends),
                         [](const testing::TestParamInfo<Backend>& info) {
                           return std::string(info.param.name);
                         });

std::string BackendAndRanks(const testing::TestParamInfo<std::tuple<Backend, int>>& info) {
  return absl::StrCat(std::get<0>(info.param).name, std::get<1>(info.param), "Ranks");
}
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveTest,
                         testing::Combine(testing::ValuesIn(kBackends),
                                          testing::Values(1, 2, 3, 4, 7, 8)),
                         BackendAndRanks);

// ---- Data ----

TEST_P(CollectiveTest, AllGatherPutsEveryRanksElementsInRankOrder) {
  Run([&](ProcessGroup&, Communicator& comm) {
    ForAllTypes([&]<typename T>(DType dtype) {
      ForSizesAndSpreads(world_size(), [&](const std::vector<int64_t>& counts) {
        std::vector<T> expected;
        for (int r = 0; r < world_size(); ++r) {
          const std::vector<T> piece = Values<T>(r, counts[r]);
          expected.insert(expected.end(), piece.begin(), piece.end());
        }
        const std::vector<T> send = Values<T>(comm.rank(), counts[comm.rank()]);
        std::vector<T> recv(Total(counts), FromInt<T>(kUntouched));
        const AllGatherPart part{send.data(), recv.data(), counts};
        ASSERT_EQ(comm.AllGather(Call("u"), dtype, {&part, 1}), absl::OkStatus());
        EXPECT_EQ(FirstDifference(recv, expected), -1) << Name(dtype);
      });
    });
  });
}

TEST_P(CollectiveTest, AllGatherWorksInPlace) {
  Run([&](ProcessGroup&, Communicator& comm) {
    ForSizesAndSpreads(world_size(), [&](const std::vector<int64_t>& counts) {
      std::vector<float> expected;
      int64_t own_offset = 0;
      for (int r = 0; r < world_size(); ++r) {
        if (r == comm.rank()) own_offset = expected.size();
        const std::vector<float> piece = Values<float>(r, counts[r]);
        expected.insert(expected.end(), piece.begin(), piece.end());
      }
      std::vector<float> whole(Total(counts), kUntouched);
      const std::vector<float> own = Values<float>(comm.rank(), counts[comm.rank()]);
      std::copy(own.begin(), own.end(), whole.begin() + own_offset);
      const AllGatherPart part{whole.data() + own_offset, whole.data(), counts};
      ASSERT_EQ(comm.AllGather(Call("u"), DType::kFloat32, {&part, 1}), absl::OkStatus());
      EXPECT_EQ(FirstDifference(whole, expected), -1);
    });
  });
}

TEST_P(CollectiveTest, SeveralPartsGatherAndReduceAsOneCall) {
  Run([&](ProcessGroup& group, Communicator& comm) {
    const int me = comm.rank();
    const std::vector<std::vector<int64_t>> counts = {
        Counts(Spread::kEven, 5, world_size()), Counts(Spread::kLastOnly, 3, world_size()),
        Counts(Spread::kCeiling, 0, world_size()), Counts(Spread::kRagged, 40, world_size())};
    std::vector<std::vector<float>> shards, wholes, sends, sums;
    std::vector<AllGatherPart> gather;
    std::vector<ReduceScatterPart> reduce;
    for (const auto& c : counts) {
      shards.push_back(Values<float>(me, c[me]));
      wholes.emplace_back(Total(c), kUntouched);
      sends.push_back(Values<float>(me, Total(c)));
      sums.emplace_back(c[me], kUntouched);
    }
    for (size_t p = 0; p < counts.size(); ++p) {
      gather.push_back({shards[p].data(), wholes[p].data(), counts[p]});
      reduce.push_back({sends[p].data(), sums[p].data(), counts[p]});
    }
    ASSERT_EQ(comm.AllGather(Call("u"), DType::kFloat32, gather), absl::OkStatus());
    ASSERT_EQ(comm.ReduceScatter(Call("u"), DType::kFloat32, reduce), absl::OkStatus());
    EXPECT_EQ(group.ledger().calls(Purpose::kParameter), 2);
    for (size_t p = 0; p < counts.size(); ++p) {
      int64_t offset = 0;
      for (int r = 0; r < world_size(); ++r) {
        for (int64_t i = 0; i < counts[p][r]; ++i) {
          EXPECT_EQ(wholes[p][offset + i], Value(r, i)) << "part " << p;
          if (r == me) {
            float sum = 0;
            for (int s = 0; s < world_size(); ++s) sum += Value(s, offset + i);
            EXPECT_EQ(sums[p][i], sum) << "part " << p;
          }
        }
        offset += counts[p][r];
      }
    }
  });
}

TEST_P(CollectiveTest, ReduceScatterGivesEachRankItsStretchOfTheSum) {
  Run([&](ProcessGroup&, Communicator& comm) {
    ForReducibleTypes([&]<typename T>(DType dtype) {
      ForSizesAndSpreads(world_size(), [&](const std::vector<int64_t>& counts) {
        for (bool accumulate : {false, true}) {
          const int64_t own = counts[comm.rank()];
          const int64_t offset = Total(absl::MakeConstSpan(counts).first(comm.rank()));
          const std::vector<T> expected = Tabulate<T>(own, [&](int64_t i) {
            int sum = accumulate ? kUntouched : 0;
            for (int r = 0; r < world_size(); ++r) sum += Value(r, offset + i);
            return sum;
          });
          std::vector<T> recv(own, FromInt<T>(kUntouched));
          const std::vector<T> send = Values<T>(comm.rank(), Total(counts));
          const ReduceScatterPart part{send.data(), recv.data(), counts, accumulate};
          ASSERT_EQ(comm.ReduceScatter(Call("u"), dtype, {&part, 1}), absl::OkStatus());
          EXPECT_EQ(FirstDifference(recv, expected), -1) << Name(dtype);
        }
      });
    });
  });
}

TEST_P(CollectiveTest, AllReduceGivesEveryRankTheSumAndTheMaximum) {
  Run([&](ProcessGroup&, Communicator& comm) {
    ForReducibleTypes([&]<typename T>(DType dtype) {
      for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{13}, int64_t{2049}, kLarge}) {
        const std::vector<T> sum = Tabulate<T>(size, [&](int64_t i) {
          int s = 0;
          for (int r = 0; r < world_size(); ++r) s += Value(r, i);
          return s;
        });
        const std::vector<T> maximum = Tabulate<T>(size, [&](int64_t i) {
          int m = Value(0, i);
          for (int r = 1; r < world_size(); ++r) m = std::max(m, Value(r, i));
          return m;
        });
        std::vector<T> data = Values<T>(comm.rank(), size);
        ASSERT_EQ(comm.AllReduce(Call("u"), dtype, ReduceOp::kSum, data.data(), size),
                  absl::OkStatus());
        EXPECT_EQ(FirstDifference(data, sum), -1) << Name(dtype) << " " << size;
        data = Values<T>(comm.rank(), size);
        ASSERT_EQ(comm.AllReduce(Call("u"), dtype, ReduceOp::kMax, data.data(), size),
                  absl::OkStatus());
        EXPECT_EQ(FirstDifference(data, maximum), -1) << Name(dtype) << " " << size;
      }
    });
  });
}

TEST_P(CollectiveTest, BroadcastReplacesEveryRanksDataByTheRoots) {
  Run([&](ProcessGroup&, Communicator& comm) {
    ForAllTypes([&]<typename T>(DType dtype) {
      for (int root : {0, world_size() / 2, world_size() - 1}) {
        for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{13}, kLarge}) {
          std::vector<T> data = Values<T>(comm.rank(), size);
          ASSERT_EQ(comm.Broadcast(Call("u"), dtype, data.data(), size, root), absl::OkStatus());
          EXPECT_EQ(FirstDifference(data, Values<T>(root, size)), -1) << Name(dtype);
        }
      }
    });
  });
}

TEST_P(CollectiveTest, GatherCollectsOnTheRootOnlyAndScatterUndoesIt) {
  Run([&](ProcessGroup&, Communicator& comm) {
    ForAllTypes([&]<typename T>(DType dtype) {
      ForSizesAndSpreads(world_size(), [&](const std::vector<int64_t>& counts) {
        for (int root : {0, world_size() - 1}) {
          const bool is_root = comm.rank() == root;
          std::vector<T> expected;
          for (int r = 0; r < world_size(); ++r) {
            const std::vector<T> piece = Values<T>(r, counts[r]);
            expected.insert(expected.end(), piece.begin(), piece.end());
          }
          const std::vector<T> own = Values<T>(comm.rank(), counts[comm.rank()]);
          std::vector<T> whole(is_root ? Total(counts) : 0, FromInt<T>(kUntouched));
          ASSERT_EQ(comm.Gather(Call("u"), dtype, own.data(), whole.data(), counts, root),
                    absl::OkStatus());
          if (is_root) {
            EXPECT_EQ(FirstDifference(whole, expected), -1) << Name(dtype);
          }

          std::vector<T> back(own.size(), FromInt<T>(kUntouched));
          ASSERT_EQ(comm.Scatter(Call("u"), dtype, whole.data(), back.data(), counts, root),
                    absl::OkStatus());
          EXPECT_EQ(FirstDifference(back, own), -1) << Name(dtype);
        }
      });
    });
  });
}

TEST_P(CollectiveTest, GatherAndScatterWorkInPlaceOnTheRoot) {
  Run([&](ProcessGroup&, Communicator& comm) {
    const int root = world_size() - 1;
    const std::vector<int64_t> counts = Counts(Spread::kRagged, 100, world_size());
    const int64_t offset = Total(absl::MakeConstSpan(counts).first(comm.rank()));
    std::vector<float> whole(Total(counts), kUntouched);
    const std::vector<float> own = Values<float>(comm.rank(), counts[comm.rank()]);
    std::copy(own.begin(), own.end(), whole.begin() + offset);
    float* piece = whole.data() + offset;
    ASSERT_EQ(comm.Gather(Call("u"), DType::kFloat32, piece, whole.data(), counts, root),
              absl::OkStatus());
    std::vector<float> expected;
    for (int r = 0; r < world_size(); ++r) {
      const std::vector<float> values = Values<float>(r, counts[r]);
      expected.insert(expected.end(), values.begin(), values.end());
    }
    if (comm.rank() == root) {
      EXPECT_EQ(FirstDifference(whole, expected), -1);
    }
    std::fill(piece, piece + own.size(), comm.rank() == root ? 5.0f : kUntouched);
    ASSERT_EQ(comm.Scatter(Call("u"), DType::kFloat32, whole.data(), piece, counts, root),
              absl::OkStatus());
    if (comm.rank() == root) {
      EXPECT_THAT(absl::MakeConstSpan(piece, own.size()), Each(5.0f));
    } else {
      EXPECT_THAT(absl::MakeConstSpan(piece, own.size()), ElementsAreArray(own));
    }
  });
}

TEST_P(CollectiveTest, AllToAllDeliversEverySegment) {
  // Rank i sends (3 i + 5 j) % 4 * scale elements to rank j; some of these are none.
  const auto length = [](int i, int j, int64_t scale) { return (3 * i + 5 * j) % 4 * scale; };
  Run([&](ProcessGroup&, Communicator& comm) {
    const int me = comm.rank();
    ForAllTypes([&]<typename T>(DType dtype) {
      for (int64_t scale : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{20011}}) {
        std::vector<std::vector<T>> out(world_size()), in(world_size());
        std::vector<ConstSegment> send;
        std::vector<Segment> recv;
        for (int r = 0; r < world_size(); ++r) {
          out[r] = Values<T>(10 * me + r, length(me, r, scale));
          in[r].assign(length(r, me, scale), FromInt<T>(kUntouched));
          send.push_back({out[r].data(), static_cast<int64_t>(out[r].size())});
          recv.push_back({in[r].data(), static_cast<int64_t>(in[r].size())});
        }
        ASSERT_EQ(comm.AllToAll(Call("u"), dtype, send, recv), absl::OkStatus());
        for (int r = 0; r < world_size(); ++r) {
          EXPECT_EQ(FirstDifference(in[r], Values<T>(10 * r + me, length(r, me, scale))), -1)
              << Name(dtype) << " from " << r;
        }
      }
    });
  });
}

TEST_P(CollectiveTest, ABuffersOwnerMayReuseItAsSoonAsItsCallReturns) {
  // Every rank overwrites what it sent right after each call; a backend that lets a rank go too
  // early delivers the later values.
  Run([&](ProcessGroup&, Communicator& comm) {
    constexpr int64_t kCount = 5000;
    const std::vector<int64_t> counts(world_size(), kCount);
    std::vector<float> send(kCount), recv(kCount * world_size());
    std::vector<float> gradient(kCount * world_size()), shard(kCount);
    for (int step = 0; step < 20; ++step) {
      std::fill(send.begin(), send.end(), 100 * step + comm.rank());
      const AllGatherPart part{send.data(), recv.data(), counts};
      ASSERT_EQ(comm.AllGather(Call("u"), DType::kFloat32, {&part, 1}), absl::OkStatus());
      std::fill(send.begin(), send.end(), -1);
      for (int r = 0; r < world_size(); ++r) {
        const std::vector<float> expected(kCount, 100 * step + r);
        ASSERT_EQ(
            FirstDifference<float>(absl::MakeConstSpan(recv).subspan(r * kCount, kCount), expected),
            -1);
      }
      std::fill(gradient.begin(), gradient.end(), step);
      const ReduceScatterPart sum{gradient.data(), shard.data(), counts};
      ASSERT_EQ(comm.ReduceScatter(Call("u"), DType::kFloat32, {&sum, 1}), absl::OkStatus());
      std::fill(gradient.begin(), gradient.end(), -1);
      ASSERT_EQ(FirstDifference(shard, std::vector<float>(kCount, step * world_size())), -1);
    }
  });
}

TEST_P(CollectiveTest, BarrierHoldsEveryRankUntilTheLastHasCome) {
  std::atomic<int> arrived{0};
  Run([&](ProcessGroup&, Communicator& comm) {
    for (int round = 1; round <= 10; ++round) {
      if (comm.rank() == round % world_size()) absl::SleepFor(absl::Milliseconds(2));
      ++arrived;
      ASSERT_EQ(comm.Barrier(Call("u")), absl::OkStatus());
      EXPECT_GE(arrived, round * world_size());
    }
  });
}

TEST_P(CollectiveTest, ChannelsOfOneRankRunSideBySideOnTheirOwnThreads) {
  if (!std::get<0>(GetParam()).channels_in_any_order) {
    GTEST_SKIP() << "the backend's ranks make the calls of all channels in one order";
  }
  RunRanks(
      std::get<0>(GetParam()), world_size(), kPatience, [&](std::unique_ptr<ProcessGroup> group) {
        // The ranks open the channels in different orders and run at different paces.
        std::unique_ptr<Communicator> gather, reduce;
        if (group->rank() % 2 == 0) gather = OpenOrDie(*group, "parameter");
        reduce = OpenOrDie(*group, "gradient");
        if (gather == nullptr) gather = OpenOrDie(*group, "parameter");
        const int n = world_size(), me = group->rank();
        const std::vector<int64_t> counts = Counts(Spread::kCeiling, 10007, n);
        std::thread gathering([&] {
          for (int step = 0; step < 30; ++step) {
            const std::vector<float> send(counts[me], 10 * step + me);
            std::vector<float> recv(Total(counts));
            const AllGatherPart part{send.data(), recv.data(), counts};
            ASSERT_EQ(gather->AllGather(Call("g"), DType::kFloat32, {&part, 1}), absl::OkStatus());
            EXPECT_EQ(recv.front(), 10 * step);
          }
        });
        for (int step = 0; step < 20; ++step) {
          const std::vector<float> send(Total(counts), step + me);
          std::vector<float> recv(counts[me]);
          const ReduceScatterPart part{send.data(), recv.data(), counts};
          ASSERT_EQ(reduce->ReduceScatter(Call("r"), DType::kFloat32, {&part, 1}),
                    absl::OkStatus());
          const std::vector<float> expected(counts[me], n * step + n * (n - 1) / 2);
          EXPECT_EQ(FirstDifference(recv, expected), -1);
        }
        gathering.join();
      });
}

// ---- Arithmetic ----

TEST_P(CommunicatorTest, Float32IsSummedInRankOrder) {
  // (1e8 + 1) - 1e8 is 0 in float32, where 1e8 - 1e8 + 1 would be 1; and then + 3.
  if (!GetParam().sums_in_rank_order) GTEST_SKIP() << "the backend has its own order";
  Run(4, [](ProcessGroup&, Communicator& comm) {
    constexpr std::array<float, 4> kTerms = {1e8f, 1.0f, -1e8f, 3.0f};
    std::vector<float> data(1001, kTerms[comm.rank()]);
    const std::vector<int64_t> counts = {1, 0, 990, 10};
    std::vector<float> sum(counts[comm.rank()]);
    const ReduceScatterPart part{data.data(), sum.data(), counts};
    ASSERT_EQ(comm.ReduceScatter(Call("u"), DType::kFloat32, {&part, 1}), absl::OkStatus());
    EXPECT_THAT(sum, Each(3.0f));
    ASSERT_EQ(comm.AllReduce(Call("u"), DType::kFloat32, ReduceOp::kSum, data.data(), 1001),
              absl::OkStatus());
    EXPECT_THAT(data, Each(3.0f));
  });
}

TEST_P(CommunicatorTest, BFloat16IsSummedInFloat32AndRoundedOnce) {
  // bfloat16 has 8 significant bits: 256 + 1 rounds back to 256, but 256 + 1 + 1 = 258 fits. With
  // 258 to add to, the sum 516 fits, too.
  if (!GetParam().sums_in_rank_order) GTEST_SKIP() << "the backend has its own order";
  Run(3, [](ProcessGroup&, Communicator& comm) {
    std::vector<BFloat16> data(30, BFloat16(comm.rank() == 0 ? 256.0f : 1.0f));
    const std::vector<int64_t> counts(3, 10);
    for (bool accumulate : {false, true}) {
      std::vector<BFloat16> sum(10, BFloat16(258.0f));
      const ReduceScatterPart part{data.data(), sum.data(), counts, accumulate};
      ASSERT_EQ(comm.ReduceScatter(Call("u"), DType::kBFloat16, {&part, 1}), absl::OkStatus());
      for (BFloat16 x : sum) EXPECT_EQ(static_cast<float>(x), accumulate ? 516.0f : 258.0f);
    }
    ASSERT_EQ(comm.AllReduce(Call("u"), DType::kBFloat16, ReduceOp::kSum, data.data(), 30),
              absl::OkStatus());
    for (BFloat16 x : data) EXPECT_EQ(static_cast<float>(x), 258.0f);
  });
}

TEST_P(CommunicatorTest, TheMaximumWithANanIsNanWhicheverRankHasIt) {
  Run(3, [](ProcessGroup&, Communicator& comm) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float infinity = std::numeric_limits<float>::infinity();
    for (int with_nan = 0; with_nan < 3; ++with_nan) {
      std::vector<float> wide = {comm.rank() == with_nan ? nan : infinity, -2.0f + comm.rank(),
                                 -infinity};
      std::vector<BFloat16> narrow(wide.begin(), wide.end());
      ASSERT_EQ(comm.AllReduce(Call("u"), DType::kFloat32, ReduceOp::kMax, wide.data(), 3),
                absl::OkStatus());
      ASSERT_EQ(comm.AllReduce(Call("u"), DType::kBFloat16, ReduceOp::kMax, narrow.data(), 3),
                absl::OkStatus());
      EXPECT_TRUE(std::isnan(wide[0]));
      EXPECT_EQ(wide[1], 0.0f);
      EXPECT_EQ(wide[2], -infinity);
      EXPECT_TRUE(std::isnan(static_cast<float>(narrow[0])));
      EXPECT_EQ(static_cast<float>(narrow[1]), 0.0f);
      EXPECT_EQ(static_cast<float>(narrow[2]), -infinity);
    }
  });
}

TEST_P(CommunicatorTest, IntegerSumsWrapAround) {
  Run(2, [](ProcessGroup&, Communicator& comm) {
    int32_t narrow = std::numeric_limits<int32_t>::max();
    int64_t wide = std::numeric_limits<int64_t>::min();
    ASSERT_EQ(comm.AllReduce(Call("u"), DType::kInt32, ReduceOp::kSum, &narrow, 1),
              absl::OkStatus());
    ASSERT_EQ(comm.AllReduce(Call("u"), DType::kInt64, ReduceOp::kSum, &wide, 1), absl::OkStatus());
    EXPECT_EQ(narrow, -2);
    EXPECT_EQ(wide, 0);
  });
}

// ---- Ledger ----

TEST_P(CollectiveTest, TheLedgerHoldsTheRingFormulasToTheByte) {
  const int64_t n = world_size();
  // Of each spread, the bytes that all ranks entered; filled by the ranks.
  std::atomic<int64_t> gathered{0}, scattered{0}, reduced{0};
  int64_t expected_gathered = 0, expected_reduced = 0;
  const int64_t reduce_sizes[] = {0, 1, 13, 840, kLarge};
  ForSizesAndSpreads(world_size(), [&](const std::vector<int64_t>& counts) {
    expected_gathered += (n - 1) * 4 * Total(counts);
  });
  for (int64_t size : reduce_sizes) expected_reduced += 2 * (n - 1) * 2 * size;

  Run([&](ProcessGroup& group, Communicator& comm) {
    const int me = comm.rank();
    const auto bytes_of = [&](const std::function<absl::Status(const CallInfo&)>& collective,
                              Purpose purpose) {
      const int64_t before = group.ledger().bytes(purpose);
      EXPECT_EQ(collective(Call("u", purpose)), absl::OkStatus());
      return group.ledger().bytes(purpose) - before;
    };

    ForSizesAndSpreads(world_size(), [&](const std::vector<int64_t>& counts) {
      const int64_t total = Total(counts);
      std::vector<float> shard(counts[me]), whole(total);
      const AllGatherPart gather{shard.data(), whole.data(), counts};
      int64_t bytes = bytes_of(
          [&](const CallInfo& call) {
            return comm.AllGather(call, DType::kFloat32, {&gather, 1});
          },
          Purpose::kParameter);
      EXPECT_EQ(bytes, 4 * (total - counts[(me + 1) % n]));
      gathered += bytes;

      const ReduceScatterPart reduce{whole.data(), shard.data(), counts};
      bytes = bytes_of(
          [&](const CallInfo& call) {
            return comm.ReduceScatter(call, DType::kFloat32, {&reduce, 1});
          },
          Purpose::kGradient);
      EXPECT_EQ(bytes, 4 * (total - counts[me]));
      scattered += bytes;

      const int root = static_cast<int>(n) - 1;
      bytes = bytes_of(
          [&](const CallInfo& call) {
            return comm.Gather(call, DType::kFloat32, shard.data(), whole.data(), counts, root);
          },
          Purpose::kOptimizer);
      EXPECT_EQ(bytes, me == root ? 0 : 4 * counts[me]);

      bytes = bytes_of(
          [&](const CallInfo& call) {
            return comm.Scatter(call, DType::kFloat32, whole.data(), shard.data(), counts, root);
          },
          Purpose::kOptimizer);
      EXPECT_EQ(bytes, me == root ? 4 * (total - counts[me]) : 0);
    });

    for (int64_t size : reduce_sizes) {
      std::vector<BFloat16> data(size);
      int64_t bytes = bytes_of(
          [&](const CallInfo& call) {
            return comm.AllReduce(call, DType::kBFloat16, ReduceOp::kSum, data.data(), size);
          },
          Purpose::kControl);
      reduced += bytes;
      if (size % n == 0) {
        EXPECT_EQ(bytes, 2 * (n - 1) * (2 * size / n));
      } else {  // at most an element off in each of the two halves
        EXPECT_NEAR(bytes, 4.0 * (n - 1) * size / n, 4.0);
      }

      bytes = bytes_of(
          [&](const CallInfo& call) {
            return comm.Broadcast(call, DType::kBFloat16, data.data(), size, 0);
          },
          Purpose::kControl);
      EXPECT_EQ(bytes, n == 1 ? 0 : 2 * size);
    }

    // Rank i sends i + j elements to rank j.
    std::vector<int64_t> buffer(4 * n);
    std::vector<std::vector<int64_t>> in(n);
    std::vector<ConstSegment> send;
    std::vector<Segment> recv;
    int64_t leaving = 0;
    for (int r = 0; r < n; ++r) {
      in[r].resize(me + r);
      send.push_back({buffer.data(), me + r});
      recv.push_back({in[r].data(), me + r});
      if (r != me) leaving += 8 * (me + r);
    }
    EXPECT_EQ(
        bytes_of(
            [&](const CallInfo& call) { return comm.AllToAll(call, DType::kInt64, send, recv); },
            Purpose::kOptimizer),
        leaving);
    EXPECT_EQ(bytes_of([&](const CallInfo& call) { return comm.Barrier(call); }, Purpose::kControl),
              0);
  });
  EXPECT_EQ(gathered, expected_gathered);
  EXPECT_EQ(scattered, expected_gathered);
  EXPECT_EQ(reduced, expected_reduced);
}

TEST_P(CommunicatorTest, ARecordSaysWhatTheCallDidAndAddsUpTheCallsItWasGiven) {
  const bool meets = GetParam().meets_on_host;
  Run(3, [meets](ProcessGroup& group, Communicator& comm) {
    const int me = comm.rank();
    const std::vector<int64_t> counts = {4, 1, 0};
    std::vector<float> shard(4), whole(5), sums(4);
    const AllGatherPart gather{shard.data(), whole.data(), counts};
    const ReduceScatterPart reduce{whole.data(), sums.data(), counts};

    CallRecord record;
    CallInfo call = Call("h.1", Purpose::kGradient);
    call.record = &record;
    const absl::Time before = SteadyNow();
    const int64_t sent_before = group.ledger().bytes(Purpose::kGradient);
    ASSERT_EQ(comm.AllGather(call, DType::kFloat32, {&gather, 1}), absl::OkStatus());
    EXPECT_EQ(record.calls, 1);
    EXPECT_EQ(record.operation, "all_gather");
    EXPECT_EQ(record.channel, comm.name());
    EXPECT_EQ(record.purpose, Purpose::kGradient);
    EXPECT_EQ(record.dtype, DType::kFloat32);
    EXPECT_EQ(record.sequence, 1);
    EXPECT_EQ(record.in_elements, counts[me]);
    EXPECT_EQ(record.out_elements, 5);
    EXPECT_EQ(record.bytes_sent, group.ledger().bytes(Purpose::kGradient) - sent_before);
    if (meets) {
      EXPECT_LE(before, record.met);
      EXPECT_LE(record.met, SteadyNow());
    } else {
      EXPECT_EQ(record.met, absl::InfinitePast());
    }

    const absl::Time met = record.met;
    ASSERT_EQ(comm.ReduceScatter(call, DType::kFloat32, {&reduce, 1}), absl::OkStatus());
    EXPECT_EQ(record.calls, 2);
    EXPECT_EQ(record.operation, "all_gather");
    EXPECT_EQ(record.sequence, 1);
    EXPECT_EQ(record.met, met);
    EXPECT_EQ(record.in_elements, counts[me] + 5);
    EXPECT_EQ(record.out_elements, 5 + counts[me]);
    EXPECT_EQ(record.bytes_sent, group.ledger().bytes(Purpose::kGradient) - sent_before);

    CallRecord next;
    call.record = &next;
    ASSERT_EQ(comm.Broadcast(call, DType::kFloat32, whole.data(), 5, /*root=*/1), absl::OkStatus());
    EXPECT_EQ(next.operation, "broadcast");
    EXPECT_EQ(next.sequence, 3);
    EXPECT_EQ(next.in_elements, me == 1 ? 5 : 0);
    EXPECT_EQ(next.out_elements, 5);
  });
}

TEST_P(CommunicatorTest, ARecordOfACallInWhichTheRanksDidNotMeetHasNoMeeting) {
  RunRanks(GetParam(), 2, absl::Milliseconds(50), [](ProcessGroup&, Communicator& comm) {
    if (comm.rank() == 1) return;
    CallRecord record;
    CallInfo call = Call("h.1");
    call.record = &record;
    EXPECT_FALSE(comm.Barrier(call).ok());
    EXPECT_EQ(record.operation, "barrier");
    EXPECT_EQ(record.met, absl::InfinitePast());
    EXPECT_EQ(record.bytes_sent, 0);
  });
}

TEST_P(CommunicatorTest, TheLedgerAddsUpARanksChannelsByPurpose) {
  RunRanks(GetParam(), 2, kPatience, [](std::unique_ptr<ProcessGroup> group) {
    std::unique_ptr<Communicator> a = OpenOrDie(*group, "a"), b = OpenOrDie(*group, "b");
    std::vector<uint8_t> data(10);
    EXPECT_EQ(a->Broadcast(Call("u", Purpose::kParameter), DType::kByte, data.data(), 3, 0),
              absl::OkStatus());
    EXPECT_EQ(b->Broadcast(Call("u", Purpose::kParameter), DType::kByte, data.data(), 4, 1),
              absl::OkStatus());
    EXPECT_EQ(b->Broadcast(Call("u", Purpose::kGradient), DType::kByte, data.data(), 10, 1),
              absl::OkStatus());
    EXPECT_EQ(group->ledger().bytes(Purpose::kParameter), 7);
    EXPECT_EQ(group->ledger().calls(Purpose::kParameter), 2);
    EXPECT_EQ(group->ledger().bytes(Purpose::kGradient), 10);
    EXPECT_EQ(group->ledger().calls(Purpose::kGradient), 1);
    EXPECT_EQ(group->ledger().calls(Purpose::kControl), 0);
  });
}

// ---- What goes wrong between ranks ----

// How each disagreeing pair of calls is made by even and odd ranks, and a word from each side that
// the error must show.
struct Disagreement {
  const char* what;
  std::function<absl::Status(Communicator&)> even, odd;
  const char *even_word, *odd_word;
};

class DisagreementTest : public CollectiveTest {};

INSTANTIATE_TEST_SUITE_P(Backends, DisagreementTest,
                         testing::Combine(testing::ValuesIn(kBackends),
                                          testing::Values(2, 3, 4, 7, 8)),
                         BackendAndRanks);

TEST_P(DisagreementTest, EveryRankGetsAnErrorThatNamesBothSides) {
  static std::vector<float> zeros(64);  // read only: no call here gets as far as moving data
  const std::vector<int64_t> fours(world_size(), 4), fives(world_size(), 5);
  const auto broadcast = [](std::string unit, Purpose purpose, DType dtype, int count, int root) {
    return [=](Communicator& comm) {
      std::vector<int64_t> data(16);
      return comm.Broadcast(Call(unit, purpose), dtype, data.data(), count, root);
    };
  };
  const auto all_gather = [](const std::vector<int64_t>* counts, int parts) {
    return [=](Communicator& comm) {
      std::vector<float> recv(64);
      const std::vector<AllGatherPart> all(parts, {zeros.data(), recv.data(), *counts});
      return comm.AllGather(Call("h.3"), DType::kFloat32, all);
    };
  };
  const auto all_reduce = [](ReduceOp op) {
    return [=](Communicator& comm) {
      float x = 0;
      return comm.AllReduce(Call("h.3"), DType::kFloat32, op, &x, 1);
    };
  };
  const auto kParameter = Purpose::kParameter;
  const std::vector<Disagreement> disagreements = {
      {"operation", all_gather(&fours, 1), all_reduce(ReduceOp::kSum), "all_gather(unit 'h.3'",
       "all_reduce(unit 'h.3'"},
      {"unit", broadcast("h.3", kParameter, DType::kInt64, 4, 0),
       broadcast("h.4", kParameter, DType::kInt64, 4, 0), "'h.3'", "'h.4'"},
      {"purpose", broadcast("h.3", kParameter, DType::kInt64, 4, 0),
       broadcast("h.3", Purpose::kGradient, DType::kInt64, 4, 0), "parameter", "gradient"},
      {"type", broadcast("h.3", kParameter, DType::kInt64, 4, 0),
       broadcast("h.3", kParameter, DType::kByte, 4, 0), "int64", "byte"},
      {"count", broadcast("h.3", kParameter, DType::kInt64, 4, 0),
       broadcast("h.3", kParameter, DType::kInt64, 5, 0), "root 0, 4)", "root 0, 5)"},
      {"root", broadcast("h.3", kParameter, DType::kInt64, 4, 0),
       broadcast("h.3", kParameter, DType::kInt64, 4, 1), "root 0", "root 1"},
      {"counts", all_gather(&fours, 1), all_gather(&fives, 1), "[4 x", "[5 x"},
      {"number of parts", all_gather(&fours, 1), all_gather(&fours, 2), ", [4 x", "], [4 x"},
      {"reduction", all_reduce(ReduceOp::kSum), all_reduce(ReduceOp::kMax), "sum", "max"},
  };
  for (const Disagreement& disagreement : disagreements) {
    SCOPED_TRACE(disagreement.what);
    Run([&](ProcessGroup& group, Communicator& comm) {
      ASSERT_EQ(comm.Barrier(Call("warm-up", Purpose::kControl)), absl::OkStatus());
      MeetOnHost(group);
      const absl::Status status =
          (comm.rank() % 2 == 0 ? disagreement.even : disagreement.odd)(comm);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(disagreement.even_word), HasSubstr(disagreement.odd_word),
                        HasSubstr("as call 2 on channel 'test'"), HasSubstr("rank "),
                        HasSubstr(" called ")));
      EXPECT_FALSE(absl::StrContains(status.message(), "\n"));
      // The channel stays failed, and what failed was not entered.
      EXPECT_EQ(comm.Barrier(Call("later")), status);
      if (std::get<0>(GetParam()).meets_on_host) {
        EXPECT_EQ(group.ledger().calls(Purpose::kParameter), 0);
        EXPECT_EQ(group.ledger().calls(Purpose::kGradient), 0);
      }
    });
  }
}

TEST_P(CommunicatorTest, ADisagreementIsReportedWithoutWaitingForTheOtherRanks) {
  std::atomic<bool> reported{false};
  Run(3, [&](ProcessGroup&, Communicator& comm) {
    if (comm.rank() == 2) {  // held up until the others have their error
      while (!reported) absl::SleepFor(absl::Milliseconds(1));
    }
    const absl::Status status = comm.Barrier(Call(comm.rank() == 0 ? "a" : "b"));
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 0 called barrier(unit 'a'"),
                                                     HasSubstr("rank 1 called barrier(unit 'b'")));
    if (comm.rank() == 1) reported = true;
    if (comm.rank() == 0) {
      while (!reported) absl::SleepFor(absl::Milliseconds(1));
    }
  });
}

TEST_P(CommunicatorTest, ARankThatDoesNotArriveIsNamedWithTheOperationAtTheDeadline) {
  std::atomic<int> failed{0};
  RunRanks(GetParam(), 4, absl::Milliseconds(200), [&](ProcessGroup& group, Communicator& comm) {
    float x = 0;
    ASSERT_EQ(comm.AllReduce(Call("loss"), DType::kFloat32, ReduceOp::kSum, &x, 1),
              absl::OkStatus());
    MeetOnHost(group);
    if (comm.rank() == 1 || comm.rank() == 3) {  // alive and late
      while (failed < 2) absl::SleepFor(absl::Milliseconds(1));
    }
    const absl::Time start = SteadyNow();
    const absl::Status status = comm.Broadcast(Call("h.7"), DType::kFloat32, &x, 1, 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("broadcast(unit 'h.7'"), HasSubstr("as call 2 on channel 'test'"),
                      HasSubstr("ranks 1, 3 did not arrive"), HasSubstr("200ms")));
    EXPECT_LT(SteadyNow() - start, absl::Seconds(20));
    ++failed;
    EXPECT_EQ(comm.Barrier(Call("later")), status);
    while (failed < 4) absl::SleepFor(absl::Milliseconds(1));  // nobody is missing for leaving
  });
}

TEST_P(CommunicatorTest, WithoutADeadlineALateRankIsWaitedFor) {
  RunRanks(GetParam(), 2, absl::InfiniteDuration(), [](ProcessGroup&, Communicator& comm) {
    if (comm.rank() == 1) absl::SleepFor(absl::Milliseconds(50));
    EXPECT_EQ(comm.Barrier(Call("u")), absl::OkStatus());
  });
}

TEST_P(CommunicatorTest, AbortWakesTheWaitersOfEveryChannelAndFailsLaterCalls) {
  const absl::Status reason = absl::DataLossError("loss is NaN at step 12, unit h.0");
  std::atomic<int> waiting{0}, done{0};
  const absl::Time start = SteadyNow();
  RunRanks(GetParam(), 3, kPatience, [&](std::unique_ptr<ProcessGroup> group) {
    std::unique_ptr<Communicator> a = OpenOrDie(*group, "a"), b = OpenOrDie(*group, "b");
    if (group->rank() == 2) {
      while (waiting < 4) absl::SleepFor(absl::Milliseconds(1));
      absl::SleepFor(absl::Milliseconds(20));  // most likely the others are asleep by now
      group->Abort(reason);
      group->Abort(absl::InternalError("the first reason wins"));
      EXPECT_EQ(a->Barrier(Call("u")), reason);
    } else {
      ++waiting;
      std::thread other([&] {
        ++waiting;
        EXPECT_EQ(b->Barrier(Call("u")), reason);
      });
      EXPECT_EQ(a->Barrier(Call("u")), reason);
      other.join();
    }
    EXPECT_EQ(a->Barrier(Call("u")), reason);
    EXPECT_EQ(OpenOrDie(*group, "opened later")->Barrier(Call("u")), reason);
    EXPECT_EQ(group->Health(), reason);
    ++done;
    while (done < 3) absl::SleepFor(absl::Milliseconds(1));  // leaving is another test's matter
  });
  EXPECT_LT(SteadyNow() - start, kPatience / 2) << "they waited for the deadline";
}

TEST_P(CommunicatorTest, ARankWhoseGroupOrCommunicatorIsGoneFailsTheOthersAtOnceByName) {
  for (bool group_first : {false, true}) {
    SCOPED_TRACE(group_first);
    const absl::Time start = SteadyNow();
    std::atomic<int> failed{0};
    RunRanks(GetParam(), 3, kPatience, [&](std::unique_ptr<ProcessGroup> group) {
      std::unique_ptr<Communicator> comm = OpenOrDie(*group, "test");
      ASSERT_EQ(comm->Barrier(Call("start")), absl::OkStatus());
      MeetOnHost(*group);
      if (group->rank() == 1) {
        absl::SleepFor(absl::Milliseconds(20));  // most likely the others are waiting by now
        if (group_first) {
          group.reset();
          // The communicator is still safe to call and to destroy.
          EXPECT_EQ(comm->Barrier(Call("h.2")).code(), absl::StatusCode::kUnavailable);
        } else {
          comm.reset();
        }
        while (failed < 2) absl::SleepFor(absl::Milliseconds(1));
        return;
      }
      const absl::Status status = comm->Barrier(Call("h.2"));
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("barrier(unit 'h.2'"), HasSubstr("as call 2 on channel 'test'"),
                        HasSubstr("rank 1 has left")));
      ++failed;
    });
    EXPECT_LT(SteadyNow() - start, kPatience / 2) << "they waited for the deadline";
  }
}

TEST_P(CommunicatorTest, ARankMayLeaveAsSoonAsItsLastCallHasReturned) {
  for (int round = 0; round < 50; ++round) {
    Run(3, [](ProcessGroup&, Communicator& comm) {
      std::vector<float> data(100, 1.0f);
      EXPECT_EQ(comm.AllReduce(Call("u"), DType::kFloat32, ReduceOp::kSum, data.data(), 100),
                absl::OkStatus());
      EXPECT_THAT(data, Each(3.0f));
    });
  }
}

TEST_P(CommunicatorTest, AllToAllLengthsThatDoNotMatchAreReportedToEveryRank) {
  Run(3, [meets = GetParam().meets_on_host](ProcessGroup& group, Communicator& comm) {
    std::vector<float> out(8), in(24);
    std::vector<ConstSegment> send(3, {out.data(), 2});
    std::vector<Segment> recv;
    for (int r = 0; r < 3; ++r) recv.push_back({in.data() + 8 * r, 2});
    if (comm.rank() == 2) recv[1].count = 5;  // rank 1 sends 2
    const absl::Status status = comm.AllToAll(Call("h.1"), DType::kFloat32, send, recv);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("all_to_all(unit 'h.1'"),
                      HasSubstr("rank 1 sends 2 elements to rank 2, which expects 5")));
    EXPECT_EQ(comm.Barrier(Call("later")), status);
    if (meets) {
      EXPECT_EQ(group.ledger().calls(Purpose::kParameter), 0);
    }
  });
}

// ---- Bad arguments ----

TEST_P(CommunicatorTest, BadArgumentsAreRefusedWithTheOperationTheUnitTheRankAndThePart) {
  std::vector<float> buffer(100);
  float* const data = buffer.data();
  char* const odd_address = reinterpret_cast<char*>(data) + 1;
  const CallInfo call = Call("h.5");
  const std::vector<int64_t> ones = {1}, negative = {-1}, two_entries = {1, 1},
                             huge = {int64_t{1} << 61};
  const std::vector<ConstSegment> send_one(1, {data, 1});
  const std::vector<Segment> recv_one(1, {data + 9, 1}), no_segment;
  const auto all_gather = [&](AllGatherPart bad) {
    return [&, bad](Communicator& comm) {
      const AllGatherPart parts[] = {{data, data + 10, ones}, bad};
      return comm.AllGather(call, DType::kFloat32, parts);
    };
  };
  const auto reduce_scatter = [&](DType dtype, ReduceScatterPart bad) {
    return [&, dtype, bad](Communicator& comm) {
      return comm.ReduceScatter(call, dtype, {&bad, 1});
    };
  };
  struct Case {
    std::function<absl::Status(Communicator&)> make;
    const char *where, *what;
  };
  const std::vector<Case> cases = {
      {all_gather({data, data, negative}), "all_gather(unit 'h.5') part 1 on rank 0",
       "counts[0] is -1"},
      {all_gather({data, data, two_entries}), "part 1", "counts has 2 entries"},
      {all_gather({data, data, {}}), "part 1", "counts has 0 entries"},
      {all_gather({data, data, huge}), "part 1", "2^63 bytes"},
      {all_gather({nullptr, data, ones}), "part 1", "send is null"},
      {all_gather({data, nullptr, ones}), "part 1", "recv is null"},
      {all_gather({odd_address, data + 4, ones}), "part 1", "send is not aligned"},
      {reduce_scatter(DType::kByte, {data, data + 9, ones}), "reduce_scatter(unit 'h.5')",
       "byte is opaque"},
      {reduce_scatter(DType::kFloat32, {data, data, ones}), "part 0", "overlap"},
      {reduce_scatter(DType::kFloat32, {data, data + 9, negative}), "part 0", "counts[0] is -1"},
      {reduce_scatter(DType::kFloat32, {nullptr, data, ones}), "part 0", "send is null"},
      {reduce_scatter(DType::kFloat32, {data, nullptr, ones}), "part 0", "recv is null"},
      {[&](Communicator& comm) {
         return comm.AllReduce(call, DType::kByte, ReduceOp::kMax, data, 1);
       },
       "all_reduce(unit 'h.5') on rank 0", "byte is opaque"},
      {[&](Communicator& comm) {
         return comm.AllReduce(call, DType::kFloat32, ReduceOp::kSum, data, -3);
       },
       "all_reduce", "count is -3"},
      {[&](Communicator& comm) {
         return comm.AllReduce(call, DType::kFloat32, ReduceOp::kSum, nullptr, 1);
       },
       "all_reduce", "data is null"},
      {[&](Communicator& comm) { return comm.Broadcast(call, DType::kFloat32, data, 1, 1); },
       "broadcast(unit 'h.5')", "root 1 is not a rank"},
      {[&](Communicator& comm) { return comm.Broadcast(call, DType::kFloat32, data, -1, 0); },
       "broadcast", "count is -1"},
      {[&](Communicator& comm) {
         return comm.Gather(call, DType::kFloat32, data, data + 9, ones, -1);
       },
       "gather(unit 'h.5')", "root -1 is not a rank"},
      {[&](Communicator& comm) {
         return comm.Gather(call, DType::kFloat32, data, nullptr, ones, 0);
       },
       "gather", "recv is null"},
      {[&](Communicator& comm) {
         return comm.Scatter(call, DType::kFloat32, nullptr, data, ones, 0);
       },
       "scatter(unit 'h.5')", "send is null"},
      {[&](Communicator& comm) {
         return comm.Scatter(call, DType::kFloat32, data, data + 9, two_entries, 0);
       },
       "scatter", "counts has 2 entries"},
      {[&](Communicator& comm) {
         return comm.AllToAll(call, DType::kFloat32, send_one, no_segment);
       },
       "all_to_all(unit 'h.5')", "recv has 0 entries"},
      {[&](Communicator& comm) {
         return comm.AllToAll(call, DType::kFloat32, {{data, -2}}, recv_one);
       },
       "all_to_all", "send[0] is -2"},
      {[&](Communicator& comm) {
         return comm.AllToAll(call, DType::kFloat32, send_one, {{nullptr, 1}});
       },
       "all_to_all", "recv[0] is null"},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.what);
    Run(1, [&](ProcessGroup& group, Communicator& comm) {
      const absl::Status status = bad.make(comm);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(bad.where), HasSubstr(bad.what), HasSubstr("channel 'test'")));
      EXPECT_FALSE(absl::StrContains(status.message(), "\n"));
      EXPECT_EQ(comm.Barrier(call), status) << "a failed communicator stays failed";
      EXPECT_EQ(group.ledger().calls(Purpose::kParameter), 0);
    });
  }
}

TEST_P(CommunicatorTest, SendMayOverlapRecvOnlyAsTheRanksOwnPartOfIt) {
  Run(2, [](ProcessGroup& group, Communicator& comm) {
    std::vector<float> whole(8);
    const std::vector<int64_t> counts = {4, 4};
    // Both ranks pass the place of rank 0's part, which is wrong for rank 1.
    const AllGatherPart part{whole.data(), whole.data(), counts};
    const absl::Status status = comm.AllGather(Call("u"), DType::kFloat32, {&part, 1});
    if (comm.rank() == 1) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("send and recv overlap"));
      group.Abort(status);  // as an engine would, so that rank 0 need not wait
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    }
  });
}

TEST_P(CommunicatorTest, EmptyBuffersMayBeNull) {
  Run(2, [](ProcessGroup&, Communicator& comm) {
    const std::vector<int64_t> none = {0, 0};
    const AllGatherPart gather{nullptr, nullptr, none};
    const ReduceScatterPart reduce{nullptr, nullptr, none};
    const std::vector<ConstSegment> send(2);
    const std::vector<Segment> recv(2);
    EXPECT_EQ(comm.AllGather(Call("u"), DType::kFloat32, {&gather, 1}), absl::OkStatus());
    EXPECT_EQ(comm.AllGather(Call("u"), DType::kFloat32, {}), absl::OkStatus());
    EXPECT_EQ(comm.ReduceScatter(Call("u"), DType::kFloat32, {&reduce, 1}), absl::OkStatus());
    EXPECT_EQ(comm.AllReduce(Call("u"), DType::kFloat32, ReduceOp::kSum, nullptr, 0),
              absl::OkStatus());
    EXPECT_EQ(comm.Broadcast(Call("u"), DType::kFloat32, nullptr, 0, 0), absl::OkStatus());
    EXPECT_EQ(comm.Gather(Call("u"), DType::kFloat32, nullptr, nullptr, none, 0), absl::OkStatus());
    EXPECT_EQ(comm.Scatter(Call("u"), DType::kFloat32, nullptr, nullptr, none, 0),
              absl::OkStatus());
    EXPECT_EQ(comm.AllToAll(Call("u"), DType::kFloat32, send, recv), absl::OkStatus());
  });
}

TEST_P(CommunicatorTest, AChannelIsOpenedOncePerRank) {
  RunRanks(GetParam(), 2, kPatience, [](std::unique_ptr<ProcessGroup> group) {
    std::unique_ptr<Communicator> first = OpenOrDie(*group, "a");
    EXPECT_EQ(first->name(), "a");
    EXPECT_EQ(first->rank(), group->rank());
    EXPECT_EQ(first->world_size(), 2);
    const absl::Status again = group->Open("a").status();
    EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(again.message()), HasSubstr("channel 'a'"));
    EXPECT_EQ(first->Barrier(Call("u")), absl::OkStatus()) << "the first one still works";
  });
}

TEST_P(CommunicatorTest, AHostChannelIsAChannelOfItsOwnOverHostMemory) {
  RunRanks(GetParam(), 3, kPatience, [](std::unique_ptr<ProcessGroup> group) {
    std::unique_ptr<Communicator> first = OpenOrDie(*group, "a");
    absl::StatusOr<std::unique_ptr<Communicator>> host = group->OpenHost("host");
    ASSERT_TRUE(host.ok()) << host.status();
    EXPECT_EQ((*host)->name(), "host");
    const int64_t mine = group->rank() + 1;
    std::vector<int64_t> all(3);
    const std::vector<int64_t> counts(3, 1);
    const AllGatherPart part{&mine, all.data(), counts};
    ASSERT_EQ((*host)->AllGather(Call("u"), DType::kInt64, {&part, 1}), absl::OkStatus());
    EXPECT_THAT(all, testing::ElementsAre(1, 2, 3));
    EXPECT_EQ(group->Health(), absl::OkStatus());
    EXPECT_EQ(group->ledger().bytes(Purpose::kParameter), 2 * 8);
    EXPECT_EQ(group->OpenHost("host").status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(group->OpenHost("a").status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(group->Open("host").status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ((*host)->Barrier(Call("all have looked at theirs")), absl::OkStatus());
  });
}

TEST_P(CommunicatorTest, AHostChannelsBytesAreEnteredInTheLedgerItIsGiven) {
  RunRanks(GetParam(), 2, kPatience, [](std::unique_ptr<ProcessGroup> group) {
    const auto ledger = std::make_shared<ByteLedger>();
    absl::StatusOr<std::unique_ptr<Communicator>> host = group->OpenHost("host", ledger);
    ASSERT_TRUE(host.ok()) << host.status();
    uint8_t data = 0;
    ASSERT_EQ((*host)->Broadcast(Call("u"), DType::kByte, &data, 1, 0), absl::OkStatus());
    EXPECT_EQ(ledger->bytes(Purpose::kParameter), 1);
    EXPECT_EQ(group->ledger().calls(Purpose::kParameter), 0);
    EXPECT_EQ((*host)->Barrier(Call("all have looked at theirs")), absl::OkStatus());
  });
}

TEST(CreateThreadRanksTest, RefusesAWorldWithoutRanksAndATimeoutThatIsNotPositive) {
  for (int world_size : {0, -1}) {
    const absl::Status status = CreateThreadRanks(world_size, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(world_size, " ranks")));
  }
  ProcessGroupOptions options;
  options.timeout = absl::ZeroDuration();
  EXPECT_EQ(CreateThreadRanks(2, options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CreateThreadRanksTest, HandsOutTheRanksInOrder) {
  absl::StatusOr<Groups> groups = CreateThreadRanks(3, {});
  ASSERT_TRUE(groups.ok());
  ASSERT_EQ(groups->size(), 3u);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ((*groups)[r]->rank(), r);
    EXPECT_EQ((*groups)[r]->world_size(), 3);
  }
}

}  // namespace
}  // namespace dim0
