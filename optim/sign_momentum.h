// Sign momentum (Signum; Bernstein et al., "signSGD: compressed optimisation for non-convex
// problems", 2018, with decoupled weight decay): V <- mu V + (1 - mu) G;
// W <- W (1 - lr wd) - lr sign(V). Elementwise, so it works on shards as they are and sends
// nothing.
//
// It is also the skeleton of a new optimizer: the whole of one, its kernel included, in this file.
#ifndef DIM0_OPTIM_SIGN_MOMENTUM_H_
#define DIM0_OPTIM_SIGN_MOMENTUM_H_

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/dtype.h"
#include "optim/state.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/optimizer.h"

namespace dim0 {

struct SignMomentumConfig {
  double lr = 3e-4;
  double momentum = 0.95;
  double weight_decay = 0;
};

class SignMomentum : public Optimizer {
 public:
  // All its work runs on `stream`, a stream of `device`.
  SignMomentum(const SignMomentumConfig& config, const Device& device,
               std::shared_ptr<Stream> stream)
      : config_(config), backend_(device.backend()), stream_(std::move(stream)) {}

  // Error: Unimplemented on a device for which there is no kernel below.
  absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                    const OptimizerResources& resources) override {
    if (backend_ != Backend::kCpu) {
      return absl::UnimplementedError("sign_momentum has a kernel for the CPU only");
    }
    StateLayout layout(resources);
    for (const int id : ids) momenta_[id] = layout.Add(table[id].spec);
    DIM0_ASSIGN_OR_RETURN(state_, layout.Allocate());
    for (auto& [id, momentum] : momenta_) layout.Place(state_, momentum);
    return absl::OkStatus();
  }

  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override {
    stream_->Wait(ready);
    for (const ParameterShard& shard : unit.parameters) {
      // A rank may hold no rows of a parameter, and SplitOptimizer may route it elsewhere.
      const auto momentum = momenta_.find(shard.id);
      if (momentum == momenta_.end() || shard.value.size() == 0) continue;
      EnqueueKernel(shard, momentum->second, config_.lr * params.lr_scale, params.gradient_scale);
    }
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
  // The op runs later, on the stream's worker thread, where the CPU's device memory can be touched.
  // On a GPU the same op would launch a kernel on context.native_stream; then, and to run on all
  // threads of a rank, it moves behind OptimizerKernels.
  void EnqueueKernel(const ParameterShard& shard, const Tensor& momentum, double lr,
                     const float* gradient_scale) {
    const double bytes = 2.0 * shard.value.bytes() + shard.copy.bytes() + shard.gradient.bytes() +
                         2.0 * momentum.bytes();
    stream_->Enqueue({.name = "sign_momentum",
                      .kind = OpKind::kOptimizer,
                      .flops = 6.0 * shard.value.size(),
                      .bytes = bytes},
                     [this, shard, momentum, lr, gradient_scale](const OpContext& /*context*/) {
                       // Not finite when the step's gradients are not: leave no trace of them.
                       if (!std::isfinite(*gradient_scale)) return absl::OkStatus();
                       // Parameters and gradients are float32 or bfloat16.
                       WithElements(shard.value, [&](auto* value) {
                         WithElements(shard.gradient, [&](const auto* gradient) {
                           RunKernel(value, static_cast<BFloat16*>(shard.copy.data), gradient,
                                     momentum, lr, *gradient_scale);
                         });
                       });
                       return absl::OkStatus();
                     });
  }

  template <typename Value, typename Gradient>
  void RunKernel(Value* w, BFloat16* copy, const Gradient* g, const Tensor& momentum, double lr,
                 float gradient_scale) const {
    float* const v = momentum.f32();
    const auto mu = static_cast<float>(config_.momentum);
    const auto keep = static_cast<float>(1 - lr * config_.weight_decay);
    for (int64_t i = 0; i < momentum.size(); ++i) {
      v[i] = mu * v[i] + (1 - mu) * (gradient_scale * static_cast<float>(g[i]));
      const auto sign = static_cast<float>((v[i] > 0) - (v[i] < 0));
      const float updated = keep * static_cast<float>(w[i]) - static_cast<float>(lr) * sign;
      w[i] = static_cast<Value>(updated);
      if (copy != nullptr) copy[i] = BFloat16(updated);
    }
  }

  const SignMomentumConfig config_;
  const Backend backend_;
  const std::shared_ptr<Stream> stream_;
  Buffer state_;
  std::map<int, Tensor> momenta_;  // by parameter
  std::map<int, Event> updated_;   // by unit
};

}  // namespace dim0

#endif  // DIM0_OPTIM_SIGN_MOMENTUM_H_
