// Newton-Schulz orthogonalisation: X = U S V^T becomes about U V^T by five odd polynomials of X,
// each made of matrix products only (Jordan et al., "Muon: an optimizer for hidden layers in neural
// networks"). Everything runs on the smaller side, s x s with s = min(m, n), and nothing is
// transposed in memory: a matrix and its transpose take the same path.
#ifndef DIM0_OPTIM_NEWTON_SCHULZ_H_
#define DIM0_OPTIM_NEWTON_SCHULZ_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "optim/kernels.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace dim0 {

// A step is X <- a X + (b A + c A A) X with A = X X^T.
struct NewtonSchulzStep {
  float a, b, c;
};

enum class NewtonSchulzCoefficients : uint8_t {
  kJordan,        // one polynomial five times; singular values end in about [0.68, 1.2]
  kPolarExpress,  // Amsel et al., "The Polar Express", the minimax polynomials of each step
  kYou,           // You Jiacheng's, as in the modded-nanogpt speedrun
};

enum class NewtonSchulzAlgorithm : uint8_t {
  kAuto,          // kSymmetric or kGram, whichever needs fewer FLOPs at the shape
  kStandard,      // every product in full
  kSymmetric,     // products that are symmetric as one triangle
  kGram,          // iterates on s x s matrices; meets X again before the third step and at the end
  kGramAccurate,  // meets X also before the second and the fourth step instead of the third
};

struct NewtonSchulzConfig {
  NewtonSchulzCoefficients coefficients = NewtonSchulzCoefficients::kJordan;
  NewtonSchulzAlgorithm algorithm = NewtonSchulzAlgorithm::kAuto;
};

// "jordan", "polar_express", "you"; "auto", "standard", "symmetric", "gram", "gram_accurate".
// Errors: NotFound, listing these.
absl::StatusOr<NewtonSchulzCoefficients> ParseNewtonSchulzCoefficients(absl::string_view name);
absl::StatusOr<NewtonSchulzAlgorithm> ParseNewtonSchulzAlgorithm(absl::string_view name);

// The five steps of a set of coefficients.
absl::Span<const NewtonSchulzStep> Steps(NewtonSchulzCoefficients coefficients);

// The iteration for one shape [m, n].
class NewtonSchulz {
 public:
  NewtonSchulz(const NewtonSchulzConfig& config, int64_t m, int64_t n);

  // Never kAuto.
  NewtonSchulzAlgorithm algorithm() const { return algorithm_; }
  // Symmetric products counted as one triangle, s (s + 1) k for an inner dimension k.
  double flops() const;
  // Elements, of the kernels' matrix_dtype(), of scratch memory that Enqueue needs for each matrix.
  int64_t workspace() const;

  // out = the orthogonalised `in`, both [m, n], float32 or bfloat16; `out` may be `in`. The length
  // of `in` does not matter; a zero matrix stays zero. Or both [k m, n], for k matrices, one below
  // the other, each for itself but all at once.
  void Enqueue(OptimizerKernels& kernels, Stream& stream, const Tensor& in, const Tensor& out,
               void* workspace) const;

 private:
  bool gram() const;
  bool restarts_before(int step) const;
  // X is at the start of the workspace, which the tensor is all of.
  void EnqueueDirect(OptimizerKernels& kernels, Stream& stream, int64_t batch, const Tensor& out,
                     const Tensor& workspace) const;
  void EnqueueGram(OptimizerKernels& kernels, Stream& stream, int64_t batch, const Tensor& out,
                   const Tensor& workspace) const;
  void Apply(OptimizerKernels& kernels, Stream& stream, int64_t batch, const Tensor& polynomial,
             const Tensor& x, const Tensor& next) const;

  const NewtonSchulzCoefficients coefficients_;
  const int64_t m_, n_;
  const int64_t s_, l_;  // the smaller side and the larger
  NewtonSchulzAlgorithm algorithm_;
};

}  // namespace dim0

#endif  // DIM0_OPTIM_NEWTON_SCHULZ_H_
