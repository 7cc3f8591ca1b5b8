// Every kernel against straightforward float64 code, and every gradient against finite differences
// of that code, at sizes around the edges of vectors, strips and tiles.
#include "model/kernels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace dim0 {
namespace {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Doubles ToDoubles(const Floats& values) { return Doubles(values.begin(), values.end()); }

Floats Random(int64_t size, uint32_t seed, float mean = 0.0f, float deviation = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(mean, deviation);
  Floats values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

std::vector<int32_t> RandomIds(int64_t size, int32_t limit, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int32_t> uniform(0, limit - 1);
  std::vector<int32_t> ids(size);
  for (int32_t& id : ids) id = uniform(generator);
  return ids;
}

// Within `tolerance` of the largest expected magnitude (or of 1 if that is less).
void ExpectNear(const Floats& actual, const Doubles& expected, double tolerance,
                const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double scale = 1;
  for (double value : expected) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::abs(actual[i] - expected[i]), tolerance * scale)
        << what << " [" << i << "]: " << actual[i] << " instead of " << expected[i];
  }
}

bool BitEqual(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double InnerProduct(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Compares `gradient` with central differences of `loss` at `at`, at up to 60 entries.
void ExpectGradient(const std::function<double(const Doubles&)>& loss, Doubles at,
                    const Floats& gradient, const std::string& what) {
  ASSERT_EQ(at.size(), gradient.size()) << what;
  const size_t stride = std::max<size_t>(1, at.size() / 60);
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < at.size(); i += stride) {
    const double middle = at[i];
    at[i] = middle + kStep;
    const double above = loss(at);
    at[i] = middle - kStep;
    const double below = loss(at);
    at[i] = middle;
    const double slope = (above - below) / (2 * kStep);
    ASSERT_NEAR(gradient[i], slope, 2e-4 * std::max(1.0, std::abs(slope)))
        << what << " [" << i << "]";
  }
}

// ---- float64 references ------------------------------------------------------------------------

struct NormResult {
  Doubles y, mean, rstd;
};

NormResult ReferenceNorm(const Doubles& x, const Doubles& gain, const Doubles& bias) {
  const size_t width = gain.size(), rows = x.size() / width;
  NormResult result{Doubles(x.size()), Doubles(rows), Doubles(rows)};
  for (size_t n = 0; n < rows; ++n) {
    double mean = 0, variance = 0;
    for (size_t c = 0; c < width; ++c) mean += x[n * width + c] / width;
    for (size_t c = 0; c < width; ++c) variance += std::pow(x[n * width + c] - mean, 2) / width;
    const double rstd = 1 / std::sqrt(variance + 1e-5);
    for (size_t c = 0; c < width; ++c) {
      result.y[n * width + c] = gain[c] * (x[n * width + c] - mean) * rstd + bias[c];
    }
    result.mean[n] = mean;
    result.rstd[n] = rstd;
  }
  return result;
}

// The chain rule through y, variance and mean, one after the other.
struct NormGradient {
  Doubles dx, dgain, dbias;
};

NormGradient ReferenceNormBackward(const Doubles& dy, const Doubles& x, const Doubles& gain) {
  const size_t width = gain.size(), rows = x.size() / width;
  NormGradient result{Doubles(x.size()), Doubles(width), Doubles(width)};
  const NormResult forward = ReferenceNorm(x, gain, Doubles(width));
  for (size_t n = 0; n < rows; ++n) {
    const double* g = &dy[n * width];
    const double mean = forward.mean[n], rstd = forward.rstd[n];
    double dvariance = 0, dmean = 0;
    for (size_t c = 0; c < width; ++c) {
      const double centred = x[n * width + c] - mean;
      dvariance += g[c] * gain[c] * centred * -0.5 * std::pow(rstd, 3);
      dmean -= g[c] * gain[c] * rstd;
      result.dgain[c] += g[c] * centred * rstd;
      result.dbias[c] += g[c];
    }
    for (size_t c = 0; c < width; ++c) {
      const double centred = x[n * width + c] - mean;
      result.dx[n * width + c] =
          g[c] * gain[c] * rstd + dvariance * 2 * centred / width + dmean / width;
    }
  }
  return result;
}

double ReferenceGelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

double ReferenceGeluDerivative(double x) {
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  const double du = std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
  return 0.5 * (1 + std::tanh(u)) + 0.5 * x * du / std::pow(std::cosh(u), 2);
}

struct AttentionCase {
  int64_t batch, seq_len, heads, head_size;
  int64_t width() const { return heads * head_size; }
  int64_t tokens() const { return batch * seq_len; }
  AttentionShape shape() const { return {batch, seq_len, heads}; }
  std::string name() const {
    return "B" + std::to_string(batch) + " T" + std::to_string(seq_len) + " H" +
           std::to_string(heads) + " D" + std::to_string(head_size);
  }
};

struct AttentionResult {
  Doubles out, logsumexp, dqkv;
};

// One query at a time over all the keys it sees. dqkv only if dout is given.
AttentionResult ReferenceAttention(const AttentionCase& c, const Doubles& qkv,
                                   const Doubles& dout) {
  const int64_t width = c.width(), size = c.head_size;
  AttentionResult result{Doubles(c.tokens() * width), Doubles(c.batch * c.heads * c.seq_len),
                         Doubles(dout.empty() ? 0 : qkv.size())};
  const double scale = 1 / std::sqrt(static_cast<double>(size));
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      auto at = [&](int64_t t, int64_t part) {
        return (b * c.seq_len + t) * 3 * width + part * width + h * size;
      };
      for (int64_t i = 0; i < c.seq_len; ++i) {
        Doubles p(i + 1);
        double max = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          for (int64_t d = 0; d < size; ++d) p[j] += scale * qkv[at(i, 0) + d] * qkv[at(j, 1) + d];
          max = std::max(max, p[j]);
        }
        for (double& value : p) sum += value = std::exp(value - max);
        for (double& value : p) value /= sum;
        result.logsumexp[(b * c.heads + h) * c.seq_len + i] = max + std::log(sum);
        const int64_t out = (b * c.seq_len + i) * width + h * size;
        for (int64_t j = 0; j <= i; ++j) {
          for (int64_t d = 0; d < size; ++d) result.out[out + d] += p[j] * qkv[at(j, 2) + d];
        }
        if (dout.empty()) continue;
        Doubles dp(i + 1);
        for (int64_t j = 0; j <= i; ++j) {
          for (int64_t d = 0; d < size; ++d) {
            dp[j] += dout[out + d] * qkv[at(j, 2) + d];
            result.dqkv[at(j, 2) + d] += p[j] * dout[out + d];
          }
        }
        const double average = InnerProduct(p, dp);
        for (int64_t j = 0; j <= i; ++j) {
          const double ds = p[j] * (dp[j] - average) * scale;
          for (int64_t d = 0; d < size; ++d) {
            result.dqkv[at(i, 0) + d] += ds * qkv[at(j, 1) + d];
            result.dqkv[at(j, 1) + d] += ds * qkv[at(i, 0) + d];
          }
        }
      }
    }
  }
  return result;
}

