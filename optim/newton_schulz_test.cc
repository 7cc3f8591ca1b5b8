// Every algorithm and every set of coefficients against the same iteration in float64, and against
// what the polynomials do to known singular values.
#include "optim/newton_schulz.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "optim/kernels.h"
#include "runtime/device.h"

namespace dim0 {
namespace {

using Algorithm = NewtonSchulzAlgorithm;
using Coefficients = NewtonSchulzCoefficients;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

constexpr Algorithm kAlgorithms[] = {Algorithm::kAuto, Algorithm::kStandard, Algorithm::kSymmetric,
                                     Algorithm::kGram, Algorithm::kGramAccurate};
constexpr Coefficients kCoefficients[] = {Coefficients::kJordan, Coefficients::kPolarExpress,
                                          Coefficients::kYou};

// c [m, n] = a [m, k] b [k, n].
Doubles Product(const Doubles& a, const Doubles& b, int64_t m, int64_t k, int64_t n) {
  Doubles c(m * n, 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + l] * b[l * n + j];
    }
  }
  return c;
}

Doubles Transposed(const Doubles& a, int64_t m, int64_t n) {
  Doubles t(a.size());
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) t[j * m + i] = a[i * n + j];
  }
  return t;
}

// The textbook iteration, on the rows' side whatever the shape.
Doubles Reference(Coefficients coefficients, const Floats& matrix, int64_t m, int64_t n) {
  Doubles x(matrix.begin(), matrix.end());
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double length = coefficients == Coefficients::kPolarExpress ? 1 / 1.02 : 1;
  for (double& value : x) value *= squares > 0 ? length / std::sqrt(squares) : 0;
  for (const auto& [a, b, c] : Steps(coefficients)) {
    const Doubles gram = Product(x, Transposed(x, m, n), m, n, m);
    const Doubles gram_x = Product(gram, x, m, m, n);
    const Doubles gram_gram_x = Product(gram, gram_x, m, m, n);
    for (size_t i = 0; i < x.size(); ++i) x[i] = a * x[i] + b * gram_x[i] + c * gram_gram_x[i];
  }
  return x;
}

// What the five polynomials make of one singular value.
double OnSingularValue(Coefficients coefficients, double s) {
  if (coefficients == Coefficients::kPolarExpress) s /= 1.02;
  for (const auto& [a, b, c] : Steps(coefficients)) {
    s = a * s + b * std::pow(s, 3) + c * std::pow(s, 5);
  }
  return s;
}

Floats Random(int64_t size, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

// [rows, count] with orthonormal columns, by Gram and Schmidt, twice for accuracy.
Doubles Orthonormal(int64_t rows, int64_t count, int seed) {
  const Floats random = Random(rows * count, seed);
  Doubles q(random.begin(), random.end());
  for (int64_t j = 0; j < count; ++j) {
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t p = 0; p < j; ++p) {
        double dot = 0;
        for (int64_t i = 0; i < rows; ++i) dot += q[i * count + p] * q[i * count + j];
        for (int64_t i = 0; i < rows; ++i) q[i * count + j] -= dot * q[i * count + p];
      }
    }
    double squares = 0;
    for (int64_t i = 0; i < rows; ++i) squares += q[i * count + j] * q[i * count + j];
    for (int64_t i = 0; i < rows; ++i) q[i * count + j] /= std::sqrt(squares);
  }
  return q;
}

// U diag(singular) V^T [m, n].
Doubles FromSingularValues(const Doubles& u, const Doubles& singular, const Doubles& v, int64_t m,
                           int64_t n) {
  const auto count = static_cast<int64_t>(singular.size());
  Doubles scaled = u;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < count; ++j) scaled[i * count + j] *= singular[j];
  }
  return Product(scaled, Transposed(v, n, count), m, count, n);
}

// Passes on, and keeps each op's account of its work.
class MeteredStream : public Stream {
 public:
  explicit MeteredStream(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
  void Enqueue(OpInfo info, Op op) override {
    if (info.name != "normalize") product_flops += info.flops;
    stream_->Enqueue(std::move(info), std::move(op));
  }
  void Wait(const Event& event) override { stream_->Wait(event); }
  Event Record() override { return stream_->Record(); }
  absl::Status Synchronize() override { return stream_->Synchronize(); }
  const std::string& name() const override { return stream_->name(); }

  double product_flops = 0;

 private:
  const std::unique_ptr<Stream> stream_;
};

Floats Orthogonalized(const NewtonSchulzConfig& config, Floats matrix, int64_t m, int64_t n,
                      int threads = 1, double* flops = nullptr) {
  const auto device = *CreateDevice(Backend::kCpu, threads);
  const auto kernels = CreateOptimizerKernels(*device);
  MeteredStream stream(device->NewStream("s"));
  const NewtonSchulz newton_schulz(config, m, n);
  // A float more, to see that no more is written than is asked for.
  Floats workspace(newton_schulz.workspace() + 1, 0);
  workspace.back() = 12345;
  const Tensor tensor = F32(matrix.data(), m, n);
  newton_schulz.Enqueue(*kernels, stream, tensor, tensor, workspace.data());
  EXPECT_TRUE(stream.Synchronize().ok());
  EXPECT_EQ(workspace.back(), 12345);
  if (flops != nullptr) *flops = stream.product_flops;
  return matrix;
}

void ExpectNear(const Floats& actual, const Doubles& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  double worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::abs(actual[i] - expected[i]);
    worst = difference <= worst ? worst : difference;  // a NaN comes through
  }
  EXPECT_LE(worst, tolerance);
}

