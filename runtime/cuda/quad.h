// Arrays of float32 and bfloat16 read and written four elements at a time. Four, because most of
// what these kernels move is float32: an access is 16 bytes a thread, and what a warp touches is
// one whole piece of memory in either type.
#ifndef DIM0_RUNTIME_CUDA_QUAD_H_
#define DIM0_RUNTIME_CUDA_QUAD_H_

#include <cstdint>

#include "runtime/cuda/kernel.h"

namespace dim0::cuda {

inline constexpr int kQuad = 4;

template <typename T>
struct alignas(kQuad * sizeof(T)) QuadStorage {
  T values[kQuad];
};

// Whether quads of T that start at p are one access each.
template <typename T>
__host__ __device__ inline bool IsQuadAligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(QuadStorage<T>) == 0;
}

// v = the first `count` of the four elements at p, any count >= 1; zeros behind them. `aligned`: p
// satisfies IsQuadAligned.
template <typename T>
__device__ __forceinline__ void LoadQuad(const T* p, int64_t count, bool aligned,
                                         float (&v)[kQuad]) {
  if (aligned && count >= kQuad) {
    const QuadStorage<T> quad = *reinterpret_cast<const QuadStorage<T>*>(p);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) v[j] = ToFloat(quad.values[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kQuad; ++j) v[j] = j < count ? ToFloat(p[j]) : 0.0f;
  }
}

// The reverse: writes the first `count` of v, any count >= 1.
template <typename T>
__device__ __forceinline__ void StoreQuad(T* p, int64_t count, bool aligned,
                                          const float (&v)[kQuad]) {
  if (aligned && count >= kQuad) {
    QuadStorage<T> quad;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) quad.values[j] = FromFloat<T>(v[j]);
    *reinterpret_cast<QuadStorage<T>*>(p) = quad;
  } else {
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (j < count) p[j] = FromFloat<T>(v[j]);
    }
  }
}

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_QUAD_H_