// Sizes of tiles are 64 queries and 256 keys.
const AttentionCase kAttentionCases[] = {
    {1, 1, 1, 1},  {2, 1, 3, 5},   {1, 7, 2, 8},  {3, 9, 1, 1},    {1, 63, 2, 9},   {1, 64, 1, 33},
    {2, 65, 3, 7}, {1, 129, 1, 4}, {2, 31, 5, 3}, {1, 256, 1, 16}, {1, 257, 2, 13}, {1, 600, 1, 6},
};

double ReferenceCrossEntropy(const Doubles& logits, const std::vector<int32_t>& targets) {
  const size_t vocabulary = logits.size() / targets.size();
  double loss = 0;
  for (size_t n = 0; n < targets.size(); ++n) {
    if (targets[n] < 0) continue;
    const double* row = &logits[n * vocabulary];
    const double max = *std::max_element(row, row + vocabulary);
    double sum = 0;
    for (size_t v = 0; v < vocabulary; ++v) sum += std::exp(row[v] - max);
    loss += max + std::log(sum) - row[targets[n]];
  }
  return loss;
}

Doubles ReferenceCrossEntropyGradient(const Doubles& logits, const std::vector<int32_t>& targets,
                                      double scale) {
  const size_t vocabulary = logits.size() / targets.size();
  Doubles gradient(logits.size());
  for (size_t n = 0; n < targets.size(); ++n) {
    if (targets[n] < 0) continue;
    const double* row = &logits[n * vocabulary];
    const double max = *std::max_element(row, row + vocabulary);
    double sum = 0;
    for (size_t v = 0; v < vocabulary; ++v) sum += std::exp(row[v] - max);
    for (size_t v = 0; v < vocabulary; ++v) {
      const double onehot = static_cast<int32_t>(v) == targets[n] ? 1 : 0;
      gradient[n * vocabulary + v] = (std::exp(row[v] - max) / sum - onehot) * scale;
    }
  }
  return gradient;
}

// ---- the kernels, called as functions of vectors
// -------------------------------------------------

Tensor Matrix(const Floats& values, int64_t rows) {
  return F32(const_cast<float*>(values.data()), rows, rows == 0 ? 1 : values.size() / rows);
}
Tensor Vector(const Floats& values) {
  return F32(const_cast<float*>(values.data()), static_cast<int64_t>(values.size()));
}

class Runner {
 public:
  explicit Runner(int threads)
      : device_(*CreateDevice(Backend::kCpu, threads)),
        kernels_(CreateKernels(*device_)),
        stream_(device_->NewStream("test")) {}

  Kernels* operator->() { return kernels_.get(); }
  Stream& stream() { return *stream_; }
  void Finish() {
    const absl::Status status = stream_->Synchronize();
    ASSERT_TRUE(status.ok()) << status;
  }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<Stream> stream_;
};

class KernelsTest : public testing::TestWithParam<int> {
 protected:
  Runner run_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Threads, KernelsTest, testing::Values(1, 2, 3));

constexpr int64_t kWidths[] = {1, 7, 8, 9, 31, 33, 64, 65, 257, 515};
constexpr int64_t kRowCounts[] = {1, 3, 65};

// ---- embedding
// -----------------------------------------------------------------------------------

TEST_P(KernelsTest, EmbeddingAddsTokenAndPosition) {
  constexpr int64_t kVocabulary = 11, kPositions = 9, kSeqLen = 7, kBatch = 3;
  for (int64_t width : kWidths) {
    const Floats wte = Random(kVocabulary * width, 1), wpe = Random(kPositions * width, 2);
    const std::vector<int32_t> tokens = RandomIds(kBatch * kSeqLen, kVocabulary, 3);
    Floats out(kBatch * kSeqLen * width);
    run_->EmbeddingForward(run_.stream(), tokens.data(), kSeqLen, Matrix(wte, kVocabulary),
                           Matrix(wpe, kPositions), Matrix(out, kBatch * kSeqLen));
    run_.Finish();
    for (int64_t n = 0; n < kBatch * kSeqLen; ++n) {
      for (int64_t c = 0; c < width; ++c) {
        ASSERT_EQ(out[n * width + c], wte[tokens[n] * width + c] + wpe[n % kSeqLen * width + c]);
      }
    }
  }
}

TEST_P(KernelsTest, EmbeddingGradientSumsRepeatedTokensAndZeroesUnusedRows) {
  // The last token is never used.
  constexpr int64_t kVocabulary = 5, kPositions = 9, kSeqLen = 7, kBatch = 3;
  for (int64_t width : kWidths) {
    const Floats dout = Random(kBatch * kSeqLen * width, 1);
    const std::vector<int32_t> tokens = RandomIds(kBatch * kSeqLen, kVocabulary - 1, 2);
    Floats dwte = Random(kVocabulary * width, 3), dwpe = Random(kPositions * width, 4);
    Doubles expected_wte(dwte.size()), expected_wpe(dwpe.size());
    for (int64_t n = 0; n < kBatch * kSeqLen; ++n) {
      for (int64_t c = 0; c < width; ++c) {
        expected_wte[tokens[n] * width + c] += dout[n * width + c];
        expected_wpe[n % kSeqLen * width + c] += dout[n * width + c];
      }
    }
    run_->EmbeddingBackward(run_.stream(), tokens.data(), kSeqLen, Matrix(dout, kBatch * kSeqLen),
                            Matrix(dwte, kVocabulary), Matrix(dwpe, kPositions));
    run_.Finish();
    ExpectNear(dwte, expected_wte, 1e-6, "dwte");
    ExpectNear(dwpe, expected_wpe, 1e-6, "dwpe");
  }
}

// ---- layer norm
// ----------------------------------------------------------------------------------

TEST_P(KernelsTest, LayerNormMatchesFloat64) {
  for (int64_t width : kWidths) {
    for (int64_t rows : kRowCounts) {
      const Floats x = Random(rows * width, 1, 0.5f, 2.0f);
      const Floats gain = Random(width, 2, 1.0f), bias = Random(width, 3);
      Floats y(rows * width), mean(rows), rstd(rows);
      run_->LayerNormForward(run_.stream(), Matrix(x, rows), Vector(gain), Vector(bias),
                             Matrix(y, rows), Vector(mean), Vector(rstd));
      run_.Finish();
      const NormResult expected = ReferenceNorm(ToDoubles(x), ToDoubles(gain), ToDoubles(bias));
      ExpectNear(y, expected.y, 2e-6, "y");
      ExpectNear(mean, expected.mean, 1e-6, "mean");
      ExpectNear(rstd, expected.rstd, 2e-6, "rstd");
    }
  }
}

