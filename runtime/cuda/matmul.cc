#include "runtime/cuda/matmul.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "collectives/cuda_status.h"
#include "runtime/check.h"

namespace dim0::cuda {
namespace {

absl::Status ToStatus(cublasStatus_t status, absl::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cublasLtGetStatusString(status)));
}

cudaDataType_t CudaType(DType type) {
  if (type == DType::kFloat16) return CUDA_R_16F;
  return type == DType::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F;
}

// The largest power of two, up to what cuBLASLt makes use of, that divides the address.
uint32_t Alignment(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  uint32_t alignment = 256;
  while (address % alignment != 0) alignment /= 2;
  return alignment;
}

bool IsMatrixType(DType type) {
  return type == DType::kFloat32 || type == DType::kBFloat16 || type == DType::kFloat16;
}

bool ResultHasGaps(const Product& p) { return p.c_row_length != 0 && p.c_row_length != p.n; }

}  // namespace

bool CanFuseGelu(const Product& product) {
  // The documentation asks for 16-bit results and leading dimensions that are multiples of 8, and
  // it is with accesses of 16 bytes that every GPU has algorithms.
  const auto aligned = [](const void* matrix) { return Alignment(matrix) >= 16; };
  return product.c_type == DType::kBFloat16 && product.n % 8 == 0 && product.k % 8 == 0 &&
         product.k > 0 && !ResultHasGaps(product) && aligned(product.a) && aligned(product.b) &&
         aligned(product.c) &&
         aligned(product.before_gelu != nullptr ? product.before_gelu : product.gelu_at);
}

struct MatMul::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm;

  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }
};

absl::StatusOr<std::unique_ptr<MatMul>> MatMul::Create() {
  std::unique_ptr<MatMul> matmul(new MatMul);
  DIM0_RETURN_IF_ERROR(ToStatus(cublasLtCreate(&matmul->handle_), "starting cuBLAS"));
  DIM0_RETURN_IF_ERROR(
      ToStatus(cudaMalloc(&matmul->workspace_, kMatMulWorkspaceBytes), "cuBLAS' workspace"));
  return matmul;
}

MatMul::~MatMul() {
  plans_.clear();
  if (workspace_ != nullptr) cudaFree(workspace_);
  if (handle_ != nullptr) cublasLtDestroy(handle_);
}

absl::StatusOr<MatMul::Plan*> MatMul::PlanFor(const Product& p) {
  const cublasLtEpilogue_t epilogue =
      p.gelu_at != nullptr
          ? CUBLASLT_EPILOGUE_DGELU
          : (p.before_gelu != nullptr
                 ? (p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                      : CUBLASLT_EPILOGUE_GELU_AUX)
                 : (p.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT));
  const void* added = p.added != nullptr ? p.added : p.c;
  const void* aux = p.before_gelu != nullptr ? p.before_gelu : p.gelu_at;
  const uint32_t align_a = Alignment(p.a), align_b = Alignment(p.b), align_c = Alignment(added),
                 align_d = Alignment(p.c);
  // Whether C is read decides between algorithms too.
  const Key key = {p.m,
                   p.n,
                   p.k,
                   p.batch,
                   p.transpose_a,
                   p.transpose_b,
                   static_cast<int64_t>(p.type),
                   static_cast<int64_t>(p.c_type),
                   static_cast<int64_t>(epilogue),
                   align_a,
                   align_b,
                   align_c,
                   align_d,
                   p.beta != 0,
                   p.added != nullptr,
                   p.a_row_length,
                   p.c_row_length,
                   Alignment(p.bias),
                   Alignment(aux)};
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second.get();

  auto plan = std::make_unique<Plan>();
  constexpr absl::string_view kWhat = "planning a matrix product";
  DIM0_RETURN_IF_ERROR(
      ToStatus(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), kWhat));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    return ToStatus(
        cublasLtMatmulDescSetAttribute(plan->operation, attribute, &value, sizeof(value)), kWhat);
  };
  // Column-major, as cuBLAS has it, a row-major matrix is its transpose, and c^T = op(b)^T op(a)^T:
  // cuBLAS' first matrix is b.
  const cublasOperation_t first = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSA, first));
  DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSB, second));
  DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
  // The heuristic looks at how these are aligned; each product has its own.
  if (p.bias != nullptr) DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias));
  if (aux != nullptr) {
    DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n));
    DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux));
  }

  const auto layout = [&](cublasLtMatrixLayout_t* made, DType type, int64_t rows, int64_t cols,
                          int64_t row_length) -> absl::Status {
    // Rows and columns of the row-major matrix.
    if (row_length == 0) row_length = cols;
    DIM0_RETURN_IF_ERROR(
        ToStatus(cublasLtMatrixLayoutCreate(made, CudaType(type), cols, rows, row_length), kWhat));
    if (p.batch == 1) return absl::OkStatus();
    const auto count = static_cast<int32_t>(p.batch);
    const int64_t stride = rows * cols;
    DIM0_RETURN_IF_ERROR(
        ToStatus(cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                  sizeof(count)),
                 kWhat));
    return ToStatus(
        cublasLtMatrixLayoutSetAttribute(*made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                         &stride, sizeof(stride)),
        kWhat);
  };
  DIM0_RETURN_IF_ERROR(layout(&plan->a, p.type, p.transpose_a ? p.k : p.m,
                              p.transpose_a ? p.m : p.k, p.a_row_length));
  DIM0_RETURN_IF_ERROR(
      layout(&plan->b, p.type, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, 0));
  DIM0_RETURN_IF_ERROR(layout(&plan->c, p.c_type, p.m, p.n, p.c_row_length));

  cublasLtMatmulPreference_t preference;
  DIM0_RETURN_IF_ERROR(ToStatus(cublasLtMatmulPreferenceCreate(&preference), kWhat));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
  };
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  const auto keep_first = [&status](cublasStatus_t next) {
    if (status == CUBLAS_STATUS_SUCCESS) status = next;
  };
  keep_first(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    static_cast<uint64_t>(kMatMulWorkspaceBytes)));
  // Parts of a sum that is split are added in float32, too, not in the result's type.
  keep_first(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                    static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
  keep_first(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align_b));
  keep_first(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_a));
  keep_first(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_c));
  // There is no preference for a bias, which epilogues read beside what they write.
  keep_first(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                    p.bias == nullptr ? align_d : std::min(align_d, Alignment(p.bias))));
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatmulAlgoGetHeuristic(handle_, plan->operation, plan->b, plan->a, plan->c,
                                            plan->c, preference, 1, &result, &found);
  }
  cublasLtMatmulPreferenceDestroy(preference);
  if (status == CUBLAS_STATUS_SUCCESS && found == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
  DIM0_RETURN_IF_ERROR(ToStatus(
      status, absl::StrCat("cuBLAS has no algorithm for a product [", p.m, ", ", p.k, "] x [", p.k,
                           ", ", p.n, "] of ", Name(p.type), " into ", Name(p.c_type))));
  plan->algorithm = result.algo;
  Plan* const made = plan.get();
  plans_[key] = std::move(plan);
  return made;
}

