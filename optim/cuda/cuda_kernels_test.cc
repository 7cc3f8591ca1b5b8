// Against the CPU's kernels, and where results are exact, against closed forms. On a GPU, or on the
// emulator's.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/dtype.h"
#include "optim/kernels.h"
#include "optim/newton_schulz.h"
#include "runtime/device.h"

namespace dim0::cuda {
namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;
constexpr DType kF16 = DType::kFloat16;

std::vector<float> Random(int64_t size, uint32_t seed, float deviation = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

float Rounded(DType type, float value) {
  if (type == kF16) return __half2float(__float2half(value));
  return type == kBF16 ? static_cast<float>(BFloat16(value)) : value;
}

std::vector<float> Rounded(DType type, std::vector<float> values) {
  for (float& value : values) value = Rounded(type, value);
  return values;
}

// Half a unit in the last place at 1: the most that rounding to the type changes.
double RoundingOf(DType type) {
  if (type == kF16) return 0x1p-11;
  return type == kBF16 ? 0x1p-8 : 0x1p-24;
}

// A device, a stream of it and the optimizers' kernels for it.
struct Side {
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<OptimizerKernels> kernels;
};

// A matrix in an allocation of its own, `shift` elements from its begin.
class Matrix {
 public:
  Matrix(Side& side, DType type, int64_t rows, int64_t cols, const std::vector<float>& values,
         int shift = 0)
      : side_(side), tensor_{nullptr, type, rows, cols} {
    EXPECT_EQ(static_cast<int64_t>(values.size()), rows * cols);
    if (tensor_.size() == 0) return;
    bytes_ = (tensor_.size() + shift) * SizeOf(type);
    const auto memory = side.device->Allocate(bytes_);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *memory;
    tensor_.data = static_cast<char*>(memory_) + shift * SizeOf(type);
    Set(values);
  }
  ~Matrix() {
    if (memory_ == nullptr) return;
    (void)side_.stream->Synchronize();
    side_.device->Free(memory_, bytes_);
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  const Tensor& tensor() const { return tensor_; }

  void Set(const std::vector<float>& values) {
    std::vector<char> bytes(tensor_.bytes());
    for (size_t i = 0; i < values.size(); ++i) {
      if (tensor_.dtype == kF32) {
        std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      } else if (tensor_.dtype == kF16) {
        const __half value = __float2half(values[i]);
        std::memcpy(bytes.data() + 2 * i, &value, 2);
      } else {
        const BFloat16 value(values[i]);
        std::memcpy(bytes.data() + 2 * i, &value, 2);
      }
    }
    side_.device->CopyFromHost(*side_.stream, tensor_.data, bytes.data(), tensor_.bytes());
    EXPECT_TRUE(side_.stream->Synchronize().ok());
  }
  std::vector<float> Get() const {
    std::vector<char> bytes(tensor_.bytes());
    if (tensor_.size() > 0) {
      side_.device->CopyToHost(*side_.stream, bytes.data(), tensor_.data, tensor_.bytes());
    }
    const absl::Status status = side_.stream->Synchronize();
    EXPECT_TRUE(status.ok()) << status;
    std::vector<float> values(tensor_.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (tensor_.dtype == kF32) {
        std::memcpy(&values[i], bytes.data() + 4 * i, 4);
      } else if (tensor_.dtype == kF16) {
        __half value;
        std::memcpy(&value, bytes.data() + 2 * i, 2);
        values[i] = __half2float(value);
      } else {
        BFloat16 value;
        std::memcpy(&value, bytes.data() + 2 * i, 2);
        values[i] = static_cast<float>(value);
      }
    }
    return values;
  }

 private:
  Side& side_;
  Tensor tensor_;
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// |actual - expected| <= relative |expected| + absolute, element by element.
void ExpectNear(const std::vector<float>& actual, const std::vector<float>& expected,
                double relative, double absolute, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], relative * std::abs(expected[i]) + absolute)
        << what << ", element " << i;
  }
}

class CudaOptimizerKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
    Open(Backend::kCpu, cpu_);
    Open(Backend::kCuda, gpu_);
  }

  static void Open(Backend backend, Side& side) {
    auto device = CreateDevice(backend, 1);
    ASSERT_TRUE(device.ok()) << device.status();
    side.device = *std::move(device);
    side.stream = side.device->NewStream("test");
    side.kernels = dim0::CreateOptimizerKernels(*side.device);
  }

  Side cpu_, gpu_;
};