TEST_P(KernelsTest, LayerNormKeepsItsDigitsUnderALargeMean) {
  constexpr int64_t kWidth = 1000;
  const Floats x = Random(kWidth, 1, 1000.0f, 1.0f), gain(kWidth, 1.0f), bias(kWidth, 0.0f);
  Floats y(kWidth), mean(1), rstd(1);
  run_->LayerNormForward(run_.stream(), Matrix(x, 1), Vector(gain), Vector(bias), Matrix(y, 1),
                         Vector(mean), Vector(rstd));
  run_.Finish();
  const NormResult expected = ReferenceNorm(ToDoubles(x), ToDoubles(gain), ToDoubles(bias));
  // The mean itself cannot be better than a float at 1000 is: 6e-5 between neighbours.
  ExpectNear(y, expected.y, 1e-4, "y");
  ExpectNear(rstd, expected.rstd, 1e-5, "rstd");
}

TEST_P(KernelsTest, AddLayerNormNormalisesTheSumAlsoInPlace) {
  constexpr int64_t kRows = 5;
  for (int64_t width : kWidths) {
    const Floats x = Random(kRows * width, 1), delta = Random(kRows * width, 2);
    const Floats gain = Random(width, 3, 1.0f), bias = Random(width, 4);
    Doubles expected_sum(kRows * width);
    for (int64_t i = 0; i < kRows * width; ++i) expected_sum[i] = x[i] + delta[i];
    const NormResult expected = ReferenceNorm(expected_sum, ToDoubles(gain), ToDoubles(bias));
    for (int target : {0, 1, 2}) {  // sum is a buffer of its own, x, or delta
      Floats buffers[3] = {x, delta, Floats(kRows * width)};
      Floats& sum = buffers[target];
      Floats y(kRows * width), mean(kRows), rstd(kRows);
      run_->AddLayerNormForward(run_.stream(), Matrix(buffers[0], kRows), Matrix(buffers[1], kRows),
                                Vector(gain), Vector(bias), Matrix(sum, kRows), Matrix(y, kRows),
                                Vector(mean), Vector(rstd));
      run_.Finish();
      ExpectNear(sum, expected_sum, 1e-7, "sum");
      ExpectNear(y, expected.y, 5e-6, "y");
      ExpectNear(mean, expected.mean, 1e-6, "mean");
      ExpectNear(rstd, expected.rstd, 5e-6, "rstd");
    }
  }
}

TEST_P(KernelsTest, LayerNormGradientMatchesFloat64AndFiniteDifferences) {
  for (int64_t width : kWidths) {
    if (width == 1) continue;  // constant: see the next test
    for (int64_t rows : kRowCounts) {
      for (Write write_dx : {Write::kOverwrite, Write::kAccumulate}) {
        for (Write write_parameters : {Write::kOverwrite, Write::kAccumulate}) {
          const Floats x = Random(rows * width, 1), dy = Random(rows * width, 2);
          const Floats gain = Random(width, 3, 1.0f), bias = Random(width, 4);
          const NormResult forward = ReferenceNorm(ToDoubles(x), ToDoubles(gain), ToDoubles(bias));
          const Floats mean(forward.mean.begin(), forward.mean.end());
          const Floats rstd(forward.rstd.begin(), forward.rstd.end());
          const Floats dx_before = Random(rows * width, 5);
          const Floats dgain_before = Random(width, 6), dbias_before = Random(width, 7);
          Floats dx = dx_before, dgain = dgain_before, dbias = dbias_before;
          run_->LayerNormBackward(run_.stream(), Matrix(dy, rows), Matrix(x, rows), Vector(gain),
                                  Vector(mean), Vector(rstd), Matrix(dx, rows), write_dx,
                                  Vector(dgain), Vector(dbias), write_parameters);
          run_.Finish();
          NormGradient expected =
              ReferenceNormBackward(ToDoubles(dy), ToDoubles(x), ToDoubles(gain));
          if (write_dx == Write::kAccumulate) {
            for (int64_t i = 0; i < rows * width; ++i) expected.dx[i] += dx_before[i];
          }
          if (write_parameters == Write::kAccumulate) {
            for (int64_t c = 0; c < width; ++c) expected.dgain[c] += dgain_before[c];
            for (int64_t c = 0; c < width; ++c) expected.dbias[c] += dbias_before[c];
          }
          ExpectNear(dx, expected.dx, 3e-6, "dx");
          ExpectNear(dgain, expected.dgain, 3e-6, "dgain");
          ExpectNear(dbias, expected.dbias, 3e-6, "dbias");
          if (write_dx == Write::kOverwrite && write_parameters == Write::kOverwrite) {
            const Doubles dy64 = ToDoubles(dy), x64 = ToDoubles(x), gain64 = ToDoubles(gain),
                          bias64 = ToDoubles(bias);
            auto loss_of_x = [&](const Doubles& v) {
              return InnerProduct(dy64, ReferenceNorm(v, gain64, bias64).y);
            };
            auto loss_of_gain = [&](const Doubles& v) {
              return InnerProduct(dy64, ReferenceNorm(x64, v, bias64).y);
            };
            auto loss_of_bias = [&](const Doubles& v) {
              return InnerProduct(dy64, ReferenceNorm(x64, gain64, v).y);
            };
            ExpectGradient(loss_of_x, x64, dx, "dx");
            ExpectGradient(loss_of_gain, gain64, dgain, "dgain");
            ExpectGradient(loss_of_bias, bias64, dbias, "dbias");
          }
        }
      }
    }
  }
}

TEST_P(KernelsTest, LayerNormOfAConstantRowIsTheBiasAndFinite) {
  for (int64_t width : {1, 8, 33}) {
    const Floats x(width, 3.0f), gain = Random(width, 1), bias = Random(width, 2);
    const Floats dy = Random(width, 3);
    Floats y(width), mean(1), rstd(1), dx(width), dgain(width), dbias(width);
    run_->LayerNormForward(run_.stream(), Matrix(x, 1), Vector(gain), Vector(bias), Matrix(y, 1),
                           Vector(mean), Vector(rstd));
    run_->LayerNormBackward(run_.stream(), Matrix(dy, 1), Matrix(x, 1), Vector(gain), Vector(mean),
                            Vector(rstd), Matrix(dx, 1), Write::kOverwrite, Vector(dgain),
                            Vector(dbias), Write::kOverwrite);
    run_.Finish();
    EXPECT_EQ(y, bias);
    EXPECT_EQ(dbias, dy);
    for (float value : dgain) EXPECT_EQ(value, 0);
    for (float value : dx) EXPECT_TRUE(std::isfinite(value));
  }
}

