// train, prepare and generate as users run them: what they print, write and return, for good input
// and for bad.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/run_program.h"

namespace dim0 {
namespace {

using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

namespace fs = std::filesystem;

using Json = nlohmann::json;
using Arguments = std::vector<std::string>;

std::vector<std::string> Keys(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& item : object.items()) keys.push_back(item.key());
  return keys;
}

class ProgramsTest : public ProgramTest {
 protected:
  // What metrics.jsonl holds, a line an element.
  struct Metrics {
    std::vector<Json> steps;
    std::vector<Json> validations;

    // All that must be alike for two runs alike: not the times.
    std::vector<std::string> Values() const {
      std::vector<std::string> values;
      for (const Json& line : steps) {
        values.push_back(absl::StrCat(line.at("step").dump(), " ", line.at("loss").dump(), " ",
                                      line.at("grad_norm").dump(), " ", line.at("lr").dump()));
      }
      for (const Json& line : validations) values.push_back(line.dump());
      return values;
    }
  };

  void SetUp() override {
    ProgramTest::SetUp();
    std::string text;
    for (int i = 0; i < 200; ++i) absl::StrAppend(&text, "The square of ", i, " is ", i * i, ".\n");
    Write("text.txt", text);
  }

  // A model of 23,792 parameters that trains for 3 steps. Later arguments go before earlier ones.
  Arguments TrainArguments(const Arguments& more) const {
    Arguments arguments = {"--layers=1",
                           "--width=16",
                           "--heads=2",
                           "--vocab=256",
                           "--seq_len=16",
                           "--batch=2",
                           "--steps=3",
                           "--threads_per_rank=1",
                           absl::StrCat("--data=", Path("text.txt")),
                           absl::StrCat("--run_dir=", Path("run"))};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  Outcome Train(const Arguments& more) const { return Run("tools/train", TrainArguments(more)); }
  Outcome TrainToTheEnd(const Arguments& more) const {
    Outcome outcome = Train(more);
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return outcome;
  }
  std::string TrainError(const Arguments& more, int exit_status, std::string* out = nullptr) const {
    return ErrorOf("tools/train", TrainArguments(more), exit_status, out);
  }

  // Expects every line to be whole.
  Metrics ReadMetrics(absl::string_view run) const {
    Metrics metrics;
    const std::string text = Slurp(Path(absl::StrCat(run, "/metrics.jsonl")));
    EXPECT_TRUE(text.empty() || text.back() == '\n') << text;
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      Json json = Json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
      EXPECT_TRUE(json.is_object()) << line;
      if (!json.is_object()) continue;
      (json.contains("val_loss") ? metrics.validations : metrics.steps).push_back(std::move(json));
    }
    return metrics;
  }
  Json ReadSummary(absl::string_view run) const {
    const std::string text = Slurp(Path(absl::StrCat(run, "/summary.json")));
    Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(json.is_object()) << text;
    return json;
  }

