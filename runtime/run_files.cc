#include "runtime/run_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/file.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRunFiles[] = {"metrics.jsonl", "summary.json", "model.safetensors",
                                     "config.json"};

absl::Status PathError(absl::string_view what, absl::string_view path, absl::string_view why) {
  return absl::UnavailableError(
      absl::StrCat("cannot ", what, " ", path, ": ", why, "; choose another --run_dir"));
}

}  // namespace

absl::StatusOr<std::string> PrepareRunDir(const std::string& run_dir) {
  if (const absl::Status made = MakeDirectories(run_dir); !made.ok()) {
    return absl::Status(made.code(), absl::StrCat(made.message(), "; choose another --run_dir"));
  }
  std::error_code error;
  std::vector<std::string> found;
  for (const char* name : kRunFiles) {
    if (fs::exists(fs::path(run_dir) / name, error)) found.push_back(name);
  }
  if (found.empty()) return "";
  int n = 1;
  while (fs::exists(fs::path(run_dir) / absl::StrCat("previous-", n), error)) ++n;
  const fs::path previous = fs::path(run_dir) / absl::StrCat("previous-", n);
  DIM0_RETURN_IF_ERROR(MakeDirectories(previous.string()));
  for (const std::string& name : found) {
    fs::rename(fs::path(run_dir) / name, previous / name, error);
    if (error)
      return PathError("move an earlier run's", (fs::path(run_dir) / name).string(),
                       error.message());
  }
  return previous.string();
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
