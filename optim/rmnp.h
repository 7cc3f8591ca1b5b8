// RMNP: row-momentum normalized preconditioning. A row's update needs that row only and ranks store
// whole rows, so the optimizer communicates nothing; it is given nothing to communicate with.
#ifndef DIM0_OPTIM_RMNP_H_
#define DIM0_OPTIM_RMNP_H_

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "optim/kernels.h"
#include "runtime/optimizer.h"

namespace dim0 {

struct RmnpConfig {
  double lr = 4e-3;
  double momentum = 0.95;
  bool nesterov = true;
  double eps = 1e-12;  // the least norm to divide by; below 1.1e-19 that takes its place
  double weight_decay = 0;
  // HTRMNP: rows are divided by their norm to the power 1 - power; in [0, 1), 0 is RMNP.
  double power = 0;
};

// What the kernels are told of a step.
RmnpArguments KernelArguments(const RmnpConfig& config, const StepParams& params);

class Rmnp : public Optimizer {
 public:
  // All its work runs on `stream`.
  Rmnp(const RmnpConfig& config, std::shared_ptr<OptimizerKernels> kernels,
       std::shared_ptr<Stream> stream)
      : config_(config), kernels_(std::move(kernels)), stream_(std::move(stream)) {}

  absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                    const OptimizerResources& resources) override;
  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override;
  Event Updated(const Unit& unit) override { return updated_[unit.index]; }
  std::vector<StateTensor> State() override;
  uint64_t PlanHash() const override;

 private:
  struct Matrix {
    Tensor momentum;
    double scale = 1;
  };

  const RmnpConfig config_;
  const std::shared_ptr<OptimizerKernels> kernels_;
  const std::shared_ptr<Stream> stream_;
  Buffer state_;
  std::map<int, Matrix> matrices_;  // by parameter
  std::map<int, Event> updated_;    // by unit
};

}  // namespace dim0

#endif  // DIM0_OPTIM_RMNP_H_