// What one tensor of AdamW is, on one side.
struct AdamWMatrices {
  AdamWMatrices(Side& side, DType value_type, DType gradient_type, bool copied, int64_t size,
                uint32_t seed, int shift = 0)
      : value(side, value_type, size, 1, Random(size, seed), shift),
        gradient(side, gradient_type, size, 1, Random(size, seed + 1), shift),
        first(side, kF32, size, 1, std::vector<float>(size), shift),
        second(side, kF32, size, 1, std::vector<float>(size), shift),
        copy(side, kBF16, copied ? size : 0, 1, std::vector<float>(copied ? size : 0), shift) {}

  AdamWTensor tensor() const {
    return {.value = value.tensor(),
            .gradient = gradient.tensor(),
            .first_moment = first.tensor(),
            .second_moment = second.tensor(),
            .copy = copy.tensor(),
            .weight_decay = 0.1};
  }
  std::vector<std::vector<float>> Get() const {
    return {value.Get(), first.Get(), second.Get(), copy.Get()};
  }

  Matrix value, gradient, first, second, copy;
};

constexpr double kLr = 0.01;

AdamWArguments AdamWStep(int64_t step, const Matrix& scale) {
  return {.lr = kLr,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .step = step,
          .gradient_scale = scale.tensor().f32()};
}

TEST_F(CudaOptimizerKernelsTest, AdamWDoesTheCpusStepsInEveryTypeAndSize) {
  for (const auto& [value_type, gradient_type, copied] : {std::tuple{kF32, kF32, false},
                                                          {kF32, kF32, true},
                                                          {kF32, kBF16, true},
                                                          {kBF16, kF32, false},
                                                          {kBF16, kBF16, false}}) {
    std::vector<std::unique_ptr<AdamWMatrices>> cpu, gpu;
    // More tensors than one launch takes.
    for (int i = 0; i < 140; ++i) {
      const int64_t size = std::vector<int64_t>{3, 0, 1, 4, 1000, 4097, 9001}[i % 7];
      for (auto& [side, matrices] : {std::pair{&cpu_, &cpu}, {&gpu_, &gpu}}) {
        matrices->push_back(std::make_unique<AdamWMatrices>(*side, value_type, gradient_type,
                                                            copied, size, 10 * i, i % 3));
      }
    }
    for (int64_t step = 1; step <= 3; ++step) {
      for (auto& [side, matrices] : {std::pair{&cpu_, &cpu}, {&gpu_, &gpu}}) {
        const Matrix scale(*side, kF32, 1, 1, {0.5f});
        std::vector<AdamWTensor> tensors;
        for (const auto& m : *matrices) tensors.push_back(m->tensor());
        side->kernels->AdamW(*side->stream, tensors, AdamWStep(step, scale));
        ASSERT_TRUE(side->stream->Synchronize().ok());
      }
    }
    // Values of about 1 have moved by 3 lr.
    const double tolerance = 3 * 2 * RoundingOf(value_type) + 1e-6;
    for (size_t i = 0; i < cpu.size(); ++i) {
      const std::string what = "tensor " + std::to_string(i);
      ExpectNear(gpu[i]->value.Get(), cpu[i]->value.Get(), tolerance, 1e-6, what);
      ExpectNear(gpu[i]->first.Get(), cpu[i]->first.Get(), 1e-5, 1e-6, what);
      ExpectNear(gpu[i]->second.Get(), cpu[i]->second.Get(), 1e-5, 1e-6, what);
      if (copied) {
        EXPECT_EQ(gpu[i]->copy.Get(), Rounded(kBF16, gpu[i]->value.Get())) << what;
      }
    }
  }
}

TEST_F(CudaOptimizerKernelsTest, AdamWsResultDependsNeitherOnThePlaceNorOnTheRun) {
  constexpr int64_t kSize = 9001;
  const auto updated = [&](int shift, int tensors_before) {
    const Matrix scale(gpu_, kF32, 1, 1, {0.5f});
    std::vector<std::unique_ptr<AdamWMatrices>> matrices;
    for (int i = 0; i <= tensors_before; ++i) {
      const bool last = i == tensors_before;
      matrices.push_back(std::make_unique<AdamWMatrices>(
          gpu_, kF32, kBF16, true, last ? kSize : 100, last ? 1 : 50 + i, last ? shift : 0));
    }
    for (int64_t step = 1; step <= 2; ++step) {
      std::vector<AdamWTensor> tensors;
      for (const auto& m : matrices) tensors.push_back(m->tensor());
      gpu_.kernels->AdamW(*gpu_.stream, tensors, AdamWStep(step, scale));
    }
    return matrices.back()->Get();
  };
  const auto expected = updated(0, 0);
  EXPECT_EQ(updated(0, 0), expected);
  EXPECT_EQ(updated(1, 0), expected);
  EXPECT_EQ(updated(2, 5), expected);
}

