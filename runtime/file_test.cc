#include "runtime/file.h"

#include <linux/capability.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "file_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Path(absl::string_view name) const { return absl::StrCat(folder_, "/", name); }

  static std::string Slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  static void Put(const std::string& path, const std::string& contents) {
    std::ofstream(path, std::ios::binary) << contents;
  }
  // Every name in the test's folder, hidden ones too.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  std::string folder_;
};

// Bytes that repeat with no power-of-two period, so that a lost or doubled block shows.
std::string Pattern(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i % 251);
  return text;
}

TEST_F(FileTest, WritesTheContentsAndLeavesNothingElse) {
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "hello").ok());
  EXPECT_EQ(Slurp(Path("a")), "hello");
  EXPECT_THAT(Names(), ElementsAre("a"));
}

TEST_F(FileTest, WritesAnEmptyFile) {
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "").ok());
  EXPECT_TRUE(fs::is_empty(Path("a")));
}

TEST_F(FileTest, ReplacesAnEarlierFile) {
  Put(Path("a"), "a longer earlier text");
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "new").ok());
  EXPECT_EQ(Slurp(Path("a")), "new");
}

TEST_F(FileTest, WritesWhereTheNewFileWouldBeCreatedByAnyProgram) {
  const mode_t mask = ::umask(0027);
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "x").ok());
  ::umask(mask);
  struct stat info;
  ASSERT_EQ(::stat(Path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST_F(FileTest, WritesThroughASymbolicLinkAndKeepsTheLink) {
  fs::create_directory(Path("real"));
  Put(Path("real/a"), "old");
  fs::create_symlink("real/a", Path("link"));
  ASSERT_TRUE(WriteFileAtomically(Path("link"), "new").ok());
  EXPECT_TRUE(fs::is_symlink(Path("link")));
  EXPECT_EQ(Slurp(Path("real/a")), "new");
}

TEST_F(FileTest, WritesANameOfTheGreatestLength) {
  const std::string name(255, 'n');
  ASSERT_TRUE(WriteFileAtomically(Path(name), "x").ok());
  EXPECT_THAT(Names(), ElementsAre(name));
}

TEST_F(FileTest, JoinsPiecesOfAllSizesInOrder) {
  const std::string text = Pattern(3'000'000);
  absl::StatusOr<AtomicFileWriter> writer = AtomicFileWriter::Create(Path("a"));
  ASSERT_TRUE(writer.ok()) << writer.status();
  size_t at = 0;
  // 1, 3, 9, ... 531441 bytes and around again: below, at and above the writer's own buffer.
  for (size_t piece = 1; at<text.size(); piece = piece> 500'000 ? 1 : piece * 3) {
    const absl::string_view data = absl::string_view(text).substr(at, piece);
    ASSERT_TRUE(writer->Append(data).ok());
    at += data.size();
    ASSERT_EQ(writer->size(), static_cast<int64_t>(at));
  }
  ASSERT_TRUE(writer->Commit().ok());
  EXPECT_EQ(Slurp(Path("a")), text);
}

TEST_F(FileTest, OverwritesBytesAlreadyAppended) {
  std::string text = Pattern(600'000);
  absl::StatusOr<AtomicFileWriter> writer = AtomicFileWriter::Create(Path("a"));
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append(text).ok());
  ASSERT_TRUE(writer->Append("tail").ok());
  ASSERT_TRUE(writer->Overwrite(2, "HEAD").ok());
  ASSERT_TRUE(writer->Overwrite(600'003, "!").ok());  // the last byte, still in the buffer
  ASSERT_TRUE(writer->Append("more").ok());
  ASSERT_TRUE(writer->Commit().ok());
  text.replace(2, 4, "HEAD");
  EXPECT_EQ(Slurp(Path("a")), text + "tai!more");
}

TEST_F(FileTest, RefusesToOverwriteBytesNotAppended) {
  absl::StatusOr<AtomicFileWriter> writer = AtomicFileWriter::Create(Path("a"));
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append("1234").ok());
  EXPECT_EQ(writer->Overwrite(3, "xx").code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(writer->Overwrite(-1, "x").code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(writer->Overwrite(5, "").code(), absl::StatusCode::kOutOfRange);
}

TEST_F(FileTest, KeepsTheEarlierFileUntilCommit) {
  Put(Path("a"), "old");
  absl::StatusOr<AtomicFileWriter> writer = AtomicFileWriter::Create(Path("a"));
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append(Pattern(1'000'000)).ok());
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(Slurp(Path("a")), "old");
  ASSERT_TRUE(writer->Commit().ok());
  EXPECT_EQ(Slurp(Path("a")), Pattern(1'000'000));
}

TEST_F(FileTest, RemovesTheTemporaryOfAnAbandonedWriter) {
  Put(Path("a"), "old");
  for (const bool finish : {false, true}) {
    absl::StatusOr<AtomicFileWriter> writer = AtomicFileWriter::Create(Path("a"));
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Append("half").ok());
    if (finish) {
      ASSERT_TRUE(writer->Finish().ok());
    }
    EXPECT_EQ(Names().size(), 2u);
  }
  EXPECT_THAT(Names(), ElementsAre("a"));
  EXPECT_EQ(Slurp(Path("a")), "old");
}

TEST_F(FileTest, MovesTheTemporaryWithTheWriter) {
  absl::StatusOr<AtomicFileWriter> first = AtomicFileWriter::Create(Path("a"));
  absl::StatusOr<AtomicFileWriter> second = AtomicFileWriter::Create(Path("b"));
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(first->Append("a's").ok());
  ASSERT_TRUE(second->Append("b's").ok());
  AtomicFileWriter moved = *std::move(first);
  *second = std::move(moved);  // b's temporary goes, a's lives on
  ASSERT_TRUE(second->Commit().ok());
  EXPECT_THAT(Names(), ElementsAre("a"));
  EXPECT_EQ(Slurp(Path("a")), "a's");
}

TEST_F(FileTest, RefusesToWriteAfterTheEnd) {
  absl::StatusOr<AtomicFileWriter> writer = AtomicFileWriter::Create(Path("a"));
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Commit().ok());
  EXPECT_EQ(writer->Append("x").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(writer->Overwrite(0, "").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(writer->Finish().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(writer->Commit().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(FileTest, LetsWritersOfOneFileRaceToTheRename) {
  absl::StatusOr<AtomicFileWriter> first = AtomicFileWriter::Create(Path("a"));
  absl::StatusOr<AtomicFileWriter> second = AtomicFileWriter::Create(Path("a"));
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(first->Append("first").ok());
  ASSERT_TRUE(second->Append("second").ok());
  ASSERT_TRUE(second->Commit().ok());
  ASSERT_TRUE(first->Commit().ok());
  EXPECT_EQ(Slurp(Path("a")), "first");
  EXPECT_THAT(Names(), ElementsAre("a"));
}

TEST_F(FileTest, NamesThePathAndTheReasonWhenTheFolderIsMissing) {
  const absl::Status status = WriteFileAtomically(Path("no/a"), "x");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(),
            absl::StrCat("cannot write ", Path("no/a"), ": No such file or directory"));
}

TEST_F(FileTest, NamesThePathAndTheReasonWhenTheFolderIsAFile) {
  Put(Path("file"), "x");
  const absl::Status status = WriteFileAtomically(Path("file/a"), "x");
  EXPECT_EQ(status.message(), absl::StrCat("cannot write ", Path("file/a"), ": Not a directory"));
}

TEST_F(FileTest, RefusesToReplaceADirectoryOrADevice) {
  fs::create_directory(Path("d"));
  EXPECT_EQ(WriteFileAtomically(Path("d"), "x").message(),
            absl::StrCat("cannot write ", Path("d"), ": it is a directory"));
  EXPECT_EQ(WriteFileAtomically("/dev/null", "x").message(),
            "cannot write /dev/null: it is not a regular file");
  EXPECT_FALSE(WriteFileAtomically("", "x").ok());
  EXPECT_FALSE(WriteFileAtomically(Path("new/"), "x").ok());
}

// Takes from this thread, as long as it lives, root's power to write where the mode forbids it.
// That leaves nothing to do for other users, and unlike a change of the user it works in sandboxes.
class WithoutOverride {
 public:
  WithoutOverride() {
    EXPECT_EQ(::syscall(SYS_capget, &header_, before_), 0);
    __user_cap_data_struct less[2] = {before_[0], before_[1]};
    less[0].effective &= ~(1u << CAP_DAC_OVERRIDE);
    EXPECT_EQ(::syscall(SYS_capset, &header_, less), 0);
  }
  ~WithoutOverride() { EXPECT_EQ(::syscall(SYS_capset, &header_, before_), 0); }

 private:
  __user_cap_header_struct header_ = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct before_[2] = {};
};

TEST_F(FileTest, NamesThePathAndTheReasonWhenTheFolderIsNotWritable) {
  ASSERT_EQ(::chmod(folder_.c_str(), 0555), 0);
  absl::Status status;
  {
    const WithoutOverride as_any_user;
    status = WriteFileAtomically(Path("a"), "x");
  }
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(status.message(), absl::StrCat("cannot write ", Path("a"), ": Permission denied"));
  EXPECT_THAT(Names(), IsEmpty());
}

// A limit on the file size makes write() fail half-way as a full disk does.
TEST_F(FileTest, LeavesTheEarlierFileAndNoTemporaryWhenTheDiskIsFull) {
  Put(Path("a"), "old");
  struct rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit limit = before;
  limit.rlim_cur = 300'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const absl::Status large = WriteFileAtomically(Path("a"), Pattern(1'000'000));
  absl::StatusOr<AtomicFileWriter> pieces = AtomicFileWriter::Create(Path("a"));
  absl::Status small = pieces.status();
  for (int i = 0; i < 100 && small.ok(); ++i) small = pieces->Append(Pattern(10'000));
  const std::vector<std::string> names = Names();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  for (const absl::Status& status : {large, small}) {
    EXPECT_EQ(status.message(), absl::StrCat("cannot write ", Path("a"), ": File too large"));
  }
  EXPECT_THAT(names, ElementsAre("a"));
  EXPECT_EQ(Slurp(Path("a")), "old");
}

TEST_F(FileTest, MapsWhatIsInTheFile) {
  const std::string text = Pattern(100'000);
  Put(Path("a"), text);
  absl::StatusOr<MappedFile> file = MappedFile::Open(Path("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->contents(), text);
  const char* data = file->contents().data();
  MappedFile moved = *std::move(file);
  EXPECT_EQ(moved.contents().data(), data);
  EXPECT_EQ(moved.contents(), text);
  EXPECT_EQ(moved.path(), Path("a"));
}

TEST_F(FileTest, MapsAnEmptyFile) {
  Put(Path("a"), "");
  absl::StatusOr<MappedFile> file = MappedFile::Open(Path("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->contents().empty());
}

TEST_F(FileTest, KeepsTheMappingOfAFileThatIsReplaced) {
  Put(Path("a"), "old");
  absl::StatusOr<MappedFile> file = MappedFile::Open(Path("a"));
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(WriteFileAtomically(Path("a"), "new").ok());
  EXPECT_EQ(file->contents(), "old");
}

TEST_F(FileTest, RefusesToMapWhatIsNotARegularFile) {
  EXPECT_EQ(MappedFile::Open(Path("no")).status().message(),
            absl::StrCat("cannot open ", Path("no"), ": No such file or directory"));
  EXPECT_EQ(MappedFile::Open(folder_).status().message(),
            absl::StrCat("cannot read ", folder_, ": it is a directory"));
  EXPECT_EQ(MappedFile::Open("/dev/null").status().message(),
            "cannot read /dev/null: it is not a regular file");
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(MappedFile::Open(Path("pipe")).status().message(), HasSubstr("not a regular file"));
}

TEST_F(FileTest, ExpandsAGlobInSortedOrder) {
  for (const char* name : {"b.bin", "a.bin", "B.bin", "c.txt"}) Put(Path(name), "");
  absl::StatusOr<std::vector<std::string>> paths = ExpandGlob(Path("*.bin"));
  ASSERT_TRUE(paths.ok()) << paths.status();
  EXPECT_THAT(*paths, ElementsAre(Path("B.bin"), Path("a.bin"), Path("b.bin")));
}

TEST_F(FileTest, TakesAnExistingNameForItselfEvenIfItLooksLikeAGlob) {
  Put(Path("a[1]"), "");
  Put(Path("a1"), "");
  absl::StatusOr<std::vector<std::string>> paths = ExpandGlob(Path("a[1]"));
  ASSERT_TRUE(paths.ok());
  EXPECT_THAT(*paths, ElementsAre(Path("a[1]")));
}

TEST_F(FileTest, SaysWhenNothingMatches) {
  EXPECT_EQ(ExpandGlob(Path("*.bin")).status().message(),
            absl::StrCat("no file matches ", Path("*.bin")));
  EXPECT_EQ(ExpandGlob(Path("no")).status().message(),
            absl::StrCat("cannot open ", Path("no"), ": No such file or directory"));
}

TEST_F(FileTest, MakesAllMissingFoldersOnce) {
  EXPECT_TRUE(MakeDirectories(Path("x/y/z")).ok());
  EXPECT_TRUE(MakeDirectories(Path("x/y/z")).ok());
  EXPECT_TRUE(MakeDirectories(Path("x/y/z/")).ok());
  EXPECT_TRUE(fs::is_directory(Path("x/y/z")));
}

TEST_F(FileTest, SaysWhyAFolderCannotBeMade) {
  Put(Path("file"), "");
  const absl::Status status = MakeDirectories(Path("file/sub"));
  EXPECT_EQ(status.message(),
            absl::StrCat("cannot make the folder ", Path("file/sub"), ": Not a directory"));
  EXPECT_FALSE(MakeDirectories(Path("file")).ok());
}

}  // namespace
}  // namespace dim0
