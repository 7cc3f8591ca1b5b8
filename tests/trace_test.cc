// Traces of runs: what `train --trace` records of each optimizer, that it agrees with what the run
// itself counted, and that no trouble with a trace troubles the training.
#include "runtime/trace/trace.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/trace/trace_file.h"
#include "runtime/trace/trace_report.h"
#include "tests/run_program.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

namespace fs = std::filesystem;

using Json = nlohmann::json;
using Arguments = std::vector<std::string>;

class TraceTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    std::string text;
    for (int i = 0; i < 300; ++i) absl::StrAppend(&text, "The square of ", i, " is ", i * i, ".\n");
    Write("text.txt", text);
  }

  // Later arguments go before earlier ones.
  Arguments TrainArguments(const Arguments& more) const {
    Arguments arguments = {"--layers=2",
                           "--width=16",
                           "--heads=2",
                           "--vocab=256",
                           "--seq_len=16",
                           "--batch=2",
                           "--steps=4",
                           "--ranks=2",
                           "--threads_per_rank=1",
                           absl::StrCat("--data=", Path("text.txt")),
                           absl::StrCat("--run_dir=", Path("run")),
                           absl::StrCat("--trace=", Path("trace"))};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  Outcome Train(const Arguments& more) const {
    fs::remove_all(Path("run"));
    fs::remove_all(Path("trace"));
    return Run("tools/train", TrainArguments(more));
  }
  Outcome TrainToTheEnd(const Arguments& more) const {
    Outcome outcome = Train(more);
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return outcome;
  }
  std::vector<RankTrace> Traces() const {
    absl::StatusOr<std::vector<RankTrace>> traces = ReadTraces(Path("trace"));
    EXPECT_TRUE(traces.ok()) << traces.status();
    return traces.ok() ? *traces : std::vector<RankTrace>();
  }
  std::vector<RankTrace> TrainAndRead(const Arguments& more) const {
    TrainToTheEnd(more);
    std::vector<RankTrace> traces = Traces();
    EXPECT_THAT(traces, SizeIs(2));
    return traces;
  }
  std::vector<Json> Steps() const {
    std::vector<Json> steps;
    const std::string text = Slurp(Path("run/metrics.jsonl"));
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      Json json = Json::parse(line.begin(), line.end());
      if (json.contains("loss")) steps.push_back(std::move(json));
    }
    return steps;
  }
};

// The operations of a rank's collectives for one purpose.
std::set<std::string> Operations(const RankTrace& trace, Purpose purpose) {
  std::set<std::string> operations;
  for (const TraceStream& stream : trace.streams) {
    for (const TraceOp& op : stream.ops) {
      if (op.collective && op.collective->purpose == purpose) {
        operations.insert(op.collective->operation);
      }
    }
  }
  return operations;
}

const TraceStream& StreamOf(const RankTrace& trace, absl::string_view name) {
  for (const TraceStream& stream : trace.streams) {
    if (stream.name == name) return stream;
  }
  static const TraceStream* const none = new TraceStream;
  ADD_FAILURE() << "no stream " << name;
  return *none;
}

TEST_F(TraceTest, RmnpsTraceHasNoCollectiveOfTheOptimizerAndMuonsHasThoseOfItsSchedule) {
  const struct {
    Arguments arguments;
    std::set<std::string> operations;
  } cases[] = {{{"--optimizer=rmnp"}, {}},
               {{"--optimizer=adamw"}, {}},
               {{"--optimizer=muon"}, {"all_to_all"}},
               {{"--optimizer=muon", "--muon_schedule=redundant"}, {"all_gather"}},
               {{"--optimizer=muon", "--muon_schedule=broadcast"}, {"all_gather", "broadcast"}}};
  for (const auto& test : cases) {
    for (const RankTrace& trace : TrainAndRead(test.arguments)) {
      EXPECT_EQ(Operations(trace, Purpose::kOptimizer), test.operations);
      EXPECT_EQ(Operations(trace, Purpose::kParameter),
                (std::set<std::string>{"all_gather", "all_to_all"}));
      EXPECT_EQ(Operations(trace, Purpose::kGradient),
                (std::set<std::string>{"reduce_scatter", "all_to_all"}));
    }
  }
}

