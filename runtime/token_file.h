// Token files: text already turned into token ids, in the format of llm.c.
//
// All numbers are little-endian. Byte by byte:
//
//   offset  size  what
//        0     4  magic: 20240520 (uint16 tokens) or 20240801 (uint32 tokens), int32
//        4     4  version: 1 for uint16 tokens, 7 for uint32 tokens, int32
//        8     4  number of tokens n, int32, so at most 2^31 - 1 to a file
//       12  1012  unused, written as zeros
//     1024   w*n  the tokens, w = 2 or 4 bytes each; the file ends here
//
// For example the three tokens 72, 105, 33 as uint16 are 1030 bytes that begin with
// 88 d8 34 01  01 00 00 00  03 00 00 00 and end with 48 00 69 00 21 00.
//
// A larger text is cut into several files ("shards"), NAME_000000.bin, NAME_000001.bin, and so on,
// which are read in name order.
#ifndef DIM0_RUNTIME_TOKEN_FILE_H_
#define DIM0_RUNTIME_TOKEN_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/file.h"

namespace dim0 {

// The header's count is an int32.
inline constexpr int64_t kMaxTokensPerFile = 2'147'483'647;

// How a file stores its tokens.
enum class TokenType : uint8_t { kUint16, kUint32 };

constexpr int64_t SizeOf(TokenType type) { return type == TokenType::kUint16 ? 2 : 4; }
constexpr absl::string_view Name(TokenType type) {
  return type == TokenType::kUint16 ? "uint16" : "uint32";
}

// Whether `contents` begins with the magic and version of a token file, whatever its name is.
bool LooksLikeTokenFile(absl::string_view contents);

// A token file, mapped and its header checked. Movable; any number of threads may read.
class TokenFile {
 public:
  // Errors name the file, the byte offset, and what was found and expected there: a header cut
  // short, an unknown magic, a wrong version, a count that is negative or zero, or a size other
  // than the count asks for. The tokens themselves are not looked at: see CheckVocabulary().
  static absl::StatusOr<TokenFile> Open(absl::string_view path);

  const std::string& path() const { return file_.path(); }
  TokenType type() const { return type_; }
  // Number of tokens, at least 1.
  int64_t size() const { return size_; }
  // The token at 0 <= index < size().
  uint32_t token(int64_t index) const;

  // Copies tokens [begin, begin + out.size()) to `out`. The range must lie in the file and every
  // token below 2^31, as any vocabulary that passed CheckVocabulary() has them.
  void Read(int64_t begin, absl::Span<int32_t> out) const;

  // The largest token. Reads the whole file, at about the speed of memory.
  uint32_t MaxToken() const;

  // OK if every token is below `vocabulary`, 1 <= vocabulary <= 2^31. The error gives the first
  // that is not, where it is, and the vocabulary that this file needs.
  absl::Status CheckVocabulary(int64_t vocabulary) const;

 private:
  TokenFile(MappedFile file, TokenType type, int64_t size)
      : file_(std::move(file)), type_(type), size_(size) {}
  // The tokens as they lie in the mapping, for the type that type() names.
  absl::Span<const uint16_t> tokens16() const;
  absl::Span<const uint32_t> tokens32() const;

  MappedFile file_;
  TokenType type_;
  int64_t size_;
};

// Writes a stream of tokens as shards DIRECTORY/NAME_000000.bin, ... of `shard_tokens` tokens each,
// the last one shorter. No shard appears under its name before Commit(), when all of them are on
// disk; until then destroying the writer leaves nothing behind. Movable, not copyable.
class TokenShardWriter {
 public:
  // `directory` must exist. `shard_tokens` is in [1, kMaxTokensPerFile].
  static absl::StatusOr<TokenShardWriter> Create(absl::string_view directory,
                                                 absl::string_view name, TokenType type,
                                                 int64_t shard_tokens);

  // Adds tokens at the end; each must fit `type`.
  absl::Status Append(absl::Span<const uint32_t> tokens);

  // Publishes the shards and returns their paths in order. At least one token must have been
  // appended. Refused, with nothing published, if the directory already holds the shard that would
  // come after the last one: a glob would read an earlier run's tokens behind the new ones.
  absl::StatusOr<std::vector<std::string>> Commit();

  // Tokens appended so far.
  int64_t size() const { return size_; }

 private:
  TokenShardWriter(absl::string_view directory, absl::string_view name, TokenType type,
                   int64_t shard_tokens);
  absl::Status StartShard();
  absl::Status FinishShard();
  std::string ShardPath(size_t index) const;

  std::string directory_;
  std::string name_;
  TokenType type_;
  int64_t shard_tokens_;
  int64_t size_ = 0;
  std::vector<AtomicFileWriter> finished_;  // on disk, waiting for Commit()
  std::optional<AtomicFileWriter> open_;    // being filled
  int64_t open_tokens_ = 0;
};

// Writes all of `tokens`, at least one, as the one file `path`.
absl::Status WriteTokenFile(absl::string_view path, TokenType type,
                            absl::Span<const uint32_t> tokens);

}  // namespace dim0

#endif  // DIM0_RUNTIME_TOKEN_FILE_H_
