// Kernels over one tensor, each element for itself.
#include <cstdint>

#include "optim/cuda/kernels.h"
#include "runtime/cuda/element_type.h"
#include "runtime/cuda/kernel.h"
#include "runtime/cuda/quad.h"

namespace dim0::cuda {
namespace {

constexpr int kThreads = 256;

int BlocksFor(int64_t size) {
  return static_cast<int>(CeilDivide(size, int64_t{kThreads} * kQuad));
}

// The first element of this thread's quad.
__device__ __forceinline__ int64_t ThisQuad() {
  return (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kQuad;
}

template <typename Gradient, typename Out>
__global__ void __launch_bounds__(kThreads)
    MomentumKernel(const Gradient* gradient, float* momentum, int64_t size, float mu, bool nesterov,
                   const float* gradient_scale, Out* out) {
  const float scale = *gradient_scale;
  const int64_t i = ThisQuad();
  const int64_t count = size - i;
  if (!isfinite(scale) || count <= 0) return;
  const bool aligned_gradient = IsQuadAligned(gradient), aligned_momentum = IsQuadAligned(momentum);
  float g[kQuad], v[kQuad];
  LoadQuad(gradient + i, count, aligned_gradient, g);
  LoadQuad(momentum + i, count, aligned_momentum, v);
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    g[j] = scale * g[j];
    v[j] = mu * v[j] + g[j];
    g[j] = nesterov ? g[j] + mu * v[j] : v[j];
  }
  StoreQuad(momentum + i, count, aligned_momentum, v);
  StoreQuad(out + i, count, IsQuadAligned(out), g);
}

template <typename Value, typename Update>
__global__ void __launch_bounds__(kThreads)
    ApplyUpdateKernel(Value* value, const Update* update, int64_t size, float step, float keep,
                      const float* gradient_scale, __nv_bfloat16* copy) {
  const int64_t i = ThisQuad();
  const int64_t count = size - i;
  if (!isfinite(*gradient_scale) || count <= 0) return;
  const bool aligned = IsQuadAligned(value);
  float w[kQuad], u[kQuad];
  LoadQuad(value + i, count, aligned, w);
  LoadQuad(update + i, count, IsQuadAligned(update), u);
#pragma unroll
  for (int j = 0; j < kQuad; ++j) w[j] = keep * w[j] - step * u[j];
  StoreQuad(value + i, count, aligned, w);
  if (copy != nullptr) StoreQuad(copy + i, count, IsQuadAligned(copy), w);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    AddToDiagonalKernel(T* c, int64_t n, int64_t batch, float value) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n * batch) return;
  // Element (i % n, i % n) of matrix i / n.
  T* const element = c + i * n + i % n;
  *element = FromFloat<T>(ToFloat(*element) + value);
}

}  // namespace

cudaError_t LaunchMomentum(ElementType gradient_type, const void* gradient, float* momentum,
                           int64_t size, float mu, bool nesterov, const float* gradient_scale,
                           ElementType out_type, void* out, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return WithElementType(gradient_type, [&](auto gradient_tag) {
    return WithElementType(out_type, [&](auto out_tag) {
      using Gradient = typename decltype(gradient_tag)::type;
      using Out = typename decltype(out_tag)::type;
      return Launch(MomentumKernel<Gradient, Out>, BlocksFor(size), kThreads, 0, stream,
                    static_cast<const Gradient*>(gradient), momentum, size, mu, nesterov,
                    gradient_scale, static_cast<Out*>(out));
    });
  });
}

cudaError_t LaunchApplyUpdate(ElementType value_type, void* value, ElementType update_type,
                              const void* update, int64_t size, float step, float keep,
                              const float* gradient_scale, __nv_bfloat16* copy,
                              cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return WithElementType(value_type, [&](auto value_tag) {
    return WithElementType(update_type, [&](auto update_tag) {
      using Value = typename decltype(value_tag)::type;
      using Update = typename decltype(update_tag)::type;
      return Launch(ApplyUpdateKernel<Value, Update>, BlocksFor(size), kThreads, 0, stream,
                    static_cast<Value*>(value), static_cast<const Update*>(update), size, step,
                    keep, gradient_scale, copy);
    });
  });
}

cudaError_t LaunchAddToDiagonal(ElementType type, void* c, int64_t n, int64_t batch, float value,
                                cudaStream_t stream) {
  if (n * batch == 0) return cudaSuccess;
  return WithMatrixType(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Launch(AddToDiagonalKernel<T>, static_cast<int>(CeilDivide(n * batch, kThreads)),
                  kThreads, 0, stream, static_cast<T*>(c), n, batch, value);
  });
}

}  // namespace dim0::cuda
