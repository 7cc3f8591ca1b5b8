// Makes the optimizer that a flag names.
#ifndef DIM0_OPTIM_FACTORY_H_
#define DIM0_OPTIM_FACTORY_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/process_group.h"
#include "optim/adamw.h"
#include "optim/kernels.h"
#include "optim/muon.h"
#include "optim/rmnp.h"
#include "optim/sign_momentum.h"
#include "optim/split_optimizer.h"
#include "runtime/device.h"
#include "runtime/optimizer.h"

namespace dim0 {

struct OptimizerConfig {
  std::string name = "adamw";  // "adamw", "muon", "rmnp" or "sign_momentum"
  AdamWConfig adamw = {};      // of every parameter, or of all but the hidden matrices
  RmnpConfig rmnp = {};
  MuonConfig muon = {};
  SignMomentumConfig sign_momentum = {};
  MatrixParams matrix_params = MatrixParams::kHidden;  // under all but adamw

  // Those in use, by the name of the flag that sets them: "lr" of AdamW, and "matrix_lr".
  std::vector<std::pair<std::string, double>> LearningRates() const;
};

// `device` and `group` outlive the result; only Muon is given `group`. `kernels` does the
// arithmetic; null: the device's own. Error: NotFound for an unknown name, listing the known ones.
absl::StatusOr<std::unique_ptr<Optimizer>> CreateOptimizer(
    const OptimizerConfig& config, Device& device, ProcessGroup& group,
    std::shared_ptr<OptimizerKernels> kernels = nullptr);

// Error: NotFound unless `name` is one of those.
absl::Status CheckOptimizerName(absl::string_view name);

// "spectral", "match_rms" or "unit". Error: NotFound, listing these.
absl::StatusOr<UpdateScale> ParseUpdateScale(absl::string_view name);

// "hidden" or "all2d". Error: NotFound, listing these.
absl::StatusOr<MatrixParams> ParseMatrixParams(absl::string_view name);

}  // namespace dim0

#endif  // DIM0_OPTIM_FACTORY_H_
