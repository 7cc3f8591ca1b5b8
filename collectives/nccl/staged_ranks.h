// NCCL's ranks for tests that were written for host memory: every call copies its buffers to the
// GPU, waits for its stream and the group's health, and copies the results back. So what holds for
// ranks that meet on the host can be asked of these, too.
#ifndef DIM0_COLLECTIVES_NCCL_STAGED_RANKS_H_
#define DIM0_COLLECTIVES_NCCL_STAGED_RANKS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/process_group.h"

namespace dim0 {

// `world_size` ranks in this process, rank r on CUDA device r.
absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateStagedNcclRanks(
    int world_size, const ProcessGroupOptions& options);

// Why so many ranks cannot be had here; empty if they can.
std::string WhyNoNcclRanks(int world_size);

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_NCCL_STAGED_RANKS_H_
