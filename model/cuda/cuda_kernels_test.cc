// Every CUDA kernel against the CPU's on the same inputs, in each combination of types, at sizes
// around the edges of vectors, tiles and chunks, aligned and not. Inputs are rounded to their type
// first; results may differ by their type's rounding and by float32's arithmetic.
//
// Outputs and workspace are filled with NaNs before each run, every run is repeated and must give
// the same bits, and no byte beyond a tensor's end may change.
#include "model/cuda/cuda_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "collectives/dtype.h"
#include "gtest/gtest.h"
#include "model/kernels.h"
#include "runtime/device.h"

namespace dim0 {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr DType kF32 = DType::kFloat32, kBF16 = DType::kBFloat16;

// The relative error of rounding to the type.
double RoundingError(DType type) { return type == kBF16 ? 0x1p-8 : 0x1p-24; }

float RoundTo(DType type, float value) {
  return type == kBF16 ? static_cast<float>(BFloat16(value)) : value;
}

// A matrix on the host; its values are all of its type.
struct Matrix {
  DType type;
  int64_t rows, cols;
  Floats values;
};

Matrix Random(DType type, int64_t rows, int64_t cols, uint32_t seed, float mean = 0.0f,
              float deviation = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(mean, deviation);
  Matrix matrix{type, rows, cols, Floats(rows * cols)};
  for (float& value : matrix.values) value = RoundTo(type, normal(generator));
  return matrix;
}

Matrix Rounded(DType type, const Matrix& matrix) {
  Matrix rounded = matrix;
  rounded.type = type;
  for (float& value : rounded.values) value = RoundTo(type, value);
  return rounded;
}

std::vector<int32_t> RandomIds(int64_t size, int32_t limit, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int32_t> uniform(0, limit - 1);
  std::vector<int32_t> ids(size);
  for (int32_t& id : ids) id = uniform(generator);
  return ids;
}

double Greatest(const Floats& values) {
  double greatest = 0;
  for (float value : values) greatest = std::max(greatest, std::abs(static_cast<double>(value)));
  return greatest;
}

// What float32 sums of a few hundred terms may be wrong by, next to the largest result.
constexpr double kArithmetic = 4e-6;

// Each actual value within its type's rounding of the expected one, and `slack` on top: by default
// what the arithmetic costs.
void ExpectNear(const Floats& actual, const Floats& expected, DType type, const std::string& what,
                double slack = 0) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  slack += kArithmetic * std::max(1.0, Greatest(expected));
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::abs(static_cast<double>(actual[i]) - expected[i]);
    ASSERT_LE(difference, RoundingError(type) * std::abs(expected[i]) + slack)
        << what << " [" << i << "]: " << actual[i] << " instead of " << expected[i];
  }
}

// ---- the device's side -------------------------------------------------------------------------

// Tensors in device memory for one call of a kernel.
class Arena {
 public:
  Arena(Device& device, Stream& stream) : device_(device), stream_(stream) {}
  ~Arena() {
    for (Block& block : blocks_) device_.Free(block.data, block.bytes);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Tensors made from now on start `elements` elements behind an aligned address.
  void set_offset(int elements) { offset_ = elements; }

  Tensor Upload(const Matrix& matrix) {
    const Tensor tensor = New(matrix.type, matrix.rows, matrix.cols);
    Block& block = blocks_.back();
    unsigned char* place = block.image.data() + block.begin;
    for (float value : matrix.values) {
      if (matrix.type == kBF16) {
        const BFloat16 rounded(value);
        std::memcpy(place, &rounded, sizeof(rounded));
      } else {
        std::memcpy(place, &value, sizeof(value));
      }
      place += SizeOf(matrix.type);
    }
    Send(block);
    return tensor;
  }

  // Holds NaNs.
  Tensor Output(DType type, int64_t rows, int64_t cols) {
    const Tensor tensor = New(type, rows, cols);
    Send(blocks_.back());
    return tensor;
  }

  template <typename T>
  T* UploadValues(const std::vector<T>& values) {
    void* const data = Raw(values.size() * sizeof(T));
    Block& block = blocks_.back();
    std::memcpy(block.image.data(), values.data(), values.size() * sizeof(T));
    Send(block);
    return static_cast<T*>(data);
  }

  // Memory that holds NaNs.
  void* Raw(int64_t bytes) {
    Allocate(bytes, /*begin=*/0);
    Send(blocks_.back());
    return blocks_.back().data;
  }

  Floats Download(const Tensor& tensor) {
    const std::vector<unsigned char> bytes = Receive(tensor.data, tensor.bytes());
    Floats values(tensor.size());
    for (int64_t i = 0; i < tensor.size(); ++i) {
      if (tensor.dtype == kBF16) {
        BFloat16 value;
        std::memcpy(&value, &bytes[2 * i], sizeof(value));
        values[i] = static_cast<float>(value);
      } else {
        std::memcpy(&values[i], &bytes[4 * i], sizeof(float));
      }
    }
    return values;
  }

  double DownloadDouble(const void* data) {
    double value;
    std::memcpy(&value, Receive(data, sizeof(value)).data(), sizeof(value));
    return value;
  }

  // Bytes before and behind the tensors are as they were.
  void ExpectGuardsIntact() {
    for (const Block& block : blocks_) {
      const std::vector<unsigned char> now = Receive(block.data, block.bytes);
      for (int64_t i = 0; i < block.bytes; ++i) {
        if (i >= block.begin && i < block.end) continue;
        ASSERT_EQ(now[i], 0xff) << "byte " << i << " of a tensor at [" << block.begin << ", "
                                << block.end << ") was written";
      }
    }
  }

 private:
  struct Block {
    void* data;
    int64_t bytes;
    int64_t begin, end;  // of the tensor
    std::vector<unsigned char> image;
  };

  Tensor New(DType type, int64_t rows, int64_t cols) {
    const int64_t begin = offset_ * SizeOf(type);
    Allocate(rows * cols * SizeOf(type), begin);
    return {static_cast<char*>(blocks_.back().data) + begin, type, rows, cols};
  }

  void Allocate(int64_t bytes, int64_t begin) {
    constexpr int64_t kGuard = 64;
    const int64_t total = begin + bytes + kGuard;
    absl::StatusOr<void*> data = device_.Allocate(total);
    Require(data.status());
    blocks_.push_back({*data, total, begin, begin + bytes,
                       std::vector<unsigned char>(total, 0xff)});  // NaN in every type
  }

  void Send(const Block& block) {
    device_.CopyFromHost(stream_, block.data, block.image.data(), block.bytes);
    Finish();
  }

  std::vector<unsigned char> Receive(const void* data, int64_t bytes) {
    std::vector<unsigned char> image(bytes);
    if (bytes > 0) device_.CopyToHost(stream_, image.data(), data, bytes);
    Finish();
    return image;
  }

  void Finish() { Require(stream_.Synchronize()); }

  // GoogleTest takes it as the test's failure. What follows would have no memory to work on.
  static void Require(const absl::Status& status) {
    if (!status.ok()) throw std::runtime_error(status.ToString());
  }

  Device& device_;
  Stream& stream_;
  int offset_ = 0;
  std::vector<Block> blocks_;
};

class CudaKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice(Backend::kCuda, 1);
#ifdef DIM0_CUDA_EMULATED
    ASSERT_TRUE(device.ok()) << device.status();
#else
    if (!device.ok()) GTEST_SKIP() << "no GPU to run on: " << device.status().message();
#endif
    device_ = *std::move(device);
    stream_ = device_->NewStream("compute");
    kernels_ = cuda::CreateCudaKernels(*device_);
    cpu_device_ = *CreateDevice(Backend::kCpu, 1);
    cpu_stream_ = cpu_device_->NewStream("reference");
    cpu_ = CreateKernels(*cpu_device_);
  }

  // Calls run(arena) on aligned tensors and on tensors that start at their second element, each
  // twice, which must give the same bits. Returns what run returned for the aligned ones and the
  // others.
  template <typename Run>
  std::vector<std::vector<Floats>> RunAll(const Run& run) {
    std::vector<std::vector<Floats>> results;
    for (int offset : {0, 1}) {
      std::vector<std::vector<Floats>> repeats;
      for (int repeat = 0; repeat < 2; ++repeat) {
        Arena arena(*device_, *stream_);
        arena.set_offset(offset);
        repeats.push_back(run(arena));
        arena.ExpectGuardsIntact();
      }
      for (size_t i = 0; i < repeats[0].size(); ++i) {
        EXPECT_EQ(0, std::memcmp(repeats[0][i].data(), repeats[1][i].data(),
                                 repeats[0][i].size() * sizeof(float)))
            << "output " << i << " differs between two runs";
      }
      results.push_back(std::move(repeats[0]));
    }
    return results;
  }

  void UseWorkspace(Arena& arena, int64_t tokens, int64_t width, int64_t heads) {
    kernels_->SetWorkspace(arena.Raw(kernels_->WorkspaceBytes(tokens, width, heads)));
  }

  void FinishReference() {
    const absl::Status status = cpu_stream_->Synchronize();
    ASSERT_TRUE(status.ok()) << status;
  }

  // The CPU's view of a host matrix, inputs and outputs alike.
  static Tensor Host(const Matrix& matrix) {
    return F32(const_cast<float*>(matrix.values.data()), matrix.rows, matrix.cols);
  }
  static Matrix HostOutput(int64_t rows, int64_t cols) {
    return {kF32, rows, cols, Floats(rows * cols)};
  }

  std::unique_ptr<Device> device_, cpu_device_;
  std::unique_ptr<Stream> stream_, cpu_stream_;
  std::unique_ptr<Kernels> kernels_, cpu_;
};

