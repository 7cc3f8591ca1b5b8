// Two optimizers as one: matrices to the first, everything else to the second. The route is taken
// from roles and global shapes, once.
#ifndef DIM0_OPTIM_SPLIT_OPTIMIZER_H_
#define DIM0_OPTIM_SPLIT_OPTIMIZER_H_

#include <memory>
#include <vector>

#include "runtime/optimizer.h"

namespace dim0 {

// Which parameters count as matrices.
enum class MatrixParams : uint8_t {
  kHidden,  // hidden weights only
  kAll2d,   // embeddings too
};

class SplitOptimizer : public Optimizer {
 public:
  SplitOptimizer(MatrixParams matrix_params, std::unique_ptr<Optimizer> matrices,
                 std::unique_ptr<Optimizer> rest)
      : matrix_params_(matrix_params), matrices_(std::move(matrices)), rest_(std::move(rest)) {}

  absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                    const OptimizerResources& resources) override {
    std::vector<int> matrix_ids, rest_ids;
    for (const int id : ids) {
      const ParameterRole role = table[id].spec.role;
      const bool matrix =
          role == ParameterRole::kMatrix ||
          (role == ParameterRole::kEmbedding && matrix_params_ == MatrixParams::kAll2d);
      (matrix ? matrix_ids : rest_ids).push_back(id);
    }
    DIM0_RETURN_IF_ERROR(matrices_->Plan(table, matrix_ids, resources));
    return rest_->Plan(table, rest_ids, resources);
  }

  absl::Status Start() override {
    DIM0_RETURN_IF_ERROR(matrices_->Start());
    return rest_->Start();
  }

  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override {
    DIM0_RETURN_IF_ERROR(matrices_->Update(unit, params, ready));
    return rest_->Update(unit, params, ready);
  }

  Event Updated(const Unit& unit) override {
    return Event::Join(matrices_->Updated(unit), rest_->Updated(unit));
  }

  std::vector<StateTensor> State() override {
    std::vector<StateTensor> state = matrices_->State();
    const std::vector<StateTensor> rest = rest_->State();
    state.insert(state.end(), rest.begin(), rest.end());
    return state;
  }

  NewtonSchulzWork newton_schulz_work() override {
    NewtonSchulzWork work = matrices_->newton_schulz_work();
    return work += rest_->newton_schulz_work();
  }

  uint64_t PlanHash() const override { return matrices_->PlanHash() * 31 + rest_->PlanHash(); }

 private:
  const MatrixParams matrix_params_;
  const std::unique_ptr<Optimizer> matrices_;
  const std::unique_ptr<Optimizer> rest_;
};

}  // namespace dim0

#endif  // DIM0_OPTIM_SPLIT_OPTIMIZER_H_
