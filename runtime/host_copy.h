// Values between host memory, where they are float32, and device memory, where they may be bfloat16
// too.
#ifndef DIM0_RUNTIME_HOST_COPY_H_
#define DIM0_RUNTIME_HOST_COPY_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "runtime/device.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace dim0 {

// target = values, rounded to nearest, ties to even, where it is bfloat16. Same size. Blocks until
// `stream` has passed; returns its error.
absl::Status CopyFloatsFromHost(Device& device, Stream& stream, absl::Span<const float> values,
                                const Tensor& target);

// The reverse, which is exact.
absl::Status CopyFloatsToHost(Device& device, Stream& stream, const Tensor& source,
                              absl::Span<float> values);

}  // namespace dim0

#endif  // DIM0_RUNTIME_HOST_COPY_H_
