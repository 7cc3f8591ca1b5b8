// Training end to end: the same run at different world sizes, with every engine option, and twice;
// and the figures that a run reports, against formulas.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "model/gpt2.h"
#include "nlohmann/json.hpp"
#include "runtime/dataset.h"
#include "runtime/safetensors.h"
#include "runtime/trainer.h"
#include "spdlog/spdlog.h"
#include "tests/training_run.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr DType kBF16 = DType::kBFloat16;

// What travels is bfloat16.
constexpr EngineOptions kShortWires = {.clip = 1.0, .param_dtype = kBF16, .reduce_dtype = kBF16};
// So is all that is stored of parameters and gradients.
constexpr EngineOptions kShortShards = {
    .clip = 1.0, .master_dtype = kBF16, .param_dtype = kBF16, .reduce_dtype = kBF16};

const std::map<std::string, double> kTolerance = {
    {"adamw", 1e-5}, {"rmnp", 1e-4}, {"muon", 1e-3}, {"sign_momentum", 1e-3}};

class Parity : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Optimizers, Parity,
                         testing::Values("adamw", "rmnp", "muon", "sign_momentum"),
                         [](const auto& info) { return info.param; });

TEST_P(Parity, LossesAreTheSameAt1To4RanksAndMore) {
  const RunResult one = TrainOnce({.optimizer = GetParam()});
  ASSERT_EQ(one.losses.size(), 20u);
  EXPECT_LT(one.losses.back(), one.losses.front());
  for (const int ranks : {2, 3, 4, 12}) {
    const RunResult many =
        TrainOnce({.optimizer = GetParam(), .ranks = ranks, .batch = 12 / ranks});
    EXPECT_LT(LargestRelativeDifference(many.losses, one.losses), kTolerance.at(GetParam()))
        << ranks;
    EXPECT_LT(LargestRelativeDifference(many.val_losses, one.val_losses),
              kTolerance.at(GetParam()));
  }
}

TEST_P(Parity, TwoRunsAlikeAreBitIdentical) {
  for (const int threads : {1, 2}) {
    const Variant variant = {
        .optimizer = GetParam(), .ranks = 3, .threads = threads, .batch = 4, .val_every = 6};
    const RunResult first = TrainOnce(variant), second = TrainOnce(variant);
    EXPECT_EQ(first.losses, second.losses);
    EXPECT_EQ(first.norms, second.norms);
    EXPECT_EQ(first.val_losses, second.val_losses);
    EXPECT_EQ(first.weights, second.weights);
    EXPECT_EQ(first.val_losses.size(), 4u);  // after 6, 12, 18 and 20
  }
}

TEST_P(Parity, InBFloat16LossesAtManyRanksAreNearThoseAt1AndOfFloat32) {
  const RunResult exact = TrainOnce({.optimizer = GetParam()});
  for (const EngineOptions& engine : {kShortWires, kShortShards}) {
    const RunResult one = TrainOnce({.optimizer = GetParam(), .engine = engine});
    EXPECT_NE(one.losses, exact.losses);
    EXPECT_LT(LargestRelativeDifference(one.losses, exact.losses), 0.02);
    for (const int ranks : {2, 3, 12}) {
      const RunResult many = TrainOnce(
          {.optimizer = GetParam(), .ranks = ranks, .batch = 12 / ranks, .engine = engine});
      EXPECT_LT(LargestRelativeDifference(many.losses, one.losses), 0.02) << ranks;
      EXPECT_LT(LargestRelativeDifference(many.val_losses, one.val_losses), 0.02) << ranks;
    }
  }
}

TEST_P(Parity, InBFloat16TwoRunsAlikeAreBitIdenticalWhateverTheSchedule) {
  for (const EngineOptions& engine : {kShortWires, kShortShards}) {
    const Variant base = {
        .optimizer = GetParam(), .ranks = 3, .batch = 4, .steps = 6, .engine = engine};
    const RunResult expected = TrainOnce(base);
    std::vector<Variant> variants(3, base);
    variants[1].engine.prefetch = 0;
    variants[2].engine.reshard_after_forward = false;
    for (const Variant& variant : variants) {
      const RunResult run = TrainOnce(variant);
      EXPECT_EQ(run.losses, expected.losses);
      EXPECT_EQ(run.weights, expected.weights);
    }
  }
}

