// The little arithmetic that NCCL leaves to its callers, as kernels.
#ifndef DIM0_COLLECTIVES_NCCL_ARITHMETIC_H_
#define DIM0_COLLECTIVES_NCCL_ARITHMETIC_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "collectives/dtype.h"

namespace dim0::cuda {

// sum[i] += term[i] for `count` elements that do not overlap. bfloat16 is added in float32 and
// rounded once; integers wrap around. Not for kByte.
cudaError_t LaunchAddTo(DType dtype, void* sum, const void* term, int64_t count,
                        cudaStream_t stream);

// Floating-point numbers as integers of the same order, every NaN above all others: NCCL's maximum
// of these is the maximum of the numbers, NaN where there is one, which its maximum of the numbers
// does not promise. kFloat32 and kBFloat16 only.
cudaError_t LaunchToKeys(DType dtype, const void* values, int32_t* keys, int64_t count,
                         cudaStream_t stream);
cudaError_t LaunchFromKeys(DType dtype, const int32_t* keys, void* values, int64_t count,
                           cudaStream_t stream);

}  // namespace dim0::cuda

#endif  // DIM0_COLLECTIVES_NCCL_ARITHMETIC_H_
