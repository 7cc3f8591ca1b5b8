// Training on GPUs where one call of the CUDA runtime, cuBLASLt or NCCL fails, each in its turn,
// and where there are too few GPUs or too little memory. For the emulator, which makes calls fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
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
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Calls after whose failure a run may go on, and why that is right. Where such a call takes the
// device with it, the next call that needs the device ends the run.
const std::map<std::string, std::string> kHarmless = {
    {"cublasLtDestroy", "gives back what the end of the process gives back, too"},
    {"cublasLtMatmulDescDestroy", "gives back memory of the host's"},
    {"cublasLtMatmulPreferenceDestroy", "gives back memory of the host's"},
    {"cublasLtMatrixLayoutDestroy", "gives back memory of the host's"},
    {"cudaDeviceGetStreamPriorityRange", "without it all streams have one priority"},
    {"cudaEventCreateWithFlags", "where a run takes seconds: for newer times of the trace"},
    {"cudaEventDestroy", "gives back an event"},
    {"cudaEventElapsedTime", "tells a time for the log"},
    {"cudaEventQuery", "asks whether something has passed that is waited for later"},
    {"cudaEventSynchronize", "at the end, before memory is given back"},
    {"cudaFree", "gives back memory"},
    {"cudaFreeHost", "gives back memory"},
    {"cudaSetDevice", "at the end, before something is given back"},
    {"cudaStreamDestroy", "gives back a stream"},
    {"cudaStreamSynchronize", "at the end, before memory is given back"},
    {"ncclCommAbort", "gives back a communicator"},
    {"ncclCommDestroy", "gives back a communicator"},
    {"ncclCommFinalize", "gives back a communicator"},
    {"ncclCommGetAsyncError", "at the end, before a communicator is given back"},
};

// The rate of matrix products, which is for the log only, is left out if it cannot be measured. Of
// what is called for it alone.
const std::set<std::string> kMeasurement = {
    "cublasLtCreate",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cudaMalloc",
};

constexpr absl::string_view kUnclipped = "_unclipped";
// Optimizers, as they clip and, if so called, as they do not.
const std::vector<std::string> kRuns = {"adamw", "rmnp", "muon", "muon_unclipped", "sign_momentum"};

// What a run leaves that ended well.
struct Result {
  std::string metrics;  // steps and losses
  std::string weights;
  bool operator==(const Result&) const = default;
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

  // Without clipping updates begin while backward is under way.
  bool clipped() const { return !absl::EndsWith(GetParam(), kUnclipped); }
  std::string optimizer() const { return std::string(absl::StripSuffix(GetParam(), kUnclipped)); }

  // Trains from scratch with the n-th call made to fail if n > 0, for two steps on two GPUs.
  absl::Status Train(int64_t n) {
    const Variant variant = {
        .optimizer = optimizer(),
        .ranks = 2,
        .batch = 1,
        .steps = 2,
        .engine = {.clip = clipped() ? 1.0 : 0.0},
        .backend = Backend::kCuda,
        .model = {.layers = 1, .width = 16, .heads = 2, .vocab = 101, .positions = 16}};
    simt::Reset();
    fs::remove_all(run_dir_);
    TrainerOptions options = OptionsOf(variant, run_dir_);
    options.val_sequences = 2;
    options.matmul_measurement = absl::ZeroDuration();
    options.collective_timeout = kDeadline;
    const Dataset data = OpenText(options);
    Workload workload = WorkloadOf(variant);
    const int64_t before = simt::CallCount();
    // Asked for at the begin of each step, by each rank.
    workload.lr_factor = [&, factor = workload.lr_factor](int64_t step) {
      (step == 1 ? calls_before_steps_ : calls_of_first_step_) = simt::CallCount() - before;
      // The last rank to begin counts.
      (step == 1 ? allocations_before_steps_ : allocations_of_first_step_) =
          simt::AllocationCount();
      return factor(step);
    };
    simt::FailCall(n);
    const absl::Time start = SteadyNow();
    const absl::Status status = dim0::Train(options, workload, data).status();
    EXPECT_LT(SteadyNow() - start, kDeadline);
    calls_ = simt::CallCount() - before;
    return status;
  }