  // Waits until a run has written so many lines of metrics.jsonl.
  void WaitForLines(RunningProgram& program, int lines) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (true) {
      const std::string text = Slurp(Path("run/metrics.jsonl"));
      if (std::count(text.begin(), text.end(), '\n') >= lines) return;
      ASSERT_FALSE(program.HasEnded()) << program.Wait().err;
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  Outcome Generate(const Arguments& more) const {
    Arguments arguments = {absl::StrCat("--run_dir=", Path("run"))};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Run("tools/generate", arguments);
  }
  std::string GenerateError(const std::string& run, int exit_status) const {
    return ErrorOf("tools/generate", {absl::StrCat("--run_dir=", run)}, exit_status);
  }
};

TEST_F(ProgramsTest, TrainRefusesAWrongFlagWithStatusTwo) {
  struct Case {
    Arguments arguments;
    const char* flag;
    const char* advice;
  };
  const std::vector<Case> cases = {
      {{"--optimizer=sgd"}, "--optimizer=sgd", "choose adamw, muon, rmnp or sign_momentum"},
      {{"--model=gpt3"}, "--model=gpt3", "choose gpt2, gpt2-medium, gpt2-large or gpt2-xl"},
      {{"--schedule=linear"}, "--schedule=linear", "choose constant or cosine"},
      {{"--stepss=3"}, "--stepss", "did you mean --steps?"},
      {{"--steps=many"}, "--steps=many", "expected a whole number"},
      {{"--ranks=0"}, "--ranks=0", "must be 1 or more"},
      {{"--batch=0"}, "--batch=0", "must be 1 or more"},
      {{"--heads=3"}, "--width=16 is not divisible by --heads=3", "change one of them"},
      {{"--seq_len=32", "--positions=16"}, "--seq_len=32", "--positions=16"},
      {{"--data="}, "--data is missing", "name a text file or a glob of .bin token files"},
      {{"--beta1=1"}, "--beta1=1", "must be in [0, 1)"},
      {{"--beta2=-0.1"}, "--beta2=-0.1", "must be in [0, 1)"},
      {{"--lr=nan"}, "--lr=nan", "must be 0 or more"},
      {{"--clip=-1"}, "--clip=-1", "must be 0 or more, or inf"},
      {{"--clip=nan"}, "--clip=nan", "must be 0 or more, or inf"},
      {{"--diagnostics_every=-1"}, "--diagnostics_every=-1", "must be 0 or more"},
      {{"--weight_decay=inf"}, "--weight_decay=inf", "must be 0 or more"},
      {{"--muon_schedule=ring"}, "--muon_schedule=ring", "choose owner, redundant or broadcast"},
      {{"--param_dtype=half"}, "--param_dtype=half", "choose auto, float32 or bfloat16"},
      {{"--reduce_dtype=int32"}, "--reduce_dtype=int32", "choose auto, float32 or bfloat16"},
      {{"--master_dtype=auto"}, "--master_dtype=auto", "choose float32 or bfloat16"},
      {{"--param_dtype=float32", "--master_dtype=bfloat16"},
       "--param_dtype=float32 with --master_dtype=bfloat16",
       "choose --param_dtype=bfloat16 too, or --master_dtype=float32"},
      {{"--muon_wire=int8"}, "--muon_wire=int8", "choose bfloat16 or float32"},
      {{"--muon_scale=big"}, "--muon_scale=big", "choose spectral, match_rms or unit"},
      {{"--muon_split=on"}, "--muon_split=on", "choose off, qkv or heads"},
      {{"--ns_coefficients=x"}, "--ns_coefficients=x", "choose jordan, polar_express or you"},
      {{"--ns_algorithm=x"}, "--ns_algorithm=x", "choose auto, standard, symmetric, gram or"},
      {{"--matrix_params=all"}, "--matrix_params=all", "choose hidden or all2d"},
      {{"--rmnp_power=1"}, "--rmnp_power=1", "must be in [0, 1)"},
      {{"--rmnp_power=-0.1"}, "--rmnp_power=-0.1", "must be in [0, 1)"},
      {{"--rmnp_eps=-1"}, "--rmnp_eps=-1", "must be 0 or more"},
      {{"--momentum=1"}, "--momentum=1", "must be in [0, 1)"},
      {{"--link=fast"}, "--link: 'fast' is no link", "one of pcie4, pcie5"},
      {{"--link=0,1"}, "--link: '0,1'", "GB/s and microseconds"},
      // What no machine holds or starts.
      {{"--layers=1000000000"}, "--layers=1000000000", "it must be from 1 to 10000"},
      {{"--width=1000000000"}, "--width=1000000000", "it must be from 1 to 1000000"},
      {{"--grad_accum=9223372036854775807"}, "--grad_accum=9223372036854775807", "or less"},
      {{"--threads_per_rank=100000"}, "--threads_per_rank=100000", "must be 1024 or less"},
      {{"--ranks=64", "--threads_per_rank=64"}, "--ranks=64", "at most 1024 together"}};
  for (const Case& wrong : cases) {
    const std::string error = TrainError(wrong.arguments, 2);
    EXPECT_THAT(error, StartsWith("train: "));
    EXPECT_THAT(error, HasSubstr(wrong.flag));
    EXPECT_THAT(error, HasSubstr(wrong.advice));
  }
}

TEST_F(ProgramsTest, TrainRefusesDataThatItCannotRead) {
  const auto error_of = [&](const std::string& name) {
    return TrainError({absl::StrCat("--data=", Path(name))}, 1);
  };
  EXPECT_EQ(error_of("none.txt"), absl::StrCat("train: --data: cannot open ", Path("none.txt"),
                                               ": No such file or directory"));
  Write("empty.txt", "");
  EXPECT_EQ(error_of("empty.txt"),
            absl::StrCat("train: --data: ", Path("empty.txt"), ": the file is empty"));
  fs::create_directory(Path("folder"));
  EXPECT_EQ(error_of("folder"),
            absl::StrCat("train: --data: cannot read ", Path("folder"), ": it is a directory"));
  EXPECT_EQ(error_of("*.bin"), absl::StrCat("train: --data: no file matches ", Path("*.bin")));

  // One batch is 2 sequences of 16 tokens and the last one's target.
  Write("short.txt", std::string(32, 'a'));
  const std::string error =
      TrainError({absl::StrCat("--data=", Path("short.txt")), "--val_fraction=0"}, 1);
  EXPECT_THAT(error, HasSubstr(Path("short.txt: 32 tokens are too few")));
  EXPECT_THAT(error, HasSubstr("need 33; lower --batch, --grad_accum or --seq_len"));
}

TEST_F(ProgramsTest, TrainNamesFileAndOffsetOfABadToken) {
  Write("letters.txt", absl::StrCat("AAAAAz", std::string(400, 'A')));
  ASSERT_EQ(Run("tools/prepare", {absl::StrCat("--input=", Path("letters.txt")),
                                  absl::StrCat("--output_dir=", folder()), "--name=letters"})
                .exit_status,
            0);
  const std::string path = Path("letters_000000.bin");
  const std::string data = absl::StrCat("--data=", path);
  // 'z' is 122; it is the token at index 5, of 2 bytes each after a header of 1024.
  EXPECT_EQ(
      TrainError({data, "--vocab=100"}, 1),
      absl::StrCat("train: --data: ", path,
                   ": token 5 at byte 1034 is 122, beyond the vocabulary of 100; raise --vocab to "
                   "at least 123 or give the data that this vocabulary belongs to"));

  const std::string whole = Slurp(path);
  Write("letters_000000.bin", whole.substr(0, whole.size() - 1));
  EXPECT_EQ(TrainError({data}, 1),
            absl::StrCat("train: --data: ", path, ": the file is truncated at byte ",
                         whole.size() - 1, "; 406 uint16 tokens need ", whole.size(), " bytes"));
  Write("letters_000000.bin", absl::StrCat("text", whole.substr(4)));
  EXPECT_THAT(TrainError({data}, 1),
              StartsWith(absl::StrCat("train: --data: ", path, ": magic at byte 0 is ")));
}

TEST_F(ProgramsTest, TrainRefusesARunFolderThatCannotBeMade) {
  for (const char* name : {"text.txt", "text.txt/run"}) {
    std::string out;
    EXPECT_EQ(TrainError({absl::StrCat("--run_dir=", Path(name))}, 1, &out),
              absl::StrCat("train: cannot make the folder ", Path(name),
                           ": Not a directory; choose another --run_dir"));
    EXPECT_THAT(out, Not(HasSubstr("step 1")));
  }
}

TEST_F(ProgramsTest, TrainRefusesAModelThatDoesNotFitInMemory) {
  Write("long.txt", std::string(9'000'000, 'a'));
  const std::string data = absl::StrCat("--data=", Path("long.txt"));
  // Terabytes of activations, but few gigabytes with one sequence.
  std::string out;
  std::string error =
      TrainError({data, "--ranks=2", "--layers=12", "--width=768", "--heads=12",
                  "--threads_per_rank=1", "--batch=4096", "--seq_len=1024", "--val_fraction=0"},
                 1, &out);
  EXPECT_THAT(error, ContainsRegex("^train: the run needs [0-9.]+ GiB in all and [0-9.]+ GiB are "
                                   "available; it would fit with .*--batch=1$"));
  EXPECT_THAT(out, HasSubstr("predicted memory of the fullest rank:\n"));
  for (const char* purpose : {"parameters", "gradients", "optimizer", "gathered", "activations",
                              "communication", "in all", "2 ranks"}) {
    EXPECT_THAT(out, ContainsRegex(absl::StrCat("  ", purpose, " +[0-9.]+ MiB\n")));
  }
  EXPECT_THAT(out, Not(HasSubstr("step 1")));

  error = TrainError({data, "--layers=48", "--width=1000000", "--heads=1"}, 1, &out);
  EXPECT_THAT(error, EndsWith("; choose a smaller model (--layers, --width, --vocab)"));
}

TEST_F(ProgramsTest, TrainEndsAtALossThatIsNoNumber) {
  for (const char* ranks : {"--ranks=1", "--ranks=2"}) {
    const Outcome outcome = Train({ranks, "--lr=1e30", "--clip=0"});
    EXPECT_EQ(outcome.exit_status, 1);
    EXPECT_THAT(outcome.err, ContainsRegex("^train: step 2: the loss of rank [01] is -?(nan|inf); "
                                           "lower --lr or --matrix_lr, or set --clip\n$"));
    EXPECT_THAT(ReadMetrics("run").steps, SizeIs(1));
    EXPECT_THAT(Names(), ElementsAre("run", "run/metrics.jsonl", "text.txt"));
    fs::remove_all(Path("run"));
  }
  Outcome outcome = Train({"--lr=1e30", "--clip=1"});
  EXPECT_THAT(outcome.err, EndsWith("; lower --lr, --matrix_lr or --clip\n"));
  fs::remove_all(Path("run"));
  // The last step's update, which no further step's loss shows.
  outcome = Train({"--steps=1", "--lr=1e30", "--clip=0"});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, ContainsRegex("^train: step 1: the validation loss is -?(nan|inf); "
                                         "lower --lr or --matrix_lr, or set --clip\n$"));
  EXPECT_THAT(Names(), ElementsAre("run", "run/metrics.jsonl", "text.txt"));
}

TEST_F(ProgramsTest, TrainWarnsOfMoreThreadsThanCoresAndTrains) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const Outcome outcome = TrainToTheEnd({absl::StrCat("--threads_per_rank=", cores + 1)});
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("warning: 1 ranks x ", cores + 1,
                                                  " threads share ", cores, " cores")));
  EXPECT_THAT(ReadMetrics("run").steps, SizeIs(3));
}