struct Types {
  DType activation, parameter, gradient;
};
std::string NameOf(const Types& types) {
  return std::string("activations ") + std::string(Name(types.activation)) + ", parameters " +
         std::string(Name(types.parameter)) + ", gradients " + std::string(Name(types.gradient));
}
// All of them.
std::vector<Types> AllTypes() {
  std::vector<Types> all;
  for (DType activation : {kF32, kBF16}) {
    for (DType parameter : {kF32, kBF16}) {
      for (DType gradient : {kF32, kBF16}) all.push_back({activation, parameter, gradient});
    }
  }
  return all;
}
// Those of matrix products.
constexpr Types kProductTypes[] = {{kF32, kF32, kF32}, {kBF16, kBF16, kF32}, {kBF16, kBF16, kBF16}};

// ---- embedding ---------------------------------------------------------------------------------

TEST_F(CudaKernelsTest, EmbeddingAddsTokenAndPosition) {
  constexpr int64_t kVocabulary = 11, kPositions = 9, kSeqLen = 7, kCount = 21;
  for (const Types& types : AllTypes()) {
    if (types.gradient == kBF16) continue;  // there is none
    for (int64_t width : {1, 7, 8, 33, 2056}) {
      SCOPED_TRACE(NameOf(types) + ", width " + std::to_string(width));
      const Matrix wte = Random(types.parameter, kVocabulary, width, 1);
      const Matrix wpe = Random(types.parameter, kPositions, width, 2);
      const std::vector<int32_t> tokens = RandomIds(kCount, kVocabulary, 3);
      const auto results = RunAll([&](Arena& arena) {
        const Tensor out = arena.Output(types.activation, kCount, width);
        kernels_->EmbeddingForward(*stream_, arena.UploadValues(tokens), kSeqLen, arena.Upload(wte),
                                   arena.Upload(wpe), out);
        return std::vector<Floats>{arena.Download(out)};
      });
      Floats expected(kCount * width);
      for (int64_t n = 0; n < kCount; ++n) {
        for (int64_t c = 0; c < width; ++c) {
          expected[n * width + c] =
              RoundTo(types.activation,
                      wte.values[tokens[n] * width + c] + wpe.values[n % kSeqLen * width + c]);
        }
      }
      for (const auto& result : results) EXPECT_EQ(result[0], expected);
    }
  }
}

TEST_F(CudaKernelsTest, EmbeddingOfATokenOutsideTheTableIsNaN) {
  constexpr int64_t kWidth = 16;
  const Matrix wte = Random(kF32, 4, kWidth, 1), wpe = Random(kF32, 4, kWidth, 2);
  Arena arena(*device_, *stream_);
  const Tensor out = arena.Output(kF32, 3, kWidth);
  kernels_->EmbeddingForward(*stream_, arena.UploadValues(std::vector<int32_t>{-1, 3, 4}), 3,
                             arena.Upload(wte), arena.Upload(wpe), out);
  const Floats values = arena.Download(out);
  for (int64_t c = 0; c < kWidth; ++c) {
    EXPECT_TRUE(std::isnan(values[c]));
    EXPECT_TRUE(std::isfinite(values[kWidth + c]));
    EXPECT_TRUE(std::isnan(values[2 * kWidth + c]));
  }
}

TEST_F(CudaKernelsTest, EmbeddingGradientSumsRepeatedTokensAndZeroesUnusedRows) {
  struct Size {
    int64_t vocabulary, positions, seq_len, batch, width;
  };
  // The last token is never used. The third size has more tokens than one look at them takes.
  for (const Size& size : {Size{5, 9, 7, 3, 1}, Size{5, 9, 7, 3, 33}, Size{3, 440, 430, 3, 8},
                           Size{5, 7, 7, 3, 2056}}) {
    const int64_t count = size.seq_len * size.batch, width = size.width;
    const std::vector<int32_t> tokens =
        RandomIds(count, static_cast<int32_t>(size.vocabulary) - 1, 2);
    for (const Types& types : AllTypes()) {
      if (types.parameter == kBF16) continue;  // there is none
      SCOPED_TRACE(NameOf(types) + ", width " + std::to_string(width));
      const Matrix dout = Random(types.activation, count, width, 1);
      const auto results = RunAll([&](Arena& arena) {
        const Tensor dwte = arena.Output(types.gradient, size.vocabulary, width);
        const Tensor dwpe = arena.Output(types.gradient, size.positions, width);
        kernels_->EmbeddingBackward(*stream_, arena.UploadValues(tokens), size.seq_len,
                                    arena.Upload(dout), dwte, dwpe);
        return std::vector<Floats>{arena.Download(dwte), arena.Download(dwpe)};
      });
      const Matrix dwte = HostOutput(size.vocabulary, width);
      const Matrix dwpe = HostOutput(size.positions, width);
      cpu_->EmbeddingBackward(*cpu_stream_, tokens.data(), size.seq_len, Host(dout), Host(dwte),
                              Host(dwpe));
      FinishReference();
      for (const auto& result : results) {
        ExpectNear(result[0], dwte.values, types.gradient, "dwte");
        ExpectNear(result[1], dwpe.values, types.gradient, "dwpe");
      }
    }
  }
}

