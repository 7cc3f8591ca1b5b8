// Words and figures that the report's reasons and its tables share.
#ifndef DIM0_RUNTIME_TRACE_REPORT_WORDS_H_
#define DIM0_RUNTIME_TRACE_REPORT_WORDS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace dim0 {

// Milliseconds a step; less is not worth a line.
inline constexpr double kLeastExposed = 0.01;

// What an op is called in a sentence: "linear_forward h.0", shortened if it is long.
std::string Label(absl::string_view name, absl::string_view unit);

// A number that is not negative, in at most six characters.
std::string Figure(double value);

}  // namespace dim0

#endif  // DIM0_RUNTIME_TRACE_REPORT_WORDS_H_
