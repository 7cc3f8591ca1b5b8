#include "tests/training_run.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optim/factory.h"
#include "optim/schedule.h"
#include "runtime/safetensors.h"
#include "spdlog/spdlog.h"

namespace dim0 {

namespace fs = std::filesystem;

std::string TextFile() {
  const std::string path = testing::TempDir() + "/training.txt";
  std::ofstream file(path);
  uint32_t state = 1;
  for (int i = 0; i < 6000; ++i) {
    state = state * 1664525 + 1013904223;
    file << static_cast<char>('!' + (i * 7 + (state >> 29)) % 60);
  }
  return path;
}

TrainerOptions OptionsOf(const Variant& v, const std::string& run_dir) {
  TrainerOptions options;
  options.ranks = v.ranks;
  options.backend = v.backend;
  options.threads_per_rank = v.threads;
  options.engine = v.engine;
  options.batch = v.batch;
  options.grad_accum = v.grad_accum;
  options.seq_len = kTinySeqLen;
  options.steps = v.steps;
  options.seed = 7;
  options.val_every = v.val_every;
  options.val_sequences = 13;
  options.diagnostics_every = v.diagnostics_every;
  options.run_dir = run_dir;
  options.trace.dir = v.trace_dir;
  return options;
}

Workload WorkloadOf(const Variant& v) {
  Workload workload;
  workload.make_model = [v](Device& device) -> absl::StatusOr<std::unique_ptr<Model>> {
    return std::make_unique<Gpt2>(v.model, v.recompute, device, v.engine.param_dtype,
                                  v.engine.reduce_dtype);
  };
  OptimizerConfig config{.name = v.optimizer};
  config.adamw.lr = v.optimizer == "adamw" ? 6e-4 : 3e-3;
  workload.make_optimizer = [config](Device& device, ProcessGroup& group) {
    return CreateOptimizer(config, device, group);
  };
  workload.lr_factor = [](int64_t step) { return Schedule{.warmup_steps = 5}.Factor(step); };
  workload.learning_rates = config.LearningRates();
  workload.store_transposed = Gpt2StoredTransposed;
  return workload;
}

Dataset OpenText(const TrainerOptions& options) {
  auto dataset = Dataset::Open({.path = TextFile(),
                                .vocabulary = kTinyModel.vocab,
                                .seq_len = kTinySeqLen,
                                .global_batch = options.sequences_per_step(),
                                .seed = 7,
                                .val_fraction = 0.05});
  EXPECT_TRUE(dataset.ok()) << dataset.status();
  return *std::move(dataset);
}

RunResult TrainOnce(const Variant& v) {
  spdlog::set_level(spdlog::level::warn);
  static int number = 0;
  const std::string run_dir = absl::StrCat(testing::TempDir(), "/training_run_", ++number);
  fs::remove_all(run_dir);
  const TrainerOptions options = OptionsOf(v, run_dir);
  const auto result = Train(options, WorkloadOf(v), OpenText(options));
  EXPECT_TRUE(result.ok()) << result.status();

  RunResult run;
  std::ifstream metrics(run_dir + "/metrics.jsonl");
  for (std::string line; std::getline(metrics, line);) {
    const nlohmann::json entry = nlohmann::json::parse(line);
    if (entry.contains("val_loss")) {
      run.val_losses.push_back(entry["val_loss"]);
    } else if (entry.contains("diagnostics")) {
      run.diagnostics[entry["step"]] = entry["diagnostics"];
    } else {
      run.losses.push_back(entry["loss"]);
      run.norms.push_back(entry["grad_norm"]);
    }
  }
  run.summary = nlohmann::json::parse(std::ifstream(run_dir + "/summary.json"));
  const auto weights = SafetensorsFile::Open(run_dir + "/model.safetensors");
  EXPECT_TRUE(weights.ok()) << weights.status();
  for (const auto& tensor : weights->tensors()) {
    std::vector<float> values(tensor.elements);
    EXPECT_TRUE(weights->ReadFloats(tensor, 0, absl::MakeSpan(values)).ok());
    run.weights.insert(run.weights.end(), values.begin(), values.end());
  }
  return run;
}

double LargestRelativeDifference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] / b[i] - 1));
  return largest;
}

}  // namespace dim0
