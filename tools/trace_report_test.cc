// Runs the program as users do: what it prints, writes and returns.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/trace/trace_file.h"
#include "tests/run_program.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

namespace fs = std::filesystem;

class TraceReportTest : public ProgramTest {
 protected:
  // A run of one step of 20 ms on two ranks: 10 ms of computation, and before it a gather of 5 ms.
  // Returns the run's folder.
  std::string MakeRun(const std::string& name, const std::string& model = "a model") const {
    constexpr int64_t kStart = 1'800'000'000'000'000;
    const std::string run = Path(name);
    const std::string dir = run + "/trace";
    fs::create_directories(dir);
    for (int rank = 0; rank < 2; ++rank) {
      RankTrace trace;
      trace.rank = rank;
      trace.world_size = 2;
      trace.backend = "gloo";
      trace.model = model;
      trace.parameters = 10;
      trace.metrics = "../metrics.jsonl";
      trace.steps = {{.step = 3, .begin = kStart, .end = kStart + 20'000, .loss = 5.4375}};
      TraceOp gather = {.name = "all_gather wte", .kind = OpKind::kCollective, .id = 1, .step = 3};
      gather.enqueued = gather.begin = kStart;
      gather.end = kStart + 5000;
      gather.collective = TraceCollective{.operation = "all_gather", .channel = "parameter"};
      gather.collective->purpose = Purpose::kParameter;
      gather.collective->sequence = 1;
      gather.collective->bytes_sent = 1 << 20;
      gather.collective->met = kStart;
      TraceOp compute = {.name = "linear_forward", .id = 2, .step = 3, .enqueued = kStart};
      compute.begin = kStart + 5000;
      compute.end = kStart + 15'000;
      trace.streams = {{.name = "compute", .number = 7, .ops = {compute}},
                       {.name = "all_gather", .number = 20, .ops = {gather}}};
      trace.streams[0].waits = {{kStart, kStart + 5000, 1, "all_gather"}};
      const absl::Status written = WriteTrace(dir, trace);
      EXPECT_TRUE(written.ok()) << written;
    }
    return run;
  }
  Outcome Report(const std::vector<std::string>& arguments) const {
    return Run("tools/trace_report", arguments);
  }
  std::string ErrorOf(const std::vector<std::string>& arguments, int exit_status) const {
    return ProgramTest::ErrorOf("tools/trace_report", arguments, exit_status);
  }
};

TEST_F(TraceReportTest, PrintsTheReportOfARunFolderAndOfItsTraceFolder) {
  const std::string run = MakeRun("first");
  const Outcome outcome = Report({run});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, StartsWith("A step takes 20.00 ms: 50.0% compute, 0.0% optimizer "
                                      "compute, 25.0% exposed communication, 25.0%"));
  EXPECT_THAT(outcome.out, HasSubstr("Step 3 on 2 ranks."));
  EXPECT_THAT(outcome.out, HasSubstr("compute waited for it 5.00 ms"));
  EXPECT_EQ(Report({run + "/trace"}).out, outcome.out);
}

TEST_F(TraceReportTest, PrintsSeveralRunsUnderTheirLabels) {
  const std::string a = MakeRun("x/same"), b = MakeRun("y/same");
  const Outcome outcome = Report({a, b + "/trace/"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  const std::string one = Report({a}).out;
  EXPECT_EQ(outcome.out, absl::StrCat("== same ==\n", one, "\n== same 2 ==\n", one));
}

TEST_F(TraceReportTest, WritesAPageWithTheRunsAndTheirLosses) {
  const std::string a = MakeRun("adamw"), b = MakeRun("muon");
  Write("adamw/metrics.jsonl", "{\"step\":3,\"loss\":5.4375}\n");
  Write("muon/metrics.jsonl", "{\"step\":3,\"loss\":5.4375}\n{\"step\":3,\"val_loss\":4.3125}\n");
  const std::string page = Path("page.html");
  const Outcome outcome = Report({"--html", page, a, b});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr(page));
  EXPECT_THAT(Slurp(page), AllOf(HasSubstr("<html"), HasSubstr("\"adamw\""), HasSubstr("\"muon\""),
                                 HasSubstr("5.4375"), HasSubstr("4.3125")));
}

TEST_F(TraceReportTest, ARunWhoseLossesCannotBeReadCostsAWarningAndTheCurve) {
  const std::string a = MakeRun("adamw"), b = MakeRun("muon");
  Write("adamw/metrics.jsonl", "{\"step\":1,\"loss\":5.4375}\nnot JSON\n");
  const std::string page = Path("page.html");
  const Outcome outcome = Report({"--html=" + page, a, b});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_THAT(outcome.err, HasSubstr("trace_report: warning: no loss curve for adamw: "));
  EXPECT_THAT(outcome.err, HasSubstr("metrics.jsonl: line 2"));
  EXPECT_THAT(outcome.err, HasSubstr("trace_report: warning: no loss curve for muon: "));
  EXPECT_THAT(Slurp(page), AllOf(HasSubstr("\"muon\""), Not(HasSubstr("5.4375"))));
}

TEST_F(TraceReportTest, TheLossesOfAnotherRunCostAWarningAndTheCurve) {
  const std::string run = MakeRun("run");
  const std::string page = Path("page.html");
  for (const char* metrics : {"{\"step\":3,\"loss\":7.0625}\n", "{\"step\":2,\"loss\":7.0625}\n"}) {
    Write("run/metrics.jsonl", metrics);
    const Outcome outcome = Report({"--html=" + page, run});
    EXPECT_EQ(outcome.exit_status, 0);
    EXPECT_THAT(outcome.err, StartsWith("trace_report: warning: no loss curve for run: "));
    EXPECT_THAT(outcome.err, HasSubstr("metrics.jsonl is of another run"));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1);
    EXPECT_THAT(Slurp(page), Not(HasSubstr("7.0625")));
  }
}

TEST_F(TraceReportTest, APageReplacesAPageAndNothingElse) {
  const std::string run = MakeRun("run");
  Write("run/metrics.jsonl", "");
  for (const char* contents : {"", "notes", "<!doctype html>\n<html lang=\"en\">\n<head>\n"}) {
    Write("mine.html", contents);
    const std::string error = ErrorOf({"--html=" + Path("mine.html"), run}, 1);
    EXPECT_THAT(error, HasSubstr(Path("mine.html") + " is there already"));
    EXPECT_EQ(Slurp(Path("mine.html")), contents);
  }
  const std::string page = Path("page.html");
  ASSERT_EQ(Report({"--html=" + page, run}).exit_status, 0);
  const std::string first = Slurp(page);
  ASSERT_EQ(Report({"--html=" + page, run, run}).exit_status, 0);
  EXPECT_NE(Slurp(page), first);
}

TEST_F(TraceReportTest, NamesOfFoldersDoNotControlTheTerminal) {
  const std::string name = "a\x1b[31m\nb\u202e\xff";
  const std::string run = MakeRun(name), page = Path(name + ".html");
  for (const Outcome& outcome :
       {Report({run, run}), Report({"--html=" + page, run}), Report({Path(name + "?")})}) {
    for (const char* control : {"\x1b", "\nb", "\u202e", "\xff"}) {
      EXPECT_THAT(outcome.out + outcome.err, Not(HasSubstr(control)));
    }
    EXPECT_THAT(outcome.out + outcome.err, ContainsRegex("a\\?\\[31m[? ]b\\?\\?"));
  }
}

TEST_F(TraceReportTest, RefusesACommandLineWithoutFolders) {
  EXPECT_THAT(ErrorOf({}, 2), HasSubstr("train --trace=DIR"));
  EXPECT_THAT(ErrorOf({""}, 2), HasSubstr("no folder given"));
  EXPECT_THAT(ErrorOf({"--htm=x", "y"}, 2), HasSubstr("did you mean --html?"));
}

TEST_F(TraceReportTest, RefusesToCompareDifferentModelsAndNamesBothRuns) {
  const std::string a = MakeRun("a"), b = MakeRun("b"), c = MakeRun("c", "another model");
  EXPECT_THAT(ErrorOf({a, b, c}, 2), HasSubstr(absl::StrCat(a, " and ", c, " trained different")));
  const std::string page = Path("page.html");
  ErrorOf({"--html=" + page, a, c}, 2);
  EXPECT_FALSE(fs::exists(page));
}

TEST_F(TraceReportTest, NamesAFolderWithoutTracesAndAPageThatCannotBeWritten) {
  const std::string run = MakeRun("a");
  EXPECT_THAT(ErrorOf({Path("none")}, 1), HasSubstr(Path("none")));
  EXPECT_THAT(ErrorOf({run, Path("none")}, 1), HasSubstr(Path("none")));
  Write("a/metrics.jsonl", "{\"step\":3,\"loss\":5.4375}\n");
  EXPECT_THAT(ErrorOf({"--html=" + Path("none/page.html"), run}, 1),
              HasSubstr(Path("none/page.html")));
}

}  // namespace
}  // namespace dim0
