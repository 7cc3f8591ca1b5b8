// Runs the program as users do: what it prints, writes and returns.
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/run_program.h"

namespace dim0 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

using Arguments = std::vector<std::string>;

class PrepareTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    Write("text.txt", "Hi!\xff\n");
  }
  static std::string Flag(absl::string_view name, absl::string_view value) {
    return absl::StrCat("--", name, "=", value);
  }
  Outcome Prepare(const Arguments& arguments) const { return Run("tools/prepare", arguments); }
  std::string ErrorOf(const Arguments& arguments, int exit_status) const {
    return ProgramTest::ErrorOf("tools/prepare", arguments, exit_status);
  }
};

TEST_F(PrepareTest, WritesTheBytesOfATextAsShards) {
  const Outcome outcome = Prepare(
      {Flag("input", Path("text.txt")), Flag("output_dir", Path("a/b")), "--shard_tokens=3"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.out,
            absl::StrCat("tokens      5\nvocabulary  256 (bytes)\nfiles       2\n  ",
                         Path("a/b/text_000000.bin"), "\n  ", Path("a/b/text_000001.bin"), "\n"));
  EXPECT_THAT(Names(),
              ElementsAre("a", "a/b", "a/b/text_000000.bin", "a/b/text_000001.bin", "text.txt"));
  EXPECT_EQ(Slurp(Path("a/b/text_000000.bin")).substr(1024), std::string("H\0i\0!\0", 6));
  EXPECT_EQ(Slurp(Path("a/b/text_000001.bin")).substr(1024), std::string("\xff\0\n\0", 4));
}

TEST_F(PrepareTest, SaysWhatTokenFilesHold) {
  ASSERT_EQ(Prepare({Flag("input", Path("text.txt")), Flag("output_dir", folder()), "--name=x",
                     "--shard_tokens=3"})
                .exit_status,
            0);
  const Outcome outcome = Prepare({Flag("input", Path("x_*.bin"))});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.out, absl::StrCat("tokens         5\n"
                                      "largest token  255 (a vocabulary of at least 256)\n"
                                      "files          2\n  ",
                                      Path("x_000000.bin"), "  3 uint16 tokens, largest 105\n  ",
                                      Path("x_000001.bin"), "  2 uint16 tokens, largest 255\n"));
}

TEST_F(PrepareTest, WritesTheSameShardsAgain) {
  const Arguments arguments = {Flag("input", Path("text.txt")), Flag("output_dir", folder())};
  ASSERT_EQ(Prepare(arguments).exit_status, 0);
  const std::string first = Slurp(Path("text_000000.bin"));
  ASSERT_EQ(Prepare(arguments).exit_status, 0);
  EXPECT_EQ(Slurp(Path("text_000000.bin")), first);
}

TEST_F(PrepareTest, FailsWithOneLineAndLeavesNothing) {
  const std::string to = Flag("output_dir", Path("new"));
  EXPECT_EQ(ErrorOf({Flag("input", Path("no")), to}, 1),
            absl::StrCat("prepare: cannot open ", Path("no"), ": No such file or directory"));
  EXPECT_EQ(ErrorOf({Flag("input", folder()), to}, 1),
            absl::StrCat("prepare: cannot read ", folder(), ": it is a directory"));
  Write("empty", "");
  EXPECT_EQ(ErrorOf({Flag("input", Path("empty")), to}, 1),
            absl::StrCat("prepare: ", Path("empty"), ": the file is empty"));
  EXPECT_EQ(ErrorOf({Flag("input", Path("text.txt")), Flag("output_dir", Path("empty/x"))}, 1),
            absl::StrCat("prepare: cannot make the folder ", Path("empty/x"), ": Not a directory"));
  EXPECT_EQ(ErrorOf({Flag("input", Path("*.bin"))}, 1),
            absl::StrCat("prepare: no file matches ", Path("*.bin")));
  fs::copy_file(Path("text.txt"), Path("bad.bin"));
  EXPECT_EQ(ErrorOf({Flag("input", Path("bad.bin"))}, 1),
            absl::StrCat("prepare: ", Path("bad.bin"),
                         ": the header ends at byte 5 of 1024; the file is truncated or not a "
                         "token file"));
}

TEST_F(PrepareTest, RefusesToMixNewShardsWithAnEarlierRuns) {
  const std::string from = Flag("input", Path("text.txt"));
  const std::string to = Flag("output_dir", folder());
  ASSERT_EQ(Prepare({from, to, "--shard_tokens=3"}).exit_status, 0);
  EXPECT_THAT(ErrorOf({from, to}, 1), HasSubstr("text_000001.bin is left from an earlier run"));
}

TEST_F(PrepareTest, EndsWithStatusTwoForAWrongCommandLine) {
  const std::string from = Flag("input", Path("text.txt"));
  const std::string to = Flag("output_dir", folder());
  EXPECT_THAT(ErrorOf({}, 2), HasSubstr("--input is needed"));
  EXPECT_THAT(ErrorOf({from}, 2), HasSubstr("--output_dir is needed"));
  EXPECT_THAT(ErrorOf({from, to, "--shard_tokens=0"}, 2), HasSubstr("--shard_tokens=0: expected"));
  EXPECT_THAT(ErrorOf({from, to, "--shard_tokens=2147483648"}, 2),
              HasSubstr("from 1 to 2147483647"));
  EXPECT_THAT(ErrorOf({from, to, "--shard_tokens=many"}, 2), HasSubstr("--shard_tokens=many"));
  EXPECT_THAT(ErrorOf({from, to, "--name=a/b"}, 2), HasSubstr("without a folder"));
  EXPECT_THAT(ErrorOf({from, to, "--vocab=3"}, 2), HasSubstr("unknown flag --vocab"));
  EXPECT_THAT(ErrorOf({"--input=x.bin", to}, 2), HasSubstr("leave out --output_dir"));
}

TEST_F(PrepareTest, ListsItsFlags) {
  const Outcome outcome = Prepare({"--help"});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_THAT(outcome.out, HasSubstr("--shard_tokens=100000000\n"));
  EXPECT_EQ(outcome.err, "");
}

}  // namespace
}  // namespace dim0
