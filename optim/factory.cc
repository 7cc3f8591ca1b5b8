#include "optim/factory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/check.h"

namespace dim0 {

std::vector<std::pair<std::string, double>> OptimizerConfig::LearningRates() const {
  std::vector<std::pair<std::string, double>> rates = {{"lr", adamw.lr}};
  if (name == "rmnp") rates.push_back({"matrix_lr", rmnp.lr});
  if (name == "muon") rates.push_back({"matrix_lr", muon.lr});
  if (name == "sign_momentum") rates.push_back({"matrix_lr", sign_momentum.lr});
  return rates;
}

absl::Status CheckOptimizerName(absl::string_view name) {
  if (name == "adamw" || name == "rmnp" || name == "muon" || name == "sign_momentum") {
    return absl::OkStatus();
  }
  return absl::NotFoundError(
      absl::StrCat("--optimizer=", name, " is unknown; choose adamw, muon, rmnp or sign_momentum"));
}

absl::StatusOr<std::unique_ptr<Optimizer>> CreateOptimizer(
    const OptimizerConfig& config, Device& device, ProcessGroup& group,
    std::shared_ptr<OptimizerKernels> kernels) {
  DIM0_RETURN_IF_ERROR(CheckOptimizerName(config.name));
  if (kernels == nullptr) kernels = CreateOptimizerKernels(device);
  const std::shared_ptr<Stream> stream = device.NewStream("optimizer");
  auto adamw = std::make_unique<AdamW>(config.adamw, kernels, stream);
  if (config.name == "adamw") return adamw;
  std::unique_ptr<Optimizer> matrices;
  if (config.name == "rmnp") {
    matrices = std::make_unique<Rmnp>(config.rmnp, kernels, stream);
  } else if (config.name == "sign_momentum") {
    matrices = std::make_unique<SignMomentum>(config.sign_momentum, kernels, stream);
  } else {
    DIM0_CHECK(config.name == "muon");
    matrices = std::make_unique<Muon>(config.muon, kernels, device, group);
  }
  return std::make_unique<SplitOptimizer>(config.matrix_params, std::move(matrices),
                                          std::move(adamw));
}

absl::StatusOr<MatrixParams> ParseMatrixParams(absl::string_view name) {
  if (name == "hidden") return MatrixParams::kHidden;
  if (name == "all2d") return MatrixParams::kAll2d;
  return absl::NotFoundError(
      absl::StrCat("--matrix_params=", name, " is unknown; choose hidden or all2d"));
}

absl::StatusOr<UpdateScale> ParseUpdateScale(absl::string_view name) {
  if (name == "spectral") return UpdateScale::kSpectral;
  if (name == "match_rms") return UpdateScale::kMatchRms;
  if (name == "unit") return UpdateScale::kUnit;
  return absl::NotFoundError(
      absl::StrCat("--muon_scale=", name, " is unknown; choose spectral, match_rms or unit"));
}

}  // namespace dim0
