#include "optim/newton_schulz.h"

#include <algorithm>
#include <utility>

namespace dim0 {
namespace {

// Five times X <- a X + (b A + c A A) X with A = X X^T (Jordan's coefficients).
constexpr int kSteps = 5;
constexpr float kA = 3.4445f;
constexpr float kB = -4.7750f;
constexpr float kC = 2.0315f;

}  // namespace

int64_t NewtonSchulzWorkspace(int64_t m, int64_t n) {
  const int64_t s = std::min(m, n);
  return m * n + 2 * s * s;
}

double NewtonSchulzFlops(int64_t m, int64_t n) {
  const auto s = static_cast<double>(std::min(m, n));
  const auto l = static_cast<double>(std::max(m, n));
  return kSteps * (s * (s + 1) * l + s * (s + 1) * s + 2 * s * s * l);
}

void NewtonSchulz(OptimizerKernels& kernels, Stream& stream, const Tensor& matrix,
                  float* workspace) {
  const bool tall = matrix.rows > matrix.cols;
  const int64_t s = std::min(matrix.rows, matrix.cols);
  Tensor x = matrix;
  Tensor next = F32(workspace, matrix.rows, matrix.cols);
  const Tensor gram = F32(workspace + matrix.size(), s, s);
  const Tensor polynomial = F32(workspace + matrix.size() + s * s, s, s);

  kernels.Normalize(stream, x);
  for (int step = 0; step < kSteps; ++step) {
    kernels.SymmetricProduct(stream, 1, x, tall, 0, gram);
    // polynomial = b A + c A A; A is symmetric, so A A = A A^T.
    kernels.Copy(stream, gram, polynomial);
    kernels.SymmetricProduct(stream, kC, gram, false, kB, polynomial);
    kernels.Copy(stream, x, next);
    if (tall) {
      kernels.MatMul(stream, 1, x, polynomial, kA, next);
    } else {
      kernels.MatMul(stream, 1, polynomial, x, kA, next);
    }
    std::swap(x, next);
  }
  // An odd number of swaps leaves the result in the workspace.
  static_assert(kSteps % 2 == 1);
  kernels.Copy(stream, x, next);
}

}  // namespace dim0