// What one tensor of sign momentum is, on one side.
struct SignMomentumMatrices {
  SignMomentumMatrices(Side& side, DType value_type, DType gradient_type, bool copied, int64_t size,
                       uint32_t seed, int shift)
      : value(side, value_type, size, 1, Random(size, seed), shift),
        gradient(side, gradient_type, size, 1, Random(size, seed + 1), shift),
        momentum(side, kF32, size, 1, Random(size, seed + 2), shift),
        copy(side, kBF16, copied ? size : 0, 1, std::vector<float>(copied ? size : 0), shift) {}

  SignMomentumTensor tensor() const {
    return {.value = value.tensor(),
            .gradient = gradient.tensor(),
            .momentum = momentum.tensor(),
            .copy = copy.tensor()};
  }
  std::vector<std::vector<float>> Get() const { return {value.Get(), momentum.Get(), copy.Get()}; }

  Matrix value, gradient, momentum, copy;
};

SignMomentumArguments SignMomentumStep(const Matrix& scale) {
  return {.lr = kLr, .momentum = 0.9, .weight_decay = 0.1, .gradient_scale = scale.tensor().f32()};
}

// No operation here but sums and products, which round alike everywhere.
TEST_F(CudaOptimizerKernelsTest, SignMomentumDoesTheCpusStepsToTheBitInEveryTypeAndSize) {
  for (const auto& [value_type, gradient_type, copied] : {std::tuple{kF32, kF32, false},
                                                          {kF32, kF32, true},
                                                          {kF32, kBF16, true},
                                                          {kBF16, kF32, false},
                                                          {kBF16, kBF16, false}}) {
    std::vector<std::vector<std::vector<float>>> results[2];
    for (Side* side : {&cpu_, &gpu_}) {
      std::vector<std::unique_ptr<SignMomentumMatrices>> matrices;
      // More tensors than one launch takes.
      for (int i = 0; i < 140; ++i) {
        const int64_t size = std::vector<int64_t>{3, 0, 1, 4, 1000, 4097, 9001}[i % 7];
        matrices.push_back(std::make_unique<SignMomentumMatrices>(*side, value_type, gradient_type,
                                                                  copied, size, 10 * i, i % 3));
      }
      const Matrix scale(*side, kF32, 1, 1, {0.5f});
      for (int step = 1; step <= 3; ++step) {
        std::vector<SignMomentumTensor> tensors;
        for (const auto& m : matrices) tensors.push_back(m->tensor());
        side->kernels->SignMomentum(*side->stream, tensors, SignMomentumStep(scale));
      }
      for (const auto& m : matrices) results[side == &gpu_].push_back(m->Get());
    }
    EXPECT_EQ(results[1], results[0]);
  }
}

// What one matrix of RMNP is, on one side.
struct RmnpMatrices {
  RmnpMatrices(Side& side, DType value_type, DType gradient_type, bool copied, int64_t rows,
               int64_t cols, uint32_t seed, int shift = 0)
      : RmnpMatrices(side, value_type, gradient_type, copied, rows, cols, Random(rows * cols, seed),
                     Random(rows * cols, seed + 1), Random(rows * cols, seed + 2), shift) {}
  RmnpMatrices(Side& side, DType value_type, DType gradient_type, bool copied, int64_t rows,
               int64_t cols, const std::vector<float>& values, const std::vector<float>& gradients,
               const std::vector<float>& momenta, int shift)
      : value(side, value_type, rows, cols, values, shift),
        gradient(side, gradient_type, rows, cols, gradients, shift),
        momentum(side, kF32, rows, cols, momenta, shift),
        copy(side, kBF16, copied ? rows : 0, cols, std::vector<float>(copied ? values.size() : 0),
             shift),
        row_squares(side, kF32, rows, 1, std::vector<float>(rows)) {}

  RmnpTensor tensor() const {
    return {.value = value.tensor(),
            .gradient = gradient.tensor(),
            .momentum = momentum.tensor(),
            .copy = copy.tensor(),
            .scale = 1.5,
            .row_squares = row_squares.tensor().f32()};
  }
  std::vector<std::vector<float>> Get() const { return {value.Get(), momentum.Get(), copy.Get()}; }

  Matrix value, gradient, momentum, copy, row_squares;
};

