#include "model/cuda/cuda_kernels.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "collectives/cuda_status.h"
#include "model/cuda/launch.h"
#include "runtime/check.h"
#include "runtime/cuda/cuda_device.h"
#include "runtime/cuda/matmul.h"

namespace dim0::cuda {
namespace {

Array ArrayOf(const Tensor& tensor) {
  DIM0_CHECK(tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kBFloat16);
  return {tensor.data,
          tensor.dtype == DType::kBFloat16 ? ElementType::kBFloat16 : ElementType::kFloat32};
}

cudaStream_t NativeStream(const OpContext& context) {
  return static_cast<cudaStream_t>(context.native_stream);
}

bool HasShape(const Tensor& tensor, int64_t rows, int64_t cols) {
  return tensor.rows == rows && tensor.cols == cols;
}

bool SameTypes(std::initializer_list<Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const Tensor& tensor) { return tensor.dtype == tensors.begin()->dtype; });
}

// What is read and written if each of these is passed over once.
double Bytes(std::initializer_list<Tensor> tensors) {
  double bytes = 0;
  for (const Tensor& tensor : tensors) bytes += static_cast<double>(tensor.bytes());
  return bytes;
}
// Of the first `cols` columns.
double Bytes(const Tensor& tensor, int64_t cols) {
  return 1.0 * tensor.rows * cols * SizeOf(tensor.dtype);
}

class CudaKernels : public Kernels {
 public:
  explicit CudaKernels(bool fuses_gelu) : fuses_gelu_(fuses_gelu) {}

  ModelTypes TypesFor(DType gathered, DType reduced) const override {
    // Tensor cores want both operands of a product in one type, and cuBLASLt writes bfloat16 sums
    // of bfloat16 products only.
    return {.parameters = gathered,
            .activations = gathered,
            .gradients = gathered == DType::kFloat32 ? DType::kFloat32 : reduced};
  }

  absl::Status Prepare() override {
    if (matmul_ == nullptr) {
      DIM0_ASSIGN_OR_RETURN(matmul_, MatMul::Create());
    }
    return absl::OkStatus();
  }

  int64_t WorkspaceBytes(int64_t tokens, int64_t width, int64_t heads) const override {
    const int64_t floats = std::max(WorkspaceFloats(tokens, width), tokens * heads);
    return floats * static_cast<int64_t>(sizeof(float));
  }
  void SetWorkspace(void* workspace) override { workspace_ = static_cast<float*>(workspace); }

  void EmbeddingForward(Stream& stream, const int32_t* tokens, int64_t seq_len, const Tensor& wte,
                        const Tensor& wpe, const Tensor& out) override {
    const int64_t count = out.rows, width = out.cols;
    DIM0_CHECK(wte.cols == width && wpe.cols == width && wpe.rows >= seq_len);
    DIM0_CHECK(seq_len > 0 && count % seq_len == 0 && SameTypes({wte, wpe}));
    // A row of each table for each row of `out`.
    const double table_bytes = 2.0 * count * width * SizeOf(wte.dtype);
    OpInfo info{.name = "embedding_forward",
                .flops = 1.0 * count * width,
                .bytes = Bytes({out}) + table_bytes + 4.0 * count};
    stream.Enqueue(std::move(info), [=](const OpContext& context) {
      return ToStatus(LaunchEmbeddingForward(tokens, count, seq_len, wte.rows, width, ArrayOf(wte),
                                             ArrayOf(wpe), ArrayOf(out), NativeStream(context)),
                      "embedding_forward");
    });
  }

  void EmbeddingBackward(Stream& stream, const int32_t* tokens, int64_t seq_len, const Tensor& dout,
                         const Tensor& dwte, const Tensor& dwpe) override {
    const int64_t count = dout.rows, width = dout.cols;
    DIM0_CHECK(dwte.cols == width && dwpe.cols == width && dwpe.rows >= seq_len);
    DIM0_CHECK(seq_len > 0 && count % seq_len == 0 && SameTypes({dwte, dwpe}));
    // Each element of dout is added to one of dwte and one of dwpe.
    OpInfo info{.name = "embedding_backward",
                .flops = 2.0 * count * width,
                .bytes = 2 * Bytes({dout}) + Bytes({dwte, dwpe}) + 4.0 * count};
    stream.Enqueue(std::move(info), [=](const OpContext& context) {
      return ToStatus(LaunchEmbeddingBackward(tokens, count, seq_len, dwte.rows, dwpe.rows, width,
                                              ArrayOf(dout), ArrayOf(dwte), ArrayOf(dwpe),
                                              NativeStream(context)),
                      "embedding_backward");
    });
  }

