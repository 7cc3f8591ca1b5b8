#include "runtime/file.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"

namespace dim0 {
namespace {

// Pieces smaller than this are collected before they are written.
constexpr size_t kBufferBytes = size_t{1} << 18;

// `error` is taken as an argument because making the message may itself change errno.
absl::Status SystemError(int error, absl::string_view action, absl::string_view path) {
  return absl::ErrnoToStatus(error, absl::StrCat("cannot ", action, " ", path));
}

// What to call something that is neither missing nor a regular file.
absl::string_view KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "is a directory";
  return "is not a regular file";
}

std::string FolderOf(absl::string_view path) {
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  if (slash == 0) return "/";
  return std::string(path.substr(0, slash));
}

// With which the names of a file's temporaries begin.
std::string TemporaryPrefix(absl::string_view name) {
  return absl::StrCat(".", name.substr(0, 160), ".tmp.");
}

// A hidden name in target's folder that no other process, and no other writer of this one, uses.
// The file's own name is in it so that a leftover of a killed run can be recognised, but shortened
// so that the result fits where the final name fits.
std::string TemporaryName(const std::string& target) {
  static std::atomic<uint64_t> counter{0};
  const size_t slash = target.rfind('/');
  const size_t base = slash == std::string::npos ? 0 : slash + 1;
  return absl::StrCat(target.substr(0, base), TemporaryPrefix(target.substr(base)), ::getpid(), ".",
                      counter.fetch_add(1, std::memory_order_relaxed));
}

int OpenRetryingOnSignal(const char* path, int flags, mode_t mode) {
  int fd;
  do {
    fd = ::open(path, flags, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

absl::Status WriteAll(int fd, absl::string_view data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t written = ::write(fd, data.data(), data.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return SystemError(errno, "write", path);
    }
    data.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// Makes a rename in `folder` durable. Some file systems cannot sync a folder and say so with
// EINVAL or ENOTSUP; there the rename is as durable as it gets.
absl::Status SyncFolder(const std::string& folder) {
  const int fd = OpenRetryingOnSignal(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  // A folder that may be written but not read (mode -wx) cannot be opened to be synced.
  if (fd < 0) return errno == EACCES ? absl::OkStatus() : SystemError(errno, "open", folder);
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0 && error != EINVAL && error != ENOTSUP) return SystemError(error, "sync", folder);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AtomicFileWriter> AtomicFileWriter::Create(absl::string_view path) {
  AtomicFileWriter writer;
  writer.path_ = std::string(path);
  writer.target_ = writer.path_;
  if (path.empty()) return absl::InvalidArgumentError("cannot write a file with an empty name");

  struct stat info;
  if (::stat(writer.path_.c_str(), &info) == 0) {
    // Renaming over a device or a pipe would replace it, which nobody means.
    if (!S_ISREG(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot write ", path, ": it ", KindOf(info.st_mode)));
    }
    if (char* resolved = ::realpath(writer.path_.c_str(), nullptr)) {
      writer.target_ = resolved;
      std::free(resolved);
    }
  } else if (errno != ENOENT) {
    return SystemError(errno, "write", path);
  } else if (path.back() == '/') {
    return absl::InvalidArgumentError(absl::StrCat("cannot write ", path, ": no file name"));
  }

  do {  // EEXIST: left over from a killed run, or another machine's on a shared file system
    writer.temporary_ = TemporaryName(writer.target_);
    writer.fd_ = OpenRetryingOnSignal(writer.temporary_.c_str(),
                                      O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (writer.fd_ < 0 && errno == EEXIST);
  if (writer.fd_ < 0) {
    const int error = errno;
    writer.temporary_.clear();
    return SystemError(error, "write", path);
  }
  return writer;
}

AtomicFileWriter::AtomicFileWriter(AtomicFileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      size_(std::exchange(other.size_, 0)),
      buffer_(std::exchange(other.buffer_, {})) {}

AtomicFileWriter& AtomicFileWriter::operator=(AtomicFileWriter&& other) noexcept {
  if (this != &other) {
    Abandon();
    path_ = std::move(other.path_);
    target_ = std::move(other.target_);
    temporary_ = std::exchange(other.temporary_, {});
    fd_ = std::exchange(other.fd_, -1);
    size_ = std::exchange(other.size_, 0);
    buffer_ = std::exchange(other.buffer_, {});
  }
  return *this;
}

AtomicFileWriter::~AtomicFileWriter() { Abandon(); }

void AtomicFileWriter::Abandon() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!temporary_.empty()) ::unlink(std::exchange(temporary_, {}).c_str());
  buffer_.clear();
}

absl::Status AtomicFileWriter::Flush() {
  absl::Status status = WriteAll(fd_, buffer_, path_);
  buffer_.clear();
  return status;
}

absl::Status AtomicFileWriter::Append(absl::string_view data) {
  if (fd_ < 0) return absl::FailedPreconditionError(absl::StrCat(path_, ": already finished"));
  size_ += static_cast<int64_t>(data.size());
  absl::Status status;
  if (buffer_.size() + data.size() > kBufferBytes) status = Flush();
  if (status.ok()) {
    if (data.size() >= kBufferBytes) {
      status = WriteAll(fd_, data, path_);
    } else {
      buffer_.append(data.data(), data.size());
    }
  }
  if (!status.ok()) Abandon();
  return status;
}

absl::Status AtomicFileWriter::Overwrite(int64_t offset, absl::string_view data) {
  if (fd_ < 0) return absl::FailedPreconditionError(absl::StrCat(path_, ": already finished"));
  if (offset < 0 || offset > size_ || static_cast<int64_t>(data.size()) > size_ - offset) {
    return absl::OutOfRangeError(absl::StrCat(path_, ": cannot overwrite ", data.size(),
                                              " bytes at ", offset, ": ", size_, " are written"));
  }
  absl::Status status = Flush();
  while (status.ok() && !data.empty()) {
    const ssize_t written = ::pwrite(fd_, data.data(), data.size(), offset);
    if (written < 0) {
      if (errno == EINTR) continue;
      status = SystemError(errno, "write", path_);
      break;
    }
    offset += written;
    data.remove_prefix(static_cast<size_t>(written));
  }
  if (!status.ok()) Abandon();
  return status;
}

absl::Status AtomicFileWriter::Finish() {
  if (fd_ < 0) return absl::FailedPreconditionError(absl::StrCat(path_, ": already finished"));
  absl::Status status = Flush();
  if (status.ok() && ::fsync(fd_) != 0) status = SystemError(errno, "write", path_);
  // A network file system may report a failed write only now.
  if (::close(std::exchange(fd_, -1)) != 0 && status.ok()) {
    status = SystemError(errno, "write", path_);
  }
  if (!status.ok()) Abandon();
  return status;
}

absl::Status AtomicFileWriter::Commit() {
  if (temporary_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(path_, ": already committed or failed"));
  }
  if (fd_ >= 0) {
    DIM0_RETURN_IF_ERROR(Finish());
  }
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
    const int error = errno;
    Abandon();
    return SystemError(error, "write", path_);
  }
  temporary_.clear();
  return SyncFolder(FolderOf(target_));
}

bool IsTemporaryOf(absl::string_view name, absl::string_view target) {
  return absl::StartsWith(name, TemporaryPrefix(target));
}

absl::Status WriteFileAtomically(absl::string_view path, absl::string_view contents) {
  DIM0_ASSIGN_OR_RETURN(AtomicFileWriter writer, AtomicFileWriter::Create(path));
  DIM0_RETURN_IF_ERROR(writer.Append(contents));
  return writer.Commit();
}

absl::StatusOr<MappedFile> MappedFile::Open(absl::string_view path) {
  MappedFile file;
  file.path_ = std::string(path);
  // O_NONBLOCK: opening a pipe must not wait for its writer. It has no effect on a regular file.
  const int fd = OpenRetryingOnSignal(file.path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd < 0) return SystemError(errno, "open", path);

  struct stat info;
  absl::Status status;
  if (::fstat(fd, &info) != 0) {
    status = SystemError(errno, "read", path);
  } else if (!S_ISREG(info.st_mode)) {
    status = absl::FailedPreconditionError(
        absl::StrCat("cannot read ", path, ": it ", KindOf(info.st_mode)));
  } else if (info.st_size > 0) {  // mmap refuses a length of 0
    const size_t bytes = static_cast<size_t>(info.st_size);
    void* address = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (address == MAP_FAILED) {
      status = SystemError(errno, "map", path);
    } else {
      file.contents_ = absl::string_view(static_cast<const char*>(address), bytes);
    }
  }
  ::close(fd);  // the mapping keeps the file
  if (!status.ok()) return status;
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), contents_(std::exchange(other.contents_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    Unmap();
    path_ = std::move(other.path_);
    contents_ = std::exchange(other.contents_, {});
  }
  return *this;
}

MappedFile::~MappedFile() { Unmap(); }

void MappedFile::Unmap() {
  if (!contents_.empty()) ::munmap(const_cast<char*>(contents_.data()), contents_.size());
  contents_ = {};
}

absl::StatusOr<std::vector<std::string>> ExpandGlob(absl::string_view pattern) {
  const std::string text(pattern);
  struct stat info;
  if (::stat(text.c_str(), &info) == 0) return std::vector<std::string>{text};
  if (pattern.find_first_of("*?[") == absl::string_view::npos) {
    return SystemError(errno, "open", pattern);
  }

  glob_t found = {};
  const int result = ::glob(text.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (result == GLOB_NOSPACE) {
    return absl::ResourceExhaustedError(absl::StrCat("out of memory expanding ", pattern));
  }
  if (result != 0 || paths.empty()) {
    return absl::NotFoundError(absl::StrCat("no file matches ", pattern));
  }
  std::sort(paths.begin(), paths.end());  // glob's own order depends on the locale
  return paths;
}

absl::Status MakeDirectories(absl::string_view path) {
  std::error_code error;
  std::filesystem::create_directories(std::string(path), error);
  if (error) return SystemError(error.value(), "make the folder", path);
  return absl::OkStatus();
}

}  // namespace dim0
