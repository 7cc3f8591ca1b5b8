// The counting allocator: the one door through which device memory comes, tagged by purpose. In
// plan mode it counts without allocating, so the prediction printed before step 1 is made by the
// code that will allocate and cannot drift from it.
#ifndef DIM0_RUNTIME_ALLOCATOR_H_
#define DIM0_RUNTIME_ALLOCATOR_H_

#include <array>
#include <cstdint>
#include <mutex>

#include "absl/status/statusor.h"
#include "runtime/device.h"
#include "runtime/memory_purpose.h"

namespace dim0 {

class Allocator;

// Memory owned; returned to the allocator on destruction. Movable. The allocator outlives it.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;

  // Null in plan mode.
  void* data() const { return data_; }
  float* f32() const { return static_cast<float*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  friend class Allocator;
  Allocator* allocator_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryPurpose purpose_ = MemoryPurpose::kParameters;
};

// Bytes by purpose.
struct MemoryUse {
  std::array<int64_t, kNumMemoryPurposes> bytes{};
  int64_t total() const;
  int64_t operator[](MemoryPurpose purpose) const { return bytes[static_cast<int>(purpose)]; }
};

// Thread-safe.
class Allocator {
 public:
  // Allocates on `device`, which outlives the allocator.
  explicit Allocator(Device* device) : device_(device) {}
  // Plan mode: counts only; buffers have null data.
  static Allocator ForPlan() { return Allocator(nullptr); }

  bool plan_only() const { return device_ == nullptr; }

  // Zero-filled. 0 bytes give an empty buffer. Error: ResourceExhausted naming purpose and size.
  absl::StatusOr<Buffer> Allocate(MemoryPurpose purpose, int64_t bytes);

  MemoryUse current() const;
  // Each purpose's own peak.
  MemoryUse peak() const;

 private:
  friend class Buffer;
  void Release(Buffer& buffer);

  Device* const device_;
  mutable std::mutex mutex_;
  MemoryUse current_;
  MemoryUse peak_;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_ALLOCATOR_H_
