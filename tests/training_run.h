// Small training runs for tests of the whole: a tiny GPT-2 on a generated text, trained by Train()
// and read back from the files that it leaves.
#ifndef DIM0_TESTS_TRAINING_RUN_H_
#define DIM0_TESTS_TRAINING_RUN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/gpt2.h"
#include "nlohmann/json.hpp"
#include "runtime/dataset.h"
#include "runtime/trainer.h"

namespace dim0 {

// Width and vocabulary that no world size here divides, and vectors shorter than 8 ranks.
inline constexpr Gpt2Config kTinyModel = {
    .layers = 2, .width = 35, .heads = 5, .vocab = 101, .positions = 16};
inline constexpr int64_t kTinySeqLen = 16;

struct Variant {
  std::string optimizer = "adamw";
  int ranks = 1;
  int threads = 1;
  int64_t batch = 12;
  int64_t grad_accum = 1;
  int64_t steps = 20;
  int64_t val_every = 0;
  EngineOptions engine = {.clip = 1.0};
  bool recompute = false;
  int64_t diagnostics_every = 0;
  Backend backend = Backend::kCpu;
  Gpt2Config model = kTinyModel;
  std::string trace_dir;  // no trace if empty
};

struct RunResult {
  std::vector<double> losses, norms;
  std::vector<double> val_losses;
  std::map<int64_t, nlohmann::json> diagnostics;  // by step
  nlohmann::json summary;
  std::vector<float> weights;  // all, in file order
};

TrainerOptions OptionsOf(const Variant& variant, const std::string& run_dir);
Workload WorkloadOf(const Variant& variant);

// A file of text whose next byte is predictable enough to learn from, and the data that a run of
// these options reads from it.
std::string TextFile();
Dataset OpenText(const TrainerOptions& options);

// Trains; a run that fails fails the test.
RunResult TrainOnce(const Variant& variant);

// Of a[i] from b[i].
double LargestRelativeDifference(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace dim0

#endif  // DIM0_TESTS_TRAINING_RUN_H_
