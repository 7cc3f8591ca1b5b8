// Training on GPUs where one call of the CUDA runtime, cuBLASLt or NCCL fails, each in its turn, and
// where there are too few GPUs or too little memory. For the emulator, which makes calls fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "collectives/steady_clock.h"
#include "nlohmann/json.hpp"
#include "runtime/trainer.h"
#include "spdlog/spdlog.h"
#include "tests/run_program.h"
#include "tests/simt/control.h"
#include "tests/training_run.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Calls whose failure may cost a run nothing: they give back what the process holds, ask whether
// something has passed that is waited for elsewhere, tell a time for a log, or measure. Unless the
// device goes with them, which the next call of another kind finds.
const std::set<std::string> kHarmless = {};

struct FaultyRun {
  absl::Status status;
  std::vector<double> losses;
  std::string failed_call;
  absl::Duration duration;
};

class CudaFaults : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    spdlog::set_level(spdlog::level::off);
    run_dir_ = testing::TempDir() + "/cuda_faults_" + GetParam();
  }
  void TearDown() override {
    simt::Reset();
    fs::remove_all(run_dir_);
  }

  Variant TwoSteps() const {
    return {.optimizer = GetParam(),
            .ranks = 2,
            .batch = 1,
            .steps = 2,
            .backend = Backend::kCuda,
            .model = {.layers = 1, .width = 16, .heads = 2, .vocab = 101, .positions = 16}};
  }

  // Trains from scratch, with the n-th call made to fail if n > 0.
  FaultyRun Train(int64_t n) {
    simt::Reset();
    fs::remove_all(run_dir_);
    TrainerOptions options = OptionsOf(TwoSteps(), run_dir_);
    options.val_sequences = 2;
    options.matmul_measurement = absl::ZeroDuration();
    options.collective_timeout = absl::Seconds(20);
    const Dataset data = OpenText(options);
    const Workload workload = WorkloadOf(TwoSteps());
    simt::FailCall(n);
    const int64_t before = simt::CallCount();
    const absl::Time start = SteadyNow();
    FaultyRun run;
    run.status = dim0::Train(options, workload, data).status();
    run.duration = SteadyNow() - start;
    calls_ = simt::CallCount() - before;
    run.failed_call = simt::FailedCall();
    std::ifstream metrics(run_dir_ + "/metrics.jsonl");
    for (std::string line; std::getline(metrics, line);) {
      EXPECT_FALSE(metrics.eof()) << "half a line: " << line;
      const nlohmann::json entry = nlohmann::json::parse(line);
      run.losses.push_back(entry.contains("loss") ? entry["loss"] : entry["val_loss"]);
    }
    return run;
  }

  std::string run_dir_;
  int64_t calls_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Optimizers, CudaFaults,
                         testing::Values("adamw", "rmnp", "muon", "sign_momentum"),
                         [](const auto& info) { return info.param; });

TEST_P(CudaFaults, ACallThatFailsEndsTheRunInOneLineOrChangesNothing) {
  const FaultyRun whole = Train(0);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  ASSERT_EQ(whole.losses.size(), 3u);
  const int64_t calls = calls_;
  std::cerr << calls << " calls " << whole.duration << "\n";
  const char* first = getenv("FIRST"), *last = getenv("LAST"), *stride = getenv("STRIDE");
  for (int64_t n = first ? atoi(first) : 1; n <= (last ? atoi(last) : calls);
       n += stride ? atoi(stride) : 1) {
    const FaultyRun run = Train(n);
    std::cerr << "@@ " << n << " " << run.failed_call << " " << run.duration << " " << run.status
              << "\n";
    if (run.status.ok()) {
      EXPECT_EQ(run.losses, whole.losses);
    }
  }
}

}  // namespace
}  // namespace dim0
