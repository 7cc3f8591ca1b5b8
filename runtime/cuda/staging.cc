#include "runtime/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/cuda_status.h"
#include "runtime/check.h"

namespace dim0::cuda {
namespace {

// That of the widest element, and a cache line.
constexpr int64_t kAlignment = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<Staging>> Staging::Create(std::shared_ptr<EventPool> events) {
  std::unique_ptr<Staging> staging(new Staging(std::move(events)));
  void* memory = nullptr;
  DIM0_RETURN_IF_ERROR(
      ToStatus(cudaHostAlloc(&memory, kRingBytes, cudaHostAllocDefault), "pinned host memory"));
  staging->memory_ = static_cast<char*>(memory);
  return staging;
}

Staging::~Staging() {
  if (memory_ != nullptr) cudaFreeHost(memory_);
}

absl::StatusOr<Staging::Block> Staging::Take(int64_t bytes) {
  DIM0_RETURN_IF_ERROR(failure_);
  Block block;
  block.begin = (next_ + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t to_end = kRingBytes - block.begin % kRingBytes;
  if (bytes > to_end) block.begin += to_end;
  block.end = block.begin + bytes;
  while (!blocks_.empty() && blocks_.front().begin < block.end - kRingBytes) {
    DIM0_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(blocks_.front().free->event()),
                                  "waiting for a copy between host and GPU"));
    blocks_.pop_front();
  }
  next_ = block.end;
  return block;
}

void Staging::RunHostCopy(void* host_copy) {
  const auto& copy = *static_cast<const HostCopy*>(host_copy);
  std::memcpy(copy.target, copy.source, copy.bytes);
}

absl::Status Staging::Release(Block block, cudaStream_t stream) {
  absl::StatusOr<std::shared_ptr<TimedEvent>> free = events_->Record(stream);
  if (free.ok()) {
    block.free = *std::move(free);
  } else {
    failure_ = free.status();
  }
  blocks_.push_back(std::move(block));  // in any case: the copy may be under way
  return failure_;
}

absl::Status Staging::ToDevice(void* target, const void* source, int64_t bytes,
                               cudaStream_t stream) {
  for (int64_t done = 0; done < bytes; done += kLargestBlock) {
    const int64_t count = std::min(kLargestBlock, bytes - done);
    DIM0_ASSIGN_OR_RETURN(Block block, Take(count));
    std::memcpy(At(block), static_cast<const char*>(source) + done, count);
    DIM0_RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(static_cast<char*>(target) + done, At(block),
                                                  count, cudaMemcpyHostToDevice, stream),
                                  "copying to the GPU"));
    DIM0_RETURN_IF_ERROR(Release(std::move(block), stream));
  }
  return absl::OkStatus();
}

absl::Status Staging::ToHost(void* target, const void* source, int64_t bytes, cudaStream_t stream) {
  for (int64_t done = 0; done < bytes; done += kLargestBlock) {
    const int64_t count = std::min(kLargestBlock, bytes - done);
    DIM0_ASSIGN_OR_RETURN(Block block, Take(count));
    DIM0_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(At(block), static_cast<const char*>(source) + done, count,
                                 cudaMemcpyDeviceToHost, stream),
                 "copying from the GPU"));
    block.copy =
        std::make_unique<HostCopy>(HostCopy{static_cast<char*>(target) + done, At(block), count});
    DIM0_RETURN_IF_ERROR(ToStatus(cudaLaunchHostFunc(stream, RunHostCopy, block.copy.get()),
                                  "copying from the GPU"));
    DIM0_RETURN_IF_ERROR(Release(std::move(block), stream));
  }
  return absl::OkStatus();
}

}  // namespace dim0::cuda
