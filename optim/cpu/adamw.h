// AdamW's arithmetic on the CPU.
#ifndef DIM0_OPTIM_CPU_ADAMW_H_
#define DIM0_OPTIM_CPU_ADAMW_H_

#include <vector>

#include "optim/kernels.h"
#include "runtime/cpu/thread_pool.h"

namespace dim0::cpu {

// See OptimizerKernels::AdamW; blocks until done.
void UpdateAdamW(ThreadPool& pool, const std::vector<AdamWTensor>& tensors,
                 const AdamWArguments& arguments);

}  // namespace dim0::cpu

#endif  // DIM0_OPTIM_CPU_ADAMW_H_
