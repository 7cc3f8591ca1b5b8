// How the model's kernels read and write elements: several at a time as float32, 16 bytes an
// access where the memory allows, whatever the stored type; and how host code picks the
// instantiation for the types at hand.
#ifndef DIM0_MODEL_CUDA_ELEMENTS_H_
#define DIM0_MODEL_CUDA_ELEMENTS_H_

#include <cstdint>
#include <initializer_list>

#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {

// Elements a thread takes at a time where every type's are contiguous and aligned: the narrowest
// type's 16 bytes.
template <typename... Ts>
inline constexpr int kVector = ((sizeof(Ts) == 2) || ...) ? 8 : 4;

// values = the N elements at `source`: one element, or whole 16-byte packs, aligned.
template <int N, typename T>
__device__ __forceinline__ void Load(const T* source, float (&values)[N]) {
  if constexpr (N == 1) {
    values[0] = ToFloat(*source);
  } else {
    static_assert(N % Pack<T>::kSize == 0);
#pragma unroll
    for (int i = 0; i < N; i += Pack<T>::kSize) {
      const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(source + i);
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) values[i + j] = ToFloat(pack.values[j]);
    }
  }
}

// The other way round, each value rounded to T.
template <int N, typename T>
__device__ __forceinline__ void Store(const float (&values)[N], T* target) {
  if constexpr (N == 1) {
    *target = FromFloat<T>(values[0]);
  } else {
    static_assert(N % Pack<T>::kSize == 0);
#pragma unroll
    for (int i = 0; i < N; i += Pack<T>::kSize) {
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) pack.values[j] = FromFloat<T>(values[i + j]);
      *reinterpret_cast<Pack<T>*>(target + i) = pack;
    }
  }
}

// The value as it is once stored as T.
template <typename T>
__device__ __forceinline__ float Rounded(float value) {
  return ToFloat(FromFloat<T>(value));
}

// Whether all of these may be read 16 bytes at a time; null pointers may.
inline bool AreAligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

// Of the tag that WithElementType hands on.
template <typename Tag>
using TypeOf = typename Tag::type;

template <int N>
struct Constant {
  static constexpr int kValue = N;
};

// Returns body(Constant): Ts' vector length if `vectors`, else 1.
template <typename... Ts, typename Body>
cudaError_t WithVector(bool vectors, const Body& body) {
  return vectors ? body(Constant<kVector<Ts...>>()) : body(Constant<1>());
}

template <typename T>
T* As(const Array& array) {
  return static_cast<T*>(array.data);
}

}  // namespace dim0::cuda

#endif  // DIM0_MODEL_CUDA_ELEMENTS_H_
