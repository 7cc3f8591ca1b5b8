// The CUDA backend's door: what the factories of runtime/device.h call. Builds without CUDA have
// one that says so.
#ifndef DIM0_RUNTIME_CUDA_CUDA_BACKEND_H_
#define DIM0_RUNTIME_CUDA_CUDA_BACKEND_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/process_group.h"
#include "runtime/device.h"

namespace dim0::cuda {

// See CheckBackend.
absl::Status CheckCuda();

// See CreateDevice.
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int ordinal);

// See CreateLocalRanks. InvalidArgument if there are fewer GPUs than ranks.
absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateCudaRanks(
    int ranks, const ProcessGroupOptions& options);

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_CUDA_BACKEND_H_
