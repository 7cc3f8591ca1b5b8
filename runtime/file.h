// Files as the runtime needs them: whole or not at all when written, mapped when read.
//
// A file written here appears under its name only once it is complete and on disk; until then its
// bytes sit in a temporary beside it, which every failure removes. Errors are one line: what could
// not be done, the path, and the system's reason.
#ifndef DIM0_RUNTIME_FILE_H_
#define DIM0_RUNTIME_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dim0 {

// Writes one file in pieces and publishes it by Commit(). Destroying (or assigning over) a writer
// that has not committed removes its temporary and leaves any earlier file of that name untouched.
// Movable, not copyable. One thread at a time.
class AtomicFileWriter {
 public:
  // Opens a temporary in path's folder, which must exist. `path` must not exist or be a regular
  // file; if it is a symbolic link, the file it leads to is the one replaced.
  static absl::StatusOr<AtomicFileWriter> Create(absl::string_view path);

  AtomicFileWriter(AtomicFileWriter&& other) noexcept;
  AtomicFileWriter& operator=(AtomicFileWriter&& other) noexcept;
  ~AtomicFileWriter();

  // Adds `data` at the end. Small pieces are collected into large writes. After an error the
  // writer can only be destroyed.
  absl::Status Append(absl::string_view data);

  // Replaces bytes [offset, offset + data.size()), all of which must have been appended: for a
  // header that counts what follows it.
  absl::Status Overwrite(int64_t offset, absl::string_view data);

  // Flushes everything to disk and closes the temporary, so that only the rename is left to
  // Commit(): a set of files can thus be written in full before the first of them appears, without
  // holding a descriptor for each. No Append or Overwrite may follow.
  absl::Status Finish();

  // Finish(), unless done, and rename to the final path.
  absl::Status Commit();

  // Bytes appended so far.
  int64_t size() const { return size_; }
  // The path as it was given to Create().
  const std::string& path() const { return path_; }

 private:
  AtomicFileWriter() = default;
  absl::Status Flush();
  void Abandon();

  std::string path_;       // as given, for messages
  std::string target_;     // path_ with a symbolic link resolved
  std::string temporary_;  // empty once renamed or abandoned
  int fd_ = -1;            // open until Finish()
  int64_t size_ = 0;
  std::string buffer_;  // the tail of the file that has not been written yet
};

// Whether a writer of `target` makes temporaries with names like `name`; both without their folder.
// Where nobody is writing, such a file is what a killed process has left.
bool IsTemporaryOf(absl::string_view name, absl::string_view target);

// Makes `contents` the whole content of `path`, by AtomicFileWriter.
absl::Status WriteFileAtomically(absl::string_view path, absl::string_view contents);

// A regular file mapped read-only; unmapped on destruction. Movable, not copyable; any number of
// threads may read. If another process shortens the file meanwhile, reading past its new end
// raises SIGBUS, as with any mapping.
class MappedFile {
 public:
  // An empty file is allowed and has empty contents. A directory, pipe or device is an error.
  static absl::StatusOr<MappedFile> Open(absl::string_view path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // The bytes, valid for the life of the mapping wherever this object is moved. The first byte is
  // page-aligned.
  absl::string_view contents() const { return contents_; }
  const std::string& path() const { return path_; }

 private:
  MappedFile() = default;
  void Unmap();

  std::string path_;
  absl::string_view contents_;
};

// The paths that match a POSIX glob pattern (*, ?, [...]), sorted bytewise. A path that exists is
// its own only match, whatever characters it has. NotFound if nothing matches, so the result is
// never empty.
absl::StatusOr<std::vector<std::string>> ExpandGlob(absl::string_view pattern);

// Makes the folder `path` and the missing folders above it. Fine if it is there already.
absl::Status MakeDirectories(absl::string_view path);

}  // namespace dim0

#endif  // DIM0_RUNTIME_FILE_H_
