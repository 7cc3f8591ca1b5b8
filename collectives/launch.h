// How a launcher tells a process which rank of which job it is.
#ifndef DIM0_COLLECTIVES_LAUNCH_H_
#define DIM0_COLLECTIVES_LAUNCH_H_

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace dim0 {

struct Launch {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;   // among the ranks of the machine
  int local_size = 1;   // how many these are
  std::string address;  // where rank 0 is, a name or an IP address
  int port = 0;         // that rank 0 listens at
};

// Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (torchrun's); or else
// OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE (Open MPI's); or else PMI_RANK,
// PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS (Hydra's, the mpirun of MPICH and Intel MPI); or
// else SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and SLURM_STEP_TASKS_PER_NODE, of which the
// largest counts. Where the last of the four is missing all ranks are on one machine. With more
// than one rank MASTER_ADDR and MASTER_PORT say where rank 0 is. Where TORCHELASTIC_USE_AGENT_STORE
// is True torchrun listens at that port itself, and the next one is the job's.
//
// Nothing if none of them says that this is a rank. Error: InvalidArgument, naming the variable.
absl::StatusOr<std::optional<Launch>> ReadLaunchEnvironment(
    const std::function<const char*(const char*)>& variable = [](const char* name) {
      return static_cast<const char*>(std::getenv(name));
    });

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_LAUNCH_H_