// ---- linear
// --------------------------------------------------------------------------------------

struct LinearCase {
  int64_t tokens, in, out;
};
constexpr LinearCase kLinearCases[] = {{1, 1, 1},    {1, 33, 65},   {7, 8, 9},     {9, 31, 1},
                                       {33, 64, 65}, {65, 257, 31}, {130, 9, 301}, {300, 65, 7}};

TEST_P(KernelsTest, LinearMatchesFloat64WithAndWithoutBias) {
  for (const auto& [tokens, in, out] : kLinearCases) {
    for (bool has_bias : {true, false}) {
      const Floats x = Random(tokens * in, 1), weight = Random(out * in, 2);
      const Floats bias = has_bias ? Random(out, 3) : Floats();
      Floats y(tokens * out, kNaN);  // must not be read
      run_->LinearForward(run_.stream(), Matrix(x, tokens), Matrix(weight, out), Vector(bias),
                          Matrix(y, tokens));
      run_.Finish();
      Doubles expected(tokens * out);
      for (int64_t n = 0; n < tokens; ++n) {
        for (int64_t o = 0; o < out; ++o) {
          double sum = has_bias ? bias[o] : 0;
          for (int64_t i = 0; i < in; ++i) sum += double{x[n * in + i]} * weight[o * in + i];
          expected[n * out + o] = sum;
        }
      }
      ExpectNear(y, expected, 2e-6, "y");
    }
  }
}

TEST_P(KernelsTest, LinearGradientsMatchFloat64) {
  for (const auto& [tokens, in, out] : kLinearCases) {
    for (Write write : {Write::kOverwrite, Write::kAccumulate}) {
      for (bool wants_dx : {true, false}) {
        for (bool has_bias : {true, false}) {
          const bool keep = write == Write::kAccumulate;
          const Floats dy = Random(tokens * out, 1), x = Random(tokens * in, 2);
          const Floats weight = Random(out * in, 3);
          Floats dx(wants_dx ? tokens * in : 0, kNaN);
          Floats dweight = keep ? Random(out * in, 4) : Floats(out * in, kNaN);
          Floats dbias = !has_bias ? Floats() : keep ? Random(out, 5) : Floats(out, kNaN);
          Doubles expected_dx(dx.size()), expected_dweight(dweight.size()),
              expected_dbias(dbias.size());
          if (keep) expected_dweight = ToDoubles(dweight), expected_dbias = ToDoubles(dbias);
          for (int64_t n = 0; n < tokens; ++n) {
            for (int64_t o = 0; o < out; ++o) {
              const double g = dy[n * out + o];
              if (has_bias) expected_dbias[o] += g;
              for (int64_t i = 0; i < in; ++i) {
                if (wants_dx) expected_dx[n * in + i] += g * weight[o * in + i];
                expected_dweight[o * in + i] += g * x[n * in + i];
              }
            }
          }
          run_->LinearBackward(run_.stream(), Matrix(dy, tokens), Matrix(x, tokens),
                               Matrix(weight, out), Matrix(dx, wants_dx ? tokens : 0),
                               Matrix(dweight, out), Vector(dbias), write);
          run_.Finish();
          ExpectNear(dx, expected_dx, 2e-6, "dx");
          ExpectNear(dweight, expected_dweight, 2e-6, "dweight");
          ExpectNear(dbias, expected_dbias, 2e-6, "dbias");
        }
      }
    }
  }
}

// ---- GELU
// ----------------------------------------------------------------------------------------

constexpr int64_t kElementCounts[] = {1, 7, 8, 9, 31, 33, 64, 65, 4095, 4097, 12301};

// GELU alone: of a linear map of one feature, with weight 1 and bias 0.
struct Gelu {
  Floats one = {1}, zero = {0}, dweight = {0}, dbias = {0};

  void Forward(Runner& run, Floats& x, Floats& y) {
    Floats up(x.size());
    run->LinearGeluForward(run.stream(), Vector(x), Vector(one), Vector(zero), Vector(up),
                           Vector(y));
    run.Finish();
  }
  void Backward(Runner& run, Floats& dy, Floats& up, Floats& dup) {
    Floats x(up.size());
    run->GeluLinearBackward(run.stream(), Vector(dy), Vector(up), Vector(x), Vector(one),
                            Vector(dup), Vector(dweight), Vector(dbias), Write::kOverwrite);
    run.Finish();
  }
};

TEST_P(KernelsTest, GeluAndItsGradientMatchFloat64) {
  for (int64_t size : kElementCounts) {
    Floats x = Random(size, 1, 0.0f, 3.0f), dy = Random(size, 2);
    Floats y(size), dx(size);
    Gelu().Forward(run_, x, y);
    Gelu().Backward(run_, dy, x, dx);
    Doubles expected_y(size), expected_dx(size);
    for (int64_t i = 0; i < size; ++i) {
      expected_y[i] = ReferenceGelu(x[i]);
      expected_dx[i] = dy[i] * ReferenceGeluDerivative(x[i]);
    }
    ExpectNear(y, expected_y, 3e-7, "y");
    ExpectNear(dx, expected_dx, 5e-7, "dx");
    const Doubles dy64 = ToDoubles(dy);
    auto loss = [&](const Doubles& v) {
      double sum = 0;
      for (int64_t i = 0; i < size; ++i) sum += dy64[i] * ReferenceGelu(v[i]);
      return sum;
    };
    ExpectGradient(loss, ToDoubles(x), dx, "dx");
  }
}

TEST_P(KernelsTest, GeluIsTheIdentityOrZeroFarFromZeroAndPassesNaN) {
  Floats x = {0.0f, 12.0f, 1e10f, 1e30f, -12.0f, -1e10f, -1e30f, kInfinity, kNaN, -1.0f};
  Floats one(x.size(), 1.0f);
  Floats y(x.size()), dx(x.size());
  Gelu().Forward(run_, x, y);
  Gelu().Backward(run_, one, x, dx);
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      EXPECT_TRUE(std::isnan(y[i]));
      EXPECT_TRUE(std::isnan(dx[i]));
    } else if (x[i] >= 12) {
      EXPECT_EQ(y[i], x[i]);
      EXPECT_FLOAT_EQ(dx[i], 1.0f);
    } else if (x[i] <= -12) {
      EXPECT_NEAR(y[i], 0.0f, 1e-30f);
      EXPECT_NEAR(dx[i], 0.0f, 1e-30f);
    }
  }
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_FLOAT_EQ(dx[0], 0.5f);
}

