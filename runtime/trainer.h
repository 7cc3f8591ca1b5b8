// The training loop: ranks, steps, validation, logs and the files a run leaves.
//
// RUN_DIR/metrics.jsonl       one JSON object a line: {step, loss, grad_norm, lr, step_ms,
//                             tokens_per_s, flops_fraction} for each step, {step, diagnostics} for
//                             each step that was measured, {step, val_loss} for each validation
// RUN_DIR/summary.json        the run's figures, written when it ends
// RUN_DIR/model.safetensors   the final weights, written when it ends
// An earlier run's files in the same folder are moved to RUN_DIR/previous-N, never overwritten.
// TRACE_DIR/rankR.json        each rank's trace, if asked for: written when the run has ended or
//                             failed, after all other files, or after the last traced step if more
//                             steps follow and the disk has room for the weights as well. A trace
//                             that cannot be written costs a warning.
#ifndef DIM0_RUNTIME_TRAINER_H_
#define DIM0_RUNTIME_TRAINER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "collectives/process_group.h"
#include "runtime/allocator.h"
#include "runtime/dataset.h"
#include "runtime/device.h"
#include "runtime/engine.h"
#include "runtime/model.h"
#include "runtime/optimizer.h"
#include "runtime/trace/tracer.h"

namespace dim0 {

// What is trained. The runtime knows neither models nor optimizers; each rank makes its own of
// both. What they are given outlives them.
struct Workload {
  std::function<absl::StatusOr<std::unique_ptr<Model>>(Device&)> make_model;
  std::function<absl::StatusOr<std::unique_ptr<Optimizer>>(Device&, ProcessGroup&)> make_optimizer;
  // The factor of every learning rate at a step counted from 1.
  std::function<double(int64_t step)> lr_factor;
  // What the factor multiplies, by the name of the flag that sets it, for the log.
  std::vector<std::pair<std::string, double>> learning_rates;

  // For summary.json, so that a run can be told from others: flag -> value.
  std::map<std::string, std::string> flags;

  // The files of the final weights: how a parameter is stored (PyTorch's GPT-2 wants some
  // transposed), further files to write beside (name -> contents), and the weights' file's
  // metadata.
  std::function<bool(const ParameterSpec&)> store_transposed;
  std::map<std::string, std::string> extra_files;
};

struct TrainerOptions {
  int ranks = 1;
  int threads_per_rank = 1;
  Backend backend = Backend::kCpu;
  absl::Duration collective_timeout = absl::Minutes(10);
  std::optional<LinkSpeed> link;  // what ranks pretend to be connected by
  // If ranks are processes, which one this is; its world size is `ranks`.
  std::optional<Launch> launch;
  EngineOptions engine;

  int64_t batch = 8;       // sequences per rank and micro-batch
  int64_t grad_accum = 1;  // micro-batches per step
  int64_t seq_len = 128;
  int64_t steps = 100;
  uint64_t seed = 0;
  int64_t val_every = 0;          // steps between validations; 0: after the last step only
  int64_t val_sequences = 64;     // at most; the same sequences whatever the number of ranks
  int64_t log_every = 1;          // steps between lines on the terminal
  int64_t diagnostics_every = 0;  // steps between diagnostics; 0: none
  std::string run_dir;
  TraceOptions trace;
  absl::Duration matmul_measurement = absl::Milliseconds(500);  // of what FLOPs are compared with

  // Called, if given, when all ranks have been started: until then there is nothing to stop.
  std::function<void()> ranks_met;
  // Raised from outside (a signal handler, say) to end after the step in progress. May be null.
  const std::atomic<bool>* stop = nullptr;

  int64_t sequences_per_step() const { return ranks * batch * grad_accum; }
};

struct TrainingSummary {
  int64_t steps = 0;  // done
  bool stopped = false;
  double final_loss = 0;
  double val_loss = 0;  // NaN when nothing is held out
  // Of this process, for the terminal: by purpose of the fullest rank; sent per step, mean over
  // ranks.
  MemoryUse peak_memory;
  std::map<std::string, int64_t> bytes_per_step;

  // Newton-Schulz of the whole run over all ranks. None if no call was made.
  int64_t newton_schulz_calls = 0;
  // The busiest rank's work over the ranks' mean: by the FLOPs that owners are chosen by, and by
  // the time it took.
  double newton_schulz_imbalance_predicted = 1;
  double newton_schulz_imbalance_measured = 1;
  double newton_schulz_flops_fraction = 0;  // of the matrix-product rate

  std::string matmul_name;   // what the products are called whose rate that is a fraction of
  std::string trace_report;  // for the terminal; empty if nothing was traced
};

// Every rank's memory, by purpose: made by running the allocations of a run without allocating.
// Errors: InvalidArgument for diagnostics that cannot be had.
absl::StatusOr<std::vector<MemoryUse>> PlanMemory(const TrainerOptions& options,
                                                  const Workload& workload);

// The table of PlanMemory or of measured peaks, for the terminal: the fullest rank's bytes by
// purpose, and the sum over ranks.
std::string MemoryTable(const std::vector<MemoryUse>& ranks);

// Trains, with progress on the terminal. The caller has checked that the memory fits. Errors are
// one line; after one, metrics.jsonl holds every finished step and no other file of this run
// exists.
absl::StatusOr<TrainingSummary> Train(const TrainerOptions& options, const Workload& workload,
                                      const Dataset& dataset);

}  // namespace dim0

#endif  // DIM0_RUNTIME_TRAINER_H_