TEST_F(TraceTest, OpsCarryTheUnitAndThePhaseThatTheyServe) {
  for (const RankTrace& trace : TrainAndRead({"--optimizer=rmnp", "--trace_steps=2:2"})) {
    // Each unit's gathers: the root, which stays, for forward; blocks for forward and for backward.
    std::map<std::string, std::vector<std::string>> phases;
    std::vector<std::string> rows;
    for (const TraceOp& op : StreamOf(trace, "all_gather").ops) {
      if (!op.collective) continue;
      if (op.collective->operation == "all_gather") phases[op.unit].push_back(op.phase);
      if (op.collective->operation == "all_to_all") {
        rows.push_back(absl::StrCat(op.name, " ", op.unit, " ", op.phase));
      }
    }
    EXPECT_THAT(rows, ElementsAre("all_to_all rows wte.weight root forward",
                                  "all_to_all rows wpe.weight root forward"));
    EXPECT_THAT(phases["root"], AllOf(Not(IsEmpty()), Each("forward")));
    EXPECT_THAT(phases["h.0"], ElementsAre("forward", "backward"));
    EXPECT_THAT(phases["h.1"], ElementsAre("forward", "backward"));
    rows.clear();
    for (const TraceOp& op : StreamOf(trace, "reduce_scatter").ops) {
      if (op.collective && op.collective->operation == "all_to_all") {
        rows.push_back(absl::StrCat(op.name, " ", op.unit, " ", op.phase));
      }
    }
    EXPECT_THAT(rows, ElementsAre("all_to_all rows wte.weight root backward",
                                  "all_to_all rows wpe.weight root backward"));
    std::set<std::string> computed, updated;
    for (const TraceOp& op : StreamOf(trace, "compute").ops) {
      if (!op.phase.empty()) computed.insert(absl::StrCat(op.phase, " ", op.unit));
    }
    for (const TraceOp& op : StreamOf(trace, "optimizer").ops) {
      updated.insert(absl::StrCat(op.phase, " ", op.unit));
    }
    EXPECT_THAT(computed, UnorderedElementsAre("forward root", "forward h.0", "forward h.1",
                                               "backward root", "backward h.0", "backward h.1"));
    EXPECT_THAT(updated, UnorderedElementsAre("update root", "update h.0", "update h.1"));
  }
}

TEST_F(TraceTest, TheTracesBytesAreTheLedgers) {
  for (const char* optimizer : {"rmnp", "muon"}) {
    const std::vector<RankTrace> traces =
        TrainAndRead({absl::StrCat("--optimizer=", optimizer), "--grad_accum=2"});
    const Json summary = Json::parse(Slurp(Path("run/summary.json")));
    for (const Purpose purpose : {Purpose::kParameter, Purpose::kGradient, Purpose::kOptimizer}) {
      int64_t bytes = 0;
      for (const RankTrace& trace : traces) {
        for (const TraceStream& stream : trace.streams) {
          for (const TraceOp& op : stream.ops) {
            if (op.collective && op.collective->purpose == purpose) {
              bytes += op.collective->bytes_sent;
            }
          }
        }
      }
      // 4 steps of 2 ranks.
      EXPECT_NEAR(summary.at("bytes_per_step").at(std::string(Name(purpose))).get<double>(),
                  bytes / 8.0, 1)
          << Name(purpose);
    }
  }
}

