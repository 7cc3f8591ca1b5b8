#include "optim/kernels.h"

#include "optim/cpu/cpu_kernels.h"
#include "optim/cuda/cuda_kernels.h"

namespace dim0 {

std::unique_ptr<OptimizerKernels> CreateOptimizerKernels(Device& device) {
  switch (device.backend()) {
    case Backend::kCpu:
      return cpu::CreateOptimizerKernels(static_cast<cpu::CpuDevice&>(device));
    case Backend::kCuda:
      return cuda::CreateOptimizerKernels(device);
  }
  DIM0_CHECK(false);
}

}  // namespace dim0
