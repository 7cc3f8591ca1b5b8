// The emulated runtime: streams, events, memory and errors behave as CUDA's, and what a program
// may not do is found out.
#include <cuda_runtime.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/simt/control.h"

namespace dim0::simt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)
#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess)

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

__global__ void Fill(int* to, int size, int value) {
  for (int i = 0; i < size; ++i) to[i] = value;
}
__global__ void Copy(const int* from, int* to, int size) {
  for (int i = 0; i < size; ++i) to[i] = from[i];
}
__global__ void Write(int* to, int at) { to[at] = 1; }

class RuntimeTest : public testing::Test {
 protected:
  RuntimeTest() { Use(Settings()); }
  ~RuntimeTest() override { Use(Settings()); }

  static void Use(const Settings& settings) {
    SetSettings(settings);
    Reset();
  }
  // Nothing runs before the host waits.
  static void UseLazy(uint64_t seed = 1) {
    Settings settings;
    settings.lazy = true;
    settings.seed = seed;
    Use(settings);
  }

  static cudaStream_t NewStream() {
    cudaStream_t stream = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
    return stream;
  }
  static cudaEvent_t NewEvent() {
    cudaEvent_t event = nullptr;
    EXPECT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  static int* NewInts(int size) {
    int* ints = nullptr;
    EXPECT_CUDA(cudaMalloc(&ints, size * sizeof(int)));
    return ints;
  }
  static std::vector<int> Read(const int* from, int size) {
    std::vector<int> values(size);
    EXPECT_CUDA(cudaMemcpy(values.data(), from, size * sizeof(int), cudaMemcpyDeviceToHost));
    return values;
  }
};

// ---- What overlapping streams may and may not do

TEST_F(RuntimeTest, ABufferUsedBeforeItsEventShowsAndAfterItDoesNot) {
  int found = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (const bool wait : {true, false}) {
      UseLazy(seed);
      const cudaStream_t maker = NewStream(), user = NewStream();
      const cudaEvent_t made = NewEvent();
      int *buffer = NewInts(10), *copy = NewInts(10);
      ASSERT_CUDA(Launch(Fill, maker, buffer, 10, 7));
      ASSERT_CUDA(cudaEventRecord(made, maker));
      if (wait) {
        ASSERT_CUDA(cudaStreamWaitEvent(user, made, 0));
      }
      ASSERT_CUDA(Launch(Copy, user, buffer, copy, 10));
      ASSERT_CUDA(cudaDeviceSynchronize());
      const bool right = Read(copy, 10) == std::vector<int>(10, 7);
      if (wait) {
        EXPECT_TRUE(right);
      } else {
        found += !right;
      }
    }
  }
  EXPECT_GE(found, 5);
}

TEST_F(RuntimeTest, ABufferFreedOnAnotherStreamTooEarlyShows) {
  int found = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (const bool wait : {true, false}) {
      UseLazy(seed);
      const cudaStream_t user = NewStream(), other = NewStream();
      const cudaEvent_t used = NewEvent();
      int* buffer = nullptr;
      ASSERT_CUDA(cudaMallocAsync(&buffer, 40, user));
      ASSERT_CUDA(cudaStreamSynchronize(user));
      ASSERT_CUDA(Launch(Fill, user, buffer, 10, 7));
      ASSERT_CUDA(cudaEventRecord(used, user));
      if (wait) {
        ASSERT_CUDA(cudaStreamWaitEvent(other, used, 0));
      }
      ASSERT_CUDA(cudaFreeAsync(buffer, other));
      testing::internal::CaptureStderr();
      const cudaError_t error = cudaDeviceSynchronize();
      const std::string said = testing::internal::GetCapturedStderr();
      if (wait) {
        EXPECT_EQ(error, cudaSuccess) << said;
      } else if (error != cudaSuccess) {
        ++found;
        EXPECT_EQ(error, cudaErrorIllegalAddress);
        EXPECT_THAT(said, AllOf(HasSubstr("Fill"), HasSubstr("(40 bytes of device 0), freed")));
      }
    }
  }
  EXPECT_GE(found, 5);
}

