// What a traced run did, rank by rank, in memory: made by the recorder (runtime/op_recorder.h),
// written and read by trace_file.h, added up by trace_report.h. Plain values. All times are integer
// microseconds since the epoch, by one clock of the machine; a duration of 0 is less than a
// microsecond.
#ifndef DIM0_RUNTIME_TRACE_TRACE_H_
#define DIM0_RUNTIME_TRACE_TRACE_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "collectives/dtype.h"
#include "collectives/ledger.h"
#include "runtime/memory_purpose.h"
#include "runtime/stream.h"

namespace dim0 {

// What only a collective has.
struct TraceCollective {
  std::string operation;  // "all_gather", "reduce_scatter", "all_to_all", ...
  std::string channel;    // the communicator's name
  Purpose purpose = Purpose::kControl;
  DType dtype = DType::kByte;
  int64_t sequence = 0;      // of the call on its channel, from 1; the same on every rank
  int64_t in_elements = 0;   // what this rank brought
  int64_t out_elements = 0;  // what it got
  int64_t bytes_sent = 0;    // as the ledger counts them
  // When the last rank had arrived. Before it the rank waited for others; after it data moved.
  int64_t met = 0;

  bool operator==(const TraceCollective&) const = default;
};

// An op that ran on a stream.
struct TraceOp {
  std::string name;
  OpKind kind = OpKind::kCompute;
  std::string unit;   // of the model; empty where the op serves no single one
  std::string phase;  // "forward", "backward" or "update"; empty outside of a step's three
  int64_t id = 0;     // from 1, in the order of enqueueing, unique in its rank
  int64_t step = 0;   // in which it was enqueued
  int64_t enqueued = 0, begin = 0, end = 0;
  double flops = 0, bytes = 0;  // as in OpInfo
  // Of the call that a kCollective op made; none if it made none. One that made several has the
  // purpose and times of the first to last, and their sums.
  std::optional<TraceCollective> collective;
  bool failed = false;

  bool communicates() const { return kind == OpKind::kCollective; }

  bool operator==(const TraceOp&) const = default;
};

// Time in which a stream had to wait for another before its next op.
struct TraceWait {
  int64_t begin = 0, end = 0;
  int64_t cause = 0;   // id of the op, of another stream, that it waited for last; 0: not traced
  std::string stream;  // of that op

  bool operator==(const TraceWait&) const = default;
};

struct TraceStream {
  std::string name;  // "compute", "all_gather", "reduce_scatter", "optimizer", "muon_gather", ...
  int number = 0;  // its row in trace viewers: 7 compute, 20 all_gather, 21 reduce_scatter, 22 and
                   // up the optimizer's and others; unique in its rank
  std::vector<TraceOp> ops;  // in the order in which they ran; they do not overlap
  std::vector<TraceWait> waits;

  bool operator==(const TraceStream&) const = default;
};

// One optimizer step as the training loop saw it. Steps are contiguous, except where the loop did
// something else between them (validation, say).
struct TraceStep {
  int64_t step = 0;
  int64_t begin = 0, end = 0;
  std::optional<double> loss;  // as the run's log has it

  bool operator==(const TraceStep&) const = default;
};

// Bytes that hold live data, by purpose, from `time` on.
struct TraceMemory {
  int64_t time = 0;
  std::array<int64_t, kNumMemoryPurposes> bytes{};

  bool operator==(const TraceMemory&) const = default;
};

// One rank's trace: whole steps, every op that was enqueued in them, some of which may run on after
// the last, and those of the step before that still ran in the first.
struct RankTrace {
  int rank = 0;
  int world_size = 1;
  std::string backend;  // of the collectives, as HTA names them: "gloo" for CPU memory
  // What was trained: equal for two runs of one model.
  std::string model;                         // a fingerprint of names and shapes
  int64_t parameters = 0;                    // their elements
  std::map<std::string, std::string> flags;  // of the program: "optimizer" -> "rmnp", ...
  // The run's metrics.jsonl, relative to the trace's folder; empty if there is none.
  std::string metrics;
  // The recorder was full, or the run failed or was stopped: later steps, of those that were to be
  // traced, are missing.
  bool cut_short = false;

  std::vector<TraceStream> streams;  // by number
  std::vector<TraceStep> steps;      // ascending
  std::vector<TraceMemory> memory;   // ascending

  bool operator==(const RankTrace&) const = default;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_TRACE_TRACE_H_
