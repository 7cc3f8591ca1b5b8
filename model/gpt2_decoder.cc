#include "model/gpt2_decoder.h"

#include <algorithm>
#include <cmath>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/file.h"
#include "runtime/host_copy.h"

namespace dim0 {
namespace {

// One buffer for all of `tensors`, each on cache lines of its own.
absl::StatusOr<Buffer> AllocateTensors(Allocator& allocator, MemoryPurpose purpose,
                                       absl::Span<Tensor* const> tensors) {
  const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  int64_t bytes = 0;
  for (const Tensor* tensor : tensors) bytes += aligned(tensor->bytes());
  DIM0_ASSIGN_OR_RETURN(Buffer buffer, allocator.Allocate(purpose, bytes));
  auto* next = static_cast<char*>(buffer.data());
  for (Tensor* tensor : tensors) {
    tensor->data = next;
    next += aligned(tensor->bytes());
  }
  return buffer;
}

}  // namespace

Gpt2Decoder::Gpt2Decoder(const Gpt2Config& config, Device& device)
    : config_(config),
      device_(device),
      allocator_(&device),
      kernels_(CreateKernels(device)),
      types_(kernels_->TypesFor(DefaultParameterDType(device.backend()), DType::kFloat32)),
      units_(Gpt2Units(config)),
      stream_(device.NewStream("decode")) {}

absl::StatusOr<std::unique_ptr<Gpt2Decoder>> Gpt2Decoder::Load(const std::string& folder,
                                                               Device& device) {
  const std::string config_path = folder + "/config.json";
  DIM0_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(config_path));
  const absl::StatusOr<Gpt2Config> config = ParseGpt2ConfigJson(file.contents());
  if (!config.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(config_path, " ", config.status().message()));
  }
  DIM0_ASSIGN_OR_RETURN(const SafetensorsFile weights,
                        SafetensorsFile::Open(folder + "/model.safetensors"));
  auto decoder = absl::WrapUnique(new Gpt2Decoder(*config, device));
  // Before memory is taken: a damaged config.json may ask for any amount.
  DIM0_ASSIGN_OR_RETURN(const auto tensors, decoder->FindWeights(weights));
  DIM0_RETURN_IF_ERROR(decoder->Allocate());
  DIM0_RETURN_IF_ERROR(decoder->LoadWeights(weights, tensors));
  return decoder;
}

absl::Status Gpt2Decoder::Allocate() {
  std::vector<Tensor*> weights;
  parameters_.resize(units_.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    for (const ParameterSpec& spec : units_[u].parameters) {
      parameters_[u].push_back({nullptr, types_.parameters, spec.rows, spec.cols});
    }
    for (Tensor& tensor : parameters_[u]) weights.push_back(&tensor);
  }
  DIM0_ASSIGN_OR_RETURN(weights_, AllocateTensors(allocator_, MemoryPurpose::kParameters, weights));

  const int64_t c = config_.width;
  const auto activations = [&](int64_t rows, int64_t cols) {
    return Tensor{nullptr, types_.activations, rows, cols};
  };
  keys_.resize(config_.layers, activations(config_.positions, c));
  values_ = keys_;
  std::vector<Tensor*> cache;
  for (std::vector<Tensor>* tensors : {&keys_, &values_}) {
    for (Tensor& tensor : *tensors) cache.push_back(&tensor);
  }
  DIM0_ASSIGN_OR_RETURN(cache_, AllocateTensors(allocator_, MemoryPurpose::kActivations, cache));

  residual_ = norm_ = attention_ = branch_ = activations(1, c);
  qkv_ = activations(1, 3 * c);
  up_ = gelu_ = activations(1, 4 * c);
  mean_ = rstd_ = F32(nullptr, 1);
  logits_ = activations(1, LogitColumns(config_.vocab));
  DIM0_ASSIGN_OR_RETURN(scratch_, AllocateTensors(allocator_, MemoryPurpose::kActivations,
                                                  {&residual_, &norm_, &attention_, &branch_, &qkv_,
                                                   &up_, &gelu_, &mean_, &rstd_, &logits_}));
  DIM0_ASSIGN_OR_RETURN(token_id_,
                        allocator_.Allocate(MemoryPurpose::kActivations, sizeof(int32_t)));
  host_logits_.resize(config_.vocab);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<const SafetensorsFile::Tensor*>> Gpt2Decoder::FindWeights(
    const SafetensorsFile& file) const {
  std::vector<const SafetensorsFile::Tensor*> found;
  for (const UnitSpec& unit : units_) {
    for (const ParameterSpec& spec : unit.parameters) {
      const SafetensorsFile::Tensor* tensor = file.Find(spec.name);
      if (tensor == nullptr) tensor = file.Find("transformer." + spec.name);
      if (tensor == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat(file.path(), " has no tensor ", spec.name,
                                                       "; is it this config.json's model?"));
      }
      std::vector<int64_t> shape = {spec.rows, spec.cols};
      if (spec.role == ParameterRole::kVector) shape = {spec.rows};
      if (Gpt2StoredTransposed(spec)) shape = {spec.cols, spec.rows};
      if (tensor->shape != shape) {
        return absl::InvalidArgumentError(absl::StrCat(
            file.path(), ": tensor ", spec.name, " is [", absl::StrJoin(tensor->shape, ", "),
            "]; config.json asks for [", absl::StrJoin(shape, ", "), "]"));
      }
      found.push_back(tensor);
    }
  }
  return found;
}