RmnpArguments RmnpStep(const Matrix& scale, bool nesterov = true, double power = 0) {
  return {.lr = 0.1,
          .momentum = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .nesterov = nesterov,
          .power = power,
          .gradient_scale = scale.tensor().f32()};
}

// Around what a warp, and what a block, takes.
constexpr int64_t kRowLengths[] = {1, 3, 128, 1000, 2048, 2049, 5120, 8192, 8193, 50257};

TEST_F(CudaOptimizerKernelsTest, RmnpDoesTheCpusStepInEveryTypeAndRowLength) {
  for (const auto& [value_type, gradient_type, copied] : {std::tuple{kF32, kF32, false},
                                                          {kF32, kBF16, true},
                                                          {kBF16, kF32, false},
                                                          {kBF16, kBF16, false}}) {
    for (const bool nesterov : {true, false}) {
      const double power = nesterov ? 0 : 0.5;
      std::vector<std::unique_ptr<RmnpMatrices>> cpu, gpu;
      for (auto& [side, matrices] : {std::pair{&cpu_, &cpu}, {&gpu_, &gpu}}) {
        for (const int64_t cols : kRowLengths) {
          const int64_t rows = cols > 10000 ? 2 : 5;
          matrices->push_back(std::make_unique<RmnpMatrices>(*side, value_type, gradient_type,
                                                             copied, rows, cols, cols, cols % 2));
        }
        matrices->push_back(
            std::make_unique<RmnpMatrices>(*side, value_type, gradient_type, copied, 0, 100, 1));
        const Matrix scale(*side, kF32, 1, 1, {0.5f});
        std::vector<RmnpTensor> tensors;
        for (const auto& m : *matrices) tensors.push_back(m->tensor());
        side->kernels->Rmnp(*side->stream, tensors, RmnpStep(scale, nesterov, power));
        ASSERT_TRUE(side->stream->Synchronize().ok());
      }
      const double tolerance = 2 * RoundingOf(value_type) + 1e-6;
      for (size_t i = 0; i < cpu.size(); ++i) {
        const std::string what = "cols " + std::to_string(cpu[i]->value.tensor().cols);
        ExpectNear(gpu[i]->value.Get(), cpu[i]->value.Get(), tolerance, 1e-6, what);
        ExpectNear(gpu[i]->momentum.Get(), cpu[i]->momentum.Get(), 1e-6, 1e-6, what);
        if (copied) {
          EXPECT_EQ(gpu[i]->copy.Get(), Rounded(kBF16, gpu[i]->value.Get())) << what;
        }
      }
    }
  }
}

TEST_F(CudaOptimizerKernelsTest, RmnpsRowDependsOnThatRowOnlyToTheBit) {
  for (const int64_t cols : kRowLengths) {
    const int64_t rows = cols > 10000 ? 3 : 7;
    const std::vector<float> values = Random(rows * cols, 1), gradients = Random(rows * cols, 2),
                             momenta = Random(rows * cols, 3);
    const Matrix scale(gpu_, kF32, 1, 1, {0.5f});
    RmnpMatrices whole(gpu_, kF32, kBF16, true, rows, cols, values, gradients, momenta, 0);
    gpu_.kernels->Rmnp(*gpu_.stream, {whole.tensor()}, RmnpStep(scale));
    const auto expected = whole.Get();

    // The rows as tensors of their own, one or two rows each, at other alignments, behind another
    // matrix: as other numbers of ranks would cut them.
    std::vector<std::unique_ptr<RmnpMatrices>> parts;
    parts.push_back(std::make_unique<RmnpMatrices>(gpu_, kF32, kBF16, true, 3, 70, 9));
    for (int64_t row = 0; row < rows;) {
      const int64_t end = std::min(rows, row + 1 + row % 2);
      const auto of_rows = [&](const std::vector<float>& all) {
        return std::vector<float>(all.begin() + row * cols, all.begin() + end * cols);
      };
      parts.push_back(std::make_unique<RmnpMatrices>(
          gpu_, kF32, kBF16, true, end - row, cols, of_rows(values), of_rows(gradients),
          of_rows(momenta), static_cast<int>(1 + row % 3)));
      row = end;
    }
    std::vector<RmnpTensor> tensors;
    for (const auto& part : parts) tensors.push_back(part->tensor());
    gpu_.kernels->Rmnp(*gpu_.stream, tensors, RmnpStep(scale));
    std::vector<std::vector<float>> joined(expected.size());
    for (size_t i = 1; i < parts.size(); ++i) {
      const auto of_part = parts[i]->Get();
      for (size_t k = 0; k < joined.size(); ++k) {
        joined[k].insert(joined[k].end(), of_part[k].begin(), of_part[k].end());
      }
    }
    EXPECT_EQ(joined, expected) << cols << " columns";
  }
}

