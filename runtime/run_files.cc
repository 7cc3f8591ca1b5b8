#include "runtime/run_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/check.h"
#include "runtime/file.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kRunDirFlag = "--run_dir";

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

}  // namespace

absl::StatusOr<RunDirLock> RunDirLock::Acquire(const std::string& run_dir) {
  DIM0_RETURN_IF_ERROR(MakeDir(run_dir, kRunDirFlag));
  RunDirLock lock;
  lock.fd_ = open(run_dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Folders that may not be read, and file systems without locks, go unlocked.
  if (lock.fd_ >= 0 && flock(lock.fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return absl::UnavailableError(
        absl::StrCat("another run is writing to ", run_dir, "; choose another --run_dir"));
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
    fs::rename(fs::path(dir) / name, previous / name, error);
    if (error) {
      return PathError("move an earlier run's", (fs::path(dir) / name).string(), error.message(),
                       flag);
    }
  }
  return previous.string();
}

absl::StatusOr<std::string> PrepareRunDir(const std::string& run_dir) {
  return MoveAside(run_dir,
                   {"metrics.jsonl", "summary.json", "model.safetensors", "config.json", "trace"},
                   kRunDirFlag);
}

absl::Status CheckFreeSpace(const std::string& run_dir, int64_t bytes) {
  struct statvfs disk;
  struct rlimit limit;
  if (statvfs(run_dir.c_str(), &disk) != 0 || getrlimit(RLIMIT_FSIZE, &limit) != 0) {
    return PathError("tell how much fits into", run_dir, std::strerror(errno));
  }
  const double free = static_cast<double>(disk.f_bavail) * disk.f_frsize;
  if (free < bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s has %.1f MiB free and the weights take %.1f MiB; make room or choose another --run_dir",
        run_dir, free / 1048576.0, bytes / 1048576.0));
  }
  if (limit.rlim_cur != RLIM_INFINITY && static_cast<double>(limit.rlim_cur) < bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "files may be %.1f MiB long and the weights take %.1f MiB; raise the limit (ulimit -f)",
        limit.rlim_cur / 1048576.0, bytes / 1048576.0));
  }
  return absl::OkStatus();
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
