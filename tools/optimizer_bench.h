// Times, counts and checks optimizer steps alone, without a model: ranks as threads of this
// process, on the CPU or with a GPU each, the optimizers that training uses, the hidden matrices'
// shapes, random gradients.
#ifndef DIM0_TOOLS_OPTIMIZER_BENCH_H_
#define DIM0_TOOLS_OPTIMIZER_BENCH_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "collectives/link.h"
#include "runtime/device.h"
#include "runtime/parameter.h"

namespace dim0 {

// An optimizer with a way to shard and to communicate.
enum class Scheme : uint8_t {
  kRmnpRows,
  kRmnpRowBlocks,
  kRmnpColumns,
  kRmnpFlat,
  kMuonRedundant,
  kMuonBroadcast,
  kMuonOwner,
  kAdamW,
};
inline constexpr Scheme kAllSchemes[] = {
    Scheme::kRmnpRows,      Scheme::kRmnpRowBlocks, Scheme::kRmnpColumns, Scheme::kRmnpFlat,
    Scheme::kMuonRedundant, Scheme::kMuonBroadcast, Scheme::kMuonOwner,   Scheme::kAdamW};

// "rmnp_rows", "muon_owner", ...
absl::string_view Name(Scheme scheme);
// Error: NotFound, listing the names.
absl::StatusOr<Scheme> ParseScheme(absl::string_view name);

struct OptimizerBenchOptions {
  std::vector<UnitSpec> units;  // matrices only, at least one
  Backend backend = Backend::kCpu;
  int ranks = 1;
  int threads_per_rank = 1;
  int warmup = 2;                 // steps before those that count
  int repeats = 5;                // at least 1
  std::optional<LinkSpeed> link;  // what ranks pretend to be connected by; on the CPU only
  // Runs one step of the real schedule with the real collectives and no arithmetic, in memory that
  // only takes up room where collectives touch it. Nothing is timed. On the CPU only.
  bool ledger_only = false;
};

struct SchemeResult {
  Scheme scheme = Scheme::kRmnpRows;
  // Sent in a step, as the ledgers have it: by a rank on average, and by the one that sends most.
  int64_t bytes_per_step = 0;
  int64_t most_bytes_per_step = 0;

  // What follows is measured, and 0 with ledger_only. Times are medians over the repeats, of the
  // rank with the largest median step; a step lasts from the moment at which the first rank leaves
  // a barrier to the rank's own end.
  double ms_per_step = 0;
  double comm_ms = 0;          // some collective was running, waiting for other ranks included
  double compute_ms = 0;       // some other op was running
  double exposed_comm_ms = 0;  // a collective was running and no other op
  // What the ops of all ranks must do by their formulas, over ms_per_step.
  double gflops = 0;
  double gb_per_s = 0;  // collectives left out
  // For rmnp_rows (20 bytes a parameter) and adamw (28): the median over the repeats of the step's
  // bandwidth over the one that all ranks measured just before it (runtime/bandwidth.h). Otherwise
  // 0.
  double of_bandwidth = 0;
  // Of each repeat, from the barrier to the last rank's end.
  std::vector<double> step_ms;
};

// Runs the schemes on the same shards in turn, a step of each per repeat, so that their times may
// be compared; results are in the order of `schemes`. They hold their state at the same time.
absl::StatusOr<std::vector<SchemeResult>> MeasureSchemes(const OptimizerBenchOptions& options,
                                                         absl::Span<const Scheme> schemes);

// Bytes that each rank of MeasureSchemes touches, at most.
absl::StatusOr<std::vector<int64_t>> PlanSchemes(const OptimizerBenchOptions& options,
                                                 absl::Span<const Scheme> schemes);

struct NewtonSchulzResult {
  // On every distinct shape of the model, with as many matrices at once as keep the device busy,
  // on all ranks at once: FLOPs executed per second over the matrix-product rate, measured in
  // turns. Median over the repeats.
  double of_matmul_rate = 0;
  // One rank, on the model's largest matrix: the time of the standard algorithm over that of the
  // default, in turns. Median over the repeats.
  double speedup_over_standard = 0;
  int64_t rows = 0, cols = 0;  // of that matrix
};
absl::StatusOr<NewtonSchulzResult> MeasureNewtonSchulz(const OptimizerBenchOptions& options);
absl::StatusOr<std::vector<int64_t>> PlanNewtonSchulz(const OptimizerBenchOptions& options);

// The largest absolute difference between the values after two steps of RMNP sharded by rows over
// the ranks and after the same steps on one rank; 0 unless something is broken. Unit by unit.
absl::StatusOr<double> MeasureRmnpDifference(const OptimizerBenchOptions& options);
std::vector<int64_t> PlanRmnpDifference(const OptimizerBenchOptions& options);

// 0 for none.
double Median(std::vector<double> values);

}  // namespace dim0

#endif  // DIM0_TOOLS_OPTIMIZER_BENCH_H_
