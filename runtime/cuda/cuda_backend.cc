#include "runtime/cuda/cuda_backend.h"

#include <numeric>
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
    int ranks, const ProcessGroupOptions& options) {
  DIM0_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  if (ranks > gpus) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks=", ranks, " takes as many GPUs, and CUDA shows this process ", gpus));
  }
  DIM0_ASSIGN_OR_RETURN(auto hosts, CreateThreadRanks(ranks, options));
  std::vector<int> ordinals(ranks);
  std::iota(ordinals.begin(), ordinals.end(), 0);
  return CreateNcclRanks(std::move(hosts), ordinals, options);
}

}  // namespace dim0::cuda
