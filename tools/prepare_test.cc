// Runs the program as users do: what it prints, writes and returns. Bazel starts tests at the root
// of the runfiles, where the program is tools/prepare.
#include <stdlib.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

class PrepareTest : public ::testing::Test {
 protected:
  struct Outcome {
    int exit_status;
    std::string out;
    std::string err;
  };

  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "prepare_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    std::ofstream(Path("text.txt"), std::ios::binary) << "Hi!\xff\n";
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Path(absl::string_view name) const { return absl::StrCat(folder_, "/", name); }
  static std::string Slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  Outcome Run(const std::string& arguments) const {
    const fs::path streams = fs::path(folder_ + ".streams");
    fs::create_directory(streams);
    const std::string out = streams / "out";
    const std::string err = streams / "err";
    const int status =
        ::system(absl::StrCat("tools/prepare ", arguments, " >", out, " 2>", err).c_str());
    Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, Slurp(out), Slurp(err)};
    fs::remove_all(streams);
    return outcome;
  }
  // Runs what must fail, leaving nothing new in the folder, and returns the message.
  std::string ErrorOf(const std::string& arguments, int exit_status) const {
    const std::vector<std::string> before = Names();
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_status, exit_status) << arguments;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
    EXPECT_EQ(Names(), before);
    return outcome.err;
  }
  // All paths under the folder, sorted.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      names.push_back(entry.path().lexically_relative(folder_).string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string folder_;
};

TEST_F(PrepareTest, WritesTheBytesOfATextAsShards) {
  const Outcome outcome = Run(absl::StrCat("--input=", Path("text.txt"),
                                           " --output_dir=", Path("a/b"), " --shard_tokens=3"));
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
  ASSERT_EQ(Run(absl::StrCat("--input=", Path("text.txt"), " --output_dir=", folder_,
                             " --name=x --shard_tokens=3"))
                .exit_status,
            0);
  const Outcome outcome = Run(absl::StrCat("--input='", Path("x_*.bin"), "'"));
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.out, absl::StrCat("tokens         5\n"
                                      "largest token  255 (a vocabulary of at least 256)\n"
                                      "files          2\n  ",
                                      Path("x_000000.bin"), "  3 uint16 tokens, largest 105\n  ",
                                      Path("x_000001.bin"), "  2 uint16 tokens, largest 255\n"));
}

TEST_F(PrepareTest, WritesTheSameShardsAgain) {
  const std::string arguments =
      absl::StrCat("--input=", Path("text.txt"), " --output_dir=", folder_);
  ASSERT_EQ(Run(arguments).exit_status, 0);
  const std::string first = Slurp(Path("text_000000.bin"));
  ASSERT_EQ(Run(arguments).exit_status, 0);
  EXPECT_EQ(Slurp(Path("text_000000.bin")), first);
}

TEST_F(PrepareTest, FailsWithOneLineAndLeavesNothing) {
  const std::string to = absl::StrCat(" --output_dir=", Path("new"));
  EXPECT_EQ(ErrorOf(absl::StrCat("--input=", Path("no"), to), 1),
            absl::StrCat("prepare: cannot open ", Path("no"), ": No such file or directory\n"));
  EXPECT_EQ(ErrorOf(absl::StrCat("--input=", folder_, to), 1),
            absl::StrCat("prepare: cannot read ", folder_, ": it is a directory\n"));
  std::ofstream(Path("empty"));
  EXPECT_EQ(ErrorOf(absl::StrCat("--input=", Path("empty"), to), 1),
            absl::StrCat("prepare: ", Path("empty"), ": the file is empty\n"));
  EXPECT_EQ(
      ErrorOf(absl::StrCat("--input=", Path("text.txt"), " --output_dir=", Path("empty/x")), 1),
      absl::StrCat("prepare: cannot make the folder ", Path("empty/x"), ": Not a directory\n"));
  EXPECT_EQ(ErrorOf(absl::StrCat("--input='", Path("*.bin"), "'"), 1),
            absl::StrCat("prepare: no file matches ", Path("*.bin"), "\n"));
  fs::copy_file(Path("text.txt"), Path("bad.bin"));
  EXPECT_EQ(ErrorOf(absl::StrCat("--input=", Path("bad.bin")), 1),
            absl::StrCat("prepare: ", Path("bad.bin"),
                         ": the header ends at byte 5 of 1024; the file is truncated or not a "
                         "token file\n"));
}

TEST_F(PrepareTest, RefusesToMixNewShardsWithAnEarlierRuns) {
  const std::string arguments =
      absl::StrCat("--input=", Path("text.txt"), " --output_dir=", folder_);
  ASSERT_EQ(Run(arguments + " --shard_tokens=3").exit_status, 0);
  EXPECT_THAT(ErrorOf(arguments, 1), HasSubstr("text_000001.bin is left from an earlier run"));
}

TEST_F(PrepareTest, EndsWithStatusTwoForAWrongCommandLine) {
  const std::string text = absl::StrCat("--input=", Path("text.txt"), " --output_dir=", folder_);
  EXPECT_THAT(ErrorOf("", 2), HasSubstr("--input is needed"));
  EXPECT_THAT(ErrorOf(absl::StrCat("--input=", Path("text.txt")), 2),
              HasSubstr("--output_dir is needed"));
  EXPECT_THAT(ErrorOf(text + " --shard_tokens=0", 2), HasSubstr("--shard_tokens=0: expected"));
  EXPECT_THAT(ErrorOf(text + " --shard_tokens=2147483648", 2), HasSubstr("from 1 to 2147483647"));
  EXPECT_THAT(ErrorOf(text + " --shard_tokens=many", 2), HasSubstr("--shard_tokens=many"));
  EXPECT_THAT(ErrorOf(text + " --name=a/b", 2), HasSubstr("without a folder"));
  EXPECT_THAT(ErrorOf(text + " --vocab=3", 2), HasSubstr("unknown flag --vocab"));
  EXPECT_THAT(ErrorOf(absl::StrCat("--input=x.bin --output_dir=", folder_), 2),
              HasSubstr("leave out --output_dir"));
}

TEST_F(PrepareTest, ListsItsFlags) {
  const Outcome outcome = Run("--help");
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_THAT(outcome.out, HasSubstr("--shard_tokens=100000000\n"));
  EXPECT_EQ(outcome.err, "");
}

}  // namespace
}  // namespace dim0
