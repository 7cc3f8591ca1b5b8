#include "runtime/allocator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dim0 {

Buffer::~Buffer() {
  if (allocator_ != nullptr) allocator_->Release(*this);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    if (allocator_ != nullptr) allocator_->Release(*this);
    allocator_ = std::exchange(other.allocator_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    purpose_ = other.purpose_;
  }
  return *this;
}

int64_t MemoryUse::total() const { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }

absl::StatusOr<Buffer> Allocator::Allocate(MemoryPurpose purpose, int64_t bytes) {
  DIM0_CHECK(bytes >= 0);
  Buffer buffer;
  if (bytes == 0) return buffer;
  if (device_ != nullptr) {
    absl::StatusOr<void*> data = device_->Allocate(bytes);
    if (!data.ok()) {
      return absl::Status(data.status().code(),
                          absl::StrCat(data.status().message(), " (for ", Name(purpose), ")"));
    }
    buffer.data_ = *data;
  }
  buffer.allocator_ = this;
  buffer.bytes_ = bytes;
  buffer.purpose_ = purpose;
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t& current = current_.bytes[static_cast<int>(purpose)];
  int64_t& peak = peak_.bytes[static_cast<int>(purpose)];
  current += bytes;
  peak = std::max(peak, current);
  return buffer;
}

void Allocator::Release(Buffer& buffer) {
  if (device_ != nullptr) device_->Free(buffer.data_, buffer.bytes_);
  std::lock_guard<std::mutex> lock(mutex_);
  current_.bytes[static_cast<int>(buffer.purpose_)] -= buffer.bytes_;
}

MemoryUse Allocator::current() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return current_;
}

MemoryUse Allocator::peak() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

}  // namespace dim0
