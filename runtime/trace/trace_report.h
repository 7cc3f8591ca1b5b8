// Where a traced run's time went: how much of its communication was hidden behind computation, what
// was exposed, and why.
//
// On one rank, an instant of a step belongs to the first of these that holds:
//   compute             an op of the model ran (OpKind::kCompute or kCopy)
//   optimizer compute   an op of the optimizer ran (kOptimizer)
//   exposed parameter, gradient, optimizer, control communication
//                       a collective of that purpose ran
//   idle                nothing ran
// so that the parts add up to the step. Between steps the loop did something else (validation,
// say): what ran there belongs to no step, and of an op that reaches out of the steps only the part
// within counts.
#ifndef DIM0_RUNTIME_TRACE_TRACE_REPORT_H_
#define DIM0_RUNTIME_TRACE_TRACE_REPORT_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/trace/trace.h"

namespace dim0 {

// Milliseconds.
struct StepSplit {
  double compute = 0;
  double optimizer_compute = 0;
  std::array<double, kNumPurposes> exposed{};  // by Purpose
  double idle = 0;
  double total() const;
};

// Of one purpose's collectives on one rank, or the mean over ranks. Times are unions: what two of
// them did at once counts once.
struct Overlap {
  double communication = 0;  // ms a step in which one of them ran; waiting for other ranks included
  double hidden = 0;         // the part of it in which an op that is no collective ran
  double waiting = 0;        // the part in which they only waited for a last rank to arrive
  // Sent, a step, by the calls that were enqueued in one: whole, wherever they ran.
  int64_t bytes = 0;
  double calls = 0;  // of them, a step
  // GB/s sent while data moved (10^9 bytes); 0 if none did.
  double bandwidth = 0;
  double fraction_hidden() const { return communication > 0 ? hidden / communication : 0; }
};

// A collective that computation did not hide, over the steps of the rank on which it was exposed
// longest.
struct ExposedOp {
  std::string name, unit, phase;
  Purpose purpose = Purpose::kControl;
  int rank = 0;
  double exposed = 0;   // ms a step
  double duration = 0;  // ms a step
  // Why, in a few words: what compute was waiting for meanwhile, and what made the op late or long:
  // its stream was waiting for X, it queued behind Y, it waited for rank R, its data moved.
  std::string reason;
};

struct RankReport {
  int rank = 0;
  StepSplit split;  // mean over steps
  double step = 0;  // ms, mean
  std::array<Overlap, kNumPurposes> overlap;
  Overlap all;  // of all purposes together: the union of their times
};

struct TraceReport {
  int64_t first_step = 0, last_step = 0, steps = 0;
  std::vector<RankReport> ranks;
  RankReport mean;                      // over ranks; `rank` means nothing
  std::vector<ExposedOp> most_exposed;  // at most five, the longest exposed first
  // The rank that made the others wait the longest at collectives, and for how long: ms a step in
  // which another rank waited for it on some stream, mean over the others.
  int slowest_rank = 0;
  double slowest_by = 0;
  double next_slowest_by = 0;  // the same of the rank that comes second
  bool cut_short = false;      // a rank's trace is, see RankTrace
};

// InvalidArgument if there is no trace, one holds no whole step, or the ranks' steps differ. Any
// other content is taken for what it can mean: an op that ends before it begins took no time, an
// unknown cause is not named.
absl::StatusOr<TraceReport> AnalyzeTraces(absl::Span<const RankTrace> ranks);

// For the terminal: two sentences that say the most, then tables, of at most 100 columns.
std::string FormatReport(const TraceReport& report);

}  // namespace dim0

#endif  // DIM0_RUNTIME_TRACE_TRACE_REPORT_H_
