// Matrix products against float64, for every way to call them.
#include "runtime/cuda/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/allocator.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/device.h"

namespace dim0::cuda {
namespace {

double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
// By central differences: independent of the formula that a kernel has.
double GeluGradient(double x) { return (Gelu(x + 1e-5) - Gelu(x - 1e-5)) / 2e-5; }

class MatMulTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status status = CheckCuda(); !status.ok()) GTEST_SKIP() << status.message();
    device_ = *CreateDevice(Backend::kCuda, 1);
    allocator_.emplace(device_.get());
    stream_ = device_->NewStream("compute");
    matmul_ = *MatMul::Create();
  }

  // Values that both types hold exactly, and their place in device memory.
  struct Matrix {
    std::vector<double> values;
    Buffer buffer;
    DType type;
  };
  Matrix Upload(std::vector<double> values, DType type) {
    Matrix matrix{.values = {}, .buffer = {}, .type = type};
    std::vector<char> bytes(values.size() * SizeOf(type));
    for (size_t i = 0; i < values.size(); ++i) {
      const BFloat16 rounded(static_cast<float>(values[i]));
      const auto value = static_cast<float>(rounded);
      if (type == DType::kBFloat16) {
        std::memcpy(bytes.data() + 2 * i, &rounded, 2);
      } else {
        std::memcpy(bytes.data() + 4 * i, &value, 4);
      }
      values[i] = value;
    }
    matrix.values = std::move(values);
    matrix.buffer = *allocator_->Allocate(MemoryPurpose::kActivations, bytes.size());
    device_->CopyFromHost(*stream_, matrix.buffer.data(), bytes.data(), bytes.size());
    return matrix;
  }
  Matrix Random(int64_t size, DType type) {
    std::normal_distribution<double> normal;
    std::vector<double> values(size);
    for (double& value : values) value = normal(generator_);
    return Upload(std::move(values), type);
  }
  std::vector<double> Download(const Matrix& matrix) {
    std::vector<char> bytes(matrix.buffer.bytes());
    device_->CopyToHost(*stream_, bytes.data(), matrix.buffer.data(), bytes.size());
    EXPECT_TRUE(stream_->Synchronize().ok());
    std::vector<double> values(bytes.size() / SizeOf(matrix.type));
    for (size_t i = 0; i < values.size(); ++i) {
      if (matrix.type == DType::kBFloat16) {
        BFloat16 value;
        std::memcpy(&value, bytes.data() + 2 * i, 2);
        values[i] = static_cast<float>(value);
      } else {
        float value;
        std::memcpy(&value, bytes.data() + 4 * i, 4);
        values[i] = value;
      }
    }
    return values;
  }

  void Run(const Product& product) {
    stream_->Enqueue({.name = "product"}, [&](const OpContext& context) {
      return matmul_->Enqueue(product, static_cast<cudaStream_t>(context.native_stream));
    });
    const absl::Status status = stream_->Synchronize();
    ASSERT_TRUE(status.ok()) << status;
  }

  // alpha op(a) op(b) + beta added + bias in float64.
  static std::vector<double> Reference(const Product& p, const std::vector<double>& a,
                                       const std::vector<double>& b,
                                       const std::vector<double>& added,
                                       const std::vector<double>& bias) {
    std::vector<double> c(p.batch * p.m * p.n);
    for (int64_t g = 0; g < p.batch; ++g) {
      for (int64_t i = 0; i < p.m; ++i) {
        for (int64_t j = 0; j < p.n; ++j) {
          double sum = 0;
          for (int64_t k = 0; k < p.k; ++k) {
            const int64_t in_a = g * p.m * p.k + (p.transpose_a ? k * p.m + i : i * p.k + k);
            const int64_t in_b = g * p.k * p.n + (p.transpose_b ? j * p.k + k : k * p.n + j);
            sum += a[in_a] * b[in_b];
          }
          const int64_t in_c = (g * p.m + i) * p.n + j;
          c[in_c] = p.alpha * sum + (p.beta == 0 ? 0 : p.beta * added[in_c]) +
                    (bias.empty() ? 0 : bias[j]);
        }
      }
    }
    return c;
  }

  // Sums in float32 of k products, and one rounding to the result's type.
  static double Tolerance(const Product& p, double value) {
    const double rounding = p.c_type == DType::kBFloat16 ? std::ldexp(1.0, -8) : 0;
    return (std::abs(value) + 1) * rounding + 1e-5 * std::sqrt(p.k + 1.0) * 4;
  }
  static void ExpectNear(const Product& p, const std::vector<double>& actual,
                         const std::vector<double>& expected, const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], Tolerance(p, expected[i])) << what << " at " << i;
    }
  }

  std::mt19937 generator_{3};
  std::unique_ptr<Device> device_;
  std::optional<Allocator> allocator_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<MatMul> matmul_;
};

