#include "runtime/run_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/printable.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kRunDirFlag = "--run_dir";

constexpr const char* kRunFiles[] = {"metrics.jsonl", "summary.json", "model.safetensors",
                                     "config.json"};
constexpr char kTraceDir[] = "trace";

absl::Status PathError(absl::string_view what, absl::string_view path, absl::string_view why,
                       absl::string_view flag = kRunDirFlag) {
  return absl::UnavailableError(
      absl::StrCat("cannot ", what, " ", path, ": ", why, "; choose another ", flag));
}

absl::Status MakeDir(const std::string& dir, absl::string_view flag) {
  const absl::Status made = MakeDirectories(dir);
  if (made.ok()) return made;
  return absl::Status(made.code(), absl::StrCat(made.message(), "; choose another ", flag));
}

int64_t FreeBytes(const struct statvfs& disk) {
  return static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
}

// What writers of the run's files and of traces have left in `dir` when they were killed. The lock
// keeps others out, so none is at work; what cannot be removed does no harm.
void RemoveAbandonedTemporaries(const std::string& dir) {
  std::error_code error;
  std::vector<fs::path> found;
  fs::directory_iterator entry(dir, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool of_run = std::any_of(std::begin(kRunFiles), std::end(kRunFiles),
                                    [&](const char* file) { return IsTemporaryOf(name, file); });
    // ".rank3.json.tmp.123.0"
    const size_t end = name.find(".tmp.");
    const bool of_trace = end != std::string::npos && name[0] == '.' &&
                          RankOfTraceFile(name.substr(1, end - 1)).has_value();
    if (of_run || of_trace) found.push_back(entry->path());
  }
  for (const fs::path& path : found) fs::remove(path, error);
}

}  // namespace

