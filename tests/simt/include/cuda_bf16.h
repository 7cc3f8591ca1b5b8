// CUDA's bfloat16 type, __nv_bfloat16, its pair, and their conversions and arithmetic: each
// operation in float32, rounded once, to nearest with ties to even.
#ifndef DIM0_TESTS_SIMT_INCLUDE_CUDA_BF16_H_
#define DIM0_TESTS_SIMT_INCLUDE_CUDA_BF16_H_

#include <bit>
#include <cstdint>

#include "simt/rounding.h"
#include "simt/vector_types.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

namespace dim0::simt {

// Rounds to nearest, ties to even; every NaN becomes 0x7fff, as on devices of capability 8.0.
inline uint16_t FloatToBfloat16Bits(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float Bfloat16BitsToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

}  // namespace dim0::simt

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(const __nv_bfloat16_raw& raw) : bits_(raw.x) {}
  __nv_bfloat16(float value) : bits_(dim0::simt::FloatToBfloat16Bits(value)) {}
  __nv_bfloat16(double value) : __nv_bfloat16(dim0::simt::DoubleToFloatOdd(value)) {}
  __nv_bfloat16(int value) : __nv_bfloat16(static_cast<double>(value)) {}
  __nv_bfloat16(unsigned value) : __nv_bfloat16(static_cast<double>(value)) {}
  operator float() const { return dim0::simt::Bfloat16BitsToFloat(bits_); }
  operator __nv_bfloat16_raw() const { return {bits_}; }

  __nv_bfloat16& operator+=(const __nv_bfloat16& other);
  __nv_bfloat16& operator-=(const __nv_bfloat16& other);
  __nv_bfloat16& operator*=(const __nv_bfloat16& other);
  __nv_bfloat16& operator/=(const __nv_bfloat16& other);

 protected:
  unsigned short bits_;
};
static_assert(sizeof(__nv_bfloat16) == 2);
using nv_bfloat16 = __nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  constexpr __nv_bfloat162(const __nv_bfloat16& x, const __nv_bfloat16& y) : x(x), y(y) {}
};
static_assert(sizeof(__nv_bfloat162) == 4);
using nv_bfloat162 = __nv_bfloat162;

// ---- Conversions

inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __double2bfloat16(double value) { return __nv_bfloat16(value); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
  return static_cast<__nv_bfloat16_raw>(value).x;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
  return __floats2bfloat162_rn(value.x, value.y);
}
inline __nv_bfloat162 __float2bfloat162_rn(float value) {
  return __floats2bfloat162_rn(value, value);
}
inline float2 __bfloat1622float2(__nv_bfloat162 value) {
  return {static_cast<float>(value.x), static_cast<float>(value.y)};
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 value) { return value.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 value) { return value.y; }
inline float __low2float(__nv_bfloat162 value) { return static_cast<float>(value.x); }
inline float __high2float(__nv_bfloat162 value) { return static_cast<float>(value.y); }

// ---- Arithmetic

#define SIMT_OPERATION(op, function)                                                 \
  inline __nv_bfloat16 operator op(const __nv_bfloat16& a, const __nv_bfloat16& b) { \
    return __nv_bfloat16(static_cast<float>(a) op static_cast<float>(b));            \
  }                                                                                  \
  inline __nv_bfloat16& __nv_bfloat16::operator op##=(const __nv_bfloat16& other) {  \
    return *this = *this op other;                                                   \
  }                                                                                  \
  inline __nv_bfloat16 function(__nv_bfloat16 a, __nv_bfloat16 b) { return a op b; } \
  inline __nv_bfloat162 function##2(__nv_bfloat162 a, __nv_bfloat162 b) {            \
    return {a.x op b.x, a.y op b.y};                                                 \
  }
SIMT_OPERATION(+, __hadd)
SIMT_OPERATION(-, __hsub)
SIMT_OPERATION(*, __hmul)
SIMT_OPERATION(/, __hdiv)
#undef SIMT_OPERATION

#define SIMT_COMPARISON(op, function)                                       \
  inline bool operator op(const __nv_bfloat16& a, const __nv_bfloat16& b) { \
    return static_cast<float>(a) op static_cast<float>(b);                  \
  }                                                                         \
  inline bool function(__nv_bfloat16 a, __nv_bfloat16 b) { return a op b; }
SIMT_COMPARISON(==, __heq)
SIMT_COMPARISON(!=, __hne)
SIMT_COMPARISON(<, __hlt)
SIMT_COMPARISON(<=, __hle)
SIMT_COMPARISON(>, __hgt)
SIMT_COMPARISON(>=, __hge)
#undef SIMT_COMPARISON

inline __nv_bfloat16 operator-(const __nv_bfloat16& value) {
  return __nv_bfloat16(-static_cast<float>(value));
}
inline __nv_bfloat16 __hneg(__nv_bfloat16 value) { return -value; }
// The product and the sum are exact in float64 but for the last rounding, which is to odd.
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __nv_bfloat16(static_cast<double>(static_cast<float>(a)) * static_cast<float>(b) +
                       static_cast<float>(c));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline bool __hisnan(__nv_bfloat16 value) {
  return static_cast<float>(value) != static_cast<float>(value);
}

#endif  // DIM0_TESTS_SIMT_INCLUDE_CUDA_BF16_H_
