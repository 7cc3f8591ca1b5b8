// The element types that travel between ranks, and the one 16-bit float that C++20 lacks.
#ifndef DIM0_COLLECTIVES_DTYPE_H_
#define DIM0_COLLECTIVES_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"

namespace dim0 {

// kFloat16 is for matrices within a device; it does not travel.
enum class DType : uint8_t { kFloat32, kBFloat16, kInt32, kInt64, kByte, kFloat16 };

// Bytes per element.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kInt64:
      return 8;
    case DType::kByte:
      return 1;
  }
  return 0;
}

constexpr absl::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kByte:
      return "byte";
    case DType::kFloat16:
      return "float16";
  }
  return "?";
}

// The upper 16 bits of an IEEE float32. Conversion from float rounds to nearest, ties to even;
// NaN stays NaN (made quiet), infinities and signed zeros are kept.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t u;
    std::memcpy(&u, &value, sizeof(u));
    // Both results are computed and one is picked, which a compiler can turn into vector code.
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (u >> 16) | 0x0040u;
    bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
  explicit operator float() const {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &u, sizeof(value));
    return value;
  }
};
static_assert(sizeof(BFloat16) == 2);

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_DTYPE_H_
