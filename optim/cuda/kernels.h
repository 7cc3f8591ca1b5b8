// The optimizers' kernels: what CudaOptimizerKernels launches. Each function enqueues on `stream`
// and returns what the launch returned. Pointers are device memory, aligned to their elements;
// 16-byte accesses are made where they may be. An element's result depends neither on the alignment
// nor on its place among the elements, to the bit: sources are compiled so that no product is fused
// with a sum, and sums over rows have an order that depends on the rows' length only.
//
// `gradient_scale` is one float in device memory; a kernel whose scale is not finite writes
// nothing.
#ifndef DIM0_OPTIM_CUDA_KERNELS_H_
#define DIM0_OPTIM_CUDA_KERNELS_H_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "runtime/cuda/element_type.h"

namespace dim0::cuda {

// The types of all tensors' values and gradients in one call.
struct ValueTypes {
  ElementType value, gradient;
};

struct AdamWItem {
  void* value;
  const void* gradient;
  float* first_moment;
  float* second_moment;
  __nv_bfloat16* copy;  // gets the new value, rounded; or null
  int64_t size;
  float keep;  // 1 - lr wd
};
struct AdamWCoefficients {
  float beta1, fresh1, beta2, fresh2;  // fresh: 1 - beta
  float step_size;                     // lr / (1 - beta1^t)
  float root_correction;               // 1 / sqrt(1 - beta2^t)
  float eps;
};

// See OptimizerKernels::AdamW. As many launches as the kernel's parameters take to describe the
// items: one up to 64 of them.
cudaError_t LaunchAdamW(ValueTypes types, std::span<const AdamWItem> items,
                        const AdamWCoefficients& coefficients, const float* gradient_scale,
                        cudaStream_t stream);

struct SignMomentumItem {
  void* value;
  const void* gradient;
  float* momentum;
  __nv_bfloat16* copy;  // gets the new value, rounded; or null
  int64_t size;
};
struct SignMomentumCoefficients {
  float momentum, fresh;  // fresh: 1 - momentum
  float lr;
  float keep;  // 1 - lr wd
};

// See OptimizerKernels::SignMomentum. As many launches as the kernel's parameters take to describe
// the items: one up to 64 of them.
cudaError_t LaunchSignMomentum(ValueTypes types, std::span<const SignMomentumItem> items,
                               const SignMomentumCoefficients& coefficients,
                               const float* gradient_scale, cudaStream_t stream);

struct RmnpItem {
  void* value;
  const void* gradient;
  float* momentum;
  __nv_bfloat16* copy;  // gets the new value, rounded; or null
  float* row_squares;   // for the two halves; else null
  int64_t rows, cols;
  double step;  // lr times the matrix' scale
};
struct RmnpCoefficients {
  float momentum;
  bool nesterov;
  float keep;  // 1 - lr wd
  double eps;
  double power;
};

// See OptimizerKernels::Rmnp, RmnpRowSquares and RmnpApply. As many launches as the kernel's
// parameters take to describe the items: one up to 48 of them.
enum class RmnpPhase : uint8_t { kUpdate, kRowSquares, kApply };
cudaError_t LaunchRmnp(RmnpPhase phase, ValueTypes types, std::span<const RmnpItem> items,
                       const RmnpCoefficients& coefficients, const float* gradient_scale,
                       cudaStream_t stream);

// See OptimizerKernels::Momentum.
cudaError_t LaunchMomentum(ElementType gradient_type, const void* gradient, float* momentum,
                           int64_t size, float mu, bool nesterov, const float* gradient_scale,
                           ElementType out_type, void* out, cudaStream_t stream);

// See OptimizerKernels::ApplyUpdate; `copy` may be null.
cudaError_t LaunchApplyUpdate(ElementType value_type, void* value, ElementType update_type,
                              const void* update, int64_t size, float step, float keep,
                              const float* gradient_scale, __nv_bfloat16* copy,
                              cudaStream_t stream);

// c[i] <- c[i] + value on the diagonals of `batch` matrices [n, n] that lie one after another. The
// type may be float16, too.
cudaError_t LaunchAddToDiagonal(ElementType type, void* c, int64_t n, int64_t batch, float value,
                                cudaStream_t stream);

}  // namespace dim0::cuda

#endif  // DIM0_OPTIM_CUDA_KERNELS_H_