absl::StatusOr<RunDirLock> RunDirLock::Acquire(const std::string& dir, absl::string_view flag) {
  DIM0_RETURN_IF_ERROR(MakeDir(dir, flag));
  RunDirLock lock;
  lock.fd_ = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Folders that may not be read, and file systems without locks, go unlocked.
  if (lock.fd_ >= 0 && flock(lock.fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return absl::UnavailableError(
        absl::StrCat("another run is writing to ", dir, "; choose another ", flag));
  }
  return lock;
}

RunDirLock::RunDirLock(RunDirLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

RunDirLock::~RunDirLock() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<std::string> MoveAside(const std::string& dir, absl::Span<const std::string> names,
                                      absl::string_view flag) {
  DIM0_RETURN_IF_ERROR(MakeDir(dir, flag));
  // Found out now and not after minutes of setting up.
  if (access(dir.c_str(), W_OK | X_OK) != 0) {
    return PathError("write to", dir, std::strerror(errno), flag);
  }
  std::error_code error;
  // A symbolic link is there even if what it points to is not.
  const auto exists = [&](const fs::path& name) {
    return fs::exists(fs::symlink_status(fs::path(dir) / name, error));
  };
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (exists(name)) found.push_back(name);
  }
  if (found.empty()) return "";
  int n = 1;
  while (exists(absl::StrCat("previous-", n))) ++n;
  const fs::path previous = fs::path(dir) / absl::StrCat("previous-", n);
  DIM0_RETURN_IF_ERROR(MakeDir(previous.string(), flag));
  for (const std::string& name : found) {
    DIM0_RETURN_IF_ERROR(MakeDir((previous / name).parent_path().string(), flag));
    fs::rename(fs::path(dir) / name, previous / name, error);
    if (error) {
      return PathError("move an earlier run's", (fs::path(dir) / name).string(), error.message(),
                       flag);
    }
  }
  return previous.string();
}

std::string TraceFileName(int rank) { return absl::StrCat("rank", rank, ".json"); }

std::optional<int> RankOfTraceFile(absl::string_view file_name) {
  constexpr size_t kBefore = 4, kAfter = 5;  // "rank", ".json"
  int rank;
  if (file_name.size() <= kBefore + kAfter) return std::nullopt;
  const absl::string_view digits = file_name.substr(kBefore, file_name.size() - kBefore - kAfter);
  if (!absl::SimpleAtoi(digits, &rank) || rank < 0) return std::nullopt;
  return TraceFileName(rank) == file_name ? std::optional<int>(rank) : std::nullopt;
}

absl::StatusOr<std::vector<int>> TracedRanksIn(const std::string& dir) {
  std::vector<int> ranks;
  std::error_code error;
  fs::directory_iterator entry(dir, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (const auto rank = RankOfTraceFile(entry->path().filename().string()))
      ranks.push_back(*rank);
  }
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot read the folder ", dir, ": ", error.message()));
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::string PlaceInRunDir(const std::string& run_dir, const std::string& trace_dir) {
  std::error_code error;
  // Without the slash at the end, which would be a component of its own.
  const auto whole = [&](const std::string& dir) {
    const fs::path path = fs::weakly_canonical(fs::absolute(dir, error), error).lexically_normal();
    return path.has_filename() ? path : path.parent_path();
  };
  const fs::path place = whole(trace_dir).lexically_relative(whole(run_dir));
  return error || place.empty() || *place.begin() == ".." ? "" : place.string();
}

absl::Status CheckTraceDir(const std::string& run_dir, const std::string& trace_dir) {
  const fs::path place = PlaceInRunDir(run_dir, trace_dir);
  for (const char* const name : kRunFiles) {
    if (place.empty() || *place.begin() != name) continue;
    return absl::InvalidArgumentError(absl::StrCat("the run's ", name, " is to stand where ",
                                                   trace_dir, " would; choose another --trace"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> PrepareRunDir(const std::string& run_dir,
                                          const std::string& trace_dir) {
  std::vector<std::string> names(std::begin(kRunFiles), std::end(kRunFiles));
  const auto add_traces = [&](const std::string& dir, const fs::path& place) {
    const absl::StatusOr<std::vector<int>> ranks = TracedRanksIn(dir);
    if (!ranks.ok() || access(dir.c_str(), W_OK | X_OK) != 0) return;
    for (const int rank : *ranks) names.push_back((place / TraceFileName(rank)).string());
  };
  const fs::path place = trace_dir.empty() ? "" : PlaceInRunDir(run_dir, trace_dir);
  add_traces(run_dir, "");
  if (!place.empty() && *place.begin() == kTraceDir) {
    add_traces((fs::path(run_dir) / kTraceDir).string(), kTraceDir);
  } else {
    names.emplace_back(kTraceDir);
  }
  if (!place.empty() && place != "." && place != kTraceDir) add_traces(trace_dir, place);
  DIM0_ASSIGN_OR_RETURN(const std::string previous, MoveAside(run_dir, names, kRunDirFlag));
  RemoveAbandonedTemporaries(run_dir);
  if (!trace_dir.empty()) RemoveAbandonedTemporaries(trace_dir);
  return previous;
}

absl::Status CheckFreeSpace(const std::string& run_dir, int64_t bytes) {
  struct statvfs disk;
  struct rlimit limit;
  if (statvfs(run_dir.c_str(), &disk) != 0 || getrlimit(RLIMIT_FSIZE, &limit) != 0) {
    return PathError("tell how much fits into", run_dir, std::strerror(errno));
  }
  const int64_t free = FreeBytes(disk);
  if (free < bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(run_dir, " has ", FormatBytes(free), " free and the weights take ",
                     FormatBytes(bytes), "; make room or choose another --run_dir"));
  }
  if (limit.rlim_cur != RLIM_INFINITY && static_cast<double>(limit.rlim_cur) < bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("files may be ", FormatBytes(limit.rlim_cur), " long and the weights take ",
                     FormatBytes(bytes), "; raise the limit (ulimit -f)"));
  }
  return absl::OkStatus();
}

absl::Status CheckFreeSpaceForTrace(const std::string& trace_dir, int64_t trace_bytes,
                                    const std::string& run_dir, int64_t weight_bytes) {
  struct stat trace, run;
  struct statvfs disk;
  // Where that cannot be told, writing will.
  if (stat(trace_dir.c_str(), &trace) != 0 || stat(run_dir.c_str(), &run) != 0 ||
      trace.st_dev != run.st_dev || statvfs(trace_dir.c_str(), &disk) != 0) {
    return absl::OkStatus();
  }
  const int64_t free = FreeBytes(disk);
  if (free - weight_bytes >= trace_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(trace_dir, " has ", FormatBytes(free), " free, the weights will take ",
                   FormatBytes(weight_bytes), " and the trace would take about ",
                   FormatBytes(trace_bytes), "; make room or choose another --trace"));
}

absl::StatusOr<JsonLinesFile> JsonLinesFile::Create(const std::string& path) {
  const int fd = open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return PathError("create", path, std::strerror(errno));
  return JsonLinesFile(path, fd);
}

JsonLinesFile::JsonLinesFile(JsonLinesFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

JsonLinesFile::~JsonLinesFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status JsonLinesFile::Append(absl::string_view json) {
  const std::string line = absl::StrCat(json, "\n");
  const off_t before = lseek(fd_, 0, SEEK_END);
  ssize_t written;
  do {
    written = write(fd_, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(line.size())) return absl::OkStatus();
  const std::string why = written < 0 ? std::strerror(errno) : "the disk is full";
  if (written > 0 && ftruncate(fd_, before) != 0) {
    return PathError("take back half a line of", path_, std::strerror(errno));
  }
  return PathError("write", path_, why);
}

}  // namespace dim0