TEST_P(KernelsTest, LinearWithGeluAndItsGradientMatchFloat64) {
  for (const auto& [tokens, in, out] :
       {std::array<int64_t, 3>{1, 1, 1}, {5, 3, 7}, {33, 17, 70}, {65, 64, 256}}) {
    const Floats x = Random(tokens * in, 1), weight = Random(out * in, 2), bias = Random(out, 3);
    Floats up(tokens * out, kNaN), y(tokens * out, kNaN);
    run_->LinearGeluForward(run_.stream(), Matrix(x, tokens), Matrix(weight, out), Vector(bias),
                            Matrix(up, tokens), Matrix(y, tokens));
    run_.Finish();
    Doubles expected_up(up.size()), expected_y(up.size());
    for (int64_t n = 0; n < tokens; ++n) {
      for (int64_t o = 0; o < out; ++o) {
        double sum = bias[o];
        for (int64_t i = 0; i < in; ++i) sum += double{x[n * in + i]} * weight[o * in + i];
        expected_up[n * out + o] = sum;
        expected_y[n * out + o] = ReferenceGelu(sum);
      }
    }
    ExpectNear(up, expected_up, 2e-6, "up");
    ExpectNear(y, expected_y, 2e-6, "y");

    // The map back down, whose input y is.
    const Floats down = Random(in * out, 4), dy = Random(tokens * in, 5);
    for (const Write write : {Write::kOverwrite, Write::kAccumulate}) {
      const float start = write == Write::kAccumulate ? 0.5f : kNaN;
      Floats dup(tokens * out, kNaN), dweight(in * out, start), dbias(in, start);
      run_->GeluLinearBackward(run_.stream(), Matrix(dy, tokens), Matrix(up, tokens),
                               Matrix(y, tokens), Matrix(down, in), Matrix(dup, tokens),
                               Matrix(dweight, in), Vector(dbias), write);
      run_.Finish();
      const double held = write == Write::kAccumulate ? 0.5 : 0;
      Doubles expected_dup(dup.size()), expected_dweight(dweight.size(), held);
      Doubles expected_dbias(dbias.size(), held);
      for (int64_t n = 0; n < tokens; ++n) {
        for (int64_t o = 0; o < out; ++o) {
          double sum = 0;
          for (int64_t i = 0; i < in; ++i) sum += double{dy[n * in + i]} * down[i * out + o];
          expected_dup[n * out + o] = sum * ReferenceGeluDerivative(up[n * out + o]);
        }
        for (int64_t i = 0; i < in; ++i) {
          expected_dbias[i] += dy[n * in + i];
          for (int64_t o = 0; o < out; ++o) {
            expected_dweight[i * out + o] += double{dy[n * in + i]} * y[n * out + o];
          }
        }
      }
      ExpectNear(dup, expected_dup, 2e-6, "dup");
      ExpectNear(dweight, expected_dweight, 2e-6, "dweight");
      ExpectNear(dbias, expected_dbias, 2e-6, "dbias");
    }
  }
}

TEST_P(KernelsTest, LinearAddsTheResidualAlsoInPlace) {
  for (const auto& [tokens, in, out] :
       {std::array<int64_t, 3>{1, 1, 1}, {5, 7, 3}, {33, 70, 17}, {65, 256, 64}}) {
    const Floats x = Random(tokens * in, 1), weight = Random(out * in, 2), bias = Random(out, 3);
    const Floats residual = Random(tokens * out, 4);
    Floats y(tokens * out, kNaN), in_place = residual;
    run_->LinearAddForward(run_.stream(), Matrix(x, tokens), Matrix(weight, out), Vector(bias),
                           Matrix(residual, tokens), Matrix(y, tokens));
    run_->LinearAddForward(run_.stream(), Matrix(x, tokens), Matrix(weight, out), Vector(bias),
                           Matrix(in_place, tokens), Matrix(in_place, tokens));
    run_.Finish();
    Doubles expected(residual.begin(), residual.end());
    for (int64_t n = 0; n < tokens; ++n) {
      for (int64_t o = 0; o < out; ++o) {
        expected[n * out + o] += bias[o];
        for (int64_t i = 0; i < in; ++i) {
          expected[n * out + o] += double{x[n * in + i]} * weight[o * in + i];
        }
      }
    }
    ExpectNear(y, expected, 2e-6, "y");
    EXPECT_TRUE(BitEqual(y, in_place));
  }
}

// ---- attention
// -----------------------------------------------------------------------------------

TEST_P(KernelsTest, AttentionAndItsGradientMatchFloat64) {
  for (const AttentionCase& c : kAttentionCases) {
    const int64_t tokens = c.tokens(), pairs = c.batch * c.heads;
    const Floats qkv = Random(tokens * 3 * c.width(), 1), dout = Random(tokens * c.width(), 2);
    // NaNs show what is read before it is written.
    Floats out(tokens * c.width(), kNaN), logsumexp(pairs * c.seq_len, kNaN);
    Floats dqkv(qkv.size(), kNaN);
    run_->AttentionForward(run_.stream(), c.shape(), Matrix(qkv, tokens), Matrix(out, tokens),
                           Matrix(logsumexp, pairs));
    run_->AttentionBackward(run_.stream(), c.shape(), Matrix(dout, tokens), Matrix(qkv, tokens),
                            Matrix(out, tokens), Matrix(logsumexp, pairs), Matrix(dqkv, tokens));
    run_.Finish();
    const AttentionResult expected = ReferenceAttention(c, ToDoubles(qkv), ToDoubles(dout));
    ExpectNear(out, expected.out, 2e-6, "out of " + c.name());
    ExpectNear(logsumexp, expected.logsumexp, 2e-6, "logsumexp of " + c.name());
    ExpectNear(dqkv, expected.dqkv, 5e-6, "dqkv of " + c.name());
  }
}

TEST_P(KernelsTest, AttentionGradientMatchesFiniteDifferences) {
  for (const AttentionCase& c : {AttentionCase{2, 9, 2, 5}, AttentionCase{1, 70, 1, 4}}) {
    const int64_t tokens = c.tokens(), pairs = c.batch * c.heads;
    const Floats qkv = Random(tokens * 3 * c.width(), 1), dout = Random(tokens * c.width(), 2);
    Floats out(tokens * c.width()), logsumexp(pairs * c.seq_len), dqkv(qkv.size());
    run_->AttentionForward(run_.stream(), c.shape(), Matrix(qkv, tokens), Matrix(out, tokens),
                           Matrix(logsumexp, pairs));
    run_->AttentionBackward(run_.stream(), c.shape(), Matrix(dout, tokens), Matrix(qkv, tokens),
                            Matrix(out, tokens), Matrix(logsumexp, pairs), Matrix(dqkv, tokens));
    run_.Finish();
    auto loss = [&, dout64 = ToDoubles(dout)](const Doubles& v) {
      return InnerProduct(dout64, ReferenceAttention(c, v, {}).out);
    };
    ExpectGradient(loss, ToDoubles(qkv), dqkv, "dqkv of " + c.name());
  }
}