absl::Status Gpt2Decoder::LoadWeights(const SafetensorsFile& file,
                                      absl::Span<const SafetensorsFile::Tensor* const> tensors) {
  std::vector<float> weights;
  size_t next = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t i = 0; i < units_[u].parameters.size(); ++i) {
      const ParameterSpec& spec = units_[u].parameters[i];
      weights.resize(spec.size());
      DIM0_RETURN_IF_ERROR(file.ReadFloats(*tensors[next++], 0, absl::MakeSpan(weights)));
      if (Gpt2StoredTransposed(spec)) weights = TransposedCopy(weights, spec.cols, spec.rows);
      DIM0_RETURN_IF_ERROR(CopyFloatsFromHost(device_, *stream_, weights, parameters_[u][i]));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const float>> Gpt2Decoder::Next(int32_t token) {
  if (token < 0 || token >= config_.vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("token ", token, " is outside the vocabulary of ", config_.vocab));
  }
  if (static_cast<int64_t>(context_.size()) == config_.positions) {
    const std::vector<int32_t> kept(context_.end() - config_.positions / 2, context_.end());
    context_.clear();
    for (const int32_t old : kept) DIM0_RETURN_IF_ERROR(Feed(old));
  }
  DIM0_RETURN_IF_ERROR(Feed(token));
  return absl::Span<const float>(host_logits_);
}

absl::Status Gpt2Decoder::Feed(int32_t token) {
  const int64_t position = context_.size();
  context_.push_back(token);
  next_token_ = token;
  device_.CopyFromHost(*stream_, token_id_.data(), &next_token_, sizeof(int32_t));

  // In the order of Gpt2Units: wte, wpe, final gain and bias; per block gain and bias of a norm,
  // then weight and bias of two linear maps, twice.
  const std::vector<Tensor>& root = parameters_[0];
  kernels_->EmbeddingForward(*stream_, static_cast<const int32_t*>(token_id_.data()), 1, root[0],
                             Rows(root[1], position, 1), residual_);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const std::vector<Tensor>& p = parameters_[layer + 1];
    kernels_->LayerNormForward(*stream_, residual_, p[0], p[1], norm_, mean_, rstd_);
    kernels_->LinearForward(*stream_, norm_, p[2], p[3], qkv_);
    kernels_->AttentionDecode(*stream_, config_.heads, position, qkv_, keys_[layer], values_[layer],
                              attention_);
    kernels_->LinearForward(*stream_, attention_, p[4], p[5], branch_);
    kernels_->AddLayerNormForward(*stream_, residual_, branch_, p[6], p[7], residual_, norm_, mean_,
                                  rstd_);
    kernels_->LinearGeluForward(*stream_, norm_, p[8], p[9], up_, gelu_);
    kernels_->LinearAddForward(*stream_, gelu_, p[10], p[11], residual_, residual_);
  }
  kernels_->LayerNormForward(*stream_, residual_, root[2], root[3], norm_, mean_, rstd_);
  kernels_->LinearForward(*stream_, norm_, root[0], Tensor(), logits_);
  const Tensor logits = {logits_.data, logits_.dtype, 1, config_.vocab};
  DIM0_RETURN_IF_ERROR(CopyFloatsToHost(device_, *stream_, logits, absl::MakeSpan(host_logits_)));
  if (!std::all_of(host_logits_.begin(), host_logits_.end(),
                   [](float logit) { return std::isfinite(logit); })) {
    return absl::DataLossError(
        "the model's output is not finite; model.safetensors is damaged or its run diverged");
  }
  return absl::OkStatus();
}

}  // namespace dim0
