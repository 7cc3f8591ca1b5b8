// Sign momentum's arithmetic on the CPU.
#ifndef DIM0_OPTIM_CPU_SIGN_MOMENTUM_H_
#define DIM0_OPTIM_CPU_SIGN_MOMENTUM_H_

#include <vector>

#include "optim/kernels.h"
#include "runtime/cpu/thread_pool.h"

namespace dim0::cpu {

// See OptimizerKernels::SignMomentum; blocks until done.
void UpdateSignMomentum(ThreadPool& pool, const std::vector<SignMomentumTensor>& tensors,
                        const SignMomentumArguments& arguments);

}  // namespace dim0::cpu

#endif  // DIM0_OPTIM_CPU_SIGN_MOMENTUM_H_