  void LayerNormForward(Stream& stream, const Tensor& x, const Tensor& gain, const Tensor& bias,
                        const Tensor& y, const Tensor& mean, const Tensor& rstd) override {
    DIM0_CHECK(HasShape(y, x.rows, x.cols) && SameTypes({x, y}));
    // Per element: one operation for the mean, three for the variance, four for y.
    EnqueueLayerNorm(stream,
                     {.name = "layer_norm_forward",
                      .flops = 8.0 * x.size(),
                      .bytes = Bytes({x, gain, bias, y, mean, rstd})},
                     x, Tensor(), gain, bias, Tensor(), y, mean, rstd);
  }

  void AddLayerNormForward(Stream& stream, const Tensor& x, const Tensor& delta, const Tensor& gain,
                           const Tensor& bias, const Tensor& sum, const Tensor& y,
                           const Tensor& mean, const Tensor& rstd) override {
    DIM0_CHECK(HasShape(delta, x.rows, x.cols) && HasShape(sum, x.rows, x.cols));
    DIM0_CHECK(HasShape(y, x.rows, x.cols) && SameTypes({x, delta, sum, y}));
    EnqueueLayerNorm(stream,
                     {.name = "add_layer_norm_forward",
                      .flops = 9.0 * x.size(),
                      .bytes = Bytes({x, delta, gain, bias, sum, y, mean, rstd})},
                     x, delta, gain, bias, sum, y, mean, rstd);
  }

  void LayerNormBackward(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& gain,
                         const Tensor& mean, const Tensor& rstd, const Tensor& dx, Write write_dx,
                         const Tensor& dgain, const Tensor& dbias,
                         Write write_parameters) override {
    const int64_t tokens = x.rows, width = x.cols;
    DIM0_CHECK(HasShape(dy, tokens, width) && HasShape(dx, tokens, width));
    DIM0_CHECK(gain.size() == width && dgain.size() == width && dbias.size() == width);
    DIM0_CHECK(mean.size() == tokens && rstd.size() == tokens);
    DIM0_CHECK(SameTypes({dy, x, dx}) && SameTypes({dgain, dbias}));
    const bool adds_dx = write_dx == Write::kAccumulate;
    const bool adds = write_parameters == Write::kAccumulate;
    // Per element: six operations for the two averages, six for dx, five for dgain and dbias.
    OpInfo info{.name = "layer_norm_backward",
                .flops = 17.0 * tokens * width,
                .bytes = Bytes({dy, x, gain, mean, rstd}) + (adds_dx ? 2 : 1) * Bytes({dx}) +
                         (adds ? 2 : 1) * Bytes({dgain, dbias})};
    stream.Enqueue(std::move(info), [=, this](const OpContext& context) {
      return ToStatus(
          LaunchLayerNormBackward(ArrayOf(dy), ArrayOf(x), ArrayOf(gain), mean.f32(), rstd.f32(),
                                  ArrayOf(dx), adds_dx, ArrayOf(dgain), ArrayOf(dbias), adds,
                                  tokens, width, workspace_, NativeStream(context)),
          "layer_norm_backward");
    });
  }

  void LinearForward(Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias,
                     const Tensor& y) override {
    EnqueueForward(stream, "linear_forward", ForwardProduct(x, weight, bias, y),
                   Bytes({x, weight}) + Bytes(y, weight.rows));
  }

  void LinearAddForward(Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const Tensor& residual, const Tensor& y) override {
    DIM0_CHECK(HasShape(residual, x.rows, weight.rows) && HasShape(y, x.rows, weight.rows));
    DIM0_CHECK(SameTypes({residual, y}));
    Product product = ForwardProduct(x, weight, bias, y);
    product.beta = 1;
    product.added = residual.data;
    EnqueueForward(stream, "linear_add_forward", product, Bytes({x, weight, residual, y}));
  }

