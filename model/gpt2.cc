#include "model/gpt2.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace dim0 {
namespace {

// Positions of parameters in their unit, as Gpt2Units lists them. The first stage's lookups are the
// first two.
enum RootParameter { kWte, kWpe, kFinalGain, kFinalBias };
enum BlockParameter {
  kNorm1Gain,
  kNorm1Bias,
  kQkvWeight,
  kQkvBias,
  kProjectionWeight,
  kProjectionBias,
  kNorm2Gain,
  kNorm2Bias,
  kUpWeight,
  kUpBias,
  kDownWeight,
  kDownBias,
};

constexpr Init kZero{Init::Kind::kZero};
constexpr Init kOne{Init::Kind::kOne};

Init Normal(double stddev) { return {Init::Kind::kNormal, static_cast<float>(stddev)}; }

int64_t CountParameters(absl::Span<const UnitSpec> units) {
  int64_t count = 0;
  for (const UnitSpec& unit : units) {
    for (const ParameterSpec& spec : unit.parameters) count += spec.size();
  }
  return count;
}

// What the fields of a Gpt2Config are called where the user wrote them.
struct FieldNames {
  const char *layers, *width, *heads, *vocab, *positions;
};
constexpr FieldNames kFlagNames = {"--layers", "--width", "--heads", "--vocab", "--positions"};
constexpr FieldNames kJsonNames = {"n_layer", "n_embd", "n_head", "vocab_size", "n_positions"};

absl::Status ValidateAs(const Gpt2Config& config, const FieldNames& names) {
  struct Bound {
    const char* name;
    int64_t value;
    int64_t most;  // far beyond any model, and small enough that no count of bytes overflows
  };
  const Bound bounds[] = {{names.layers, config.layers, 10'000},
                          {names.width, config.width, 1'000'000},
                          {names.heads, config.heads, 1'000'000},
                          {names.vocab, config.vocab, 100'000'000},
                          {names.positions, config.positions, 100'000'000}};
  for (const Bound& bound : bounds) {
    if (bound.value < 1 || bound.value > bound.most) {
      return absl::InvalidArgumentError(absl::StrCat(
          bound.name, "=", bound.value, " is not a size; it must be from 1 to ", bound.most));
    }
  }
  if (config.width % config.heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(names.width, "=", config.width,
                                                   " is not divisible by ", names.heads, "=",
                                                   config.heads, "; change one of them"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Gpt2Config::Validate() const { return ValidateAs(*this, kFlagNames); }

absl::StatusOr<Gpt2Config> Gpt2Preset(absl::string_view name) {
  if (name == "gpt2") return Gpt2Config{.layers = 12, .width = 768, .heads = 12};
  if (name == "gpt2-medium") return Gpt2Config{.layers = 24, .width = 1024, .heads = 16};
  if (name == "gpt2-large") return Gpt2Config{.layers = 36, .width = 1280, .heads = 20};
  if (name == "gpt2-xl") return Gpt2Config{.layers = 48, .width = 1600, .heads = 25};
  return absl::NotFoundError(absl::StrCat("--model=", name,
                                          " is unknown; choose gpt2, gpt2-medium, gpt2-large or "
                                          "gpt2-xl, and change its shape with --layers, --width, "
                                          "--heads and --vocab"));
}

std::vector<UnitSpec> Gpt2Units(const Gpt2Config& config) {
  using Role = ParameterRole;
  const int64_t c = config.width;
  const Init weight = Normal(config.init_stddev);
  const Init into_residual = Normal(config.init_stddev / std::sqrt(2.0 * config.layers));

  std::vector<UnitSpec> units;
  units.push_back({"root",
                   {{"wte.weight", config.vocab, c, Role::kEmbedding, weight},
                    {"wpe.weight", config.positions, c, Role::kEmbedding, weight},
                    {"ln_f.weight", c, 1, Role::kVector, kOne},
                    {"ln_f.bias", c, 1, Role::kVector, kZero}}});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string h = absl::StrCat("h.", layer);
    units.push_back({h,
                     {{h + ".ln_1.weight", c, 1, Role::kVector, kOne},
                      {h + ".ln_1.bias", c, 1, Role::kVector, kZero},
                      {h + ".attn.c_attn.weight", 3 * c, c, Role::kMatrix, weight, /*fused=*/3,
                       static_cast<int>(config.heads)},
                      {h + ".attn.c_attn.bias", 3 * c, 1, Role::kVector, kZero},
                      {h + ".attn.c_proj.weight", c, c, Role::kMatrix, into_residual},
                      {h + ".attn.c_proj.bias", c, 1, Role::kVector, kZero},
                      {h + ".ln_2.weight", c, 1, Role::kVector, kOne},
                      {h + ".ln_2.bias", c, 1, Role::kVector, kZero},
                      {h + ".mlp.c_fc.weight", 4 * c, c, Role::kMatrix, weight},
                      {h + ".mlp.c_fc.bias", 4 * c, 1, Role::kVector, kZero},
                      {h + ".mlp.c_proj.weight", c, 4 * c, Role::kMatrix, into_residual},
                      {h + ".mlp.c_proj.bias", c, 1, Role::kVector, kZero}}});
  }
  return units;
}

std::string Gpt2ConfigJson(const Gpt2Config& config) {
  const nlohmann::ordered_json json = {{"model_type", "gpt2"},
                                       {"architectures", {"GPT2LMHeadModel"}},
                                       {kJsonNames.layers, config.layers},
                                       {kJsonNames.width, config.width},
                                       {kJsonNames.heads, config.heads},
                                       {kJsonNames.vocab, config.vocab},
                                       {kJsonNames.positions, config.positions},
                                       {"activation_function", "gelu_new"},
                                       {"layer_norm_epsilon", 1e-5},
                                       {"tie_word_embeddings", true}};
  return json.dump(2) + "\n";
}

absl::StatusOr<Gpt2Config> ParseGpt2ConfigJson(absl::string_view text) {
  const auto json = nlohmann::json::parse(text.begin(), text.end(), nullptr,
                                          /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("is not a JSON object");
  Gpt2Config config;
  const std::pair<const char*, int64_t*> fields[] = {{kJsonNames.layers, &config.layers},
                                                     {kJsonNames.width, &config.width},
                                                     {kJsonNames.heads, &config.heads},
                                                     {kJsonNames.vocab, &config.vocab},
                                                     {kJsonNames.positions, &config.positions}};
  for (const auto& [name, value] : fields) {
    const auto field = json.find(name);
    if (field == json.end() || !field->is_number_integer()) {
      return absl::InvalidArgumentError(absl::StrCat("has no whole number ", name));
    }
    *value = field->get<int64_t>();
  }
  if (const absl::Status valid = ValidateAs(config, kJsonNames); !valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("says ", valid.message()));
  }
  return config;
}

Gpt2::Gpt2(const Gpt2Config& config, bool recompute, Device& device, DType gathered, DType reduced)
    : config_(config),
      recompute_(recompute),
      device_(device),
      kernels_(CreateKernels(device)),
      types_(kernels_->TypesFor(gathered, reduced)),
      units_(Gpt2Units(config)) {
  DIM0_CHECK(config.Validate().ok());
  stages_.push_back({"embedding", 0, {{kWte}, {kWpe}}});
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    stages_.push_back({units_[layer + 1].name, static_cast<int>(layer) + 1});
  }
  stages_.push_back({"head", 0});
}

double Gpt2::FlopsPerToken(int64_t seq_len) const {
  return 6.0 * CountParameters(units_) + 6.0 * config_.layers * config_.width * seq_len;
}

absl::Status Gpt2::Allocate(Allocator& allocator, int64_t sequences, int64_t seq_len,
                            bool training) {
  const int64_t n = sequences * seq_len;
  const int64_t c = config_.width;
  absl::Status status;
  const auto allocate_as = [&](DType dtype, int64_t elements) {
    absl::StatusOr<Buffer> buffer =
        allocator.Allocate(MemoryPurpose::kActivations, elements * SizeOf(dtype));
    if (buffer.ok()) return *std::move(buffer);
    if (status.ok()) status = buffer.status();
    return Buffer();
  };
  const auto allocate = [&](int64_t elements) { return allocate_as(types_.activations, elements); };
  const auto allocate_floats = [&](int64_t floats) { return allocate_as(DType::kFloat32, floats); };
  stages_[0].lookups[kWte].most = n;
  stages_[0].lookups[kWpe].most = seq_len;
  token_rows_ = allocate_as(DType::kInt32, n);
  targets_ = allocate_as(DType::kInt32, n);
  // Without a backward to come, two residual buffers take turns and blocks share their activations.
  residual_.resize(training ? config_.layers + 1 : 2);
  for (Buffer& buffer : residual_) buffer = allocate(n * c);
  blocks_.resize(training && !recompute_ ? config_.layers : 1);
  for (BlockActivations& block : blocks_) {
    block.norm1 = allocate(n * c);
    block.mean1 = allocate_floats(n);
    block.rstd1 = allocate_floats(n);
    block.qkv = allocate(n * 3 * c);
    block.attention = allocate(n * c);
    block.logsumexp = allocate_floats(n * config_.heads);
    block.middle = allocate(n * c);
    block.norm2 = allocate(n * c);
    block.mean2 = allocate_floats(n);
    block.rstd2 = allocate_floats(n);
    block.up = allocate(n * 4 * c);
    block.gelu = allocate(n * 4 * c);
  }
  final_norm_ = allocate(n * c);
  final_mean_ = allocate_floats(n);
  final_rstd_ = allocate_floats(n);
  logits_ = allocate(n * LogitColumns(config_.vocab));
  branch_ = allocate(n * c);
  const int64_t workspace_bytes = kernels_->WorkspaceBytes(n, c, config_.heads);
  if (workspace_bytes > 0) workspace_ = allocate_as(DType::kByte, workspace_bytes);
  kernels_->SetWorkspace(workspace_.data());
  if (training) {
    d_residual_ = allocate(n * c);
    d_narrow_ = allocate(n * c);
    d_wide_ = allocate(n * 4 * c);
  }
  if (!status.ok() || allocator.plan_only()) return status;
  return kernels_->Prepare();
}

Tensor Gpt2::View(const Buffer& buffer, int64_t cols) const {
  const Tensor view = {buffer.data(), types_.activations, tokens(), cols};
  DIM0_CHECK(buffer.bytes() >= view.bytes());
  return view;
}

Tensor Gpt2::PerToken(const Buffer& buffer) const {
  const Tensor view = F32(buffer.f32(), tokens());
  DIM0_CHECK(buffer.bytes() >= view.bytes());
  return view;
}

Tensor Gpt2::LogSumExp(const BlockActivations& a) const {
  return F32(a.logsumexp.f32(), batch_size_ * config_.heads, seq_len_);
}

std::vector<std::vector<int32_t>> Gpt2::RowUses(const Batch& batch) const {
  std::vector<int32_t> positions(batch.seq_len);
  std::iota(positions.begin(), positions.end(), 0);
  return {{batch.tokens, batch.tokens + batch.sequences * batch.seq_len}, std::move(positions)};
}

void Gpt2::Begin(Stream& stream, const Batch& batch, absl::Span<const std::vector<int32_t>> uses,
                 float gradient_scale) {
  batch_size_ = batch.sequences;
  seq_len_ = batch.seq_len;
  gradient_scale_ = gradient_scale;
  const int64_t bytes = tokens() * sizeof(int32_t);
  device_.CopyFromHost(stream, token_rows_.data(), uses[kWte].data(), bytes);
  device_.CopyFromHost(stream, targets_.data(), batch.targets, bytes);
}

void Gpt2::Forward(int stage, absl::Span<const Tensor> parameters, bool training, double* loss_sum,
                   Stream& stream) {
  const int64_t c = config_.width;
  if (stage == 0) {
    // The positions in use are 0 to T - 1, so each is its own row of the table, too.
    kernels_->EmbeddingForward(stream, static_cast<const int32_t*>(token_rows_.data()), seq_len_,
                               parameters[kWte], parameters[kWpe], View(residual(0), c));
    return;
  }
  if (stage <= config_.layers) {
    BlockForward(stage - 1, parameters, /*with_output=*/true, stream);
    return;
  }
  const Tensor norm = View(final_norm_, c);
  const auto* targets = static_cast<const int32_t*>(targets_.data());
  kernels_->LayerNormForward(stream, View(residual(config_.layers), c), parameters[kFinalGain],
                             parameters[kFinalBias], norm, PerToken(final_mean_),
                             PerToken(final_rstd_));
  kernels_->LinearForward(stream, norm, parameters[kWte], Tensor(), logits());
  if (training) {
    kernels_->CrossEntropyForwardBackward(stream, logits(), config_.vocab, targets, gradient_scale_,
                                          loss_sum);
  } else {
    kernels_->CrossEntropyForward(stream, logits(), config_.vocab, targets, loss_sum);
  }
}

void Gpt2::BlockForward(int64_t layer, absl::Span<const Tensor> p, bool with_output,
                        Stream& stream) {
  const int64_t c = config_.width;
  BlockActivations& a = activations(layer);
  const Tensor input = View(residual(layer), c);
  const Tensor branch = View(branch_, c);
  const Tensor middle = View(a.middle, c);

  const Tensor norm1 = View(a.norm1, c);
  kernels_->LayerNormForward(stream, input, p[kNorm1Gain], p[kNorm1Bias], norm1, PerToken(a.mean1),
                             PerToken(a.rstd1));
  kernels_->LinearForward(stream, norm1, p[kQkvWeight], p[kQkvBias], View(a.qkv, 3 * c));
  kernels_->AttentionForward(stream, attention_shape(), View(a.qkv, 3 * c), View(a.attention, c),
                             LogSumExp(a));
  kernels_->LinearForward(stream, View(a.attention, c), p[kProjectionWeight], p[kProjectionBias],
                          branch);

  const Tensor norm2 = View(a.norm2, c);
  kernels_->AddLayerNormForward(stream, input, branch, p[kNorm2Gain], p[kNorm2Bias], middle, norm2,
                                PerToken(a.mean2), PerToken(a.rstd2));
  kernels_->LinearGeluForward(stream, norm2, p[kUpWeight], p[kUpBias], View(a.up, 4 * c),
                              View(a.gelu, 4 * c));
  if (!with_output) return;
  kernels_->LinearAddForward(stream, View(a.gelu, 4 * c), p[kDownWeight], p[kDownBias], middle,
                             View(residual(layer + 1), c));
}

void Gpt2::Backward(int stage, absl::Span<const Tensor> parameters,
                    absl::Span<const Tensor> gradients, bool accumulate, Stream& stream) {
  const int64_t c = config_.width;
  const Write write = accumulate ? Write::kAccumulate : Write::kOverwrite;
  if (stage == 0) {
    kernels_->EmbeddingBackward(stream, static_cast<const int32_t*>(token_rows_.data()), seq_len_,
                                View(d_residual_, c), gradients[kWte], gradients[kWpe]);
    return;
  }
  if (stage <= config_.layers) {
    if (recompute_) BlockForward(stage - 1, parameters, /*with_output=*/false, stream);
    BlockBackward(stage - 1, parameters, gradients, write, stream);
    return;
  }
  kernels_->LinearBackward(stream, logits(), View(final_norm_, c), parameters[kWte],
                           View(d_narrow_, c), gradients[kWte], Tensor(), write);
  if (!accumulate) {  // positions have no gradient here
    device_.Zero(stream, gradients[kWpe].data, gradients[kWpe].bytes());
  }
  kernels_->LayerNormBackward(stream, View(d_narrow_, c), View(residual(config_.layers), c),
                              parameters[kFinalGain], PerToken(final_mean_), PerToken(final_rstd_),
                              View(d_residual_, c), Write::kOverwrite, gradients[kFinalGain],
                              gradients[kFinalBias], write);
}

void Gpt2::BlockBackward(int64_t layer, absl::Span<const Tensor> p, absl::Span<const Tensor> g,
                         Write write, Stream& stream) {
  const int64_t c = config_.width;
  BlockActivations& a = activations(layer);
  // The residual stream's gradient passes both branches by and collects what comes through them.
  const Tensor d_residual = View(d_residual_, c);
  const Tensor d_narrow = View(d_narrow_, c);
  const Tensor d_wide = View(d_wide_, 4 * c);

  kernels_->GeluLinearBackward(stream, d_residual, View(a.up, 4 * c), View(a.gelu, 4 * c),
                               p[kDownWeight], d_wide, g[kDownWeight], g[kDownBias], write);
  kernels_->LinearBackward(stream, d_wide, View(a.norm2, c), p[kUpWeight], d_narrow, g[kUpWeight],
                           g[kUpBias], write);
  kernels_->LayerNormBackward(stream, d_narrow, View(a.middle, c), p[kNorm2Gain], PerToken(a.mean2),
                              PerToken(a.rstd2), d_residual, Write::kAccumulate, g[kNorm2Gain],
                              g[kNorm2Bias], write);

  const Tensor d_qkv = View(d_wide_, 3 * c);
  kernels_->LinearBackward(stream, d_residual, View(a.attention, c), p[kProjectionWeight], d_narrow,
                           g[kProjectionWeight], g[kProjectionBias], write);
  kernels_->AttentionBackward(stream, attention_shape(), d_narrow, View(a.qkv, 3 * c),
                              View(a.attention, c), LogSumExp(a), d_qkv);
  kernels_->LinearBackward(stream, d_qkv, View(a.norm1, c), p[kQkvWeight], d_narrow, g[kQkvWeight],
                           g[kQkvBias], write);
  kernels_->LayerNormBackward(stream, d_narrow, View(residual(layer), c), p[kNorm1Gain],
                              PerToken(a.mean1), PerToken(a.rstd1), d_residual, Write::kAccumulate,
                              g[kNorm1Gain], g[kNorm1Bias], write);
}

}  // namespace dim0
