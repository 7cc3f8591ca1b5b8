#include "runtime/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/check.h"

namespace dim0 {
namespace {

static_assert(std::endian::native == std::endian::little,
              "token files are little-endian and are read in place");

constexpr int64_t kHeaderInts = 256;
constexpr int64_t kHeaderBytes = kHeaderInts * 4;

constexpr int32_t kMagic16 = 20240520;
constexpr int32_t kMagic32 = 20240801;
constexpr int32_t kVersion16 = 1;
constexpr int32_t kVersion32 = 7;

int32_t HeaderInt(absl::string_view contents, int64_t index) {
  int32_t value;
  std::memcpy(&value, contents.data() + index * 4, sizeof(value));
  return value;
}

std::string Header(TokenType type, int64_t tokens) {
  std::array<int32_t, kHeaderInts> header = {};
  header[0] = type == TokenType::kUint16 ? kMagic16 : kMagic32;
  header[1] = type == TokenType::kUint16 ? kVersion16 : kVersion32;
  header[2] = static_cast<int32_t>(tokens);
  return std::string(reinterpret_cast<const char*>(header.data()), kHeaderBytes);
}

// Tokens scanned between two looks at the result: a fixed count that the compiler vectorizes, small
// enough that the place of an offender is found at once.
constexpr int64_t kScanBlock = 4096;

template <typename Token>
Token MaxOfBlock(const Token* tokens) {
  Token largest = 0;
  for (int64_t i = 0; i < kScanBlock; ++i) largest = std::max(largest, tokens[i]);
  return largest;
}

template <typename Token>
uint32_t MaxOf(absl::Span<const Token> tokens) {
  const int64_t size = static_cast<int64_t>(tokens.size());
  Token largest = 0;
  int64_t i = 0;
  for (; i + kScanBlock <= size; i += kScanBlock) {
    largest = std::max(largest, MaxOfBlock(&tokens[i]));
  }
  for (; i < size; ++i) largest = std::max(largest, tokens[i]);
  return largest;
}

// The index of the first token >= limit, or -1.
template <typename Token>
int64_t FirstAtLeast(absl::Span<const Token> tokens, int64_t limit) {
  const int64_t size = static_cast<int64_t>(tokens.size());
  int64_t i = 0;
  while (i + kScanBlock <= size && MaxOfBlock(&tokens[i]) < limit) i += kScanBlock;
  for (; i < size; ++i) {
    if (tokens[i] >= limit) return i;
  }
  return -1;
}

// Appends `tokens`, all of which fit `Stored`, to `file`.
template <typename Stored>
absl::Status AppendAs(absl::Span<const uint32_t> tokens, AtomicFileWriter& file) {
  std::vector<Stored> piece;
  constexpr size_t kPiece = size_t{1} << 16;
  while (!tokens.empty()) {
    const size_t count = std::min(kPiece, tokens.size());
    piece.assign(tokens.begin(), tokens.begin() + count);
    DIM0_RETURN_IF_ERROR(file.Append(
        absl::string_view(reinterpret_cast<const char*>(piece.data()), count * sizeof(Stored))));
    tokens.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status AppendTokens(absl::Span<const uint32_t> tokens, TokenType type,
                          AtomicFileWriter& file) {
  if (type == TokenType::kUint32) return AppendAs<uint32_t>(tokens, file);
  const auto bad =
      std::find_if(tokens.begin(), tokens.end(), [](uint32_t t) { return t > 0xffff; });
  if (bad != tokens.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path(), ": token ", *bad, " does not fit in uint16"));
  }
  return AppendAs<uint16_t>(tokens, file);
}

}  // namespace

bool LooksLikeTokenFile(absl::string_view contents) {
  if (contents.size() < 8) return false;
  const int32_t magic = HeaderInt(contents, 0);
  const int32_t version = HeaderInt(contents, 1);
  return (magic == kMagic16 && version == kVersion16) ||
         (magic == kMagic32 && version == kVersion32);
}

absl::StatusOr<TokenFile> TokenFile::Open(absl::string_view path) {
  DIM0_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  const absl::string_view contents = file.contents();
  const int64_t bytes = static_cast<int64_t>(contents.size());
  if (bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the file is empty; a token file begins with a header of ",
                     kHeaderBytes, " bytes"));
  }
  if (bytes < kHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the header ends at byte ", bytes,
                                                   " of ", kHeaderBytes,
                                                   "; the file is truncated or not a token file"));
  }
  const int32_t magic = HeaderInt(contents, 0);
  const int32_t version = HeaderInt(contents, 1);
  const int64_t tokens = HeaderInt(contents, 2);
  if (magic != kMagic16 && magic != kMagic32) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": magic at byte 0 is ", magic, ", but a token file has ", kMagic16,
                     " (uint16 tokens) or ", kMagic32, " (uint32 tokens)"));
  }
  const TokenType type = magic == kMagic16 ? TokenType::kUint16 : TokenType::kUint32;
  const int32_t wanted = type == TokenType::kUint16 ? kVersion16 : kVersion32;
  if (version != wanted) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": version at byte 4 is ", version,
                                                   ", but magic ", magic, " goes with ", wanted));
  }
  if (tokens < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the token count at byte 8 is negative: ", tokens));
  }
  if (tokens == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the token count at byte 8 is 0; the file holds no tokens"));
  }
  const int64_t expected = kHeaderBytes + tokens * SizeOf(type);
  if (bytes < expected) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the file is truncated at byte ", bytes,
                                                   "; ", tokens, " ", Name(type), " tokens need ",
                                                   expected, " bytes"));
  }
  if (bytes > expected) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", bytes - expected,
                                                   " bytes too many from byte ", expected,
                                                   ", where its ", tokens, " tokens end"));
  }
  return TokenFile(std::move(file), type, tokens);
}

