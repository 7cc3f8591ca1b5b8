#include "collectives/launch.h"

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

absl::StatusOr<std::optional<Launch>> Read(const Variables& variables) {
  return ReadLaunchEnvironment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

// What torchrun sets on the second process of a machine.
const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node-0"},
                             {"MASTER_PORT", "29500"}};

Variables With(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}
Variables Without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(LaunchTest, ReadsWhatTorchrunSets) {
  const auto launch = Read(kTorchrun);
  ASSERT_TRUE(launch.ok()) << launch.status();
  ASSERT_TRUE(launch->has_value());
  EXPECT_EQ((*launch)->rank, 5);
  EXPECT_EQ((*launch)->world_size, 8);
  EXPECT_EQ((*launch)->local_rank, 1);
  EXPECT_EQ((*launch)->local_size, 4);
  EXPECT_EQ((*launch)->address, "node-0");
  EXPECT_EQ((*launch)->port, 29500);
}

TEST(LaunchTest, WhereNothingSaysHowManyRanksAMachineHasItHasAll) {
  const auto launch = Read(Without(kTorchrun, "LOCAL_WORLD_SIZE"));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->local_size, 8);
}

TEST(LaunchTest, OfSlurmsRanksOfEachMachineTheMostCount) {
  const Variables slurm = {{"SLURM_PROCID", "5"},
                           {"SLURM_NTASKS", "9"},
                           {"SLURM_LOCALID", "1"},
                           {"MASTER_ADDR", "node-0"},
                           {"MASTER_PORT", "29500"}};
  for (const auto& [text, most] : std::map<std::string, int>{
           {"9", 9}, {"3(x3)", 3}, {"4(x2),1", 4}, {"1,2(x4)", 2}, {"2,2,5", 5}}) {
    const auto launch = Read(With(slurm, "SLURM_STEP_TASKS_PER_NODE", text));
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_EQ((*launch)->local_size, most) << text;
  }
}

TEST(LaunchTest, TakesTheNextPortWhereTorchrunsAgentListensAtTheFirst) {
  auto launch = Read(With(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True"));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->port, 29501);
  launch = Read(With(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "False"));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->port, 29500);
}

TEST(LaunchTest, ReadsWhatOpenMpiAndSlurmSetAfterTorchruns) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                         {"SLURM_PROCID", "0"},
                         {"SLURM_NTASKS", "1"},
                         {"SLURM_LOCALID", "0"},
                         {"MASTER_ADDR", "node-0"},
                         {"MASTER_PORT", "1"}};
  auto launch = Read(variables);
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->rank, 2);
  EXPECT_EQ((*launch)->world_size, 3);
  EXPECT_EQ((*launch)->local_size, 1);
  variables.insert(kTorchrun.begin(), kTorchrun.end());
  launch = Read(variables);
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->rank, 5);
  launch = Read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_LOCALID", "0"}});
  ASSERT_TRUE(launch.ok()) << "one rank needs nobody's address: " << launch.status();
  EXPECT_EQ((*launch)->world_size, 1);
}

// What Hydra, MPICH's mpirun, sets on the last process of its machine, and its user for all.
const Variables kHydra = {{"PMI_RANK", "3"},        {"PMI_SIZE", "4"},
                          {"PMI_FD", "9"},          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"}, {"MASTER_ADDR", "node-0"},
                          {"MASTER_PORT", "29500"}};

TEST(LaunchTest, ReadsWhatHydraSetsAfterTorchrunsAndOpenMpis) {
  auto launch = Read(kHydra);
  ASSERT_TRUE(launch.ok()) << launch.status();
  ASSERT_TRUE(launch->has_value());
  EXPECT_EQ((*launch)->rank, 3);
  EXPECT_EQ((*launch)->world_size, 4);
  EXPECT_EQ((*launch)->local_rank, 1);
  EXPECT_EQ((*launch)->local_size, 2);
  EXPECT_EQ((*launch)->address, "node-0");
  EXPECT_EQ((*launch)->port, 29500);
  Variables variables = kHydra;
  variables.insert({{"OMPI_COMM_WORLD_RANK", "0"},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  launch = Read(variables);
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->world_size, 2);
  variables.insert(kTorchrun.begin(), kTorchrun.end());
  launch = Read(variables);
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->world_size, 8);
  launch = Read({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}, {"MPI_LOCALRANKID", "0"}});
  ASSERT_TRUE(launch.ok()) << "one rank needs nobody's address: " << launch.status();
  EXPECT_EQ((*launch)->world_size, 1);
}

