// Training with the CUDA backend, whole: against the CPU's runs, at several world sizes, twice, and
// by what a run reports. On this machine's GPUs, as far as there are enough, or on the emulator's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "model/gpt2.h"
#include "nlohmann/json.hpp"
#include "runtime/device.h"
#include "runtime/trace/trace_file.h"
#include "runtime/trace/trace_report.h"
#include "runtime/trainer.h"
#include "tests/training_run.h"

namespace dim0 {
namespace {

constexpr int64_t kSteps = 3;
constexpr DType kFloat32 = DType::kFloat32, kBFloat16 = DType::kBFloat16;

// Heads of 64, which go through the tensor cores, and rows whose lengths are multiples of 8, where
// products take a GELU along.
constexpr Gpt2Config kTensorCoreModel = {
    .layers = 1, .width = 128, .heads = 2, .vocab = 101, .positions = 16};

// How far losses may be from those of the CPU, or of another number of ranks, in float32: sums are
// in another order, which RMNP's division by norms enlarges, and Muon's matrices are bfloat16.
const std::map<std::string, double> kTolerance = {
    {"adamw", 1e-5}, {"rmnp", 1e-4}, {"muon", 3e-3}, {"sign_momentum", 1e-3}};

bool HasGpus(int ranks) {
  return CheckBackend(Backend::kCuda).ok() && CreateLocalRanks(Backend::kCuda, ranks, {}).ok();
}

class CudaTraining : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const absl::Status status = CheckBackend(Backend::kCuda); !status.ok()) {
      GTEST_SKIP() << status.message();
    }
  }

  static Variant Cuda(int ranks = 1) {
    return {.optimizer = GetParam(),
            .ranks = ranks,
            .batch = 6 / ranks,
            .steps = kSteps,
            .backend = Backend::kCuda};
  }
  static Variant Cpu() { return {.optimizer = GetParam(), .batch = 6, .steps = kSteps}; }
};
INSTANTIATE_TEST_SUITE_P(Optimizers, CudaTraining,
                         testing::Values("adamw", "rmnp", "muon", "sign_momentum"),
                         [](const auto& info) { return info.param; });

// What concerns the engine more than the optimizer: with one that communicates, and one that does
// not.
class CudaSchedules : public CudaTraining {};
INSTANTIATE_TEST_SUITE_P(Optimizers, CudaSchedules, testing::Values("rmnp", "muon"),
                         [](const auto& info) { return info.param; });

TEST_P(CudaTraining, LossesInFloat32AreTheCpusAt1To3Ranks) {
  const RunResult cpu = TrainOnce(Cpu());
  ASSERT_EQ(cpu.losses.size(), static_cast<size_t>(kSteps));
  int compared = 0;
  for (const int ranks : {1, 2, 3}) {
    if (!HasGpus(ranks)) continue;
    const RunResult gpu = TrainOnce(Cuda(ranks));
    EXPECT_LT(LargestRelativeDifference(gpu.losses, cpu.losses), kTolerance.at(GetParam()))
        << ranks;
    EXPECT_LT(LargestRelativeDifference(gpu.val_losses, cpu.val_losses), kTolerance.at(GetParam()))
        << ranks;
    ++compared;
  }
  EXPECT_GE(compared, 1);
}

TEST_P(CudaTraining, LossesInBFloat16StayNearTheFloat32Ones) {
  const Gpt2Config models[] = {kTinyModel, kTensorCoreModel};
  RunResult exact[2];
  for (int i = 0; i < 2; ++i) {
    Variant cpu = Cpu();
    cpu.model = models[i];
    exact[i] = TrainOnce(cpu);
  }
  struct Case {
    int model, ranks;
    DType reduced;
  };
  for (const auto& [model, ranks, reduced] :
       {Case{0, 1, kFloat32}, Case{0, 3, kBFloat16}, Case{1, 1, kBFloat16}, Case{1, 2, kFloat32}}) {
    if (!HasGpus(ranks)) continue;
    Variant variant = Cuda(ranks);
    variant.model = models[model];
    variant.engine.param_dtype = kBFloat16;
    variant.engine.reduce_dtype = reduced;
    const RunResult rounded = TrainOnce(variant);
    // Weights and activations carry 8 bits; losses are means over 96 tokens.
    EXPECT_LT(LargestRelativeDifference(rounded.losses, exact[model].losses), 1.5e-2)
        << "width " << variant.model.width << ", " << ranks << " ranks, reduced in "
        << Name(reduced);
  }
}

