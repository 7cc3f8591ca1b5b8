// GPT-2 as the engine sees it: one unit per block, and the root unit (token and position
// embeddings, final norm), which the head needs whole, the token table being tied to it, and in
// which the first stage looks up the rows of its tokens and positions.
//
// Pre-norm blocks with biases, learned positions, LayerNorm eps 1e-5, GELU in its tanh form.
// N = B*T tokens of a micro-batch, C = width, V = vocabulary, P = positions.
#ifndef DIM0_MODEL_GPT2_H_
#define DIM0_MODEL_GPT2_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/kernels.h"
#include "runtime/model.h"

namespace dim0 {

struct Gpt2Config {
  int64_t layers = 12;
  int64_t width = 768;
  int64_t heads = 12;
  int64_t vocab = 50257;
  int64_t positions = 1024;   // the longest sequence
  double init_stddev = 0.02;  // of the weights at the start

  // Every count positive, width divisible by heads; the message names the flag to change.
  absl::Status Validate() const;
};

// "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl". Error: NotFound, listing these.
absl::StatusOr<Gpt2Config> Gpt2Preset(absl::string_view name);

// The parameters by unit: root first, then h.0, h.1, ... Names are Hugging Face's; weights are
// [out, in]. Weights are N(0, 0.02), those that write into the residual stream N(0, 0.02 / sqrt(2
// layers)); biases 0.
std::vector<UnitSpec> Gpt2Units(const Gpt2Config& config);

// Whether Hugging Face stores the weight [in, out], the transpose of ours: true of the four of each
// block.
inline bool Gpt2StoredTransposed(const ParameterSpec& spec) {
  return spec.role == ParameterRole::kMatrix;
}

// The shape in Hugging Face's config.json, and back. Error: which field is missing or is no size.
std::string Gpt2ConfigJson(const Gpt2Config& config);
absl::StatusOr<Gpt2Config> ParseGpt2ConfigJson(absl::string_view json);

class Gpt2 : public Model {
 public:
  // `config` is valid. With `recompute` a block keeps only its input and runs its forward again in
  // backward. `device` outlives the model. What it computes in follows from the types in which
  // parameters will be gathered and gradients reduced; see Kernels::TypesFor.
  Gpt2(const Gpt2Config& config, bool recompute, Device& device, DType gathered = DType::kFloat32,
       DType reduced = DType::kFloat32);

  absl::Span<const UnitSpec> units() const override { return units_; }
  absl::Span<const Stage> stages() const override { return stages_; }
  DType parameter_dtype() const override { return types_.parameters; }
  DType gradient_dtype() const override { return types_.gradients; }
  absl::Status Allocate(Allocator& allocator, int64_t sequences, int64_t seq_len,
                        bool training) override;
  std::vector<std::vector<int32_t>> RowUses(const Batch& batch) const override;
  void Begin(Stream& stream, const Batch& batch, absl::Span<const std::vector<int32_t>> uses,
             float gradient_scale) override;
  void Forward(int stage, absl::Span<const Tensor> parameters, bool training, double* loss_sum,
               Stream& stream) override;
  void Backward(int stage, absl::Span<const Tensor> parameters, absl::Span<const Tensor> gradients,
                bool accumulate, Stream& stream) override;
  double FlopsPerToken(int64_t seq_len) const override;

  // [N, LogitColumns(V)], activations: in each row's first V columns the logits of the last forward
  // without training, or their gradient after one with.
  Tensor logits() const { return View(logits_, LogitColumns(config_.vocab)); }

 private:
  // What a block's forward leaves for its backward. Buffers hold [max N, ...], mean, rstd and
  // logsumexp in float32.
  struct BlockActivations {
    Buffer norm1, mean1, rstd1;  // [N, C], [N], [N]
    Buffer qkv;                  // [N, 3C]
    Buffer attention;            // [N, C]
    Buffer logsumexp;            // [B*H, T]
    Buffer middle;               // [N, C], the residual stream after attention
    Buffer norm2, mean2, rstd2;  // as norm1
    Buffer up, gelu;             // [N, 4C]
  };

  int64_t tokens() const { return batch_size_ * seq_len_; }
  // `buffer` as activations [N, cols] of the current micro-batch.
  Tensor View(const Buffer& buffer, int64_t cols) const;
  // `buffer` as float32 [N].
  Tensor PerToken(const Buffer& buffer) const;
  // The block's logsumexp, float32 [B*H, T].
  Tensor LogSumExp(const BlockActivations& a) const;
  AttentionShape attention_shape() const { return {batch_size_, seq_len_, config_.heads}; }
  BlockActivations& activations(int64_t layer) { return blocks_[layer % blocks_.size()]; }
  const Buffer& residual(int64_t layer) const { return residual_[layer % residual_.size()]; }

  void BlockForward(int64_t layer, absl::Span<const Tensor> p, bool with_output, Stream& stream);
  void BlockBackward(int64_t layer, absl::Span<const Tensor> p, absl::Span<const Tensor> g,
                     Write write, Stream& stream);

  const Gpt2Config config_;
  const bool recompute_;
  Device& device_;
  const std::unique_ptr<Kernels> kernels_;
  const ModelTypes types_;
  const std::vector<UnitSpec> units_;
  std::vector<Stage> stages_;

  int64_t batch_size_ = 0;
  int64_t seq_len_ = 0;
  float gradient_scale_ = 0;

  Buffer token_rows_, targets_;           // int32 [N]; the tokens' rows in the first stage's table
  std::vector<Buffer> residual_;          // [N, C]: the input of each block, then of the head
  std::vector<BlockActivations> blocks_;  // one per layer, or one for all
  Buffer final_norm_, final_mean_, final_rstd_;
  Buffer logits_;                          // see logits()
  Buffer branch_;                          // [N, C]: output of a block's branch
  Buffer workspace_;                       // the kernels'
  Buffer d_residual_, d_narrow_, d_wide_;  // [N, C], [N, C], [N, 4C]
};

}  // namespace dim0

#endif  // DIM0_MODEL_GPT2_H_