  void LinearGeluForward(Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor& up, const Tensor& y) override {
    DIM0_CHECK(HasShape(up, x.rows, weight.rows) && HasShape(y, x.rows, weight.rows));
    DIM0_CHECK(SameTypes({up, y}));
    Product product = ForwardProduct(x, weight, bias, y);
    product.before_gelu = up.data;
    OpInfo info{.name = "linear_gelu_forward",
                .flops = Flops(product) + 30.0 * y.size(),
                .bytes = Bytes({x, weight, up, y})};
    stream.Enqueue(std::move(info), [=, this](const OpContext& context) -> absl::Status {
      if (fuses_gelu_ && CanFuseGelu(product)) return Enqueue(product, context);
      Product plain = product;
      plain.before_gelu = nullptr;
      plain.c = up.data;
      DIM0_RETURN_IF_ERROR(Enqueue(plain, context));
      return ToStatus(LaunchGeluForward(ArrayOf(up), ArrayOf(y), y.size(), NativeStream(context)),
                      "linear_gelu_forward");
    });
  }

  void LinearBackward(Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight,
                      const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                      Write write) override {
    const bool wants_dx = dx.rows > 0;
    DIM0_CHECK(!wants_dx || HasShape(dx, x.rows, x.cols));
    EnqueueBackward(stream, "linear_backward", dy, x, weight, dx, dweight, dbias, write,
                    /*up=*/Tensor());
  }

  void GeluLinearBackward(Stream& stream, const Tensor& dy, const Tensor& up, const Tensor& x,
                          const Tensor& weight, const Tensor& dup, const Tensor& dweight,
                          const Tensor& dbias, Write write) override {
    DIM0_CHECK(HasShape(up, x.rows, x.cols) && HasShape(dup, x.rows, x.cols));
    DIM0_CHECK(SameTypes({up, x, dup}));
    EnqueueBackward(stream, "gelu_linear_backward", dy, x, weight, dup, dweight, dbias, write, up);
  }

  void AttentionForward(Stream& stream, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& logsumexp) override {
    CheckAttention(shape, qkv, out, logsumexp);
    // Two products; qkv is read once and out written once.
    OpInfo info{.name = "attention_forward",
                .flops = 2 * AttentionProductFlops(shape, out.cols),
                .bytes = Bytes({qkv, out, logsumexp})};
    stream.Enqueue(std::move(info), [=](const OpContext& context) {
      return ToStatus(LaunchAttentionForward(SizeOfHeads(shape, out.cols), ArrayOf(qkv),
                                             ArrayOf(out), logsumexp.f32(), NativeStream(context)),
                      "attention_forward");
    });
  }

  void AttentionBackward(Stream& stream, const AttentionShape& shape, const Tensor& dout,
                         const Tensor& qkv, const Tensor& out, const Tensor& logsumexp,
                         const Tensor& dqkv) override {
    CheckAttention(shape, qkv, out, logsumexp);
    DIM0_CHECK(HasShape(dout, out.rows, out.cols) && HasShape(dqkv, qkv.rows, qkv.cols));
    DIM0_CHECK(SameTypes({dout, out, dqkv}));
    // Five products, the recomputed scores' included; qkv, out and dout are read, dqkv written.
    OpInfo info{.name = "attention_backward",
                .flops = 5 * AttentionProductFlops(shape, out.cols),
                .bytes = Bytes({qkv, out, dout, dqkv, logsumexp})};
    stream.Enqueue(std::move(info), [=, this](const OpContext& context) {
      return ToStatus(LaunchAttentionBackward(SizeOfHeads(shape, out.cols), ArrayOf(dout),
                                              ArrayOf(qkv), ArrayOf(out), logsumexp.f32(),
                                              ArrayOf(dqkv), workspace_, NativeStream(context)),
                      "attention_backward");
    });
  }

  void AttentionDecode(Stream& stream, int64_t heads, int64_t position, const Tensor& qkv,
                       const Tensor& keys, const Tensor& values, const Tensor& out) override {
    const int64_t width = out.cols, count = position + 1;
    DIM0_CHECK(heads > 0 && width % heads == 0 && out.rows == 1 && HasShape(qkv, 1, 3 * width));
    DIM0_CHECK(0 <= position && position < keys.rows && position < values.rows);
    DIM0_CHECK(keys.cols == width && values.cols == width);
    DIM0_CHECK(SameTypes({qkv, keys, values, out}));
    // Two products of one query with each cached row.
    OpInfo info{.name = "attention_decode",
                .flops = 4.0 * count * width,
                .bytes = 2.0 * count * width * SizeOf(keys.dtype)};
    stream.Enqueue(std::move(info), [=](const OpContext& context) {
      return ToStatus(
          LaunchAttentionDecode(heads, width / heads, position, ArrayOf(qkv), ArrayOf(keys),
                                ArrayOf(values), ArrayOf(out), NativeStream(context)),
          "attention_decode");
    });
  }

