// Newton-Schulz orthogonalisation: X = U S V^T becomes about U V^T by five odd polynomials of X,
// each made of matrix products only (Jordan et al., "Muon: an optimizer for hidden layers in neural
// networks").
#ifndef DIM0_OPTIM_NEWTON_SCHULZ_H_
#define DIM0_OPTIM_NEWTON_SCHULZ_H_

#include <cstdint>

#include "optim/kernels.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace dim0 {

// Floats of workspace for a matrix [m, n]: one more of it, and two s x s with s = min(m, n).
int64_t NewtonSchulzWorkspace(int64_t m, int64_t n);

// FLOPs executed for a matrix [m, n], symmetric products counted as one triangle.
double NewtonSchulzFlops(int64_t m, int64_t n);

// Enqueues the iteration on `matrix` [m, n], in place; `workspace` holds NewtonSchulzWorkspace
// floats. Works on the smaller side without transposing in memory. Singular values end in about
// [0.68, 1.2]; a zero matrix stays zero, and the length of the input does not matter.
void NewtonSchulz(OptimizerKernels& kernels, Stream& stream, const Tensor& matrix,
                  float* workspace);

}  // namespace dim0

#endif  // DIM0_OPTIM_NEWTON_SCHULZ_H_
