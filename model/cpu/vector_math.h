// Elementary functions that the compiler can vectorise: branch-free, and correct for NaN and
// infinities without -ffast-math. Loops over them are written with `#pragma omp simd`.
#ifndef DIM0_MODEL_CPU_VECTOR_MATH_H_
#define DIM0_MODEL_CPU_VECTOR_MATH_H_

#include <bit>
#include <cstdint>

namespace dim0::cpu {

// e^x within 1.5 units in the last place, subnormal results included; 0 for -inf, +inf on overflow,
// NaN for NaN.
inline float Exp(float x) {
  // e^x = 2^n e^r with n the integer nearest to x / ln 2. Beyond these limits the result is 0 or
  // infinite anyway; a NaN fails both comparisons and stays.
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  // Adding 1.5 * 2^23 leaves n in the lowest bits of the sum.
  constexpr float kRound = 12582912.0f;
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts, the first short enough for n * part to be exact.
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  // 1 + r + r^2 q(r); q is the minimax polynomial for the relative error on |r| <= 0.35.
  float q = 0x1.6a1a72p-10f;
  q = q * r + 0x1.123fc6p-7f;
  q = q * r + 0x1.555916p-5f;
  q = q * r + 0x1.55548ap-3f;
  q = q * r + 0x1.fffffcp-2f;
  const float mantissa = q * (r * r) + r + 1.0f;
  // 2^n in two factors, for n may lie outside a float's exponents at either end.
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const int32_t half = exponent >> 1;
  const float low = std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  const float high = std::bit_cast<float>(static_cast<uint32_t>(exponent - half + 127) << 23);
  return mantissa * low * high;
}

}  // namespace dim0::cpu

#endif  // DIM0_MODEL_CPU_VECTOR_MATH_H_