  void CrossEntropyForward(Stream& stream, const Tensor& logits, int64_t vocabulary,
                           const int32_t* targets, double* loss_sum) override {
    EnqueueCrossEntropy(stream,
                        // About 20 operations an element, the exponential's included.
                        {.name = "cross_entropy_forward",
                         .flops = 20.0 * logits.rows * vocabulary,
                         .bytes = Bytes(logits, vocabulary) + 4.0 * logits.rows},
                        logits, vocabulary, targets, /*write_gradient=*/false, 0.0f, loss_sum);
  }

  void CrossEntropyForwardBackward(Stream& stream, const Tensor& logits, int64_t vocabulary,
                                   const int32_t* targets, float scale, double* loss_sum) override {
    EnqueueCrossEntropy(stream,
                        {.name = "cross_entropy_forward_backward",
                         .flops = 40.0 * logits.rows * vocabulary,
                         .bytes = 2 * Bytes(logits, vocabulary) + 4.0 * logits.rows},
                        logits, vocabulary, targets, /*write_gradient=*/true, scale, loss_sum);
  }

 private:
  static double Flops(const Product& product) { return 2.0 * product.m * product.n * product.k; }

  static Product ForwardProduct(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                const Tensor& y) {
    DIM0_CHECK(weight.cols == x.cols && y.rows == x.rows && y.cols >= weight.rows);
    DIM0_CHECK(bias.rows == 0 || bias.size() == weight.rows);
    DIM0_CHECK(SameTypes({x, weight}) && (bias.rows == 0 || SameTypes({bias, y})));
    return {.m = x.rows,
            .n = weight.rows,
            .k = x.cols,
            .transpose_b = true,
            .type = x.dtype,
            .c_type = y.dtype,
            .a = x.data,
            .b = weight.data,
            .c = y.data,
            .c_row_length = y.cols,
            .bias = bias.rows == 0 ? nullptr : bias.data};
  }

  void EnqueueForward(Stream& stream, const char* name, const Product& product, double bytes) {
    OpInfo info{.name = name, .flops = Flops(product), .bytes = bytes};
    stream.Enqueue(std::move(info),
                   [=, this](const OpContext& context) { return Enqueue(product, context); });
  }

  // dx and `up` may be empty: then no dx, or no GELU.
  void EnqueueBackward(Stream& stream, const char* name, const Tensor& dy, const Tensor& x,
                       const Tensor& weight, const Tensor& dx, const Tensor& dweight,
                       const Tensor& dbias, Write write, const Tensor& up) {
    const int64_t tokens = x.rows, in = x.cols, out = weight.rows;
    DIM0_CHECK(weight.cols == in && dy.rows == tokens && dy.cols >= out);
    DIM0_CHECK(HasShape(dweight, out, in));
    DIM0_CHECK(dbias.rows == 0 || (dbias.size() == out && dy.cols == out));
    DIM0_CHECK(SameTypes({x, weight, dy}));
    const bool wants_dx = dx.rows > 0, has_gelu = up.rows > 0, has_bias = dbias.rows > 0;
    const bool accumulates = write == Write::kAccumulate;
    const Product input = {.m = tokens,
                           .n = in,
                           .k = out,
                           .type = dy.dtype,
                           .c_type = dx.dtype,
                           .a = dy.data,
                           .b = weight.data,
                           .c = dx.data,
                           .a_row_length = dy.cols,
                           .gelu_at = has_gelu ? up.data : nullptr};
    const Product parameters = {.m = out,
                                .n = in,
                                .k = tokens,
                                .transpose_a = true,
                                .beta = accumulates ? 1.0f : 0.0f,
                                .type = dy.dtype,
                                .c_type = dweight.dtype,
                                .a = dy.data,
                                .b = x.data,
                                .c = dweight.data,
                                .a_row_length = dy.cols};
    const double dy_bytes = Bytes(dy, out);
    OpInfo info{.name = name,
                .flops = (wants_dx ? Flops(input) : 0.0) + Flops(parameters) +
                         (has_bias ? 1.0 * tokens * out : 0.0) +
                         (has_gelu ? 40.0 * dx.size() : 0.0),
                .bytes = (wants_dx ? dy_bytes + Bytes({weight, dx}) : 0.0) + dy_bytes +
                         Bytes({x, dweight}) + (has_gelu ? Bytes({up}) : 0.0) +
                         (has_bias ? dy_bytes : 0.0)};
    stream.Enqueue(std::move(info), [=, this](const OpContext& context) -> absl::Status {
      const cudaStream_t native = NativeStream(context);
      if (wants_dx && has_gelu && !(fuses_gelu_ && CanFuseGelu(input))) {
        // The product is rounded before its factor is applied.
        Product plain = input;
        plain.gelu_at = nullptr;
        DIM0_RETURN_IF_ERROR(Enqueue(plain, context));
        DIM0_RETURN_IF_ERROR(ToStatus(
            LaunchGeluBackward(ArrayOf(dx), ArrayOf(up), ArrayOf(dx), dx.size(), native), name));
      } else if (wants_dx) {
        DIM0_RETURN_IF_ERROR(Enqueue(input, context));
      }
      DIM0_RETURN_IF_ERROR(Enqueue(parameters, context));
      if (!has_bias) return absl::OkStatus();
      return ToStatus(LaunchColumnSums(ArrayOf(dy), tokens, out, ArrayOf(dbias), accumulates,
                                       workspace_, native),
                      name);
    });
  }

