// Matrix products on a GPU, through cuBLASLt: row-major, in batches, with what follows a product
// done in the same kernel.
#ifndef DIM0_RUNTIME_CUDA_MATMUL_H_
#define DIM0_RUNTIME_CUDA_MATMUL_H_

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/dtype.h"

namespace dim0::cuda {

// c = alpha op(a) op(b) + beta `added`, op(a) being [m, k], op(b) [k, n] and c [m, n], row-major
// without gaps where not said otherwise; then, if asked for, + bias, and GELU in its tanh form or
// its derivative. Sums are in float32. All pointers are device memory; any of m, n, k may be 0.
struct Product {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;  // a is [k, m] in memory; b is [n, k]
  float alpha = 1, beta = 0;
  DType type = DType::kFloat32;    // of a and b: float32, bfloat16 or float16
  DType c_type = DType::kFloat32;  // float32, or that of a and b
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  const void* added = nullptr;  // [m, n] of c_type, c itself if null; not read with beta 0
  // So many products; the matrices of each kind lie one after another. Nothing below with more than
  // one.
  int64_t batch = 1;
  // Elements from one row in memory to the next of `a`, and of c and `added`; 0: no gaps. What is
  // in a gap is neither read nor written. c has none with k = 0, nor with GELU.
  int64_t a_row_length = 0;
  int64_t c_row_length = 0;
  const void* bias = nullptr;     // [n] of c_type
  void* before_gelu = nullptr;    // [m, n] of c_type: gets the result, and c GELU of it
  const void* gelu_at = nullptr;  // [m, n] of c_type: c is the result times GELU'(gelu_at)
};

// Whether the product's before_gelu or gelu_at are taken, which need aligned rows; where not, the
// caller runs a kernel of its own behind the product.
bool CanFuseGelu(const Product& product);

// Whether that pays on GPUs of this generation. It is reported to be slower than two kernels on
// GeForce GPUs of Ada's and Blackwell's, but not on Hopper's; of the others nothing is known here,
// and Blackwell's for data centres are taken to be like Hopper's, Ampere's not to be.
inline bool GeluFusionPays(int compute_capability_major) {
  return compute_capability_major == 9 || compute_capability_major == 10;
}

// Runs products on one stream at a time: they share a workspace, which is this object's own and is
// not in the memory plan (see kMatMulWorkspaceBytes). Calls come from one host thread.
inline constexpr int64_t kMatMulWorkspaceBytes = int64_t{32} << 20;

class MatMul {
 public:
  // For the current device. Error: what CUDA or cuBLAS said.
  static absl::StatusOr<std::unique_ptr<MatMul>> Create();
  ~MatMul();
  MatMul(const MatMul&) = delete;
  MatMul& operator=(const MatMul&) = delete;

  // Enqueues the product. Errors: InvalidArgument for types or fusions that are not offered,
  // Internal with what cuBLAS said.
  absl::Status Enqueue(const Product& product, cudaStream_t stream);

 private:
  // What a choice of algorithm depends on.
  using Key = std::array<int64_t, 19>;
  struct Plan;

  MatMul() = default;
  absl::StatusOr<Plan*> PlanFor(const Product& product);

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_MATMUL_H_
