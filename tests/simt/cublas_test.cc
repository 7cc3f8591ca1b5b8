// Products against float64, and what cuBLASLt refuses.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/simt/control.h"

namespace dim0::simt {
namespace {

using ::testing::HasSubstr;

float Get(const std::vector<char>& bytes, cudaDataType type, int64_t at) {
  switch (type) {
    case CUDA_R_16BF:
      return reinterpret_cast<const __nv_bfloat16*>(bytes.data())[at];
    case CUDA_R_16F:
      return reinterpret_cast<const __half*>(bytes.data())[at];
    default:
      return reinterpret_cast<const float*>(bytes.data())[at];
  }
}

void Set(std::vector<char>& bytes, cudaDataType type, int64_t at, float value) {
  switch (type) {
    case CUDA_R_16BF:
      reinterpret_cast<__nv_bfloat16*>(bytes.data())[at] = value;
      break;
    case CUDA_R_16F:
      reinterpret_cast<__half*>(bytes.data())[at] = value;
      break;
    default:
      reinterpret_cast<float*>(bytes.data())[at] = value;
  }
}

int64_t Size(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

// Half a unit in the last place of 1.
double Rounding(cudaDataType type) {
  return type == CUDA_R_32F ? 0x1p-24 : type == CUDA_R_16F ? 0x1p-11 : 0x1p-8;
}

// Column-major, on the host and on the device, each filled with values of a fixed kind.
struct Matrix {
  cudaDataType type;
  int64_t rows, columns, leading, batch;
  std::vector<char> host;
  void* device = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;

  Matrix(cudaDataType type, int64_t rows, int64_t columns, int64_t gap = 0, int64_t batch = 1,
         int seed = 1)
      : type(type), rows(rows), columns(columns), leading(rows + gap), batch(batch) {
    host.resize(batch * stride() * Size(type));
    for (int64_t i = 0; i < batch * stride(); ++i) {
      Set(host, type, i, std::sin(static_cast<float>(i * (seed + 1) + seed)));
    }
    EXPECT_EQ(cudaMalloc(&device, host.size()), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, type, rows, columns, leading),
              CUBLAS_STATUS_SUCCESS);
    if (batch > 1) {
      const auto count = static_cast<int32_t>(batch);
      const int64_t step = stride();
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                       sizeof(count));
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
                                       sizeof(step));
    }
  }
  ~Matrix() {
    cudaFree(device);
    cublasLtMatrixLayoutDestroy(layout);
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  int64_t stride() const { return leading * columns; }
  double At(int64_t b, int64_t row, int64_t column) const {
    return Get(host, type, b * stride() + column * leading + row);
  }
  std::vector<char> Read() const {
    std::vector<char> bytes(host.size());
    EXPECT_EQ(cudaMemcpy(bytes.data(), device, bytes.size(), cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }
};

class CublasTest : public testing::Test {
 protected:
  CublasTest() {
    SetSettings(Settings());
    Reset();
    EXPECT_EQ(cublasLtCreate(&handle_), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              CUBLAS_STATUS_SUCCESS);
  }
  ~CublasTest() override {
    cublasLtMatmulDescDestroy(operation_);
    cublasLtDestroy(handle_);
    Reset();
  }

  template <typename T>
  void SetOperation(cublasLtMatmulDescAttributes_t attribute, T value) {
    ASSERT_EQ(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof(value)),
              CUBLAS_STATUS_SUCCESS);
  }

  // With the heuristic's algorithm and a workspace. Returns the first refusal; said_ is why.
  cublasStatus_t Multiply(const Matrix& a, const Matrix& b, const Matrix& c, const Matrix& d,
                          float alpha = 1, float beta = 0, uint32_t alignment = 64) {
    testing::internal::CaptureStderr();
    const cublasStatus_t status = [&] {
      cublasLtMatmulPreference_t preference = nullptr;
      cublasLtMatmulPreferenceCreate(&preference);
      const uint64_t workspace_bytes = 1 << 16;
      cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &workspace_bytes, sizeof(workspace_bytes));
      for (const auto attribute :
           {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof(alignment));
      }
      cublasLtMatmulHeuristicResult_t result = {};
      int found = 0;
      cublasStatus_t status =
          cublasLtMatmulAlgoGetHeuristic(handle_, operation_, a.layout, b.layout, c.layout,
                                         d.layout, preference, 1, &result, &found);
      cublasLtMatmulPreferenceDestroy(preference);
      if (status != CUBLAS_STATUS_SUCCESS) return status;
      EXPECT_EQ(found, 1);
      void* workspace = nullptr;
      EXPECT_EQ(cudaMalloc(&workspace, workspace_bytes), cudaSuccess);
      status = cublasLtMatmul(handle_, operation_, &alpha, a.device, a.layout, b.device, b.layout,
                              &beta, c.device, c.layout, d.device, d.layout, &result.algo,
                              workspace, workspace_bytes, nullptr);
      cudaFree(workspace);
      return status;
    }();
    said_ = testing::internal::GetCapturedStderr();
    return status;
  }

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t operation_ = nullptr;
  std::string said_;
};

struct Types {
  cudaDataType factors, result;
};
constexpr Types kTypes[] = {{CUDA_R_16BF, CUDA_R_16BF},
                            {CUDA_R_16BF, CUDA_R_32F},
                            {CUDA_R_16F, CUDA_R_16F},
                            {CUDA_R_16F, CUDA_R_32F},
                            {CUDA_R_32F, CUDA_R_32F}};

// The error of a sum of k products, in float32, and of its rounding.
double Tolerance(cudaDataType type, double magnitude, int64_t k) {
  return (k + 8) * 0x1p-24 * (magnitude + k) + 1.01 * Rounding(type) * magnitude + 1e-30;
}

TEST_F(CublasTest, ProductsAreThoseOfFloat64) {
  for (const Types types : kTypes) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const auto& [m, n, k, batch] : std::vector<std::array<int64_t, 4>>{
                 {1, 1, 1, 1}, {5, 7, 3, 1}, {17, 9, 33, 3}, {64, 1, 8, 1}, {2, 31, 65, 2}}) {
          for (const float beta : {0.0f, 0.5f}) {
            Matrix a(types.factors, transpose_a ? k : m, transpose_a ? m : k, 1, batch, 1);
            Matrix b(types.factors, transpose_b ? n : k, transpose_b ? k : n, 3, batch, 2);
            Matrix c(types.result, m, n, 2, batch, 3), d(types.result, m, n, 1, batch, 4);
            SetOperation(CUBLASLT_MATMUL_DESC_TRANSA, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
            SetOperation(CUBLASLT_MATMUL_DESC_TRANSB, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
            ASSERT_EQ(Multiply(a, b, c, d, 1.25f, beta), CUBLAS_STATUS_SUCCESS) << said_;
            const std::vector<char> result = d.Read();
            for (int64_t i = 0; i < batch; ++i) {
              for (int64_t column = 0; column < n; ++column) {
                for (int64_t row = 0; row < m; ++row) {
                  double sum = 0;
                  for (int64_t l = 0; l < k; ++l) {
                    sum += (transpose_a ? a.At(i, l, row) : a.At(i, row, l)) *
                           (transpose_b ? b.At(i, column, l) : b.At(i, l, column));
                  }
                  sum = 1.25 * sum + beta * c.At(i, row, column);
                  const double got = Get(result, d.type, i * d.stride() + column * d.leading + row);
                  ASSERT_NEAR(got, sum, Tolerance(d.type, std::fabs(sum), k));
                }
              }
              // The gaps between columns are left alone.
              const int64_t gap = i * d.stride() + d.rows;
              EXPECT_EQ(Get(result, d.type, gap), Get(d.host, d.type, gap));
            }
          }
        }
      }
    }
  }
}