TEST_F(RuntimeTest, MemoryUsedBeforeItsStreamHasAllocatedItShows) {
  int found = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    UseLazy(seed);
    const cudaStream_t one = NewStream(), other = NewStream();
    int* buffer = nullptr;
    ASSERT_CUDA(cudaMallocAsync(&buffer, 40, one));
    ASSERT_CUDA(Launch(Fill, other, buffer, 10, 7));
    testing::internal::CaptureStderr();
    const cudaError_t error = cudaDeviceSynchronize();
    const std::string said = testing::internal::GetCapturedStderr();
    if (error == cudaSuccess) continue;
    ++found;
    EXPECT_THAT(said, HasSubstr("not yet allocated there"));
  }
  EXPECT_GE(found, 5);
}

TEST_F(RuntimeTest, OperationsOfOneStreamRunInOrder) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    UseLazy(seed);
    const cudaStream_t stream = NewStream();
    int *one = NewInts(4), *other = NewInts(4);
    for (int i = 0; i < 50; ++i) {
      ASSERT_CUDA(Launch(Fill, stream, one, 4, i));
      if (i == 30) {
        ASSERT_CUDA(Launch(Copy, stream, one, other, 4));
      }
    }
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(Read(one, 4), std::vector<int>(4, 49));
    EXPECT_EQ(Read(other, 4), std::vector<int>(4, 30));
  }
}

TEST_F(RuntimeTest, LazyStreamsAdvanceOnlyWhileTheHostWaitsOrPolls) {
  UseLazy();
  const cudaStream_t stream = NewStream();
  std::atomic<int> calls = 0;
  const auto count = [](void* data) { ++*static_cast<std::atomic<int>*>(data); };
  for (int i = 0; i < 3; ++i) ASSERT_CUDA(cudaLaunchHostFunc(stream, count, &calls));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(calls, 0);
  // A host that polls does not wait forever.
  while (true) {
    const cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaSuccess) break;
    ASSERT_EQ(error, cudaErrorNotReady);
  }
  EXPECT_EQ(calls, 3);
}

TEST_F(RuntimeTest, TheDefaultStreamWaitsForBlockingStreamsAndTheyForIt) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    UseLazy(seed);
    cudaStream_t blocking = nullptr;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
    int *one = NewInts(4), *other = NewInts(4);
    ASSERT_CUDA(Launch(Fill, blocking, one, 4, 1));
    ASSERT_CUDA(Launch(Copy, nullptr, one, other, 4));
    ASSERT_CUDA(Launch(Fill, blocking, one, 4, 2));
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(Read(other, 4), std::vector<int>(4, 1));
    EXPECT_EQ(Read(one, 4), std::vector<int>(4, 2));
  }
}

// ---- Events

TEST_F(RuntimeTest, WaitingForAnEventThatWasNotRecordedIsNothing) {
  const cudaStream_t stream = NewStream();
  const cudaEvent_t event = NewEvent();
  EXPECT_CUDA(cudaStreamWaitEvent(stream, event, 0));
  EXPECT_CUDA(cudaEventSynchronize(event));
  EXPECT_CUDA(cudaEventQuery(event));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
}

TEST_F(RuntimeTest, AnEventRecordedAgainDoesNotHoldUpWhoWaitedBefore) {
  UseLazy();
  const cudaStream_t one = NewStream(), other = NewStream();
  const cudaEvent_t event = NewEvent();
  int* buffer = NewInts(4);
  ASSERT_CUDA(cudaEventRecord(event, one));
  ASSERT_CUDA(cudaStreamWaitEvent(other, event, 0));
  ASSERT_CUDA(Launch(Fill, other, buffer, 4, 3));
  // From here on `one` waits for `other`: waiting for the second record would never end.
  const cudaEvent_t filled = NewEvent();
  ASSERT_CUDA(cudaEventRecord(filled, other));
  ASSERT_CUDA(cudaStreamWaitEvent(one, filled, 0));
  ASSERT_CUDA(cudaEventRecord(event, one));
  ASSERT_CUDA(cudaEventSynchronize(event));
  EXPECT_EQ(Read(buffer, 4), std::vector<int>(4, 3));
}

