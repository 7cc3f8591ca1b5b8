#include "runtime/run_files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/file.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

std::string Fresh(const std::string& name) {
  const fs::path path = fs::path(testing::TempDir()) / name;
  fs::remove_all(path);
  return path.string();
}

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(PrepareRunDir, MakesTheFolderAndThoseAboveIt) {
  const std::string dir = Fresh("new_run") + "/a/b";
  EXPECT_EQ(*PrepareRunDir(dir), "");
  EXPECT_TRUE(fs::is_directory(dir));
}

TEST(PrepareRunDir, MovesAnEarlierRunAsideEachTime) {
  const std::string dir = Fresh("old_run");
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(PrepareRunDir(dir).ok());
    std::ofstream(dir + "/metrics.jsonl") << "run " << i;
  }
  EXPECT_EQ(Contents(dir + "/previous-1/metrics.jsonl"), "run 1");
  EXPECT_EQ(Contents(dir + "/previous-2/metrics.jsonl"), "run 2");
  EXPECT_EQ(Contents(dir + "/metrics.jsonl"), "run 3");
}

TEST(PrepareRunDir, RemovesWhatWritersOfAKilledRunHaveLeft) {
  const std::string dir = Fresh("killed_run");
  fs::create_directories(dir + "/trace");
  // By the names that the writers give.
  std::vector<std::string> abandoned;
  for (const std::string& name : {dir + "/model.safetensors", dir + "/trace/rank12.json"}) {
    absl::StatusOr<AtomicFileWriter> writer = AtomicFileWriter::Create(name);
    ASSERT_TRUE(writer.ok()) << writer.status();
    const fs::path folder = fs::path(name).parent_path();
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.is_regular_file()) abandoned.push_back(entry.path().string());
    }
  }
  ASSERT_EQ(abandoned.size(), 2u);
  for (const std::string& path : abandoned) std::ofstream(path) << "half";
  const std::string mine = dir + "/.notes.tmp.1";
  std::ofstream(mine) << "not a run's";
  ASSERT_TRUE(PrepareRunDir(dir, dir + "/trace").ok());
  for (const std::string& path : abandoned) EXPECT_FALSE(fs::exists(path)) << path;
  EXPECT_EQ(Contents(mine), "not a run's");
}

TEST(PrepareRunDir, MovesATraceFolderTogetherWithItsRun) {
  const std::string dir = Fresh("traced_run");
  fs::create_directories(dir + "/trace");
  std::ofstream(dir + "/trace/rank0.json") << "traced";
  std::ofstream(dir + "/metrics.jsonl") << "run";
  EXPECT_EQ(*PrepareRunDir(dir), dir + "/previous-1");
  EXPECT_EQ(Contents(dir + "/previous-1/trace/rank0.json"), "traced");
  EXPECT_EQ(Contents(dir + "/previous-1/metrics.jsonl"), "run");
  EXPECT_FALSE(fs::exists(dir + "/trace"));
}

TEST(PrepareRunDir, MovesTheTracesInTheTraceFolderWhereverItIsInTheRunFolder) {
  for (const std::string place : {"trace", "other", "deep/er", "trace/in"}) {
    const std::string dir = Fresh("traced_elsewhere");
    const std::string traces = dir + "/" + place;
    fs::create_directories(traces);
    std::ofstream(traces + "/rank0.json") << "zero";
    std::ofstream(traces + "/rank11.json") << "eleven";
    std::ofstream(traces + "/rank01.json") << "not a trace's name";
    std::ofstream(dir + "/metrics.jsonl") << "run";
    // However the folder is named.
    fs::create_directory_symlink(traces, dir + ".link");
    EXPECT_EQ(*PrepareRunDir(dir, dir + ".link/"), dir + "/previous-1") << place;
    fs::remove(dir + ".link");
    EXPECT_EQ(Contents(dir + "/previous-1/" + place + "/rank0.json"), "zero") << place;
    EXPECT_EQ(Contents(dir + "/previous-1/" + place + "/rank11.json"), "eleven") << place;
    EXPECT_EQ(Contents(dir + "/previous-1/metrics.jsonl"), "run") << place;
    // The folder stays, as whoever holds its lock needs.
    EXPECT_EQ(Contents(traces + "/rank01.json"), "not a trace's name") << place;
    EXPECT_FALSE(fs::exists(traces + "/rank0.json")) << place;
  }
}

TEST(PrepareRunDir, MovesTracesInTheRunFolderItself) {
  for (const bool traced_again : {true, false}) {
    const std::string dir = Fresh("traced_here");
    fs::create_directories(dir);
    std::ofstream(dir + "/rank0.json") << "zero";
    std::ofstream(dir + "/metrics.jsonl") << "run";
    EXPECT_EQ(*PrepareRunDir(dir, traced_again ? dir + "/." : ""), dir + "/previous-1");
    EXPECT_EQ(Contents(dir + "/previous-1/rank0.json"), "zero");
    EXPECT_EQ(Contents(dir + "/previous-1/metrics.jsonl"), "run");
    EXPECT_FALSE(fs::exists(dir + "/rank0.json"));
  }
}

TEST(PrepareRunDir, LeavesATraceFolderOutsideTheRunFolderAlone) {
  const std::string dir = Fresh("run_of_two"), traces = Fresh("run_of_two.trace");
  fs::create_directories(traces);
  std::ofstream(traces + "/rank0.json") << "zero";
  EXPECT_EQ(*PrepareRunDir(dir, traces), "");
  EXPECT_EQ(Contents(traces + "/rank0.json"), "zero");
}