  // Of the run folder. Expects whole lines.
  Result Read() const {
    Result result = {.weights = Slurp(run_dir_ + "/model.safetensors")};
    const std::string lines = Slurp(run_dir_ + "/metrics.jsonl");
    EXPECT_TRUE(lines.empty() || lines.back() == '\n') << lines;
    for (const absl::string_view line : absl::StrSplit(lines, '\n', absl::SkipEmpty())) {
      const auto entry = nlohmann::json::parse(line.begin(), line.end());
      for (const char* name : {"step", "loss", "grad_norm", "val_loss"}) {
        if (entry.contains(name)) absl::StrAppend(&result.metrics, entry[name].dump(), " ");
      }
      absl::StrAppend(&result.metrics, "\n");
    }
    return result;
  }

  static constexpr absl::Duration kDeadline = absl::Minutes(3);  // on a busy machine, too
  std::string run_dir_;
  std::atomic<int64_t> calls_before_steps_ = 0, calls_of_first_step_ = 0;
  std::atomic<int64_t> allocations_before_steps_ = 0, allocations_of_first_step_ = 0;
  int64_t calls_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Optimizers, CudaFaults, testing::ValuesIn(kRuns),
                         [](const auto& info) { return info.param; });

// In one process the driver may have a rank that allocates wait for what other ranks' GPUs do, and
// that may wait for this rank.
TEST_P(CudaFaults, NoMemoryIsAllocatedInAStep) {
  ASSERT_TRUE(Train(0).ok());
  EXPECT_GT(allocations_before_steps_, 0);
  EXPECT_EQ(allocations_of_first_step_, allocations_before_steps_);
}

// Some of the calls: each run's test takes others of them. DIM0_FAULTS_STRIDE=1 in the
// environment takes all, in an hour or so.
TEST_P(CudaFaults, ACallThatFailsEndsTheRunInOneLineOrChangesNothing) {
  ASSERT_TRUE(Train(0).ok());
  const Result whole = Read();
  ASSERT_EQ(std::count(whole.metrics.begin(), whole.metrics.end(), '\n'), 3) << whole.metrics;
  ASSERT_FALSE(whole.weights.empty());
  const int64_t before_steps = calls_before_steps_, with_first_step = calls_of_first_step_,
                calls = calls_;
  ASSERT_GT(with_first_step, before_steps);

  const char* const given = std::getenv("DIM0_FAULTS_STRIDE");
  const int64_t stride = given != nullptr ? std::atoi(given) : 0;
  ASSERT_GE(stride, 0);
  const auto which = std::find(kRuns.begin(), kRuns.end(), GetParam());
  int64_t n = 1 + (which - kRuns.begin());
  int failures = 0;
  while (n <= calls) {
    const absl::Status status = Train(n);
    const std::string call = simt::FailedCall();
    SCOPED_TRACE(absl::StrCat("call ", n, ", ", call, ": ", status.ToString()));
    const Result result = Read();
    if (call.empty() || status.ok()) {
      // A run makes some calls more or less: those that look whether something has happened.
      EXPECT_TRUE(status.ok());
      EXPECT_EQ(result.metrics, whole.metrics);
      EXPECT_TRUE(result.weights == whole.weights);
      EXPECT_TRUE(fs::exists(run_dir_ + "/summary.json"));
      EXPECT_TRUE(call.empty() || kHarmless.contains(call) ||
                  (kMeasurement.contains(call) && n <= calls_before_steps_));
    } else {
      ++failures;
      EXPECT_FALSE(absl::IsDeadlineExceeded(status));
      EXPECT_THAT(status.message(), Not(HasSubstr("\n")));
      EXPECT_THAT(status.message(),
                  AnyOf(HasSubstr("cudaError"), HasSubstr("NCCL"), HasSubstr("matrix product"),
                        HasSubstr("cuBLAS"), HasSubstr("no GPU")));
      // What was logged is right.
      EXPECT_TRUE(absl::StartsWith(whole.metrics, result.metrics)) << result.metrics;
      if (fs::exists(run_dir_)) {
        for (const auto& entry : fs::directory_iterator(run_dir_)) {
          EXPECT_EQ(entry.path().filename(), "metrics.jsonl");
        }
      }
    }
    if (stride > 0) {
      n += stride;
    } else {
      n += n <= before_steps ? 16 : n <= with_first_step ? 28 : 120;
    }
  }
  EXPECT_GT(failures, 20);
}

