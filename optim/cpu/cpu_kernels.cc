#include "optim/cpu/cpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "collectives/dtype.h"
#include "optim/cpu/adamw.h"
#include "optim/cpu/rmnp.h"
#include "runtime/cpu/elements.h"
#include "runtime/cpu/gemm.h"

namespace dim0::cpu {
namespace {

// Elements a thread must have before another one is woken.
constexpr int64_t kGrain = 1 << 14;

template <typename Item>
double Elements(const std::vector<Item>& items) {
  double elements = 0;
  for (const Item& item : items) elements += item.value.size();
  return elements;
}

// What a pass moves that reads gradients and reads and writes values; in bytes.
template <typename Item>
double ValueBytes(const std::vector<Item>& items) {
  double bytes = 0;
  for (const Item& item : items) {
    bytes += item.gradient.bytes() + 2 * item.value.bytes() + item.copy.bytes();
  }
  return bytes;
}

class CpuOptimizerKernels : public OptimizerKernels {
 public:
  explicit CpuOptimizerKernels(CpuDevice& device) : pool_(device.pool()) {}

  void AdamW(Stream& stream, std::vector<AdamWTensor> tensors,
             const AdamWArguments& arguments) override {
    const double elements = Elements(tensors);
    stream.Enqueue({.name = "adamw",
                    .kind = OpKind::kOptimizer,
                    .flops = 12 * elements,
                    .bytes = ValueBytes(tensors) + 16 * elements},
                   [this, tensors = std::move(tensors), arguments](const OpContext&) {
                     if (std::isfinite(*arguments.gradient_scale)) {
                       UpdateAdamW(pool_, tensors, arguments);
                     }
                     return absl::OkStatus();
                   });
  }

  void Rmnp(Stream& stream, std::vector<RmnpTensor> matrices,
            const RmnpArguments& arguments) override {
    const double bytes = ValueBytes(matrices) + 8 * Elements(matrices);
    EnqueueRmnp(stream, "rmnp", 8, bytes, UpdateRmnp, std::move(matrices), arguments);
  }
  void RmnpRowSquares(Stream& stream, std::vector<RmnpTensor> parts,
                      const RmnpArguments& arguments) override {
    double bytes = 8 * Elements(parts);
    for (const RmnpTensor& part : parts) bytes += part.gradient.bytes();
    EnqueueRmnp(stream, "rmnp_row_squares", 6, bytes, AccumulateRmnpRowSquares, std::move(parts),
                arguments);
  }
  void RmnpApply(Stream& stream, std::vector<RmnpTensor> parts,
                 const RmnpArguments& arguments) override {
    const double bytes = ValueBytes(parts) + 4 * Elements(parts);
    EnqueueRmnp(stream, "rmnp_apply", 5, bytes, ApplyRmnp, std::move(parts), arguments);
  }

  void Momentum(Stream& stream, const Tensor& gradient, const Tensor& momentum, float mu,
                bool nesterov, const float* gradient_scale, const Tensor& out) override {
    const int64_t size = gradient.size();
    stream.Enqueue({.name = "momentum",
                    .kind = OpKind::kOptimizer,
                    .flops = 4.0 * size,
                    .bytes = 8.0 * size + gradient.bytes() + out.bytes()},
                   [=, this](const OpContext&) {
                     if (!std::isfinite(*gradient_scale)) return absl::OkStatus();
                     WithElements(gradient, [&](const auto* source) {
                       WithElements(out, [&](auto* target) {
                         UpdateMomentum(source, momentum.f32(), size, mu, nesterov, *gradient_scale,
                                        target);
                       });
                     });
                     return absl::OkStatus();
                   });
  }

  void ApplyUpdate(Stream& stream, const Tensor& value, const Tensor& copy, const Tensor& update,
                   float step, float decay, const float* gradient_scale) override {
    const int64_t size = value.size();
    stream.Enqueue({.name = "apply_update",
                    .kind = OpKind::kOptimizer,
                    .flops = 3.0 * size,
                    .bytes = 2.0 * value.bytes() + copy.bytes() + update.bytes()},
                   [=, this](const OpContext&) {
                     if (!std::isfinite(*gradient_scale)) return absl::OkStatus();
                     WithElements(value, [&](auto* w) {
                       WithElements(update, [&](const auto* u) {
                         if (copy.rows > 0) {
                           UpdateValues<true>(w, copy, u, size, step, decay);
                         } else {
                           UpdateValues<false>(w, copy, u, size, step, decay);
                         }
                       });
                     });
                     return absl::OkStatus();
                   });
  }

  DType matrix_dtype() const override { return DType::kFloat32; }

