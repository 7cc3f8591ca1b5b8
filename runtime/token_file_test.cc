#include "runtime/token_file.h"

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

void PutLittleEndian(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

// A token file put together byte by byte, as the format's table has it.
std::string Bytes(uint32_t magic, uint32_t version, uint32_t count, int width,
                  const std::vector<uint32_t>& tokens) {
  std::string out;
  PutLittleEndian(out, magic, 4);
  PutLittleEndian(out, version, 4);
  PutLittleEndian(out, count, 4);
  out.resize(1024, '\0');
  for (const uint32_t token : tokens) PutLittleEndian(out, token, width);
  return out;
}
std::string Bytes16(const std::vector<uint32_t>& tokens) {
  return Bytes(20240520, 1, static_cast<uint32_t>(tokens.size()), 2, tokens);
}
std::string Bytes32(const std::vector<uint32_t>& tokens) {
  return Bytes(20240801, 7, static_cast<uint32_t>(tokens.size()), 4, tokens);
}

class TokenFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "token_file_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ + "/x.bin";
  }
  void TearDown() override { fs::remove_all(folder_); }

  void Put(const std::string& contents) { std::ofstream(path_, std::ios::binary) << contents; }
  static std::string Slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  // The message of the error that opening `contents` gives, without the path before it.
  std::string ErrorOf(const std::string& contents) {
    Put(contents);
    const absl::Status status = TokenFile::Open(path_).status();
    const std::string message(status.message());
    const std::string prefix = path_ + ": ";
    EXPECT_EQ(message.substr(0, prefix.size()), prefix);
    EXPECT_EQ(message.find('\n'), std::string::npos);
    return message.substr(std::min(message.size(), prefix.size()));
  }
  TokenFile OpenOrDie(const std::string& path) {
    absl::StatusOr<TokenFile> file = TokenFile::Open(path);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  size_t FilesInFolder() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  std::string folder_;
  std::string path_;
};

TEST_F(TokenFileTest, ReadsUint16Tokens) {
  Put(Bytes16({7, 0, 65535, 50256}));
  const TokenFile file = OpenOrDie(path_);
  EXPECT_EQ(file.type(), TokenType::kUint16);
  ASSERT_EQ(file.size(), 4);
  EXPECT_EQ(file.token(0), 7u);
  EXPECT_EQ(file.token(2), 65535u);
  std::vector<int32_t> out(3);
  file.Read(1, absl::MakeSpan(out));
  EXPECT_EQ(out, (std::vector<int32_t>{0, 65535, 50256}));
  EXPECT_EQ(file.MaxToken(), 65535u);
}

TEST_F(TokenFileTest, ReadsUint32Tokens) {
  Put(Bytes32({128000, 1, 4294967295u}));
  const TokenFile file = OpenOrDie(path_);
  EXPECT_EQ(file.type(), TokenType::kUint32);
  ASSERT_EQ(file.size(), 3);
  EXPECT_EQ(file.token(2), 4294967295u);
  std::vector<int32_t> out(2);
  file.Read(0, absl::MakeSpan(out));
  EXPECT_EQ(out, (std::vector<int32_t>{128000, 1}));
  EXPECT_EQ(file.MaxToken(), 4294967295u);
}

TEST_F(TokenFileTest, WritesTheBytesOfTheFormat) {
  ASSERT_TRUE(WriteTokenFile(path_, TokenType::kUint16, {72, 105, 33}).ok());
  EXPECT_EQ(Slurp(path_), Bytes16({72, 105, 33}));
  ASSERT_TRUE(WriteTokenFile(path_, TokenType::kUint32, {72, 70000, 33}).ok());
  EXPECT_EQ(Slurp(path_), Bytes32({72, 70000, 33}));
}

TEST_F(TokenFileTest, SaysWhatIsWrongWithTheHeader) {
  EXPECT_EQ(ErrorOf(""), "the file is empty; a token file begins with a header of 1024 bytes");
  EXPECT_EQ(ErrorOf(Bytes16({1}).substr(0, 1023)),
            "the header ends at byte 1023 of 1024; the file is truncated or not a token file");
  EXPECT_EQ(ErrorOf(std::string(2000, 'a')),
            "magic at byte 0 is 1633771873, but a token file has 20240520 (uint16 tokens) or "
            "20240801 (uint32 tokens)");
  EXPECT_EQ(ErrorOf(Bytes(20240520, 7, 1, 2, {1})),
            "version at byte 4 is 7, but magic 20240520 goes with 1");
  EXPECT_EQ(ErrorOf(Bytes(20240801, 1, 1, 4, {1})),
            "version at byte 4 is 1, but magic 20240801 goes with 7");
  EXPECT_EQ(ErrorOf(Bytes(20240520, 1, 0xfffffffe, 2, {1})),
            "the token count at byte 8 is negative: -2");
  EXPECT_EQ(ErrorOf(Bytes16({})), "the token count at byte 8 is 0; the file holds no tokens");
}