TEST_P(KernelsTest, AttentionWithHugeScoresPicksTheLargest) {
  // Scores of thousands in both directions, across several tiles of keys: exponentials of unshifted
  // scores would overflow.
  const AttentionCase c{1, 600, 1, 8};
  Floats qkv = Random(c.tokens() * 3 * c.width(), 1);
  for (int64_t t = 0; t < c.tokens(); ++t) {
    for (int64_t i = 0; i < 2 * c.width(); ++i) qkv[t * 3 * c.width() + i] *= 64;
  }
  Floats out(c.tokens() * c.width()), logsumexp(c.seq_len);
  run_->AttentionForward(run_.stream(), c.shape(), Matrix(qkv, c.tokens()), Matrix(out, c.tokens()),
                         Matrix(logsumexp, 1));
  run_.Finish();
  const AttentionResult expected = ReferenceAttention(c, ToDoubles(qkv), {});
  ExpectNear(logsumexp, expected.logsumexp, 1e-6, "logsumexp");
  // Scores of 1e4 are rounded to 1e-3.
  ExpectNear(out, expected.out, 5e-3, "out");
}

TEST_P(KernelsTest, AttentionDoesNotHideANaN) {
  const AttentionCase c{1, 70, 2, 8};
  Floats qkv = Random(c.tokens() * 3 * c.width(), 1);
  const int64_t poisoned = 3;  // the key of token 3, head 1
  qkv[poisoned * 3 * c.width() + c.width() + c.head_size] = kNaN;
  Floats out(c.tokens() * c.width()), logsumexp(c.heads * c.seq_len);
  run_->AttentionForward(run_.stream(), c.shape(), Matrix(qkv, c.tokens()), Matrix(out, c.tokens()),
                         Matrix(logsumexp, c.heads));
  run_.Finish();
  for (int64_t t = 0; t < c.seq_len; ++t) {
    EXPECT_EQ(std::isnan(out[t * c.width() + c.head_size]), t >= poisoned) << t;
    EXPECT_FALSE(std::isnan(out[t * c.width()])) << t;
  }
}

TEST_P(KernelsTest, DecodingTokenByTokenMatchesAttentionOverTheWholeSequence) {
  for (const AttentionCase& c :
       {AttentionCase{1, 1, 1, 1}, AttentionCase{1, 67, 3, 7}, AttentionCase{1, 521, 2, 9}}) {
    const int64_t width = c.width();
    const Floats qkv = Random(c.seq_len * 3 * width, 1);
    Floats keys(c.seq_len * width, kNaN), values(c.seq_len * width, kNaN), out(c.seq_len * width);
    for (int64_t t = 0; t < c.seq_len; ++t) {
      run_->AttentionDecode(run_.stream(), c.heads, t,
                            F32(const_cast<float*>(qkv.data()) + t * 3 * width, 1, 3 * width),
                            Matrix(keys, c.seq_len), Matrix(values, c.seq_len),
                            F32(out.data() + t * width, 1, width));
    }
    run_.Finish();
    ExpectNear(out, ReferenceAttention(c, ToDoubles(qkv), {}).out, 2e-6, "out of " + c.name());
  }
}

// ---- cross-entropy
// -------------------------------------------------------------------------------

TEST_P(KernelsTest, CrossEntropyAndItsGradientMatchFloat64) {
  for (int64_t vocabulary : {1, 2, 7, 8, 33, 65, 511, 512, 513, 5003}) {
    for (int64_t tokens : {1, 7, 64}) {
      Floats logits = Random(tokens * vocabulary, 1, 0.0f, 4.0f);
      const Floats before = logits;
      std::vector<int32_t> targets = RandomIds(tokens, vocabulary, 2);
      if (tokens > 1) targets[1] = -1;
      constexpr float kScale = 0.25f;
      double forward_loss = 10, backward_loss = 0;
      run_->CrossEntropyForward(run_.stream(), Matrix(logits, tokens), vocabulary, targets.data(),
                                &forward_loss);
      run_.Finish();
      EXPECT_TRUE(BitEqual(logits, before));
      run_->CrossEntropyForwardBackward(run_.stream(), Matrix(logits, tokens), vocabulary,
                                        targets.data(), kScale, &backward_loss);
      run_.Finish();
      const Doubles before64 = ToDoubles(before);
      const double expected = ReferenceCrossEntropy(before64, targets);
      EXPECT_NEAR(forward_loss, 10 + expected, 1e-6 * (1 + expected));
      EXPECT_NEAR(backward_loss, expected, 1e-6 * (1 + expected));
      ExpectNear(logits, ReferenceCrossEntropyGradient(before64, targets, kScale), 1e-6, "dlogits");
      if (tokens * vocabulary < 5000) {
        auto loss = [&](const Doubles& v) { return kScale * ReferenceCrossEntropy(v, targets); };
        ExpectGradient(loss, before64, logits, "dlogits");
      }
    }
  }
}

TEST_P(KernelsTest, CrossEntropyCountsEveryOneOfManyTokens) {
  // More rows than one batch of row losses holds; uniform logits lose log V each.
  constexpr int64_t kTokens = 2500, kVocabulary = 3;
  Floats logits(kTokens * kVocabulary, 7.0f);
  std::vector<int32_t> targets = RandomIds(kTokens, kVocabulary, 1);
  for (int64_t n = 0; n < kTokens; n += 5) targets[n] = -1;
  double loss = 0;
  run_->CrossEntropyForwardBackward(run_.stream(), Matrix(logits, kTokens), kVocabulary,
                                    targets.data(), 1.0f, &loss);
  run_.Finish();
  EXPECT_NEAR(loss, 2000 * std::log(3.0), 1e-3);
  for (int64_t n = 0; n < kTokens; ++n) {
    for (int64_t v = 0; v < kVocabulary; ++v) {
      const double expected = targets[n] < 0 ? 0 : targets[n] == v ? -2.0 / 3 : 1.0 / 3;
      ASSERT_NEAR(logits[n * kVocabulary + v], expected, 1e-6);
    }
  }
}

TEST_P(KernelsTest, CrossEntropyOfExtremeLogitsIsExact) {
  constexpr int64_t kVocabulary = 5000;
  // The largest logit first, in the middle of a later chunk, and last.
  for (int64_t peak : {int64_t{0}, int64_t{3000}, kVocabulary - 1}) {
    Floats logits(kVocabulary, -kInfinity);
    logits[peak] = 1e4f;
    logits[1234] = 9999.0f;
    Floats gradient = logits;
    const std::vector<int32_t> targets = {1234};
    double loss = 0;
    run_->CrossEntropyForwardBackward(run_.stream(), Matrix(gradient, 1), kVocabulary,
                                      targets.data(), 1.0f, &loss);
    run_.Finish();
    EXPECT_NEAR(loss, 1 + std::log1p(std::exp(-1.0)), 1e-6);
    const double p = 1 / (1 + std::exp(-1.0));
    for (int64_t v = 0; v < kVocabulary; ++v) {
      ASSERT_NEAR(gradient[v], v == peak ? p : v == 1234 ? -p : 0.0, 1e-6);
    }
  }
}