TEST_P(Parity, WeightsAreSavedExactlyAsTheMasterHasThem) {
  const auto in_bfloat16 = [](const RunResult& run) {
    return std::all_of(run.weights.begin(), run.weights.end(),
                       [](float w) { return static_cast<float>(BFloat16(w)) == w; });
  };
  EXPECT_TRUE(in_bfloat16(TrainOnce(
      {.optimizer = GetParam(), .ranks = 2, .batch = 2, .steps = 2, .engine = kShortShards})));
  EXPECT_FALSE(in_bfloat16(TrainOnce(
      {.optimizer = GetParam(), .ranks = 2, .batch = 2, .steps = 2, .engine = kShortWires})));
}

TEST_P(Parity, SchedulingOptionsDoNotChangeASingleBit) {
  const Variant base = {.optimizer = GetParam(), .ranks = 2, .batch = 6, .steps = 8};
  const RunResult expected = TrainOnce(base);
  std::vector<Variant> variants(5, base);
  variants[0].engine.reshard_after_forward = false;
  variants[1].engine.prefetch = 0;
  variants[2].engine.prefetch = 3;
  variants[3].recompute = true;
  variants[4].val_every = 3;
  for (size_t i = 0; i < variants.size(); ++i) {
    const RunResult run = TrainOnce(variants[i]);
    EXPECT_EQ(run.losses, expected.losses) << "variant " << i;
    EXPECT_EQ(run.weights, expected.weights) << "variant " << i;
  }
}

TEST_P(Parity, AccumulatedMicroBatchesMakeTheSameStep) {
  const RunResult whole = TrainOnce({.optimizer = GetParam(), .ranks = 2, .batch = 6});
  for (const bool sync : {true, false}) {
    const RunResult parts = TrainOnce({.optimizer = GetParam(),
                                       .ranks = 2,
                                       .batch = 2,
                                       .grad_accum = 3,
                                       .engine = {.sync_every_micro_batch = sync, .clip = 1.0}});
    EXPECT_LT(LargestRelativeDifference(parts.losses, whole.losses), kTolerance.at(GetParam()));
  }
}

TEST_P(Parity, WithoutClippingUpdatesInBackwardGiveTheSameRun) {
  // A clip that never bites orders the updates after backward; none lets them start during it.
  const RunResult after =
      TrainOnce({.optimizer = GetParam(), .ranks = 3, .batch = 4, .engine = {.clip = 1e6}});
  const RunResult during =
      TrainOnce({.optimizer = GetParam(), .ranks = 3, .batch = 4, .engine = {.clip = 0}});
  EXPECT_LT(LargestRelativeDifference(during.losses, after.losses), 1e-6);
}

// Bytes of the embeddings' rows that cross ranks in one direction, over all steps and ranks of a
// run with one micro-batch a step: a rank needs each of its tokens' rows, and each of its
// positions', once.
int64_t LookedUpBytes(const Variant& v) {
  const TrainerOptions options = OptionsOf(v, "");
  const Dataset dataset = OpenText(options);
  int64_t rows = 0;
  for (int64_t step = 0; step < v.steps; ++step) {
    for (int rank = 0; rank < v.ranks; ++rank) {
      std::set<int32_t> tokens;
      for (int64_t b = 0; b < v.batch; ++b) {
        std::vector<int32_t> inputs(kTinySeqLen), targets(kTinySeqLen);
        dataset.TrainSequence((step * v.ranks + rank) * v.batch + b, absl::MakeSpan(inputs),
                              absl::MakeSpan(targets));
        tokens.insert(inputs.begin(), inputs.end());
      }
      const auto elsewhere = [&](int64_t parameter_rows, int64_t row) {
        const int64_t chunk = (parameter_rows + v.ranks - 1) / v.ranks;
        return row / chunk != rank;
      };
      for (const int32_t token : tokens) rows += elsewhere(kTinyModel.vocab, token);
      for (int64_t t = 0; t < kTinySeqLen; ++t) rows += elsewhere(kTinyModel.positions, t);
    }
  }
  return rows * kTinyModel.width * sizeof(float);
}