// The same from outside, as a user sees it.
class CudaProgram : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    std::string text;
    for (int i = 0; i < 2000; ++i)
      absl::StrAppend(&text, "The square of ", i, " is ", i * i, ".\n");
    Write("text.txt", text);
  }

  std::vector<std::string> Arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"--layers=1",
                                          "--width=16",
                                          "--heads=2",
                                          "--vocab=256",
                                          "--seq_len=16",
                                          "--batch=2",
                                          "--steps=2",
                                          "--threads_per_rank=1",
                                          "--data=" + Path("text.txt"),
                                          "--run_dir=" + Path("run")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // The emulator's setting for the programs that are run while it lives.
  class Setting {
   public:
    Setting(const char* name, const std::string& value) : name_(name) {
      setenv(name, value.c_str(), /*overwrite=*/1);
    }
    ~Setting() { unsetenv(name_); }
    Setting(const Setting&) = delete;
    Setting& operator=(const Setting&) = delete;

   private:
    const char* const name_;
  };
};

TEST_F(CudaProgram, WithoutAGpuCudaIsAnErrorAndAutoTrainsOnTheCpu) {
  const Setting none("DIM0_SIMT_DEVICES", "0");
  EXPECT_THAT(ErrorOf("tools/train", Arguments({"--device=cuda"}), 1),
              AllOf(HasSubstr("--device=cuda: this machine has no NVIDIA driver"),
                    HasSubstr("--device=cpu")));
  const Outcome chosen = Run("tools/train", Arguments({"--device=auto"}));
  EXPECT_EQ(chosen.exit_status, 0);
  EXPECT_EQ(chosen.err, "");
  EXPECT_THAT(chosen.out, HasSubstr("device: cpu, because this machine has no NVIDIA driver"));
  const std::string metrics = Slurp(Path("run/metrics.jsonl"));
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 3);
}

TEST_F(CudaProgram, MoreRanksThanGpusAreRefused) {
  const Setting two("DIM0_SIMT_DEVICES", "2");
  std::string out;
  EXPECT_THAT(ErrorOf("tools/train", Arguments({"--device=cuda", "--ranks=3"}), 1, &out),
              AllOf(HasSubstr("each rank of a machine takes a GPU"),
                    HasSubstr("shows this process 2"), HasSubstr("fewer ranks")));
}

TEST_F(CudaProgram, ARunThatDoesNotFitIsRefusedWithItsTableAndAWayOut) {
  const std::vector<std::string> large = {"--device=cuda", "--ranks=2", "--batch=64",
                                          "--seq_len=256"};
  // What is kept free beside a rank's plan, 96 MiB and a sixteenth, and some 16 MiB.
  const Setting little("DIM0_SIMT_MEMORY", absl::StrCat(119 << 20));
  std::string out;
  EXPECT_THAT(ErrorOf("tools/train", Arguments(large), 1, &out),
              AllOf(HasSubstr("iB on a rank's device"),
                    HasSubstr("MiB are available beside the 103.44 MiB left to NCCL and cuBLAS"),
                    HasSubstr("it would fit with "), HasSubstr("--batch=1")));
  EXPECT_THAT(out, AllOf(HasSubstr("predicted memory of the fullest rank:"),
                         HasSubstr("activation"), HasSubstr("in all")));
}

TEST_F(CudaProgram, WrongFlagsAreRefusedBeforeAnythingStarts) {
  EXPECT_THAT(ErrorOf("tools/train", Arguments({"--device=tpu"}), 2),
              AllOf(HasSubstr("--device=tpu"), HasSubstr("cpu, cuda or auto")));
  EXPECT_THAT(ErrorOf("tools/train", Arguments({"--device=cuda", "--link=pcie4"}), 2),
              AllOf(HasSubstr("--link"), HasSubstr("--device=cpu")));
  std::string out;
  EXPECT_THAT(ErrorOf("tools/train", Arguments({"--device=auto", "--link=pcie4"}), 2, &out),
              AllOf(HasSubstr("--link"), HasSubstr("--device=cpu")));
  EXPECT_EQ(out, "device: cuda\n");
}