double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

TEST_F(CublasTest, EpiloguesAreThoseOfFloat64) {
  const int64_t m = 16, n = 5, k = 9, aux_leading = 24;
  for (const Types types : kTypes) {
    for (const cublasLtEpilogue_t epilogue :
         {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS,
          CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
          CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB}) {
      SCOPED_TRACE(testing::Message() << "types " << types.factors << ", " << types.result
                                      << ", epilogue " << epilogue);
      const bool gelu = (epilogue & CUBLASLT_EPILOGUE_GELU) != 0 && epilogue < 192;
      const bool gradient =
          epilogue == CUBLASLT_EPILOGUE_DGELU || epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
      const bool aux_used = gradient || epilogue == CUBLASLT_EPILOGUE_GELU_AUX ||
                            epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
      const bool adds_bias = epilogue == CUBLASLT_EPILOGUE_BIAS ||
                             epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
                             epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
      const bool transpose_b = epilogue == CUBLASLT_EPILOGUE_BGRADB;
      Matrix a(types.factors, m, k, 0, 1, 1);
      Matrix b(types.factors, transpose_b ? n : k, transpose_b ? k : n, 0, 1, 2);
      Matrix d(types.result, m, n, 0, 1, 3), bias(types.result, m, 1, 0, 1, 5);
      Matrix aux(types.result, m, n, aux_leading - m, 1, 6);
      SetOperation(CUBLASLT_MATMUL_DESC_TRANSB, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
      SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
      SetOperation(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
      SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device);
      SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_leading);
      const cublasStatus_t status = Multiply(a, b, d, d);
      if ((gelu || gradient) && types.factors != types.result) {
        EXPECT_EQ(status, CUBLAS_STATUS_NOT_SUPPORTED);
        continue;
      }
      ASSERT_EQ(status, CUBLAS_STATUS_SUCCESS) << said_;
      const std::vector<char> result = d.Read(), bias_after = bias.Read(), aux_after = aux.Read();
      std::vector<double> row_sums(m);
      double tolerance = 0;
      for (int64_t column = 0; column < n; ++column) {
        for (int64_t row = 0; row < m; ++row) {
          double value = 0;
          for (int64_t l = 0; l < k; ++l) {
            value += a.At(0, row, l) * (transpose_b ? b.At(0, column, l) : b.At(0, l, column));
          }
          if (adds_bias) value += bias.At(0, row, 0);
          const int64_t at = column * aux_leading + row;
          tolerance = Tolerance(d.type, std::fabs(value) + 2, k);
          if (gelu) {
            if (aux_used) {
              EXPECT_NEAR(Get(aux_after, d.type, at), value, tolerance);
            }
            value = Gelu(value);
          }
          if (gradient) {
            // The derivative, by central differences of float64.
            const double x = Get(aux.host, d.type, at), h = 1e-5;
            value *= (Gelu(x + h) - Gelu(x - h)) / (2 * h);
          }
          EXPECT_NEAR(Get(result, d.type, column * m + row), value, 2 * tolerance);
          row_sums[row] += value;
        }
      }
      if (epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
        for (int64_t row = 0; row < m; ++row) {
          EXPECT_NEAR(Get(bias_after, d.type, row), row_sums[row], 8 * tolerance);
        }
      } else if (epilogue == CUBLASLT_EPILOGUE_BGRADA) {
        for (int64_t row = 0; row < m; ++row) {
          double sum = 0;
          for (int64_t l = 0; l < k; ++l) sum += a.At(0, row, l);
          EXPECT_NEAR(Get(bias_after, d.type, row), sum, 4 * tolerance);
        }
      } else if (epilogue == CUBLASLT_EPILOGUE_BGRADB) {
        for (int64_t column = 0; column < n; ++column) {
          double sum = 0;
          for (int64_t l = 0; l < k; ++l) sum += b.At(0, column, l);
          EXPECT_NEAR(Get(bias_after, d.type, column), sum, 4 * tolerance);
        }
      } else {
        EXPECT_EQ(bias_after, bias.host);
      }
      if (!aux_used) {
        EXPECT_EQ(aux_after, aux.host);
      }
    }
  }
}

