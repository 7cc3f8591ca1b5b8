// The yardstick of what is bound by memory, for benchmarks: the bandwidth that the device itself
// reaches in the same run.
#ifndef DIM0_RUNTIME_BANDWIDTH_H_
#define DIM0_RUNTIME_BANDWIDTH_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/device.h"

namespace dim0 {

// In bytes/s, over about `duration`: on a CPU MeasureTriadRate's, since a copy there may bypass the
// caches; on a GPU a copy's within its memory, counting bytes read and bytes written. Blocks.
// Errors: ResourceExhausted, or what the device said.
absl::StatusOr<double> MeasureBandwidth(Device& device, absl::Duration duration);
// What was measured: "triad", "copy".
absl::string_view BandwidthName(Backend backend);

}  // namespace dim0

#endif  // DIM0_RUNTIME_BANDWIDTH_H_
