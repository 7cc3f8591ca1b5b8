// A build without CUDA.

#include "runtime/cuda/cuda_backend.h"

namespace dim0::cuda {

absl::Status CheckCuda(int /*ordinal*/) {
  return absl::UnavailableError(
      "this build has no CUDA: install the CUDA Toolkit and NCCL, set CUDA_HOME and build again");
}

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int /*ordinal*/) { return CheckCuda(); }

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateCudaRanks(
    std::vector<std::unique_ptr<ProcessGroup>> /*hosts*/, absl::Span<const int> /*ordinals*/,
    const ProcessGroupOptions& /*options*/) {
  return CheckCuda();
}

}  // namespace dim0::cuda