  void Normalize(Stream& stream, const Tensor& x, double length, const Tensor& out) override {
    DIM0_CHECK(x.size() == out.size());
    stream.Enqueue({.name = "normalize",
                    .kind = OpKind::kOptimizer,
                    .flops = 3.0 * x.size(),
                    .bytes = 2.0 * x.bytes() + out.bytes()},
                   [=, this](const OpContext&) {
                     WithElements(x, [&](const auto* source) {
                       WithElements(out, [&](auto* target) {
                         NormalizeElements(source, x.size(), length, target);
                       });
                     });
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

  void SymmetricMatMul(Stream& stream, float alpha, const Tensor& a, const Tensor& b, float beta,
                       const Tensor& c) override {
    const int64_t n = c.rows;
    DIM0_CHECK(c.cols == n && a.rows == n && a.cols == n && b.rows == n && b.cols == n);
    stream.Enqueue({.name = "symmetric_matmul",
                    .kind = OpKind::kOptimizer,
                    .flops = 1.0 * n * (n + 1) * n,
                    .bytes = 4.0 * 3 * n * n},
                   [=, this](const OpContext&) {
                     cpu::SymmetricMatMul(pool_, n, alpha, a.f32(), b.f32(), beta, c.f32());
                     return absl::OkStatus();
                   });
  }

  void MatMul(Stream& stream, float alpha, const Tensor& a, bool transpose_a, const Tensor& b,
              bool transpose_b, float beta, const Tensor& c) override {
    const int64_t m = transpose_a ? a.cols : a.rows;
    const int64_t k = transpose_a ? a.rows : a.cols;
    DIM0_CHECK(c.rows == m && c.cols == (transpose_b ? b.rows : b.cols) &&
               k == (transpose_b ? b.cols : b.rows));
    stream.Enqueue({.name = "matmul",
                    .kind = OpKind::kOptimizer,
                    .flops = 2.0 * m * k * c.cols,
                    .bytes = 4.0 * (a.size() + b.size() + c.size())},
                   [=, this](const OpContext&) {
                     Gemm(pool_, transpose_a ? Transpose::kYes : Transpose::kNo,
                          transpose_b ? Transpose::kYes : Transpose::kNo, m, c.cols, k, alpha,
                          a.f32(), a.cols, b.f32(), b.cols, beta, c.f32(), c.cols);
                     return absl::OkStatus();
                   });
  }

  void AddToDiagonal(Stream& stream, const Tensor& c, float value) override {
    DIM0_CHECK(c.rows == c.cols);
    stream.Enqueue({.name = "add_to_diagonal", .kind = OpKind::kOptimizer, .bytes = 8.0 * c.rows},
                   [=](const OpContext&) {
                     for (int64_t i = 0; i < c.rows; ++i) c.f32()[i * c.cols + i] += value;
                     return absl::OkStatus();
                   });
  }

  void Copy(Stream& stream, const Tensor& source, const Tensor& target) override {
    DIM0_CHECK(source.size() == target.size());
    stream.Enqueue({.name = "copy",
                    .kind = OpKind::kOptimizer,
                    .bytes = static_cast<double>(source.bytes() + target.bytes())},
                   [=, this](const OpContext&) {
                     WithElements(source, [&](const auto* from) {
                       WithElements(target, [&](auto* to) { Convert(from, source.size(), to); });
                     });
                     return absl::OkStatus();
                   });
  }

 private:
  void EnqueueRmnp(Stream& stream, const char* name, double flops, double bytes,
                   void (*run)(ThreadPool&, const std::vector<RmnpTensor>&, const RmnpArguments&),
                   std::vector<RmnpTensor> matrices, const RmnpArguments& arguments) {
    const double elements = Elements(matrices);
    stream.Enqueue(
        {.name = name, .kind = OpKind::kOptimizer, .flops = flops * elements, .bytes = bytes},
        [this, run, matrices = std::move(matrices), arguments](const OpContext&) {
          if (std::isfinite(*arguments.gradient_scale)) run(pool_, matrices, arguments);
          return absl::OkStatus();
        });
  }

  template <bool kCopy, typename Value, typename Source>
  void UpdateValues(Value* __restrict value, const Tensor& copy, const Source* __restrict update,
                    int64_t size, float step, float decay) {
    pool_.ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
      auto* __restrict rounded = static_cast<BFloat16*>(copy.data);
      const float keep = 1 - decay;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const float w = keep * static_cast<float>(value[i]) - step * static_cast<float>(update[i]);
        Set(w, value[i]);
        if constexpr (kCopy) Set(w, rounded[i]);
      }
    });
  }

  template <typename From, typename To>
  void UpdateMomentum(const From* __restrict gradient, float* __restrict momentum, int64_t size,
                      float mu, bool nesterov, float scale, To* __restrict out) {
    pool_.ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const float g = scale * static_cast<float>(gradient[i]);
        const float v = mu * momentum[i] + g;
        momentum[i] = v;
        Set(nesterov ? g + mu * v : v, out[i]);
      }
    });
  }

  template <typename From, typename To>
  void Convert(const From* from, int64_t size, To* to) {
    pool_.ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
      if constexpr (std::is_same_v<From, To>) {
        std::memcpy(to + begin, from + begin, (end - begin) * sizeof(To));
      } else {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) Set(static_cast<float>(from[i]), to[i]);
      }
    });
  }

  // In float64, which holds the square of every float32: neither tiny nor huge values lose their
  // norm. Pieces do not depend on the number of threads, so neither does the sum.
  template <typename From, typename To>
  void NormalizeElements(const From* x, int64_t size, double length, To* out) {
    const int64_t pieces = (size + kGrain - 1) / kGrain;
    std::vector<double> sums(pieces);
    pool_.Run(pieces, [&](int64_t piece) {
      constexpr int64_t kLanes = 8;
      double lanes[kLanes] = {};
      const int64_t end = std::min(size, (piece + 1) * kGrain);
      int64_t i = piece * kGrain;
      for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
        for (int64_t j = 0; j < kLanes; ++j) {
          const double value = static_cast<float>(x[i + j]);
          lanes[j] += value * value;
        }
      }
      for (; i < end; ++i) {
        const double value = static_cast<float>(x[i]);
        lanes[0] += value * value;
      }
      for (const double lane : lanes) sums[piece] += lane;
    });
    double squares = 0;
    for (const double sum : sums) squares += sum;
    const double factor = squares > 0 ? length / std::sqrt(squares) : 0;
    pool_.ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        Set(static_cast<float>(static_cast<float>(x[i]) * factor), out[i]);
      }
    });
  }

  ThreadPool& pool_;
};

}  // namespace

std::unique_ptr<OptimizerKernels> CreateOptimizerKernels(CpuDevice& device) {
  return std::make_unique<CpuOptimizerKernels>(device);
}

}  // namespace dim0::cpu
