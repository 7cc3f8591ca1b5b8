// Holistic Trace Analysis reads our traces and finds the overlap of communication and computation
// that they have. The Python that has the package is $DIM0_HTA_PYTHON, or python3; tools/test.sh
// sets it. The test is skipped where there is none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/trace/trace.h"
#include "runtime/trace/trace_file.h"
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
  const char* python = std::getenv("DIM0_HTA_PYTHON");
  const Outcome outcome = Run(
      "/usr/bin/env", {python != nullptr ? python : "python3", "tests/hta_overlap.py", folder()});
  constexpr int kNoProgram = 127, kNoPackage = 3;
  if (outcome.exit_status == kNoProgram || outcome.exit_status == kNoPackage) {
    GTEST_SKIP() << "no Python with HolisticTraceAnalysis: " << outcome.err;
  }
  ASSERT_EQ(outcome.exit_status, 0) << outcome.err;

  std::istringstream lines(outcome.out);
  std::vector<std::pair<int, double>> found;
  for (std::pair<int, double> line; lines >> line.first >> line.second;) found.push_back(line);
  ASSERT_EQ(found.size(), 2u) << outcome.out << outcome.err;
  EXPECT_EQ(found[0].first, 0);
  // 30 of [50, 80), 50 of [150, 200), 120 of [300, 420) and 10 of [440, 450), of 350.
  EXPECT_NEAR(found[0].second, 60, 0.6);
  EXPECT_EQ(found[1].first, 1);
  // 40 of [20, 60), 10 of [90, 100), 1 of [140, 141) and 1 of [399, 400), of 200.
  EXPECT_NEAR(found[1].second, 26, 0.26);
}

}  // namespace
}  // namespace dim0
