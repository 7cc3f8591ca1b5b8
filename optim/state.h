// Lays out an optimizer's sharded state in one buffer.
#ifndef DIM0_OPTIM_STATE_H_
#define DIM0_OPTIM_STATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "runtime/allocator.h"
#include "runtime/optimizer.h"
#include "runtime/parameter.h"
#include "runtime/sharding.h"
#include "runtime/tensor.h"

namespace dim0 {

// Add every tensor, Allocate, then Place the tensors in the order in which they were added.
class StateLayout {
 public:
  explicit StateLayout(const OptimizerResources& resources) : resources_(resources) {}

  // A float32 tensor sharded as the parameter is; no memory yet.
  Tensor Add(const ParameterSpec& spec) {
    const RowRange rows = RowsOfRank(spec.rows, resources_.world_size, resources_.rank);
    const Tensor tensor = F32(nullptr, rows.size(), spec.cols);
    floats_ += Padded(tensor);
    return tensor;
  }

  // Zero-filled memory for all of them.
  absl::StatusOr<Buffer> Allocate() const {
    return resources_.allocator->Allocate(MemoryPurpose::kOptimizer,
                                          floats_ * static_cast<int64_t>(sizeof(float)));
  }

  void Place(const Buffer& buffer, Tensor& tensor) {
    if (buffer.data() != nullptr) tensor.data = buffer.f32() + placed_;
    placed_ += Padded(tensor);
  }

 private:
  // Cache-line aligned, so that threads of neighbouring tensors share no line.
  static int64_t Padded(const Tensor& tensor) { return (tensor.size() + 15) / 16 * 16; }

  const OptimizerResources& resources_;
  int64_t floats_ = 0;
  int64_t placed_ = 0;
};

}  // namespace dim0

#endif  // DIM0_OPTIM_STATE_H_
