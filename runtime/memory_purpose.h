// What device memory is for. Tables, counters and traces split by it.
#ifndef DIM0_RUNTIME_MEMORY_PURPOSE_H_
#define DIM0_RUNTIME_MEMORY_PURPOSE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace dim0 {

enum class MemoryPurpose : uint8_t {
  kParameters,     // this rank's shards
  kGradients,      // this rank's gradient shards
  kOptimizer,      // optimizer state
  kGathered,       // unsharded parameters of the units in use
  kActivations,    // what the model keeps between forward and backward, and its workspaces
  kCommunication,  // unsharded gradients on their way to the reduce-scatter; optimizers' wire
                   // buffers
  kDiagnostics,    // copies and products of a run that measures itself
};
inline constexpr int kNumMemoryPurposes = 7;

constexpr absl::string_view Name(MemoryPurpose purpose) {
  switch (purpose) {
    case MemoryPurpose::kParameters:
      return "parameters";
    case MemoryPurpose::kGradients:
      return "gradients";
    case MemoryPurpose::kOptimizer:
      return "optimizer";
    case MemoryPurpose::kGathered:
      return "gathered";
    case MemoryPurpose::kActivations:
      return "activations";
    case MemoryPurpose::kCommunication:
      return "communication";
    case MemoryPurpose::kDiagnostics:
      return "diagnostics";
  }
  return "?";
}

}  // namespace dim0

#endif  // DIM0_RUNTIME_MEMORY_PURPOSE_H_
