// Device memory for tests of kernels.
#ifndef DIM0_RUNTIME_CUDA_DEVICE_ARRAY_H_
#define DIM0_RUNTIME_CUDA_DEVICE_ARRAY_H_

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "collectives/dtype.h"
#include "runtime/cuda/element_type.h"

namespace dim0::cuda {

// For a test's or fixture's SetUp: whether there is a GPU, real or emulated.
inline bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// An array of T in an allocation of its own, which it fills but for `shift` elements at the front:
// what reads or writes past its end leaves the allocation.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values, int shift = 0)
      : size_(values.size()), shift_(shift) {
    if (size_ == 0) return;
    EXPECT_EQ(cudaMalloc(&memory_, (size_ + shift_) * sizeof(T)), cudaSuccess);
    Set(values);
  }
  ~DeviceArray() { (void)cudaFree(memory_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  // Null if the array is empty.
  T* data() const { return memory_ == nullptr ? nullptr : static_cast<T*>(memory_) + shift_; }
  int64_t size() const { return size_; }

  void Set(const std::vector<T>& values) {
    EXPECT_EQ(static_cast<int64_t>(values.size()), size_);
    EXPECT_EQ(cudaMemcpy(data(), values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    // Such a copy may return before the last bytes are there, and streams that do not block do not
    // wait for it.
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  }
  // Waits for all that has been enqueued on the device.
  std::vector<T> Get() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (size_ == 0) return values;
    EXPECT_EQ(cudaMemcpy(values.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  const int64_t size_;
  const int shift_;
  void* memory_ = nullptr;
};

// The same of either element type, seen as float32 by the host.
class DeviceElements {
 public:
  DeviceElements(ElementType type, const std::vector<float>& values, int shift = 0)
      : type_(type), bytes_(Bytes(type, values), shift * static_cast<int>(SizeOf(type))) {}

  ElementType type() const { return type_; }
  void* data() const { return bytes_.data(); }
  int64_t size() const { return bytes_.size() / SizeOf(type_); }
  std::vector<float> Get() const {
    const std::vector<uint8_t> bytes = bytes_.Get();
    std::vector<float> values(size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (type_ == ElementType::kFloat32) {
        std::memcpy(&values[i], bytes.data() + 4 * i, 4);
      } else {
        BFloat16 value;
        std::memcpy(&value, bytes.data() + 2 * i, 2);
        values[i] = static_cast<float>(value);
      }
    }
    return values;
  }

 private:
  static std::vector<uint8_t> Bytes(ElementType type, const std::vector<float>& values) {
    std::vector<uint8_t> bytes(values.size() * SizeOf(type));
    for (size_t i = 0; i < values.size(); ++i) {
      if (type == ElementType::kFloat32) {
        std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      } else {
        const BFloat16 value(values[i]);
        std::memcpy(bytes.data() + 2 * i, &value, 2);
      }
    }
    return bytes;
  }

  const ElementType type_;
  DeviceArray<uint8_t> bytes_;
};

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_DEVICE_ARRAY_H_