TEST(CheckTraceDir, RefusesAFolderThatStandsWhereAFileOfTheRunWill) {
  EXPECT_TRUE(CheckTraceDir("runs/a", "runs/a").ok());
  EXPECT_TRUE(CheckTraceDir("runs/a", "runs/a/trace").ok());
  EXPECT_TRUE(CheckTraceDir("runs/a", "runs/metrics.jsonl").ok());
  for (const std::string trace : {"runs/a/metrics.jsonl", "runs/b/../a//summary.json/x/"}) {
    const absl::Status status = CheckTraceDir("runs/a", trace);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << trace;
    EXPECT_NE(status.message().find(trace), absl::string_view::npos) << status;
  }
}

TEST(PrepareRunDir, LeavesForeignFilesWhereTheyAre) {
  const std::string dir = Fresh("foreign");
  ASSERT_TRUE(PrepareRunDir(dir).ok());
  std::ofstream(dir + "/notes.txt") << "mine";
  EXPECT_EQ(*PrepareRunDir(dir), "");
  EXPECT_EQ(Contents(dir + "/notes.txt"), "mine");
}

TEST(PrepareRunDir, AFileInTheWayIsAnErrorThatNamesIt) {
  const std::string path = Fresh("in_the_way");
  std::ofstream(path) << "x";
  const auto result = PrepareRunDir(path + "/run");
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.status().message().find(path), absl::string_view::npos);
}

TEST(PrepareRunDir, MovesADanglingSymbolicLinkAsideToo) {
  const std::string dir = Fresh("dangling");
  fs::create_directories(dir);
  fs::create_symlink("/nonexistent/file", dir + "/metrics.jsonl");
  EXPECT_EQ(*PrepareRunDir(dir), dir + "/previous-1");
  EXPECT_TRUE(JsonLinesFile::Create(dir + "/metrics.jsonl").ok());
}

TEST(RunDirLock, KeepsASecondRunOutUntilTheFirstEnds) {
  const std::string dir = Fresh("locked") + "/a/b";
  {
    const auto first = RunDirLock::Acquire(dir);
    ASSERT_TRUE(first.ok()) << first.status();
    const auto second = RunDirLock::Acquire(dir);
    ASSERT_FALSE(second.ok());
    EXPECT_NE(second.status().message().find(dir), absl::string_view::npos);
  }
  EXPECT_TRUE(RunDirLock::Acquire(dir).ok());
}

TEST(RunDirLock, NamesTheFlagThatGaveTheFolder) {
  const std::string dir = Fresh("locked_trace");
  const auto first = RunDirLock::Acquire(dir, "--trace");
  const auto second = RunDirLock::Acquire(dir, "--trace");
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().message(),
            "another run is writing to " + dir + "; choose another --trace");
}

TEST(JsonLinesFile, EveryLineIsInTheFileAsSoonAsItIsAppended) {
  const std::string path = Fresh("lines.jsonl");
  JsonLinesFile file = *JsonLinesFile::Create(path);
  ASSERT_TRUE(file.Append("{\"a\":1}").ok());
  EXPECT_EQ(Contents(path), "{\"a\":1}\n");
  ASSERT_TRUE(file.Append("{\"a\":2}").ok());
  EXPECT_EQ(Contents(path), "{\"a\":1}\n{\"a\":2}\n");
}

TEST(CheckFreeSpace, RefusesMoreThanTheDiskHasFree) {
  const std::string folder = ::testing::TempDir();
  EXPECT_TRUE(CheckFreeSpace(folder, 1).ok());
  const absl::Status status = CheckFreeSpace(folder, int64_t{1} << 62);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_NE(status.message().find(folder), absl::string_view::npos);
  EXPECT_FALSE(CheckFreeSpace("/nonexistent/folder", 1).ok());
}

TEST(CheckFreeSpaceForTrace, KeepsTheWeightsRoomOnTheirDisk) {
  const std::string folder = ::testing::TempDir();
  constexpr int64_t kFarTooMuch = int64_t{1} << 61;
  EXPECT_TRUE(CheckFreeSpaceForTrace(folder, 1, folder, 1).ok());
  for (const auto& [trace, weights] : {std::pair(kFarTooMuch, int64_t{1}), {1, kFarTooMuch}}) {
    const absl::Status status = CheckFreeSpaceForTrace(folder, trace, folder, weights);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_NE(status.message().find(folder), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find("--trace"), absl::string_view::npos) << status;
  }
  // Another disk's room is not the weights'.
  EXPECT_TRUE(CheckFreeSpaceForTrace("/proc", kFarTooMuch, folder, kFarTooMuch).ok());
}

TEST(JsonLinesFile, RefusesToOverwriteAndToWriteNowhere) {
  const std::string path = Fresh("exists.jsonl");
  std::ofstream(path) << "x";
  EXPECT_FALSE(JsonLinesFile::Create(path).ok());
  EXPECT_EQ(Contents(path), "x");
  EXPECT_FALSE(JsonLinesFile::Create("/nonexistent/file").ok());
}

TEST(JsonLinesFile, ALineThatDoesNotFitIsTakenBack) {
  // A file-size limit stands for a full disk: the kernel writes what fits, then refuses.
  const std::string path = Fresh("limited.jsonl");
  JsonLinesFile file = *JsonLinesFile::Create(path);
  ASSERT_TRUE(file.Append("first").ok());
  std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit small = {10, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = file.Append("a line that is too long");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find(path), absl::string_view::npos);
  EXPECT_EQ(Contents(path), "first\n");
}

}  // namespace
}  // namespace dim0