TEST_P(KernelsTest, CrossEntropyDoesNotHideANaNOrAnInfinity) {
  constexpr int64_t kVocabulary = 5000;
  for (float poison : {kNaN, kInfinity}) {
    for (int64_t place : {0, 17, 512, 4999}) {
      Floats logits = Random(kVocabulary, 1);
      logits[place] = poison;
      const std::vector<int32_t> targets = {5};
      double loss = 0;
      run_->CrossEntropyForward(run_.stream(), Matrix(logits, 1), kVocabulary, targets.data(),
                                &loss);
      run_.Finish();
      EXPECT_FALSE(std::isfinite(loss)) << poison << " at " << place;
    }
  }
  // A target that has no probability at all.
  Floats logits = Random(kVocabulary, 1);
  logits[5] = -kInfinity;
  const std::vector<int32_t> targets = {5};
  double loss = 0;
  run_->CrossEntropyForward(run_.stream(), Matrix(logits, 1), kVocabulary, targets.data(), &loss);
  run_.Finish();
  EXPECT_EQ(loss, std::numeric_limits<double>::infinity());
}

TEST_P(KernelsTest, ATokenWithoutTargetIsIgnoredWhateverItsLogits) {
  Floats logits(9, kNaN);
  const std::vector<int32_t> targets = {-1};
  double loss = 0;
  run_->CrossEntropyForwardBackward(run_.stream(), Matrix(logits, 1), 9, targets.data(), 1.0f,
                                    &loss);
  run_.Finish();
  EXPECT_EQ(loss, 0);
  EXPECT_EQ(logits, Floats(9, 0.0f));
}

// ---- unused columns of logits
// -----------------------------------------------------------------

TEST(LogitColumnsTest, RowsOfLogitsFillWhole128BytesInBothTypes) {
  const std::pair<int64_t, int64_t> kExpected[] = {{1, 64},   {63, 64},   {64, 64},
                                                   {65, 128}, {257, 320}, {50257, 50304}};
  for (const auto& [vocabulary, columns] : kExpected) EXPECT_EQ(LogitColumns(vocabulary), columns);
}

// `values` [rows, cols] as the first columns of [rows, length], `filler` in the others.
Floats Padded(const Floats& values, int64_t rows, int64_t length, float filler) {
  const int64_t cols = values.size() / rows;
  Floats padded(rows * length, filler);
  for (int64_t n = 0; n < rows; ++n) {
    std::copy_n(values.begin() + n * cols, cols, padded.begin() + n * length);
  }
  return padded;
}

TEST_P(KernelsTest, UnusedColumnsOfLogitsAreNeitherReadNorWritten) {
  constexpr int64_t kTokens = 37, kWidth = 24;
  for (int64_t vocabulary : {1, 63, 64, 65, 257}) {
    const Floats x = Random(kTokens * kWidth, 1), weight = Random(vocabulary * kWidth, 2);
    const Floats bias = Random(vocabulary, 3);
    std::vector<int32_t> targets = RandomIds(kTokens, vocabulary, 4);
    targets[2] = -1;
    // The head of a model from its input to its gradients, and a map with a bias, on logits in rows
    // of that length.
    struct Result {
      Floats with_bias, logits, dlogits, losses, dx, dweight;
    };
    const auto head = [&](int64_t length, float filler) {
      const Floats filled(kTokens * length, filler);
      Result r{filled, filled, filled, {}, Floats(x.size(), kNaN), Floats(weight.size(), kNaN)};
      double forward_loss = 0, backward_loss = 0;
      run_->LinearForward(run_.stream(), Matrix(x, kTokens), Matrix(weight, vocabulary),
                          Vector(bias), Matrix(r.with_bias, kTokens));
      run_->LinearForward(run_.stream(), Matrix(x, kTokens), Matrix(weight, vocabulary), Tensor(),
                          Matrix(r.logits, kTokens));
      run_->CrossEntropyForward(run_.stream(), Matrix(r.logits, kTokens), vocabulary,
                                targets.data(), &forward_loss);
      run_.Finish();
      r.dlogits = r.logits;
      run_->CrossEntropyForwardBackward(run_.stream(), Matrix(r.dlogits, kTokens), vocabulary,
                                        targets.data(), 0.5f, &backward_loss);
      run_->LinearBackward(run_.stream(), Matrix(r.dlogits, kTokens), Matrix(x, kTokens),
                           Matrix(weight, vocabulary), Matrix(r.dx, kTokens),
                           Matrix(r.dweight, vocabulary), Tensor(), Write::kOverwrite);
      run_.Finish();
      r.losses = {static_cast<float>(forward_loss), static_cast<float>(backward_loss)};
      return r;
    };
    const Result expected = head(vocabulary, 0.0f);  // no such columns
    for (int64_t length : {LogitColumns(vocabulary), vocabulary + 1}) {
      for (float filler : {kNaN, 3e38f}) {
        SCOPED_TRACE(std::to_string(vocabulary) + " in rows of " + std::to_string(length));
        const Result actual = head(length, filler);
        const auto padded = [&](const Floats& values) {
          return Padded(values, kTokens, length, filler);
        };
        EXPECT_TRUE(BitEqual(actual.with_bias, padded(expected.with_bias)));
        EXPECT_TRUE(BitEqual(actual.logits, padded(expected.logits)));
        EXPECT_TRUE(BitEqual(actual.dlogits, padded(expected.dlogits)));
        EXPECT_TRUE(BitEqual(actual.losses, expected.losses));
        EXPECT_TRUE(BitEqual(actual.dx, expected.dx));
        EXPECT_TRUE(BitEqual(actual.dweight, expected.dweight));
      }
    }
  }
}

// ---- all
// -----------------------------------------------------------------------------------------

