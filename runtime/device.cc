#include "runtime/device.h"

#include "absl/strings/str_cat.h"
#include "runtime/cpu/cpu_device.h"
#include "runtime/cuda/cuda_backend.h"

namespace dim0 {

DType DefaultParameterDType(Backend backend) {
  return backend == Backend::kCpu ? DType::kFloat32 : DType::kBFloat16;
}

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(Backend backend, int threads,
                                                     Residency residency, int ordinal) {
  if (threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a rank needs at least 1 thread, not ", threads, "; see --threads_per_rank"));
  }
  switch (backend) {
    case Backend::kCpu:
      return std::make_unique<cpu::CpuDevice>(threads, residency);
    case Backend::kCuda:
      return cuda::CreateCudaDevice(ordinal);
  }
  return absl::InternalError("unknown device backend");
}

absl::Status CheckBackend(Backend backend) {
  return backend == Backend::kCuda ? cuda::CheckCuda() : absl::OkStatus();
}

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateLocalRanks(
    Backend backend, int ranks, const ProcessGroupOptions& options) {
  return backend == Backend::kCuda ? cuda::CreateCudaRanks(ranks, options)
                                   : CreateThreadRanks(ranks, options);
}

}  // namespace dim0
