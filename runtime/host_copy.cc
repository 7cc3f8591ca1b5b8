#include "runtime/host_copy.h"

#include <cstdint>
#include <vector>

#include "collectives/dtype.h"
#include "runtime/check.h"

namespace dim0 {

absl::Status CopyFloatsFromHost(Device& device, Stream& stream, absl::Span<const float> values,
                                const Tensor& target) {
  DIM0_CHECK(static_cast<int64_t>(values.size()) == target.size());
  std::vector<BFloat16> rounded;
  const void* source = values.data();
  if (target.dtype == DType::kBFloat16) {
    rounded.reserve(values.size());
    for (const float value : values) rounded.emplace_back(value);
    source = rounded.data();
  } else {
    DIM0_CHECK(target.dtype == DType::kFloat32);
  }
  device.CopyFromHost(stream, target.data, source, target.bytes());
  return stream.Synchronize();
}

absl::Status CopyFloatsToHost(Device& device, Stream& stream, const Tensor& source,
                              absl::Span<float> values) {
  DIM0_CHECK(static_cast<int64_t>(values.size()) == source.size());
  if (source.dtype == DType::kFloat32) {
    device.CopyToHost(stream, values.data(), source.data, source.bytes());
    return stream.Synchronize();
  }
  DIM0_CHECK(source.dtype == DType::kBFloat16);
  std::vector<BFloat16> rounded(values.size());
  device.CopyToHost(stream, rounded.data(), source.data, source.bytes());
  DIM0_RETURN_IF_ERROR(stream.Synchronize());
  for (size_t i = 0; i < rounded.size(); ++i) values[i] = static_cast<float>(rounded[i]);
  return absl::OkStatus();
}

}  // namespace dim0