TEST_F(TraceTest, HoldsTheAskedStepsWholeAndWhatOfTheStepBeforeStillRanInThem) {
  for (const RankTrace& trace :
       TrainAndRead({"--optimizer=muon", "--steps=6", "--trace_steps=3:5", "--val_every=4"})) {
    ASSERT_THAT(trace.steps, SizeIs(3));
    EXPECT_FALSE(trace.cut_short);
    std::map<int64_t, std::map<std::string, int>> ops;  // by step and stream
    for (const TraceStream& stream : trace.streams) {
      for (const TraceOp& op : stream.ops) {
        if (op.step == 2) {
          EXPECT_EQ(op.phase, "update") << op.name;
          EXPECT_GT(op.end, trace.steps.front().begin) << op.name;
          continue;
        }
        ++ops[op.step][stream.name];
        EXPECT_GE(op.begin, trace.steps.front().begin) << op.name;
      }
    }
    ASSERT_THAT(ops, SizeIs(3));
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(trace.steps[i].step, 3 + i);
      EXPECT_EQ(ops[3 + i], ops[3]);
    }
  }
  // Steps last as long as the log says.
  const std::vector<Json> logged = Steps();
  const RankTrace leader = Traces()[0];
  for (const TraceStep& step : leader.steps) {
    EXPECT_NEAR((step.end - step.begin) / 1e3, logged[step.step - 1].at("step_ms").get<double>(),
                0.002);
  }
}

TEST_F(TraceTest, StepsCarryTheLossesOfTheLog) {
  const std::vector<RankTrace> traces = TrainAndRead({"--optimizer=rmnp", "--trace_steps=2:3"});
  const std::vector<Json> logged = Steps();
  for (const RankTrace& trace : traces) {
    ASSERT_THAT(trace.steps, SizeIs(2));
    for (const TraceStep& step : trace.steps) {
      EXPECT_EQ(step.loss, logged[step.step - 1].at("loss").get<double>());
    }
  }
}

TEST_F(TraceTest, LiveMemoryReturnsToWhatItWasAndStaysWithinWhatIsAllocated) {
  // Cast on their way, so that parameters and gradients pass through the wire buffers too.
  for (const RankTrace& trace :
       TrainAndRead({"--optimizer=rmnp", "--grad_accum=2", "--param_dtype=bfloat16",
                     "--reduce_dtype=bfloat16"})) {
    ASSERT_GT(trace.memory.size(), 2);
    EXPECT_EQ(trace.memory.front().bytes, trace.memory.back().bytes);
    const Json peak = Json::parse(Slurp(Path("run/summary.json"))).at("peak_memory_bytes");
    std::array<int64_t, kNumMemoryPurposes> most{};
    for (const TraceMemory& sample : trace.memory) {
      for (int i = 0; i < kNumMemoryPurposes; ++i) {
        EXPECT_GE(sample.bytes[i], 0);
        most[i] = std::max(most[i], sample.bytes[i]);
      }
    }
    for (int i = 0; i < kNumMemoryPurposes; ++i) {
      const std::string purpose(Name(static_cast<MemoryPurpose>(i)));
      EXPECT_LE(most[i], peak.at(purpose).get<int64_t>()) << purpose;
    }
    EXPECT_EQ(trace.memory.front().bytes[static_cast<int>(MemoryPurpose::kGathered)], 0);
    EXPECT_GT(most[static_cast<int>(MemoryPurpose::kGathered)], 0);
  }
}

TEST_F(TraceTest, TrainingIsTheSameWithATraceAndWithout) {
  TrainToTheEnd({"--optimizer=muon"});
  std::vector<std::string> traced, plain;
  for (const Json& step : Steps()) traced.push_back(step.at("loss").dump());
  TrainToTheEnd({"--optimizer=muon", "--trace="});
  for (const Json& step : Steps()) plain.push_back(step.at("loss").dump());
  EXPECT_EQ(traced, plain);
  EXPECT_FALSE(fs::exists(Path("trace")));
}

