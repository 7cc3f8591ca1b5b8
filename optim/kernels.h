// The optimizers' arithmetic as a seam: each optimizer is written once against this class, each
// backend implements it in its own folder. Every method enqueues on `stream`; tensors must live
// until the stream has passed.
//
// `gradient_scale` is one float in device memory by which gradients are multiplied as they are
// read. If it is not finite, the method changes nothing: a step whose gradients are broken leaves
// no trace.
//
// Values, gradients and what travels between ranks ("any type" below) are float32 or bfloat16, each
// on its own; state is float32. Arithmetic is in float32, and results are rounded to nearest, ties
// to even. A float32 value may have a `copy` in bfloat16, which gets the new value in the same
// pass; the copy has no rows where there is none.
#ifndef DIM0_OPTIM_KERNELS_H_
#define DIM0_OPTIM_KERNELS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "runtime/device.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace dim0 {

// All of one shape, but for a `copy` without rows; any may be empty.
struct AdamWTensor {
  Tensor value, gradient, first_moment, second_moment;
  Tensor copy = {};
  double weight_decay = 0;
};
struct AdamWArguments {
  double lr, beta1, beta2, eps;
  int64_t step;  // counted from 1
  const float* gradient_scale;
};

// All of one shape, but for a `copy` without rows; any may be empty.
struct SignMomentumTensor {
  Tensor value, gradient, momentum;
  Tensor copy = {};
};
struct SignMomentumArguments {
  double lr, momentum, weight_decay;
  const float* gradient_scale;
};

// Rows of one matrix, or the same part of some of its rows; `scale` multiplies lr in the update but
// not in the decay.
struct RmnpTensor {
  Tensor value, gradient, momentum;
  Tensor copy = {};
  double scale = 1;
  // Where rows are cut between ranks: one float a row, device memory, for sums of squares.
  float* row_squares = nullptr;
};
struct RmnpArguments {
  double lr, momentum, eps, weight_decay;
  bool nesterov;
  double power;  // in [0, 1); 0 is RMNP
  const float* gradient_scale;
};

class OptimizerKernels {
 public:
  virtual ~OptimizerKernels() = default;

  // Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2, with
  // W (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps). One op for all tensors.
  virtual void AdamW(Stream& stream, std::vector<AdamWTensor> tensors,
                     const AdamWArguments& arguments) = 0;

  // Bernstein et al., "signSGD: compressed optimisation for non-convex problems", algorithm 2
  // ("Signum"), with decoupled weight decay: V <- mu V + (1 - mu) G; W <- W (1 - lr wd) - lr
  // sign(V), where sign(0) is 0. One op for all tensors.
  virtual void SignMomentum(Stream& stream, std::vector<SignMomentumTensor> tensors,
                            const SignMomentumArguments& arguments) = 0;

  // Deng et al., "RMNP: row-momentum normalized preconditioning". V <- mu V + G; U = G + mu V (or V
  // without Nesterov); W <- W (1 - lr wd) - lr scale U_i / max(||U_i||, eps)^(1 - power), row by
  // row, one op for all matrices. A row's result depends on that row only, to the bit.
  virtual void Rmnp(Stream& stream, std::vector<RmnpTensor> matrices,
                    const RmnpArguments& arguments) = 0;

  // The same in two halves, for layouts that cut rows. The first updates the momentum and sets
  // row_squares to the sums of U^2 over the part of each row that is here; the second takes the
  // sums over whole rows from there and updates the values.
  virtual void RmnpRowSquares(Stream& stream, std::vector<RmnpTensor> parts,
                              const RmnpArguments& arguments) = 0;
  virtual void RmnpApply(Stream& stream, std::vector<RmnpTensor> parts,
                         const RmnpArguments& arguments) = 0;

  // V <- mu V + G; out = G + mu V with Nesterov, V without. Same shapes; `gradient` and `out` of
  // any type.
  virtual void Momentum(Stream& stream, const Tensor& gradient, const Tensor& momentum, float mu,
                        bool nesterov, const float* gradient_scale, const Tensor& out) = 0;

  // W <- W (1 - decay) - step * update. Same shapes; `value` and `update` of any type.
  virtual void ApplyUpdate(Stream& stream, const Tensor& value, const Tensor& copy,
                           const Tensor& update, float step, float decay,
                           const float* gradient_scale) = 0;

  // What follows is what Newton-Schulz is made of. Each tensor is `batch` matrices of one shape,
  // one below the other, for each of which the formula holds.

  // Makes what its first ops would otherwise make: a backend's handles and their memory. For before
  // other ranks of the process can be waiting for this one, since what allocates device memory then
  // may wait for them. Errors: the backend's.
  virtual absl::Status Prepare() { return absl::OkStatus(); }

  // The type that it runs in here: of the operands of the matrix products, all of them alike, which
  // sum in float32. It may be float16, too, which then is one of "any type" below.
  virtual DType matrix_dtype() const = 0;

  // So many elements of matrices of one shape keep the device busy; with more at once it is no
  // faster.
  virtual int64_t matrix_elements_at_once() const = 0;

  // out = length x / ||x||_F, the norm in float64; a zero matrix stays zero. Each of any type;
  // `out` may be `x`.
  virtual void Normalize(Stream& stream, int64_t batch, const Tensor& x, double length,
                         const Tensor& out) = 0;

  // c [s, s] = alpha op(x) op(x)^T + beta added, with op the transpose if `transposed`. Here and
  // below, `added` has the shape of c and may be c or a factor, but c is no factor; with beta 0,
  // `added` is not read.
  virtual void SymmetricProduct(Stream& stream, int64_t batch, float alpha, const Tensor& x,
                                bool transposed, float beta, const Tensor& added,
                                const Tensor& c) = 0;

  // c [s, s] = alpha a b + beta added, where `added` and the product a b are symmetric: a and b
  // commute, as polynomials of one symmetric matrix do. One triangle is enough.
  virtual void SymmetricMatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a,
                               const Tensor& b, float beta, const Tensor& added,
                               const Tensor& c) = 0;

  // c = alpha op(a) op(b) + beta added, op the transpose where asked for.
  virtual void MatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a, bool transpose_a,
                      const Tensor& b, bool transpose_b, float beta, const Tensor& added,
                      const Tensor& c) = 0;

  // c [s, s] <- c + value I; of matrix_dtype().
  virtual void AddToDiagonal(Stream& stream, int64_t batch, const Tensor& c, float value) = 0;

  // Same size; each of any type.
  virtual void Copy(Stream& stream, const Tensor& source, const Tensor& target) = 0;
};

// Kernels for `device`'s backend; `device` outlives them.
std::unique_ptr<OptimizerKernels> CreateOptimizerKernels(Device& device);

}  // namespace dim0

#endif  // DIM0_OPTIM_KERNELS_H_
