#include "runtime/cuda/cuda_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/cuda/cuda_device.h"

namespace dim0::cuda {

absl::Status CheckCuda() {
  DIM0_RETURN_IF_ERROR(CountGpus().status());
  return CheckGpu(0);
}

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int ordinal) {
  return CudaDevice::Create(ordinal);
}

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateCudaRanks(
    std::vector<std::unique_ptr<ProcessGroup>> hosts, absl::Span<const int> ordinals,
    const ProcessGroupOptions& options) {
  DIM0_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  for (const int ordinal : ordinals) {
    if (ordinal < gpus) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("each rank of a machine takes a GPU, and CUDA shows this process ", gpus,
                     ": start fewer ranks here"));
  }
  return CreateNcclRanks(std::move(hosts), ordinals, options);
}

}  // namespace dim0::cuda
