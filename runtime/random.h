// Counter-based random numbers: a value depends on (seed, stream, counter) only, so any rank can
// draw any element of any parameter without drawing the others.
#ifndef DIM0_RUNTIME_RANDOM_H_
#define DIM0_RUNTIME_RANDOM_H_

#include <array>
#include <cstdint>

#include "absl/types/span.h"

namespace dim0 {

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Fills values[i] with element first + i of the standard normal sequence of (seed, stream), times
// `stddev`. Box-Muller on pairs of Philox words.
void FillNormal(uint64_t seed, uint32_t stream, int64_t first, float stddev,
                absl::Span<float> values);

// A uniform number in [0, 1) with 53 random bits: element `index` of the sequence (seed, stream).
double Uniform(uint64_t seed, uint32_t stream, int64_t index);

}  // namespace dim0

#endif  // DIM0_RUNTIME_RANDOM_H_