TEST(LaunchTest, HydrasProcessesAreNotTheOneThatSlurmHasStartedHydraAs) {
  auto launch = Read(
      With(With(With(kHydra, "SLURM_PROCID", "0"), "SLURM_NTASKS", "1"), "SLURM_LOCALID", "0"));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->rank, 3);
  // srun's own PMI has no number on the machine.
  launch = Read({{"PMI_RANK", "1"},
                 {"PMI_SIZE", "2"},
                 {"SLURM_PROCID", "1"},
                 {"SLURM_NTASKS", "2"},
                 {"SLURM_LOCALID", "0"},
                 {"MASTER_ADDR", "node-0"},
                 {"MASTER_PORT", "29500"}});
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ((*launch)->rank, 1);
  EXPECT_EQ((*launch)->local_rank, 0);
}

TEST(LaunchTest, WithoutALauncherThereIsNoRank) {
  const auto launch = Read({{"MASTER_ADDR", "node-0"}, {"LOCAL_RANK", "1"}});
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_FALSE(launch->has_value());
}

TEST(LaunchTest, ANumberOfRanksAloneIsAnAllocationsAndNoLaunch) {
  for (const Variables& variables :
       {Without(kTorchrun, "RANK"), Variables{{"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}}}) {
    const auto launch = Read(variables);
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_FALSE(launch->has_value());
  }
}

TEST(LaunchTest, AnythingElseIsRefusedByTheVariablesName) {
  const struct {
    Variables variables;
    const char* error;
  } cases[] = {
      {Without(kTorchrun, "WORLD_SIZE"), "WORLD_SIZE is not set"},
      {Without(kTorchrun, "LOCAL_RANK"), "LOCAL_RANK is not set"},
      {Without(kTorchrun, "MASTER_ADDR"), "MASTER_ADDR is not set"},
      {With(kTorchrun, "MASTER_ADDR", ""), "MASTER_ADDR is not set"},
      {Without(kTorchrun, "MASTER_PORT"), "MASTER_PORT is not set"},
      {With(kTorchrun, "RANK", "8"), "RANK is '8'; it must be a number from 0 to 7"},
      {With(kTorchrun, "RANK", "-1"), "RANK is '-1'"},
      {With(kTorchrun, "RANK", "five"), "RANK is 'five'"},
      {With(kTorchrun, "WORLD_SIZE", "0"), "WORLD_SIZE is '0'"},
      {With(kTorchrun, "WORLD_SIZE", "99999999999"), "WORLD_SIZE is '99999999999'"},
      {With(kTorchrun, "LOCAL_RANK", "8"), "LOCAL_RANK is '8'"},
      {With(kTorchrun, "LOCAL_WORLD_SIZE", "x"), "LOCAL_WORLD_SIZE is 'x'"},
      {With(kTorchrun, "LOCAL_WORLD_SIZE", "0"), "LOCAL_WORLD_SIZE is '0'"},
      {With(kTorchrun, "LOCAL_WORLD_SIZE", "1"),
       "LOCAL_WORLD_SIZE is '1', but the job has 8 ranks, and this machine 2 at least"},
      {With(kTorchrun, "LOCAL_WORLD_SIZE", "9"), "LOCAL_WORLD_SIZE is '9', but the job has 8"},
      {With(kTorchrun, "LOCAL_WORLD_SIZE", "4,"), "LOCAL_WORLD_SIZE is '4,'"},
      {With(kTorchrun, "MASTER_PORT", "65536"), "MASTER_PORT is '65536'"},
      {With(kTorchrun, "MASTER_PORT", ""), "MASTER_PORT is ''"},
      {With(With(kTorchrun, "MASTER_PORT", "65535"), "TORCHELASTIC_USE_AGENT_STORE", "True"),
       "choose a lower one"},
      {Without(kHydra, "MPI_LOCALRANKID"),
       "MPI_LOCALRANKID is not set; it must be the rank's number among those of its machine"},
      {Without(kHydra, "PMI_RANK"), "PMI_RANK is not set"},
      {Without(kHydra, "PMI_SIZE"), "PMI_SIZE is not set"},
      {Without(kHydra, "MASTER_ADDR"), "PMI_RANK and PMI_SIZE say that this is rank 3 of 4"},
  };
  for (const auto& bad : cases) {
    const auto launch = Read(bad.variables);
    EXPECT_EQ(launch.status().code(), absl::StatusCode::kInvalidArgument) << bad.error;
    EXPECT_THAT(std::string(launch.status().message()), HasSubstr(bad.error));
  }
}

}  // namespace
}  // namespace dim0
