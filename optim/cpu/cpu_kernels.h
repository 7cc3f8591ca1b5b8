// The optimizers' arithmetic on a CPU rank.
#ifndef DIM0_OPTIM_CPU_CPU_KERNELS_H_
#define DIM0_OPTIM_CPU_CPU_KERNELS_H_

#include <memory>

#include "optim/kernels.h"
#include "runtime/cpu/cpu_device.h"

namespace dim0::cpu {

std::unique_ptr<OptimizerKernels> CreateOptimizerKernels(CpuDevice& device);

}  // namespace dim0::cpu

#endif  // DIM0_OPTIM_CPU_CPU_KERNELS_H_
