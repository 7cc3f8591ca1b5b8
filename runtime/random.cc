#include "runtime/random.h"

#include <cmath>
#include <numbers>

namespace dim0 {
namespace {

std::array<uint32_t, 2> Key(uint64_t seed) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
}

std::array<uint32_t, 4> Counter(uint32_t stream, int64_t block) {
  const auto index = static_cast<uint64_t>(block);
  return {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), stream, 0};
}

// Four standard normals from four words.
std::array<float, 4> Normals(const std::array<uint32_t, 4>& words) {
  std::array<float, 4> normals;
  for (int pair = 0; pair < 2; ++pair) {
    // (0, 1]: the logarithm must not meet 0.
    const float u = (static_cast<float>(words[2 * pair] >> 8) + 1.0f) * 0x1p-24f;
    const float angle =
        static_cast<float>(words[2 * pair + 1] >> 8) * 0x1p-24f * 2.0f * std::numbers::pi_v<float>;
    const float radius = std::sqrt(-2.0f * std::log(u));
    normals[2 * pair] = radius * std::cos(angle);
    normals[2 * pair + 1] = radius * std::sin(angle);
  }
  return normals;
}

}  // namespace

std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

void FillNormal(uint64_t seed, uint32_t stream, int64_t first, float stddev,
                absl::Span<float> values) {
  const auto count = static_cast<int64_t>(values.size());
  const auto key = Key(seed);
  for (int64_t i = 0; i < count;) {
    const int64_t element = first + i;
    const auto normals = Normals(Philox(Counter(stream, element / 4), key));
    for (int64_t lane = element % 4; lane < 4 && i < count; ++lane, ++i) {
      values[i] = stddev * normals[lane];
    }
  }
}

double Uniform(uint64_t seed, uint32_t stream, int64_t index) {
  const auto words = Philox(Counter(stream, index), Key(seed));
  const uint64_t bits = (uint64_t{words[0]} << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace dim0