TEST_F(CudaOptimizerKernelsTest, RmnpTakesMoreMatricesThanOneLaunchAndTwoRunsAgreeToTheBit) {
  const auto updated = [&] {
    const Matrix scale(gpu_, kF32, 1, 1, {0.5f});
    std::vector<std::unique_ptr<RmnpMatrices>> matrices;
    std::vector<RmnpTensor> tensors;
    for (int i = 0; i < 130; ++i) {
      matrices.push_back(
          std::make_unique<RmnpMatrices>(gpu_, kF32, kF32, false, i % 6, 1 + 7 * i, i));
      tensors.push_back(matrices.back()->tensor());
    }
    gpu_.kernels->Rmnp(*gpu_.stream, tensors, RmnpStep(scale));
    std::vector<std::vector<std::vector<float>>> results;
    for (const auto& m : matrices) results.push_back(m->Get());
    return results;
  };
  const auto first = updated();
  EXPECT_EQ(updated(), first);
  for (int i = 0; i < 130; ++i) {
    const Matrix scale(cpu_, kF32, 1, 1, {0.5f});
    RmnpMatrices expected(cpu_, kF32, kF32, false, i % 6, 1 + 7 * i, i);
    cpu_.kernels->Rmnp(*cpu_.stream, {expected.tensor()}, RmnpStep(scale));
    ExpectNear(first[i][0], expected.value.Get(), 1e-6, 1e-6, "matrix " + std::to_string(i));
  }
}

TEST_F(CudaOptimizerKernelsTest, RmnpInTwoHalvesOverCutRowsIsRmnpOfTheWholeRows) {
  for (const DType gradient_type : {kF32, kBF16}) {
    for (const int64_t cols : {7, 3000, 9000}) {
      constexpr int64_t kRows = 3;
      const int64_t cut = cols / 3;
      const std::vector<float> values = Random(kRows * cols, 1),
                               gradients = Random(kRows * cols, 2),
                               momenta = Random(kRows * cols, 3);
      const Matrix cpu_scale(cpu_, kF32, 1, 1, {0.5f}), gpu_scale(gpu_, kF32, 1, 1, {0.5f});
      RmnpMatrices whole(cpu_, kF32, gradient_type, false, kRows, cols, values, gradients, momenta,
                         0);
      cpu_.kernels->Rmnp(*cpu_.stream, {whole.tensor()}, RmnpStep(cpu_scale));

      std::vector<std::unique_ptr<RmnpMatrices>> parts;
      std::vector<RmnpTensor> tensors;
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, cut}, {cut, cols}}) {
        const auto of_columns = [&, begin = begin, end = end](const std::vector<float>& all) {
          std::vector<float> part;
          for (int64_t row = 0; row < kRows; ++row) {
            part.insert(part.end(), all.begin() + row * cols + begin,
                        all.begin() + row * cols + end);
          }
          return part;
        };
        parts.push_back(std::make_unique<RmnpMatrices>(
            gpu_, kF32, gradient_type, true, kRows, end - begin, of_columns(values),
            of_columns(gradients), of_columns(momenta), 1));
        tensors.push_back(parts.back()->tensor());
      }
      gpu_.kernels->RmnpRowSquares(*gpu_.stream, tensors, RmnpStep(gpu_scale));
      std::vector<float> sums = parts[0]->row_squares.Get();
      const std::vector<float> more = parts[1]->row_squares.Get();
      for (int64_t row = 0; row < kRows; ++row) sums[row] += more[row];
      for (const auto& part : parts) part->row_squares.Set(sums);
      gpu_.kernels->RmnpApply(*gpu_.stream, tensors, RmnpStep(gpu_scale));

      std::vector<float> joined, momentum;
      const auto left = parts[0]->Get(), right = parts[1]->Get();
      for (int64_t row = 0; row < kRows; ++row) {
        for (const auto& [k, target] : {std::pair{0, &joined}, {1, &momentum}}) {
          target->insert(target->end(), left[k].begin() + row * cut,
                         left[k].begin() + (row + 1) * cut);
          target->insert(target->end(), right[k].begin() + row * (cols - cut),
                         right[k].begin() + (row + 1) * (cols - cut));
        }
      }
      ExpectNear(joined, whole.value.Get(), 1e-6, 1e-6, std::to_string(cols));
      ExpectNear(momentum, whole.momentum.Get(), 1e-6, 1e-6, std::to_string(cols));
      for (const auto& part : parts) {
        EXPECT_EQ(part->copy.Get(), Rounded(kBF16, part->value.Get()));
      }
    }
  }
}

