// What trace_report takes from a traced run's folder besides its traces: a label to tell runs apart
// by, and the loss curve.
#ifndef DIM0_TOOLS_TRACED_RUN_H_
#define DIM0_TOOLS_TRACED_RUN_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "runtime/trace/trace.h"

namespace dim0 {

// One label for each folder: the last component of its path, that of its parent where it is
// "trace". Of equal ones the second gets a 2, the third a 3 and so on, so that all differ.
std::vector<std::string> RunLabels(absl::Span<const std::string> dirs);

// (step, loss), in the order of the file.
struct LossCurve {
  std::vector<std::pair<int64_t, double>> losses, validation_losses;
};

// From the lines {"step", "loss"} and {"step", "val_loss"} of a metrics.jsonl; other lines that are
// JSON objects are passed over. Errors, one line that names the file: NotFound, or InvalidArgument
// for a line that is no JSON object, and for a file of another run than the one of which `traced`
// are steps: it has not just the losses that they have.
absl::StatusOr<LossCurve> ReadLossCurve(const std::string& path,
                                        absl::Span<const TraceStep> traced);

}  // namespace dim0

#endif  // DIM0_TOOLS_TRACED_RUN_H_
