// train as a process for each rank, as launchers start them.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/free_port.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/run_program.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

using Arguments = std::vector<std::string>;

class LaunchTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    std::string text;
    for (int i = 0; i < 5000; ++i) text += static_cast<char>('a' + i * i % 23);
    Write("text.txt", text);
  }

  Arguments Flags(const std::string& run_dir, int steps) const {
    return {"--layers=1",
            "--width=24",
            "--heads=2",
            "--vocab=256",
            "--seq_len=16",
            "--batch=2",
            "--threads_per_rank=1",
            "--val_sequences=4",
            "--optimizer=muon",
            absl::StrCat("--steps=", steps),
            absl::StrCat("--data=", Path("text.txt")),
            absl::StrCat("--run_dir=", Path(run_dir))};
  }

  // One of `world_size` ranks, as torchrun starts it on `machines` machines.
  std::unique_ptr<RunningProgram> Start(int rank, int world_size, int port, const Arguments& flags,
                                        int machines = 1) {
    Arguments all = {absl::StrCat("RANK=", rank),
                     absl::StrCat("LOCAL_WORLD_SIZE=", world_size / machines),
                     absl::StrCat("LOCAL_RANK=", rank),
                     absl::StrCat("WORLD_SIZE=", world_size),
                     "MASTER_ADDR=127.0.0.1",
                     absl::StrCat("MASTER_PORT=", port),
                     "tools/train"};
    all.insert(all.end(), flags.begin(), flags.end());
    const std::string folder = absl::StrCat(streams(), "/", ++started_);
    fs::create_directory(folder);
    return std::make_unique<RunningProgram>("/usr/bin/env", all, folder);
  }

  // The losses, one a line, of a run's log.
  std::string Losses(const std::string& run_dir) const {
    std::string losses;
    std::ifstream metrics(Path(run_dir) + "/metrics.jsonl");
    for (std::string line; std::getline(metrics, line);) {
      const auto entry = nlohmann::json::parse(line);
      for (const char* key : {"loss", "grad_norm", "val_loss"}) {
        if (entry.contains(key)) absl::StrAppend(&losses, entry[key].dump(), "\n");
      }
    }
    return losses;
  }

 private:
  int started_ = 0;
};

TEST_F(LaunchTest, ProcessesTrainAsThreadsDoToTheBit) {
  Arguments flags = Flags("threads", 4);
  flags.push_back("--ranks=3");
  ASSERT_EQ(Run("tools/train", flags).exit_status, 0);
  const int port = FreePort();
  std::vector<std::unique_ptr<RunningProgram>> ranks;
  for (const int rank : {2, 0, 1}) ranks.push_back(Start(rank, 3, port, Flags("processes", 4)));
  for (const auto& rank : ranks) {
    const Outcome outcome = rank->Wait();
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    // Only rank 0, started second, tells how it goes.
    EXPECT_EQ(outcome.out.empty(), rank != ranks[1]) << outcome.out;
  }
  EXPECT_NE(Losses("threads"), "");
  EXPECT_EQ(Losses("processes"), Losses("threads"));
  EXPECT_EQ(Slurp(Path("processes/model.safetensors")), Slurp(Path("threads/model.safetensors")));
}

TEST_F(LaunchTest, RanksWithDifferentFlagsOrDataDoNotTrain) {
  Write("other.txt", std::string(5000, 'x'));
  for (const std::string& other :
       {std::string("--seed=7"), absl::StrCat("--data=", Path("other.txt")),
        std::string("--schedule=cosine"), std::string("--clip=0"), std::string("--steps=5")}) {
    const int port = FreePort();
    auto leader = Start(0, 2, port, Flags("run", 4));
    Arguments flags = Flags("run", 4);
    flags.push_back(other);
    auto second = Start(1, 2, port, flags);
    const std::string flag = other.substr(0, other.find('='));
    for (RunningProgram* rank : {leader.get(), second.get()}) {
      const Outcome outcome = rank->Wait();
      EXPECT_EQ(outcome.exit_status, 1) << other;
      EXPECT_THAT(outcome.err, HasSubstr(absl::StrCat("ranks 0 and 1 have different ", flag)));
    }
    EXPECT_FALSE(fs::exists(Path("run/model.safetensors")));
  }
}

