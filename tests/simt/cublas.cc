#include <cblas.h>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/simt/block.h"
#include "tests/simt/runtime.h"

struct cublasLtContext {
  int device = 0;
};

struct cublasLtMatmulDescOpaque {
  cublasComputeType_t compute_type = CUBLAS_COMPUTE_32F;
  cudaDataType_t scale_type = CUDA_R_32F;
  int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  int32_t transpose_a = CUBLAS_OP_N;
  int32_t transpose_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  int64_t bias_stride = 0;
  int32_t bias_type = -1;  // the result's
  void* aux = nullptr;
  int64_t aux_leading = 0;
  int64_t aux_stride = 0;
  int32_t aux_type = -1;  // the result's
};

struct cublasLtMatrixLayoutOpaque {
  uint32_t type = CUDA_R_32F;
  uint64_t rows = 0, columns = 0;
  int64_t leading = 0;
  int32_t order = CUBLASLT_ORDER_COL;
  int32_t batch = 1;
  int64_t stride = 0;
};

struct cublasLtMatmulPreferenceOpaque {
  uint64_t workspace_bytes = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};  // of a, b, c and d
};

namespace dim0::simt {
namespace {

using Layout = cublasLtMatrixLayoutOpaque;
using Description = cublasLtMatmulDescOpaque;

constexpr uint64_t kMagic = 0x64696d3073696d74;
constexpr size_t kWorkspaceBytes = size_t{64} << 10;

// What an algorithm is found for; fits cublasLtMatmulAlgo_t.
struct Algorithm {
  uint64_t magic;
  uint64_t problem;
  uint32_t alignment[4];
  uint64_t workspace_bytes;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

cublasStatus_t Refuse(cublasStatus_t status, const std::string& why) {
  std::fprintf(stderr, "simt: cuBLASLt refuses (%s): %s\n", cublasLtGetStatusName(status),
               why.c_str());
  return status;
}
cublasStatus_t Unsupported(const std::string& why) {
  return Refuse(CUBLAS_STATUS_NOT_SUPPORTED, why);
}
cublasStatus_t Invalid(const std::string& why) { return Refuse(CUBLAS_STATUS_INVALID_VALUE, why); }

bool Enter(const char* name, cudaError_t failure) {
  return EnterCall(name, failure, /*check=*/false) == cudaSuccess;
}

size_t SizeOf(uint32_t type) { return type == CUDA_R_32F ? 4 : 2; }

bool IsHalfWidth(uint32_t type) { return type == CUDA_R_16BF || type == CUDA_R_16F; }

bool HasBias(uint32_t epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
         epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}
bool WritesBias(uint32_t epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD || epilogue == CUBLASLT_EPILOGUE_BGRADA ||
         epilogue == CUBLASLT_EPILOGUE_BGRADB;
}
bool HasGelu(uint32_t epilogue) { return (epilogue & CUBLASLT_EPILOGUE_GELU) != 0; }
bool HasGeluGradient(uint32_t epilogue) { return (epilogue & 64) != 0; }
bool HasAux(uint32_t epilogue) { return (epilogue & 128) != 0; }

// A problem without its pointers; copied, as descriptions may change once a product is enqueued.
struct Problem {
  Description description;
  Layout a, b, c, d;
  uint64_t m = 0, n = 0, k = 0;