class EveryNewtonSchulz : public testing::TestWithParam<std::tuple<Algorithm, Coefficients>> {
 protected:
  NewtonSchulzConfig config() const { return {std::get<1>(GetParam()), std::get<0>(GetParam())}; }
};
INSTANTIATE_TEST_SUITE_P(All, EveryNewtonSchulz,
                         testing::Combine(testing::ValuesIn(kAlgorithms),
                                          testing::ValuesIn(kCoefficients)));

TEST_P(EveryNewtonSchulz, AgreesWithFloat64AtEveryShape) {
  for (const auto& [m, n] : std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                                     {1, 50},
                                                                     {50, 1},
                                                                     {2, 3},
                                                                     {16, 40},
                                                                     {40, 16},
                                                                     {24, 24},
                                                                     {7, 131},
                                                                     {100, 230},
                                                                     {230, 100},
                                                                     {97, 97}}) {
    const Floats matrix = Random(m * n, static_cast<int>(m + n));
    for (const int threads : {1, 2}) {
      // Small singular values grow a thousandfold, and their rounding with them.
      ExpectNear(Orthogonalized(config(), matrix, m, n, threads),
                 Reference(config().coefficients, matrix, m, n), 3e-4);
    }
  }
}

TEST_P(EveryNewtonSchulz, MapsEachSingularValueByThePolynomials) {
  // From 1 down to a thousandth, the condition number at which Gram iterations in 16 bits break.
  const Doubles singular = {1, 0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001};
  double squares = 0;
  for (const double s : singular) squares += s * s;
  Doubles expected;
  for (const double s : singular) {
    expected.push_back(OnSingularValue(config().coefficients, s / std::sqrt(squares)));
  }
  for (const auto& [m, n] :
       std::vector<std::pair<int64_t, int64_t>>{{10, 30}, {30, 10}, {10, 10}}) {
    const Doubles u = Orthonormal(m, 10, 1), v = Orthonormal(n, 10, 2);
    const Doubles matrix = FromSingularValues(u, singular, v, m, n);
    ExpectNear(Orthogonalized(config(), Floats(matrix.begin(), matrix.end()), m, n),
               FromSingularValues(u, expected, v, m, n), 3e-4);
  }
}

TEST_P(EveryNewtonSchulz, OfRankOneIsTheOneDirection) {
  const Doubles u = Orthonormal(12, 1, 3), v = Orthonormal(20, 1, 4);
  const Doubles matrix = FromSingularValues(u, {7.0}, v, 12, 20);
  ExpectNear(Orthogonalized(config(), Floats(matrix.begin(), matrix.end()), 12, 20),
             FromSingularValues(u, {OnSingularValue(config().coefficients, 1)}, v, 12, 20), 5e-5);
}

TEST_P(EveryNewtonSchulz, DoesNotDependOnTheLengthOfItsInput) {
  const Floats matrix = Random(6 * 9, 4);
  const Doubles expected = Reference(config().coefficients, matrix, 6, 9);
  for (const float scale : {1e-30f, 1e-12f, 1e12f, 1e30f}) {
    Floats scaled = matrix;
    for (float& value : scaled) value *= scale;
    ExpectNear(Orthogonalized(config(), scaled, 6, 9), expected, 3e-4);
  }
}

TEST_P(EveryNewtonSchulz, AZeroMatrixStaysZero) {
  EXPECT_EQ(Orthogonalized(config(), Floats(35, 0.0f), 5, 7), Floats(35, 0.0f));
}

TEST_P(EveryNewtonSchulz, CountsTheFlopsThatItEnqueues) {
  for (const auto& [m, n] :
       std::vector<std::pair<int64_t, int64_t>>{{8, 8}, {8, 32}, {32, 8}, {1, 4}}) {
    double flops;
    Orthogonalized(config(), Random(m * n, 1), m, n, 1, &flops);
    EXPECT_EQ(NewtonSchulz(config(), m, n).flops(), flops) << m << "x" << n;
  }
}

TEST(NewtonSchulz, ThePolynomialsMeetTheirBands) {
  // Singular values from a hundredth of the Frobenius norm up to it.
  const auto expect = [](Coefficients coefficients, double low, double high) {
    for (int i = 0; i <= 1000; ++i) {
      const double s = OnSingularValue(coefficients, 0.01 + 0.99 * i / 1000);
      EXPECT_GT(s, low);
      EXPECT_LT(s, high);
    }
  };
  expect(Coefficients::kJordan, 0.68, 1.21);
  expect(Coefficients::kPolarExpress, 0.85, 1.15);
  expect(Coefficients::kYou, 0.97, 1.04);
}