TEST_P(Parity, SummaryHoldsTheRingFormulasBytesAndTheCalls) {
  const ParameterTable table(Gpt2Units(kTinyModel));
  const double all = 4.0 * table.elements();
  const double root = 4.0 * table.unit_elements(0);
  for (const int ranks : {1, 2, 3}) {
    const Variant variant = {
        .optimizer = GetParam(), .ranks = ranks, .batch = 2, .steps = 3, .val_every = 2};
    const RunResult run = TrainOnce(variant);
    const json& bytes = run.summary["bytes_per_step"];
    const double share = (ranks - 1.0) / ranks;
    const double rows = LookedUpBytes(variant) / (3.0 * ranks);
    EXPECT_EQ(rows > 0, ranks > 1);
    EXPECT_EQ(bytes["parameter"], std::llround(share * (2 * all - root) + rows));
    EXPECT_EQ(bytes["gradient"], std::llround(share * all + rows));
    if (GetParam() != "muon") {
      EXPECT_EQ(bytes["optimizer"], 0);
      EXPECT_EQ(run.summary["ns_calls_per_step"], 0);
    } else {
      EXPECT_EQ(bytes["optimizer"] > 0, ranks > 1);
      EXPECT_EQ(run.summary["ns_calls_per_step"], 4 * kTinyModel.layers);
    }
    EXPECT_EQ(run.summary["world_size"], ranks);
    EXPECT_EQ(run.summary["parameters"], table.elements());
    EXPECT_EQ(run.summary["steps"], 3);
    EXPECT_EQ(run.summary["final_loss"], run.losses.back());
    EXPECT_EQ(run.summary["val_loss"], run.val_losses.back());
  }
}

TEST_P(Parity, SummaryHoldsHalfTheBytesForWhatTravelsInBFloat16) {
  Variant variant = {.optimizer = GetParam(), .ranks = 3, .batch = 2, .steps = 3};
  const json full = TrainOnce(variant).summary["bytes_per_step"];
  variant.engine = kShortWires;
  const json half = TrainOnce(variant).summary["bytes_per_step"];
  // Means over ranks and steps are rounded to bytes.
  EXPECT_NEAR(half["parameter"].get<double>(), full["parameter"].get<double>() / 2, 1);
  EXPECT_NEAR(half["gradient"].get<double>(), full["gradient"].get<double>() / 2, 1);
  EXPECT_EQ(half["optimizer"], full["optimizer"]);
}

TEST_P(Parity, MeasuredPeakMemoryIsThePredicted) {
  for (const EngineOptions& engine :
       {EngineOptions{.clip = 1.0}, kShortWires, kShortShards,
        EngineOptions{.clip = 1.0, .param_dtype = kBF16},
        EngineOptions{.sync_every_micro_batch = false, .reduce_dtype = kBF16}}) {
    const int ranks = engine.param_dtype == kBF16 ? 3 : 4;
    const Variant variant = {
        .optimizer = GetParam(), .ranks = ranks, .batch = 3, .steps = 2, .engine = engine};
    const auto plan = *PlanMemory(OptionsOf(variant, ""), WorkloadOf(variant));
    MemoryUse fullest;
    for (const MemoryUse& rank : plan) {
      if (rank.total() > fullest.total()) fullest = rank;
    }
    const RunResult run = TrainOnce(variant);
    for (int i = 0; i < kNumMemoryPurposes; ++i) {
      const std::string purpose(Name(static_cast<MemoryPurpose>(i)));
      EXPECT_EQ(run.summary["peak_memory_bytes"][purpose], fullest.bytes[i]) << purpose;
    }
  }
}

TEST_P(Parity, DiagnosticsCostMemoryAsPredictedAndChangeNothing) {
  for (const int ranks : {1, 2, 3}) {
    Variant variant = {.optimizer = GetParam(), .ranks = ranks, .batch = 2, .steps = 7};
    const RunResult without = TrainOnce(variant);
    EXPECT_TRUE(without.diagnostics.empty());
    EXPECT_EQ(without.summary["peak_memory_bytes"]["diagnostics"], 0);
    variant.diagnostics_every = 3;
    const RunResult with = TrainOnce(variant);
    EXPECT_EQ(with.losses, without.losses);
    EXPECT_EQ(with.norms, without.norms);
    EXPECT_EQ(with.weights, without.weights);
    EXPECT_EQ(with.summary["bytes_per_step"], without.summary["bytes_per_step"]);

    const auto plan = *PlanMemory(OptionsOf(variant, ""), WorkloadOf(variant));
    MemoryUse fullest;
    for (const MemoryUse& rank : plan) {
      if (rank.total() > fullest.total()) fullest = rank;
    }
    EXPECT_GT(fullest[MemoryPurpose::kDiagnostics], 0);
    for (int i = 0; i < kNumMemoryPurposes; ++i) {
      const std::string purpose(Name(static_cast<MemoryPurpose>(i)));
      EXPECT_EQ(with.summary["peak_memory_bytes"][purpose], fullest.bytes[i]) << purpose;
    }

    ASSERT_EQ(with.diagnostics.size(), 2u);
    for (const int64_t step : {3, 6}) {
      const json& diagnostics = with.diagnostics.at(step);
      // Every matrix has three figures, and theirs of all rows lie between.
      ASSERT_EQ(diagnostics["matrices"].size(), 4u * kTinyModel.layers);
      double smallest = std::numeric_limits<double>::infinity(), largest = 0;
      double sum = 0, rows = 0;
      for (const json& matrix : diagnostics["matrices"]) {
        smallest = std::min<double>(smallest, matrix["r_min"]);
        largest = std::max<double>(largest, matrix["r_max"]);
        sum += matrix["r_avg"].get<double>() * matrix["rows"].get<double>();
        rows += matrix["rows"].get<double>();
      }
      // Width 35: 105, 35, 140 and 35 rows a block, all of them sampled.
      EXPECT_EQ(rows, kTinyModel.layers * 315);
      EXPECT_EQ(diagnostics["rows"], rows);
      EXPECT_EQ(diagnostics["r_min"], smallest);
      EXPECT_EQ(diagnostics["r_max"], largest);
      EXPECT_NEAR(diagnostics["r_avg"].get<double>(), sum / rows, 1e-9 * sum / rows);
      // Of the steps since the last line, those whose norm was above the clip of 1.
      int clipped = 0;
      for (int64_t s = step - 3; s < step; ++s) clipped += with.norms[s] > 1;
      EXPECT_DOUBLE_EQ(diagnostics["clip_rate"].get<double>(), clipped / 3.0);
      for (const char* group : {"matrices", "embeddings", "vectors"}) {
        EXPECT_GT(diagnostics["update_rms"][group].get<double>(), 0) << group;
      }
    }
  }
}

