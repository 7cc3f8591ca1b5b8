// One rank's trace as a file that ui.perfetto.dev, chrome://tracing and Holistic Trace Analysis
// read: Chrome trace event JSON as PyTorch's profiler writes it, and what this project adds to it
// where those programs do not look.
//
//   DIR/rank0.json, DIR/rank1.json, ...
//
// <the format, key by key, goes here>
#ifndef DIM0_RUNTIME_TRACE_TRACE_FILE_H_
#define DIM0_RUNTIME_TRACE_TRACE_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/trace/trace.h"

namespace dim0 {

// Makes `dir` if need be; traces that an earlier run left there are moved to dir/previous-N with
// the first free N. Errors: one line, naming the path.
absl::Status PrepareTraceDir(const std::string& dir);

// Writes dir/rankR.json, whole or not at all.
absl::Status WriteTrace(const std::string& dir, const RankTrace& trace);

// All ranks of one run, in rank order, from the files that WriteTrace wrote. Errors, one line each
// that names the file and what to do: NotFound (no such folder, no trace in it, a rank's file
// missing), InvalidArgument (empty, truncated, not JSON, another program's trace, files of
// different runs).
absl::StatusOr<std::vector<RankTrace>> ReadTraces(const std::string& dir);

}  // namespace dim0

#endif  // DIM0_RUNTIME_TRACE_TRACE_FILE_H_
