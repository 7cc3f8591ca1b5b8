// The factory in builds without CUDA.
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/process_group.h"

namespace dim0 {

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateNcclRanks(
    std::vector<std::unique_ptr<ProcessGroup>> /*hosts*/, absl::Span<const int> /*devices*/,
    const ProcessGroupOptions& /*options*/) {
  return absl::UnimplementedError(
      "this build has no CUDA: build where the CUDA Toolkit is, or compute on the CPU");
}

}  // namespace dim0