TEST_F(ProgramsTest, TrainWritesTheMetricsAndTheSummaryOfARun) {
  const Outcome outcome =
      TrainToTheEnd({"--ranks=2", "--optimizer=muon", "--val_every=2", "--lr=0.01",
                     "--matrix_lr=0.04", "--warmup_steps=2", "--schedule=cosine", "--steps=4"});
  EXPECT_THAT(Names(), ElementsAre("run", "run/config.json", "run/metrics.jsonl",
                                   "run/model.safetensors", "run/summary.json", "text.txt"));

  const Metrics metrics = ReadMetrics("run");
  ASSERT_THAT(metrics.steps, SizeIs(4));
  for (size_t i = 0; i < metrics.steps.size(); ++i) {
    const Json& line = metrics.steps[i];
    EXPECT_THAT(Keys(line), UnorderedElementsAre("step", "loss", "grad_norm", "lr", "matrix_lr",
                                                 "step_ms", "tokens_per_s", "flops_fraction"));
    EXPECT_EQ(line.at("step"), i + 1);
    // ln 256 = 5.545 for weights that know nothing yet.
    EXPECT_NEAR(line.at("loss").get<double>(), 5.545, 0.5);
    for (const auto& item : line.items()) EXPECT_GT(item.value().get<double>(), 0) << item.key();
    EXPECT_NEAR(line.at("tokens_per_s").get<double>() * line.at("step_ms").get<double>(),
                2 * 2 * 16 * 1000, 1);
  }
  EXPECT_DOUBLE_EQ(metrics.steps[0].at("lr"), 0.005);
  EXPECT_DOUBLE_EQ(metrics.steps[1].at("lr"), 0.01);
  EXPECT_DOUBLE_EQ(metrics.steps[0].at("matrix_lr"), 0.02);
  ASSERT_THAT(metrics.validations, SizeIs(2));
  for (size_t i = 0; i < metrics.validations.size(); ++i) {
    EXPECT_THAT(Keys(metrics.validations[i]), UnorderedElementsAre("step", "val_loss"));
    EXPECT_EQ(metrics.validations[i].at("step"), 2 * (i + 1));
  }

  const Json summary = ReadSummary("run");
  EXPECT_EQ(summary.at("world_size"), 2);
  // vocabulary C + positions C + layers (12 C^2 + 13 C) + 2 C
  EXPECT_EQ(summary.at("parameters"), 256 * 16 + 1024 * 16 + (12 * 16 * 16 + 13 * 16) + 2 * 16);
  EXPECT_EQ(summary.at("steps"), 4);
  EXPECT_EQ(summary.at("final_loss"), metrics.steps.back().at("loss"));
  EXPECT_EQ(summary.at("val_loss"), metrics.validations.back().at("val_loss"));
  for (const char* key : {"tokens_per_s", "matmul_gflops", "flops_fraction"}) {
    EXPECT_GT(summary.at(key).get<double>(), 0) << key;
  }
  // Four hidden matrices, each orthogonalized by its owner alone.
  EXPECT_EQ(summary.at("ns_calls_per_step"), 4);
  EXPECT_THAT(Keys(summary.at("bytes_per_step")),
              UnorderedElementsAre("parameter", "gradient", "optimizer"));
  for (const auto& item : summary.at("bytes_per_step").items()) {
    EXPECT_GT(item.value().get<int64_t>(), 0) << item.key();
  }
  int64_t peak = 0;
  for (const auto& item : summary.at("peak_memory_bytes").items()) {
    peak += item.value().get<int64_t>();
  }
  // At least half of the parameters, their gradients and a moment of each.
  EXPECT_GT(peak, 23792 / 2 * 4 * 3);

  // The terminal says the same.
  EXPECT_THAT(outcome.out, ContainsRegex("step 4/4  loss [0-9]\\.[0-9]{7} "));
  EXPECT_THAT(outcome.out, ContainsRegex("validation loss [0-9]\\.[0-9]{4}"));
  EXPECT_THAT(outcome.out, EndsWith(absl::StrCat("run folder: ", Path("run"), "\n")));
}

