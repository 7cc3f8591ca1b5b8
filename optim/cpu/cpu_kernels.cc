#include "optim/cpu/cpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "collectives/dtype.h"
#include "optim/cpu/adamw.h"
#include "optim/cpu/rmnp.h"
#include "optim/cpu/sign_momentum.h"
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

// Matrix `i` of `batch` that lie one below the other.
Tensor Nth(const Tensor& matrices, int64_t batch, int64_t i) {
  const int64_t rows = matrices.rows / batch;
  return Rows(matrices, i * rows, rows);
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

  void SignMomentum(Stream& stream, std::vector<SignMomentumTensor> tensors,
                    const SignMomentumArguments& arguments) override {
    const double elements = Elements(tensors);
    stream.Enqueue({.name = "sign_momentum",
                    .kind = OpKind::kOptimizer,
                    .flops = 6 * elements,
                    .bytes = ValueBytes(tensors) + 8 * elements},
                   [this, tensors = std::move(tensors), arguments](const OpContext&) {
                     if (std::isfinite(*arguments.gradient_scale)) {
                       UpdateSignMomentum(pool_, tensors, arguments);
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

  // A matrix by itself keeps all threads busy.
  int64_t matrix_elements_at_once() const override { return 0; }

  void Normalize(Stream& stream, int64_t batch, const Tensor& x, double length,
                 const Tensor& out) override {
    DIM0_CHECK(x.rows == out.rows && x.cols == out.cols);
    stream.Enqueue({.name = "normalize",
                    .kind = OpKind::kOptimizer,
                    .flops = 3.0 * x.size(),
                    .bytes = 2.0 * x.bytes() + out.bytes()},
                   [=, this](const OpContext&) {
                     for (int64_t i = 0; i < batch; ++i) {
                       WithElements(Nth(x, batch, i), [&](const auto* source) {
                         WithElements(Nth(out, batch, i), [&](auto* target) {
                           NormalizeElements(source, x.size() / batch, length, target);
                         });
                       });
                     }
                     return absl::OkStatus();
                   });
  }

  void SymmetricProduct(Stream& stream, int64_t batch, float alpha, const Tensor& x,
                        bool transposed, float beta, const Tensor& added,
                        const Tensor& c) override {
    const int64_t n = transposed ? x.cols : x.rows / batch;
    const int64_t k = transposed ? x.rows / batch : x.cols;
    DIM0_CHECK(c.rows == batch * n && c.cols == n);
    stream.Enqueue({.name = "symmetric_product",
                    .kind = OpKind::kOptimizer,
                    .flops = 1.0 * batch * n * (n + 1) * k,
                    .bytes = 4.0 * (x.size() + c.size())},
                   [=, this](const OpContext&) {
                     Prepare(beta, added, c);
                     for (int64_t i = 0; i < batch; ++i) {
                       cpu::SymmetricProduct(pool_, transposed ? Transpose::kYes : Transpose::kNo,
                                             n, k, alpha, Nth(x, batch, i).f32(), x.cols, beta,
                                             Nth(c, batch, i).f32(), n);
                     }
                     return absl::OkStatus();
                   });
  }

  void SymmetricMatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a, const Tensor& b,
                       float beta, const Tensor& added, const Tensor& c) override {
    const int64_t n = c.cols;
    for (const Tensor& square : {a, b, c}) {
      DIM0_CHECK(square.rows == batch * n && square.cols == n);
    }
    stream.Enqueue({.name = "symmetric_matmul",
                    .kind = OpKind::kOptimizer,
                    .flops = 1.0 * batch * n * (n + 1) * n,
                    .bytes = 4.0 * 3 * batch * n * n},
                   [=, this](const OpContext&) {
                     Prepare(beta, added, c);
                     for (int64_t i = 0; i < batch; ++i) {
                       cpu::SymmetricMatMul(pool_, n, alpha, Nth(a, batch, i).f32(),
                                            Nth(b, batch, i).f32(), beta, Nth(c, batch, i).f32());
                     }
                     return absl::OkStatus();
                   });
  }

  void MatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a, bool transpose_a,
              const Tensor& b, bool transpose_b, float beta, const Tensor& added,
              const Tensor& c) override {
    const int64_t m = transpose_a ? a.cols : a.rows / batch;
    const int64_t k = transpose_a ? a.rows / batch : a.cols;
    const int64_t n = transpose_b ? b.rows / batch : b.cols;
    DIM0_CHECK(c.rows == batch * m && c.cols == n && k == (transpose_b ? b.cols : b.rows / batch));
    stream.Enqueue({.name = "matmul",
                    .kind = OpKind::kOptimizer,
                    .flops = 2.0 * batch * m * k * n,
                    .bytes = 4.0 * (a.size() + b.size() + c.size())},
                   [=, this](const OpContext&) {
                     Prepare(beta, added, c);
                     for (int64_t i = 0; i < batch; ++i) {
                       Gemm(pool_, transpose_a ? Transpose::kYes : Transpose::kNo,
                            transpose_b ? Transpose::kYes : Transpose::kNo, m, n, k, alpha,
                            Nth(a, batch, i).f32(), a.cols, Nth(b, batch, i).f32(), b.cols, beta,
                            Nth(c, batch, i).f32(), n);
                     }
                     return absl::OkStatus();
                   });
  }

  void AddToDiagonal(Stream& stream, int64_t batch, const Tensor& c, float value) override {
    DIM0_CHECK(c.rows == batch * c.cols);
    stream.Enqueue({.name = "add_to_diagonal", .kind = OpKind::kOptimizer, .bytes = 8.0 * c.rows},
                   [=](const OpContext&) {
                     for (int64_t i = 0; i < c.rows; ++i) {
                       c.f32()[i * c.cols + i % c.cols] += value;
                     }
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

  // Lets a product add beta c where it is to add beta `added`.
  void Prepare(float beta, const Tensor& added, const Tensor& c) {
    if (beta == 0 || added.data == c.data) return;
    DIM0_CHECK(added.rows == c.rows && added.cols == c.cols);
    Convert(added.f32(), added.size(), c.f32());
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
