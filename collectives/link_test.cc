#include "collectives/link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"

namespace dim0 {
namespace {

TEST(ParseLink, TakesFiguresAndNames) {
  const LinkSpeed figures = *ParseLink("12.5,10");
  EXPECT_EQ(figures.bytes_per_second, 12.5e9);
  EXPECT_EQ(figures.latency, absl::Microseconds(10));
  EXPECT_EQ(ParseLink("10gbe")->bytes_per_second, 1.25e9);  // 10 Gbit/s
  EXPECT_EQ(ParseLink("nvlink4")->bytes_per_second, 450e9);
  EXPECT_EQ(ParseLink("0.001,0")->latency, absl::ZeroDuration());
}

TEST(ParseLink, RefusesWhatIsNoLink) {
  for (const char* text : {"", "fast", "12.5", "0,1", "-1,1", "nan,1", "inf,1", "1,-1", "1,nan",
                           "1,1,1", "1,1e9", "PCIE4"}) {
    const auto link = ParseLink(text);
    EXPECT_FALSE(link.ok()) << text;
    EXPECT_NE(link.status().message().find("or one of pcie4"), absl::string_view::npos) << text;
  }
}

// Runs `body` on `ranks` ranks connected by `link`; returns the shortest time of a rank.
template <typename Body>
absl::Duration Time(int ranks, const LinkSpeed& link, Body body) {
  const auto groups = *CreateThreadRanks(ranks, {.link = link});
  std::vector<absl::Duration> times(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const absl::Time start = SteadyNow();
      body(*groups[rank]);
      times[rank] = SteadyNow() - start;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return *std::min_element(times.begin(), times.end());
}

constexpr double kMegabytePerSecond = 1e6;

// 4000 floats a rank.
void AllGather(ProcessGroup& group, Communicator& channel) {
  const std::vector<int64_t> counts(group.world_size(), 4000);
  const std::vector<float> send(4000, static_cast<float>(group.rank()));
  std::vector<float> recv(4000 * group.world_size());
  const AllGatherPart part = {send.data(), recv.data(), counts};
  EXPECT_TRUE(channel.AllGather({.unit = "u"}, DType::kFloat32, {&part, 1}).ok());
  EXPECT_EQ(recv.back(), group.world_size() - 1);
}

TEST(Link, ACollectiveTakesAtLeastTheRingsTime) {
  // A rank of 3 sends 2 x 16,000 bytes: 32 ms at a megabyte a second, and two hops of 5 ms.
  EXPECT_GE(Time(3, {kMegabytePerSecond, absl::Milliseconds(5)},
                 [](ProcessGroup& group) { AllGather(group, **group.Open("a")); }),
            absl::Milliseconds(42));
}

TEST(Link, AnAllReducePassesTheRingTwice) {
  // Two ranks, 8,000 floats: 2 x 16,000 bytes and two hops.
  EXPECT_GE(Time(2, {kMegabytePerSecond, absl::Milliseconds(5)},
                 [](ProcessGroup& group) {
                   std::vector<float> data(8000, 1);
                   EXPECT_TRUE((*group.Open("a"))
                                   ->AllReduce({.unit = "u"}, DType::kFloat32, ReduceOp::kSum,
                                               data.data(), 8000)
                                   .ok());
                   EXPECT_EQ(data[0], 2);
                 }),
            absl::Milliseconds(42));
}

TEST(Link, ChannelsOfARankShareIt) {
  // Two all-gathers at once, of 16 ms each.
  EXPECT_GE(Time(2, {kMegabytePerSecond, absl::ZeroDuration()},
                 [](ProcessGroup& group) {
                   const auto a = *group.Open("a"), b = *group.Open("b");
                   std::thread other([&] { AllGather(group, *a); });
                   AllGather(group, *b);
                   other.join();
                 }),
            absl::Milliseconds(32));
}

TEST(Link, TransfersUnderWayTogetherHaveEqualParts) {
  // 10 ms alone and 40 ms alone, begun together: the short one is done at 20 ms, the long one at
  // 50.
  Link link({kMegabytePerSecond, absl::ZeroDuration()});
  const absl::Time start = SteadyNow();
  const int64_t brief = link.Start(10000), lengthy = link.Start(40000);
  absl::Time brief_done, lengthy_done;
  std::thread other([&] {
    link.WaitFor(lengthy, /*hops=*/0);
    lengthy_done = SteadyNow();
  });
  link.WaitFor(brief, /*hops=*/0);
  brief_done = SteadyNow();
  other.join();
  EXPECT_GE(brief_done - start, absl::Milliseconds(20));
  EXPECT_GE(lengthy_done - start, absl::Milliseconds(50));
  EXPECT_LT(brief_done, lengthy_done);
}

TEST(Link, ATransferThatWasDoneLongAgoIsNotWaitedFor) {
  Link link({kMegabytePerSecond, absl::ZeroDuration()});
  const int64_t early = link.Start(5000);
  absl::SleepFor(absl::Milliseconds(10));
  const int64_t late = link.Start(1000000);  // a second; it must not slow what is over
  const absl::Time before = SteadyNow();
  link.WaitFor(early, /*hops=*/0);
  EXPECT_LT(SteadyNow() - before, absl::Milliseconds(500));
  link.WaitFor(late, /*hops=*/0);
  EXPECT_GE(SteadyNow() - before, absl::Milliseconds(990));
}

TEST(Link, CountsFromWhenTheLastRankHasArrived) {
  const auto groups = *CreateThreadRanks(2, {.link = LinkSpeed{kMegabytePerSecond, {}}});
  absl::Time late;
  std::thread other([&] {
    const auto channel = *groups[1]->Open("a");
    absl::SleepFor(absl::Milliseconds(20));
    late = SteadyNow();
    AllGather(*groups[1], *channel);
  });
  const auto channel = *groups[0]->Open("a");
  AllGather(*groups[0], *channel);
  const absl::Time end = SteadyNow();
  other.join();
  EXPECT_GE(end - late, absl::Milliseconds(16));
}

TEST(Link, OneRankHasNothingToWaitFor) {
  // Would be hours.
  EXPECT_LT(Time(1, {1e-3, absl::Hours(1)},
                 [](ProcessGroup& group) { AllGather(group, **group.Open("a")); }),
            absl::Minutes(1));
}

}  // namespace
}  // namespace dim0
