// The CUDA backend's door: what the factories of runtime/device.h call. Builds without CUDA have
// one that says so.
#ifndef DIM0_RUNTIME_CUDA_CUDA_BACKEND_H_
#define DIM0_RUNTIME_CUDA_CUDA_BACKEND_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/process_group.h"
#include "runtime/device.h"

namespace dim0::cuda {

// See CheckBackend.
absl::Status CheckCuda(int ordinal = 0);

// See CreateDevice. A process that sees one GPU has been given that one, whatever its local rank.
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int ordinal);

// The ranks of this process, one for each of `hosts`, on the GPUs of these numbers. See
// CreateLocalRanks. InvalidArgument if there are too few GPUs.
absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateCudaRanks(
    std::vector<std::unique_ptr<ProcessGroup>> hosts, absl::Span<const int> ordinals,
    const ProcessGroupOptions& options);

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_CUDA_BACKEND_H_
