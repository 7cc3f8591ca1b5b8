#include "runtime/device.h"

#include "absl/strings/str_cat.h"
#include "runtime/cpu/cpu_device.h"

namespace dim0 {

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(Backend backend, int threads,
                                                     Residency residency) {
  if (threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a rank needs at least 1 thread, not ", threads, "; see --threads_per_rank"));
  }
  switch (backend) {
    case Backend::kCpu:
      return std::make_unique<cpu::CpuDevice>(threads, residency);
  }
  return absl::InternalError("unknown device backend");
}

}  // namespace dim0
