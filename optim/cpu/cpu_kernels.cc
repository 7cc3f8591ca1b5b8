#include "optim/cpu/cpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "runtime/cpu/gemm.h"

namespace dim0::cpu {
namespace {

// Elements a thread must have before another one is woken.
constexpr int64_t kGrain = 1 << 14;

// Sums in this many lanes, whatever the alignment, so that a row's sum is the same in every shard.
constexpr int64_t kLanes = 16;

float SumOfSquares(const float* x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += x[i + j] * x[i + j];
  }
  for (; i < n; ++i) lanes[i % kLanes] += x[i] * x[i];
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// V <- mu V + scale G; out = scale G + mu V or V. `out` may be `momentum` only without Nesterov.
void MomentumRow(const float* __restrict gradient, float* __restrict momentum, int64_t n, float mu,
                 bool nesterov, float scale, float* __restrict out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = scale * gradient[i];
    const float v = mu * momentum[i] + g;
    momentum[i] = v;
    out[i] = nesterov ? g + mu * v : v;
  }
}

class CpuOptimizerKernels : public OptimizerKernels {
 public:
  explicit CpuOptimizerKernels(CpuDevice& device) : pool_(device.pool()) {}

  void AdamW(Stream& stream, std::vector<AdamWTensor> tensors,
             const AdamWArguments& arguments) override {
    double elements = 0;
    for (const AdamWTensor& tensor : tensors) elements += tensor.value.size();
    stream.Enqueue({.name = "adamw",
                    .kind = OpKind::kOptimizer,
                    .flops = 12 * elements,
                    .bytes = 28 * elements},
                   [this, tensors = std::move(tensors), arguments](const OpContext&) {
                     if (!std::isfinite(*arguments.gradient_scale)) return absl::OkStatus();
                     for (const AdamWTensor& tensor : tensors) {
                       pool_.ParallelFor(tensor.value.size(), kGrain,
                                         [&](int64_t begin, int64_t end) {
                                           AdamWRange(tensor, arguments, begin, end);
                                         });
                     }
                     return absl::OkStatus();
                   });
  }

  void Rmnp(Stream& stream, std::vector<RmnpTensor> matrices,
            const RmnpArguments& arguments) override {
    double elements = 0;
    for (const RmnpTensor& matrix : matrices) elements += matrix.value.size();
    stream.Enqueue(
        {.name = "rmnp", .kind = OpKind::kOptimizer, .flops = 8 * elements, .bytes = 20 * elements},
        [this, matrices = std::move(matrices), arguments](const OpContext&) {
          if (!std::isfinite(*arguments.gradient_scale)) return absl::OkStatus();
          for (const RmnpTensor& matrix : matrices) {
            const int64_t cols = matrix.value.cols;
            pool_.ParallelFor(matrix.value.rows, std::max<int64_t>(1, kGrain / cols),
                              [&](int64_t begin, int64_t end) {
                                std::vector<float> direction(cols);
                                for (int64_t row = begin; row < end; ++row) {
                                  RmnpRow(matrix, arguments, row, direction.data());
                                }
                              });
          }
          return absl::OkStatus();
        });
  }

