// CUDA's short vectors, with CUDA's sizes and alignments, and the macros that mark device code,
// which mean nothing to a host compiler.
#ifndef DIM0_TESTS_SIMT_INCLUDE_SIMT_VECTOR_TYPES_H_
#define DIM0_TESTS_SIMT_INCLUDE_SIMT_VECTOR_TYPES_H_

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// All blocks run on one thread, one after another: what is one per thread is one per block. In a
// function it is static, so `extern __shared__` works, too.
#define __shared__ thread_local

#define SIMT_VECTORS(scalar, name, align2, align4)                                  \
  struct name##1 {                                                                  \
    scalar x;                                                                       \
  };                                                                                \
  struct alignas(align2) name##2 {                                                  \
    scalar x, y;                                                                    \
  };                                                                                \
  struct name##3 {                                                                  \
    scalar x, y, z;                                                                 \
  };                                                                                \
  struct alignas(align4) name##4 {                                                  \
    scalar x, y, z, w;                                                              \
  };                                                                                \
  inline name##1 make_##name##1(scalar x) { return {x}; }                           \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }              \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; } \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef SIMT_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#endif  // DIM0_TESTS_SIMT_INCLUDE_SIMT_VECTOR_TYPES_H_
