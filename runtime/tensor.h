// A view of a row-major matrix in device memory. It owns nothing: buffers come from the Allocator.
#ifndef DIM0_RUNTIME_TENSOR_H_
#define DIM0_RUNTIME_TENSOR_H_

#include <cstdint>

#include "collectives/dtype.h"
#include "runtime/check.h"

namespace dim0 {

// [rows, cols], rows contiguous one after another. A vector of n elements is [n, 1].
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t cols = 1;

  int64_t size() const { return rows * cols; }
  int64_t bytes() const { return size() * SizeOf(dtype); }
  // Where element `element` is; null where there is no memory.
  void* at(int64_t element) const {
    return data == nullptr ? nullptr : static_cast<char*>(data) + element * SizeOf(dtype);
  }
  float* f32() const {
    DIM0_CHECK(dtype == DType::kFloat32);
    return static_cast<float*>(data);
  }
};

// Rows [begin, begin + rows) of `matrix`.
inline Tensor Rows(const Tensor& matrix, int64_t begin, int64_t rows) {
  return {matrix.at(begin * matrix.cols), matrix.dtype, rows, matrix.cols};
}

// Calls body with a pointer of the tensor's element type, float* or BFloat16*; for code that runs
// where the memory is.
template <typename Body>
void WithElements(const Tensor& tensor, Body body) {
  if (tensor.dtype == DType::kBFloat16) {
    body(static_cast<BFloat16*>(tensor.data));
  } else {
    body(tensor.f32());
  }
}

inline Tensor F32(float* data, int64_t rows, int64_t cols = 1) {
  return Tensor{data, DType::kFloat32, rows, cols};
}

}  // namespace dim0

#endif  // DIM0_RUNTIME_TENSOR_H_
