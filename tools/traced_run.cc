#include "tools/traced_run.h"

#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "runtime/check.h"
#include "runtime/file.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The last component, also of "runs/a/" and ".".
std::string LastComponent(const std::string& dir) {
  std::error_code error;
  fs::path path = fs::absolute(dir, error);
  if (error) path = dir;
  path = path.lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  if (path.filename() == "trace" && path.parent_path().has_filename()) path = path.parent_path();
  return path.has_filename() ? path.filename().string() : path.string();
}

std::optional<double> Number(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  const double value = found->get<double>();
  return std::isfinite(value) ? std::optional<double>(value) : std::nullopt;
}

}  // namespace

std::vector<std::string> RunLabels(absl::Span<const std::string> dirs) {
  std::vector<std::string> labels;
  std::set<std::string> taken;
  for (const std::string& dir : dirs) {
    const std::string component = LastComponent(dir);
    std::string label = component;
    for (int number = 2; !taken.insert(label).second; ++number) {
      label = absl::StrCat(component, " ", number);
    }
    labels.push_back(label);
  }
  return labels;
}

absl::StatusOr<LossCurve> ReadLossCurve(const std::string& path,
                                        absl::Span<const TraceStep> traced) {
  DIM0_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  LossCurve curve;
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(file.contents(), '\n')) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    const Json object =
        Json::parse(line.begin(), line.end(), /*cb=*/nullptr, /*allow_exceptions=*/false);
    if (!object.is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": line ", number, " is not a JSON object, as train writes them"));
    }
    const std::optional<double> step = Number(object, "step");
    // Steps are counts; a double holds them exactly up to 2^53.
    if (!step || *step < 0 || *step > 0x1p53) continue;
    const auto at = static_cast<int64_t>(*step);
    if (const auto loss = Number(object, "loss")) curve.losses.emplace_back(at, *loss);
    if (const auto loss = Number(object, "val_loss")) {
      curve.validation_losses.emplace_back(at, *loss);
    }
  }
  const std::map<int64_t, double> losses(curve.losses.begin(), curve.losses.end());
  for (const TraceStep& step : traced) {
    const auto found = losses.find(step.step);
    if (!step.loss || (found != losses.end() && found->second == *step.loss)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        path, " is of another run than the trace: ",
        found == losses.end() ? "it has no loss of step " : "it has another loss at step ",
        step.step, "; put the files of one run beside each other"));
  }
  return curve;
}

}  // namespace dim0
