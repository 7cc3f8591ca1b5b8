#include "collectives/launch.h"

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dim0 {
namespace {

struct Launcher {
  const char* mark;  // set in the processes that it has started
  const char *rank, *world_size, *local_rank;
};
// The processes that mpirun starts inherit Slurm's variables for mpirun itself, where that runs in
// an allocation: Slurm comes after it. But srun may set PMI_RANK, too.
constexpr Launcher kLaunchers[] = {
    {"RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
    {"PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
};

using Variable = std::function<const char*(const char*)>;

// The value of a variable as a number in [low, high].
absl::StatusOr<int> Number(const Variable& variable, const char* name, int low, int high) {
  const char* const text = variable(name);
  if (text == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is not set, though the rest of the launch environment is"));
  }
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < low || value > high) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is '", text, "'; it must be a number from ", low, " to ", high));
  }
  return value;
}

}  // namespace

absl::StatusOr<std::optional<Launch>> ReadLaunchEnvironment(const Variable& variable) {
  constexpr int kMaxRanks = 1 << 20;
  for (const Launcher& launcher : kLaunchers) {
    // A number of ranks alone is an allocation's, or a container's, and no launcher's.
    if (variable(launcher.mark) == nullptr) continue;
    Launch launch;
    absl::StatusOr<int> number = Number(variable, launcher.world_size, 1, kMaxRanks);
    if (!number.ok()) return number.status();
    launch.world_size = *number;
    number = Number(variable, launcher.rank, 0, launch.world_size - 1);
    if (!number.ok()) return number.status();
    launch.rank = *number;
    if (variable(launcher.local_rank) != nullptr) {
      number = Number(variable, launcher.local_rank, 0, launch.world_size - 1);
      if (!number.ok()) return number.status();
      launch.local_rank = *number;
    } else if (launch.world_size > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(launcher.local_rank,
                       " is not set; it must be the rank's number among those "
                       "of its machine, from 0 on"));
    }
    if (launch.world_size == 1) return launch;

    const char* const address = variable("MASTER_ADDR");
    if (address == nullptr || *address == '\0') {
      return absl::InvalidArgumentError(absl::StrCat(
          "MASTER_ADDR is not set; it must be the name or address of rank 0's machine (",
          launcher.rank, " and ", launcher.world_size, " say that this is rank ", launch.rank,
          " of ", launch.world_size, "; without a launcher, unset them)"));
    }
    launch.address = address;
    number = Number(variable, "MASTER_PORT", 1, 65535);
    if (!number.ok()) return number.status();
    launch.port = *number;
    const char* const agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != nullptr && absl::string_view(agent) == "True") {
      if (launch.port == 65535) {
        return absl::InvalidArgumentError(
            "MASTER_PORT is 65535 and torchrun's own; the job needs the port after it, so choose a "
            "lower one");
      }
      ++launch.port;
    }
    return launch;
  }
  return std::nullopt;
}

}  // namespace dim0
