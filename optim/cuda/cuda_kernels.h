// The CUDA backend of the optimizers' arithmetic.
#ifndef DIM0_OPTIM_CUDA_CUDA_KERNELS_H_
#define DIM0_OPTIM_CUDA_CUDA_KERNELS_H_

#include <memory>

#include "optim/kernels.h"
#include "runtime/device.h"

namespace dim0::cuda {

// `device` is a CUDA device. What Newton-Schulz is made of must be enqueued on one stream at a
// time: it shares workspaces, which are made when they are first used, and are not in the memory
// plan.
std::unique_ptr<OptimizerKernels> CreateOptimizerKernels(Device& device);

}  // namespace dim0::cuda

#endif  // DIM0_OPTIM_CUDA_CUDA_KERNELS_H_
