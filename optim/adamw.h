// AdamW: elementwise, so it works on shards as they are.
#ifndef DIM0_OPTIM_ADAMW_H_
#define DIM0_OPTIM_ADAMW_H_

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "optim/kernels.h"
#include "runtime/optimizer.h"

namespace dim0 {

struct AdamWConfig {
  double lr = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // of tables and matrices; vectors are never decayed
};

class AdamW : public Optimizer {
 public:
  // All its work runs on `stream`.
  AdamW(const AdamWConfig& config, std::shared_ptr<OptimizerKernels> kernels,
        std::shared_ptr<Stream> stream)
      : config_(config), kernels_(std::move(kernels)), stream_(std::move(stream)) {}

  absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                    const OptimizerResources& resources) override;
  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override;
  Event Updated(const Unit& unit) override { return updated_[unit.index]; }
  std::vector<StateTensor> State() override;
  uint64_t PlanHash() const override;

 private:
  struct Moments {
    Tensor first, second;
    double weight_decay = 0;
  };

  const AdamWConfig config_;
  const std::shared_ptr<OptimizerKernels> kernels_;
  const std::shared_ptr<Stream> stream_;
  Buffer state_;
  std::map<int, Moments> moments_;  // by parameter
  std::map<int, Event> updated_;    // by unit
};

}  // namespace dim0

#endif  // DIM0_OPTIM_ADAMW_H_