absl::Status MatMul::Enqueue(const Product& p, cudaStream_t stream) {
  if (!IsMatrixType(p.type) || !IsMatrixType(p.c_type) ||
      (p.c_type != p.type && p.c_type != DType::kFloat32)) {
    return absl::InvalidArgumentError(absl::StrCat("no matrix product of ", Name(p.type), " into ",
                                                   Name(p.c_type), " is offered"));
  }
  const bool gelu = p.before_gelu != nullptr || p.gelu_at != nullptr;
  const bool one_fusion =
      !(p.gelu_at != nullptr && (p.before_gelu != nullptr || p.bias != nullptr));
  if ((gelu && !CanFuseGelu(p)) || !one_fusion || (p.batch != 1 && (gelu || p.bias != nullptr))) {
    return absl::InvalidArgumentError("this fusion with a matrix product is not offered");
  }
  DIM0_CHECK(p.batch == 1 || (p.a_row_length == 0 && p.c_row_length == 0));
  if (p.m == 0 || p.n == 0 || p.batch == 0) return absl::OkStatus();
  if (p.k == 0) {
    // A sum of nothing, which cuBLASLt refuses; only the trivial forms of it occur.
    DIM0_CHECK(p.bias == nullptr && (p.added == nullptr || p.beta == 0) && !ResultHasGaps(p));
    if (p.beta == 1) return absl::OkStatus();
    DIM0_CHECK(p.beta == 0);
    return ToStatus(cudaMemsetAsync(p.c, 0, p.batch * p.m * p.n * SizeOf(p.c_type), stream),
                    "an empty product");
  }
  DIM0_ASSIGN_OR_RETURN(Plan* const plan, PlanFor(p));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void* pointer) {
    return ToStatus(
        cublasLtMatmulDescSetAttribute(plan->operation, attribute, &pointer, sizeof(pointer)),
        "a matrix product");
  };
  if (p.bias != nullptr) DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias));
  if (gelu) {
    DIM0_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                             p.before_gelu != nullptr ? p.before_gelu : p.gelu_at));
  }
  const void* added = p.added != nullptr ? p.added : p.c;
  return ToStatus(cublasLtMatmul(handle_, plan->operation, &p.alpha, p.b, plan->b, p.a, plan->a,
                                 &p.beta, added, plan->c, p.c, plan->c, &plan->algorithm,
                                 workspace_, kMatMulWorkspaceBytes, stream),
                  "a matrix product");
}

}  // namespace dim0::cuda