TEST_F(ProgramsTest, TrainTellsHowEvenlyNewtonSchulzWasShared) {
  // Q, K and V apart: 3 + 3 matrices, once a step however many micro-batches it has.
  const Outcome outcome = TrainToTheEnd({"--ranks=2", "--grad_accum=2", "--optimizer=muon",
                                         "--muon_split=qkv", "--ns_algorithm=standard"});
  EXPECT_THAT(outcome.out, ContainsRegex("Newton-Schulz: 6 runs a step at [0-9.]+ of SGEMM; the "
                                         "busiest rank has [0-9.]+ of the mean work as predicted, "
                                         "[0-9.]+ as measured\n"));
  const Json summary = Json::parse(Slurp(Path("run/summary.json")));
  EXPECT_EQ(summary.at("ns_calls_per_step"), 6);
  // 24,576 FLOPs x 5 for each of four [16, 16], 73,728 x 5 for each of two [64, 16]: in fours of a
  // rank's, (73728 + 2 x 24576) each.
  EXPECT_DOUBLE_EQ(summary.at("newton_schulz").at("imbalance_predicted").get<double>(), 1);
  EXPECT_GE(summary.at("newton_schulz").at("imbalance_measured").get<double>(), 1);
}

TEST_F(ProgramsTest, TrainsInTheTypesThatItIsTold) {
  const Outcome outcome = TrainToTheEnd({"--ranks=2", "--param_dtype=bfloat16",
                                         "--reduce_dtype=bfloat16", "--master_dtype=bfloat16"});
  EXPECT_THAT(outcome.out, HasSubstr("shards bfloat16, gathered as bfloat16, reduced as bfloat16"));
}

