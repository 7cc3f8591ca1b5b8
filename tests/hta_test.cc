// Holistic Trace Analysis reads our traces and finds the overlap of communication and computation
// that they have. The Python that has the package is $DIM0_HTA_PYTHON, or python3; tools/test.sh
// sets it. The test is skipped where there is none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/trace/trace.h"
#include "runtime/trace/trace_file.h"
#include "runtime/trace/trace_report.h"
#include "tests/run_program.h"

namespace dim0 {
namespace {

constexpr int64_t kStart = 1790000000000000;  // a time of 2026

class HtaTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    for (RankTrace& trace : traces_) {
      trace.world_size = 2;
      trace.backend = "gloo";
      trace.steps = {{1, kStart, kStart + 300}, {2, kStart + 300, kStart + 600}};
      trace.streams = {{"compute", 7, {}, {}},
                       {"all_gather", 20, {}, {}},
                       {"reduce_scatter", 21, {}, {}},
                       {"optimizer", 22, {}, {}}};
    }
    traces_[1].rank = 1;
  }

  // Adds an op on the stream that comes `index`-th. Times are from the first step's start on.
  void Add(int rank, int index, OpKind kind, int64_t begin, int64_t end, int64_t enqueued) {
    TraceOp op;
    op.name = "op";
    op.kind = kind;
    op.id = ++last_id_;
    op.enqueued = kStart + enqueued;
    op.step = enqueued < 300 ? 1 : 2;
    op.begin = kStart + begin;
    op.end = kStart + end;
    if (kind == OpKind::kCollective) {
      op.collective.emplace().operation = index == 1 ? "all_gather" : "reduce_scatter";
    }
    traces_[rank].streams[index].ops.push_back(op);
  }

  // Each rank's overlap in per cent, as HTA finds it. Skips the test where there is no HTA.
  void FindOverlap(const std::string& dir, std::vector<std::pair<int, double>>* found) {
    const char* python = std::getenv("DIM0_HTA_PYTHON");
    const Outcome outcome =
        Run("/usr/bin/env", {python != nullptr ? python : "python3", "tests/hta_overlap.py", dir});
    constexpr int kNoProgram = 127, kNoPackage = 3;
    if (outcome.exit_status == kNoProgram || outcome.exit_status == kNoPackage) {
      GTEST_SKIP() << "no Python with HolisticTraceAnalysis: " << outcome.err;
    }
    ASSERT_EQ(outcome.exit_status, 0) << outcome.err;
    std::istringstream lines(outcome.out);
    for (std::pair<int, double> line; lines >> line.first >> line.second;) found->push_back(line);
  }

  RankTrace traces_[2];

 private:
  int64_t last_id_ = 0;
};

TEST_F(HtaTest, FindsTheOverlapThatATraceHas) {
  // Rank 0 communicates in [0, 200) and [300, 450): two gathers back to back, one that a
  // reduce-scatter overlaps in part, and one of no length.
  Add(0, 1, OpKind::kCollective, 0, 100, 0);
  Add(0, 1, OpKind::kCollective, 100, 200, 10);
  Add(0, 1, OpKind::kCollective, 300, 400, 250);
  Add(0, 1, OpKind::kCollective, 550, 550, 310);
  Add(0, 2, OpKind::kCollective, 350, 450, 320);
  // It computes in [50, 80), [150, 420) and [440, 500): inside of a gather, over the end of one, an
  // op of no length, two streams at once, and a copy. Its last op was enqueued as the step ended.
  Add(0, 0, OpKind::kCompute, 50, 80, 20);
  Add(0, 0, OpKind::kCompute, 90, 90, 30);
  Add(0, 0, OpKind::kCompute, 150, 250, 40);
  Add(0, 0, OpKind::kCompute, 250, 310, 60);
  Add(0, 3, OpKind::kOptimizer, 300, 420, 270);
  Add(0, 0, OpKind::kCopy, 440, 500, 330);
  // Waits are neither, wherever they stand.
  traces_[0].streams[0].waits = {{kStart + 80, kStart + 90, 1, "all_gather"},
                                 {kStart + 90, kStart + 150, 2, "all_gather"}};

  // Rank 1 communicates in [20, 60), [90, 150) and [300, 400) and computes in [0, 100), [140, 141)
  // and from 399 on.
  Add(1, 1, OpKind::kCollective, 20, 60, 0);
  Add(1, 1, OpKind::kCollective, 90, 150, 10);
  Add(1, 2, OpKind::kCollective, 300, 400, 300);
  Add(1, 0, OpKind::kCompute, 0, 100, 0);
  Add(1, 0, OpKind::kCompute, 140, 141, 20);
  Add(1, 3, OpKind::kOptimizer, 399, 700, 600);

  for (const RankTrace& trace : traces_) ASSERT_TRUE(WriteTrace(folder(), trace).ok());
  std::vector<std::pair<int, double>> found;
  ASSERT_NO_FATAL_FAILURE(FindOverlap(folder(), &found));
  if (IsSkipped()) return;
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].first, 0);
  // 30 of [50, 80), 50 of [150, 200), 120 of [300, 420) and 10 of [440, 450), of 350.
  EXPECT_NEAR(found[0].second, 60, 0.6);
  EXPECT_EQ(found[1].first, 1);
  // 40 of [20, 60), 10 of [90, 100), 1 of [140, 141) and 1 of [399, 400), of 200.
  EXPECT_NEAR(found[1].second, 26, 0.26);

  const absl::StatusOr<TraceReport> report = AnalyzeTraces(traces_);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_NEAR(report->ranks[0].all.fraction_hidden(), 0.60, 1e-9);
  EXPECT_NEAR(report->ranks[1].all.fraction_hidden(), 0.26, 1e-9);
}

TEST_F(HtaTest, FindsTheOverlapThatOurReportFindsInARunsTrace) {
  std::string text;
  for (int i = 0; i < 300; ++i) absl::StrAppend(&text, "The square of ", i, " is ", i * i, ".\n");
  Write("text.txt", text);
  // Slow enough for communication to be seen; Muon, for collectives on all streams.
  const Outcome train =
      Run("tools/train",
          {"--layers=3", "--width=64", "--heads=2", "--vocab=256", "--seq_len=32", "--batch=4",
           "--steps=4", "--ranks=3", "--threads_per_rank=1", "--optimizer=muon", "--link=0.02,100",
           absl::StrCat("--data=", Path("text.txt")), absl::StrCat("--run_dir=", Path("run")),
           absl::StrCat("--trace=", Path("trace")), "--trace_steps=1:4"});
  ASSERT_EQ(train.exit_status, 0) << train.err;
  const absl::StatusOr<std::vector<RankTrace>> traces = ReadTraces(Path("trace"));
  ASSERT_TRUE(traces.ok()) << traces.status();
  const absl::StatusOr<TraceReport> report = AnalyzeTraces(*traces);
  ASSERT_TRUE(report.ok()) << report.status();

  std::vector<std::pair<int, double>> found;
  ASSERT_NO_FATAL_FAILURE(FindOverlap(Path("trace"), &found));
  if (IsSkipped()) return;
  ASSERT_EQ(found.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(found[rank].first, rank);
    EXPECT_GT(found[rank].second, 1);
    EXPECT_NEAR(found[rank].second, 100 * report->ranks[rank].all.fraction_hidden(), 1);
  }
}

}  // namespace
}  // namespace dim0