TEST_F(TraceTest, TheReportOfTheEndIsTraceReports) {
  const Outcome outcome = TrainToTheEnd({"--optimizer=rmnp"});
  const absl::StatusOr<TraceReport> report = AnalyzeTraces(Traces());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(outcome.out, HasSubstr(FormatReport(*report)));
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("trace: ", Path("trace"))));
  EXPECT_THAT(Run("tools/trace_report", {Path("trace")}).out, HasSubstr(FormatReport(*report)));
  for (const RankReport& rank : report->ranks) {
    EXPECT_NEAR(rank.split.total(), rank.step, 0.01 * rank.step);
  }
}

TEST_F(TraceTest, AFolderThatCannotBeWrittenCostsOneWarningAndNoStep) {
  Write("file", "");
  const std::string folders[] = {Path("file"), Path("file/trace"), "/proc/trace"};
  for (const std::string& folder : folders) {
    const Outcome outcome = TrainToTheEnd({absl::StrCat("--trace=", folder)});
    EXPECT_THAT(Steps(), SizeIs(4));
    EXPECT_TRUE(fs::exists(Path("run/model.safetensors")));
    int warnings = 0;
    for (const absl::string_view line : absl::StrSplit(outcome.out, '\n')) {
      if (absl::StartsWith(line, "warning:")) ++warnings;
    }
    EXPECT_EQ(warnings, 1) << outcome.out;
    EXPECT_THAT(outcome.out, ContainsRegex(absl::StrCat("warning: no trace: .*", folder)));
    EXPECT_THAT(outcome.out, HasSubstr("training goes on without"));
  }
}

TEST_F(TraceTest, ADiskThatIsFullWhenTheTraceIsWrittenCostsOneWarningAndNoStep) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer maps files of its own, which are longer than the limit allows";
#endif
  // The weights take 40 KB and the trace of 40 steps more than a megabyte; 512-byte blocks.
  std::string train = "ulimit -f 600 && exec tools/train";
  for (const std::string& argument : TrainArguments({"--steps=40", "--trace_steps=1:35"})) {
    absl::StrAppend(&train, " ", argument);
  }
  const Outcome outcome = Run("/bin/sh", {"-c", train});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(Steps(), SizeIs(40));
  EXPECT_THAT(outcome.out, ContainsRegex("warning: rank [01] has no trace: .*; training goes on"));
  EXPECT_THAT(outcome.out, Not(ContainsRegex("has no trace(.|\n)*has no trace")));
  // Nothing half-written.
  if (fs::exists(Path("trace"))) {
    EXPECT_TRUE(fs::is_empty(Path("trace")));
  }
}

TEST_F(TraceTest, OnADiskWithoutRoomForBothTheWeightsAreWritten) {
  // Mounting a disk of its own takes rights that not every test has.
  const std::string disk = Path("disk");
  const auto run_on = [&](const char* size, const std::string& command) {
    return Run("/usr/bin/env",
               {"unshare", "--mount", "--map-root-user", "sh", "-c",
                absl::StrCat("mount -t tmpfs -o size=", size, " none ", disk, " && ", command)});
  };
  fs::create_directory(disk);
  if (run_on("1m", "true").exit_status != 0) {
    GTEST_SKIP() << "needs the right to mount a tmpfs in a namespace of its own";
  }
  // The weights take 1.2 MB, the traces of 30 steps of two ranks more than 3 MB.
  const Arguments sizes = {"--width=64", "--vocab=2048", "--optimizer=muon",
                           absl::StrCat("--run_dir=", disk, "/run"),
                           absl::StrCat("--trace=", disk, "/trace")};
  for (const char* steps : {"--steps=30", "--steps=31"}) {
    Arguments arguments = sizes;
    arguments.insert(arguments.end(), {steps, "--trace_steps=1:30"});
    const Outcome outcome =
        run_on("2m", absl::StrCat("tools/train ", absl::StrJoin(TrainArguments(arguments), " "),
                                  "; status=$?; cd ", disk, "; find . -type f; exit $status"));
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    for (const char* file : {"./run/model.safetensors", "./run/summary.json"}) {
      EXPECT_THAT(outcome.out, HasSubstr(file)) << steps;
    }
    EXPECT_THAT(outcome.out, ContainsRegex("warning: rank [01] has no trace: .*; training goes"));
    EXPECT_THAT(outcome.out, Not(ContainsRegex("has no trace(.|\n)*has no trace")));
    EXPECT_THAT(outcome.out, Not(HasSubstr(".tmp.")));
    // One that is to be written while the weights are not yet is not even begun.
    if (absl::string_view(steps) == "--steps=31") {
      EXPECT_THAT(outcome.out, HasSubstr("the weights will take 1."));
      EXPECT_THAT(outcome.out, Not(HasSubstr("./trace/")));
    }
  }
}