  void Momentum(Stream& stream, const Tensor& gradient, const Tensor& momentum, float mu,
                bool nesterov, const float* gradient_scale, const Tensor& out) override {
    const int64_t size = gradient.size();
    stream.Enqueue(
        {.name = "momentum", .kind = OpKind::kOptimizer, .flops = 4.0 * size, .bytes = 16.0 * size},
        [=, this](const OpContext&) {
          if (!std::isfinite(*gradient_scale)) return absl::OkStatus();
          pool_.ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
            MomentumRow(gradient.f32() + begin, momentum.f32() + begin, end - begin, mu, nesterov,
                        *gradient_scale, out.f32() + begin);
          });
          return absl::OkStatus();
        });
  }

  void ApplyUpdate(Stream& stream, const Tensor& value, const Tensor& update, float step,
                   float decay, const float* gradient_scale) override {
    const int64_t size = value.size();
    stream.Enqueue({.name = "apply_update",
                    .kind = OpKind::kOptimizer,
                    .flops = 3.0 * size,
                    .bytes = 12.0 * size},
                   [=, this](const OpContext&) {
                     if (!std::isfinite(*gradient_scale)) return absl::OkStatus();
                     pool_.ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
                       float* w = value.f32();
                       const float* u = update.f32();
                       const float keep = 1 - decay;
#pragma omp simd
                       for (int64_t i = begin; i < end; ++i) w[i] = keep * w[i] - step * u[i];
                     });
                     return absl::OkStatus();
                   });
  }

  void Normalize(Stream& stream, const Tensor& x) override {
    stream.Enqueue({.name = "normalize",
                    .kind = OpKind::kOptimizer,
                    .flops = 3.0 * x.size(),
                    .bytes = 12.0 * x.size()},
                   [this, x](const OpContext&) {
                     NormalizeMatrix(x);
                     return absl::OkStatus();
                   });
  }

  void SymmetricProduct(Stream& stream, float alpha, const Tensor& x, bool transposed, float beta,
                        const Tensor& c) override {
    const int64_t n = transposed ? x.cols : x.rows;
    const int64_t k = transposed ? x.rows : x.cols;
    DIM0_CHECK(c.rows == n && c.cols == n);
    stream.Enqueue({.name = "symmetric_product",
                    .kind = OpKind::kOptimizer,
                    .flops = 1.0 * n * (n + 1) * k,
                    .bytes = 4.0 * (x.size() + c.size())},
                   [=, this](const OpContext&) {
                     cpu::SymmetricProduct(pool_, transposed ? Transpose::kYes : Transpose::kNo, n,
                                           k, alpha, x.f32(), x.cols, beta, c.f32(), n);
                     return absl::OkStatus();
                   });
  }

  void MatMul(Stream& stream, float alpha, const Tensor& a, const Tensor& b, float beta,
              const Tensor& c) override {
    DIM0_CHECK(a.rows == c.rows && a.cols == b.rows && b.cols == c.cols);
    stream.Enqueue({.name = "matmul",
                    .kind = OpKind::kOptimizer,
                    .flops = 2.0 * a.rows * a.cols * b.cols,
                    .bytes = 4.0 * (a.size() + b.size() + c.size())},
                   [=, this](const OpContext&) {
                     Gemm(pool_, Transpose::kNo, Transpose::kNo, a.rows, b.cols, a.cols, alpha,
                          a.f32(), a.cols, b.f32(), b.cols, beta, c.f32(), c.cols);
                     return absl::OkStatus();
                   });
  }

  void Copy(Stream& stream, const Tensor& source, const Tensor& target) override {
    DIM0_CHECK(source.size() == target.size());
    stream.Enqueue({.name = "copy", .kind = OpKind::kOptimizer, .bytes = 2.0 * source.bytes()},
                   [=](const OpContext&) {
                     std::memcpy(target.data, source.data, source.bytes());
                     return absl::OkStatus();
                   });
  }

 private:
  static void AdamWRange(const AdamWTensor& tensor, const AdamWArguments& a, int64_t begin,
                         int64_t end) {
    float* __restrict w = tensor.value.f32();
    const float* __restrict g = tensor.gradient.f32();
    float* __restrict m = tensor.first_moment.f32();
    float* __restrict v = tensor.second_moment.f32();
    const float scale = *a.gradient_scale;
    // The scalars are made in float64 and rounded once.
    const auto keep = static_cast<float>(1 - a.lr * tensor.weight_decay);
    const auto step = static_cast<double>(a.step);
    const auto step_size = static_cast<float>(a.lr / (1 - std::pow(a.beta1, step)));
    const auto root_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(a.beta2, step)));
    const auto beta1 = static_cast<float>(a.beta1), fresh1 = static_cast<float>(1 - a.beta1);
    const auto beta2 = static_cast<float>(a.beta2), fresh2 = static_cast<float>(1 - a.beta2);
    const auto eps = static_cast<float>(a.eps);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float gradient = scale * g[i];
      m[i] = beta1 * m[i] + fresh1 * gradient;
      v[i] = beta2 * v[i] + fresh2 * gradient * gradient;
      w[i] = keep * w[i] - step_size * m[i] / (std::sqrt(v[i]) * root_correction + eps);
    }
  }

  // `direction` is scratch for one row; between the two passes the row stays in cache.
  static void RmnpRow(const RmnpTensor& matrix, const RmnpArguments& a, int64_t row,
                      float* __restrict direction) {
    const int64_t cols = matrix.value.cols;
    float* __restrict w = matrix.value.f32() + row * cols;
    MomentumRow(matrix.gradient.f32() + row * cols, matrix.momentum.f32() + row * cols, cols,
                static_cast<float>(a.momentum), a.nesterov, *a.gradient_scale, direction);
    const float norm =
        std::max(std::sqrt(SumOfSquares(direction, cols)), static_cast<float>(a.eps));
    const float step = static_cast<float>(a.lr * matrix.scale) / norm;
    const auto keep = static_cast<float>(1 - a.lr * a.weight_decay);
#pragma omp simd
    for (int64_t i = 0; i < cols; ++i) w[i] = keep * w[i] - step * direction[i];
  }

  // In float64, which holds the square of every float32: neither tiny nor huge values lose their
  // norm.
  void NormalizeMatrix(const Tensor& x) {
    float* data = x.f32();
    const int64_t pieces = (x.size() + kGrain - 1) / kGrain;
    std::vector<double> sums(pieces);
    const auto piece = [&](int64_t i, auto body) {
      for (int64_t j = i * kGrain; j < std::min(x.size(), (i + 1) * kGrain); ++j) body(data[j]);
    };
    pool_.Run(pieces, [&](int64_t i) {
      double sum = 0;
      piece(i, [&](float value) { sum += double{value} * value; });
      sums[i] = sum;
    });
    double squares = 0;
    for (const double sum : sums) squares += sum;
    const double factor = squares > 0 ? 1 / std::sqrt(squares) : 0;
    pool_.Run(pieces, [&](int64_t i) {
      piece(i, [&](float& value) { value = static_cast<float>(value * factor); });
    });
  }

  ThreadPool& pool_;
};

}  // namespace

std::unique_ptr<OptimizerKernels> CreateOptimizerKernels(CpuDevice& device) {
  return std::make_unique<CpuOptimizerKernels>(device);
}

}  // namespace dim0::cpu
