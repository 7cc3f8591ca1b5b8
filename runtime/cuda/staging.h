// Pinned host memory through which copies between host and device pass, so that neither waits for
// the other: from pageable memory CUDA's asynchronous copies are synchronous.
#ifndef DIM0_RUNTIME_CUDA_STAGING_H_
#define DIM0_RUNTIME_CUDA_STAGING_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/cuda/cuda_event.h"

namespace dim0::cuda {

// A ring: all of its memory is there from the beginning, since pinning some while kernels of other
// ranks of the process wait for this one may wait for them. Calls come from one host thread at a
// time; the device is current.
class Staging {
 public:
  // Error: what CUDA said.
  static absl::StatusOr<std::unique_ptr<Staging>> Create(std::shared_ptr<EventPool> events);
  // Copies must have passed.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Enqueue copies of any length. `source` may be changed as soon as ToDevice has returned;
  // `target` of ToHost is filled once the stream has passed. Where the ring is full, they wait for
  // the oldest copy in it. Errors: what CUDA said.
  absl::Status ToDevice(void* target, const void* source, int64_t bytes, cudaStream_t stream);
  absl::Status ToHost(void* target, const void* source, int64_t bytes, cudaStream_t stream);

 private:
  static constexpr int64_t kRingBytes = int64_t{32} << 20;
  static constexpr int64_t kLargestBlock = int64_t{4} << 20;

  // From pinned memory, when the copy from the device has passed.
  struct HostCopy {
    void* target;
    const void* source;
    int64_t bytes;
  };

  // Positions grow for ever; in memory they are taken modulo kRingBytes. No block crosses the end.
  struct Block {
    int64_t begin = 0, end = 0;
    std::shared_ptr<TimedEvent> free;  // from when on it may be used again
    std::unique_ptr<HostCopy> copy;    // of a copy to the host
  };

  explicit Staging(std::shared_ptr<EventPool> events) : events_(std::move(events)) {}

  // A free block of at most kLargestBlock bytes, which is in use until its `free` has passed.
  absl::StatusOr<Block> Take(int64_t bytes);
  static void RunHostCopy(void* host_copy);  // for cudaLaunchHostFunc
  char* At(const Block& block) const { return memory_ + block.begin % kRingBytes; }
  // The block is free behind what `stream` holds by now.
  absl::Status Release(Block block, cudaStream_t stream);

  const std::shared_ptr<EventPool> events_;
  char* memory_ = nullptr;
  int64_t next_ = 0;          // where the next block may begin
  absl::Status failure_;      // it cannot be told when a block is free
  std::deque<Block> blocks_;  // in use, the oldest first
};

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_STAGING_H_
