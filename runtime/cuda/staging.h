// Pinned host memory through which copies between host and device pass, so that neither waits for
// the other: from pageable memory CUDA's asynchronous copies are synchronous.
#ifndef DIM0_RUNTIME_CUDA_STAGING_H_
#define DIM0_RUNTIME_CUDA_STAGING_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/cuda/cuda_event.h"

namespace dim0::cuda {

// Calls come from one host thread at a time; the device is current.
class Staging {
 public:
  explicit Staging(std::shared_ptr<EventPool> events) : events_(std::move(events)) {}
  // Copies must have passed.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Enqueue copies of any length. `source` may be changed as soon as ToDevice has returned;
  // `target` of ToHost is filled once the stream has passed. Where more than kLimit bytes are under
  // way, they wait for the first of them. Errors: what CUDA said.
  absl::Status ToDevice(void* target, const void* source, int64_t bytes, cudaStream_t stream);
  absl::Status ToHost(void* target, const void* source, int64_t bytes, cudaStream_t stream);

 private:
  static constexpr int64_t kLargestBlock = int64_t{4} << 20;
  static constexpr int64_t kLimit = int64_t{64} << 20;

  // Pinned memory and the point from which it may be used again.
  struct Block {
    void* data = nullptr;
    std::shared_ptr<TimedEvent> free;
  };

  // A block of at least `bytes`, at most kLargestBlock, that is free.
  absl::StatusOr<Block*> Take(int64_t bytes);

  const std::shared_ptr<EventPool> events_;
  std::map<int64_t, std::deque<Block>> blocks_;  // by size, each the longest in use first
  int64_t allocated_ = 0;
};

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_STAGING_H_
