// The element types that kernels take, for kernel sources, which do without the project's other
// headers.
#ifndef DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_
#define DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_

#include <cstdint>

namespace dim0::cuda {

enum class ElementType : uint8_t { kFloat32, kBFloat16 };

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_ELEMENT_TYPE_H_
