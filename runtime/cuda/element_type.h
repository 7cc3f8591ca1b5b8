// The element types that kernels take, for kernel sources, which do without the project's other
// headers.
#ifndef DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_
#define DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace dim0::cuda {

enum class ElementType : uint8_t { kFloat32, kBFloat16 };

// Bytes per element.
constexpr int64_t SizeOf(ElementType type) { return type == ElementType::kBFloat16 ? 2 : 4; }

// Returns body(tag), where tag's `type` is float or __nv_bfloat16: a kernel's template argument.
template <typename Body>
auto WithElementType(ElementType type, Body body) {
  if (type == ElementType::kBFloat16) return body(std::type_identity<__nv_bfloat16>());
  return body(std::type_identity<float>());
}

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_
