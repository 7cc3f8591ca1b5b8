// CUDA's half-precision type, __half, its pair, and their conversions and arithmetic: each
// operation in float32, rounded once, to nearest with ties to even.
#ifndef DIM0_TESTS_SIMT_INCLUDE_CUDA_FP16_H_
#define DIM0_TESTS_SIMT_INCLUDE_CUDA_FP16_H_

#include <bit>
#include <cstdint>

#include "simt/rounding.h"
#include "simt/vector_types.h"

struct __half_raw {
  unsigned short x;
};

namespace dim0::simt {

// Rounds to nearest, ties to even; every NaN becomes 0x7fff.
inline uint16_t FloatToHalfBits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  // From 65520 on, half a unit beyond the greatest half, everything rounds to infinity.
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are whole multiples of 2^-24, which is what floats from 0.5 on are.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float HalfBitsToFloat(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  if (magnitude < 0x400u) {
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

}  // namespace dim0::simt

struct __half {
  __half() = default;
  constexpr __half(const __half_raw& raw) : bits_(raw.x) {}
  __half(float value) : bits_(dim0::simt::FloatToHalfBits(value)) {}
  __half(double value) : __half(dim0::simt::DoubleToFloatOdd(value)) {}
  __half(int value) : __half(static_cast<double>(value)) {}
  __half(unsigned value) : __half(static_cast<double>(value)) {}
  operator float() const { return dim0::simt::HalfBitsToFloat(bits_); }
  operator __half_raw() const { return {bits_}; }

  __half& operator+=(const __half& other);
  __half& operator-=(const __half& other);
  __half& operator*=(const __half& other);
  __half& operator/=(const __half& other);

 protected:
  unsigned short bits_;
};
static_assert(sizeof(__half) == 2);
using half = __half;

struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  constexpr __half2(const __half& x, const __half& y) : x(x), y(y) {}
};
static_assert(sizeof(__half2) == 4);
using half2 = __half2;

// ---- Conversions

inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __float2half(float value) { return __half(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline __half __double2half(double value) { return __half(value); }
inline unsigned short __half_as_ushort(__half value) { return static_cast<__half_raw>(value).x; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 value) { return __floats2half2_rn(value.x, value.y); }
inline __half2 __float2half2_rn(float value) { return __floats2half2_rn(value, value); }
inline float2 __half22float2(__half2 value) {
  return {static_cast<float>(value.x), static_cast<float>(value.y)};
}
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __half __low2half(__half2 value) { return value.x; }
inline __half __high2half(__half2 value) { return value.y; }
inline float __low2float(__half2 value) { return static_cast<float>(value.x); }
inline float __high2float(__half2 value) { return static_cast<float>(value.y); }

// ---- Arithmetic

#define SIMT_OPERATION(op, function)                                                            \
  inline __half operator op(const __half& a, const __half& b) {                                 \
    return __half(static_cast<float>(a) op static_cast<float>(b));                              \
  }                                                                                             \
  inline __half& __half::operator op##=(const __half& other) { return *this = *this op other; } \
  inline __half function(__half a, __half b) { return a op b; }                                 \
  inline __half2 function##2(__half2 a, __half2 b) { return {a.x op b.x, a.y op b.y}; }
SIMT_OPERATION(+, __hadd)
SIMT_OPERATION(-, __hsub)
SIMT_OPERATION(*, __hmul)
SIMT_OPERATION(/, __hdiv)
#undef SIMT_OPERATION

#define SIMT_COMPARISON(op, function)                         \
  inline bool operator op(const __half& a, const __half& b) { \
    return static_cast<float>(a) op static_cast<float>(b);    \
  }                                                           \
  inline bool function(__half a, __half b) { return a op b; }
SIMT_COMPARISON(==, __heq)
SIMT_COMPARISON(!=, __hne)
SIMT_COMPARISON(<, __hlt)
SIMT_COMPARISON(<=, __hle)
SIMT_COMPARISON(>, __hgt)
SIMT_COMPARISON(>=, __hge)
#undef SIMT_COMPARISON

inline __half operator-(const __half& value) { return __half(-static_cast<float>(value)); }
inline __half __hneg(__half value) { return -value; }
// The product and the sum are exact in float64 but for the last rounding, which is to odd.
inline __half __hfma(__half a, __half b, __half c) {
  return __half(static_cast<double>(static_cast<float>(a)) * static_cast<float>(b) +
                static_cast<float>(c));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline bool __hisnan(__half value) {
  return static_cast<float>(value) != static_cast<float>(value);
}

#endif  // DIM0_TESTS_SIMT_INCLUDE_CUDA_FP16_H_
