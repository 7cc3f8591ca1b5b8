// One rank's trace as a file that ui.perfetto.dev, chrome://tracing and Holistic Trace Analysis
// (HTA) read: Chrome trace event JSON as PyTorch's profiler writes it, and what this project adds
// to it where those programs do not look.
//
//   DIR/rank0.json, DIR/rank1.json, ...
//
// ASCII throughout; bytes of a name that are not UTF-8 become U+FFFD. Times ("ts", "dur", "met")
// are integer microseconds, since the epoch where they are not durations. The file is one object:
//
//   schemaVersion        1
//   distributedInfo      {"backend": B, "rank": R, "world_size": W}: before the first event and
//   with
//                        a space after each colon, or HTA takes every file for rank 0's
//   displayTimeUnit      "ms"
//   baseTimeNanoseconds  0: times are absolute
//   traceName            the file's own name
//   dim0                 what only ReadTraces looks at, before the first event:
//     format             1; a reader refuses what is newer than itself
//     model, parameters, metrics, cut_short, flags
//                        as in RankTrace; flags is an object of strings
//     streams            [{"name": ..., "number": ...}, ...] in RankTrace's order
//   traceEvents          [...], of which every event has "pid": R
//
// Events, by "ph" and "cat", with their "tid", and their "args" in braces:
//
//   M                    names of the process (rank R), of row 1 (host) and of the streams' rows,
//   and
//                        the order in which to show them
//   X user_annotation    a step, on the host row, "ProfilerStep#N" {step, loss if it is known}. One
//                        more, empty and without args, comes after the last step and the last
//                        launch, because HTA drops the last and what was launched from then on
//   C memory             {bytes by memory purpose}, from ts on
//   X kernel             an op, on its stream's row {stream, correlation, kind, unit, phase, step,
//                        enqueued, flops, bytes, and "failed": true where it did}. stream and
//                        correlation are the stream's number and the op's id, which HTA knows by
//                        those names. A collective's event is named "ncclKernel_" and its
//                        operation, because every HTA tells communication from computation by that;
//                        its {op} is the op's own name, and if it made a call there are
//                        {"Collective name", "Process Group Name", "Process Group Ranks", "Group
//                        size", dtype, Seq, "In msg nelems", "Out msg nelems"}, as PyTorch has
//                        them, the group's name being the channel, and {purpose, "bytes sent", met}
//   X cuda_runtime       "cudaLaunchKernel" {correlation}, on the host row, of length 0, when the
//   op
//                        of that id was enqueued
//   s, f ac2g            the arrow from there to the op; "id" is the op's
//   X wait               on the waiting stream's row {cause, "cause stream"}. No {stream}, or HTA
//                        would take it for computation
#ifndef DIM0_RUNTIME_TRACE_TRACE_FILE_H_
#define DIM0_RUNTIME_TRACE_TRACE_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/trace/trace.h"

namespace dim0 {

// Makes `dir` if need be; traces that an earlier run left there are moved to dir/previous-N with
// the first free N, and what a killed run left of one is removed: the caller holds the folder's
// lock (run_files.h). Errors: one line, naming the path.
absl::Status PrepareTraceDir(const std::string& dir);

// Writes dir/rankR.json, whole or not at all. Thread-safe for different ranks.
absl::Status WriteTrace(const std::string& dir, const RankTrace& trace);

// The folder that ReadTraces(dir) reads and RankTrace::metrics is relative to: `dir`, or, if that
// is a run's folder with no trace of its own but a folder "trace" in it, dir/trace.
std::string TraceDirOf(const std::string& dir);

// All ranks of one run, in rank order, from the files that WriteTrace wrote to TraceDirOf(dir).
// Equal to what was written, but for names that are not UTF-8, and for steps that only some ranks
// have because others were cut short: those are left out. Errors, one line each that names the
// file and what to do: NotFound (no such folder, no trace in it, a rank's file missing or
// compressed),
// InvalidArgument (not a folder, or a file that is empty, truncated, damaged, not JSON, another
// program's, a newer version's, another rank's or of a different run).
absl::StatusOr<std::vector<RankTrace>> ReadTraces(const std::string& dir);

}  // namespace dim0

#endif  // DIM0_RUNTIME_TRACE_TRACE_FILE_H_