struct Types {
  DType in, out;
};
constexpr Types kTypes[] = {{DType::kFloat32, DType::kFloat32},
                            {DType::kBFloat16, DType::kBFloat16},
                            {DType::kBFloat16, DType::kFloat32}};

TEST_F(MatMulTest, EveryTransposeTypeAndSizeIsTheFloat64Product) {
  constexpr int64_t kSizes[][3] = {{1, 1, 1}, {3, 5, 7}, {16, 24, 40}, {33, 1, 65}, {1, 129, 8}};
  for (const Types types : kTypes) {
    for (const auto& [m, n, k] : kSizes) {
      for (const bool transpose_a : {false, true}) {
        for (const bool transpose_b : {false, true}) {
          for (const float beta : {0.0f, 1.0f, -0.5f}) {
            const Matrix a = Random(m * k, types.in), b = Random(k * n, types.in);
            const Matrix c = Random(m * n, types.out);
            const Product product = {.m = m,
                                     .n = n,
                                     .k = k,
                                     .transpose_a = transpose_a,
                                     .transpose_b = transpose_b,
                                     .alpha = 0.75f,
                                     .beta = beta,
                                     .type = types.in,
                                     .c_type = types.out,
                                     .a = a.buffer.data(),
                                     .b = b.buffer.data(),
                                     .c = c.buffer.data()};
            Run(product);
            ExpectNear(product, Download(c), Reference(product, a.values, b.values, c.values, {}),
                       absl::StrCat(m, "x", n, "x", k, transpose_a ? " a^T" : "",
                                    transpose_b ? " b^T" : "", " beta ", beta));
          }
        }
      }
    }
  }
}

TEST_F(MatMulTest, BatchesAreProductsOneAfterAnother) {
  for (const Types types : kTypes) {
    const Matrix a = Random(5 * 6 * 8, types.in), b = Random(5 * 8 * 10, types.in);
    const Matrix c = Random(5 * 6 * 10, types.out);
    const Product product = {.m = 6,
                             .n = 10,
                             .k = 8,
                             .transpose_b = true,
                             .beta = 2,
                             .type = types.in,
                             .c_type = types.out,
                             .a = a.buffer.data(),
                             .b = b.buffer.data(),
                             .c = c.buffer.data(),
                             .batch = 5};
    Run(product);
    ExpectNear(product, Download(c), Reference(product, a.values, b.values, c.values, {}), "");
  }
}

TEST_F(MatMulTest, AddsAnotherMatrixAndABias) {
  for (const Types types : kTypes) {
    const Matrix a = Random(7 * 16, types.in), b = Random(16 * 24, types.in);
    const Matrix added = Random(7 * 24, types.out), bias = Random(24, types.out);
    const Matrix c = Random(7 * 24, types.out);
    const Product product = {.m = 7,
                             .n = 24,
                             .k = 16,
                             .beta = 1,
                             .type = types.in,
                             .c_type = types.out,
                             .a = a.buffer.data(),
                             .b = b.buffer.data(),
                             .c = c.buffer.data(),
                             .added = added.buffer.data(),
                             .bias = bias.buffer.data()};
    Run(product);
    ExpectNear(product, Download(c),
               Reference(product, a.values, b.values, added.values, bias.values), "");
    EXPECT_EQ(Download(added), added.values);
  }
}

TEST_F(MatMulTest, GeluIsAppliedAndItsArgumentKept) {
  const DType type = DType::kBFloat16;
  const Matrix a = Random(9 * 32, type), b = Random(16 * 32, type), bias = Random(16, type);
  const Matrix before = Random(9 * 16, type), c = Random(9 * 16, type);
  Product product = {.m = 9,
                     .n = 16,
                     .k = 32,
                     .transpose_b = true,
                     .alpha = 0.25f,
                     .type = type,
                     .c_type = type,
                     .a = a.buffer.data(),
                     .b = b.buffer.data(),
                     .c = c.buffer.data(),
                     .bias = bias.buffer.data(),
                     .before_gelu = before.buffer.data()};
  ASSERT_TRUE(CanFuseGelu(product));
  Run(product);
  std::vector<double> expected = Reference(product, a.values, b.values, {}, bias.values);
  ExpectNear(product, Download(before), expected, "before");
  for (double& value : expected) value = Gelu(value);
  ExpectNear(product, Download(c), expected, "after");
}