// The header's length is a multiple of 4 and the mapping is page-aligned, so the tokens are
// aligned.
absl::Span<const uint16_t> TokenFile::tokens16() const {
  return {reinterpret_cast<const uint16_t*>(file_.contents().data() + kHeaderBytes),
          static_cast<size_t>(size_)};
}

absl::Span<const uint32_t> TokenFile::tokens32() const {
  return {reinterpret_cast<const uint32_t*>(file_.contents().data() + kHeaderBytes),
          static_cast<size_t>(size_)};
}

uint32_t TokenFile::token(int64_t index) const {
  DIM0_CHECK(index >= 0 && index < size_);
  return type_ == TokenType::kUint16 ? tokens16()[index] : tokens32()[index];
}

void TokenFile::Read(int64_t begin, absl::Span<int32_t> out) const {
  const int64_t count = static_cast<int64_t>(out.size());
  DIM0_CHECK(begin >= 0 && begin <= size_ && count <= size_ - begin);
  if (type_ == TokenType::kUint16) {
    const uint16_t* from = tokens16().data() + begin;
    std::copy(from, from + count, out.begin());
  } else {
    const uint32_t* from = tokens32().data() + begin;
    std::copy(from, from + count, out.begin());
  }
}

uint32_t TokenFile::MaxToken() const {
  return type_ == TokenType::kUint16 ? MaxOf(tokens16()) : MaxOf(tokens32());
}

absl::Status TokenFile::CheckVocabulary(int64_t vocabulary) const {
  const int64_t index = type_ == TokenType::kUint16 ? FirstAtLeast(tokens16(), vocabulary)
                                                    : FirstAtLeast(tokens32(), vocabulary);
  if (index < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      path(), ": token ", index, " at byte ", kHeaderBytes + index * SizeOf(type_), " is ",
      token(index), ", beyond the vocabulary of ", vocabulary, "; raise --vocab to at least ",
      int64_t{MaxToken()} + 1, " or give the data that this vocabulary belongs to"));
}

