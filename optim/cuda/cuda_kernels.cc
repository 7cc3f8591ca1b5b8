#include "optim/cuda/cuda_kernels.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/cuda_status.h"
#include "optim/cuda/kernels.h"
#include "runtime/check.h"
#include "runtime/cuda/element_type.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/matmul.h"

namespace dim0::cuda {
namespace {

cudaStream_t StreamOf(const OpContext& context) {
  return static_cast<cudaStream_t>(context.native_stream);
}

ElementType TypeOf(const Tensor& tensor) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return ElementType::kFloat32;
    case DType::kBFloat16:
      return ElementType::kBFloat16;
    case DType::kFloat16:
      return ElementType::kFloat16;
    default:
      DIM0_CHECK(false);
  }
}

// Null where there is no copy.
__nv_bfloat16* CopyOf(const Tensor& copy, const Tensor& value) {
  if (copy.rows == 0) return nullptr;
  DIM0_CHECK(copy.dtype == DType::kBFloat16 && copy.size() == value.size());
  return static_cast<__nv_bfloat16*>(copy.data);
}

// Calls launch(types, items) for the tensors of each pair of types, which in a training run are all
// of them, with the items that item_of makes of them.
template <typename Item, typename TensorSet, typename ItemOf, typename LaunchItems>
cudaError_t ForEachTypes(const std::vector<TensorSet>& tensors, ItemOf item_of,
                         LaunchItems launch) {
  for (const ElementType value : {ElementType::kFloat32, ElementType::kBFloat16}) {
    for (const ElementType gradient : {ElementType::kFloat32, ElementType::kBFloat16}) {
      std::vector<Item> items;
      for (const TensorSet& tensor : tensors) {
        if (TypeOf(tensor.value) == value && TypeOf(tensor.gradient) == gradient) {
          items.push_back(item_of(tensor));
        }
      }
      if (items.empty()) continue;
      const cudaError_t error = launch(ValueTypes{value, gradient}, items);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

class CudaOptimizerKernels : public OptimizerKernels {
 public:
  explicit CudaOptimizerKernels(Device& device) : device_(device) {}
  ~CudaOptimizerKernels() override {
    if (sums_ != nullptr) device_.Free(sums_, kSumWorkspaceBytes);
  }

  void AdamW(Stream& stream, std::vector<AdamWTensor> tensors,
             const AdamWArguments& arguments) override {
    OpInfo info = {.name = "adamw", .kind = OpKind::kOptimizer};
    for (const AdamWTensor& tensor : tensors) {
      info.flops += 12.0 * tensor.value.size();
      info.bytes += 16.0 * tensor.value.size() + 2.0 * tensor.value.bytes() +
                    tensor.gradient.bytes() + tensor.copy.bytes();
    }
    stream.Enqueue(
        std::move(info), [tensors = std::move(tensors), arguments](const OpContext& context) {
          const auto step = static_cast<double>(arguments.step);
          const auto rounded = [](double value) { return static_cast<float>(value); };
          const AdamWCoefficients coefficients = {
              .beta1 = rounded(arguments.beta1),
              .fresh1 = rounded(1 - arguments.beta1),
              .beta2 = rounded(arguments.beta2),
              .fresh2 = rounded(1 - arguments.beta2),
              .step_size = rounded(arguments.lr / (1 - std::pow(arguments.beta1, step))),
              .root_correction = rounded(1 / std::sqrt(1 - std::pow(arguments.beta2, step))),
              .eps = rounded(arguments.eps)};
          const cudaError_t error = ForEachTypes<AdamWItem>(
              tensors,
              [&](const AdamWTensor& tensor) {
                return AdamWItem{.value = tensor.value.data,
                                 .gradient = tensor.gradient.data,
                                 .first_moment = tensor.first_moment.f32(),
                                 .second_moment = tensor.second_moment.f32(),
                                 .copy = CopyOf(tensor.copy, tensor.value),
                                 .size = tensor.value.size(),
                                 .keep = rounded(1 - arguments.lr * tensor.weight_decay)};
              },
              [&](ValueTypes types, const std::vector<AdamWItem>& items) {
                return LaunchAdamW(types, items, coefficients, arguments.gradient_scale,
                                   StreamOf(context));
              });
          return ToStatus(error, "adamw");
        });
  }

  void SignMomentum(Stream& stream, std::vector<SignMomentumTensor> tensors,
                    const SignMomentumArguments& arguments) override {
    OpInfo info = {.name = "sign_momentum", .kind = OpKind::kOptimizer};
    for (const SignMomentumTensor& tensor : tensors) {
      info.flops += 6.0 * tensor.value.size();
      info.bytes += 2.0 * (tensor.value.bytes() + tensor.momentum.bytes()) +
                    tensor.gradient.bytes() + tensor.copy.bytes();
    }
    stream.Enqueue(std::move(info),
                   [tensors = std::move(tensors), arguments](const OpContext& context) {
                     const auto rounded = [](double value) { return static_cast<float>(value); };
                     const SignMomentumCoefficients coefficients = {
                         .momentum = rounded(arguments.momentum),
                         .fresh = rounded(1 - arguments.momentum),
                         .lr = rounded(arguments.lr),
                         .keep = rounded(1 - arguments.lr * arguments.weight_decay)};
                     const cudaError_t error = ForEachTypes<SignMomentumItem>(
                         tensors,
                         [&](const SignMomentumTensor& tensor) {
                           return SignMomentumItem{.value = tensor.value.data,
                                                   .gradient = tensor.gradient.data,
                                                   .momentum = tensor.momentum.f32(),
                                                   .copy = CopyOf(tensor.copy, tensor.value),
                                                   .size = tensor.value.size()};
                         },
                         [&](ValueTypes types, const std::vector<SignMomentumItem>& items) {
                           return LaunchSignMomentum(types, items, coefficients,
                                                     arguments.gradient_scale, StreamOf(context));
                         });
                     return ToStatus(error, "sign_momentum");
                   });
  }

  void Rmnp(Stream& stream, std::vector<RmnpTensor> matrices,
            const RmnpArguments& arguments) override {
    EnqueueRmnp(stream, RmnpPhase::kUpdate, std::move(matrices), arguments);
  }
  void RmnpRowSquares(Stream& stream, std::vector<RmnpTensor> parts,
                      const RmnpArguments& arguments) override {
    EnqueueRmnp(stream, RmnpPhase::kRowSquares, std::move(parts), arguments);
  }
  void RmnpApply(Stream& stream, std::vector<RmnpTensor> parts,
                 const RmnpArguments& arguments) override {
    EnqueueRmnp(stream, RmnpPhase::kApply, std::move(parts), arguments);
  }

  void Momentum(Stream& stream, const Tensor& gradient, const Tensor& momentum, float mu,
                bool nesterov, const float* gradient_scale, const Tensor& out) override {
    const int64_t size = gradient.size();
    DIM0_CHECK(momentum.size() == size && out.size() == size);
    stream.Enqueue(
        {.name = "momentum",
         .kind = OpKind::kOptimizer,
         .flops = 4.0 * size,
         .bytes = static_cast<double>(gradient.bytes() + 2 * momentum.bytes() + out.bytes())},
        [=](const OpContext& context) {
          return ToStatus(
              LaunchMomentum(TypeOf(gradient), gradient.data, momentum.f32(), size, mu, nesterov,
                             gradient_scale, TypeOf(out), out.data, StreamOf(context)),
              "momentum");
        });
  }

  void ApplyUpdate(Stream& stream, const Tensor& value, const Tensor& copy, const Tensor& update,
                   float step, float decay, const float* gradient_scale) override {
    const int64_t size = value.size();
    DIM0_CHECK(update.size() == size);
    stream.Enqueue(
        {.name = "apply_update",
         .kind = OpKind::kOptimizer,
         .flops = 3.0 * size,
         .bytes = static_cast<double>(2 * value.bytes() + copy.bytes() + update.bytes())},
        [=](const OpContext& context) {
          return ToStatus(
              LaunchApplyUpdate(TypeOf(value), value.data, TypeOf(update), update.data, size, step,
                                1 - decay, gradient_scale, CopyOf(copy, value), StreamOf(context)),
              "apply_update");
        });
  }

  absl::Status Prepare() override {
    if (products_ == nullptr) {
      DIM0_ASSIGN_OR_RETURN(products_, cuda::MatMul::Create());
    }
    if (sums_ == nullptr) {
      DIM0_ASSIGN_OR_RETURN(sums_, device_.Allocate(kSumWorkspaceBytes));
    }
    return absl::OkStatus();
  }

  // At the rate of bfloat16, and eight times as accurate; what Newton-Schulz makes is far from the
  // ends of its range. In bfloat16, the Gram algorithm loses the small singular values altogether.
  DType matrix_dtype() const override { return DType::kFloat16; }

  // Ten matrices of 1280 x 1280, whose tiles are several times as many as a large GPU takes at
  // once.
  int64_t matrix_elements_at_once() const override { return int64_t{1} << 24; }

  void Normalize(Stream& stream, int64_t batch, const Tensor& x, double length,
                 const Tensor& out) override {
    DIM0_CHECK(x.size() == out.size());
    stream.Enqueue({.name = "normalize",
                    .kind = OpKind::kOptimizer,
                    .flops = 3.0 * x.size(),
                    .bytes = static_cast<double>(2 * x.bytes() + out.bytes())},
                   [=, this](const OpContext& context) -> absl::Status {
                     DIM0_RETURN_IF_ERROR(Prepare());
                     return ToStatus(
                         LaunchNormalize(TypeOf(x), x.data, x.size() / batch, batch, length,
                                         TypeOf(out), out.data, sums_, StreamOf(context)),
                         "normalize");
                   });
  }

  // cuBLAS has no symmetric product of matrices of 16-bit floats: both triangles are computed.
  void SymmetricProduct(Stream& stream, int64_t batch, float alpha, const Tensor& x,
                        bool transposed, float beta, const Tensor& added,
                        const Tensor& c) override {
    EnqueueProduct(stream, "symmetric_product", batch, alpha, x, transposed, x, !transposed, beta,
                   added, c);
  }

  void SymmetricMatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a, const Tensor& b,
                       float beta, const Tensor& added, const Tensor& c) override {
    EnqueueProduct(stream, "symmetric_matmul", batch, alpha, a, false, b, false, beta, added, c);
  }

  void MatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a, bool transpose_a,
              const Tensor& b, bool transpose_b, float beta, const Tensor& added,
              const Tensor& c) override {
    EnqueueProduct(stream, "matmul", batch, alpha, a, transpose_a, b, transpose_b, beta, added, c);
  }

  void AddToDiagonal(Stream& stream, int64_t batch, const Tensor& c, float value) override {
    DIM0_CHECK(c.rows == batch * c.cols);
    stream.Enqueue({.name = "add_to_diagonal",
                    .kind = OpKind::kOptimizer,
                    .bytes = 2.0 * c.rows * SizeOf(c.dtype)},
                   [=](const OpContext& context) {
                     return ToStatus(LaunchAddToDiagonal(TypeOf(c), c.data, c.cols, batch, value,
                                                         StreamOf(context)),
                                     "add_to_diagonal");
                   });
  }

  void Copy(Stream& stream, const Tensor& source, const Tensor& target) override {
    DIM0_CHECK(source.size() == target.size());
    stream.Enqueue({.name = "copy",
                    .kind = OpKind::kOptimizer,
                    .bytes = static_cast<double>(source.bytes() + target.bytes())},
                   [=](const OpContext& context) {
                     return ToStatus(LaunchCast(TypeOf(source), source.data, source.size(),
                                                TypeOf(target), target.data, StreamOf(context)),
                                     "copy");
                   });
  }

 private:
  void EnqueueRmnp(Stream& stream, RmnpPhase phase, std::vector<RmnpTensor> matrices,
                   const RmnpArguments& arguments) {
    struct Cost {
      const char* name;
      double flops;
      int value_passes, momentum_passes;
    };
    constexpr std::array<Cost, 3> kCosts = {{
        {"rmnp", 8, 2, 2},              // kUpdate
        {"rmnp_row_squares", 6, 0, 2},  // kRowSquares
        {"rmnp_apply", 5, 2, 1},        // kApply
    }};
    const Cost& cost = kCosts[static_cast<size_t>(phase)];
    OpInfo info = {.name = cost.name, .kind = OpKind::kOptimizer};
    for (const RmnpTensor& matrix : matrices) {
      const int64_t copied = cost.value_passes > 0 ? matrix.copy.bytes() : 0;
      info.flops += cost.flops * matrix.value.size();
      info.bytes += cost.value_passes * matrix.value.bytes() + matrix.gradient.bytes() +
                    cost.momentum_passes * matrix.momentum.bytes() + copied;
    }
    stream.Enqueue(std::move(info),
                   [=, name = cost.name, matrices = std::move(matrices)](const OpContext& context) {
                     const RmnpCoefficients coefficients = {
                         .momentum = static_cast<float>(arguments.momentum),
                         .nesterov = arguments.nesterov,
                         .keep = static_cast<float>(1 - arguments.lr * arguments.weight_decay),
                         .eps = arguments.eps,
                         .power = arguments.power};
                     const cudaError_t error = ForEachTypes<RmnpItem>(
                         matrices,
                         [&](const RmnpTensor& matrix) {
                           return RmnpItem{.value = matrix.value.data,
                                           .gradient = matrix.gradient.data,
                                           .momentum = matrix.momentum.f32(),
                                           .copy = CopyOf(matrix.copy, matrix.value),
                                           .row_squares = matrix.row_squares,
                                           .rows = matrix.value.rows,
                                           .cols = matrix.value.cols,
                                           .step = arguments.lr * matrix.scale};
                         },
                         [&](ValueTypes types, const std::vector<RmnpItem>& items) {
                           return LaunchRmnp(phase, types, items, coefficients,
                                             arguments.gradient_scale, StreamOf(context));
                         });
                     return ToStatus(error, name);
                   });
  }

  void EnqueueProduct(Stream& stream, const char* name, int64_t batch, float alpha, const Tensor& a,
                      bool transpose_a, const Tensor& b, bool transpose_b, float beta,
                      const Tensor& added, const Tensor& c) {
    const int64_t a_rows = a.rows / batch, b_rows = b.rows / batch;
    const Product product = {.m = transpose_a ? a.cols : a_rows,
                             .n = transpose_b ? b_rows : b.cols,
                             .k = transpose_a ? a_rows : a.cols,
                             .transpose_a = transpose_a,
                             .transpose_b = transpose_b,
                             .alpha = alpha,
                             .beta = beta,
                             .type = a.dtype,
                             .c_type = c.dtype,
                             .a = a.data,
                             .b = b.data,
                             .c = c.data,
                             .added = added.data,
                             .batch = batch};
    DIM0_CHECK(c.rows == batch * product.m && c.cols == product.n && b.dtype == a.dtype &&
               product.k == (transpose_b ? b.cols : b_rows) && added.rows == c.rows &&
               added.cols == c.cols && added.dtype == c.dtype);
    stream.Enqueue({.name = name,
                    .kind = OpKind::kOptimizer,
                    .flops = 2.0 * batch * product.m * product.n * product.k,
                    .bytes = static_cast<double>(a.bytes() + b.bytes() + c.bytes())},
                   [this, product](const OpContext& context) -> absl::Status {
                     DIM0_RETURN_IF_ERROR(Prepare());
                     return products_->Enqueue(product, StreamOf(context));
                   });
  }

  Device& device_;
  std::unique_ptr<cuda::MatMul> products_;
  void* sums_ = nullptr;  // the workspace of Normalize
};

}  // namespace

std::unique_ptr<OptimizerKernels> CreateOptimizerKernels(Device& device) {
  return std::make_unique<CudaOptimizerKernels>(device);
}

}  // namespace dim0::cuda
