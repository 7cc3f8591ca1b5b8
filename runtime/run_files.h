// The files of a run folder.
#ifndef DIM0_RUNTIME_RUN_FILES_H_
#define DIM0_RUNTIME_RUN_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dim0 {

// Keeps other processes' runs out of a folder until it is destroyed or the process ends.
class RunDirLock {
 public:
  // Makes `dir` if need be. Unavailable if another run holds it, with the advice to choose another
  // `flag`. Where the file system has no locks, every run gets one.
  static absl::StatusOr<RunDirLock> Acquire(const std::string& dir,
                                            absl::string_view flag = "--run_dir");
  ~RunDirLock();
  RunDirLock(RunDirLock&& other) noexcept;
  RunDirLock& operator=(RunDirLock&&) = delete;

 private:
  RunDirLock() = default;
  int fd_ = -1;
};

// Makes `dir` if need be, and moves those of `names`, paths relative to it, that are there to
// dir/previous-N with the first free N. Returns where they went, or "". An error ends in advice to
// choose another `flag`.
absl::StatusOr<std::string> MoveAside(const std::string& dir, absl::Span<const std::string> names,
                                      absl::string_view flag);

// "rank0.json": the trace of a rank; and the rank of such a name, if it is one.
std::string TraceFileName(int rank);
std::optional<int> RankOfTraceFile(absl::string_view file_name);

// The ranks that have a trace in `dir`, ascending.
absl::StatusOr<std::vector<int>> TracedRanksIn(const std::string& dir);

// Where `trace_dir` is in the run folder: "trace", "." for the run folder itself; "" for a folder
// outside.
std::string PlaceInRunDir(const std::string& run_dir, const std::string& trace_dir);

// InvalidArgument if a run in `run_dir` writes another file where its traces are to go.
absl::Status CheckTraceDir(const std::string& run_dir, const std::string& trace_dir);

// MoveAside for what an earlier run left in a run folder: its files, the folder "trace", and the
// traces in the run folder itself and in `trace_dir`, if that is inside. `trace_dir`, which may be
// "" or not exist, stays in its place; what keeps its traces there is no error.
// Removes, of such files, the temporaries that a killed run has left.
absl::StatusOr<std::string> PrepareRunDir(const std::string& run_dir,
                                          const std::string& trace_dir = "");

// ResourceExhausted if the file system of `run_dir` has fewer than `bytes` free, or the process may
// not write a file of that size.
absl::Status CheckFreeSpace(const std::string& run_dir, int64_t bytes);

// ResourceExhausted if a trace of `trace_bytes` in `trace_dir` would leave fewer than
// `weight_bytes` free on the file system of `run_dir`.
absl::Status CheckFreeSpaceForTrace(const std::string& trace_dir, int64_t trace_bytes,
                                    const std::string& run_dir, int64_t weight_bytes);

// Appends lines, each with one write, so that the file ends in a whole line whenever the process
// ends.
class JsonLinesFile {
 public:
  static absl::StatusOr<JsonLinesFile> Create(const std::string& path);
  ~JsonLinesFile();
  JsonLinesFile(JsonLinesFile&& other) noexcept;
  JsonLinesFile& operator=(JsonLinesFile&&) = delete;

  // `json` without line ends. A full disk is an error; a line that did not fit is taken back.
  absl::Status Append(absl::string_view json);

 private:
  JsonLinesFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::string path_;
  int fd_ = -1;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_RUN_FILES_H_