TokenShardWriter::TokenShardWriter(absl::string_view directory, absl::string_view name,
                                   TokenType type, int64_t shard_tokens)
    : directory_(directory), name_(name), type_(type), shard_tokens_(shard_tokens) {}

absl::StatusOr<TokenShardWriter> TokenShardWriter::Create(absl::string_view directory,
                                                          absl::string_view name, TokenType type,
                                                          int64_t shard_tokens) {
  if (shard_tokens < 1 || shard_tokens > kMaxTokensPerFile) {
    return absl::InvalidArgumentError(absl::StrCat("tokens per shard must be between 1 and ",
                                                   kMaxTokensPerFile, ", not ", shard_tokens));
  }
  if (name.empty() || name.find('/') != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("the shards' name must be a file name without a folder, not \"", name, "\""));
  }
  return TokenShardWriter(directory, name, type, shard_tokens);
}

std::string TokenShardWriter::ShardPath(size_t index) const {
  return absl::StrFormat("%s/%s_%06d.bin", directory_, name_, index);
}

absl::Status TokenShardWriter::StartShard() {
  DIM0_ASSIGN_OR_RETURN(open_, AtomicFileWriter::Create(ShardPath(finished_.size())));
  open_tokens_ = 0;
  return open_->Append(Header(type_, 0));  // the count follows in FinishShard()
}

absl::Status TokenShardWriter::FinishShard() {
  DIM0_RETURN_IF_ERROR(open_->Overwrite(0, Header(type_, open_tokens_)));
  DIM0_RETURN_IF_ERROR(open_->Finish());
  finished_.push_back(*std::move(open_));
  open_.reset();
  return absl::OkStatus();
}

absl::Status TokenShardWriter::Append(absl::Span<const uint32_t> tokens) {
  while (!tokens.empty()) {
    if (!open_) DIM0_RETURN_IF_ERROR(StartShard());
    const size_t room = static_cast<size_t>(shard_tokens_ - open_tokens_);
    const absl::Span<const uint32_t> piece = tokens.first(std::min(room, tokens.size()));
    DIM0_RETURN_IF_ERROR(AppendTokens(piece, type_, *open_));
    open_tokens_ += static_cast<int64_t>(piece.size());
    size_ += static_cast<int64_t>(piece.size());
    tokens.remove_prefix(piece.size());
    if (open_tokens_ == shard_tokens_) DIM0_RETURN_IF_ERROR(FinishShard());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> TokenShardWriter::Commit() {
  if (open_) DIM0_RETURN_IF_ERROR(FinishShard());
  if (finished_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(ShardPath(0), ": no tokens to write"));
  }
  const std::string next = ShardPath(finished_.size());
  if (std::error_code ignored; std::filesystem::exists(next, ignored)) {
    return absl::AlreadyExistsError(
        absl::StrCat(next,
                     " is left from an earlier run and would be read after the new shards; "
                     "remove it or choose another name or folder"));
  }
  std::vector<std::string> paths;
  for (AtomicFileWriter& shard : finished_) {
    DIM0_RETURN_IF_ERROR(shard.Commit());
    paths.push_back(shard.path());
  }
  finished_.clear();
  return paths;
}

absl::Status WriteTokenFile(absl::string_view path, TokenType type,
                            absl::Span<const uint32_t> tokens) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  if (count < 1 || count > kMaxTokensPerFile) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a token file holds between 1 and ",
                                                   kMaxTokensPerFile, " tokens, not ", count));
  }
  DIM0_ASSIGN_OR_RETURN(AtomicFileWriter file, AtomicFileWriter::Create(path));
  DIM0_RETURN_IF_ERROR(file.Append(Header(type, count)));
  DIM0_RETURN_IF_ERROR(AppendTokens(tokens, type, file));
  return file.Commit();
}

}  // namespace dim0