TEST_F(MatMulTest, GelusGradientIsApplied) {
  const DType type = DType::kBFloat16;
  const Matrix a = Random(9 * 32, type), b = Random(32 * 16, type);
  const Matrix at = Random(9 * 16, type), c = Random(9 * 16, type);
  const Product product = {.m = 9,
                           .n = 16,
                           .k = 32,
                           .type = type,
                           .c_type = type,
                           .a = a.buffer.data(),
                           .b = b.buffer.data(),
                           .c = c.buffer.data(),
                           .gelu_at = at.buffer.data()};
  ASSERT_TRUE(CanFuseGelu(product));
  Run(product);
  std::vector<double> expected = Reference(product, a.values, b.values, {}, {});
  for (size_t i = 0; i < expected.size(); ++i) expected[i] *= GeluGradient(at.values[i]);
  ExpectNear(product, Download(c), expected, "");
}

TEST_F(MatMulTest, RowsOfTheFirstMatrixMayLieApart) {
  const Matrix a = Random(4 * 3 * 6, DType::kFloat32), b = Random(10 * 6, DType::kFloat32);
  const Matrix c = Random(4 * 10, DType::kFloat32);
  const Product product = {.m = 4,
                           .n = 10,
                           .k = 6,
                           .transpose_b = true,
                           .a = a.buffer.data(),
                           .b = b.buffer.data(),
                           .c = c.buffer.data(),
                           .a_row_length = 18};
  Run(product);
  std::vector<double> every_third;
  for (int64_t i = 0; i < 4; ++i) {
    every_third.insert(every_third.end(), a.values.begin() + i * 18, a.values.begin() + i * 18 + 6);
  }
  ExpectNear(product, Download(c), Reference(product, every_third, b.values, {}, {}), "");
}

TEST_F(MatMulTest, RowsOfTheResultMayLieApart) {
  constexpr int64_t kRows = 5, kCols = 7, kLength = 64;
  for (const Types types : kTypes) {
    const Matrix a = Random(kRows * 6, types.in), b = Random(kCols * 6, types.in);
    const Matrix bias = Random(kCols, types.out), added = Random(kRows * kLength, types.out);
    for (const float beta : {0.0f, 1.0f}) {
      const Matrix c = Random(kRows * kLength, types.out);
      Product product = {.m = kRows,
                         .n = kCols,
                         .k = 6,
                         .transpose_b = true,
                         .beta = beta,
                         .type = types.in,
                         .c_type = types.out,
                         .a = a.buffer.data(),
                         .b = b.buffer.data(),
                         .c = c.buffer.data(),
                         .added = beta == 0 ? nullptr : added.buffer.data(),
                         .c_row_length = kLength,
                         .bias = bias.buffer.data()};
      Run(product);
      std::vector<double> begins, result, rest, old_rest;
      const std::vector<double> now = Download(c);
      for (int64_t i = 0; i < kRows * kLength; ++i) {
        if (i % kLength < kCols) {
          begins.push_back(added.values[i]);
          result.push_back(now[i]);
        } else {
          rest.push_back(now[i]);
          old_rest.push_back(c.values[i]);
        }
      }
      ExpectNear(product, result, Reference(product, a.values, b.values, begins, bias.values), "");
      EXPECT_EQ(rest, old_rest);
      product.before_gelu = c.buffer.data();
      EXPECT_FALSE(CanFuseGelu(product));
    }
  }
}

TEST_F(MatMulTest, ASumOfNothingIsZeroOrWhatWasThere) {
  for (const float beta : {0.0f, 1.0f}) {
    const Matrix c = Random(12, DType::kFloat32);
    Run({.m = 3, .n = 4, .k = 0, .beta = beta, .c = c.buffer.data()});
    EXPECT_EQ(Download(c), beta == 0 ? std::vector<double>(12, 0) : c.values);
  }
  Run({.m = 0, .n = 4, .k = 2});
}

TEST_F(MatMulTest, WhatIsNotOfferedIsRefused) {
  const Matrix c = Random(64, DType::kBFloat16);
  const Product product = {.m = 8,
                           .n = 8,
                           .k = 8,
                           .type = DType::kFloat32,
                           .c_type = DType::kBFloat16,
                           .a = c.buffer.data(),
                           .b = c.buffer.data(),
                           .c = c.buffer.data()};
  EXPECT_EQ(matmul_->Enqueue(product, nullptr).code(), absl::StatusCode::kInvalidArgument);
  Product odd = product;
  odd.type = DType::kBFloat16;
  odd.n = 7;
  odd.before_gelu = c.buffer.data();
  EXPECT_FALSE(CanFuseGelu(odd));
  EXPECT_EQ(matmul_->Enqueue(odd, nullptr).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dim0::cuda