TEST_F(RuntimeTest, AnEventRecordedAgainOnAStreamThatIsAheadStillHoldsUpWhoWaitedBefore) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    UseLazy(seed);
    const cudaStream_t maker = NewStream(), user = NewStream(), idle = NewStream();
    const cudaEvent_t made = NewEvent();
    int *buffer = NewInts(10), *copy = NewInts(10);
    for (int value = 1; value <= 7; ++value) ASSERT_CUDA(Launch(Fill, maker, buffer, 10, value));
    ASSERT_CUDA(cudaEventRecord(made, maker));
    ASSERT_CUDA(cudaStreamWaitEvent(user, made, 0));
    ASSERT_CUDA(cudaEventRecord(made, idle));
    ASSERT_CUDA(cudaEventSynchronize(made));
    ASSERT_CUDA(Launch(Copy, user, buffer, copy, 10));
    ASSERT_CUDA(cudaStreamSynchronize(user));
    ASSERT_EQ(Read(copy, 10), std::vector<int>(10, 7)) << "seed " << seed;
  }
}

TEST_F(RuntimeTest, ADestroyedEventStillHoldsUpWhoWaits) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    UseLazy(seed);
    const cudaStream_t one = NewStream(), other = NewStream();
    const cudaEvent_t event = NewEvent();
    int *buffer = NewInts(4), *copy = NewInts(4);
    ASSERT_CUDA(Launch(Fill, one, buffer, 4, 3));
    ASSERT_CUDA(cudaEventRecord(event, one));
    ASSERT_CUDA(cudaStreamWaitEvent(other, event, 0));
    ASSERT_CUDA(cudaEventDestroy(event));
    ASSERT_CUDA(Launch(Copy, other, buffer, copy, 4));
    EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(Read(copy, 4), std::vector<int>(4, 3));
  }
}

TEST_F(RuntimeTest, TimingEventsTellTheTimeBetweenThem) {
  UseLazy();
  const cudaStream_t stream = NewStream();
  cudaEvent_t start = nullptr, end = nullptr;
  ASSERT_CUDA(cudaEventCreateWithFlags(&start, cudaEventDefault));
  ASSERT_CUDA(cudaEventCreateWithFlags(&end, cudaEventDefault));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
  ASSERT_CUDA(cudaEventRecord(start, stream));
  ASSERT_CUDA(cudaLaunchHostFunc(
      stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
  ASSERT_CUDA(cudaEventRecord(end, stream));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
  EXPECT_EQ(cudaEventQuery(end), cudaErrorNotReady);
  ASSERT_CUDA(cudaEventSynchronize(end));
  ASSERT_CUDA(cudaEventElapsedTime(&milliseconds, start, end));
  EXPECT_GE(milliseconds, 5.0f);
  EXPECT_LT(milliseconds, 5000.0f);
  const cudaEvent_t untimed = NewEvent();
  ASSERT_CUDA(cudaEventRecord(untimed, stream));
  ASSERT_CUDA(cudaEventSynchronize(untimed));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, untimed), cudaErrorInvalidResourceHandle);
}

// ---- Handles

TEST_F(RuntimeTest, HandlesOfOtherDevicesAndDestroyedOnesAreRefused) {
  const cudaStream_t stream = NewStream();
  const cudaEvent_t event = NewEvent();
  int* buffer = NewInts(4);
  ASSERT_CUDA(cudaSetDevice(1));
  EXPECT_EQ(Launch(Fill, stream, buffer, 4, 1), cudaErrorInvalidResourceHandle);
  const cudaStream_t second = NewStream();
  EXPECT_EQ(cudaEventRecord(event, second), cudaErrorInvalidResourceHandle);
  EXPECT_CUDA(cudaStreamWaitEvent(second, event, 0));
  EXPECT_CUDA(cudaEventRecord(event, stream));
  ASSERT_CUDA(cudaSetDevice(0));
  ASSERT_CUDA(Launch(Fill, stream, buffer, 4, 1));
  // What is enqueued still runs.
  ASSERT_CUDA(cudaStreamDestroy(stream));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(Read(buffer, 4), std::vector<int>(4, 1));
  EXPECT_EQ(cudaSetDevice(4), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
}

TEST_F(RuntimeTest, WithoutDevicesThereIsNothing) {
  Settings settings;
  settings.devices = 0;
  Use(settings);
  int count = 7, version = 7;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(count, 0);
  EXPECT_CUDA(cudaDriverGetVersion(&version));
  EXPECT_EQ(version, 0);
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 4), cudaErrorNoDevice);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorNoDevice);
}

