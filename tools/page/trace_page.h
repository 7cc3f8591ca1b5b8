// The page that trace_report writes: one HTML file with everything in it, that shows runs side by
// side.
#ifndef DIM0_TOOLS_PAGE_TRACE_PAGE_H_
#define DIM0_TOOLS_PAGE_TRACE_PAGE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/trace/trace.h"
#include "runtime/trace/trace_report.h"

namespace dim0 {

struct TracedRun {
  std::string label;  // of its folder
  std::vector<RankTrace> ranks;
  TraceReport report;
  // The whole run's, from metrics.jsonl: (step, loss). Empty if there is none.
  std::vector<std::pair<int64_t, double>> losses, validation_losses;
};

// The whole page, for at least one run.
std::string TracePage(absl::Span<const TracedRun> runs);

// Whether a file with these contents is such a page, by how it begins.
bool IsTracePage(absl::string_view contents);

}  // namespace dim0

#endif  // DIM0_TOOLS_PAGE_TRACE_PAGE_H_