TEST_F(ProgramsTest, TrainWarnsOfOptionsOfAnotherOptimizer) {
  const Outcome outcome = TrainToTheEnd({"--optimizer=rmnp", "--muon_split=qkv", "--momentum=0.9"});
  EXPECT_THAT(outcome.out,
              HasSubstr("warning: --muon_split has no effect with --optimizer=rmnp; it "
                        "is muon's\n"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("--momentum")));
}

TEST_F(ProgramsTest, ALinkSlowsStepsAndChangesNothingElse) {
  TrainToTheEnd({"--ranks=2"});
  const std::vector<std::string> without = ReadMetrics("run").Values();
  fs::remove_all(Path("run"));
  // Half of 95 KB of parameters and as many of gradients at a megabyte a second.
  TrainToTheEnd({"--ranks=2", "--link=0.001,100"});
  const Metrics metrics = ReadMetrics("run");
  EXPECT_EQ(metrics.Values(), without);
  for (const Json& step : metrics.steps) EXPECT_GT(step.at("step_ms").get<double>(), 90);
}

TEST_F(ProgramsTest, EveryOptimizerOptionTrains) {
  for (const Arguments& options :
       std::vector<Arguments>{{"--optimizer=rmnp", "--rmnp_power=0.125", "--nesterov=false"},
                              {"--optimizer=rmnp", "--matrix_params=all2d", "--rmnp_eps=1e-6"},
                              {"--optimizer=muon", "--muon_schedule=redundant", "--clip=0"},
                              {"--optimizer=muon", "--muon_schedule=broadcast",
                               "--muon_wire=float32", "--matrix_params=all2d"},
                              {"--optimizer=muon", "--muon_split=heads", "--muon_scale=unit",
                               "--ns_coefficients=polar_express", "--ns_algorithm=gram_accurate"},
                              {"--optimizer=muon", "--ns_coefficients=you", "--momentum=0"}}) {
    SCOPED_TRACE(absl::StrJoin(options, " "));
    Arguments arguments = {"--ranks=3"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    TrainToTheEnd(arguments);
    EXPECT_THAT(ReadMetrics("run").steps, SizeIs(3));
    fs::remove_all(Path("run"));
  }
}

TEST_F(ProgramsTest, TrainWritesDiagnosticsAtTheAskedSteps) {
  const Outcome outcome = TrainToTheEnd({"--steps=5", "--ranks=2", "--optimizer=sign_momentum",
                                         "--clip=inf", "--diagnostics_every=2", "--log_every=5"});
  EXPECT_THAT(outcome.out, ContainsRegex("  diagnostics +[0-9.]+ MiB"));
  EXPECT_THAT(outcome.out, ContainsRegex("step 4/5  r_avg [0-9.]+ +r_min [0-9.]+ +r_max [0-9.]+"));
  std::vector<int> steps;
  for (const absl::string_view line : absl::StrSplit(Slurp(Path("run/metrics.jsonl")), '\n')) {
    if (!absl::StrContains(line, "diagnostics")) continue;
    const Json json = Json::parse(line.begin(), line.end());
    steps.push_back(json.at("step"));
    const Json& diagnostics = json.at("diagnostics");
    EXPECT_THAT(Keys(diagnostics), UnorderedElementsAre("r_avg", "r_min", "r_max", "rows",
                                                        "clip_rate", "update_rms", "matrices"));
    EXPECT_EQ(diagnostics.at("clip_rate"), 0);
    EXPECT_THAT(Keys(diagnostics.at("update_rms")),
                UnorderedElementsAre("matrices", "embeddings", "vectors"));
    EXPECT_THAT(Keys(diagnostics.at("matrices")),
                UnorderedElementsAre("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight",
                                     "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"));
    // Every element of a matrix moved by the learning rate, but those without a gradient.
    EXPECT_LE(diagnostics.at("update_rms").at("matrices").get<double>(), 3.01e-4);
    EXPECT_GT(diagnostics.at("update_rms").at("matrices").get<double>(), 2e-4);
  }
  EXPECT_THAT(steps, ElementsAre(2, 4));
}

TEST_F(ProgramsTest, RunsAlikeGiveTheSameLossesToTheLastDigit) {
  TrainToTheEnd({});
  TrainToTheEnd({absl::StrCat("--run_dir=", Path("same"))});
  TrainToTheEnd({absl::StrCat("--run_dir=", Path("other")), "--seed=1"});
  const std::vector<std::string> values = ReadMetrics("run").Values();
  EXPECT_THAT(values, SizeIs(4));
  EXPECT_EQ(ReadMetrics("same").Values(), values);
  EXPECT_NE(ReadMetrics("other").Values(), values);
  EXPECT_EQ(Slurp(Path("same/model.safetensors")), Slurp(Path("run/model.safetensors")));
  // More digits than float32 has.
  EXPECT_THAT(Slurp(Path("run/metrics.jsonl")), ContainsRegex("\"loss\":[0-9]\\.[0-9]{9}"));
}

TEST_F(ProgramsTest, ASecondRunKeepsTheFirstOnesFiles) {
  TrainToTheEnd({});
  const std::vector<std::string> files = {"config.json", "metrics.jsonl", "model.safetensors",
                                          "summary.json"};
  std::vector<std::string> first;
  for (const std::string& file : files) first.push_back(Slurp(Path("run/" + file)));
  EXPECT_THAT(first, Each(SizeIs(Ge(1))));

  const Outcome outcome = TrainToTheEnd({"--steps=2", "--seed=1"});
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("an earlier run's files were moved to ",
                                                  Path("run/previous-1"), "\n")));
  for (size_t i = 0; i < files.size(); ++i) {
    EXPECT_EQ(Slurp(Path("run/previous-1/" + files[i])), first[i]) << files[i];
  }
  EXPECT_THAT(ReadMetrics("run").steps, SizeIs(2));
  EXPECT_EQ(ReadSummary("run").at("steps"), 2);
}