// ---- Copies

TEST_F(RuntimeTest, PageableSourcesMayChangeOnceACopyReturnsAndPinnedOnesMayNot) {
  UseLazy();
  const cudaStream_t stream = NewStream();
  int *from_pageable = NewInts(4), *from_pinned = NewInts(4);
  std::vector<int> pageable(4, 1);
  int* pinned = nullptr;
  ASSERT_CUDA(cudaMallocHost(&pinned, 16));
  std::fill(pinned, pinned + 4, 1);
  ASSERT_CUDA(cudaMemcpyAsync(from_pageable, pageable.data(), 16, cudaMemcpyHostToDevice, stream));
  ASSERT_CUDA(cudaMemcpyAsync(from_pinned, pinned, 16, cudaMemcpyHostToDevice, stream));
  std::fill(pageable.begin(), pageable.end(), 2);
  std::fill(pinned, pinned + 4, 2);
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(Read(from_pageable, 4), std::vector<int>(4, 1));
  EXPECT_EQ(Read(from_pinned, 4), std::vector<int>(4, 2));
  ASSERT_CUDA(cudaFreeHost(pinned));
}

TEST_F(RuntimeTest, PageableDestinationsAreWrittenWhenACopyReturnsAndPinnedOnesLater) {
  UseLazy();
  const cudaStream_t stream = NewStream();
  int* from = NewInts(4);
  std::vector<int> pageable(4, 0);
  int* pinned = nullptr;
  ASSERT_CUDA(cudaMallocHost(&pinned, 16));
  std::fill(pinned, pinned + 4, 0);
  ASSERT_CUDA(Launch(Fill, stream, from, 4, 5));
  ASSERT_CUDA(cudaMemcpyAsync(pageable.data(), from, 16, cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(pageable, std::vector<int>(4, 5));
  ASSERT_CUDA(cudaMemcpyAsync(pinned, from, 16, cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(pinned[3], 0);
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(pinned[3], 5);
  ASSERT_CUDA(cudaFreeHost(pinned));
}

TEST_F(RuntimeTest, PinnedMemoryFreedBeforeItsCopyShows) {
  UseLazy();
  const cudaStream_t stream = NewStream();
  int* to = NewInts(4);
  int* pinned = nullptr;
  ASSERT_CUDA(cudaMallocHost(&pinned, 16));
  ASSERT_CUDA(cudaMemcpyAsync(to, pinned, 16, cudaMemcpyHostToDevice, stream));
  ASSERT_CUDA(cudaFreeHost(pinned));
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("cudaMemcpyAsync"), HasSubstr("freed"), HasSubstr("pinned")));
}

TEST_F(RuntimeTest, CopiesBeyondAnAllocationOrInTheWrongDirectionAreRefused) {
  int* device = NewInts(4);
  std::vector<int> host(8);
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaMemcpy(device, host.data(), 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), device + 1, 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(device, 0, 17), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), device, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device, host.data(), 16, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(nullptr, device, 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  testing::internal::GetCapturedStderr();
  EXPECT_CUDA(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDeviceToHost));
  EXPECT_CUDA(cudaMemcpy(device, host.data(), 16, cudaMemcpyDefault));
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(RuntimeTest, MemoryCanBeFilledWithABytePattern) {
  int* device = NewInts(4);
  ASSERT_CUDA(cudaMemsetAsync(device, 0x12, 12, nullptr));
  EXPECT_EQ(Read(device, 4), (std::vector<int>{0x12121212, 0x12121212, 0x12121212, -1}));
}

// ---- Allocation

TEST_F(RuntimeTest, MemoryRunsOutAtTheDevicesSize) {
  Settings settings;
  settings.memory_bytes = 1 << 20;
  Use(settings);
  const cudaStream_t stream = NewStream();
  void *one = nullptr, *other = nullptr;
  ASSERT_CUDA(cudaMallocAsync(&one, 700 << 10, stream));
  EXPECT_EQ(cudaMalloc(&other, 400 << 10), cudaErrorMemoryAllocation);
  EXPECT_EQ(other, nullptr);
  size_t free = 0, total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(total, size_t{1} << 20);
  EXPECT_EQ(free, size_t{324} << 10);
  ASSERT_CUDA(cudaFreeAsync(one, stream));
  ASSERT_CUDA(cudaMalloc(&other, 1 << 20));
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  // Each device has its own.
  ASSERT_CUDA(cudaSetDevice(1));
  EXPECT_CUDA(cudaMalloc(&one, 1 << 20));
  uint64_t used = 0;
  cudaMemPool_t pool = nullptr;
  ASSERT_CUDA(cudaDeviceGetDefaultMemPool(&pool, 1));
  ASSERT_CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
  EXPECT_EQ(used, uint64_t{1} << 20);
  EXPECT_CUDA(cudaMemPoolTrimTo(pool, 0));
}

TEST_F(RuntimeTest, WhatIsNotAllocatedCannotBeFreed) {
  int* device = NewInts(4);
  int host = 0;
  const cudaStream_t stream = NewStream();
  EXPECT_EQ(cudaFree(device + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(&host), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(device), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeAsync(device, stream), cudaErrorInvalidValue);
  EXPECT_CUDA(cudaFree(device));
  EXPECT_EQ(cudaFree(device), cudaErrorInvalidValue);
  EXPECT_CUDA(cudaFree(nullptr));
  int* ordered = nullptr;
  ASSERT_CUDA(cudaMallocAsync(&ordered, 16, stream));
  ASSERT_CUDA(cudaFreeAsync(ordered, stream));
  EXPECT_EQ(cudaFreeAsync(ordered, stream), cudaErrorInvalidValue);
}

TEST_F(RuntimeTest, DamageIsToldByTheNextCallThatWaits) {
  // The host writes where a device's memory ends; no kernel is there to be named.
  int* pinned = nullptr;
  ASSERT_CUDA(cudaMallocHost(&pinned, 20));
  reinterpret_cast<volatile int*>(pinned)[5] = 1;
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("written 0 bytes past the end of allocation"));
}

using RuntimeDeathTest = RuntimeTest;

TEST_F(RuntimeDeathTest, AHostThatTouchesFreedMemoryDiesByAClearLine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        int* device = NewInts(4);
        cudaFree(device);
        reinterpret_cast<volatile int*>(device)[1] = 1;
      },
      "simt: bad access by the host to .*: byte 4 of allocation .*16 bytes of device 0.*freed");
}

