// A build without CUDA.

#include "model/cuda/cuda_kernels.h"
#include "runtime/check.h"

namespace dim0::cuda {

// There is no CUDA device to call it with.
std::unique_ptr<Kernels> CreateCudaKernels(Device& /*device*/) { DIM0_CHECK(false); }

}  // namespace dim0::cuda
