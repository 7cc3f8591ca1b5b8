#include "optim/newton_schulz.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"

namespace dim0 {
namespace {

constexpr NewtonSchulzStep kJordanStep = {3.4445f, -4.7750f, 2.0315f};
constexpr NewtonSchulzStep kJordan[] = {kJordanStep, kJordanStep, kJordanStep, kJordanStep,
                                        kJordanStep};
constexpr NewtonSchulzStep kPolarExpress[] = {
    {8.156554524902461f, -22.48329292557795f, 15.878769915207462f},
    {4.042929935166739f, -2.808917465908714f, 0.5000178451051316f},
    {3.8916678022926607f, -2.772484153217685f, 0.5060648178503393f},
    {3.285753657755655f, -2.3681294933425376f, 0.46449024233003106f},
    {2.3465413258596377f, -1.7097828382687081f, 0.42323551169305323f}};
constexpr NewtonSchulzStep kYou[] = {{4.0848f, -6.8946f, 2.9270f},
                                     {3.9505f, -6.3029f, 2.6377f},
                                     {3.7418f, -5.5913f, 2.3037f},
                                     {2.8769f, -3.1427f, 1.2046f},
                                     {2.8366f, -3.0525f, 1.2012f}};

// The Frobenius norm at which the iteration starts. Polar Express's first polynomial leaves room
// above 1 for rounding.
double StartLength(NewtonSchulzCoefficients coefficients) {
  return coefficients == NewtonSchulzCoefficients::kPolarExpress ? 1 / 1.02 : 1;
}

// The part of `workspace` that begins at element `begin`, as a matrix.
Tensor Part(const Tensor& workspace, int64_t begin, int64_t rows, int64_t cols) {
  return {workspace.at(begin), workspace.dtype, rows, cols};
}

}  // namespace

absl::StatusOr<NewtonSchulzCoefficients> ParseNewtonSchulzCoefficients(absl::string_view name) {
  if (name == "jordan") return NewtonSchulzCoefficients::kJordan;
  if (name == "polar_express") return NewtonSchulzCoefficients::kPolarExpress;
  if (name == "you") return NewtonSchulzCoefficients::kYou;
  return absl::NotFoundError(
      absl::StrCat("--ns_coefficients=", name, " is unknown; choose jordan, polar_express or you"));
}

absl::StatusOr<NewtonSchulzAlgorithm> ParseNewtonSchulzAlgorithm(absl::string_view name) {
  if (name == "auto") return NewtonSchulzAlgorithm::kAuto;
  if (name == "standard") return NewtonSchulzAlgorithm::kStandard;
  if (name == "symmetric") return NewtonSchulzAlgorithm::kSymmetric;
  if (name == "gram") return NewtonSchulzAlgorithm::kGram;
  if (name == "gram_accurate") return NewtonSchulzAlgorithm::kGramAccurate;
  return absl::NotFoundError(
      absl::StrCat("--ns_algorithm=", name,
                   " is unknown; choose auto, standard, symmetric, gram or gram_accurate"));
}

absl::Span<const NewtonSchulzStep> Steps(NewtonSchulzCoefficients coefficients) {
  switch (coefficients) {
    case NewtonSchulzCoefficients::kPolarExpress:
      return kPolarExpress;
    case NewtonSchulzCoefficients::kYou:
      return kYou;
    case NewtonSchulzCoefficients::kJordan:
      break;
  }
  return kJordan;
}

NewtonSchulz::NewtonSchulz(const NewtonSchulzConfig& config, int64_t m, int64_t n)
    : coefficients_(config.coefficients),
      m_(m),
      n_(n),
      s_(std::min(m, n)),
      l_(std::max(m, n)),
      algorithm_(config.algorithm) {
  if (algorithm_ != NewtonSchulzAlgorithm::kAuto) return;
  algorithm_ = NewtonSchulzAlgorithm::kSymmetric;
  const double symmetric = flops();
  algorithm_ = NewtonSchulzAlgorithm::kGram;
  if (symmetric <= flops()) algorithm_ = NewtonSchulzAlgorithm::kSymmetric;
}

bool NewtonSchulz::gram() const {
  return algorithm_ == NewtonSchulzAlgorithm::kGram ||
         algorithm_ == NewtonSchulzAlgorithm::kGramAccurate;
}

bool NewtonSchulz::restarts_before(int step) const {
  if (algorithm_ == NewtonSchulzAlgorithm::kGramAccurate) return step == 1 || step == 3;
  return step == 2;
}

double NewtonSchulz::flops() const {
  const auto s = static_cast<double>(s_);
  const auto l = static_cast<double>(l_);
  const int steps = Steps(coefficients_).size();
  const double apply = 2 * s * s * l;  // of an s x s matrix to X
  const double triangle = s * (s + 1);
  if (algorithm_ == NewtonSchulzAlgorithm::kStandard) return steps * (2 * apply + 2 * s * s * s);
  if (!gram()) return steps * (triangle * l + triangle * s + apply);
  double flops = triangle * l + apply;  // the first Gram matrix, the last application
  for (int step = 0; step < steps; ++step) {
    const bool restart = restarts_before(step);
    if (restart) flops += apply + triangle * l;
    flops += triangle * s;                                                          // Z
    if (step > 0 && !restart) flops += triangle * s;                                // Q
    if (step + 1 < steps && !restarts_before(step + 1)) flops += 2 * triangle * s;  // T and R
  }
  return flops;
}

int64_t NewtonSchulz::workspace() const { return 2 * s_ * l_ + (gram() ? 5 : 2) * s_ * s_; }

void NewtonSchulz::Enqueue(OptimizerKernels& kernels, Stream& stream, const Tensor& in,
                           const Tensor& out, void* workspace) const {
  const int64_t batch = in.rows / m_;
  DIM0_CHECK(in.rows == batch * m_ && in.cols == n_ && out.rows == in.rows && out.cols == n_);
  const Tensor memory = {workspace, kernels.matrix_dtype(), batch * this->workspace()};
  kernels.Normalize(stream, batch, in, StartLength(coefficients_), Part(memory, 0, in.rows, n_));
  if (gram()) {
    EnqueueGram(kernels, stream, batch, out, memory);
  } else {
    EnqueueDirect(kernels, stream, batch, out, memory);
  }
}

void NewtonSchulz::EnqueueDirect(OptimizerKernels& kernels, Stream& stream, int64_t batch,
                                 const Tensor& out, const Tensor& workspace) const {
  const bool tall = m_ > n_;
  Tensor x = Part(workspace, 0, batch * m_, n_);
  Tensor next = Part(workspace, x.size(), batch * m_, n_);
  const Tensor gram = Part(workspace, 2 * x.size(), batch * s_, s_);
  const Tensor polynomial = Part(workspace, 2 * x.size() + gram.size(), batch * s_, s_);

  for (const NewtonSchulzStep& step : Steps(coefficients_)) {
    // a I + b A + c A A, so that one product more makes the next X.
    if (algorithm_ == NewtonSchulzAlgorithm::kStandard) {
      kernels.MatMul(stream, batch, 1, x, tall, x, !tall, 0, gram, gram);
      kernels.MatMul(stream, batch, step.c, gram, false, gram, false, step.b, gram, polynomial);
    } else {
      kernels.SymmetricProduct(stream, batch, 1, x, tall, 0, gram, gram);
      kernels.SymmetricProduct(stream, batch, step.c, gram, false, step.b, gram, polynomial);
    }
    kernels.AddToDiagonal(stream, batch, polynomial, step.a);
    Apply(kernels, stream, batch, polynomial, x, next);
    std::swap(x, next);
  }
  kernels.Copy(stream, x, out);
}

void NewtonSchulz::EnqueueGram(OptimizerKernels& kernels, Stream& stream, int64_t batch,
                               const Tensor& out, const Tensor& workspace) const {
  const bool tall = m_ > n_;
  Tensor x = Part(workspace, 0, batch * m_, n_);
  Tensor next = Part(workspace, x.size(), batch * m_, n_);
  int64_t taken = 2 * x.size();
  const auto take = [&] {
    const Tensor square = Part(workspace, taken, batch * s_, s_);
    taken += square.size();
    return square;
  };
  // R = X X^T of the X that Q would make; Q is what X is still to be multiplied by.
  Tensor r = take(), z = take(), q = take(), t = take(), spare = take();

  const absl::Span<const NewtonSchulzStep> steps = Steps(coefficients_);
  kernels.SymmetricProduct(stream, batch, 1, x, tall, 0, r, r);
  bool fresh = true;  // Q is the identity and not in memory
  for (int i = 0; i < static_cast<int>(steps.size()); ++i) {
    const auto& [a, b, c] = steps[i];
    if (restarts_before(i)) {
      Apply(kernels, stream, batch, q, x, next);
      std::swap(x, next);
      kernels.SymmetricProduct(stream, batch, 1, x, tall, 0, r, r);
      fresh = true;
    }
    // Z = b R + c R R: the step multiplies X by a I + Z.
    kernels.SymmetricProduct(stream, batch, c, r, false, b, r, z);
    if (fresh) {
      kernels.Copy(stream, z, q);
      kernels.AddToDiagonal(stream, batch, q, a);
      fresh = false;
    } else {
      kernels.SymmetricMatMul(stream, batch, 1, q, z, a, q, spare);
      std::swap(q, spare);
    }
    if (i + 1 == static_cast<int>(steps.size()) || restarts_before(i + 1)) continue;
    // R <- (a I + Z) R (a I + Z).
    kernels.SymmetricMatMul(stream, batch, 1, r, z, a, r, t);
    kernels.SymmetricMatMul(stream, batch, 1, z, t, a, t, r);
  }
  Apply(kernels, stream, batch, q, x, next);
  kernels.Copy(stream, next, out);
}

// next = P X, or X P where X is tall.
void NewtonSchulz::Apply(OptimizerKernels& kernels, Stream& stream, int64_t batch,
                         const Tensor& polynomial, const Tensor& x, const Tensor& next) const {
  if (m_ > n_) {
    kernels.MatMul(stream, batch, 1, x, false, polynomial, false, 0, next, next);
  } else {
    kernels.MatMul(stream, batch, 1, polynomial, false, x, false, 0, next, next);
  }
}

}  // namespace dim0