TEST_F(CublasTest, ShapesAndTypesThatDoNotFitAreRefused) {
  Matrix a(CUDA_R_16BF, 8, 4), b(CUDA_R_16BF, 4, 6), d(CUDA_R_16BF, 8, 6);
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_SUCCESS);
  Matrix wrong(CUDA_R_16BF, 5, 6), wide(CUDA_R_32F, 8, 6), half(CUDA_R_16F, 4, 6);
  EXPECT_EQ(Multiply(a, wrong, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Multiply(a, b, d, wrong), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Multiply(a, b, wide, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Multiply(a, half, d, d), CUBLAS_STATUS_NOT_SUPPORTED);
  Matrix a32(CUDA_R_32F, 8, 4), b32(CUDA_R_32F, 4, 6);
  EXPECT_EQ(Multiply(a32, b32, d, d), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(Multiply(a, b, wide, wide), CUBLAS_STATUS_SUCCESS);
  Matrix batch(CUDA_R_16BF, 8, 6, 0, 2);
  EXPECT_EQ(Multiply(a, b, batch, batch), CUBLAS_STATUS_INVALID_VALUE);
  const int64_t leading = 7;
  cublasLtMatrixLayoutSetAttribute(d.layout, CUBLASLT_MATRIX_LAYOUT_LD, &leading, sizeof(leading));
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(said_, HasSubstr("leading dimension 7"));
}

TEST_F(CublasTest, GelusOtherMatrixMustHaveAlignedColumns) {
  Matrix a(CUDA_R_16BF, 8, 4), b(CUDA_R_16BF, 4, 6), d(CUDA_R_16BF, 8, 6), aux(CUDA_R_16BF, 16, 6);
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU_AUX);
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t{8});
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_INVALID_VALUE) << "no pointer";
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device);
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_SUCCESS);
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t{12});
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(said_, HasSubstr("EPILOGUE_AUX_LD is 12"));
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t{0});
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_INVALID_VALUE);
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t{16});
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_SUCCESS);
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<char*>(aux.device) + 8);
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(CublasTest, BiasHasTheTypeOfTheResult) {
  Matrix a(CUDA_R_16BF, 8, 4), b(CUDA_R_16BF, 4, 6), d(CUDA_R_16BF, 8, 6), bias(CUDA_R_32F, 8, 1);
  SetOperation(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_INVALID_VALUE) << "no pointer";
  SetOperation(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
  SetOperation(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t{CUDA_R_32F});
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_NOT_SUPPORTED);
  SetOperation(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t{CUDA_R_16BF});
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_SUCCESS);
}

