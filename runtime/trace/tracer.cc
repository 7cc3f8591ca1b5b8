#include "runtime/trace/tracer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/check.h"
#include "runtime/trace/trace_file.h"

namespace dim0 {
namespace {

const char* Name(Phase phase) {
  switch (phase) {
    case Phase::kNone:
      return "";
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kUpdate:
      return "update";
  }
  return "";
}

int64_t Microseconds(absl::Time time) { return absl::ToUnixMicros(time); }

TraceOp ToTrace(const RecordedOp& recorded) {
  TraceOp op = {.name = recorded.info.name,
                .kind = recorded.info.kind,
                .unit = *recorded.unit,
                .phase = Name(recorded.phase),
                .id = recorded.id,
                .step = recorded.step,
                .enqueued = Microseconds(recorded.enqueued),
                .begin = Microseconds(recorded.begin),
                .end = Microseconds(recorded.end),
                .flops = recorded.info.flops,
                .bytes = recorded.info.bytes,
                .failed = recorded.failed};
  const CallRecord& call = recorded.call;
  if (call.calls > 0) {
    // Where ranks did not meet, all of the call was spent on trying to.
    const absl::Time met = std::min(std::max(call.met, recorded.begin), recorded.end);
    op.collective = TraceCollective{
        .operation = call.operation,
        .channel = call.channel,
        .purpose = call.purpose,
        .dtype = call.dtype,
        .sequence = call.sequence,
        .in_elements = call.in_elements,
        .out_elements = call.out_elements,
        .bytes_sent = call.bytes_sent,
        .met = call.met == absl::InfinitePast() ? Microseconds(recorded.end) : Microseconds(met)};
  }
  return op;
}

// Rows in viewers: the numbers that the readers of PyTorch's traces are used to.
int NumberOf(absl::string_view stream, int& next_other) {
  if (stream == "compute") return 7;
  if (stream == "all_gather") return 20;
  if (stream == "reduce_scatter") return 21;
  return next_other++;
}

}  // namespace

RankTrace MakeTrace(const OpRecorder& recorder, RankTrace header, std::vector<TraceStep> steps,
                    const MemoryUse& live) {
  RankTrace trace = std::move(header);
  const int64_t lost = recorder.first_lost_step();
  for (const TraceStep& step : steps) {
    if (step.step < lost) trace.steps.push_back(step);
  }
  if (lost != std::numeric_limits<int64_t>::max()) trace.cut_short = true;
  // Of what was enqueued before the first step, as much as reached into it.
  const TraceStep first = trace.steps.empty() ? TraceStep{} : trace.steps.front();
  const auto belongs = [&](int64_t step, int64_t end) {
    return step < lost && (step >= first.step || end > first.begin);
  };

  int next_other = 22;
  std::vector<RecordedMemory> changes;
  for (const StreamRecord* record : recorder.streams()) {
    TraceStream stream = {.name = record->stream(),
                          .number = NumberOf(record->stream(), next_other)};
    for (const RecordedOp& op : record->ops()) {
      if (belongs(op.step, Microseconds(op.end))) stream.ops.push_back(ToTrace(op));
    }
    for (const RecordedWait& wait : record->waits()) {
      if (!belongs(wait.step, Microseconds(wait.end))) continue;
      stream.waits.push_back({.begin = Microseconds(wait.begin),
                              .end = Microseconds(wait.end),
                              .cause = wait.cause.op,
                              .stream = wait.cause.stream});
    }
    for (const RecordedMemory& change : record->memory()) {
      if (change.step < lost) changes.push_back(change);
    }
    if (!stream.ops.empty()) trace.streams.push_back(std::move(stream));
  }
  std::sort(trace.streams.begin(), trace.streams.end(),
            [](const TraceStream& a, const TraceStream& b) { return a.number < b.number; });

  std::stable_sort(
      changes.begin(), changes.end(),
      [](const RecordedMemory& a, const RecordedMemory& b) { return a.time < b.time; });
  TraceMemory sample = {.time = first.begin, .bytes = live.bytes};
  for (const RecordedMemory& change : changes) {
    const int64_t time = Microseconds(change.time);
    if (time > first.begin) trace.memory.push_back(sample);
    sample.time = std::max(time, first.begin);
    sample.bytes[static_cast<int>(change.purpose)] += change.bytes;
  }
  trace.memory.push_back(sample);
  return trace;
}

void Tracer::BeginStep(int64_t step) {
  if (written_) return;
  recorder_.SetStep(step);
  recorder_.SetRecording(step >= options_.first_step - 1 && step <= options_.last_step);
}

void Tracer::EndStep(int64_t step, absl::Time begin, absl::Time end, std::optional<double> loss) {
  recorder_.SetRecording(false);
  if (written_ || step < options_.first_step || step > options_.last_step) return;
  steps_.push_back({step, Microseconds(begin), Microseconds(end), loss});
}

absl::Status Tracer::Write(const MemoryUse& live) {
  if (written_) return absl::OkStatus();
  written_ = true;
  recorder_.SetRecording(false);
  absl::Status status =
      WriteTrace(options_.dir, MakeTrace(recorder_, std::move(header_), std::move(steps_), live));
  recorder_.Clear();
  return status;
}

void Tracer::GiveUp() {
  written_ = true;
  recorder_.SetRecording(false);
  recorder_.Clear();
}

}  // namespace dim0