// Each process would do in all of the machine's memory, but not in its share: a rank gathers
// a block of 12 width^2 float32 parameters.
TEST_F(LaunchTest, TheProcessesOfAMachineShareItsMemory) {
  Write("long.txt", std::string(400'000, 'a'));
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  int64_t kib = 0;
  while (key != "MemAvailable:" && meminfo >> key) {
  }
  ASSERT_TRUE(meminfo >> kib);
  const int ranks = static_cast<int>(kib >> 19) + 8;  // 512 MiB each at most
  Arguments flags = Flags("run", 1);
  for (const char* const flag : {"--width=4096", "--batch=1", "--collective_timeout=1s"}) {
    flags.push_back(flag);
  }
  flags.push_back(absl::StrCat("--data=", Path("long.txt")));
  Outcome outcome = Start(0, ranks, FreePort(), flags)->Wait();
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("the run needs "), HasSubstr("iB a rank and "),
                                 HasSubstr("MiB are available; ")));
  outcome = Start(0, ranks, FreePort(), flags, /*machines=*/ranks)->Wait();
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("did not come to rank 0"));
}

TEST_F(LaunchTest, ASignalBeforeTheRanksHaveMetEndsTheProcessAtOnce) {
  auto leader = Start(0, 2, FreePort(), Flags("run", 1));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  leader->Send(SIGINT);
  EXPECT_EQ(leader->Wait().signal, SIGINT);
  EXPECT_FALSE(fs::exists(Path("run")));
}

TEST_F(LaunchTest, EachProcessWritesItsTraceAndTheReportIsOfAll) {
  const int port = FreePort();
  std::vector<std::unique_ptr<RunningProgram>> ranks;
  for (const int rank : {0, 1}) {
    Arguments flags = Flags("run", 3);
    flags.push_back(absl::StrCat("--trace=", Path("trace")));
    ranks.push_back(Start(rank, 2, port, flags));
  }
  const Outcome leader = ranks[0]->Wait(), other = ranks[1]->Wait();
  EXPECT_EQ(leader.exit_status, 0) << leader.err;
  EXPECT_EQ(other.exit_status, 0) << other.err;
  EXPECT_TRUE(fs::exists(Path("trace/rank0.json")));
  EXPECT_TRUE(fs::exists(Path("trace/rank1.json")));
  EXPECT_THAT(leader.out, HasSubstr(" on 2 ranks."));
}

TEST_F(LaunchTest, ARankThatIsKilledEndsTheOthersWithOneLine) {
  const int port = FreePort();
  auto leader = Start(0, 2, port, Flags("run", 1000000));
  auto other = Start(1, 2, port, Flags("run", 1000000));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (Losses("run").empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  other->Send(SIGKILL);
  EXPECT_EQ(other->Wait().signal, SIGKILL);
  const Outcome outcome = leader->Wait();
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1"));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_FALSE(fs::exists(Path("run/model.safetensors")));
}

TEST_F(LaunchTest, ARankThatDoesNotComeIsNamedByTheDeadline) {
  Arguments flags = Flags("run", 1);
  flags.push_back("--collective_timeout=2s");
  const Outcome outcome = Start(0, 2, FreePort(), flags)->Wait();
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1"));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_FALSE(fs::exists(Path("run")));
}

TEST_F(LaunchTest, AMasterThatCannotBeReachedIsNamed) {
  Arguments flags = Flags("run", 1);
  flags.push_back("--collective_timeout=2s");
  const int port = FreePort();
  const Outcome outcome = Start(1, 2, port, flags)->Wait();
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.err, HasSubstr(absl::StrCat("127.0.0.1:", port)));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
}

TEST_F(LaunchTest, AnotherNumberOfRanksThanOfProcessesIsAnErrorOfTheCommandLine) {
  const int port = FreePort();
  std::vector<std::unique_ptr<RunningProgram>> ranks;
  for (const int rank : {0, 1}) {
    Arguments flags = Flags("run", 1);
    flags.push_back("--ranks=3");
    ranks.push_back(Start(rank, 2, port, flags));
  }
  for (const auto& rank : ranks) {
    const Outcome outcome = rank->Wait();
    EXPECT_EQ(outcome.exit_status, 2);
    EXPECT_THAT(outcome.err, HasSubstr("--ranks=3, but a launcher has started 2 processes"));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_THAT(outcome.out, IsEmpty());
  }
  EXPECT_FALSE(fs::exists(Path("run")));
}

TEST_F(LaunchTest, TheNumberOfProcessesMayBeGivenAsRanks) {
  Arguments flags = Flags("run", 1);
  flags.push_back("--ranks=2");
  const int port = FreePort();
  auto leader = Start(0, 2, port, flags), other = Start(1, 2, port, flags);
  for (RunningProgram* rank : {leader.get(), other.get()}) {
    const Outcome outcome = rank->Wait();
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  }
}

TEST_F(LaunchTest, AnEnvironmentThatContradictsItselfIsAnErrorOfTheCommandLine) {
  const Outcome outcome = Start(2, 2, FreePort(), Flags("run", 1))->Wait();
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("RANK"));
  EXPECT_THAT(outcome.out, IsEmpty());
}

}  // namespace
}  // namespace dim0