// ---- layer norm --------------------------------------------------------------------------------

struct NormSize {
  int64_t rows, width;
};
// Widths with and without whole vectors, and beyond what a block spans in one pass; rows enough for
// several chunks, the last of them short.
constexpr NormSize kNormSizes[] = {{1, 1},  {3, 7},   {65, 8},  {9, 33},
                                   {3, 64}, {5, 520}, {3, 257}, {3, 4104}};

TEST_F(CudaKernelsTest, LayerNormMatchesTheCpu) {
  for (const Types& types : AllTypes()) {
    if (types.gradient == kBF16) continue;
    for (const auto& [rows, width] : kNormSizes) {
      SCOPED_TRACE(NameOf(types) + ", " + std::to_string(rows) + " x " + std::to_string(width));
      const Matrix x = Random(types.activation, rows, width, 1, 0.5f, 2.0f);
      const Matrix gain = Random(types.parameter, width, 1, 2, 1.0f);
      const Matrix bias = Random(types.parameter, width, 1, 3);
      const auto results = RunAll([&, rows = rows, width = width](Arena& arena) {
        const Tensor y = arena.Output(types.activation, rows, width);
        const Tensor mean = arena.Output(kF32, rows, 1), rstd = arena.Output(kF32, rows, 1);
        kernels_->LayerNormForward(*stream_, arena.Upload(x), arena.Upload(gain),
                                   arena.Upload(bias), y, mean, rstd);
        return std::vector<Floats>{arena.Download(y), arena.Download(mean), arena.Download(rstd)};
      });
      const Matrix y = HostOutput(rows, width), mean = HostOutput(rows, 1);
      const Matrix rstd = HostOutput(rows, 1);
      cpu_->LayerNormForward(*cpu_stream_, Host(x), Host(gain), Host(bias), Host(y), Host(mean),
                             Host(rstd));
      FinishReference();
      for (const auto& result : results) {
        ExpectNear(result[0], y.values, types.activation, "y");
        ExpectNear(result[1], mean.values, kF32, "mean");
        ExpectNear(result[2], rstd.values, kF32, "rstd");
      }
    }
  }
}

