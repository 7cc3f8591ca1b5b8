#include "optim/adamw.h"

#include "absl/strings/str_cat.h"
#include "optim/state.h"

namespace dim0 {

absl::Status AdamW::Plan(const ParameterTable& table, absl::Span<const int> ids,
                         const OptimizerResources& resources) {
  StateLayout layout(resources);
  for (const int id : ids) {
    const bool decays = table[id].spec.role != ParameterRole::kVector;
    moments_[id] = {.first = layout.Add(table[id].spec),
                    .second = layout.Add(table[id].spec),
                    .weight_decay = decays ? config_.weight_decay : 0};
  }
  DIM0_ASSIGN_OR_RETURN(state_, layout.Allocate());
  for (auto& [id, moments] : moments_) {
    layout.Place(state_, moments.first);
    layout.Place(state_, moments.second);
  }
  return absl::OkStatus();
}

absl::Status AdamW::Update(const Unit& unit, const StepParams& params, const Event& ready) {
  std::vector<AdamWTensor> tensors;
  for (const ParameterShard& shard : unit.parameters) {
    const auto found = moments_.find(shard.id);
    if (found == moments_.end() || shard.value.size() == 0) continue;
    tensors.push_back({.value = shard.value,
                       .gradient = shard.gradient,
                       .first_moment = found->second.first,
                       .second_moment = found->second.second,
                       .copy = shard.copy,
                       .weight_decay = found->second.weight_decay});
  }
  stream_->Wait(ready);
  kernels_->AdamW(*stream_, std::move(tensors),
                  {.lr = config_.lr * params.lr_scale,
                   .beta1 = config_.beta1,
                   .beta2 = config_.beta2,
                   .eps = config_.eps,
                   .step = params.step,
                   .gradient_scale = params.gradient_scale});
  updated_[unit.index] = stream_->Record();
  return absl::OkStatus();
}

std::vector<StateTensor> AdamW::State() {
  std::vector<StateTensor> state;
  for (const auto& [id, moments] : moments_) {
    state.push_back({"first_moment", id, moments.first});
    state.push_back({"second_moment", id, moments.second});
  }
  return state;
}

uint64_t AdamW::PlanHash() const {
  std::string text = absl::StrCat("adamw ", config_.lr, " ", config_.beta1, " ", config_.beta2, " ",
                                  config_.eps, " ", config_.weight_decay);
  for (const auto& [id, moments] : moments_) absl::StrAppend(&text, " ", id);
  return HashBytes(text);
}

}  // namespace dim0