// ---- Errors

TEST_F(RuntimeTest, AFailedKernelFailsItsDeviceForGood) {
  const cudaStream_t stream = NewStream();
  int* buffer = NewInts(4);
  testing::internal::CaptureStderr();
  ASSERT_CUDA(Launch(Write, stream, buffer, 1 << 20));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("Write"));
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 4), cudaErrorIllegalAddress);
  EXPECT_EQ(Launch(Write, stream, buffer, 1), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorIllegalAddress), "cudaErrorIllegalAddress");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorIllegalAddress),
               "an illegal memory access was encountered");
  ASSERT_CUDA(cudaSetDevice(1));
  EXPECT_CUDA(cudaMalloc(&pointer, 4));
  EXPECT_CUDA(cudaDeviceSynchronize());
}

TEST_F(RuntimeTest, AfterAFailureWhatIsEnqueuedIsDroppedAndNothingHangs) {
  UseLazy();
  const cudaStream_t stream = NewStream(), other = NewStream();
  const cudaEvent_t event = NewEvent();
  int *buffer = NewInts(4), *copy = NewInts(4);
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::atomic<int> calls = 0;
  ASSERT_CUDA(Launch(Write, stream, buffer, 1 << 20));
  ASSERT_CUDA(cudaEventRecord(event, stream));
  ASSERT_CUDA(cudaStreamWaitEvent(other, event, 0));
  ASSERT_CUDA(Launch(Fill, other, copy, 4, 1));
  ASSERT_CUDA(cudaLaunchHostFunc(
      other, [](void* data) { ++*static_cast<std::atomic<int>*>(data); }, &calls));
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaStreamSynchronize(other), cudaErrorIllegalAddress);
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(calls, 0);
}

