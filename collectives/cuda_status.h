// CUDA's error codes as Status.
#ifndef DIM0_COLLECTIVES_CUDA_STATUS_H_
#define DIM0_COLLECTIVES_CUDA_STATUS_H_

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dim0::cuda {

// "WHAT: CUDA's name and description of the error", ResourceExhausted where memory ran out,
// Internal otherwise.
absl::Status ToStatus(cudaError_t error, absl::string_view what);

}  // namespace dim0::cuda

#endif  // DIM0_COLLECTIVES_CUDA_STATUS_H_