TEST_F(CudaOptimizerKernelsTest, RmnpLeavesZeroRowsAndDecaysThemWhateverTheLearningRate) {
  const Matrix scale(gpu_, kF32, 1, 1, {1});
  RmnpArguments arguments = RmnpStep(scale);
  arguments.lr = 1e37;
  arguments.eps = 0;
  arguments.weight_decay = 0;
  for (const int64_t cols : {5, 3000}) {
    const std::vector<float> ones(2 * cols, 1.0f), zeros(2 * cols);
    RmnpMatrices matrix(gpu_, kF32, kF32, false, 2, cols, ones, zeros, zeros, 0);
    gpu_.kernels->Rmnp(*gpu_.stream, {matrix.tensor()}, arguments);
    EXPECT_EQ(matrix.value.Get(), ones);
  }
}

TEST_F(CudaOptimizerKernelsTest, AScaleThatIsNotFiniteChangesNothing) {
  for (const float broken : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const Matrix scale(gpu_, kF32, 1, 1, {broken});
    const float* const s = scale.tensor().f32();
    AdamWMatrices adamw(gpu_, kF32, kF32, true, 1000, 1);
    RmnpMatrices rmnp(gpu_, kF32, kF32, true, 3, 3000, 1);
    Matrix out(gpu_, kBF16, 3, 3000, std::vector<float>(9000, 2.0f));
    rmnp.row_squares.Set({1, 2, 3});
    SignMomentumMatrices sign(gpu_, kF32, kF32, true, 1000, 1, 0);
    const auto adamw_before = adamw.Get(), rmnp_before = rmnp.Get(), sign_before = sign.Get();
    gpu_.kernels->AdamW(*gpu_.stream, {adamw.tensor()}, AdamWStep(1, scale));
    gpu_.kernels->SignMomentum(*gpu_.stream, {sign.tensor()}, SignMomentumStep(scale));
    gpu_.kernels->Rmnp(*gpu_.stream, {rmnp.tensor()}, RmnpStep(scale));
    gpu_.kernels->RmnpRowSquares(*gpu_.stream, {rmnp.tensor()}, RmnpStep(scale));
    gpu_.kernels->RmnpApply(*gpu_.stream, {rmnp.tensor()}, RmnpStep(scale));
    gpu_.kernels->Momentum(*gpu_.stream, rmnp.gradient.tensor(), rmnp.momentum.tensor(), 0.9f, true,
                           s, out.tensor());
    gpu_.kernels->ApplyUpdate(*gpu_.stream, rmnp.value.tensor(), rmnp.copy.tensor(), out.tensor(),
                              0.1f, 0.1f, s);
    EXPECT_EQ(adamw.Get(), adamw_before);
    EXPECT_EQ(sign.Get(), sign_before);
    EXPECT_EQ(rmnp.Get(), rmnp_before);
    EXPECT_EQ(rmnp.row_squares.Get(), std::vector<float>({1, 2, 3}));
    EXPECT_EQ(out.Get(), std::vector<float>(9000, 2.0f));
  }
}

TEST_F(CudaOptimizerKernelsTest, MomentumAndApplyUpdateDoTheCpusStepsInEveryTypeAndSize) {
  for (const int64_t size : {0, 1, 3, 4, 1023, 5000}) {
    for (const int shift : {0, 1}) {
      for (const DType type : {kF32, kBF16}) {
        for (const DType other : {kF32, kBF16}) {
          std::vector<std::vector<float>> results[2];
          for (Side* side : {&cpu_, &gpu_}) {
            const Matrix scale(*side, kF32, 1, 1, {0.5f});
            const float* const s = scale.tensor().f32();
            const Matrix gradient(*side, type, size, 1, Random(size, 1), shift),
                momentum(*side, kF32, size, 1, Random(size, 2), shift),
                out(*side, other, size, 1, std::vector<float>(size), shift),
                value(*side, type, size, 1, Random(size, 3), shift),
                copy(*side, kBF16, type == kF32 ? size : 0, 1,
                     std::vector<float>(type == kF32 ? size : 0), shift);
            side->kernels->Momentum(*side->stream, gradient.tensor(), momentum.tensor(), 0.9f,
                                    shift == 0, s, out.tensor());
            side->kernels->ApplyUpdate(*side->stream, value.tensor(), copy.tensor(), out.tensor(),
                                       0.25f, 0.125f, s);
            results[side == &gpu_] = {momentum.Get(), out.Get(), value.Get()};
            if (type == kF32) {
              EXPECT_EQ(copy.Get(), Rounded(kBF16, value.Get()));
            }
          }
          const double tolerance = 2 * RoundingOf(other);
          ExpectNear(results[1][0], results[0][0], 1e-6, 1e-6, "momentum");
          ExpectNear(results[1][1], results[0][1], tolerance, 1e-6, "out");
          // An update that was rounded the other way moves the value by a quarter of that.
          ExpectNear(results[1][2], results[0][2], 2 * RoundingOf(type), 4 * tolerance, "value");
        }
      }
    }
  }
}