TEST(NewtonSchulz, TakesAndGivesBFloat16) {
  constexpr int64_t kRows = 10, kCols = 24;
  const Floats values = Random(kRows * kCols, 9);
  std::vector<BFloat16> matrix(values.begin(), values.end());
  Floats rounded;
  for (const BFloat16 value : matrix) rounded.push_back(static_cast<float>(value));
  const auto device = *CreateDevice(Backend::kCpu, 1);
  const auto kernels = CreateOptimizerKernels(*device);
  const auto stream = device->NewStream("s");
  const NewtonSchulz newton_schulz({}, kRows, kCols);
  Floats workspace(newton_schulz.workspace());
  const Tensor tensor = {matrix.data(), DType::kBFloat16, kRows, kCols};
  newton_schulz.Enqueue(*kernels, *stream, tensor, tensor, workspace.data());
  ASSERT_TRUE(stream->Synchronize().ok());
  Floats result;
  for (const BFloat16 value : matrix) result.push_back(static_cast<float>(value));
  // Half a unit in the last of 8 bits, below 1.
  ExpectNear(result, Reference(Coefficients::kJordan, rounded, kRows, kCols), 1.0 / 512 + 1e-4);
}

TEST(NewtonSchulz, OfSeveralMatricesIsThatOfEachToTheBit) {
  constexpr int64_t kRows = 10, kCols = 24, kBatch = 3;
  const auto device = *CreateDevice(Backend::kCpu, 1);
  const auto kernels = CreateOptimizerKernels(*device);
  const auto stream = device->NewStream("s");
  for (const Algorithm algorithm :
       {Algorithm::kStandard, Algorithm::kSymmetric, Algorithm::kGram, Algorithm::kGramAccurate}) {
    for (const auto& [m, n] : {std::pair{kRows, kCols}, {kCols, kRows}}) {
      const NewtonSchulzConfig config = {Coefficients::kJordan, algorithm};
      Floats together, expected;
      for (int64_t i = 0; i < kBatch; ++i) {
        const Floats matrix = Random(m * n, static_cast<int>(20 + i));
        together.insert(together.end(), matrix.begin(), matrix.end());
        const Floats alone = Orthogonalized(config, matrix, m, n);
        expected.insert(expected.end(), alone.begin(), alone.end());
      }
      const NewtonSchulz newton_schulz(config, m, n);
      Floats workspace(kBatch * newton_schulz.workspace());
      const Tensor tensor = F32(together.data(), kBatch * m, n);
      newton_schulz.Enqueue(*kernels, *stream, tensor, tensor, workspace.data());
      ASSERT_TRUE(stream->Synchronize().ok());
      EXPECT_EQ(together, expected);
    }
  }
}

double Gflops(Algorithm algorithm, int64_t m, int64_t n) {
  return NewtonSchulz({Coefficients::kJordan, algorithm}, m, n).flops() * 1e-9;
}

TEST(NewtonSchulz, NeedsThePublishedFlops) {
  struct Row {
    int64_t m, n;
    double standard, symmetric, gram;
  };
  for (const Row& row :
       {Row{3840, 1280, 146.8, 104.9, 67.1}, Row{1280, 1280, 62.9, 41.9, 41.9},
        Row{5120, 1280, 188.7, 136.3, 79.7}, Row{1280, 5120, 188.7, 136.3, 79.7}}) {
    EXPECT_NEAR(Gflops(Algorithm::kStandard, row.m, row.n), row.standard, 0.1);
    EXPECT_NEAR(Gflops(Algorithm::kSymmetric, row.m, row.n), row.symmetric, 0.1);
    EXPECT_NEAR(Gflops(Algorithm::kAuto, row.m, row.n), row.gram, 0.1);
  }
}

TEST(NewtonSchulz, ChoosesGramWhereTheSidesDiffer) {
  EXPECT_EQ(NewtonSchulz({}, 1280, 5120).algorithm(), Algorithm::kGram);
  EXPECT_EQ(NewtonSchulz({}, 5120, 1280).algorithm(), Algorithm::kGram);
  EXPECT_EQ(NewtonSchulz({}, 1280, 1280).algorithm(), Algorithm::kSymmetric);
}

TEST(NewtonSchulz, NamesTheChoicesWhenAskedForAnother) {
  EXPECT_EQ(*ParseNewtonSchulzCoefficients("you"), Coefficients::kYou);
  EXPECT_EQ(*ParseNewtonSchulzAlgorithm("gram_accurate"), Algorithm::kGramAccurate);
  EXPECT_NE(ParseNewtonSchulzCoefficients("x").status().message().find(
                "choose jordan, polar_express or you"),
            absl::string_view::npos);
  EXPECT_NE(ParseNewtonSchulzAlgorithm("x").status().message().find("choose auto, standard"),
            absl::string_view::npos);
}

}  // namespace
}  // namespace dim0