  uint64_t Hash() const {
    uint64_t hash = 1469598103934665603u;
    const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
    add(description.compute_type);
    add(description.transpose_a);
    add(description.transpose_b);
    add(description.epilogue);
    add(description.aux_leading);
    for (const Layout* layout : {&a, &b, &c, &d}) {
      add(layout->type);
      add(layout->rows);
      add(layout->columns);
      add(layout->leading);
      add(layout->order);
      add(layout->batch);
      add(layout->stride);
    }
    return hash;
  }
};

std::string Shape(const Layout& layout) {
  return std::to_string(layout.rows) + " x " + std::to_string(layout.columns);
}

cublasStatus_t MakeProblem(const Description* description, const Layout* a, const Layout* b,
                           const Layout* c, const Layout* d, Problem& problem) {
  if (!description || !a || !b || !c || !d) return Invalid("a description or a layout is missing");
  problem.description = *description;
  problem.a = *a;
  problem.b = *b;
  problem.c = *c;
  problem.d = *d;
  const bool transpose_a = description->transpose_a != CUBLAS_OP_N;
  const bool transpose_b = description->transpose_b != CUBLAS_OP_N;
  problem.m = transpose_a ? a->columns : a->rows;
  problem.k = transpose_a ? a->rows : a->columns;
  problem.n = transpose_b ? b->rows : b->columns;
  const uint64_t k = transpose_b ? b->columns : b->rows;
  if (problem.m == 0 || problem.n == 0 || k == 0) return Invalid("an empty matrix");
  if (k != problem.k || d->rows != problem.m || d->columns != problem.n) {
    return Invalid("shapes do not fit: a " + Shape(*a) + (transpose_a ? " transposed" : "") +
                   ", b " + Shape(*b) + (transpose_b ? " transposed" : "") + ", d " + Shape(*d));
  }
  if (c->rows != d->rows || c->columns != d->columns || c->type != d->type ||
      c->order != d->order) {
    return Invalid("c and d differ in shape, type or order");
  }
  for (const Layout* layout : {a, b, c, d}) {
    const bool columns = layout->order == CUBLASLT_ORDER_COL;
    const auto least = static_cast<int64_t>(columns ? layout->rows : layout->columns);
    if (layout->leading < least) {
      return Invalid("leading dimension " + std::to_string(layout->leading) + " of a matrix " +
                     Shape(*layout));
    }
    if (layout->batch != d->batch) return Invalid("batch counts differ");
  }
  if (d->batch > 1) {
    const Layout& to = *d;
    const int64_t lines = to.order == CUBLASLT_ORDER_COL ? to.columns : to.rows;
    const int64_t line = to.order == CUBLASLT_ORDER_COL ? to.rows : to.columns;
    if (std::abs(to.stride) < (lines - 1) * to.leading + line) {
      return Invalid("the results of a batch overlap: stride " + std::to_string(to.stride));
    }
  }

  switch (description->compute_type) {
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC:
    case CUBLAS_COMPUTE_32F_FAST_16F:
    case CUBLAS_COMPUTE_32F_FAST_16BF:
    case CUBLAS_COMPUTE_32F_FAST_TF32:
      break;
    default:
      return Unsupported("the compute type is not one of float32's");
  }
  if (description->compute_type != CUBLAS_COMPUTE_32F &&
      description->compute_type != CUBLAS_COMPUTE_32F_PEDANTIC && a->type != CUDA_R_32F) {
    return Unsupported("the fast compute types are for float32 factors");
  }
  if (description->scale_type != CUDA_R_32F) return Unsupported("alpha and beta must be float32");
  if (description->pointer_mode != CUBLASLT_POINTER_MODE_HOST) {
    return Unsupported("alpha and beta must be in host memory");
  }
  if (a->type != b->type || !(IsHalfWidth(a->type) || a->type == CUDA_R_32F) ||
      !(d->type == a->type || d->type == CUDA_R_32F)) {
    return Unsupported("types " + std::to_string(a->type) + " x " + std::to_string(b->type) +
                       " -> " + std::to_string(d->type));
  }

  const uint32_t epilogue = description->epilogue;
  const auto d_type = static_cast<int32_t>(d->type);
  if (epilogue != CUBLASLT_EPILOGUE_DEFAULT && d->order != CUBLASLT_ORDER_COL) {
    return Unsupported("an epilogue on a row-major result");
  }
  if (HasBias(epilogue) || WritesBias(epilogue)) {
    if (description->bias_type != -1 && description->bias_type != d_type) {
      return Unsupported("a bias of another type than the result");
    }
    if (d->batch > 1 && WritesBias(epilogue)) return Unsupported("a bias gradient of a batch");
  }
  if (epilogue == CUBLASLT_EPILOGUE_BGRADA && description->transpose_a != CUBLAS_OP_N) {
    return Unsupported("BGRADA with a transposed a");
  }
  if (epilogue == CUBLASLT_EPILOGUE_BGRADB && description->transpose_b == CUBLAS_OP_N) {
    return Unsupported("BGRADB with a b that is not transposed");
  }
  if ((HasGelu(epilogue) || HasGeluGradient(epilogue)) && d->type != a->type) {
    return Unsupported("GELU with a result of another type than the factors");
  }
  if (HasAux(epilogue)) {
    if (description->aux_type != -1 && description->aux_type != d_type) {
      return Unsupported("GELU's other matrix of another type than the result");
    }
    if (description->aux_leading % 8 != 0 ||
        description->aux_leading < static_cast<int64_t>(d->rows)) {
      return Invalid("EPILOGUE_AUX_LD is " + std::to_string(description->aux_leading) +
                     ": it must be a multiple of 8 and at least d's rows, " +
                     std::to_string(d->rows));
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

float Load(const void* data, uint32_t type, int64_t at) {
  switch (type) {
    case CUDA_R_16BF:
      return static_cast<const __nv_bfloat16*>(data)[at];
    case CUDA_R_16F:
      return static_cast<const __half*>(data)[at];
    default:
      return static_cast<const float*>(data)[at];
  }
}

void Store(void* data, uint32_t type, int64_t at, float value) {
  switch (type) {
    case CUDA_R_16BF:
      static_cast<__nv_bfloat16*>(data)[at] = value;
      break;
    case CUDA_R_16F:
      static_cast<__half*>(data)[at] = value;
      break;
    default:
      static_cast<float*>(data)[at] = value;
  }
}

int64_t Offset(const Layout& layout, int64_t batch, int64_t row, int64_t column) {
  return batch * layout.stride + (layout.order == CUBLASLT_ORDER_COL
                                      ? column * layout.leading + row
                                      : row * layout.leading + column);
}

// Column-major without gaps.
std::vector<float> Read(const void* data, const Layout& layout, int64_t batch) {
  std::vector<float> values(layout.rows * layout.columns);
  for (uint64_t column = 0; column < layout.columns; ++column) {
    for (uint64_t row = 0; row < layout.rows; ++row) {
      values[column * layout.rows + row] =
          Load(data, layout.type, Offset(layout, batch, row, column));
    }
  }
  return values;
}

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kCubic = 0.044715;

float Gelu(double x) {
  return static_cast<float>(0.5 * x * (1 + std::tanh(kSqrt2OverPi * (x + kCubic * x * x * x))));
}

double GeluGradient(double x) {
  const double t = std::tanh(kSqrt2OverPi * (x + kCubic * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kSqrt2OverPi * (1 + 3 * kCubic * x * x);
}

struct Matrices {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  float alpha, beta;
};

// What follows a product, over one matrix of the batch.
void Finish(const Problem& problem, const Matrices& at, int64_t batch, const std::vector<float>& a,
            const std::vector<float>& b, std::vector<float>& product) {
  const Description& description = problem.description;
  const uint32_t epilogue = description.epilogue, type = problem.d.type;
  const auto m = static_cast<int64_t>(problem.m), n = static_cast<int64_t>(problem.n),
             k = static_cast<int64_t>(problem.k);
  std::vector<double> row_sums(m);
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t row = 0; row < m; ++row) {
      float value = product[column * m + row];
      if (HasBias(epilogue)) {
        value += Load(description.bias, type, batch * description.bias_stride + row);
      }
      const int64_t aux = batch * description.aux_stride + column * description.aux_leading + row;
      if (HasGelu(epilogue)) {
        if (HasAux(epilogue)) Store(description.aux, type, aux, value);
        value = Gelu(value);
      } else if (HasGeluGradient(epilogue)) {
        value = static_cast<float>(value * GeluGradient(Load(description.aux, type, aux)));
      }
      Store(at.d, type, Offset(problem.d, batch, row, column), value);
      row_sums[row] += value;
    }
  }
  if (epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
    for (int64_t row = 0; row < m; ++row) {
      Store(description.bias, type, row, static_cast<float>(row_sums[row]));
    }
  } else if (epilogue == CUBLASLT_EPILOGUE_BGRADA) {
    for (int64_t row = 0; row < m; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += a[i * m + row];
      Store(description.bias, type, row, static_cast<float>(sum));
    }
  } else if (epilogue == CUBLASLT_EPILOGUE_BGRADB) {
    for (int64_t column = 0; column < n; ++column) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += b[i * n + column];  // b is n x k, to be transposed
      Store(description.bias, type, column, static_cast<float>(sum));
    }
  }
}

cudaError_t RunProduct(const Problem& problem, const Matrices& at, void* workspace,
                       size_t workspace_bytes) {
  const std::string name = "cublasLtMatmul";
  const auto m = static_cast<int>(problem.m), n = static_cast<int>(problem.n),
             k = static_cast<int>(problem.k);
  for (int64_t batch = 0; batch < problem.d.batch; ++batch) {
    std::vector<float> a, b, product;
    cudaError_t error = RunOperation(name, [&] {
      // What the workspace held is lost.
      if (workspace_bytes > 0) std::memset(workspace, 0xff, workspace_bytes);
      a = Read(at.a, problem.a, batch);
      b = Read(at.b, problem.b, batch);
      product =
          at.beta != 0 ? Read(at.c, problem.c, batch) : std::vector<float>(problem.m * problem.n);
      return cudaSuccess;
    });
    if (error != cudaSuccess) return error;
    const bool transpose_a = problem.description.transpose_a != CUBLAS_OP_N;
    const bool transpose_b = problem.description.transpose_b != CUBLAS_OP_N;
    cblas_sgemm(CblasColMajor, transpose_a ? CblasTrans : CblasNoTrans,
                transpose_b ? CblasTrans : CblasNoTrans, m, n, k, at.alpha, a.data(),
                static_cast<int>(problem.a.rows), b.data(), static_cast<int>(problem.b.rows),
                at.beta, product.data(), m);
    error = RunOperation(name, [&] {
      Finish(problem, at, batch, a, b, product);
      return cudaSuccess;
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The bytes from `data` on that a matrix takes.
std::pair<uintptr_t, uintptr_t> Extent(const void* data, const Layout& layout) {
  const int64_t last = Offset(layout, layout.batch - 1, layout.rows - 1, layout.columns - 1);
  const auto start = reinterpret_cast<uintptr_t>(data);
  return {start, start + (last + 1) * SizeOf(layout.type)};
}

bool Overlap(std::pair<uintptr_t, uintptr_t> a, std::pair<uintptr_t, uintptr_t> b) {
  return a.first < b.second && b.first < a.second;
}

// Copies an attribute's value if it has the right size.
template <typename T>
cublasStatus_t Assign(T& to, const void* value, size_t bytes) {
  if (!value || bytes != sizeof(T)) {
    return Invalid("an attribute of " + std::to_string(sizeof(T)) + " bytes is given " +
                   std::to_string(bytes));
  }
  std::memcpy(&to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace dim0::simt

using namespace dim0::simt;

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
#define SIMT_STATUS(name) \
  case name:              \
    return #name;
    SIMT_STATUS(CUBLAS_STATUS_SUCCESS)
    SIMT_STATUS(CUBLAS_STATUS_NOT_INITIALIZED)
    SIMT_STATUS(CUBLAS_STATUS_ALLOC_FAILED)
    SIMT_STATUS(CUBLAS_STATUS_INVALID_VALUE)
    SIMT_STATUS(CUBLAS_STATUS_ARCH_MISMATCH)
    SIMT_STATUS(CUBLAS_STATUS_MAPPING_ERROR)
    SIMT_STATUS(CUBLAS_STATUS_EXECUTION_FAILED)
    SIMT_STATUS(CUBLAS_STATUS_INTERNAL_ERROR)
    SIMT_STATUS(CUBLAS_STATUS_NOT_SUPPORTED)
    SIMT_STATUS(CUBLAS_STATUS_LICENSE_ERROR)
#undef SIMT_STATUS
  }
  return "CUBLAS_STATUS_UNKNOWN";
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an invalid value was used as an argument";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "an absent device architectural feature is required";
    case CUBLAS_STATUS_MAPPING_ERROR:
      return "an access to GPU memory space failed";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "an internal operation failed";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the requested functionality is not supported";
    case CUBLAS_STATUS_LICENSE_ERROR:
      return "an error was detected when checking the current licensing";
  }
  return "unknown status";
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion() { return CUDART_VERSION; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
  *handle = nullptr;
  if (EnterCall("cublasLtCreate", cudaErrorMemoryAllocation, /*check=*/true) != cudaSuccess) {
    return CUBLAS_STATUS_NOT_INITIALIZED;
  }
  *handle = new cublasLtContext{CurrentDevice()};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  if (!Enter("cublasLtDestroy", cudaErrorLaunchFailure)) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description,
                                        cublasComputeType_t compute_type,
                                        cudaDataType_t scale_type) {
  if (!description) return CUBLAS_STATUS_INVALID_VALUE;
  *description = nullptr;
  if (!Enter("cublasLtMatmulDescCreate", cudaErrorMemoryAllocation)) {
    return CUBLAS_STATUS_ALLOC_FAILED;
  }
  *description = new cublasLtMatmulDescOpaque;
  (*description)->compute_type = compute_type;
  (*description)->scale_type = scale_type;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  if (!Enter("cublasLtMatmulDescSetAttribute", cudaErrorInvalidValue)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!description) return Invalid("no description");
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return Assign(description->pointer_mode, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return Assign(description->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return Assign(description->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return Assign(description->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return Assign(description->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE:
      return Assign(description->bias_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return Assign(description->bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return Assign(description->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return Assign(description->aux_leading, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE:
      return Assign(description->aux_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
      return Assign(description->aux_type, value, bytes);
    default:
      return Invalid("attribute " + std::to_string(attribute) + " of a description");
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t leading) {
  if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
  *layout = nullptr;
  if (!Enter("cublasLtMatrixLayoutCreate", cudaErrorMemoryAllocation)) {
    return CUBLAS_STATUS_ALLOC_FAILED;
  }
  *layout = new cublasLtMatrixLayoutOpaque;
  (*layout)->type = type;
  (*layout)->rows = rows;
  (*layout)->columns = columns;
  (*layout)->leading = leading;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
  if (!Enter("cublasLtMatrixLayoutSetAttribute", cudaErrorInvalidValue)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!layout) return Invalid("no layout");
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return Assign(layout->type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return Assign(layout->order, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return Assign(layout->rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return Assign(layout->columns, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return Assign(layout->leading, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: {
      int32_t batch = 0;
      const cublasStatus_t status = Assign(batch, value, bytes);
      if (status != CUBLAS_STATUS_SUCCESS) return status;
      if (batch < 1) return Invalid("a batch of " + std::to_string(batch));
      layout->batch = batch;
      return CUBLAS_STATUS_SUCCESS;
    }
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return Assign(layout->stride, value, bytes);
  }
  return Invalid("attribute " + std::to_string(attribute) + " of a layout");
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
  *preference = nullptr;
  if (!Enter("cublasLtMatmulPreferenceCreate", cudaErrorMemoryAllocation)) {
    return CUBLAS_STATUS_ALLOC_FAILED;
  }
  *preference = new cublasLtMatmulPreferenceOpaque;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  if (!Enter("cublasLtMatmulPreferenceSetAttribute", cudaErrorInvalidValue)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!preference) return Invalid("no preference");
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return Assign(preference->workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return Assign(preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
                    value, bytes);
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return CUBLAS_STATUS_SUCCESS;  // there is one algorithm, without reductions
  }
  return Invalid("attribute " + std::to_string(attribute) + " of a preference");
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a_layout,
    cublasLtMatrixLayout_t b_layout, cublasLtMatrixLayout_t c_layout,
    cublasLtMatrixLayout_t d_layout, cublasLtMatmulPreference_t preference, int requested,
    cublasLtMatmulHeuristicResult_t* results, int* found) {
  if (!Enter("cublasLtMatmulAlgoGetHeuristic", cudaErrorInvalidValue)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!preference || !results || !found || requested < 1) return Invalid("a heuristic's arguments");
  *found = 0;
  Problem problem;
  const cublasStatus_t status =
      MakeProblem(description, a_layout, b_layout, c_layout, d_layout, problem);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm algorithm = {};
  algorithm.magic = kMagic;
  algorithm.problem = problem.Hash();
  std::memcpy(algorithm.alignment, preference->alignment, sizeof(algorithm.alignment));
  algorithm.workspace_bytes = std::min<uint64_t>(preference->workspace_bytes, kWorkspaceBytes);
  results[0] = {};
  std::memcpy(&results[0].algo, &algorithm, sizeof(algorithm));
  results[0].workspaceSize = algorithm.workspace_bytes;
  results[0].wavesCount = 1;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  if (EnterCall("cublasLtMatmul", cudaErrorLaunchFailure, /*check=*/true) != cudaSuccess) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  Problem problem;
  const cublasStatus_t status =
      MakeProblem(description, a_layout, b_layout, c_layout, d_layout, problem);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const auto state = FindStream(stream);
  if (!state) return Invalid("no such stream");
  if (state->device != handle->device) return Invalid("a stream of another device than the handle");
  if (!alpha || !beta || !a || !b || !d) return Invalid("a pointer is missing");

  Matrices at = {a, b, c, d, 0, 0};
  std::memcpy(&at.alpha, alpha, sizeof(float));
  std::memcpy(&at.beta, beta, sizeof(float));
  if (at.beta != 0 && !c) return Invalid("beta is not 0 and c is missing");
  const void* pointers[] = {a, b, c, d};
  const Layout* layouts[] = {&problem.a, &problem.b, &problem.c, &problem.d};
  size_t workspace_needed = 0;
  uint32_t alignment[4];
  for (int i = 0; i < 4; ++i) alignment[i] = SizeOf(layouts[i]->type);
  if (algorithm) {
    Algorithm found;
    std::memcpy(&found, algorithm, sizeof(found));
    if (found.magic != kMagic) return Invalid("an algorithm that no heuristic gave");
    if (found.problem != problem.Hash()) return Invalid("an algorithm found for another problem");
    workspace_needed = found.workspace_bytes;
    for (int i = 0; i < 4; ++i) alignment[i] = std::max(alignment[i], found.alignment[i]);
  }
  for (int i = 0; i < 4; ++i) {
    if (reinterpret_cast<uintptr_t>(pointers[i]) % alignment[i] != 0) {
      return Invalid(std::string("matrix ") + "abcd"[i] + " is not aligned to " +
                     std::to_string(alignment[i]) + " bytes");
    }
  }
  if (workspace_bytes < workspace_needed || (workspace_needed > 0 && !workspace)) {
    return Invalid("the workspace has " + std::to_string(workspace_bytes) + " bytes, not " +
                   std::to_string(workspace_needed));
  }
  const auto result = Extent(d, problem.d);
  if (Overlap(result, Extent(a, problem.a)) || Overlap(result, Extent(b, problem.b))) {
    return Invalid("the result overlaps a factor");
  }
  if (c == d) {
    if (problem.c.leading != problem.d.leading || problem.c.stride != problem.d.stride) {
      return Invalid("c is d, with another layout");
    }
  } else if (c && at.beta != 0 && Overlap(result, Extent(c, problem.c))) {
    return Invalid("c and d overlap and are not the same");
  }
  const uint32_t epilogue = problem.description.epilogue;
  if (HasBias(epilogue) || WritesBias(epilogue)) {
    if (!problem.description.bias) return Invalid("BIAS_POINTER is not set");
    if (reinterpret_cast<uintptr_t>(problem.description.bias) % SizeOf(problem.d.type) != 0) {
      return Invalid("BIAS_POINTER is not aligned");
    }
  }
  if (HasAux(epilogue)) {
    if (reinterpret_cast<uintptr_t>(problem.description.aux) % 16 != 0 ||
        !problem.description.aux) {
      return Invalid("EPILOGUE_AUX_POINTER is not set, or not aligned to 16 bytes");
    }
  }

  StreamState::Operation operation;
  operation.name = "cublasLtMatmul";
  operation.run = [=] { return RunProduct(problem, at, workspace, workspace_needed); };
  Enqueue(state, std::move(operation));
  return CUBLAS_STATUS_SUCCESS;
}
