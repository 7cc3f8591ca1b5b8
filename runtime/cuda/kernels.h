// The runtime's own kernels, which CudaDevice's operations launch. Each function enqueues on
// `stream` and returns what the launch returned. Pointers are device memory, aligned to their
// elements; 16-byte accesses are made where they may be, and results do not depend on the
// alignment. Sizes may be 0: nothing is launched then, or the result is that of no elements.
//
// Sums are made in an order that depends on the sizes only: two runs, and two GPUs of different
// kinds, agree to the bit.
#ifndef DIM0_RUNTIME_CUDA_KERNELS_H_
#define DIM0_RUNTIME_CUDA_KERNELS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "runtime/cuda/element_type.h"

namespace dim0::cuda {

// Bytes that a `workspace` below has, aligned to 8. Launches that may run at the same time must not
// share one; on one stream they may. Its contents do not matter.
inline constexpr int64_t kSumWorkspaceBytes = 32832;

struct ConstArray {
  const void* data;
  int64_t size;  // elements
};
// results[i] = sum of the squares of the elements of arrays[i], in float64. The order of a sum
// depends on the sizes of all arrays.
cudaError_t LaunchSumsOfSquares(ElementType type, const std::vector<ConstArray>& arrays,
                                void* workspace, double* results, cudaStream_t stream);

// *result = sum of (a[i] - b[i])^2, differences and sum in float64.
cudaError_t LaunchSumOfSquaredDifferences(ElementType type, const void* a, const void* b,
                                          int64_t size, void* workspace, double* result,
                                          cudaStream_t stream);

// out[i] = x[i] length / ||x||, the norm and the quotient in float64; all zeros if the norm is 0.
// `out` may be `x`. For each of `batch` matrices of `size` elements that lie one after another. The
// types may be float16, too.
cudaError_t LaunchNormalize(ElementType type_x, const void* x, int64_t size, int64_t batch,
                            double length, ElementType type_out, void* out, void* workspace,
                            cudaStream_t stream);

// See Device::ClipScale.
cudaError_t LaunchClipScale(const double* stats, int ranks, int64_t stride, int64_t count,
                            double clip, float* scale, cudaStream_t stream);

// target[i] = source[rows[i]] for i < num_rows, rows of `cols` elements. Every rows[i] must be a
// row of `source`.
cudaError_t LaunchGatherRows(ElementType type, const void* source, const int32_t* rows,
                             int64_t num_rows, int64_t cols, void* target, cudaStream_t stream);

// target[rows[i]] += source[i] for i < num_rows, sums in float32, rounded once. Every rows[i] must
// be a row of `target`, and none may be named twice.
cudaError_t LaunchAddRows(ElementType type, const void* source, const int32_t* rows,
                          int64_t num_rows, int64_t cols, void* target, cudaStream_t stream);

// target[i] = source[i], rounded to nearest, ties to even. The two do not overlap. The types may be
// float16, too.
cudaError_t LaunchCast(ElementType type_source, const void* source, int64_t size,
                       ElementType type_target, void* target, cudaStream_t stream);

// a[i] = b[i] + factor c[i].
cudaError_t LaunchTriad(const float* b, float factor, const float* c, int64_t size, float* a,
                        cudaStream_t stream);

// out[i] = a number in [-1, 1] made of i and `seed` by mixing bits: data whose products cost a GPU
// what real data costs it, which constants do not.
cudaError_t LaunchFill(ElementType type, uint32_t seed, int64_t size, void* out,
                       cudaStream_t stream);

// Scales x by the power of two that brings its largest magnitude into [0.5, 1). Values that are all
// zero, or one of which is infinite, stay as they are.
cudaError_t LaunchScaleToUnitRange(float* x, int64_t size, void* workspace, cudaStream_t stream);

// ratios[r] = p_rd / mean over j != d of |p_rj| for each row r of `products` [rows, m], d being
// r * stride; means in float64. m is at least 2.
cudaError_t LaunchDominanceRatios(const float* products, int64_t rows, int64_t m, int64_t stride,
                                  double* ratios, cudaStream_t stream);

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_KERNELS_H_
