// cuBLASLt's functions, as far as the project calls them.
#include <cublasLt.h>

#include "third_party/cuda/on_demand/library.h"

namespace {

dim0::on_demand::Library& LoadedLibrary() {
  static dim0::on_demand::Library library(DIM0_CUBLASLT_FILE);
  return library;
}

}  // namespace

DIM0_ON_DEMAND(cublasStatus_t, cublasLtCreate, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtHandle_t * handle), (handle))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtDestroy, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtHandle_t handle), (handle))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmulDescCreate, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatmulDesc_t * made, cublasComputeType_t compute, cudaDataType_t scale),
               (made, compute, scale))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmulDescDestroy, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatmulDesc_t operation), (operation))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmulDescSetAttribute, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                const void* value, size_t bytes),
               (operation, attribute, value, bytes))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatrixLayoutCreate, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatrixLayout_t * made, cudaDataType type, uint64_t rows, uint64_t cols,
                int64_t leading),
               (made, type, rows, cols, leading))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatrixLayoutDestroy, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatrixLayout_t layout), (layout))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatrixLayoutSetAttribute, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                const void* value, size_t bytes),
               (layout, attribute, value, bytes))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmulPreferenceCreate, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatmulPreference_t * made), (made))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmulPreferenceDestroy, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatmulPreference_t preference), (preference))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtMatmulPreference_t preference,
                cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes),
               (preference, attribute, value, bytes))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                cublasLtMatmulPreference_t preference, int wanted,
                cublasLtMatmulHeuristicResult_t results[], int* found_results),
               (handle, operation, a, b, c, d, preference, wanted, results, found_results))
DIM0_ON_DEMAND(cublasStatus_t, cublasLtMatmul, CUBLAS_STATUS_NOT_INITIALIZED,
               (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                const void* a, cublasLtMatrixLayout_t layout_a, const void* b,
                cublasLtMatrixLayout_t layout_b, const void* beta, const void* c,
                cublasLtMatrixLayout_t layout_c, void* d, cublasLtMatrixLayout_t layout_d,
                const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                cudaStream_t stream),
               (handle, operation, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d,
                algorithm, workspace, workspace_bytes, stream))
DIM0_ON_DEMAND(const char*, cublasLtGetStatusString, LoadedLibrary().error(),
               (cublasStatus_t status), (status))
