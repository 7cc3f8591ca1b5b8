#include "model/kernels.h"

#include "model/cpu/cpu_kernels.h"
#include "model/cuda/cuda_kernels.h"
#include "runtime/check.h"

namespace dim0 {

std::unique_ptr<Kernels> CreateKernels(Device& device) {
  switch (device.backend()) {
    case Backend::kCpu:
      return std::make_unique<cpu::CpuKernels>(static_cast<cpu::CpuDevice&>(device));
    case Backend::kCuda:
      return cuda::CreateCudaKernels(device);
  }
  DIM0_CHECK(false);
}

}  // namespace dim0
