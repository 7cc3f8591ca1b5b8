// Sign momentum (Signum; Bernstein et al., "signSGD: compressed optimisation for non-convex
// problems", 2018, with decoupled weight decay): V <- mu V + (1 - mu) G;
// W <- W (1 - lr wd) - lr sign(V). Elementwise, so it works on shards as they are and sends
// nothing.
//
// It is also the skeleton of a new optimizer: all of it but the arithmetic, which each backend has
// behind OptimizerKernels.
#ifndef DIM0_OPTIM_SIGN_MOMENTUM_H_
#define DIM0_OPTIM_SIGN_MOMENTUM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "optim/kernels.h"
#include "optim/state.h"
#include "runtime/check.h"
#include "runtime/optimizer.h"

namespace dim0 {

struct SignMomentumConfig {
  double lr = 3e-4;
  double momentum = 0.95;
  double weight_decay = 0;
};

class SignMomentum : public Optimizer {
 public:
  // All its work runs on `stream`.
  SignMomentum(const SignMomentumConfig& config, std::shared_ptr<OptimizerKernels> kernels,
               std::shared_ptr<Stream> stream)
      : config_(config), kernels_(std::move(kernels)), stream_(std::move(stream)) {}

  absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                    const OptimizerResources& resources) override {
    StateLayout layout(resources);
    for (const int id : ids) momenta_[id] = layout.Add(table[id].spec);
    DIM0_ASSIGN_OR_RETURN(state_, layout.Allocate());
    for (auto& [id, momentum] : momenta_) layout.Place(state_, momentum);
    return absl::OkStatus();
  }

  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override {
    std::vector<SignMomentumTensor> tensors;
    for (const ParameterShard& shard : unit.parameters) {
      // A rank may hold no rows of a parameter, and SplitOptimizer may route it elsewhere.
      const auto momentum = momenta_.find(shard.id);
      if (momentum == momenta_.end() || shard.value.size() == 0) continue;
      tensors.push_back({.value = shard.value,
                         .gradient = shard.gradient,
                         .momentum = momentum->second,
                         .copy = shard.copy});
    }
    stream_->Wait(ready);
    kernels_->SignMomentum(*stream_, std::move(tensors),
                           {.lr = config_.lr * params.lr_scale,
                            .momentum = config_.momentum,
                            .weight_decay = config_.weight_decay,
                            .gradient_scale = params.gradient_scale});
    updated_[unit.index] = stream_->Record();
    return absl::OkStatus();
  }

  Event Updated(const Unit& unit) override { return updated_[unit.index]; }

  std::vector<StateTensor> State() override {
    std::vector<StateTensor> state;
    for (const auto& [id, momentum] : momenta_) state.push_back({"momentum", id, momentum});
    return state;
  }

  uint64_t PlanHash() const override {
    std::string text = absl::StrCat("sign_momentum ", config_.lr, " ", config_.momentum, " ",
                                    config_.weight_decay);
    for (const auto& [id, momentum] : momenta_) absl::StrAppend(&text, " ", id);
    return HashBytes(text);
  }

 private:
  const SignMomentumConfig config_;
  const std::shared_ptr<OptimizerKernels> kernels_;
  const std::shared_ptr<Stream> stream_;
  Buffer state_;
  std::map<int, Tensor> momenta_;  // by parameter
  std::map<int, Event> updated_;   // by unit
};

}  // namespace dim0

#endif  // DIM0_OPTIM_SIGN_MOMENTUM_H_