TEST_F(CudaKernelsTest, AddLayerNormNormalisesTheRoundedSumAlsoInPlace) {
  for (const Types& types : AllTypes()) {
    if (types.gradient == kBF16) continue;
    for (const auto& [rows, width] : kNormSizes) {
      SCOPED_TRACE(NameOf(types) + ", " + std::to_string(rows) + " x " + std::to_string(width));
      const Matrix x = Random(types.activation, rows, width, 1);
      const Matrix delta = Random(types.activation, rows, width, 4);
      const Matrix gain = Random(types.parameter, width, 1, 2, 1.0f);
      const Matrix bias = Random(types.parameter, width, 1, 3);
      Matrix sum = x;
      for (size_t i = 0; i < sum.values.size(); ++i) {
        sum.values[i] = RoundTo(types.activation, x.values[i] + delta.values[i]);
      }
      const Matrix y = HostOutput(rows, width), mean = HostOutput(rows, 1);
      const Matrix rstd = HostOutput(rows, 1);
      cpu_->LayerNormForward(*cpu_stream_, Host(sum), Host(gain), Host(bias), Host(y), Host(mean),
                             Host(rstd));
      FinishReference();
      for (int target : {0, 1, 2}) {  // the sum is a tensor of its own, x, or delta
        const auto results = RunAll([&, rows = rows, width = width](Arena& arena) {
          const Tensor tensors[] = {arena.Output(types.activation, rows, width), arena.Upload(x),
                                    arena.Upload(delta)};
          const Tensor y = arena.Output(types.activation, rows, width);
          const Tensor mean = arena.Output(kF32, rows, 1), rstd = arena.Output(kF32, rows, 1);
          kernels_->AddLayerNormForward(*stream_, tensors[1], tensors[2], arena.Upload(gain),
                                        arena.Upload(bias), tensors[target], y, mean, rstd);
          return std::vector<Floats>{arena.Download(tensors[target]), arena.Download(y),
                                     arena.Download(mean), arena.Download(rstd)};
        });
        for (const auto& result : results) {
          EXPECT_EQ(result[0], sum.values);
          ExpectNear(result[1], y.values, types.activation, "y");
          ExpectNear(result[2], mean.values, kF32, "mean");
          ExpectNear(result[3], rstd.values, kF32, "rstd");
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, LayerNormGradientsMatchTheCpuWrittenAndAdded) {
  for (const Types& types : AllTypes()) {
    for (const auto& [rows, width] : kNormSizes) {
      SCOPED_TRACE(NameOf(types) + ", " + std::to_string(rows) + " x " + std::to_string(width));
      const Matrix x = Random(types.activation, rows, width, 1, 0.5f, 2.0f);
      const Matrix dy = Random(types.activation, rows, width, 2);
      const Matrix gain = Random(types.parameter, width, 1, 3, 1.0f);
      const Matrix old_dx = Random(types.activation, rows, width, 4);
      const Matrix old_dgain = Random(types.gradient, width, 1, 5);
      const Matrix old_dbias = Random(types.gradient, width, 1, 6);
      const Matrix y = HostOutput(rows, width), mean = HostOutput(rows, 1);
      const Matrix rstd = HostOutput(rows, 1);
      cpu_->LayerNormForward(*cpu_stream_, Host(x), Host(gain), Host(gain), Host(y), Host(mean),
                             Host(rstd));
      FinishReference();
      for (const Write write : {Write::kOverwrite, Write::kAccumulate}) {
        // Both kinds of write, and they need not be the same.
        const Write write_dx =
            write == Write::kAccumulate && rows % 2 == 1 ? Write::kOverwrite : Write::kAccumulate;
        const auto results = RunAll([&, rows = rows, width = width](Arena& arena) {
          UseWorkspace(arena, rows, width, 1);
          const bool adds_dx = write_dx == Write::kAccumulate, adds = write == Write::kAccumulate;
          const Tensor dx =
              adds_dx ? arena.Upload(old_dx) : arena.Output(types.activation, rows, width);
          const Tensor dgain =
              adds ? arena.Upload(old_dgain) : arena.Output(types.gradient, width, 1);
          const Tensor dbias =
              adds ? arena.Upload(old_dbias) : arena.Output(types.gradient, width, 1);
          kernels_->LayerNormBackward(*stream_, arena.Upload(dy), arena.Upload(x),
                                      arena.Upload(gain), arena.Upload(mean), arena.Upload(rstd),
                                      dx, write_dx, dgain, dbias, write);
          return std::vector<Floats>{arena.Download(dx), arena.Download(dgain),
                                     arena.Download(dbias)};
        });
        const Matrix dx = old_dx, dgain = old_dgain, dbias = old_dbias;
        cpu_->LayerNormBackward(*cpu_stream_, Host(dy), Host(x), Host(gain), Host(mean), Host(rstd),
                                Host(dx), write_dx, Host(dgain), Host(dbias), write);
        FinishReference();
        // A row of one element, or of few alike, has a large rstd, which its gradient is a small
        // rest of: the digits that are left are those of what cancelled.
        const double cancelled = kArithmetic * Greatest(rstd.values) * Greatest(dy.values);
        for (const auto& result : results) {
          ExpectNear(result[0], dx.values, types.activation, "dx", cancelled);
          ExpectNear(result[1], dgain.values, types.gradient, "dgain");
          ExpectNear(result[2], dbias.values, types.gradient, "dbias");
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, LayerNormGradientsOfManyRowsAreSummedInChunks) {
  // More rows than one block sums, in both kernels: with whole vectors and without; and so many
  // wide ones that a block sums them in more than two steps.
  for (const auto& [rows, width] : {NormSize{700, 16}, {700, 5}, {2100, 1544}}) {
    const Matrix x = Random(kBF16, rows, width, 1), dy = Random(kBF16, rows, width, 2);
    const Matrix gain = Random(kBF16, width, 1, 3, 1.0f);
    const Matrix y = HostOutput(rows, width), mean = HostOutput(rows, 1);
    const Matrix rstd = HostOutput(rows, 1);
    cpu_->LayerNormForward(*cpu_stream_, Host(x), Host(gain), Host(gain), Host(y), Host(mean),
                           Host(rstd));
    const Matrix dx = HostOutput(rows, width);
    const Matrix dgain = HostOutput(width, 1), dbias = HostOutput(width, 1);
    cpu_->LayerNormBackward(*cpu_stream_, Host(dy), Host(x), Host(gain), Host(mean), Host(rstd),
                            Host(dx), Write::kOverwrite, Host(dgain), Host(dbias),
                            Write::kOverwrite);
    FinishReference();
    const auto results = RunAll([&, rows = rows, width = width](Arena& arena) {
      UseWorkspace(arena, rows, width, 1);
      const Tensor dx = arena.Output(kBF16, rows, width);
      const Tensor dgain = arena.Output(kF32, width, 1), dbias = arena.Output(kF32, width, 1);
      kernels_->LayerNormBackward(*stream_, arena.Upload(dy), arena.Upload(x), arena.Upload(gain),
                                  arena.Upload(mean), arena.Upload(rstd), dx, Write::kOverwrite,
                                  dgain, dbias, Write::kOverwrite);
      return std::vector<Floats>{arena.Download(dx), arena.Download(dgain), arena.Download(dbias)};
    });
    for (const auto& result : results) {
      ExpectNear(result[0], dx.values, kBF16, "dx");
      ExpectNear(result[1], dgain.values, kF32, "dgain");
      ExpectNear(result[2], dbias.values, kF32, "dbias");
    }
  }
}

// ---- linear ------------------------------------------------------------------------------------

struct LinearSize {
  int64_t tokens, in, out;
};
// The last tokens fill several chunks of the bias gradient; whole vectors of columns, and not.
constexpr LinearSize kLinearSizes[] = {{1, 1, 1},   {3, 7, 9},    {3, 8, 24},
                                       {65, 24, 8}, {5, 40, 520}, {200, 9, 33}};

TEST_F(CudaKernelsTest, LinearLayersMatchTheCpu) {
  for (const Types& types : kProductTypes) {
    for (const auto& [tokens, in, out] : kLinearSizes) {
      SCOPED_TRACE(NameOf(types) + ", " + std::to_string(tokens) + " x " + std::to_string(in) +
                   " to " + std::to_string(out));
      const Matrix x = Random(types.activation, tokens, in, 1);
      const Matrix weight = Random(types.parameter, out, in, 2);
      const Matrix bias = Random(types.parameter, out, 1, 3);
      const Matrix residual = Random(types.activation, tokens, out, 4);
      const Matrix y = HostOutput(tokens, out), without_bias = y, sum = y, up = y, gelu = y;
      cpu_->LinearForward(*cpu_stream_, Host(x), Host(weight), Host(bias), Host(y));
      cpu_->LinearForward(*cpu_stream_, Host(x), Host(weight), Tensor(), Host(without_bias));
      cpu_->LinearAddForward(*cpu_stream_, Host(x), Host(weight), Host(bias), Host(residual),
                             Host(sum));
      cpu_->LinearGeluForward(*cpu_stream_, Host(x), Host(weight), Host(bias), Host(up),
                              Host(gelu));
      FinishReference();
      const auto results = RunAll([&, tokens = tokens, out = out](Arena& arena) {
        const Tensor device_x = arena.Upload(x), device_weight = arena.Upload(weight);
        const Tensor device_bias = arena.Upload(bias), in_place = arena.Upload(residual);
        const auto output = [&] { return arena.Output(types.activation, tokens, out); };
        const Tensor y = output(), without_bias = output(), sum = output(), up = output(),
                     gelu = output();
        kernels_->LinearForward(*stream_, device_x, device_weight, device_bias, y);
        kernels_->LinearForward(*stream_, device_x, device_weight, Tensor(), without_bias);
        kernels_->LinearAddForward(*stream_, device_x, device_weight, device_bias,
                                   arena.Upload(residual), sum);
        kernels_->LinearAddForward(*stream_, device_x, device_weight, device_bias, in_place,
                                   in_place);
        kernels_->LinearGeluForward(*stream_, device_x, device_weight, device_bias, up, gelu);
        return std::vector<Floats>{arena.Download(y),   arena.Download(without_bias),
                                   arena.Download(sum), arena.Download(in_place),
                                   arena.Download(up),  arena.Download(gelu)};
      });
      // Where GELU is a kernel of its own, it sees `up` rounded; no slope of GELU exceeds 1.13.
      const double seen = 1.13 * RoundingError(types.activation) * Greatest(up.values);
      for (const auto& result : results) {
        ExpectNear(result[0], y.values, types.activation, "y");
        ExpectNear(result[1], without_bias.values, types.activation, "y without bias");
        ExpectNear(result[2], sum.values, types.activation, "sum");
        ExpectNear(result[3], sum.values, types.activation, "sum in place");
#ifdef DIM0_CUDA_EMULATED
        constexpr double kRoundedBefore = 0;
#else
        // cuBLAS may add the bias in a kernel of its own, to what it has rounded.
        const double kRoundedBefore = RoundingError(types.activation) * Greatest(up.values);
#endif
        ExpectNear(result[4], up.values, types.activation, "up", kRoundedBefore);
        ExpectNear(result[5], gelu.values, types.activation, "gelu", seen);
      }
    }
  }
}

TEST_F(CudaKernelsTest, LinearGradientsMatchTheCpuWrittenAndAdded) {
  for (const Types& types : kProductTypes) {
    for (const auto& [tokens, in, out] : kLinearSizes) {
      SCOPED_TRACE(NameOf(types) + ", " + std::to_string(tokens) + " x " + std::to_string(in) +
                   " to " + std::to_string(out));
      const Matrix x = Random(types.activation, tokens, in, 1);
      const Matrix dy = Random(types.activation, tokens, out, 2);
      const Matrix weight = Random(types.parameter, out, in, 3);
      const Matrix up = Random(types.activation, tokens, in, 4);
      const Matrix old_dweight = Random(types.gradient, out, in, 5);
      const Matrix old_dbias = Random(types.gradient, out, 1, 6);
      for (const Write write : {Write::kOverwrite, Write::kAccumulate}) {
        const Matrix dx = HostOutput(tokens, in), dup = dx;
        const Matrix dweight = old_dweight, dbias = old_dbias, gelu_dweight = old_dweight,
                     gelu_dbias = old_dbias;
        cpu_->LinearBackward(*cpu_stream_, Host(dy), Host(x), Host(weight), Host(dx), Host(dweight),
                             Host(dbias), write);
        cpu_->GeluLinearBackward(*cpu_stream_, Host(dy), Host(up), Host(x), Host(weight), Host(dup),
                                 Host(gelu_dweight), Host(gelu_dbias), write);
        FinishReference();
        const auto results = RunAll([&, tokens = tokens, in = in, out = out](Arena& arena) {
          UseWorkspace(arena, tokens, (out + 3) / 4, 1);
          const auto dweight_before = [&] {
            return write == Write::kAccumulate ? arena.Upload(old_dweight)
                                               : arena.Output(types.gradient, out, in);
          };
          const auto dbias_before = [&] {
            return write == Write::kAccumulate ? arena.Upload(old_dbias)
                                               : arena.Output(types.gradient, out, 1);
          };
          const Tensor device_dy = arena.Upload(dy), device_x = arena.Upload(x);
          const Tensor device_weight = arena.Upload(weight);
          const Tensor dx = arena.Output(types.activation, tokens, in);
          const Tensor dup = arena.Output(types.activation, tokens, in);
          const Tensor dweight = dweight_before(), dbias = dbias_before();
          const Tensor only_dweight = dweight_before();
          const Tensor gelu_dweight = dweight_before(), gelu_dbias = dbias_before();
          kernels_->LinearBackward(*stream_, device_dy, device_x, device_weight, dx, dweight, dbias,
                                   write);
          kernels_->LinearBackward(*stream_, device_dy, device_x, device_weight, Tensor(),
                                   only_dweight, Tensor(), write);
          kernels_->GeluLinearBackward(*stream_, device_dy, arena.Upload(up), device_x,
                                       device_weight, dup, gelu_dweight, gelu_dbias, write);
          return std::vector<Floats>{arena.Download(dx),        arena.Download(dweight),
                                     arena.Download(dbias),     arena.Download(only_dweight),
                                     arena.Download(dup),       arena.Download(gelu_dweight),
                                     arena.Download(gelu_dbias)};
        });
        // Where GELU's factor is a kernel of its own, the product is rounded first.
        const double rounded = 1.13 * RoundingError(types.activation) * Greatest(dx.values);
        for (const auto& result : results) {
          ExpectNear(result[0], dx.values, types.activation, "dx");
          ExpectNear(result[1], dweight.values, types.gradient, "dweight");
          ExpectNear(result[2], dbias.values, types.gradient, "dbias");
          ExpectNear(result[3], dweight.values, types.gradient, "dweight alone");
          ExpectNear(result[4], dup.values, types.activation, "dup", rounded);
          ExpectNear(result[5], gelu_dweight.values, types.gradient, "dweight behind GELU");
          ExpectNear(result[6], gelu_dbias.values, types.gradient, "dbias behind GELU");
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, WithoutTokensGradientsOfParametersAreZeroOrStay) {
  const Matrix gain = Random(kF32, 8, 1, 1, 1.0f), weight = Random(kF32, 8, 8, 2);
  const auto empty = [](int64_t cols) { return Tensor{nullptr, kF32, 0, cols}; };
  for (const Write write : {Write::kOverwrite, Write::kAccumulate}) {
    Arena arena(*device_, *stream_);
    UseWorkspace(arena, 1, 8, 1);
    const Tensor dgain = arena.Upload(gain), dbias = arena.Upload(gain);
    const Tensor dweight = arena.Upload(weight), linear_dbias = arena.Upload(gain);
    kernels_->LayerNormBackward(*stream_, empty(8), empty(8), arena.Upload(gain), empty(1),
                                empty(1), empty(8), Write::kOverwrite, dgain, dbias, write);
    kernels_->LinearBackward(*stream_, empty(8), empty(8), arena.Upload(weight), Tensor(), dweight,
                             linear_dbias, write);
    const bool stay = write == Write::kAccumulate;
    const Floats vector = stay ? gain.values : Floats(8),
                 matrix = stay ? weight.values : Floats(64);
    EXPECT_EQ(arena.Download(dgain), vector);
    EXPECT_EQ(arena.Download(dbias), vector);
    EXPECT_EQ(arena.Download(linear_dbias), vector);
    EXPECT_EQ(arena.Download(dweight), matrix);
  }
}

// ---- attention ---------------------------------------------------------------------------------

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

// In float64, one query at a time; of each result also the sum of its terms' magnitudes, which is
// what the rounding of factors to bfloat16 adds up to at most.
struct AttentionReference {
  Floats out, logsumexp, dqkv;
  Doubles out_magnitude, dqkv_magnitude;
};

// dqkv only if dout is given; `out` as backward reads it.
AttentionReference ReferenceAttention(const AttentionCase& c, const Floats& qkv, const Floats& dout,
                                      const Floats& rounded_out) {
  const int64_t width = c.width(), size = c.head_size;
  AttentionReference result;
  result.out.resize(c.tokens() * width);
  result.out_magnitude.resize(c.tokens() * width);
  result.logsumexp.resize(c.batch * c.heads * c.seq_len);
  Doubles dqkv(qkv.size());
  result.dqkv_magnitude.resize(qkv.size());
  const double scale = 1 / std::sqrt(static_cast<double>(size));
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const auto at = [&](int64_t t, int64_t part) {
        return (b * c.seq_len + t) * 3 * width + part * width + h * size;
      };
      for (int64_t i = 0; i < c.seq_len; ++i) {
        Doubles p(i + 1);
        double max = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          for (int64_t d = 0; d < size; ++d) {
            p[j] += scale * qkv[at(i, 0) + d] * static_cast<double>(qkv[at(j, 1) + d]);
          }
          max = std::max(max, p[j]);
        }
        for (double& value : p) sum += value = std::exp(value - max);
        for (double& value : p) value /= sum;
        result.logsumexp[(b * c.heads + h) * c.seq_len + i] =
            static_cast<float>(max + std::log(sum));
        const int64_t out = (b * c.seq_len + i) * width + h * size;
        for (int64_t d = 0; d < size; ++d) {
          double value = 0, magnitude = 0;
          for (int64_t j = 0; j <= i; ++j) {
            value += p[j] * qkv[at(j, 2) + d];
            magnitude += std::abs(p[j] * qkv[at(j, 2) + d]);
          }
          result.out[out + d] = static_cast<float>(value);
          result.out_magnitude[out + d] = magnitude;
        }
        if (dout.empty()) continue;
        double delta = 0;
        for (int64_t d = 0; d < size; ++d) {
          delta += static_cast<double>(dout[out + d]) * rounded_out[out + d];
        }
        for (int64_t j = 0; j <= i; ++j) {
          double dp = 0;
          for (int64_t d = 0; d < size; ++d) {
            dp += static_cast<double>(dout[out + d]) * qkv[at(j, 2) + d];
          }
          const double ds = p[j] * (dp - delta) * scale;
          const auto add = [&](int64_t target, double term) {
            dqkv[target] += term;
            result.dqkv_magnitude[target] += std::abs(term);
          };
          for (int64_t d = 0; d < size; ++d) {
            add(at(j, 2) + d, p[j] * dout[out + d]);
            add(at(i, 0) + d, ds * qkv[at(j, 1) + d]);
            add(at(j, 1) + d, ds * qkv[at(i, 0) + d]);
          }
        }
      }
    }
  }
  result.dqkv.assign(dqkv.begin(), dqkv.end());
  return result;
}

void ExpectWithinTerms(const Floats& actual, const Floats& expected, const Doubles& magnitude,
                       DType type, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  const double slack = 4 * kArithmetic * std::max(1.0, Greatest(expected));
  for (size_t i = 0; i < actual.size(); ++i) {
    // A rounded factor in each term, the result's own rounding, and the arithmetic.
    const double allowed = RoundingError(type) * (magnitude[i] + std::abs(expected[i])) + slack;
    ASSERT_LE(std::abs(static_cast<double>(actual[i]) - expected[i]), allowed)
        << what << " [" << i << "]: " << actual[i] << " instead of " << expected[i];
  }
}

TEST_F(CudaKernelsTest, AttentionMatchesFloat64ForEveryHeadSize) {
  // Tiles are of 64 rows and 64 or 32 columns for heads of 64 and 128 in bfloat16; of 32 rows, 32
  // columns and strips of 64 of the head for all others.
  const AttentionCase cases[] = {{1, 1, 1, 1},    {2, 5, 3, 3},    {1, 33, 2, 16},  {1, 65, 1, 80},
                                 {2, 31, 1, 7},   {1, 32, 1, 256}, {1, 34, 1, 130}, {1, 1, 2, 64},
                                 {2, 63, 2, 64},  {1, 64, 1, 64},  {2, 65, 3, 64},  {1, 129, 2, 64},
                                 {1, 1, 1, 128},  {1, 63, 2, 128}, {1, 64, 1, 128}, {2, 65, 1, 128},
                                 {1, 129, 1, 128}};
  for (DType type : {kF32, kBF16}) {
    for (const AttentionCase& c : cases) {
      SCOPED_TRACE(std::string(Name(type)) + " " + c.name());
      const Matrix qkv = Random(type, c.tokens(), 3 * c.width(), 1);
      const Matrix dout = Random(type, c.tokens(), c.width(), 2);
      Matrix out = HostOutput(c.tokens(), c.width());
      out.values = ReferenceAttention(c, qkv.values, {}, {}).out;
      out = Rounded(type, out);
      const AttentionReference expected =
          ReferenceAttention(c, qkv.values, dout.values, out.values);
      const Matrix logsumexp = {kF32, c.batch * c.heads, c.seq_len, expected.logsumexp};
      const auto results = RunAll([&](Arena& arena) {
        UseWorkspace(arena, c.tokens(), c.width(), c.heads);
        const Tensor device_qkv = arena.Upload(qkv);
        const Tensor device_out = arena.Output(type, c.tokens(), c.width());
        const Tensor device_logsumexp = arena.Output(kF32, c.batch * c.heads, c.seq_len);
        const Tensor dqkv = arena.Output(type, c.tokens(), 3 * c.width());
        kernels_->AttentionForward(*stream_, c.shape(), device_qkv, device_out, device_logsumexp);
        kernels_->AttentionBackward(*stream_, c.shape(), arena.Upload(dout), device_qkv,
                                    arena.Upload(out), arena.Upload(logsumexp), dqkv);
        return std::vector<Floats>{arena.Download(device_out), arena.Download(device_logsumexp),
                                   arena.Download(dqkv)};
      });
      for (const auto& result : results) {
        ExpectWithinTerms(result[0], expected.out, expected.out_magnitude, type, "out");
        ExpectNear(result[1], expected.logsumexp, kF32, "logsumexp");
        ExpectWithinTerms(result[2], expected.dqkv, expected.dqkv_magnitude, type, "dqkv");
      }
    }
  }
}

TEST_F(CudaKernelsTest, AttentionKeepsLargeScoresFinite) {
  // Scores of several thousand: their exponentials overflow unless the greatest is taken off first.
  const AttentionCase c = {1, 70, 1, 64};
  for (DType type : {kF32, kBF16}) {
    const Matrix qkv = Random(type, c.tokens(), 3 * c.width(), 1, 0.0f, 30.0f);
    const AttentionReference expected = ReferenceAttention(c, qkv.values, {}, {});
    Arena arena(*device_, *stream_);
    const Tensor out = arena.Output(type, c.tokens(), c.width());
    const Tensor logsumexp = arena.Output(kF32, 1, c.seq_len);
    kernels_->AttentionForward(*stream_, c.shape(), arena.Upload(qkv), out, logsumexp);
    // A score's own rounding, of some 1e4 times 2^-24, is a relative error of its exponential.
    const Floats values = arena.Download(out);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], expected.out[i],
                  (2e-3 + 2 * RoundingError(type)) * (expected.out_magnitude[i] + 1))
          << i;
    }
  }
}

TEST_F(CudaKernelsTest, DecodingMatchesTheCpuAndStoresTheNewKeyAndValue) {
  struct Size {
    int64_t heads, head_size, position;
  };
  for (DType type : {kF32, kBF16}) {
    for (const Size& size :
         {Size{1, 1, 0}, Size{3, 5, 1}, Size{2, 64, 255}, Size{2, 80, 256}, Size{1, 300, 300}}) {
      SCOPED_TRACE(std::string(Name(type)) + " D" + std::to_string(size.head_size) + " position " +
                   std::to_string(size.position));
      const int64_t width = size.heads * size.head_size, rows = size.position + 2;
      const Matrix qkv = Random(type, 1, 3 * width, 1);
      const Matrix keys = Random(type, rows, width, 2), values = Random(type, rows, width, 3);
      const Matrix cpu_keys = keys, cpu_values = values, out = HostOutput(1, width);
      cpu_->AttentionDecode(*cpu_stream_, size.heads, size.position, Host(qkv), Host(cpu_keys),
                            Host(cpu_values), Host(out));
      FinishReference();
      const auto results = RunAll([&](Arena& arena) {
        const Tensor device_keys = arena.Upload(keys), device_values = arena.Upload(values);
        const Tensor device_out = arena.Output(type, 1, width);
        kernels_->AttentionDecode(*stream_, size.heads, size.position, arena.Upload(qkv),
                                  device_keys, device_values, device_out);
        return std::vector<Floats>{arena.Download(device_out), arena.Download(device_keys),
                                   arena.Download(device_values)};
      });
      for (const auto& result : results) {
        ExpectNear(result[0], out.values, type, "out");
        EXPECT_EQ(result[1], cpu_keys.values);
        EXPECT_EQ(result[2], cpu_values.values);
      }
    }
  }
}

// ---- cross-entropy -----------------------------------------------------------------------------

TEST_F(CudaKernelsTest, CrossEntropyMatchesTheCpuForRowsOfEveryAlignment) {
  constexpr float kScale = 0.125f;
  struct Size {
    int64_t rows, cols;
  };
  for (DType type : {kF32, kBF16}) {
    for (const auto& [rows, cols] :
         {Size{1, 1}, Size{3, 3}, Size{9, 17}, Size{2, 1000}, Size{8, 257}, Size{2, 8195}}) {
      SCOPED_TRACE(std::string(Name(type)) + " " + std::to_string(rows) + " x " +
                   std::to_string(cols));
      const Matrix logits = Random(type, rows, cols, 1, 0.0f, 4.0f);
      std::vector<int32_t> targets = RandomIds(rows, static_cast<int32_t>(cols), 2);
      if (rows > 2) targets[1] = -1;  // does not count
      constexpr double kBefore = 2.5;
      const Matrix gradient = logits;
      double expected_loss = kBefore;
      cpu_->CrossEntropyForwardBackward(*cpu_stream_, Host(gradient), cols, targets.data(), kScale,
                                        &expected_loss);
      FinishReference();
      const auto results = RunAll([&, rows = rows, cols = cols](Arena& arena) {
        UseWorkspace(arena, rows, 1, 1);
        const Tensor device_logits = arena.Upload(logits);
        const int32_t* device_targets = arena.UploadValues(targets);
        double* loss = arena.UploadValues(Doubles{kBefore});
        kernels_->CrossEntropyForward(*stream_, device_logits, cols, device_targets, loss);
        const double forward_loss = arena.DownloadDouble(loss);
        EXPECT_EQ(arena.Download(device_logits), logits.values);
        double* loss_again = arena.UploadValues(Doubles{kBefore});
        kernels_->CrossEntropyForwardBackward(*stream_, device_logits, cols, device_targets, kScale,
                                              loss_again);
        EXPECT_EQ(arena.DownloadDouble(loss_again), forward_loss);
        EXPECT_NEAR(forward_loss, expected_loss, 1e-6 * rows * (1 + std::abs(expected_loss)));
        return std::vector<Floats>{arena.Download(device_logits)};
      });
      for (const auto& result : results) {
        ExpectNear(result[0], gradient.values, type, "gradient");
      }
    }
  }
}

TEST_F(CudaKernelsTest, CrossEntropyKeepsDigitsOfLargeLogitsAndTakesInfinities) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // Logits near 2^14 that differ by 1, and one that cannot be chosen.
  const Matrix logits = {kF32, 1, 3, {16384.0f, 16385.0f, -kInfinity}};
  Arena arena(*device_, *stream_);
  UseWorkspace(arena, 1, 1, 1);
  double* loss = arena.UploadValues(Doubles{0.0});
  const Tensor device_logits = arena.Upload(logits);
  kernels_->CrossEntropyForwardBackward(*stream_, device_logits, 3,
                                        arena.UploadValues(std::vector<int32_t>{0}), 1.0f, loss);
  const double e = std::exp(1.0);
  EXPECT_NEAR(arena.DownloadDouble(loss), std::log(1 + e), 1e-6);
  ExpectNear(arena.Download(device_logits),
             {static_cast<float>(1 / (1 + e) - 1), static_cast<float>(e / (1 + e)), 0.0f}, kF32,
             "gradient");
}

TEST_F(CudaKernelsTest, CrossEntropyOfABrokenLogitOrTargetIsNaN) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (int broken : {0, 1, 2}) {
    Matrix logits = Random(kBF16, 2, 40, 1);
    std::vector<int32_t> targets = {1, 2};
    if (broken == 0) logits.values[30] = kNaN;
    if (broken == 1) targets[1] = 40;
    if (broken == 2) targets[0] = -2;
    Arena arena(*device_, *stream_);
    UseWorkspace(arena, 2, 1, 1);
    double* loss = arena.UploadValues(Doubles{0.0});
    kernels_->CrossEntropyForward(*stream_, arena.Upload(logits), 40, arena.UploadValues(targets),
                                  loss);
    EXPECT_TRUE(std::isnan(arena.DownloadDouble(loss))) << broken;
  }
}

// `matrix` as the first columns of one with `length`, `filler` in the others.
Matrix Padded(const Matrix& matrix, int64_t length, float filler) {
  Matrix padded{matrix.type, matrix.rows, length, Floats(matrix.rows * length, filler)};
  for (int64_t n = 0; n < matrix.rows; ++n) {
    std::copy_n(matrix.values.begin() + n * matrix.cols, matrix.cols,
                padded.values.begin() + n * length);
  }
  return padded;
}

// The first `cols` columns of `padded`, the others still holding `filler`.
Floats WithoutPadding(const Floats& padded, int64_t cols, int64_t length, float filler) {
  Floats values;
  int64_t written = 0;
  for (size_t row = 0; row < padded.size(); row += length) {
    values.insert(values.end(), padded.begin() + row, padded.begin() + row + cols);
    for (int64_t c = cols; c < length; ++c) {
      const float value = padded[row + c];
      if (std::isnan(filler) ? !std::isnan(value) : value != filler) ++written;
    }
  }
  EXPECT_EQ(written, 0) << "elements behind the first " << cols << " columns changed";
  return values;
}

TEST_F(CudaKernelsTest, UnusedColumnsOfLogitsAreNeitherReadNorWritten) {
  constexpr int64_t kTokens = 9, kWidth = 24;
  constexpr float kScale = 0.125f;
  for (const Types& types : kProductTypes) {
    for (int64_t vocabulary : {1, 63, 64, 65, 257}) {
      const Matrix x = Random(types.activation, kTokens, kWidth, 1);
      const Matrix weight = Random(types.parameter, vocabulary, kWidth, 2);
      const Matrix bias = Random(types.parameter, vocabulary, 1, 3);
      const Matrix logits = Random(types.activation, kTokens, vocabulary, 4, 0.0f, 4.0f);
      const Matrix dlogits = Random(types.activation, kTokens, vocabulary, 5);
      std::vector<int32_t> targets = RandomIds(kTokens, static_cast<int32_t>(vocabulary), 6);
      targets[2] = -1;

      const Matrix y = HostOutput(kTokens, vocabulary), with_bias = y, gradient = logits;
      const Matrix dx = HostOutput(kTokens, kWidth), dweight = HostOutput(vocabulary, kWidth);
      double loss = 0;
      cpu_->LinearForward(*cpu_stream_, Host(x), Host(weight), Tensor(), Host(y));
      cpu_->LinearForward(*cpu_stream_, Host(x), Host(weight), Host(bias), Host(with_bias));
      cpu_->CrossEntropyForwardBackward(*cpu_stream_, Host(gradient), vocabulary, targets.data(),
                                        kScale, &loss);
      cpu_->LinearBackward(*cpu_stream_, Host(dlogits), Host(x), Host(weight), Host(dx),
                           Host(dweight), Tensor(), Write::kOverwrite);
      FinishReference();

      for (int64_t length : {LogitColumns(vocabulary), vocabulary + 1}) {
        SCOPED_TRACE(NameOf(types) + ", " + std::to_string(vocabulary) + " in rows of " +
                     std::to_string(length));
        const auto run_with = [&](float filler) {
          return RunAll([&](Arena& arena) {
            UseWorkspace(arena, kTokens, 1, 1);
            const auto padded = [&](const Matrix& matrix) {
              return arena.Upload(Padded(matrix, length, filler));
            };
            const auto first_columns = [&](const Tensor& tensor) {
              return WithoutPadding(arena.Download(tensor), vocabulary, length, filler);
            };
            const Tensor device_x = arena.Upload(x), device_weight = arena.Upload(weight);
            const Tensor y = padded(dlogits), with_bias = padded(dlogits);
            kernels_->LinearForward(*stream_, device_x, device_weight, Tensor(), y);
            kernels_->LinearForward(*stream_, device_x, device_weight, arena.Upload(bias),
                                    with_bias);
            const Tensor device_logits = padded(logits), device_dlogits = padded(dlogits);
            const int32_t* device_targets = arena.UploadValues(targets);
            double* forward_loss = arena.UploadValues(Doubles{0.0});
            kernels_->CrossEntropyForward(*stream_, device_logits, vocabulary, device_targets,
                                          forward_loss);
            EXPECT_EQ(first_columns(device_logits), logits.values);
            double* backward_loss = arena.UploadValues(Doubles{0.0});
            kernels_->CrossEntropyForwardBackward(*stream_, device_logits, vocabulary,
                                                  device_targets, kScale, backward_loss);
            EXPECT_NEAR(arena.DownloadDouble(forward_loss), loss, 1e-5 * (1 + loss));
            EXPECT_EQ(arena.DownloadDouble(backward_loss), arena.DownloadDouble(forward_loss));
            const Tensor dx = arena.Output(types.activation, kTokens, kWidth);
            const Tensor dweight = arena.Output(types.gradient, vocabulary, kWidth);
            kernels_->LinearBackward(*stream_, device_dlogits, device_x, device_weight, dx, dweight,
                                     Tensor(), Write::kOverwrite);
            EXPECT_EQ(first_columns(device_dlogits), dlogits.values);
            return std::vector<Floats>{first_columns(y), first_columns(with_bias),
                                       first_columns(device_logits), arena.Download(dx),
                                       arena.Download(dweight)};
          });
        };
        const auto results = run_with(0x1p127f);
        for (const auto& result : results) {
          ExpectNear(result[0], y.values, types.activation, "y");
          ExpectNear(result[1], with_bias.values, types.activation, "y with bias");
          ExpectNear(result[2], gradient.values, types.activation, "gradient of logits");
          ExpectNear(result[3], dx.values, types.activation, "dx");
          ExpectNear(result[4], dweight.values, types.gradient, "dweight");
        }
        EXPECT_EQ(run_with(std::numeric_limits<float>::quiet_NaN()), results);
      }
    }
  }
}

// ---- what ops say of themselves ----------------------------------------------------------------

// Keeps that and runs none.
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

TEST_F(CudaKernelsTest, OpsStateTheBytesOfTheirTypes) {
  InfoStream stream;
  const auto tensor = [](DType type, int64_t rows, int64_t cols) {
    return Tensor{nullptr, type, rows, cols};
  };
  const Tensor x = tensor(kBF16, 6, 32), gain = tensor(kBF16, 32, 1), dgain = tensor(kF32, 32, 1);
  const Tensor mean = tensor(kF32, 6, 1), logits = tensor(kBF16, 6, 64);
  kernels_->LayerNormForward(stream, x, gain, gain, x, mean, mean);
  EXPECT_EQ(stream.last.bytes, 2 * (2 * 6 * 32 + 2 * 32) + 4 * 2 * 6);
  kernels_->LayerNormBackward(stream, x, x, gain, mean, mean, x, Write::kAccumulate, dgain, dgain,
                              Write::kOverwrite);
  EXPECT_EQ(stream.last.bytes, 2 * (4 * 6 * 32 + 32) + 4 * (2 * 6 + 2 * 32));
  kernels_->CrossEntropyForwardBackward(stream, logits, 50, nullptr, 1.0f, nullptr);
  EXPECT_EQ(stream.last.bytes, 2 * 2 * 6 * 50 + 4 * 6);
  const Tensor weight = tensor(kBF16, 96, 32), bias = tensor(kBF16, 96, 1);
  const Tensor y = tensor(kBF16, 6, 96);
  kernels_->LinearForward(stream, x, weight, bias, y);
  EXPECT_EQ(stream.last.flops, 2 * 6 * 32 * 96);
  EXPECT_EQ(stream.last.bytes, 2 * (6 * 32 + 96 * 32 + 6 * 96));
  const Tensor table = tensor(kBF16, 50, 32);
  kernels_->LinearForward(stream, x, table, Tensor(), logits);
  EXPECT_EQ(stream.last.flops, 2 * 6 * 32 * 50);
  EXPECT_EQ(stream.last.bytes, 2 * (6 * 32 + 50 * 32 + 6 * 50));
  kernels_->LinearBackward(stream, logits, x, table, x, table, Tensor(), Write::kOverwrite);
  EXPECT_EQ(stream.last.flops, 2 * 2 * 6 * 32 * 50);
  EXPECT_EQ(stream.last.bytes, 2 * 2 * (6 * 32 + 50 * 32 + 6 * 50));
  // Six visible pairs of a query and a key for each of two sequences and four heads of 8.
  kernels_->AttentionBackward(stream, {2, 3, 4}, x, y, x, tensor(kF32, 8, 3), y);
  EXPECT_EQ(stream.last.flops, 5 * 2 * 8 * 6 * 8);
}

}  // namespace
}  // namespace dim0
