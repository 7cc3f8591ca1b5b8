// Loops over contiguous floats that several kernels share, written so that the compiler vectorises
// them without reassociating anything by itself.
#ifndef DIM0_MODEL_CPU_ROW_MATH_H_
#define DIM0_MODEL_CPU_ROW_MATH_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "model/cpu/vector_math.h"
#include "model/kernels.h"

namespace dim0::cpu {

// What a running maximum starts from: finite, so that e^(x - max) is 0 and not NaN for x = -inf.
inline constexpr float kLowest = std::numeric_limits<float>::lowest();

// The largest of `initial` and the values. NaNs are passed over; they show in the sum that follows.
inline float Max(const float* x, int64_t count, float initial) {
  constexpr int kLanes = 32;
  float lanes[kLanes];
  for (float& lane : lanes) lane = initial;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  }
  float max = initial;
  for (; i < count; ++i) max = x[i] > max ? x[i] : max;
  for (float lane : lanes) max = lane > max ? lane : max;
  return max;
}

// The sum of e^(x - max).
inline float SumExp(const float* x, int64_t count, float max) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += Exp(x[i] - max);
  return sum;
}

// x becomes e^(x - max); returns the sum of that.
inline float ExpInPlace(float* x, int64_t count, float max) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    x[i] = Exp(x[i] - max);
    sum += x[i];
  }
  return sum;
}

inline float Dot(const float* a, const float* b, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// target = source, or += source.
inline void Store(const float* source, int64_t count, Write write, float* target) {
  if (write == Write::kOverwrite) {
    std::copy_n(source, count, target);
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) target[i] += source[i];
}

}  // namespace dim0::cpu

#endif  // DIM0_MODEL_CPU_ROW_MATH_H_