TEST_P(CudaSchedules, TwoRunsAlikeAreBitIdentical) {
  for (const int ranks : {1, 3}) {
    if (!HasGpus(ranks)) continue;
    Variant variant = Cuda(ranks);
    variant.engine.param_dtype = kBFloat16;
    variant.steps = 3;
    const RunResult first = TrainOnce(variant), second = TrainOnce(variant);
    EXPECT_EQ(first.losses, second.losses);
    EXPECT_EQ(first.norms, second.norms);
    EXPECT_EQ(first.weights, second.weights);
  }
}

TEST_P(CudaSchedules, SchedulingOptionsDoNotChangeASingleBit) {
  const int ranks = HasGpus(2) ? 2 : 1;
  Variant base = Cuda(ranks);
  base.engine.param_dtype = kBFloat16;
  base.steps = 3;
  const RunResult expected = TrainOnce(base);
  std::vector<Variant> variants(3, base);
  variants[0].engine.reshard_after_forward = false;
  variants[1].engine.prefetch = 0;
  variants[2].recompute = true;
  for (size_t i = 0; i < variants.size(); ++i) {
    const RunResult run = TrainOnce(variants[i]);
    EXPECT_EQ(run.losses, expected.losses) << "variant " << i;
    EXPECT_EQ(run.weights, expected.weights) << "variant " << i;
  }
}

TEST_P(CudaSchedules, AccumulatedMicroBatchesMakeTheSameStep) {
  const int ranks = HasGpus(2) ? 2 : 1;
  Variant whole = Cuda(ranks);
  whole.steps = 3;
  const RunResult expected = TrainOnce(whole);
  for (const bool sync : {true, false}) {
    Variant parts = whole;
    parts.batch /= 3;
    parts.grad_accum = 3;
    parts.engine.sync_every_micro_batch = sync;
    EXPECT_LT(LargestRelativeDifference(TrainOnce(parts).losses, expected.losses),
              kTolerance.at(GetParam()));
  }
}

TEST_P(CudaSchedules, UpdatesDuringBackwardGiveTheSameRun) {
  const int ranks = HasGpus(2) ? 2 : 1;
  Variant after = Cuda(ranks), during = Cuda(ranks);
  after.engine.clip = 1e6;
  during.engine.clip = 0;
  EXPECT_LT(LargestRelativeDifference(TrainOnce(during).losses, TrainOnce(after).losses), 1e-6);
}

TEST_P(CudaSchedules, BytesHalveInBFloat16AndThePeakIsThePlan) {
  if (!HasGpus(2)) GTEST_SKIP() << "takes 2 GPUs";
  std::map<DType, nlohmann::json> bytes;
  for (const DType dtype : {kFloat32, kBFloat16}) {
    Variant variant = Cuda(2);
    variant.steps = 2;
    variant.diagnostics_every = 2;
    variant.engine.param_dtype = dtype;
    variant.engine.reduce_dtype = dtype;
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
    EXPECT_EQ(run.diagnostics.size(), 1u);
    bytes[dtype] = run.summary["bytes_per_step"];
  }
  for (const char* purpose : {"parameter", "gradient"}) {
    EXPECT_GT(bytes[kBFloat16][purpose], 0);
    // Each is rounded to whole bytes.
    EXPECT_NEAR(bytes[kFloat32][purpose].get<double>(), 2 * bytes[kBFloat16][purpose].get<double>(),
                1);
  }
}

TEST_P(CudaSchedules, ATraceHoldsTheStepsAndAddsUp) {
  const int ranks = HasGpus(2) ? 2 : 1;
  Variant variant = Cuda(ranks);
  variant.steps = 3;
  variant.trace_dir = testing::TempDir() + "/cuda_trace_" + GetParam();
  std::filesystem::remove_all(variant.trace_dir);
  TrainOnce(variant);
  const auto traces = ReadTraces(variant.trace_dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  ASSERT_EQ(traces->size(), static_cast<size_t>(ranks));
  const auto report = AnalyzeTraces(*traces);
  ASSERT_TRUE(report.ok()) << report.status();
  for (const auto& trace : *traces) {
    EXPECT_EQ(trace.backend, "nccl");
    EXPECT_EQ(trace.steps.size(), static_cast<size_t>(variant.steps));
    size_t ops = 0;
    for (const TraceStream& stream : trace.streams) {
      int64_t end = 0;
      for (const TraceOp& op : stream.ops) {
        EXPECT_LE(end, op.begin) << stream.name << ": " << op.name;
        EXPECT_LE(op.begin, op.end) << stream.name << ": " << op.name;
        end = op.end;
      }
      ops += stream.ops.size();
    }
    EXPECT_GT(ops, 50u * variant.steps);
  }
}

}  // namespace
}  // namespace dim0
