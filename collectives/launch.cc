#include "collectives/launch.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace dim0 {
namespace {

struct Launcher {
  const char* mark;  // set in the processes that it has started
  const char *rank, *world_size, *local_rank, *local_size;
};
// The processes that mpirun starts inherit Slurm's variables for mpirun itself, where that runs in
// an allocation: Slurm comes after it. But srun may set PMI_RANK, too.
constexpr Launcher kLaunchers[] = {
    {"RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
    {"PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
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

// The largest number, in [low, high], of a list as Slurm writes it: "4(x2),1" is 4, 4 and 1.
absl::StatusOr<int> LargestNumber(const char* name, absl::string_view text, int low, int high) {
  int largest = 0;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int value = 0;
    if (!absl::SimpleAtoi(part.substr(0, part.find("(x")), &value) || value < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, " is '", text, "'; it must be how many ranks a machine has, as 4 or 4(x2),1"));
    }
    largest = std::max(largest, value);
  }
  if (largest >= low && largest <= high) return largest;
  return absl::InvalidArgumentError(absl::StrCat(name, " is '", text, "', but the job has ", high,
                                                 " ranks, and this machine ", low, " at least"));
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
    launch.local_size = launch.world_size;
    if (const char* const text = variable(launcher.local_size); text != nullptr) {
      number = LargestNumber(launcher.local_size, text, launch.local_rank + 1, launch.world_size);
      if (!number.ok()) return number.status();
      launch.local_size = *number;
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