TEST_F(CudaOptimizerKernelsTest, CopyAndNormalizeTakeEveryType) {
  const std::vector<float> values = Random(63 * 65, 1);
  for (const DType from : {kF32, kBF16, kF16}) {
    for (const DType to : {kF32, kBF16, kF16}) {
      const std::vector<float> rounded = Rounded(from, values);
      const Matrix source(gpu_, from, 63, 65, values, 1),
          target(gpu_, to, 63, 65, std::vector<float>(values.size()));
      gpu_.kernels->Copy(*gpu_.stream, source.tensor(), target.tensor());
      EXPECT_EQ(target.Get(), Rounded(to, rounded));

      double squares = 0;
      for (const double value : rounded) squares += value * value;
      std::vector<float> expected = rounded;
      for (float& value : expected) value = static_cast<float>(value * 0.5 / std::sqrt(squares));
      gpu_.kernels->Normalize(*gpu_.stream, 1, source.tensor(), 0.5, target.tensor());
      // Below 2^-14, numbers of float16 are 2^-24 apart.
      const double absolute = 0x1p-24;
      ExpectNear(target.Get(), expected, 2 * RoundingOf(to), absolute, "normalised");
      gpu_.kernels->Normalize(*gpu_.stream, 1, source.tensor(), 0.5, source.tensor());
      ExpectNear(source.Get(), expected, 2 * RoundingOf(from), absolute, "normalised in place");
    }
  }
}

TEST_F(CudaOptimizerKernelsTest, AddToDiagonalLeavesTheRest) {
  for (const DType type : {kF32, kBF16, kF16}) {
    for (const int64_t n : {1, 5, 300}) {
      for (const int64_t batch : {1, 3}) {
        std::vector<float> values = Rounded(type, Random(batch * n * n, 1));
        const Matrix c(gpu_, type, batch * n, n, values);
        gpu_.kernels->AddToDiagonal(*gpu_.stream, batch, c.tensor(), 3.25f);
        for (int64_t i = 0; i < batch * n; ++i) {
          float& value = values[i * n + i % n];
          value = Rounded(type, value + 3.25f);
        }
        EXPECT_EQ(c.Get(), values);
      }
    }
  }
}

// alpha op(a) op(b) + beta added in float64, for each matrix of a batch.
std::vector<float> Product(int64_t batch, float alpha, const std::vector<float>& a,
                           bool transpose_a, const std::vector<float>& b, bool transpose_b,
                           float beta, std::vector<float> added, int64_t m, int64_t n, int64_t k) {
  for (int64_t matrix = 0; matrix < batch; ++matrix) {
    const float* const first = a.data() + matrix * m * k;
    const float* const second = b.data() + matrix * k * n;
    float* const c = added.data() + matrix * m * n;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t l = 0; l < k; ++l) {
          sum += double{transpose_a ? first[l * m + i] : first[i * k + l]} *
                 (transpose_b ? second[j * k + l] : second[l * n + j]);
        }
        c[i * n + j] = static_cast<float>(alpha * sum + beta * c[i * n + j]);
      }
    }
  }
  return added;
}

