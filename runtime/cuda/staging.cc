#include "runtime/cuda/staging.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "runtime/check.h"
#include "runtime/cuda/status.h"

namespace dim0::cuda {
namespace {

constexpr int64_t kSmallestBlock = int64_t{4} << 10;

// For cudaLaunchHostFunc, which calls it when the copy to pinned memory has passed.
struct HostCopy {
  void* target;
  const void* source;
  int64_t bytes;
};

void RunHostCopy(void* argument) {
  const std::unique_ptr<HostCopy> copy(static_cast<HostCopy*>(argument));
  std::memcpy(copy->target, copy->source, copy->bytes);
}

}  // namespace

Staging::~Staging() {
  for (auto& [size, blocks] : blocks_) {
    for (Block& block : blocks) cudaFreeHost(block.data);
  }
}

absl::StatusOr<Staging::Block*> Staging::Take(int64_t bytes) {
  const auto size =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(bytes, kSmallestBlock))));
  std::deque<Block>& blocks = blocks_[size];
  const bool reusable =
      !blocks.empty() && (blocks.front().free == nullptr || blocks.front().free->passed());
  if (!reusable && (blocks.empty() || allocated_ + size <= kLimit)) {
    Block made;
    DIM0_RETURN_IF_ERROR(
        ToStatus(cudaHostAlloc(&made.data, size, cudaHostAllocDefault), "pinned host memory"));
    allocated_ += size;
    blocks.push_front(std::move(made));
  } else if (!reusable) {
    DIM0_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(blocks.front().free->event()),
                                  "waiting for a copy between host and GPU"));
  }
  std::rotate(blocks.begin(), blocks.begin() + 1, blocks.end());
  return &blocks.back();
}

absl::Status Staging::ToDevice(void* target, const void* source, int64_t bytes,
                               cudaStream_t stream) {
  for (int64_t done = 0; done < bytes; done += kLargestBlock) {
    const int64_t count = std::min(kLargestBlock, bytes - done);
    DIM0_ASSIGN_OR_RETURN(Block* const block, Take(count));
    std::memcpy(block->data, static_cast<const char*>(source) + done, count);
    DIM0_RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(static_cast<char*>(target) + done, block->data,
                                                  count, cudaMemcpyHostToDevice, stream),
                                  "copying to the GPU"));
    DIM0_ASSIGN_OR_RETURN(block->free, events_->Record(stream));
  }
  return absl::OkStatus();
}

absl::Status Staging::ToHost(void* target, const void* source, int64_t bytes, cudaStream_t stream) {
  for (int64_t done = 0; done < bytes; done += kLargestBlock) {
    const int64_t count = std::min(kLargestBlock, bytes - done);
    DIM0_ASSIGN_OR_RETURN(Block* const block, Take(count));
    DIM0_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(block->data, static_cast<const char*>(source) + done, count,
                                 cudaMemcpyDeviceToHost, stream),
                 "copying from the GPU"));
    auto copy =
        std::make_unique<HostCopy>(HostCopy{static_cast<char*>(target) + done, block->data, count});
    DIM0_RETURN_IF_ERROR(
        ToStatus(cudaLaunchHostFunc(stream, RunHostCopy, copy.get()), "copying from the GPU"));
    (void)copy.release();  // RunHostCopy's now
    DIM0_ASSIGN_OR_RETURN(block->free, events_->Record(stream));
  }
  return absl::OkStatus();
}

}  // namespace dim0::cuda