TEST_F(ProgramsTest, AFlagThatIsNotUtf8StandsInTheSummaryAsFarAsItCan) {
  TrainToTheEnd({absl::StrCat("--run_dir=", Path("r\xffun"))});
  EXPECT_EQ(ReadSummary("r\xffun").at("flags").at("run_dir"), Path("r\uFFFDun"));
  EXPECT_THAT(ReadMetrics("r\xffun").steps, SizeIs(3));
}

TEST_F(ProgramsTest, ASignalEndsTheRunAfterTheStepInProgress) {
  for (const int signal : {SIGINT, SIGTERM}) {
    RunningProgram train("tools/train", TrainArguments({"--ranks=2", "--steps=1000000"}),
                         streams());
    ASSERT_NO_FATAL_FAILURE(WaitForLines(train, 3));
    train.Send(signal);
    const Outcome outcome = train.Wait();
    EXPECT_EQ(outcome.signal, 0);
    EXPECT_EQ(outcome.exit_status, 130);
    EXPECT_EQ(outcome.err, "");

    const Metrics metrics = ReadMetrics("run");
    const int64_t steps = static_cast<int64_t>(metrics.steps.size());
    EXPECT_GE(steps, 3);
    EXPECT_LT(steps, 1000000);
    const Json summary = ReadSummary("run");
    EXPECT_EQ(summary.at("steps"), steps);
    EXPECT_EQ(summary.at("final_loss"), metrics.steps.back().at("loss"));
    EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("stopped by a signal after step ", steps)));
    EXPECT_THAT(Names(), ElementsAre("run", "run/config.json", "run/metrics.jsonl",
                                     "run/model.safetensors", "run/summary.json", "text.txt"));
    EXPECT_THAT(Generate({"--prompt=The", "--tokens=5"}).out, SizeIs(3 + 5 + 1));
    fs::remove_all(Path("run"));
  }
}

TEST_F(ProgramsTest, ASecondSignalEndsTheRunAtOnce) {
  // After step 2 comes a validation of a minute, for which a first signal has to wait.
  Write("long.txt", std::string(8'000'000, 'a'));
  RunningProgram train(
      "tools/train",
      TrainArguments({absl::StrCat("--data=", Path("long.txt")), "--seq_len=128", "--width=64",
                      "--val_every=2", "--val_fraction=0.99", "--val_sequences=1000000"}),
      streams());
  ASSERT_NO_FATAL_FAILURE(WaitForLines(train, 2));
  train.Send(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(train.HasEnded());
  train.Send(SIGINT);
  EXPECT_EQ(train.Wait().signal, SIGINT);
  EXPECT_THAT(ReadMetrics("run").steps, SizeIs(2));
  EXPECT_THAT(Names(), ElementsAre("long.txt", "run", "run/metrics.jsonl", "text.txt"));
}

TEST_F(ProgramsTest, ARunFolderInUseIsRefusedAndItsRunUndisturbed) {
  fs::create_directories(Path("streams"));
  RunningProgram first("tools/train", TrainArguments({"--steps=1000000"}), Path("streams"));
  ASSERT_NO_FATAL_FAILURE(WaitForLines(first, 1));
  const Outcome second = Train({});
  EXPECT_EQ(second.exit_status, 1);
  EXPECT_THAT(second.err, HasSubstr(absl::StrCat("another run is writing to ", Path("run"))));
  first.Send(SIGINT);
  EXPECT_EQ(first.Wait().exit_status, 130);
  EXPECT_FALSE(fs::exists(Path("run/previous-1")));
}

TEST_F(ProgramsTest, DataCutShortDuringTheRunEndsItWithOneLine) {
  RunningProgram train("tools/train", TrainArguments({"--steps=1000000"}), streams());
  ASSERT_NO_FATAL_FAILURE(WaitForLines(train, 1));
  fs::resize_file(Path("text.txt"), 0);
  const Outcome outcome = train.Wait();
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, StartsWith("train: a file was cut short"));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1);
}