TEST_F(TokenFileTest, SaysWhereATruncatedFileEnds) {
  EXPECT_EQ(ErrorOf(Bytes16({1, 2, 3}).substr(0, 1029)),
            "the file is truncated at byte 1029; 3 uint16 tokens need 1030 bytes");
  EXPECT_EQ(ErrorOf(Bytes32({1, 2, 3}).substr(0, 1024)),
            "the file is truncated at byte 1024; 3 uint32 tokens need 1036 bytes");
  EXPECT_EQ(ErrorOf(Bytes(20240801, 7, 2147483647, 4, {1})),
            "the file is truncated at byte 1028; 2147483647 uint32 tokens need 8589935612 bytes");
}

TEST_F(TokenFileTest, SaysWhereTrailingBytesBegin) {
  EXPECT_EQ(ErrorOf(Bytes16({1, 2}) + "xyz"),
            "3 bytes too many from byte 1028, where its 2 tokens end");
}

TEST_F(TokenFileTest, NamesAFileThatCannotBeOpened) {
  EXPECT_EQ(TokenFile::Open(path_).status().message(),
            absl::StrCat("cannot open ", path_, ": No such file or directory"));
}

TEST_F(TokenFileTest, RecognisesATokenFileByItsFirstEightBytes) {
  EXPECT_TRUE(LooksLikeTokenFile(Bytes16({1})));
  EXPECT_TRUE(LooksLikeTokenFile(Bytes32({1}).substr(0, 8)));
  EXPECT_FALSE(LooksLikeTokenFile(Bytes32({1}).substr(0, 7)));
  EXPECT_FALSE(LooksLikeTokenFile(Bytes(20240520, 7, 1, 2, {1})));
  EXPECT_FALSE(LooksLikeTokenFile("Once upon a time"));
  EXPECT_FALSE(LooksLikeTokenFile(""));
}

TEST_F(TokenFileTest, AcceptsTokensBelowTheVocabulary) {
  Put(Bytes16({0, 50256, 3}));
  EXPECT_TRUE(OpenOrDie(path_).CheckVocabulary(50257).ok());
  EXPECT_TRUE(OpenOrDie(path_).CheckVocabulary(1 << 20).ok());
}

TEST_F(TokenFileTest, NamesTheFirstTokenBeyondTheVocabulary) {
  Put(Bytes16({0, 300, 256, 9000, 1}));
  EXPECT_EQ(OpenOrDie(path_).CheckVocabulary(256).message(),
            absl::StrCat(path_,
                         ": token 1 at byte 1026 is 300, beyond the vocabulary of 256; raise "
                         "--vocab to at least 9001 or give the data that this vocabulary belongs "
                         "to"));
  Put(Bytes32({5, 6, 4294967295u}));
  EXPECT_EQ(OpenOrDie(path_).CheckVocabulary(int64_t{1} << 31).message(),
            absl::StrCat(path_,
                         ": token 2 at byte 1032 is 4294967295, beyond the vocabulary of "
                         "2147483648; raise --vocab to at least 4294967296 or give the data that "
                         "this vocabulary belongs to"));
}

// The scan goes by blocks; an offender must be found at every kind of place in and after them.
TEST_F(TokenFileTest, FindsTheOneBadTokenWhereverItIs) {
  constexpr int kSize = 10'000;
  for (const TokenType type : {TokenType::kUint16, TokenType::kUint32}) {
    for (const int at : {0, 1, 4095, 4096, 4097, 8191, 8192, 9000, kSize - 1}) {
      std::vector<uint32_t> tokens(kSize, 99);
      tokens[at] = 100;
      if (at + 1 < kSize) tokens[kSize - 1] = 101;
      ASSERT_TRUE(WriteTokenFile(path_, type, tokens).ok());
      const TokenFile file = OpenOrDie(path_);
      EXPECT_TRUE(file.CheckVocabulary(102).ok());
      const std::string message(file.CheckVocabulary(100).message());
      EXPECT_EQ(message.find(absl::StrCat(path_, ": token ", at, " at byte ",
                                          1024 + at * SizeOf(type), " is ")),
                0u)
          << message;
      EXPECT_EQ(file.MaxToken(), at + 1 < kSize ? 101u : 100u);
    }
  }
}

