#include "runtime/cuda/cuda_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/cuda/cuda_device.h"

namespace dim0::cuda {

namespace {

// Of a rank with this number on its machine, where the process sees so many GPUs. A batch system
// may show each process its own one only.
int OrdinalAmong(int gpus, int ordinal) { return gpus == 1 ? 0 : ordinal; }

}  // namespace

absl::Status CheckCuda(int ordinal) {
  DIM0_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  ordinal = OrdinalAmong(gpus, ordinal);
  return ordinal < gpus ? CheckGpu(ordinal) : absl::OkStatus();  // CreateCudaRanks refuses it
}

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int ordinal) {
  DIM0_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  return CudaDevice::Create(OrdinalAmong(gpus, ordinal));
}

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateCudaRanks(
    std::vector<std::unique_ptr<ProcessGroup>> hosts, absl::Span<const int> ordinals,
    const ProcessGroupOptions& options) {
  DIM0_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  if (ordinals.size() == 1) {
    return CreateNcclRanks(std::move(hosts), {OrdinalAmong(gpus, ordinals[0])}, options);
  }
  for (const int ordinal : ordinals) {
    if (ordinal < gpus) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("each rank of a machine takes a GPU, and CUDA shows this process ", gpus,
                     ": start fewer ranks here"));
  }
  return CreateNcclRanks(std::move(hosts), ordinals, options);
}

}  // namespace dim0::cuda