TEST_F(CudaOptimizerKernelsTest, ProductsAreThoseOfFloat64InEveryTypeAndOrientation) {
  constexpr int64_t kM = 24, kN = 40, kK = 56;
  for (const DType type : {kF32, kBF16, kF16}) {
    // Sums of kK products of about 1.
    const double absolute = (2 * RoundingOf(type) + kK * 0x1p-24) * kK;
    for (const int64_t batch : {1, 3}) {
      const std::vector<float> a = Rounded(type, Random(batch * kM * kK, 1)),
                               b = Rounded(type, Random(batch * kK * kN, 2)),
                               c = Rounded(type, Random(batch * kM * kN, 3));
      for (const bool transpose_a : {false, true}) {
        const int64_t a_rows = batch * (transpose_a ? kK : kM), a_cols = transpose_a ? kM : kK;
        const Matrix on_a(gpu_, type, a_rows, a_cols, a);
        for (const bool transpose_b : {false, true}) {
          const Matrix on_b(gpu_, type, batch * (transpose_b ? kN : kK), transpose_b ? kK : kN, b),
              on_c(gpu_, type, batch * kM, kN, c),
              other(gpu_, type, batch * kM, kN, std::vector<float>(c.size(), 9.0f));
          const std::vector<float> expected =
              Product(batch, 0.5f, a, transpose_a, b, transpose_b, 2.0f, c, kM, kN, kK);
          for (const Matrix* target : {&other, &on_c}) {
            gpu_.kernels->MatMul(*gpu_.stream, batch, 0.5f, on_a.tensor(), transpose_a,
                                 on_b.tensor(), transpose_b, 2.0f, on_c.tensor(), target->tensor());
            ExpectNear(target->Get(), expected, 0, absolute, "matmul");
          }
        }
        // Of a as it lies there: [a_rows, a_cols], or its transpose.
        const int64_t rows = a_rows / batch;
        for (const bool transposed : {false, true}) {
          const int64_t s = transposed ? a_cols : rows, k = transposed ? rows : a_cols;
          const std::vector<float> squares = Rounded(type, Random(batch * s * s, 4));
          const Matrix on_c(gpu_, type, batch * s, s, squares);
          gpu_.kernels->SymmetricProduct(*gpu_.stream, batch, 0.5f, on_a.tensor(), transposed, 2.0f,
                                         on_c.tensor(), on_c.tensor());
          ExpectNear(on_c.Get(),
                     Product(batch, 0.5f, a, transposed, a, !transposed, 2.0f, squares, s, s, k), 0,
                     absolute, "symmetric product");
        }
      }
      const std::vector<float> square = Rounded(type, Random(batch * kM * kM, 5)),
                               other = Rounded(type, Random(batch * kM * kM, 6));
      const Matrix on_a(gpu_, type, batch * kM, kM, square),
          on_b(gpu_, type, batch * kM, kM, other),
          on_c(gpu_, type, batch * kM, kM, std::vector<float>(square.size(), 9.0f));
      gpu_.kernels->SymmetricMatMul(*gpu_.stream, batch, 0.5f, on_a.tensor(), on_b.tensor(), 2.0f,
                                    on_a.tensor(), on_c.tensor());
      ExpectNear(on_c.Get(),
                 Product(batch, 0.5f, square, false, other, false, 2.0f, square, kM, kM, kM), 0,
                 absolute, "symmetric matmul");
    }
  }
}

double Norm(const std::vector<float>& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

TEST_F(CudaOptimizerKernelsTest, NewtonSchulzOfABatchIsTheCpusOfEachMatrixUpToTheTypesRounding) {
  constexpr int64_t kBatch = 3;
  for (const NewtonSchulzAlgorithm algorithm :
       {NewtonSchulzAlgorithm::kStandard, NewtonSchulzAlgorithm::kSymmetric,
        NewtonSchulzAlgorithm::kGram, NewtonSchulzAlgorithm::kGramAccurate}) {
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>{24, 96}, {96, 24}, {40, 48}}) {
      const NewtonSchulz newton_schulz({.algorithm = algorithm}, m, n);
      const std::vector<float> values = Random(kBatch * m * n, 1);
      std::vector<float> results[2];
      for (Side* side : {&cpu_, &gpu_}) {
        const int64_t elements = kBatch * newton_schulz.workspace();
        const Matrix matrices(*side, kF32, kBatch * m, n, values),
            workspace(*side, side->kernels->matrix_dtype(), elements, 1,
                      std::vector<float>(elements));
        newton_schulz.Enqueue(*side->kernels, *side->stream, matrices.tensor(), matrices.tensor(),
                              workspace.tensor().data);
        results[side == &gpu_] = matrices.Get();
      }
      std::vector<float> difference;
      for (size_t i = 0; i < results[0].size(); ++i) {
        difference.push_back(results[1][i] - results[0][i]);
      }
      // Rounding to 11 bits after each product, amplified where singular values are small, more so
      // by the Gram algorithm. Rounding to 8 bits would fail.
      EXPECT_LT(Norm(difference), 0.015 * Norm(results[0])) << m << " x " << n;
      EXPECT_GT(Norm(results[0]), 0.7 * std::sqrt(double{kBatch} * std::min(m, n)));
    }
  }
}

}  // namespace
}  // namespace dim0::cuda
