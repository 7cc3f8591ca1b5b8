// Tracing of one rank of a training run: which steps are recorded, and the file they become. A run
// never fails because of its trace.
#ifndef DIM0_RUNTIME_TRACE_TRACER_H_
#define DIM0_RUNTIME_TRACE_TRACER_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "runtime/allocator.h"
#include "runtime/op_recorder.h"
#include "runtime/trace/trace.h"

namespace dim0 {

struct TraceOptions {
  std::string dir;  // of the files; empty: no trace
  int64_t first_step = 1;
  int64_t last_step = std::numeric_limits<int64_t>::max();
  // Ops, waits and memory samples that a rank may record (OpRecorder).
  int64_t budget = OpRecorder::kDefaultBudget;
};

// What a recorder holds, as a trace: the steps that it recorded whole and what was enqueued in
// them, what had been enqueued before and ran in them, and of a step that did not end what had been
// done. `header` has everything but streams,
// steps and memory; `steps` are those that ended; `live` is what memory holds between steps. No
// recorded stream may have work in flight.
RankTrace MakeTrace(const OpRecorder& recorder, RankTrace header, std::vector<TraceStep> steps,
                    const MemoryUse& live);

class Tracer {
 public:
  // `header` as for MakeTrace.
  Tracer(const TraceOptions& options, RankTrace header)
      : options_(options), header_(std::move(header)), recorder_(options.budget) {
    recorder_.SetRecording(false);
  }

  // For Device::SetRecorder.
  OpRecorder* recorder() { return &recorder_; }

  // After this one the trace may be written.
  bool last(int64_t step) const { return step == options_.last_step; }

  // Around a step: what is enqueued between them is recorded if the step is to be traced, or the
  // next one, in which an update of this one may still run. `loss` as in TraceStep.
  void BeginStep(int64_t step);
  void EndStep(int64_t step, absl::Time begin, absl::Time end, std::optional<double> loss);
  // The last traced step that has ended; 0 before that.
  int64_t last_ended() const { return steps_.empty() ? 0 : steps_.back().step; }

  // There will be no more steps than those that ended, and a part of the next at most.
  void CutShort() { header_.cut_short = true; }

  // About how long the trace's file would be now.
  int64_t FileBytes() const { return 1024 * recorder_.entries(); }

  // Writes the trace. Once; later calls do nothing. The streams must be idle.
  absl::Status Write(const MemoryUse& live);
  // Instead of Write: there will be no file.
  void GiveUp();

 private:
  const TraceOptions options_;
  RankTrace header_;
  OpRecorder recorder_;
  std::vector<TraceStep> steps_;
  bool written_ = false;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_TRACE_TRACER_H_
