#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/nccl/staged_ranks.h"
#include "collectives/process_group.h"

namespace dim0 {

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateStagedNcclRanks(
    int /*world_size*/, const ProcessGroupOptions& options) {
  return CreateNcclRanks({}, {}, options);
}

std::string WhyNoNcclRanks(int /*world_size*/) { return "this build has no CUDA"; }

}  // namespace dim0
