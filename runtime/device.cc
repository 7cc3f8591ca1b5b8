#include "runtime/device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/cpu/cpu_device.h"
#include "runtime/cuda/cuda_backend.h"

namespace dim0 {

DType DefaultParameterDType(Backend backend) {
  return backend == Backend::kCpu ? DType::kFloat32 : DType::kBFloat16;
}

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(Backend backend, int threads,
                                                     Residency residency, int ordinal) {
  if (threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a rank needs at least 1 thread, not ", threads, "; see --threads_per_rank"));
  }
  switch (backend) {
    case Backend::kCpu:
      return std::make_unique<cpu::CpuDevice>(threads, residency);
    case Backend::kCuda:
      return cuda::CreateCudaDevice(ordinal);
  }
  return absl::InternalError("unknown device backend");
}

absl::Status CheckBackend(Backend backend, int ordinal) {
  return backend == Backend::kCuda ? cuda::CheckCuda(ordinal) : absl::OkStatus();
}

absl::StatusOr<Backend> UsableBackend(absl::string_view device) {
  if (device != "cpu" && device != "cuda") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device=", device, " is unknown; choose cpu or cuda"));
  }
  const Backend backend = device == "cpu" ? Backend::kCpu : Backend::kCuda;
  const absl::Status usable = CheckBackend(backend);
  if (usable.ok()) return backend;
  return absl::Status(usable.code(), absl::StrCat("--device=", device, ": ", usable.message()));
}

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateLocalRanks(
    Backend backend, int ranks, const ProcessGroupOptions& options,
    const std::optional<Launch>& launch) {
  std::vector<std::unique_ptr<ProcessGroup>> hosts;
  if (launch) {
    DIM0_ASSIGN_OR_RETURN(hosts.emplace_back(), CreateTcpRank(*launch, options));
  } else {
    DIM0_ASSIGN_OR_RETURN(hosts, CreateThreadRanks(ranks, options));
  }
  if (backend == Backend::kCpu) return hosts;
  std::vector<int> ordinals;
  for (const auto& host : hosts) ordinals.push_back(DeviceOrdinal(host->rank(), launch));
  return cuda::CreateCudaRanks(std::move(hosts), ordinals, options);
}

}  // namespace dim0