TEST_F(ProgramsTest, AClosedStandardOutputDoesNotLeakIntoTheRunsFiles) {
  const std::string train = absl::StrJoin(TrainArguments({}), " ");
  const Outcome outcome =
      Run("/bin/sh", {"-c", absl::StrCat("exec tools/train ", train, " >&- 2>&-")});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_THAT(ReadMetrics("run").steps, SizeIs(3));
}

TEST_F(ProgramsTest, TrainRefusesToStartWhereItsWeightsWouldNotFit) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer maps files of its own, which are longer than the limit allows";
#endif
  // 50 KiB at most for a file; the weights take 93.
  const std::string train = absl::StrJoin(TrainArguments({}), " ");
  const Outcome outcome =
      Run("/bin/sh", {"-c", absl::StrCat("ulimit -f 100 && exec tools/train ", train)});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_EQ(outcome.err,
            "train: files may be 50.00 KiB long and the weights take 92.94 KiB; raise the limit "
            "(ulimit -f)\n");
  EXPECT_THAT(outcome.out, Not(HasSubstr("step 1")));
  EXPECT_THAT(Names(), ElementsAre("run", "text.txt"));
}

TEST_F(ProgramsTest, TrainEndsWithOneLineWhereTheSystemGivesItNoThreads) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space than the limit gives";
#endif
  const std::string train = absl::StrJoin(TrainArguments({}), " ");
  const Outcome outcome = Run(
      "/bin/sh",
      {"-c", absl::StrCat("ulimit -v 140000 && OPENBLAS_NUM_THREADS=2 exec tools/train ", train)});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err,
              HasSubstr("train: the limit on address space (ulimit -v) is 136.72 MiB"));
}

TEST_F(ProgramsTest, GenerateFailsWhenItsTextIsLost) {
  TrainToTheEnd({});
  const Outcome outcome =
      Run("/bin/sh",
          {"-c", absl::StrCat("exec tools/generate --run_dir=", Path("run"), " >/dev/full")});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("standard output did not take all of the text"));
}

TEST_F(ProgramsTest, TokenFilesTrainLikeTheTextTheyWereMadeOf) {
  ASSERT_EQ(
      Run("tools/prepare", {absl::StrCat("--input=", Path("text.txt")),
                            absl::StrCat("--output_dir=", Path("shards")), "--shard_tokens=1000"})
          .exit_status,
      0);
  EXPECT_THAT(Names(), ElementsAre("shards", "shards/text_000000.bin", "shards/text_000001.bin",
                                   "shards/text_000002.bin", "shards/text_000003.bin",
                                   "shards/text_000004.bin", "shards/text_000005.bin", "text.txt"));
  const std::string shards = absl::StrCat("--data=", Path("shards/*.bin"));
  for (const char* ranks : {"1", "2"}) {
    // Steps enough to cross the shards' ends.
    const Arguments flags = {absl::StrCat("--ranks=", ranks), "--steps=20"};
    const auto into = [&](Arguments arguments, const std::string& run) {
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      arguments.push_back(absl::StrCat("--run_dir=", Path(run)));
      TrainToTheEnd(arguments);
      return ReadMetrics(run).Values();
    };
    const std::vector<std::string> text = into({}, absl::StrCat("text", ranks));
    EXPECT_THAT(text, SizeIs(20 + 1));
    EXPECT_EQ(into({shards}, absl::StrCat("shards", ranks)), text);
  }
}