TEST_F(TokenFileTest, CutsAStreamIntoShards) {
  for (const size_t piece : {1, 2, 3, 5, 7}) {
    absl::StatusOr<TokenShardWriter> writer =
        TokenShardWriter::Create(folder_, "s", TokenType::kUint16, 3);
    ASSERT_TRUE(writer.ok()) << writer.status();
    const std::vector<uint32_t> tokens = {10, 11, 12, 13, 14, 15, 16};
    for (size_t at = 0; at < tokens.size(); at += piece) {
      ASSERT_TRUE(writer->Append(absl::MakeConstSpan(tokens).subspan(at, piece)).ok());
    }
    EXPECT_EQ(writer->size(), 7);
    absl::StatusOr<std::vector<std::string>> paths = writer->Commit();
    ASSERT_TRUE(paths.ok()) << paths.status();
    EXPECT_EQ(*paths,
              (std::vector<std::string>{folder_ + "/s_000000.bin", folder_ + "/s_000001.bin",
                                        folder_ + "/s_000002.bin"}));
    EXPECT_EQ(Slurp((*paths)[0]), Bytes16({10, 11, 12}));
    EXPECT_EQ(Slurp((*paths)[1]), Bytes16({13, 14, 15}));
    EXPECT_EQ(Slurp((*paths)[2]), Bytes16({16}));
    EXPECT_EQ(FilesInFolder(), 3u);
  }
}

TEST_F(TokenFileTest, WritesNoEmptyLastShard) {
  absl::StatusOr<TokenShardWriter> writer =
      TokenShardWriter::Create(folder_, "s", TokenType::kUint32, 2);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append({1, 2, 3, 4}).ok());
  absl::StatusOr<std::vector<std::string>> paths = writer->Commit();
  ASSERT_TRUE(paths.ok());
  EXPECT_EQ(paths->size(), 2u);
  EXPECT_EQ(FilesInFolder(), 2u);
}

TEST_F(TokenFileTest, PublishesNoShardBeforeAllAreWritten) {
  {
    absl::StatusOr<TokenShardWriter> writer =
        TokenShardWriter::Create(folder_, "s", TokenType::kUint16, 2);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Append({1, 2, 3, 4, 5}).ok());
    EXPECT_FALSE(fs::exists(folder_ + "/s_000000.bin"));
  }
  EXPECT_EQ(FilesInFolder(), 0u);
}

TEST_F(TokenFileTest, RefusesToLeaveAnEarlierRunsShardsBehindTheNewOnes) {
  const std::string stale = folder_ + "/s_000001.bin";
  ASSERT_TRUE(WriteTokenFile(stale, TokenType::kUint16, {1}).ok());
  absl::StatusOr<TokenShardWriter> writer =
      TokenShardWriter::Create(folder_, "s", TokenType::kUint16, 10);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append({1, 2}).ok());
  const absl::Status status = writer->Commit().status();
  EXPECT_EQ(status.message(),
            absl::StrCat(stale,
                         " is left from an earlier run and would be read after the new "
                         "shards; remove it or choose another name or folder"));
  EXPECT_FALSE(fs::exists(folder_ + "/s_000000.bin"));
}

TEST_F(TokenFileTest, RefusesWhatTheFormatCannotHold) {
  EXPECT_EQ(WriteTokenFile(path_, TokenType::kUint16, {65535, 65536}).message(),
            absl::StrCat(path_, ": token 65536 does not fit in uint16"));
  EXPECT_EQ(WriteTokenFile(path_, TokenType::kUint16, {}).message(),
            absl::StrCat(path_, ": a token file holds between 1 and 2147483647 tokens, not 0"));
  EXPECT_FALSE(TokenShardWriter::Create(folder_, "s", TokenType::kUint16, 0).ok());
  EXPECT_FALSE(TokenShardWriter::Create(folder_, "s", TokenType::kUint16, int64_t{1} << 31).ok());
  EXPECT_FALSE(TokenShardWriter::Create(folder_, "a/b", TokenType::kUint16, 1).ok());
  EXPECT_FALSE(TokenShardWriter::Create(folder_, "", TokenType::kUint16, 1).ok());
  absl::StatusOr<TokenShardWriter> writer =
      TokenShardWriter::Create(folder_, "s", TokenType::kUint16, 1);
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(writer->Commit().status().message(),
            absl::StrCat(folder_, "/s_000000.bin: no tokens to write"));
  EXPECT_EQ(FilesInFolder(), 0u);
}

}  // namespace
}  // namespace dim0