TEST_F(CublasTest, PointersMustBeAlignedAsTheAlgorithmWasTold) {
  // With room behind each column.
  Matrix a(CUDA_R_16BF, 8, 4, 8);
  Matrix b(CUDA_R_16BF, 4, 6), c(CUDA_R_16BF, 8, 6), d(CUDA_R_16BF, 8, 6);
  void* const start = a.device;
  a.device = static_cast<char*>(start) + 8;
  EXPECT_EQ(Multiply(a, b, c, d, 1, 0, 16), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(said_, HasSubstr("matrix a is not aligned to 16 bytes"));
  EXPECT_EQ(Multiply(a, b, c, d, 1, 0, 8), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  a.device = start;
}

TEST_F(CublasTest, ResultsMayLieOnCButNotOnAFactor) {
  Matrix a(CUDA_R_32F, 8, 8), b(CUDA_R_32F, 8, 8), d(CUDA_R_32F, 8, 8);
  EXPECT_EQ(Multiply(a, b, d, d, 1, 1), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(Multiply(a, d, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(said_, HasSubstr("overlaps a factor"));
}

TEST_F(CublasTest, AnAlgorithmIsForItsProblemAndNeedsItsWorkspace) {
  Matrix a(CUDA_R_32F, 8, 8), b(CUDA_R_32F, 8, 8), d(CUDA_R_32F, 8, 8);
  Matrix small(CUDA_R_32F, 8, 4);
  cublasLtMatmulPreference_t preference = nullptr;
  ASSERT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
  const uint64_t workspace_bytes = 4096;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                       &workspace_bytes, sizeof(workspace_bytes));
  for (int i = 0; i < 4; ++i) {
    const uint32_t alignment = 64;
    cublasLtMatmulPreferenceSetAttribute(preference,
                                         static_cast<cublasLtMatmulPreferenceAttributes_t>(
                                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i),
                                         &alignment, sizeof(alignment));
  }
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  ASSERT_EQ(cublasLtMatmulAlgoGetHeuristic(handle_, operation_, a.layout, b.layout, d.layout,
                                           d.layout, preference, 1, &result, &found),
            CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulPreferenceDestroy(preference);
  ASSERT_EQ(result.workspaceSize, 4096u);
  void* workspace = nullptr;
  ASSERT_EQ(cudaMalloc(&workspace, 4096), cudaSuccess);
  const float alpha = 1, beta = 0;
  const auto multiply = [&](const Matrix& second, const Matrix& to, void* space, size_t bytes) {
    return cublasLtMatmul(handle_, operation_, &alpha, a.device, a.layout, second.device,
                          second.layout, &beta, to.device, to.layout, to.device, to.layout,
                          &result.algo, space, bytes, nullptr);
  };
  EXPECT_EQ(multiply(b, d, workspace, 4096), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(multiply(b, d, workspace, 4095), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(b, d, nullptr, 4096), CUBLAS_STATUS_INVALID_VALUE);
  Matrix other(CUDA_R_32F, 8, 4), to(CUDA_R_32F, 8, 4);
  EXPECT_EQ(multiply(other, to, workspace, 4096), CUBLAS_STATUS_INVALID_VALUE);
  // A workspace that is freed too early shows.
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaFree(workspace), cudaSuccess);
  testing::internal::CaptureStderr();
  EXPECT_EQ(multiply(b, d, workspace, 4096), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("cublasLtMatmul"));
}

TEST_F(CublasTest, FactorsBeyondTheirAllocationAreErrors) {
  Matrix a(CUDA_R_32F, 64, 64), b(CUDA_R_32F, 64, 64), d(CUDA_R_32F, 64, 64);
  Matrix less(CUDA_R_32F, 64, 63);
  std::swap(less.device, b.device);
  EXPECT_EQ(Multiply(a, b, d, d), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_THAT(said_, HasSubstr("0 bytes past the end"));
  std::swap(less.device, b.device);
}

TEST_F(CublasTest, CallsCanBeMadeToFail) {
  Matrix a(CUDA_R_32F, 8, 8), b(CUDA_R_32F, 8, 8), d(CUDA_R_32F, 8, 8);
  const float alpha = 1, beta = 0;
  FailCall(1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(
      cublasLtMatmul(handle_, operation_, &alpha, a.device, a.layout, b.device, b.layout, &beta,
                     d.device, d.layout, d.device, d.layout, nullptr, nullptr, 0, nullptr),
      CUBLAS_STATUS_EXECUTION_FAILED);
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(FailedCall(), "cublasLtMatmul");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
}

}  // namespace
}  // namespace dim0::simt