// Everything but the matrix products of linear layers, whose blocking BLAS chooses.
std::vector<Floats> RunAllOnThreads(int threads) {
  constexpr int64_t kBatch = 2, kSeqLen = 83, kHeads = 3, kHeadSize = 23, kVocabulary = 307;
  constexpr int64_t kTokens = kBatch * kSeqLen, kWidth = kHeads * kHeadSize;
  constexpr AttentionShape kShape{kBatch, kSeqLen, kHeads};
  Runner run(threads);
  const std::vector<int32_t> tokens = RandomIds(kTokens, kVocabulary, 1);
  const Floats wte = Random(kVocabulary * kWidth, 2), wpe = Random(kSeqLen * kWidth, 3);
  const Floats gain = Random(kWidth, 4), bias = Random(kWidth, 5);
  const Floats qkv = Random(kTokens * 3 * kWidth, 6), weight = Random(kWidth * kWidth, 7);
  Floats embedded(kTokens * kWidth), dwte(wte.size()), dwpe(wpe.size());
  Floats normed(embedded.size()), mean(kTokens), rstd(kTokens), dx(embedded.size());
  Floats dgain(kWidth), dbias(kWidth), activated(embedded.size()), dactivated(embedded.size());
  Floats out(embedded.size()), logsumexp(kBatch * kHeads * kSeqLen), dqkv(qkv.size());
  Floats logits = Random(kTokens * kVocabulary, 8);
  double loss = 0;
  run->EmbeddingForward(run.stream(), tokens.data(), kSeqLen, Matrix(wte, kVocabulary),
                        Matrix(wpe, kSeqLen), Matrix(embedded, kTokens));
  run->LayerNormForward(run.stream(), Matrix(embedded, kTokens), Vector(gain), Vector(bias),
                        Matrix(normed, kTokens), Vector(mean), Vector(rstd));
  Gelu().Forward(run, normed, activated);
  Gelu().Backward(run, embedded, normed, dactivated);
  run->LayerNormBackward(run.stream(), Matrix(dactivated, kTokens), Matrix(embedded, kTokens),
                         Vector(gain), Vector(mean), Vector(rstd), Matrix(dx, kTokens),
                         Write::kOverwrite, Vector(dgain), Vector(dbias), Write::kOverwrite);
  run->AttentionForward(run.stream(), kShape, Matrix(qkv, kTokens), Matrix(out, kTokens),
                        Matrix(logsumexp, kBatch * kHeads));
  run->AttentionBackward(run.stream(), kShape, Matrix(normed, kTokens), Matrix(qkv, kTokens),
                         Matrix(out, kTokens), Matrix(logsumexp, kBatch * kHeads),
                         Matrix(dqkv, kTokens));
  run->EmbeddingBackward(run.stream(), tokens.data(), kSeqLen, Matrix(dx, kTokens),
                         Matrix(dwte, kVocabulary), Matrix(dwpe, kSeqLen));
  run->CrossEntropyForwardBackward(run.stream(), Matrix(logits, kTokens), kVocabulary,
                                   tokens.data(), 0.5f, &loss);
  run.Finish();
  return {
      embedded, normed, mean,      rstd, activated, dactivated, dx,     dgain,
      dbias,    out,    logsumexp, dqkv, dwte,      dwpe,       logits, {static_cast<float>(loss)}};
}

TEST(KernelsThreadsTest, ResultsAreBitIdenticalForEveryNumberOfThreads) {
  const std::vector<Floats> one = RunAllOnThreads(1);
  for (int threads : {2, 3, 5}) {
    const std::vector<Floats> many = RunAllOnThreads(threads);
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(BitEqual(one[i], many[i])) << "output " << i << " on " << threads << " threads";
    }
  }
}

TEST(KernelsThreadsTest, LinearLayersRepeatExactly) {
  constexpr int64_t kTokens = 130, kIn = 65, kOut = 257;
  const Floats x = Random(kTokens * kIn, 1), dy = Random(kTokens * kOut, 2);
  const Floats weight = Random(kOut * kIn, 3), bias = Random(kOut, 4);
  for (int threads : {1, 2, 3}) {
    Runner run(threads);
    auto step = [&] {
      Floats y(kTokens * kOut), dx(kTokens * kIn), dweight(kOut * kIn), dbias(kOut);
      run->LinearForward(run.stream(), Matrix(x, kTokens), Matrix(weight, kOut), Vector(bias),
                         Matrix(y, kTokens));
      run->LinearBackward(run.stream(), Matrix(dy, kTokens), Matrix(x, kTokens),
                          Matrix(weight, kOut), Matrix(dx, kTokens), Matrix(dweight, kOut),
                          Vector(dbias), Write::kOverwrite);
      run.Finish();
      return std::vector<Floats>{y, dx, dweight, dbias};
    };
    const std::vector<Floats> first = step();
    for (int repeat = 0; repeat < 5; ++repeat) {
      const std::vector<Floats> again = step();
      for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(BitEqual(first[i], again[i])) << i;
    }
  }
}

// Keeps what ops say of themselves and runs none.
class InfoStream : public Stream {
 public:
  void Enqueue(OpInfo info, Op) override { last = std::move(info); }
  void Wait(const Event&) override {}
  Event Record() override { return Event(); }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  const std::string& name() const override { return name_; }

  OpInfo last;

 private:
  const std::string name_ = "info";
};

TEST(KernelsInfoTest, OpsStateTheirOperationsAndBytes) {
  std::unique_ptr<Device> device = *CreateDevice(Backend::kCpu, 1);
  std::unique_ptr<Kernels> kernels = CreateKernels(*device);
  InfoStream stream;
  // B 2, T 3, H 5, D 7: C 35, N 6.
  const Tensor x = F32(nullptr, 6, 35), qkv = F32(nullptr, 6, 105), weight = F32(nullptr, 105, 35);
  const Tensor logsumexp = F32(nullptr, 10, 3), bias = F32(nullptr, 105);

  kernels->LinearForward(stream, x, weight, bias, qkv);
  EXPECT_EQ(stream.last.name, "linear_forward");
  EXPECT_EQ(stream.last.kind, OpKind::kCompute);
  EXPECT_EQ(stream.last.flops, 2 * 6 * 35 * 105);
  EXPECT_EQ(stream.last.bytes, 4 * (6 * 35 + 35 * 105 + 6 * 105));

  kernels->LinearBackward(stream, qkv, x, weight, x, weight, Tensor{}, Write::kOverwrite);
  EXPECT_EQ(stream.last.name, "linear_backward");
  EXPECT_EQ(stream.last.flops, 2 * 2 * 6 * 35 * 105);

  // Six visible (query, key) pairs for each of ten heads: two products forward, five backward.
  kernels->AttentionForward(stream, {2, 3, 5}, qkv, x, logsumexp);
  EXPECT_EQ(stream.last.name, "attention_forward");
  EXPECT_EQ(stream.last.flops, 2 * 2 * 10 * 6 * 7);
  kernels->AttentionBackward(stream, {2, 3, 5}, x, qkv, x, logsumexp, qkv);
  EXPECT_EQ(stream.last.name, "attention_backward");
  EXPECT_EQ(stream.last.flops, 5 * 2 * 10 * 6 * 7);
}

}  // namespace
}  // namespace dim0