TEST_F(TraceTest, ARunThatFailsLeavesTheTraceOfItsStepsAndOfTheOneThatFailed) {
  const Outcome outcome = Train({"--lr=1e30", "--clip=0", "--steps=9"});
  EXPECT_EQ(outcome.exit_status, 1);
  const std::vector<RankTrace> traces = Traces();
  ASSERT_THAT(traces, SizeIs(2));
  for (const RankTrace& trace : traces) {
    EXPECT_TRUE(trace.cut_short);
    ASSERT_THAT(trace.steps, SizeIs(1));
    bool second = false;
    for (const TraceOp& op : StreamOf(trace, "compute").ops) second = second || op.step == 2;
    EXPECT_TRUE(second);
  }
}

TEST_F(TraceTest, ASignalEndsTheRunWithATraceOfItsSteps) {
  RunningProgram train("tools/train", TrainArguments({"--steps=1000000"}), streams());
  while (Slurp(Path("run/metrics.jsonl")).empty() && !train.HasEnded()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  train.Send(SIGINT);
  EXPECT_EQ(train.Wait().exit_status, 130);
  const std::vector<RankTrace> traces = Traces();
  ASSERT_THAT(traces, SizeIs(2));
  EXPECT_FALSE(traces[0].steps.empty());
  EXPECT_EQ(traces[0].steps.size(), Steps().size());
  // All of it is there: no steps were asked for by number.
  for (const RankTrace& trace : traces) EXPECT_FALSE(trace.cut_short);
}

TEST_F(TraceTest, ASignalBeforeTheLastAskedStepCutsTheTraceShort) {
  RunningProgram train("tools/train",
                       TrainArguments({"--steps=1000000", "--trace_steps=1:1000000"}), streams());
  while (Slurp(Path("run/metrics.jsonl")).empty() && !train.HasEnded()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  train.Send(SIGTERM);
  EXPECT_EQ(train.Wait().exit_status, 130);
  const std::vector<RankTrace> traces = Traces();
  ASSERT_THAT(traces, SizeIs(2));
  for (const RankTrace& trace : traces) {
    EXPECT_FALSE(trace.steps.empty());
    EXPECT_TRUE(trace.cut_short);
  }
}

TEST_F(TraceTest, AFolderThatAnotherRunTracesIntoCostsOneWarningAndNoStep) {
  fs::create_directories(Path("first"));
  RunningProgram first("tools/train",
                       TrainArguments({"--steps=1000000", "--trace_steps=1:2",
                                       absl::StrCat("--run_dir=", Path("other"))}),
                       Path("first"));
  while (!fs::exists(Path("trace/rank0.json")) || !fs::exists(Path("trace/rank1.json"))) {
    ASSERT_FALSE(first.HasEnded()) << first.Wait().err;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::string trace = Slurp(Path("trace/rank0.json"));
  const Outcome outcome = Run("tools/train", TrainArguments({}));
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_THAT(Steps(), SizeIs(4));
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("warning: no trace: another run is writing to ",
                                                  Path("trace"), "; choose another --trace")));
  EXPECT_THAT(outcome.out, Not(ContainsRegex("warning:(.|\n)*warning:")));
  first.Send(SIGINT);
  EXPECT_EQ(first.Wait().exit_status, 130);
  EXPECT_EQ(Slurp(Path("trace/rank0.json")), trace);
  EXPECT_FALSE(fs::exists(Path("trace/previous-1")));
}

TEST_F(TraceTest, NamesOfFoldersDoNotControlTheTerminalAndTheAdviceCanBePasted) {
  const std::string folder = Path("tr'ace \x1b[31m\u202e");
  const Outcome outcome = TrainToTheEnd({absl::StrCat("--trace=", folder)});
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(outcome.out, Not(HasSubstr("\u202e")));
  const std::string before = "trace_report --html=FILE ";
  const size_t begin = outcome.out.find(before) + before.size();
  ASSERT_LT(begin, outcome.out.size());
  const std::string word = outcome.out.substr(begin, outcome.out.find(")\n", begin) - begin);
  if (fs::exists("/bin/bash")) {
    EXPECT_EQ(Run("/bin/bash", {"-c", absl::StrCat("printf %s ", word)}).out, folder);
  }
  EXPECT_THAT(word, HasSubstr("/tr\\'ace \\033[31m\\342\\200\\256'"));
}

TEST_F(TraceTest, AFolderWhereAFileOfTheRunBelongsCostsOneWarningAndNoStep) {
  const Outcome outcome = TrainToTheEnd({absl::StrCat("--trace=", Path("run/summary.json"))});
  EXPECT_THAT(Steps(), SizeIs(4));
  EXPECT_THAT(outcome.out, ContainsRegex("warning: no trace: .*summary[.]json"));
  EXPECT_TRUE(Json::accept(Slurp(Path("run/summary.json"))));
}

TEST_F(TraceTest, ASecondTraceKeepsTheFirst) {
  TrainToTheEnd({});
  const std::string first = Slurp(Path("trace/rank0.json"));
  const Outcome outcome = Run("tools/train", TrainArguments({}));
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(Slurp(Path("trace/previous-1/rank0.json")), first);
  EXPECT_NE(Slurp(Path("trace/rank0.json")), first);
  // In the run's folder it goes where the run's other files go.
  const std::string inside = absl::StrCat("--trace=", Path("run/trace"));
  TrainToTheEnd({inside});
  const std::string inner = Slurp(Path("run/trace/rank1.json"));
  EXPECT_EQ(Run("tools/train", TrainArguments({inside})).exit_status, 0);
  EXPECT_EQ(Slurp(Path("run/previous-1/trace/rank1.json")), inner);
}

TEST_F(TraceTest, ATraceStaysWithTheLossesOfItsRunWhereverInTheRunsFolderItIs) {
  for (const char* place : {"run", "run/of/one"}) {
    const std::string trace = absl::StrCat("--trace=", Path(place));
    TrainToTheEnd({trace});
    EXPECT_EQ(Run("tools/train", TrainArguments({trace, "--seed=1"})).exit_status, 0);
    const std::string old = absl::StrCat("run/previous-1", absl::string_view(place).substr(3));
    for (const std::string& dir : {std::string(place), old}) {
      const Outcome outcome = Run("tools/trace_report", {"--html=" + Path("page.html"), Path(dir)});
      EXPECT_EQ(outcome.exit_status, 0) << dir;
      EXPECT_EQ(outcome.err, "") << dir;
    }
  }
}

TEST_F(TraceTest, RefusesStepsThatAreNoRange) {
  for (const char* steps : {"3", "0:2", "3:2", "1:5", "a:b", "1:2:3", "-1:2", ":", "1:"}) {
    EXPECT_EQ(ErrorOf("tools/train", TrainArguments({absl::StrCat("--trace_steps=", steps)}), 2),
              absl::StrCat("train: --trace_steps=", steps,
                           " is no range of steps; give first:last within 1:4"));
  }
  EXPECT_EQ(ErrorOf("tools/train", TrainArguments({"--trace_steps=1:2", "--trace="}), 2),
            "train: --trace_steps needs --trace=DIR, the folder of the trace");
}

}  // namespace
}  // namespace dim0