TEST_F(CudaProgram, ACallThatFailsEndsTheProgramWithStatus1AndOneLine) {
  int failures = 0;
  for (const int64_t call : {1, 9, 40, 200, 700, 1500}) {
    SCOPED_TRACE(call);
    fs::remove_all(Path("run"));
    const Setting fault("DIM0_SIMT_FAIL_CALL", absl::StrCat(call));
    const Outcome outcome = Run("tools/train", Arguments({"--device=cuda", "--ranks=2"}));
    EXPECT_EQ(outcome.signal, 0);
    std::vector<std::string> lines;
    std::string failed_call;
    for (const absl::string_view line : absl::StrSplit(outcome.err, '\n', absl::SkipEmpty())) {
      if (!absl::StartsWith(line, "simt: ")) lines.emplace_back(line);
      // "simt: call 40, cudaFree, fails ..."
      const std::vector<std::string> parts = absl::StrSplit(line, ", ");
      if (absl::StartsWith(line, "simt: call ") && parts.size() > 1) failed_call = parts[1];
    }
    if (outcome.exit_status == 0) {
      const bool unmeasured = absl::StrContains(outcome.out, "could not be measured");
      EXPECT_TRUE(kHarmless.contains(failed_call) ||
                  (unmeasured && kMeasurement.contains(failed_call)))
          << outcome.err;
      continue;
    }
    ++failures;
    EXPECT_EQ(outcome.exit_status, 1);
    EXPECT_EQ(lines.size(), 1u) << outcome.err;
    EXPECT_FALSE(fs::exists(Path("run/model.safetensors")));
    EXPECT_FALSE(fs::exists(Path("run/summary.json")));
  }
  EXPECT_GE(failures, 3);
}

TEST_F(CudaProgram, WhereNcclDoesNotEvenAbortTheProgramEndsAllTheSame) {
  const Setting hangs("DIM0_SIMT_ABORT_HANGS", "1");
  // Which call is the first with channels open depends on how many a measurement makes in its time.
  int last_resorts = 0;
  for (int64_t call = 1400; call < 5000 && last_resorts < 2; call += 300) {
    fs::remove_all(Path("run"));
    const Setting fault("DIM0_SIMT_FAIL_CALL", absl::StrCat(call));
    const Outcome outcome =
        Run("tools/train", Arguments({"--device=cuda", "--ranks=2", "--collective_timeout=5s"}));
    SCOPED_TRACE(absl::StrCat(call, ": ", outcome.err));
    EXPECT_EQ(outcome.signal, 0);
    if (outcome.exit_status == 0) continue;
    EXPECT_EQ(outcome.exit_status, 1);
    EXPECT_FALSE(fs::exists(Path("run/summary.json")));
    const std::string told = "; NCCL has not aborted within 5s: ending the process\n";
    if (absl::EndsWith(outcome.err, told)) ++last_resorts;
  }
  EXPECT_GE(last_resorts, 1);
}

TEST_F(CudaProgram, WhereACallOfCudasDoesNotReturnTheProgramEndsAllTheSame) {
  const Setting hang("DIM0_SIMT_HANG_CALL", "2000");  // with channels open
  const Outcome outcome =
      Run("tools/train", Arguments({"--device=cuda", "--ranks=2", "--collective_timeout=2s"}));
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_EQ(outcome.err,
            "CUDA or its driver hangs: a look at what runs has not ended within 4s: ending the "
            "process\n");
  EXPECT_FALSE(fs::exists(Path("run/summary.json")));
}

// Each rank's thread may be held up, with a lock that the others need, until its GPU has done what
// it was told: were a collective among it that another rank has yet to launch, for ever.
TEST_F(CudaProgram, AThreadThatTheDriverHoldsUpDoesNotHoldUpThoseThatItWaitsFor) {
  const Setting loads("DIM0_SIMT_LOADS", "1");
  for (const char* const optimizer : {"rmnp", "muon", "adamw"}) {
    for (const int ranks : {2, 3}) {
      fs::remove_all(Path("run"));
      const Outcome outcome =
          Run("tools/train",
              Arguments({"--device=cuda", absl::StrCat("--ranks=", ranks),
                         absl::StrCat("--optimizer=", optimizer), "--collective_timeout=20s"}));
      EXPECT_EQ(outcome.exit_status, 0) << optimizer << " on " << ranks << ": " << outcome.err;
    }
  }
}

TEST_F(CudaProgram, AGpuThatTheBuildHasNoCodeForIsRefusedWithAWayOut) {
  const Setting no_code("DIM0_SIMT_NO_CODE", "1");
  EXPECT_THAT(ErrorOf("tools/train", Arguments({"--device=cuda"}), 1),
              AllOf(HasSubstr("does not run a kernel"),
                    HasSubstr("build with --define=cuda_architectures=90")));
  const Outcome chosen = Run("tools/train", Arguments({"--device=auto"}));
  EXPECT_EQ(chosen.exit_status, 0) << chosen.err;
  EXPECT_THAT(chosen.out, HasSubstr("device: cpu, because GPU 0"));
}

}  // namespace
}  // namespace dim0
