#include "runtime/bandwidth.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/steady_clock.h"
#include "runtime/allocator.h"
#include "runtime/check.h"
#include "runtime/median.h"

namespace dim0 {
namespace {

absl::StatusOr<double> MeasureCopyRate(Device& device, absl::Duration duration) {
  // Well beyond the level-2 caches of today's GPUs, unless one copy takes too long.
  constexpr int64_t kLeast = int64_t{4} << 20, kMost = int64_t{1} << 30;
  // The host waits once for so many copies.
  constexpr int64_t kCopies = 8;
  Allocator allocator(&device);
  const std::unique_ptr<Stream> stream = device.NewStream("bandwidth");
  double rate = 0;
  for (int64_t bytes = kLeast; bytes <= kMost; bytes *= 4) {
    DIM0_ASSIGN_OR_RETURN(const Buffer buffer,
                          allocator.Allocate(MemoryPurpose::kActivations, 2 * bytes));
    char* const data = static_cast<char*>(buffer.data());
    const auto seconds_of = [&](int64_t copies) -> absl::StatusOr<double> {
      const absl::Time start = SteadyNow();
      for (int64_t i = 0; i < copies; ++i) device.Copy(*stream, data + bytes, data, bytes);
      DIM0_RETURN_IF_ERROR(stream->Synchronize());
      return absl::ToDoubleSeconds(SteadyNow() - start) / copies;
    };
    DIM0_RETURN_IF_ERROR(seconds_of(1).status());  // brings everything up
    DIM0_ASSIGN_OR_RETURN(const double once, seconds_of(1));
    const bool last = bytes * 4 > kMost || once * kCopies > absl::ToDoubleSeconds(duration) / 4;
    if (!last) continue;
    std::vector<double> seconds;
    const absl::Time end = SteadyNow() + duration;
    while (seconds.empty() || SteadyNow() < end) {
      DIM0_ASSIGN_OR_RETURN(const double each, seconds_of(kCopies));
      seconds.push_back(each);
    }
    rate = 2.0 * bytes / Median(std::move(seconds));
    break;
  }
  return rate;
}

}  // namespace

absl::StatusOr<double> MeasureBandwidth(Device& device, absl::Duration duration) {
  return device.backend() == Backend::kCpu ? device.MeasureTriadRate(duration)
                                           : MeasureCopyRate(device, duration);
}

absl::string_view BandwidthName(Backend backend) {
  return backend == Backend::kCpu ? "triad" : "copy";
}

}  // namespace dim0
