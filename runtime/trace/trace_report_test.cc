#include "runtime/trace/trace_report.h"

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/printable.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Makes one rank's trace. Times are microseconds after kStart, a time of this century.
class Rank {
 public:
  static constexpr int64_t kStart = 1'800'000'000'000'000;

  explicit Rank(int rank = 0) { trace_.rank = rank; }

  Rank& Step(int64_t step, int64_t begin, int64_t end) {
    trace_.steps.push_back({step, kStart + begin, kStart + end});
    return *this;
  }
  TraceOp& Op(const std::string& stream, const std::string& name, OpKind kind, int64_t begin,
              int64_t end) {
    TraceOp op = {.name = name, .kind = kind, .id = ++ids_, .begin = kStart + begin};
    op.enqueued = trace_.steps.empty() ? kStart : trace_.steps[0].begin;
    op.end = kStart + end;
    std::vector<TraceOp>& ops = Stream(stream).ops;
    ops.push_back(op);
    return ops.back();
  }
  TraceOp& Compute(const std::string& name, int64_t begin, int64_t end) {
    return Op("compute", name, OpKind::kCompute, begin, end);
  }
  // On the channel `stream`; the rank waits until `met`.
  TraceOp& Collective(const std::string& stream, const std::string& name, Purpose purpose,
                      int64_t begin, int64_t met, int64_t end, int64_t bytes = 0) {
    TraceOp& op = Op(stream, name, OpKind::kCollective, begin, end);
    op.collective = TraceCollective{.operation = name, .channel = stream, .purpose = purpose};
    op.collective->sequence = ++sequences_[stream];
    op.collective->bytes_sent = bytes;
    op.collective->met = kStart + met;
    return op;
  }
  void Wait(const std::string& stream, int64_t begin, int64_t end, int64_t cause,
            const std::string& of = "") {
    Stream(stream).waits.push_back({kStart + begin, kStart + end, cause, of});
  }
  TraceStream& Stream(const std::string& name) {
    for (TraceStream& stream : trace_.streams) {
      if (stream.name == name) return stream;
    }
    trace_.streams.push_back({.name = name});
    return trace_.streams.back();
  }
  RankTrace& trace() { return trace_; }

 private:
  RankTrace trace_;
  int64_t ids_ = 0;
  std::map<std::string, int64_t> sequences_;
};

TraceReport Analyze(std::vector<RankTrace> ranks) {
  absl::StatusOr<TraceReport> report = AnalyzeTraces(ranks);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : TraceReport();
}

const Overlap& Of(const RankReport& report, Purpose purpose) {
  return report.overlap[static_cast<int>(purpose)];
}

double Exposed(const StepSplit& split, Purpose purpose) {
  return split.exposed[static_cast<int>(purpose)];
}