  // delta and sum may be empty.
  void EnqueueLayerNorm(Stream& stream, OpInfo info, const Tensor& x, const Tensor& delta,
                        const Tensor& gain, const Tensor& bias, const Tensor& sum, const Tensor& y,
                        const Tensor& mean, const Tensor& rstd) {
    DIM0_CHECK(gain.size() == x.cols && bias.size() == x.cols && SameTypes({gain, bias}));
    DIM0_CHECK(mean.size() == x.rows && rstd.size() == x.rows);
    const char* const name = delta.rows > 0 ? "add_layer_norm_forward" : "layer_norm_forward";
    stream.Enqueue(std::move(info), [=](const OpContext& context) {
      return ToStatus(LaunchLayerNormForward(ArrayOf(x), ArrayOf(delta), ArrayOf(gain),
                                             ArrayOf(bias), ArrayOf(sum), ArrayOf(y), mean.f32(),
                                             rstd.f32(), x.rows, x.cols, NativeStream(context)),
                      name);
    });
  }

  void EnqueueCrossEntropy(Stream& stream, OpInfo info, const Tensor& logits, int64_t vocabulary,
                           const int32_t* targets, bool write_gradient, float scale,
                           double* loss_sum) {
    DIM0_CHECK(vocabulary <= logits.cols);
    stream.Enqueue(std::move(info), [=, this](const OpContext& context) {
      return ToStatus(
          LaunchCrossEntropy(ArrayOf(logits), targets, logits.rows, vocabulary, logits.cols,
                             write_gradient, scale, loss_sum, workspace_, NativeStream(context)),
          "cross_entropy");
    });
  }

  static void CheckAttention(const AttentionShape& shape, const Tensor& qkv, const Tensor& out,
                             const Tensor& logsumexp) {
    const int64_t width = out.cols, tokens = shape.batch * shape.seq_len;
    DIM0_CHECK(shape.heads > 0 && width % shape.heads == 0);
    DIM0_CHECK(out.rows == tokens && HasShape(qkv, tokens, 3 * width) && SameTypes({qkv, out}));
    DIM0_CHECK(HasShape(logsumexp, shape.batch * shape.heads, shape.seq_len));
  }

  static AttentionSize SizeOfHeads(const AttentionShape& shape, int64_t width) {
    return {shape.batch, shape.seq_len, shape.heads, width / shape.heads};
  }

  // Of one causal product: T (T + 1) / 2 pairs of a query and a key, D multiply-adds each, for each
  // head of each sequence.
  static double AttentionProductFlops(const AttentionShape& shape, int64_t width) {
    return 1.0 * shape.batch * shape.seq_len * (shape.seq_len + 1) * width;
  }

  absl::Status Enqueue(const Product& product, const OpContext& context) {
    DIM0_RETURN_IF_ERROR(Prepare());
    return matmul_->Enqueue(product, NativeStream(context));
  }

  const bool fuses_gelu_;
  std::unique_ptr<MatMul> matmul_;
  float* workspace_ = nullptr;
};

}  // namespace

std::unique_ptr<Kernels> CreateCudaKernels(Device& device) {
  const int generation = static_cast<CudaDevice&>(device).compute_capability_major();
  return std::make_unique<CudaKernels>(GeluFusionPays(generation));
}

}  // namespace dim0::cuda