TEST_P(Parity, DiagnosticsMeasureABFloat16MasterToo) {
  const Variant variant = {.optimizer = GetParam(),
                           .ranks = 2,
                           .batch = 2,
                           .steps = 2,
                           .engine = kShortShards,
                           .diagnostics_every = 2};
  const RunResult run = TrainOnce(variant);
  for (const char* group : {"matrices", "embeddings"}) {
    EXPECT_GT(run.diagnostics.at(2)["update_rms"][group].get<double>(), 0) << group;
  }
  // Beside the momenta: a copy of the shards of half the length.
  const auto plan = *PlanMemory(OptionsOf(variant, ""), WorkloadOf(variant));
  EXPECT_EQ(run.summary["peak_memory_bytes"]["diagnostics"], plan[0][MemoryPurpose::kDiagnostics]);
}

TEST(Stop, ARaisedFlagEndsTheRunWithItsFilesWhole) {
  spdlog::set_level(spdlog::level::warn);
  const Variant variant = {.ranks = 2, .batch = 2, .steps = 1000000};
  const std::string run_dir = testing::TempDir() + "/stopped";
  fs::remove_all(run_dir);
  TrainerOptions options = OptionsOf(variant, run_dir);
  const std::atomic<bool> stop = true;
  options.stop = &stop;
  const auto dataset = Dataset::Open(
      {.path = TextFile(), .vocabulary = 101, .seq_len = kTinySeqLen, .global_batch = 4});
  const auto result = Train(options, WorkloadOf(variant), *dataset);
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->stopped);
  EXPECT_EQ(result->steps, 1);
  EXPECT_TRUE(SafetensorsFile::Open(run_dir + "/model.safetensors").ok());
  EXPECT_EQ(json::parse(std::ifstream(run_dir + "/summary.json"))["steps"], 1);
}

TEST(BrokenLoss, StopsTheRunNamingTheStepAndLeavesNoWeights) {
  spdlog::set_level(spdlog::level::off);
  const Variant variant = {.ranks = 2, .batch = 2, .steps = 50, .engine = {.clip = 0}};
  const std::string run_dir = testing::TempDir() + "/broken";
  fs::remove_all(run_dir);
  Workload workload = WorkloadOf(variant);
  workload.lr_factor = [](int64_t) { return 1e30; };
  const auto dataset = Dataset::Open(
      {.path = TextFile(), .vocabulary = 101, .seq_len = kTinySeqLen, .global_batch = 4});
  const auto result = Train(OptionsOf(variant, run_dir), workload, *dataset);
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.status().message().find("step "), absl::string_view::npos) << result.status();
  EXPECT_FALSE(fs::exists(run_dir + "/model.safetensors"));
  EXPECT_FALSE(fs::exists(run_dir + "/summary.json"));
  int lines = 0;
  std::ifstream metrics(run_dir + "/metrics.jsonl");
  for (std::string line; std::getline(metrics, line); ++lines) EXPECT_TRUE(json::accept(line));
  EXPECT_GE(lines, 1);
}

}  // namespace
}  // namespace dim0