TEST_F(RuntimeTest, FunctionsOnAStreamMayNotCallTheRuntime) {
  const cudaStream_t stream = NewStream();
  cudaError_t error = cudaSuccess;
  testing::internal::CaptureStderr();
  ASSERT_CUDA(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        void* pointer = nullptr;
        *static_cast<cudaError_t*>(data) = cudaMalloc(&pointer, 4);
      },
      &error));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("cudaMalloc"));
  EXPECT_EQ(error, cudaErrorNotPermitted);
}

// A small program that stops at the first error, and cleans up.
cudaError_t Program(int* result) {
  int* buffer = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  const auto run = [&]() -> cudaError_t {
    const auto steps = {
        std::function<cudaError_t()>([&] { return cudaSetDevice(0); }),
        std::function<cudaError_t()>(
            [&] { return cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0); }),
        std::function<cudaError_t()>([&] { return cudaEventCreateWithFlags(&event, 0); }),
        std::function<cudaError_t()>([&] { return cudaMalloc(&buffer, 16); }),
        std::function<cudaError_t()>([&] { return Launch(Fill, stream, buffer, 4, 9); }),
        std::function<cudaError_t()>([&] { return cudaEventRecord(event, stream); }),
        std::function<cudaError_t()>([&] { return cudaEventSynchronize(event); }),
        std::function<cudaError_t()>(
            [&] { return cudaMemcpyAsync(result, buffer, 4, cudaMemcpyDeviceToHost, stream); }),
    };
    for (const auto& step : steps) {
      const cudaError_t error = step();
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  };
  const cudaError_t error = run();
  if (buffer) cudaFree(buffer);
  if (event) cudaEventDestroy(event);
  if (stream) cudaStreamDestroy(stream);
  return error;
}

TEST_F(RuntimeTest, EachCallCanBeMadeToFail) {
  const int64_t before = CallCount();
  int result = 0;
  ASSERT_CUDA(Program(&result));
  EXPECT_EQ(result, 9);
  const int64_t calls = CallCount() - before;
  EXPECT_EQ(calls, 11);
  std::vector<std::string> failed;
  for (int64_t n = 1; n <= calls; ++n) {
    Reset();
    FailCall(n);
    testing::internal::CaptureStderr();
    const cudaError_t error = Program(&result);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_THAT(said, HasSubstr(FailedCall() + ", fails as it was told to"));
    failed.push_back(FailedCall());
    // The last three are those that clean up, where errors are of no interest.
    EXPECT_EQ(error != cudaSuccess, n <= 8) << said;
    if (FailedCall() == "cudaMalloc") {
      EXPECT_EQ(error, cudaErrorMemoryAllocation);
    }
  }
  EXPECT_THAT(failed,
              testing::ElementsAre("cudaSetDevice", "cudaStreamCreateWithPriority",
                                   "cudaEventCreateWithFlags", "cudaMalloc", "cudaLaunchKernelEx",
                                   "cudaEventRecord", "cudaEventSynchronize", "cudaMemcpyAsync",
                                   "cudaFree", "cudaEventDestroy", "cudaStreamDestroy"));
}

TEST_F(RuntimeTest, HostThreadsHaveTheirOwnCurrentDeviceAndShareTheDevices) {
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  std::vector<int> sums(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i, &sums] {
      cudaSetDevice(i);
      const cudaStream_t stream = NewStream();
      int* buffer = NewInts(100);
      for (int k = 0; k <= 50; ++k) Launch(Fill, stream, buffer, 100, i * 100 + k);
      EXPECT_CUDA(cudaStreamSynchronize(stream));
      for (const int value : Read(buffer, 100)) sums[i] += value;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kThreads; ++i) EXPECT_EQ(sums[i], 100 * (100 * i + 50));
}

}  // namespace
}  // namespace dim0::simt