TEST(Split, GivesEveryInstantToTheFirstKindThatRan) {
  Rank rank;
  rank.Step(1, 0, 10'000);
  rank.Compute("a", 1000, 3000);
  rank.Op("compute", "zero", OpKind::kCopy, 3000, 3500);
  rank.Op("optimizer", "update", OpKind::kOptimizer, 2000, 5000);  // 1500 of it alone
  rank.Collective("g", "gather", Purpose::kParameter, 0, 0, 1500, 0);
  rank.Collective("s", "scatter", Purpose::kGradient, 4000, 4000, 7000);
  rank.Collective("o", "rows", Purpose::kOptimizer, 6000, 6000, 8000);
  rank.Collective("c", "stats", Purpose::kControl, 7500, 7500, 9000);
  const StepSplit split = Analyze({rank.trace()}).ranks[0].split;
  EXPECT_DOUBLE_EQ(split.compute, 2.5);
  EXPECT_DOUBLE_EQ(split.optimizer_compute, 1.5);
  EXPECT_DOUBLE_EQ(Exposed(split, Purpose::kParameter), 1);
  EXPECT_DOUBLE_EQ(Exposed(split, Purpose::kGradient), 2);
  EXPECT_DOUBLE_EQ(Exposed(split, Purpose::kOptimizer), 1);
  EXPECT_DOUBLE_EQ(Exposed(split, Purpose::kControl), 1);
  EXPECT_DOUBLE_EQ(split.idle, 1);
  EXPECT_DOUBLE_EQ(split.total(), 10);
}

TEST(Split, CountsOnlyWhatRanWithinSteps) {
  Rank rank;
  rank.Step(5, 1000, 2000).Step(6, 5000, 7000);
  rank.Compute("before and in", 500, 1200);
  rank.Compute("in the gap", 2500, 4500);
  rank.Collective("g", "over the gap", Purpose::kParameter, 1900, 1900, 5300);
  rank.Compute("in and after", 6900, 9000);
  const TraceReport report = Analyze({rank.trace()});
  EXPECT_EQ(report.first_step, 5);
  EXPECT_EQ(report.last_step, 6);
  EXPECT_EQ(report.steps, 2);
  const RankReport& mean = report.ranks[0];
  EXPECT_DOUBLE_EQ(mean.step, 1.5);
  EXPECT_DOUBLE_EQ(mean.split.compute, 0.15);                       // (200 + 100) / 2
  EXPECT_DOUBLE_EQ(Exposed(mean.split, Purpose::kParameter), 0.2);  // (100 + 300) / 2
  EXPECT_DOUBLE_EQ(Of(mean, Purpose::kParameter).communication, 0.2);
  EXPECT_DOUBLE_EQ(mean.split.total(), 1.5);
}

TEST(Split, IsTheMeanOverRanks) {
  Rank first(0), second(1);
  first.Step(1, 0, 1000).Compute("a", 0, 1000);
  second.Step(1, 0, 3000).Compute("a", 0, 1000);
  const RankReport mean = Analyze({first.trace(), second.trace()}).mean;
  EXPECT_DOUBLE_EQ(mean.step, 2);
  EXPECT_DOUBLE_EQ(mean.split.compute, 1);
  EXPECT_DOUBLE_EQ(mean.split.idle, 1);
}

TEST(Overlap, CountsConcurrentCollectivesOnceWithinAPurposeAndInAll) {
  Rank rank;
  rank.Step(1, 0, 10'000);
  rank.Collective("a", "x", Purpose::kParameter, 0, 0, 4000);
  rank.Collective("b", "y", Purpose::kParameter, 2000, 2000, 6000);
  rank.Collective("c", "z", Purpose::kGradient, 5000, 5000, 8000);
  // Two streams that compute at once, over 1000 to 3000 and 5500 to 9000.
  rank.Compute("p", 1000, 3000);
  rank.Op("optimizer", "q", OpKind::kOptimizer, 2000, 2500);
  rank.Compute("r", 5500, 9000);
  const RankReport report = Analyze({rank.trace()}).ranks[0];
  const Overlap& parameter = Of(report, Purpose::kParameter);
  EXPECT_DOUBLE_EQ(parameter.communication, 6);
  EXPECT_DOUBLE_EQ(parameter.hidden, 2.5);
  EXPECT_DOUBLE_EQ(parameter.calls, 2);
  EXPECT_DOUBLE_EQ(Of(report, Purpose::kGradient).hidden, 2.5);
  EXPECT_DOUBLE_EQ(report.all.communication, 8);
  EXPECT_DOUBLE_EQ(report.all.hidden, 4.5);
  EXPECT_DOUBLE_EQ(report.all.fraction_hidden(), 0.5625);
}

TEST(Overlap, ACollectiveOpThatMadeNoCallIsControlAndNoCall) {
  Rank rank;
  rank.Step(1, 0, 1000);
  rank.Op("s", "gather", OpKind::kCollective, 100, 300);
  const RankReport report = Analyze({rank.trace()}).ranks[0];
  EXPECT_DOUBLE_EQ(report.all.communication, 0.2);
  EXPECT_DOUBLE_EQ(Of(report, Purpose::kControl).communication, 0.2);
  EXPECT_DOUBLE_EQ(Of(report, Purpose::kControl).calls, 0);
  EXPECT_DOUBLE_EQ(Of(report, Purpose::kControl).waiting, 0);
}

TEST(Overlap, BandwidthIsOfTheTimeInWhichDataMoved) {
  Rank rank;
  rank.Step(1, 0, 10'000).Step(2, 10'000, 20'000);
  // 6 MB in 3 ms and 2 MB in 1 ms: 2 GB/s, whatever the ranks waited for each other.
  rank.Collective("a", "x", Purpose::kGradient, 0, 4000, 7000, 6'000'000);
  rank.Collective("a", "y", Purpose::kGradient, 12'000, 12'500, 13'500, 2'000'000);
  const RankReport report = Analyze({rank.trace()}).ranks[0];
  const Overlap& gradient = Of(report, Purpose::kGradient);
  EXPECT_DOUBLE_EQ(gradient.bandwidth, 2);
  EXPECT_DOUBLE_EQ(gradient.waiting, 2.25);
  EXPECT_DOUBLE_EQ(gradient.communication, 4.25);
  EXPECT_EQ(gradient.bytes, 4'000'000);
  EXPECT_DOUBLE_EQ(gradient.calls, 1);
  EXPECT_DOUBLE_EQ(report.all.bandwidth, 2);
}

TEST(Overlap, BytesOfAnOpThatTheLastStepCutCountWholeAndItsBandwidthInPart) {
  Rank rank;
  rank.Step(1, 0, 10'000);
  rank.Collective("a", "x", Purpose::kOptimizer, 9000, 9000, 13'000, 4'000'000);
  rank.Collective("a", "in validation", Purpose::kParameter, 15'000, 15'000, 16'000, 7).enqueued =
      Rank::kStart + 14'000;
  const RankReport report = Analyze({rank.trace()}).ranks[0];
  const Overlap& optimizer = Of(report, Purpose::kOptimizer);
  EXPECT_EQ(optimizer.bytes, 4'000'000);
  EXPECT_DOUBLE_EQ(optimizer.communication, 1);
  EXPECT_DOUBLE_EQ(optimizer.bandwidth, 1);
  EXPECT_EQ(Of(report, Purpose::kParameter).bytes, 0);
  EXPECT_DOUBLE_EQ(Of(report, Purpose::kParameter).calls, 0);
}

TEST(MostExposed, AddsUpAnOpOverStepsAndTakesItsWorstRank) {
  Rank first(0), second(1);
  for (Rank* rank : {&first, &second}) {
    rank->Step(1, 0, 10'000).Step(2, 10'000, 20'000);
    const int64_t more = rank == &second ? 1000 : 0;
    for (const int64_t at : {0, 10'000}) {
      TraceOp& op =
          rank->Collective("g", "all_gather", Purpose::kParameter, at, at, at + 2000 + more);
      op.unit = "h.0";
      op.phase = "forward";
      rank->Compute("a", at + 1500, at + 4000);
      // The same op in another phase is another entry.
      TraceOp& other =
          rank->Collective("g", "all_gather", Purpose::kParameter, at + 5000, at + 5000, at + 5500);
      other.unit = "h.0";
      other.phase = "backward";
    }
    rank->Collective("c", "short", Purpose::kControl, 9000, 9000, 9019);  // 9.5 us a step
  }
  second.Collective("g", "tail", Purpose::kParameter, 19'000, 19'000, 19'400);
  const TraceReport report = Analyze({first.trace(), second.trace()});
  ASSERT_EQ(report.most_exposed.size(), 3u);
  EXPECT_EQ(report.most_exposed[0].name, "all_gather");
  EXPECT_EQ(report.most_exposed[0].unit, "h.0");
  EXPECT_EQ(report.most_exposed[0].phase, "forward");
  EXPECT_DOUBLE_EQ(report.most_exposed[0].exposed, 1.5);
  EXPECT_DOUBLE_EQ(report.most_exposed[1].exposed, 0.5);
  EXPECT_EQ(report.most_exposed[1].phase, "backward");
  EXPECT_EQ(report.most_exposed[2].name, "tail");
  EXPECT_EQ(report.most_exposed[2].rank, 1);
  EXPECT_DOUBLE_EQ(report.most_exposed[2].exposed, 0.2);
}

TEST(MostExposed, NamesTheWorstRankOfAnOp) {
  Rank first(0), second(1);
  first.Step(1, 0, 10'000).Collective("g", "x", Purpose::kParameter, 0, 0, 3000);
  second.Step(1, 0, 10'000).Collective("g", "x", Purpose::kParameter, 0, 0, 4000);
  second.Compute("a", 0, 500);
  const TraceReport report = Analyze({first.trace(), second.trace()});
  ASSERT_EQ(report.most_exposed.size(), 1u);
  EXPECT_EQ(report.most_exposed[0].rank, 1);
  EXPECT_DOUBLE_EQ(report.most_exposed[0].exposed, 3.5);
  EXPECT_DOUBLE_EQ(report.most_exposed[0].duration, 4);
}

TEST(MostExposed, HoldsTheFiveLongest) {
  Rank rank;
  rank.Step(1, 0, 10'000);
  for (int i = 1; i <= 7; ++i) {
    rank.Collective("g", absl::StrCat("x", i), Purpose::kParameter, i * 1000, i * 1000,
                    i * 1000 + i * 100);
  }
  const std::vector<ExposedOp> most = Analyze({rank.trace()}).most_exposed;
  ASSERT_EQ(most.size(), 5u);
  EXPECT_EQ(most[0].name, "x7");
  EXPECT_EQ(most[4].name, "x3");
}

// The reason of the longest exposed op.
std::string Reason(std::vector<RankTrace> ranks) {
  const TraceReport report = Analyze(std::move(ranks));
  return report.most_exposed.empty() ? "none" : report.most_exposed[0].reason;
}

TEST(Reasons, OfTheFirstGatherOfForwardIsTheUpdateThatItHadToWaitFor) {
  Rank rank;
  rank.Step(2, 0, 100'000);
  TraceOp& update = rank.Op("optimizer", "adamw", OpKind::kOptimizer, 0, 5000);
  update.unit = "wte";
  const int64_t update_id = update.id;
  rank.Wait("all_gather", 100, 5000, update_id, "optimizer");
  const int64_t gather = rank.Collective("all_gather", "all_gather wte", Purpose::kParameter, 5010,
                                         5010, 17'010, 24'000'000)
                             .id;
  rank.Wait("compute", 200, 17'020, gather, "all_gather");
  rank.Compute("embedding_forward", 17'030, 90'000);
  EXPECT_EQ(Reason({rank.trace()}),
            "compute waited for it 12.00 ms; it had to wait for adamw wte; its data moved at 2 "
            "GB/s");
}

TEST(Reasons, OfTheLastReduceScatterIsThatComputeHadFinished) {
  Rank rank;
  rank.Step(1, 0, 50'000).Step(2, 50'000, 100'000);
  rank.Compute("linear_backward", 0, 30'000);
  rank.Collective("reduce_scatter", "reduce_scatter h.0", Purpose::kGradient, 25'000, 25'000,
                  36'000, 1000);
  rank.Collective("reduce_scatter", "reduce_scatter wte", Purpose::kGradient, 36'010, 36'010,
                  47'000, 5'495'000);
  rank.Compute("embedding_forward", 51'000, 99'000);
  EXPECT_EQ(Reason({rank.trace()}),
            "nothing was left to compute in the step; it queued behind reduce_scatter h.0; its "
            "data moved at "
            "0.5 GB/s");
}

TEST(Reasons, OfAnOptimizersScatterNameTheGatherThatItHeldUp) {
  Rank rank;
  rank.Step(1, 0, 100'000);
  const int64_t product =
      rank.Op("newton_schulz", "symmetric_product", OpKind::kOptimizer, 0, 10'000).id;
  rank.Wait("scatter", 0, 10'000, product, "newton_schulz");
  rank.Collective("scatter", "muon_scatter h.0", Purpose::kOptimizer, 10'005, 10'005, 30'005);
  const int64_t update = rank.Op("scatter", "apply_update", OpKind::kOptimizer, 30'010, 31'000).id;
  rank.Wait("all_gather", 0, 31'000, update, "scatter");
  const int64_t gather =
      rank.Collective("all_gather", "all_gather h.0", Purpose::kParameter, 31'005, 31'005, 33'000)
          .id;
  rank.Wait("compute", 0, 33'000, gather, "all_gather");
  rank.Compute("linear_forward", 33'010, 99'000);
  EXPECT_EQ(Reason({rank.trace()}),
            "compute waited for it 20.00 ms through all_gather h.0; it had to wait for "
            "symmetric_product");
}

TEST(Reasons, NameAnotherOpThatComputeWaitedFor) {
  Rank rank;
  rank.Step(1, 0, 100'000);
  const int64_t other = rank.Collective("other", "first", Purpose::kParameter, 0, 0, 20'000).id;
  // Ends after `first`, so that compute cannot have waited for it when that let compute go.
  rank.Collective("all_gather", "second", Purpose::kParameter, 0, 0, 25'000);
  rank.Wait("compute", 0, 20'000, other, "other");
  rank.Compute("a", 20'000, 99'000);
  const TraceReport report = Analyze({rank.trace()});
  ASSERT_EQ(report.most_exposed.size(), 2u);
  for (const ExposedOp& op : report.most_exposed) {
    EXPECT_EQ(op.reason, op.name == "first"
                             ? "compute waited for it 20.00 ms; it began as soon as it was enqueued"
                             : "compute waited 20.00 ms for first; it began as soon as it was "
                               "enqueued");
  }
}

TEST(Reasons, NameTheRankThatArrivedLast) {
  std::vector<RankTrace> traces;
  for (int r = 0; r < 3; ++r) {
    Rank rank(r);
    rank.Step(1, 0, 100'000);
    // Rank 1 comes at 30 ms and sets all free.
    const int64_t begin = r == 1 ? 30'000 : r == 0 ? 1000 : 10'000;
    const int64_t id =
        rank.Collective("gradient", "reduce_scatter h.0", Purpose::kGradient, begin, 30'000, 35'000)
            .id;
    rank.Wait("compute", 900, 35'010, id, "gradient");
    rank.Compute("a", 36'000, 99'000);
    traces.push_back(rank.trace());
  }
  const TraceReport report = Analyze(traces);
  ASSERT_EQ(report.most_exposed.size(), 1u);
  EXPECT_EQ(report.most_exposed[0].rank, 0);
  EXPECT_EQ(report.most_exposed[0].reason,
            "compute waited for it 34.00 ms; it waited 29.00 ms for rank 1 to arrive");
  EXPECT_EQ(report.slowest_rank, 1);
  EXPECT_DOUBLE_EQ(report.slowest_by, 24.5);  // (29 + 20) / 2
}

TEST(Reasons, DoWithoutWhatWasNotTraced) {
  Rank rank;
  rank.Step(1, 0, 10'000);
  rank.Wait("all_gather", 0, 1000, /*cause=*/77, "optimizer");
  rank.Collective("all_gather", "x", Purpose::kParameter, 1000, 1000, 4000);
  rank.Wait("compute", 0, 4000, /*cause=*/0, "all_gather");
  rank.Compute("a", 4000, 9000);
  EXPECT_EQ(Reason({rank.trace()}),
            "compute waited 3.00 ms for stream all_gather; it had to wait for stream optimizer");
}

TEST(SlowestRank, WaitsOfOneRankOnSeveralStreamsAtOnceCountOnce) {
  std::vector<RankTrace> traces;
  for (int r = 0; r < 3; ++r) {
    Rank rank(r);
    rank.Step(1, 0, 100'000);
    // Rank 2 comes last to all three, at 30, 40 and 60 ms.
    const auto begin = [&](int64_t zero, int64_t one, int64_t two) {
      return r == 0 ? zero : r == 1 ? one : two;
    };
    rank.Collective("a", "x", Purpose::kParameter, begin(10'000, 25'000, 30'000), 30'000, 31'000);
    rank.Collective("b", "y", Purpose::kGradient, begin(20'000, 39'000, 40'000), 40'000, 41'000);
    rank.Collective("c", "z", Purpose::kGradient, begin(50'000, 60'000, 60'000), 60'000, 61'000);
    traces.push_back(rank.trace());
  }
  const TraceReport report = Analyze(traces);
  EXPECT_EQ(report.slowest_rank, 2);
  // Rank 0 waited from 10 to 40 ms and from 50 to 60, rank 1 from 25 to 30 and from 39 to 40.
  EXPECT_DOUBLE_EQ(report.slowest_by, (30 + 10 + 5 + 1) / 2.0);
}

TEST(SlowestRank, IsNotNamedForARunOfOneRank) {
  Rank rank;
  rank.Step(1, 0, 10'000);
  rank.Collective("g", "x", Purpose::kParameter, 0, 500, 1000);
  const TraceReport report = Analyze({rank.trace()});
  EXPECT_EQ(report.slowest_by, 0);
  EXPECT_THAT(FormatReport(report), Not(HasSubstr("slowest")));
}

std::string ErrorOf(std::vector<RankTrace> ranks) {
  const absl::StatusOr<TraceReport> report = AnalyzeTraces(ranks);
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(report.status().message());
}

TEST(AnalyzeTraces, RefusesTracesWithoutStepsInCommon) {
  EXPECT_THAT(ErrorOf({}), HasSubstr("no rank's trace"));
  Rank first(0), second(1);
  first.Step(1, 0, 10).Step(2, 10, 20);
  EXPECT_THAT(
      ErrorOf({first.trace(), second.trace()}),
      AllOf(HasSubstr("rank 1's trace holds no whole step"),
            HasSubstr("ended or failed before its first traced step was done"),
            HasSubstr("more entries than the recorder holds"), HasSubstr("ui.perfetto.dev")));
  second.Step(1, 0, 10);
  EXPECT_THAT(ErrorOf({first.trace(), second.trace()}),
              HasSubstr("rank 1's trace holds 1 steps from 1 to 1, rank 0's 2 steps from 1 to 2"));
  second.Step(3, 10, 20);
  EXPECT_THAT(ErrorOf({first.trace(), second.trace()}), HasSubstr("from 1 to 3"));
}

TEST(AnalyzeTraces, TakesWhatNoRecorderWrites) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  RankTrace trace;
  trace.steps = {{1, 0, kHuge}, {2, 50, 40}, {3, kLeast, 10}};
  trace.streams.resize(3);
  trace.streams[0].name = "compute";
  trace.streams[0].waits = {{kLeast, kHuge, 5, "x"}, {10, 5, 1, ""}, {0, kHuge, 99, ""}};
  for (const int64_t begin : {kLeast, int64_t{0}, int64_t{500}, kHuge}) {
    for (const int64_t end : {kLeast, int64_t{100}, kHuge}) {
      for (const OpKind kind : {OpKind::kCompute, OpKind::kCollective, OpKind::kOptimizer}) {
        TraceOp op = {.name = "op", .kind = kind, .id = 1, .enqueued = end, .begin = begin};
        op.end = end;
        if (kind == OpKind::kCollective) {
          op.collective = TraceCollective{.sequence = 1, .bytes_sent = kHuge, .met = end};
        }
        trace.streams[1].ops.push_back(op);
        trace.streams[begin == 0 ? 0 : 1].ops.push_back(op);
      }
    }
  }
  RankTrace second = trace;
  second.rank = 1;
  const TraceReport report = Analyze({trace, second});
  EXPECT_GE(report.mean.split.idle, 0);
  EXPECT_NEAR(report.mean.split.total() / report.mean.step, 1, 1e-9);
  for (const absl::string_view line : absl::StrSplit(FormatReport(report), '\n')) {
    EXPECT_LE(line.size(), 100u) << line;
  }
}

TEST(AnalyzeTraces, GoesThroughALargeTraceInNearLinearTime) {
  constexpr int kOps = 131'072;
  Rank rank;
  rank.Step(1, 0, 10 * kOps);
  // The worst case: every collective overlaps every wait and every computation.
  TraceStream compute = {.name = "compute"};
  TraceStream network = {.name = "network"};
  for (int i = 0; i < kOps / 2; ++i) {
    const int64_t at = Rank::kStart + 10 * i;
    TraceOp op = {.name = "a", .id = 2 * i + 1, .enqueued = at, .begin = at};
    op.end = at + 5;
    compute.ops.push_back(op);
    compute.waits.push_back({at + 5, at + 10, 2 * (kOps / 2 - i), "network"});
    op.id = 2 * i + 2;
    op.kind = OpKind::kCollective;
    op.end = Rank::kStart + 10 * kOps;
    op.collective = TraceCollective{.channel = "c", .sequence = i + 1, .met = at};
    network.ops.push_back(op);
  }
  rank.trace().streams = {compute, network};
  const TraceReport report = Analyze({rank.trace()});
  // Half of the first half was computation.
  EXPECT_DOUBLE_EQ(report.mean.split.compute, 5.0 * (kOps / 2) / 1000);
  EXPECT_EQ(report.most_exposed.size(), 1u);
}

TEST(FormatReport, BeginsWithWhatMattersAndShowsEveryFigure) {
  std::vector<RankTrace> traces;
  for (int r = 0; r < 2; ++r) {
    Rank rank(r);
    rank.Step(3, 0, 100'000).Step(4, 100'000, 200'000);
    for (const int64_t at : {0, 100'000}) {
      TraceOp& gather = rank.Collective("all_gather", "all_gather", Purpose::kParameter,
                                        at + r * 1000, at + 1000, at + 11'000, 20 << 20);
      gather.unit = "wte";
      gather.phase = "forward";
      rank.Wait("compute", at, at + 11'000, gather.id, "all_gather");
      rank.Compute("a", at + 11'000, at + 80'000);
      rank.Collective("reduce_scatter", "reduce_scatter", Purpose::kGradient, at + 50'000,
                      at + 50'000, at + 80'000, 10 << 20);
      rank.Op("optimizer", "adamw", OpKind::kOptimizer, at + 80'000, at + 90'000);
    }
    traces.push_back(rank.trace());
  }
  const std::string text = FormatReport(Analyze(traces));
  EXPECT_THAT(
      text,
      StartsWith("A step takes 100.0 ms: 69.0% compute, 10.0% optimizer compute, 10.5% exposed"));
  // Hidden: 30 ms of 41 and of 40, so 60 of 81.
  EXPECT_THAT(text,
              HasSubstr("\n74.1% of communication was hidden; most exposed was all_gather wte in"));
  EXPECT_THAT(text, HasSubstr("Mean of 2 steps (3 to 4) on 2 ranks."));
  EXPECT_THAT(text, HasSubstr("   11.00 of 11.00   all_gather wte in forward (parameter, rank 0)\n"
                              "                    compute waited for it 11.00 ms;"));
  EXPECT_THAT(text, HasSubstr("Rank 1 was the slowest: the others waited 1.00 ms a step for it"));
  EXPECT_THAT(text, HasSubstr("\nand 0.00 ms for the next slowest."));
  // Rank 0: 69 ms compute, 10 optimizer, 11 parameter, 10 idle.
  EXPECT_THAT(text, HasSubstr("rank 0     69.00  69%  10.00  10%  11.00  11%   0.00   0%"));
  EXPECT_THAT(text, HasSubstr("  10.00  10%  100.0\n"));
}

TEST(FormatReport, KeepsTo100ColumnsWhateverOpsAreCalled) {
  Rank rank;
  rank.Step(1, 0, 10'000'000'000);
  for (int i = 0; i < 5; ++i) {
    const std::string name = absl::StrCat(i, std::string(300, "x \xc3\x1b\n"[i]));
    TraceOp& op = rank.Collective(name, name, Purpose::kParameter, 0, 10'000'000, 7'000'000'000,
                                  int64_t{1} << 60);
    op.unit = op.phase = name;
    rank.Wait("compute", 0, 7'000'000'000, op.id, name);
  }
  rank.Compute(std::string(500, 'y'), 8'000'000'000, 9'000'000'000);
  RankTrace other = rank.trace();
  other.rank = 1234;
  other.cut_short = true;
  const std::string text = FormatReport(Analyze({other, rank.trace()}));
  EXPECT_THAT(text, HasSubstr("rank 1234)"));
  EXPECT_THAT(text, HasSubstr("cut short"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (const std::string& line : lines) EXPECT_LE(line.size(), 100u) << line;
}

TEST(FormatReport, GivesTheTerminalNothingThatControlsIt) {
  Rank rank;
  rank.Step(1, 0, 20'000);
  const std::string evil = "\x1b[2J\u009b31m\u202e\u2066\x9b\xff";
  // Of several bytes a character, so that what is cut is cut within one.
  std::string lengthy = "x";
  for (int i = 0; i < 100; ++i) lengthy += "\u66db";  // of bytes e6 9b 9b
  for (const std::string& name : {evil, lengthy}) {
    const int64_t begin = name == evil ? 0 : 10'000;
    TraceOp& op = rank.Collective(name, name, Purpose::kParameter, begin, begin, begin + 5000);
    op.unit = op.phase = name;
    rank.Wait("compute", begin, begin + 5000, 0, name);
    rank.Compute(name, begin + 5000, begin + 10'000);
  }
  const std::string text = FormatReport(Analyze({rank.trace()}));
  EXPECT_THAT(text, HasSubstr("?[2J?31m????"));
  EXPECT_EQ(Printable(absl::StrReplaceAll(text, {{"\n", ""}})),
            absl::StrReplaceAll(text, {{"\n", ""}}));
}

}  // namespace
}  // namespace dim0
