// The element types that kernels take, for kernel sources, which do without the project's other
// headers.
#ifndef DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_
#define DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace dim0::cuda {

// kFloat16 is for the matrices of Newton-Schulz only.
enum class ElementType : uint8_t { kFloat32, kBFloat16, kFloat16 };

// Bytes per element.
constexpr int64_t SizeOf(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Returns body(tag), where tag's `type` is float or __nv_bfloat16: a kernel's template argument.
// cudaErrorInvalidValue for float16, of which most kernels are not made.
template <typename Body>
cudaError_t WithElementType(ElementType type, Body body) {
  if (type == ElementType::kFloat16) return cudaErrorInvalidValue;
  if (type == ElementType::kBFloat16) return body(std::type_identity<__nv_bfloat16>());
  return body(std::type_identity<float>());
}

// The same, or __half.
template <typename Body>
cudaError_t WithMatrixType(ElementType type, Body body) {
  if (type == ElementType::kFloat16) return body(std::type_identity<__half>());
  return WithElementType(type, body);
}

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_
