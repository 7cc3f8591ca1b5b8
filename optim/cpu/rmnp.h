// RMNP's arithmetic on rows and on parts of rows. All functions block until done.
#ifndef DIM0_OPTIM_CPU_RMNP_H_
#define DIM0_OPTIM_CPU_RMNP_H_

#include <vector>

#include "optim/kernels.h"
#include "runtime/cpu/thread_pool.h"

namespace dim0::cpu {

// See OptimizerKernels::Rmnp, RmnpRowSquares and RmnpApply.
void UpdateRmnp(ThreadPool& pool, const std::vector<RmnpTensor>& matrices,
                const RmnpArguments& arguments);
void AccumulateRmnpRowSquares(ThreadPool& pool, const std::vector<RmnpTensor>& parts,
                              const RmnpArguments& arguments);
void ApplyRmnp(ThreadPool& pool, const std::vector<RmnpTensor>& parts,
               const RmnpArguments& arguments);

}  // namespace dim0::cpu

#endif  // DIM0_OPTIM_CPU_RMNP_H_
