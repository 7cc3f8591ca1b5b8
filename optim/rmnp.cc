#include "optim/rmnp.h"

#include "absl/strings/str_cat.h"
#include "optim/scale.h"
#include "optim/state.h"

namespace dim0 {

RmnpArguments KernelArguments(const RmnpConfig& config, const StepParams& params) {
  return {.lr = config.lr * params.lr_scale,
          .momentum = config.momentum,
          .eps = config.eps,
          .weight_decay = config.weight_decay,
          .nesterov = config.nesterov,
          .power = config.power,
          .gradient_scale = params.gradient_scale};
}

absl::Status Rmnp::Plan(const ParameterTable& table, absl::Span<const int> ids,
                        const OptimizerResources& resources) {
  StateLayout layout(resources);
  for (const int id : ids) {
    const ParameterSpec& spec = table[id].spec;
    matrices_[id] = {.momentum = layout.Add(spec),
                     .scale = ScaleOf(UpdateScale::kSpectral, spec.rows, spec.cols)};
  }
  DIM0_ASSIGN_OR_RETURN(state_, layout.Allocate());
  for (auto& [id, matrix] : matrices_) layout.Place(state_, matrix.momentum);
  return absl::OkStatus();
}

absl::Status Rmnp::Update(const Unit& unit, const StepParams& params, const Event& ready) {
  std::vector<RmnpTensor> matrices;
  for (const ParameterShard& shard : unit.parameters) {
    const auto found = matrices_.find(shard.id);
    if (found == matrices_.end() || shard.value.size() == 0) continue;
    matrices.push_back({.value = shard.value,
                        .gradient = shard.gradient,
                        .momentum = found->second.momentum,
                        .copy = shard.copy,
                        .scale = found->second.scale});
  }
  stream_->Wait(ready);
  kernels_->Rmnp(*stream_, std::move(matrices), KernelArguments(config_, params));
  updated_[unit.index] = stream_->Record();
  return absl::OkStatus();
}

std::vector<StateTensor> Rmnp::State() {
  std::vector<StateTensor> state;
  for (const auto& [id, matrix] : matrices_) state.push_back({"momentum", id, matrix.momentum});
  return state;
}

uint64_t Rmnp::PlanHash() const {
  std::string text = absl::StrCat("rmnp ", config_.lr, " ", config_.momentum, " ", config_.nesterov,
                                  " ", config_.eps, " ", config_.weight_decay, " ", config_.power);
  for (const auto& [id, matrix] : matrices_) absl::StrAppend(&text, " ", id);
  return HashBytes(text);
}

}  // namespace dim0