TEST_F(ProgramsTest, GenerateContinuesThePromptAsTheRunLearnt) {
  // A period that does not divide the sequences' length: letters follow letters, not positions.
  std::string text;
  for (int i = 0; i < 400; ++i) text += "abcde";
  Write("abcde.txt", text);
  TrainToTheEnd({absl::StrCat("--data=", Path("abcde.txt")), "--ranks=2", "--steps=80", "--lr=0.02",
                 "--log_every=80"});
  const Outcome outcome = Generate({"--prompt=deab", "--tokens=12", "--temperature=0"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "deabcdeabcdeabcd\n");
  EXPECT_EQ(outcome.err, "");
}

TEST_F(ProgramsTest, GenerateDrawsTheAskedNumberOfBytesFromItsSeed) {
  TrainToTheEnd({"--steps=1"});
  const auto text = [&](const char* seed, const char* temperature) {
    return Generate({"--prompt=The", "--tokens=40", absl::StrCat("--seed=", seed),
                     absl::StrCat("--temperature=", temperature)})
        .out;
  };
  const std::string drawn = text("1", "1");
  EXPECT_THAT(drawn, StartsWith("The"));
  EXPECT_THAT(drawn, EndsWith("\n"));
  EXPECT_THAT(drawn, SizeIs(3 + 40 + 1));
  EXPECT_EQ(text("1", "1"), drawn);
  EXPECT_NE(text("2", "1"), drawn);
  EXPECT_EQ(text("1", "0"), text("2", "0"));
  EXPECT_THAT(text("1", "0"), SizeIs(3 + 40 + 1));
  EXPECT_EQ(Generate({"--prompt=The", "--tokens=0"}).out, "The\n");
}

TEST_F(ProgramsTest, GenerateRefusesWrongFlagsWithStatusTwo) {
  EXPECT_EQ(GenerateError("", 2),
            "generate: --run_dir is missing; name the folder of a finished run");
  const std::string run = absl::StrCat("--run_dir=", Path("run"));
  EXPECT_THAT(ErrorOf("tools/generate", {run, "--prompt="}, 2), HasSubstr("--prompt is empty"));
  EXPECT_THAT(ErrorOf("tools/generate", {run, "--tokens=-1"}, 2), HasSubstr("--tokens"));
  EXPECT_THAT(ErrorOf("tools/generate", {run, "--length=9"}, 2), HasSubstr("unknown flag"));
}

TEST_F(ProgramsTest, GenerateRefusesAFolderWithoutAWholeModel) {
  EXPECT_EQ(
      GenerateError(Path("none"), 1),
      absl::StrCat("generate: --run_dir: cannot open ", Path("none/config.json"),
                   ": No such file or directory; a run's weights are there when it has ended"));
  TrainToTheEnd({"--steps=1"});
  const std::string config = Slurp(Path("run/config.json"));
  const std::string weights = Slurp(Path("run/model.safetensors"));
  const auto replaced = [&](const std::string& from, const std::string& to) {
    EXPECT_TRUE(absl::StrContains(config, from));
    return absl::StrReplaceAll(config, {{from, to}});
  };

  Write("run/config.json", replaced("\"n_layer\": 1", "\"n_layer\": 2"));
  EXPECT_THAT(GenerateError(Path("run"), 1), HasSubstr("has no tensor h.1."));
  Write("run/config.json", replaced("\"n_embd\": 16", "\"n_embd\": 32"));
  EXPECT_THAT(GenerateError(Path("run"), 1),
              HasSubstr("tensor wte.weight is [256, 16]; config.json asks for [256, 32]"));
  Write("run/config.json", replaced("\"n_head\": 2", "\"n_head\": 3"));
  EXPECT_THAT(GenerateError(Path("run"), 1),
              HasSubstr("config.json says n_embd=16 is not divisible by n_head=3"));
  Write("run/config.json", "{");
  EXPECT_THAT(GenerateError(Path("run"), 1), HasSubstr("config.json is not a JSON object"));

  Write("run/config.json", config);
  for (const size_t size : {size_t{3}, size_t{100}, weights.size() - 1}) {
    Write("run/model.safetensors", weights.substr(0, size));
    const std::string error = GenerateError(Path("run"), 1);
    EXPECT_THAT(error, HasSubstr(Path("run/model.safetensors")));
    EXPECT_THAT(error, HasSubstr("truncated"));
  }
  fs::remove(Path("run/model.safetensors"));
  EXPECT_THAT(GenerateError(Path("run"), 1),
              HasSubstr(absl::StrCat("cannot open ", Path("run/model.safetensors"))));
}

TEST_F(ProgramsTest, HelpListsEveryFlag) {
  const Outcome train = Run("tools/train", {"--help"});
  EXPECT_EQ(train.exit_status, 0);
  EXPECT_EQ(train.err, "");
  for (const char* flag :
       {"model",     "layers",       "width",   "heads",      "vocab",
        "seq_len",   "batch",        "steps",   "grad_accum", "threads_per_rank",
        "ranks",     "optimizer",    "lr",      "matrix_lr",  "weight_decay",
        "schedule",  "warmup_steps", "clip",    "seed",       "reshard_after_forward",
        "val_every", "data",         "run_dir", "prefetch",   "recompute"}) {
    EXPECT_THAT(train.out, HasSubstr(absl::StrCat("\n  --", flag, "="))) << flag;
  }
  const Outcome generate = Run("tools/generate", {"--help"});
  EXPECT_EQ(generate.exit_status, 0);
  for (const char* flag : {"run_dir", "prompt", "tokens", "temperature", "seed"}) {
    EXPECT_THAT(generate.out, HasSubstr(absl::StrCat("\n  --", flag, "="))) << flag;
  }
}

}  // namespace
}  // namespace dim0
