// The emulator's kernels: what device code may rely on holds, and what it may not is found out.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/simt/control.h"

// In this namespace the emulator finds shared arrays.
namespace dim0::cuda {

__device__ unsigned char* DynamicSharedMemory() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// Device memory that can be read once everything has run.
template <typename T>
class Array {
 public:
  explicit Array(size_t size) : size_(size) {
    EXPECT_EQ(cudaMalloc(&data_, size * sizeof(T)), cudaSuccess);
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

class SimtTest : public testing::Test {
 protected:
  SimtTest() { Use(simt::Settings()); }
  ~SimtTest() override { Use(simt::Settings()); }

  static void Use(const simt::Settings& settings) {
    simt::SetSettings(settings);
    simt::Reset();
  }

  // Runs `run` for many ways in which threads can be ordered. Without `races`, kernels that race on
  // shared memory go on.
  static void ForOrders(const std::function<void()>& run, bool races = true) {
    for (const auto order :
         {simt::ThreadOrder::kForward, simt::ThreadOrder::kReverse, simt::ThreadOrder::kShuffled}) {
      for (uint64_t seed = 1; seed <= (order == simt::ThreadOrder::kShuffled ? 8 : 1); ++seed) {
        simt::Settings settings;
        settings.order = order;
        settings.seed = seed;
        settings.races = races;
        simt::SetSettings(settings);
        SCOPED_TRACE(testing::Message()
                     << "order " << static_cast<int>(order) << ", seed " << seed);
        run();
      }
    }
    simt::SetSettings(simt::Settings());
  }

  // Waits for everything; expects `error`. Returns what was said on standard error meanwhile.
  static std::string ExpectFailure(cudaError_t error, const std::function<void()>& run) {
    testing::internal::CaptureStderr();
    run();
    EXPECT_EQ(cudaDeviceSynchronize(), error);
    const std::string said = testing::internal::GetCapturedStderr();
    simt::Reset();
    return said;
  }
};

// ---- Threads and blocks

__global__ void CountVisits(int* visits) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  atomicAdd(&visits[block * blockDim.x * blockDim.y * blockDim.z + thread], 1);
}

TEST_F(SimtTest, EveryThreadOfEveryBlockRunsOnce) {
  ForOrders([] {
    const dim3 grid(3, 5, 2), block(7, 3, 4);
    const size_t threads = 3 * 5 * 2 * 7 * 3 * 4;
    Array<int> visits(std::vector<int>(threads, 0));
    ASSERT_EQ(Launch(CountVisits, grid, block, 0, visits.data()), cudaSuccess);
    EXPECT_EQ(visits.Read(), std::vector<int>(threads, 1));
  });
}

__global__ void Nothing() {}

TEST_F(SimtTest, LaunchesBeyondTheLimitsAreRefused) {
  const dim3 one(1);
  EXPECT_EQ(Launch(Nothing, one, dim3(1024), 0), cudaSuccess);
  EXPECT_EQ(Launch(Nothing, one, dim3(1025), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Nothing, one, dim3(32, 33), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Nothing, one, dim3(1, 1, 65), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Nothing, one, dim3(0), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Nothing, dim3(0), one, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Nothing, dim3(1, 65536), one, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Nothing, dim3(1, 65535), one, 0), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(SimtTest, MoreThan48KiBOfSharedMemoryNeedToBeAskedFor) {
  const dim3 one(1);
  constexpr int kStatic = 48 << 10;
  EXPECT_EQ(Launch(Nothing, one, one, kStatic), cudaSuccess);
  EXPECT_EQ(Launch(Nothing, one, one, kStatic + 1), cudaErrorInvalidValue);
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaDeviceProp properties;
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  const int most = static_cast<int>(properties.sharedMemPerBlockOptin);
  EXPECT_EQ(cudaFuncSetAttribute(Nothing, attribute, most + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(Nothing, attribute, most), cudaSuccess);
  EXPECT_EQ(Launch(Nothing, one, one, most), cudaSuccess);
  EXPECT_EQ(Launch(Nothing, one, one, most + 1), cudaErrorInvalidValue);
  // Of another kernel, and on another device, nothing was said.
  EXPECT_EQ(Launch(CountVisits, one, one, most, nullptr), cudaErrorInvalidValue);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(Launch(Nothing, one, one, most), cudaErrorInvalidValue);
}

// ---- Barriers and exchanges

__global__ void Reverse(const int* in, int* out) {
  __shared__ int values[256];
  values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  const int value = values[blockDim.x - 1 - threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = value + 1;
  __syncthreads();
  out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}

TEST_F(SimtTest, BarriersSeparateWhatThreadsWriteAndRead) {
  std::vector<int> in(256), expected(256);
  for (int i = 0; i < 256; ++i) in[i] = 3 * i;
  for (int i = 0; i < 256; ++i) expected[i] = in[255 - (i + 1) % 256] + 1;
  ForOrders([&] {
    Array<int> from(in), to(256);
    ASSERT_EQ(Launch(Reverse, dim3(1), dim3(256), 0, from.data(), to.data()), cudaSuccess);
    EXPECT_EQ(to.Read(), expected);
  });
}

__global__ void ReverseWithoutBarrier(const int* in, int* out) {
  __shared__ int values[256];
  values[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

TEST_F(SimtTest, AMissingBarrierShowsInEveryOrder) {
  std::vector<int> in(256), expected(256);
  for (int i = 0; i < 256; ++i) in[i] = 3 * i;
  for (int i = 0; i < 256; ++i) expected[i] = in[255 - i];
  ForOrders(
      [&] {
        Array<int> from(in), to(256);
        ASSERT_EQ(Launch(ReverseWithoutBarrier, dim3(1), dim3(256), 0, from.data(), to.data()),
                  cudaSuccess);
        EXPECT_NE(to.Read(), expected);
      },
      /*races=*/false);
}

// Each round's values are overwritten by the next round's: without the barrier at the end of a
// round, threads that are ahead spoil what others have still to read.
__global__ void Rounds(int* out, bool barrier_at_end) {
  __shared__ int values[64];
  int sum = 0;
  for (int round = 0; round < 4; ++round) {
    values[threadIdx.x] = round;
    __syncthreads();
    sum += values[(threadIdx.x + 7) % 64] == round;
    if (barrier_at_end) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

TEST_F(SimtTest, AMissingBarrierAtTheEndOfALoopShows) {
  int found = 0, tries = 0;
  ForOrders(
      [&] {
        Array<int> right(64), wrong(64);
        ASSERT_EQ(Launch(Rounds, dim3(1), dim3(64), 0, right.data(), true), cudaSuccess);
        EXPECT_EQ(right.Read(), std::vector<int>(64, 4));
        ASSERT_EQ(Launch(Rounds, dim3(1), dim3(64), 0, wrong.data(), false), cudaSuccess);
        found += wrong.Read() != std::vector<int>(64, 4);
        ++tries;
      },
      /*races=*/false);
  EXPECT_GE(found, tries - 2);
}

__global__ void ExchangeThroughMemory(int* out, bool sync) {
  __shared__ int values[32];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (sync) __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

TEST_F(SimtTest, LanesOfAWarpDoNotRunInStep) {
  std::vector<int> expected(32);
  for (int i = 0; i < 32; ++i) expected[i] = i ^ 1;
  ForOrders(
      [&] {
        Array<int> right(32), wrong(32);
        ASSERT_EQ(Launch(ExchangeThroughMemory, dim3(1), dim3(32), 0, right.data(), true),
                  cudaSuccess);
        EXPECT_EQ(right.Read(), expected);
        ASSERT_EQ(Launch(ExchangeThroughMemory, dim3(1), dim3(32), 0, wrong.data(), false),
                  cudaSuccess);
        EXPECT_NE(wrong.Read(), expected);
      },
      /*races=*/false);
}

__global__ void CountPredicates(int* out) {
  const int thread = static_cast<int>(threadIdx.x);
  int* mine = out + 4 * thread;
  mine[0] = __syncthreads_count(thread % 3 == 0);
  mine[1] = __syncthreads_or(thread == 77);
  mine[2] = __syncthreads_and(thread < 99);
  mine[3] = __syncthreads_and(thread < 100);
}

TEST_F(SimtTest, BarriersCountPredicates) {
  ForOrders([] {
    Array<int> out(400);
    ASSERT_EQ(Launch(CountPredicates, dim3(1), dim3(100), 0, out.data()), cudaSuccess);
    const std::vector<int> values = out.Read();
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(values[4 * i], 34);
      EXPECT_NE(values[4 * i + 1], 0);
      EXPECT_EQ(values[4 * i + 2], 0);
      EXPECT_NE(values[4 * i + 3], 0);
    }
  });
}

template <typename T>
__global__ void Shuffles(T* out, int width) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T value = static_cast<T>(lane * 10 + static_cast<int>(threadIdx.x) / 32);
  T* mine = out + 4 * threadIdx.x;
  mine[0] = __shfl_sync(0xffffffffu, value, 5, width);
  mine[1] = __shfl_up_sync(0xffffffffu, value, 3, width);
  mine[2] = __shfl_down_sync(0xffffffffu, value, 3, width);
  mine[3] = __shfl_xor_sync(0xffffffffu, value, 5, width);
}

template <typename T>
void CheckShuffles() {
  for (const int width : {32, 16, 8}) {
    Array<T> out(4 * 64);
    ASSERT_EQ(Launch(Shuffles<T>, dim3(1), dim3(64), 0, out.data(), width), cudaSuccess);
    const std::vector<T> values = out.Read();
    for (int thread = 0; thread < 64; ++thread) {
      const int lane = thread % 32, first = lane / width * width;
      const auto of = [&](int source) { return static_cast<T>(source * 10 + thread / 32); };
      EXPECT_EQ(values[4 * thread], of(first + 5));
      EXPECT_EQ(values[4 * thread + 1], of(lane - 3 >= first ? lane - 3 : lane));
      EXPECT_EQ(values[4 * thread + 2], of(lane + 3 < first + width ? lane + 3 : lane));
      EXPECT_EQ(values[4 * thread + 3], of(lane ^ 5));
    }
  }
}

TEST_F(SimtTest, ShufflesMoveValuesOfEachTypeBetweenLanes) {
  ForOrders([] {
    CheckShuffles<int>();
    CheckShuffles<unsigned>();
    CheckShuffles<float>();
    CheckShuffles<double>();
  });
}

__global__ void Votes(unsigned* out) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned* mine = out + 7 * lane;
  mine[0] = __ballot_sync(0xffffffffu, lane % 3 == 1);
  mine[1] = __any_sync(0xffffffffu, lane == 30);
  mine[2] = __all_sync(0xffffffffu, lane < 31);
  mine[3] = __reduce_add_sync(0xffffffffu, static_cast<unsigned>(lane));
  mine[4] = static_cast<unsigned>(__reduce_max_sync(0xffffffffu, 5 - lane));
  mine[5] = static_cast<unsigned>(__reduce_min_sync(0xffffffffu, 5 - lane));
  // Two halves of a warp, apart.
  if (lane % 2 == 0) {
    mine[6] = __ballot_sync(0x55555555u, lane < 16);
  } else {
    mine[6] = __reduce_add_sync(0xaaaaaaaau, 1u);
  }
}

TEST_F(SimtTest, VotesAndReductionsAreOverTheMask) {
  unsigned thirds = 0;
  for (int lane = 1; lane < 32; lane += 3) thirds |= 1u << lane;
  ForOrders([&] {
    Array<unsigned> out(7 * 32);
    ASSERT_EQ(Launch(Votes, dim3(1), dim3(32), 0, out.data()), cudaSuccess);
    const std::vector<unsigned> values = out.Read();
    for (int lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(values[7 * lane], thirds);
      EXPECT_NE(values[7 * lane + 1], 0u);
      EXPECT_EQ(values[7 * lane + 2], 0u);
      EXPECT_EQ(values[7 * lane + 3], 496u);
      EXPECT_EQ(values[7 * lane + 4], 5u);
      EXPECT_EQ(static_cast<int>(values[7 * lane + 5]), -26);
      EXPECT_EQ(values[7 * lane + 6], lane % 2 == 0 ? 0x5555u : 16u);
    }
  });
}

__global__ void Atomics(int* sum, unsigned* wrapped, float* total, unsigned* winners,
                        unsigned* lock) {
  atomicAdd(sum, static_cast<int>(threadIdx.x));
  atomicInc(wrapped, 9);
  atomicAdd(total, 0.5f);
  if (atomicCAS(lock, 0u, threadIdx.x + 1) == 0) atomicAdd(winners, 1u);
  atomicMax(sum + 1, static_cast<int>(threadIdx.x));
}

TEST_F(SimtTest, AtomicsCountEveryThread) {
  ForOrders([] {
    Array<int> sum(std::vector<int>{0, -1});
    Array<unsigned> counters(std::vector<unsigned>(3, 0));
    Array<float> total(std::vector<float>(1, 0.0f));
    ASSERT_EQ(Launch(Atomics, dim3(3), dim3(50), 0, sum.data(), counters.data(), total.data(),
                     counters.data() + 1, counters.data() + 2),
              cudaSuccess);
    EXPECT_EQ(sum.Read(), (std::vector<int>{3 * 49 * 50 / 2, 49}));
    EXPECT_EQ(counters.Read()[0], 150u % 10);
    EXPECT_EQ(counters.Read()[1], 1u);
    EXPECT_EQ(total.Read()[0], 75.0f);
  });
}

// ---- Races. Each kernel is right with `barrier`; without, its results are right all the same on
// the emulator, in every order of the threads, or nearly so.

// The sums of a block's warps, round after round, in one array: a warp that is ahead writes the
// next round's sum over one that others have still to read.
__global__ void SumsInOneArray(int* out, bool barrier) {
  __shared__ int sums[2];
  int total = 0;
  for (int round = 0; round < 3; ++round) {
    const int sum = __reduce_add_sync(0xffffffffu, round);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    total += sums[0] + sums[1];
    if (barrier) __syncthreads();
  }
  out[threadIdx.x] = total;
}

// What one warp reads alone is written by all, in the next round, before it has read it.
__global__ void MasksForOneWarp(int* out, bool barrier) {
  __shared__ unsigned masks[2];
  int total = 0;
  for (int round = 0; round < 3; ++round) {
    const unsigned mask = __ballot_sync(0xffffffffu, 1);
    if (threadIdx.x % 32 == 0) masks[threadIdx.x / 32] = mask;
    __syncthreads();
    if (threadIdx.x < 32) total += __popc(masks[threadIdx.x % 2]);
    if (barrier) __syncthreads();
  }
  out[threadIdx.x] = total;
}

// The shuffle makes lanes wait for each other here, and on a GPU as well, but it orders no memory.
__global__ void ShuffleForBarrier(int* out, bool barrier) {
  __shared__ int values[64];
  const int thread = static_cast<int>(threadIdx.x);
  values[thread] = thread;
  if (barrier) __syncwarp();
  const int one = __shfl_xor_sync(0xffffffffu, 1, 1);
  out[thread] = values[thread ^ 1] * one;
}
// The same where the read comes first.
__global__ void ShuffleBeforeWrite(int* out, bool barrier) {
  __shared__ int values[64];
  const int thread = static_cast<int>(threadIdx.x);
  values[thread] = thread;
  __syncthreads();
  const int other = __shfl_sync(0xffffffffu, values[thread ^ 1], thread % 32);
  if (barrier) __syncwarp();
  values[thread] = 0;
  out[thread] = other;
}

// All write the same.
__global__ void SameValue(int* out, bool barrier) {
  __shared__ int value;
  if (!barrier || threadIdx.x == 0) value = 5;
  __syncthreads();
  out[threadIdx.x] = value;
}

// A warp's own barrier is not enough between warps.
__global__ void OtherWarps(int* out, bool barrier) {
  auto* values = reinterpret_cast<int*>(DynamicSharedMemory());
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 32) values[thread] = 1;
  __syncwarp();
  if (barrier) __syncthreads();
  // Reads nothing of importance.
  out[thread] = values[thread % 32] == 12345 ? 1 : thread;
}

__global__ void Tiles(float* out, bool barrier) {
  auto* tile = reinterpret_cast<float*>(DynamicSharedMemory());
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> ones;
  nvcuda::wmma::fill_fragment(ones, 1.0f);
  nvcuda::wmma::store_matrix_sync(tile, ones, 16, nvcuda::wmma::mem_row_major);
  if (barrier) __syncwarp();
  nvcuda::wmma::load_matrix_sync(ones, tile, 16, nvcuda::wmma::mem_col_major);
  out[threadIdx.x] = ones.x[0];
}

TEST_F(SimtTest, RacesAreFoundInEveryOrderThoughResultsAreRight) {
  if (!simt::FindsRaces()) GTEST_SKIP() << "races are not looked for under a sanitizer";
  const auto check = [](auto kernel, auto zero, int threads, const std::string& what) {
    using T = decltype(zero);
    SCOPED_TRACE(what);
    ForOrders([&] {
      Array<T> out(threads);
      ASSERT_EQ(Launch(kernel, dim3(3), dim3(threads), 1024, out.data(), true), cudaSuccess);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                                [&] {
                                  T* out = nullptr;
                                  ASSERT_EQ(cudaMalloc(&out, threads * sizeof(T)), cudaSuccess);
                                  Launch(kernel, dim3(3), dim3(threads), 1024, out, false);
                                }),
                  AllOf(HasSubstr(what), HasSubstr("no barrier orders the two")));
    });
  };
  check(SumsInOneArray, 0, 64, "writes 4 bytes of shared memory");
  check(MasksForOneWarp, 0, 64, "MasksForOneWarp");
  check(ShuffleForBarrier, 0, 64, "reads 4 bytes of shared memory");
  check(ShuffleBeforeWrite, 0, 64, "writes 4 bytes of shared memory");
  check(SameValue, 0, 64, "writes 4 bytes of shared memory");
  check(OtherWarps, 0, 64, "OtherWarps");
  check(Tiles, 0.0f, 32, "load_matrix_sync");
}

TEST_F(SimtTest, NoOrderShowsSomeMissingBarriers) {
  // Why races are looked for: these results are right.
  ForOrders(
      [&] {
        std::vector<int> neighbours(64), own(64, 5);
        for (int i = 0; i < 64; ++i) neighbours[i] = i ^ 1;
        Array<int> out(64);
        for (const auto kernel : {ShuffleForBarrier, ShuffleBeforeWrite}) {
          ASSERT_EQ(Launch(kernel, dim3(1), dim3(64), 0, out.data(), false), cudaSuccess);
          EXPECT_EQ(out.Read(), neighbours);
        }
        ASSERT_EQ(Launch(SameValue, dim3(1), dim3(64), 0, out.data(), false), cudaSuccess);
        EXPECT_EQ(out.Read(), own);
      },
      /*races=*/false);
}

// Neighbouring bytes by different threads, each array for itself, counters that are atomic, threads
// that have ended: nothing of it is a race.
__global__ void NoRaces(int* out) {
  __shared__ uint8_t bytes[64];
  __shared__ unsigned count;
  auto* dynamic = reinterpret_cast<uint16_t*>(DynamicSharedMemory());
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) count = 0;
  bytes[thread] = static_cast<uint8_t>(thread);
  dynamic[thread] = static_cast<uint16_t>(bytes[thread]);
  __syncwarp();
  int sum = bytes[thread ^ 5] + bytes[thread ^ 9] + dynamic[thread ^ 3];
  sum += __syncthreads_count(1);
  atomicAdd(&count, 1u);
  __syncthreads();
  sum += static_cast<int>(count) + bytes[63 - thread];
  out[blockIdx.x * 64 + thread] = sum;
}

TEST_F(SimtTest, WhatBarriersOrderIsNoRace) {
  std::vector<int> expected;
  for (int i = 0; i < 3 * 64; ++i) {
    const int thread = i % 64;
    expected.push_back((thread ^ 5) + (thread ^ 9) + (thread ^ 3) + 64 + 64 + 63 - thread);
  }
  ForOrders([&] {
    Array<int> out(3 * 64);
    ASSERT_EQ(Launch(NoRaces, dim3(3), dim3(64), 128, out.data()), cudaSuccess);
    EXPECT_EQ(out.Read(), expected);
  });
}

// ---- Exchanges that cannot be

__global__ void BarrierForSome(int limit) {
  if (static_cast<int>(threadIdx.x) < limit) __syncthreads();
}
__global__ void TwoBarriers() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void BarrierAgainstShuffle() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncwarp();
    __shfl_sync(0xffffffffu, 1, 0);
  }
}

TEST_F(SimtTest, ABarrierThatNotAllThreadsReachIsAnError) {
  ForOrders([] {
    EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                              [] { Launch(BarrierForSome, dim3(2), dim3(64), 0, 40); }),
                AllOf(HasSubstr("BarrierForSome, block ("), HasSubstr("thread ("),
                      HasSubstr("waits forever at a barrier"), HasSubstr("simt_test.cc"),
                      HasSubstr("which has ended")));
    EXPECT_THAT(
        ExpectFailure(cudaErrorLaunchFailure, [] { Launch(TwoBarriers, dim3(1), dim3(32), 0); }),
        HasSubstr("waits at another"));
    EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                              [] { Launch(BarrierAgainstShuffle, dim3(1), dim3(64), 0); }),
                HasSubstr("waits forever at a barrier"));
  });
}

__global__ void ShuffleForSome(int limit) {
  if (static_cast<int>(threadIdx.x) < limit) __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
__global__ void ShuffleOutsideOfMask() { __shfl_sync(1u, 1, 0); }
__global__ void ReadLaneOutsideOfMask() {
  if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);
}
__global__ void TwoShuffles(int* out) {
  *out = threadIdx.x < 16 ? __shfl_sync(0xffffffffu, 1, 0) : __shfl_xor_sync(0xffffffffu, 1, 1);
}

TEST_F(SimtTest, AnExchangeWithoutAllOfItsLanesIsAnError) {
  ForOrders([] {
    EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                              [] { Launch(ShuffleForSome, dim3(1), dim3(32), 0, 31); }),
                AllOf(HasSubstr("waits forever at an exchange within its warp"),
                      HasSubstr("thread (31, 0, 0), which has ended")));
    EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                              [] { Launch(ShuffleForSome, dim3(1), dim3(48), 0, 48); }),
                HasSubstr("lane 16, which the block has no thread for"));
    EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                              [] { Launch(ShuffleOutsideOfMask, dim3(1), dim3(32), 0); }),
                HasSubstr("is not in its own mask"));
    EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                              [] { Launch(ReadLaneOutsideOfMask, dim3(1), dim3(32), 0); }),
                HasSubstr("reads lane 20, which is not in the shuffle's mask"));
    EXPECT_THAT(ExpectFailure(cudaErrorLaunchFailure,
                              [] {
                                int* out = nullptr;
                                cudaMalloc(&out, sizeof(int));
                                Launch(TwoShuffles, dim3(1), dim3(32), 0, out);
                              }),
                HasSubstr("waits at another place"));
  });
}

// ---- Memory

__global__ void ReadUndefined(float* out) {
  __shared__ float fixed[32];
  const auto* dynamic = reinterpret_cast<const float*>(DynamicSharedMemory());
  out[2 * (blockIdx.x * 32 + threadIdx.x)] = fixed[threadIdx.x];
  out[2 * (blockIdx.x * 32 + threadIdx.x) + 1] = dynamic[threadIdx.x];
  __syncthreads();
  fixed[threadIdx.x] = 1;
}

TEST_F(SimtTest, SharedMemoryIsUndefinedAtTheStartOfEachBlock) {
  Array<float> out(2 * 32 * 3);
  ASSERT_EQ(Launch(ReadUndefined, dim3(3), dim3(32), 32 * sizeof(float), out.data()), cudaSuccess);
  for (const float value : out.Read()) EXPECT_TRUE(std::isnan(value));
}

__global__ void Double(const float* in, float* out, int size) {
  for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
    out[i] = 2 * in[i];
  }
}

TEST_F(SimtTest, DeviceMemoryThatWasNeverWrittenIsNaN) {
  Array<float> in(100), out(100);
  ASSERT_EQ(Launch(Double, dim3(1), dim3(32), 0, in.data(), out.data(), 100), cudaSuccess);
  for (const float value : out.Read()) EXPECT_TRUE(std::isnan(value));
  Array<__nv_bfloat16> half_width(8);
  for (const __nv_bfloat16 value : half_width.Read()) EXPECT_TRUE(std::isnan(float(value)));
}

__global__ void WriteAt(float* out, int64_t at) { out[at] = 1; }
__global__ void ReadAt(const float* in, int64_t at, float* out) { *out = in[at]; }

TEST_F(SimtTest, AccessesBeyondAnAllocationAreErrors) {
  for (const size_t size : {100u, 1024u, 5000u}) {
    // The first bytes past its end, bytes on the next page, and those before its start.
    for (const int64_t at :
         {static_cast<int64_t>(size), static_cast<int64_t>(size) + 1000, int64_t{-1}}) {
      const std::string said = ExpectFailure(cudaErrorIllegalAddress, [&] {
        float* out = nullptr;
        cudaMalloc(&out, size * sizeof(float));
        Launch(WriteAt, dim3(1), dim3(1), 0, out, at);
      });
      const std::string place =
          at < 0 ? "4 bytes before the start of"
                 : std::to_string((at - size) * sizeof(float)) + " bytes past the end of";
      EXPECT_THAT(said, AllOf(HasSubstr("WriteAt"), HasSubstr(place),
                              HasSubstr("(" + std::to_string(size * sizeof(float)) +
                                        " bytes of device 0)")));
    }
  }
  const std::string said = ExpectFailure(cudaErrorIllegalAddress, [] {
    float* in = nullptr;
    cudaMalloc(&in, 1024);
    Launch(ReadAt, dim3(1), dim3(1), 0, in, 256, in);
  });
  EXPECT_THAT(said, AllOf(HasSubstr("ReadAt"), HasSubstr("0 bytes past the end of")));
}

TEST_F(SimtTest, NullIsAnError) {
  EXPECT_THAT(ExpectFailure(cudaErrorIllegalAddress,
                            [] { Launch(WriteAt, dim3(1), dim3(1), 0, nullptr, 3); }),
              HasSubstr("not device memory"));
}

TEST_F(SimtTest, UseAfterFreeIsAnError) {
  EXPECT_THAT(ExpectFailure(cudaErrorIllegalAddress,
                            [] {
                              float* out = nullptr;
                              cudaMalloc(&out, 1024);
                              cudaFree(out);
                              Launch(WriteAt, dim3(1), dim3(1), 0, out, 3);
                            }),
              AllOf(HasSubstr("byte 12 of allocation"), HasSubstr("freed")));
}

__global__ void WriteSharedAt(int at) { DynamicSharedMemory()[at] = 1; }
__global__ void WriteFixedSharedAt(int at, int* out) {
  __shared__ int values[8];
  values[at] = 1;
  *out = values[at];
}

TEST_F(SimtTest, WritesBeyondSharedMemoryAreErrors) {
  EXPECT_EQ(Launch(WriteSharedAt, dim3(1), dim3(1), 100, 99), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(ExpectFailure(cudaErrorIllegalAddress,
                            [] { Launch(WriteSharedAt, dim3(1), dim3(1), 100, 103); }),
              HasSubstr("3 bytes past the end of the 100 bytes"));
  // As this file is compiled, the compiler checks the bounds of arrays.
  EXPECT_THAT(ExpectFailure(cudaErrorMisalignedAddress,
                            [] { Launch(WriteFixedSharedAt, dim3(1), dim3(1), 0, 8, nullptr); }),
              HasSubstr("beyond an array's bounds"));
}

__global__ void Copy4(const float* in, float* out) {
  *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(in);
}

TEST_F(SimtTest, MisalignedAccessesAreErrors) {
  Array<float> in(std::vector<float>(8, 1.0f)), out(8);
  EXPECT_EQ(Launch(Copy4, dim3(1), dim3(1), 0, in.data() + 4, out.data()), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(ExpectFailure(cudaErrorMisalignedAddress,
                            [&] { Launch(Copy4, dim3(1), dim3(1), 0, in.data() + 1, out.data()); }),
              AllOf(HasSubstr("Copy4"), HasSubstr("misaligned")));
}

__global__ void Recurse(int* out, int depth) {
  volatile char room[1024];
  room[0] = static_cast<char>(depth);
  if (depth > 0) Recurse(out, depth - 1);
  out[0] += room[0];
}

TEST_F(SimtTest, AStackThatOverflowsIsAnError) {
  EXPECT_THAT(ExpectFailure(cudaErrorIllegalAddress,
                            [] {
                              int* out = nullptr;
                              cudaMalloc(&out, sizeof(int));
                              Launch(Recurse, dim3(1), dim3(1), 0, out, 100000);
                            }),
              HasSubstr("Recurse"));
}

// ---- Tiles

template <typename T, typename LayoutA, typename LayoutB, int M, int N>
__global__ void MultiplyTiles(const T* a, const T* b, const float* c, float* d, int lda, int ldb) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, M, N, 16, T, LayoutA> a_tile;
  wmma::fragment<wmma::matrix_b, M, N, 16, T, LayoutB> b_tile;
  wmma::fragment<wmma::accumulator, M, N, 16, float> c_tile, d_tile;
  wmma::fill_fragment(d_tile, 0.25f);
  wmma::load_matrix_sync(a_tile, a, lda);
  wmma::load_matrix_sync(b_tile, b, ldb);
  wmma::mma_sync(d_tile, a_tile, b_tile, d_tile);
  wmma::load_matrix_sync(c_tile, c, M, wmma::mem_col_major);
  for (int i = 0; i < d_tile.num_elements; ++i) d_tile.x[i] = 2 * d_tile.x[i] + c_tile.x[i];
  wmma::store_matrix_sync(d, d_tile, N, wmma::mem_row_major);
}

// Small multiples of 1/8: products and sums are exact in float32.
float Eighths(int i) { return static_cast<float>(i * 37 % 64 - 32) / 8; }

template <typename T, typename LayoutA, typename LayoutB, int M, int N>
void CheckTiles() {
  const bool a_rows = std::is_same_v<LayoutA, nvcuda::wmma::row_major>;
  const bool b_rows = std::is_same_v<LayoutB, nvcuda::wmma::row_major>;
  const int lda = (a_rows ? 16 : M) + 8, ldb = (b_rows ? N : 16) + 16;
  std::vector<T> a(lda * (a_rows ? M : 16)), b(ldb * (b_rows ? 16 : N));
  std::vector<float> c(M * N);
  for (size_t i = 0; i < a.size(); ++i) a[i] = Eighths(static_cast<int>(i));
  for (size_t i = 0; i < b.size(); ++i) b[i] = Eighths(static_cast<int>(7 * i + 3));
  for (size_t i = 0; i < c.size(); ++i) c[i] = Eighths(static_cast<int>(5 * i + 1));
  Array<T> a_device(a), b_device(b);
  Array<float> c_device(c), d_device(M * N);
  ASSERT_EQ(Launch(MultiplyTiles<T, LayoutA, LayoutB, M, N>, dim3(1), dim3(32), 0, a_device.data(),
                   b_device.data(), c_device.data(), d_device.data(), lda, ldb),
            cudaSuccess);
  const std::vector<float> d = d_device.Read();
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      double sum = 0.25;
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(static_cast<float>(a[a_rows ? m * lda + k : k * lda + m])) *
               static_cast<float>(b[b_rows ? k * ldb + n : n * ldb + k]);
      }
      EXPECT_EQ(d[m * N + n], 2 * sum + c[n * M + m]) << m << ", " << n;
    }
  }
}

template <typename T, int M, int N>
void CheckTilesOfAllLayouts() {
  using nvcuda::wmma::col_major;
  using nvcuda::wmma::row_major;
  CheckTiles<T, row_major, row_major, M, N>();
  CheckTiles<T, row_major, col_major, M, N>();
  CheckTiles<T, col_major, row_major, M, N>();
  CheckTiles<T, col_major, col_major, M, N>();
}

TEST_F(SimtTest, TileProductsAreThoseOfFloat64) {
  ForOrders([] {
    CheckTilesOfAllLayouts<__nv_bfloat16, 16, 16>();
    CheckTilesOfAllLayouts<__half, 16, 16>();
    CheckTilesOfAllLayouts<__nv_bfloat16, 32, 8>();
    CheckTilesOfAllLayouts<__half, 8, 32>();
  });
}

__global__ void LoadTile(const __nv_bfloat16* a, int leading, bool all_lanes) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> tile;
  if (all_lanes || threadIdx.x < 31) wmma::load_matrix_sync(tile, a, leading);
}

TEST_F(SimtTest, TilesMustBeAlignedAndLoadedByWholeWarps) {
  const auto fail = [](cudaError_t error, int offset, int leading, bool all_lanes) {
    return ExpectFailure(error, [&] {
      __nv_bfloat16* a = nullptr;
      cudaMalloc(&a, 1024);
      Launch(LoadTile, dim3(1), dim3(32), 0, a + offset, leading, all_lanes);
    });
  };
  fail(cudaSuccess, 16, 16, true);
  EXPECT_THAT(fail(cudaErrorMisalignedAddress, 8, 16, true), HasSubstr("multiple of 32 bytes"));
  EXPECT_THAT(fail(cudaErrorMisalignedAddress, 16, 17, true), HasSubstr("multiple of 16 bytes"));
  EXPECT_THAT(fail(cudaErrorLaunchFailure, 16, 16, false), HasSubstr("which has ended"));
}

// ---- Numbers

// What 16 bits mean, by the definition of the format: with `fraction` fraction bits and `bias`.
double Meaning(uint16_t bits, int fraction, int bias) {
  const int exponent = (bits & 0x7fff) >> fraction, least = 1 - bias - fraction;
  const int digits = bits & ((1 << fraction) - 1);
  const double magnitude = exponent == 0
                               ? std::ldexp(digits, least)
                               : std::ldexp(digits + (1 << fraction), least + exponent - 1);
  return bits & 0x8000 ? -magnitude : magnitude;
}

template <typename T>
void CheckRounding(int fraction, int bias, uint16_t infinity) {
  const auto bits_of = [](T value) { return std::bit_cast<uint16_t>(value); };
  for (int bits = 0; bits < 0x10000; ++bits) {
    const T value = std::bit_cast<T>(static_cast<uint16_t>(bits));
    if ((bits & 0x7fff) < infinity) {
      ASSERT_EQ(float(value), static_cast<float>(Meaning(bits, fraction, bias))) << bits;
    } else if ((bits & 0x7fff) == infinity) {
      ASSERT_TRUE(std::isinf(float(value)));
    } else {
      ASSERT_TRUE(std::isnan(float(value)));
      continue;
    }
    ASSERT_EQ(bits_of(T(float(value))), bits) << "is not itself when rounded";
  }
  // Halfway between two neighbours, and next to that.
  for (int bits = 0; bits + 1 < infinity; ++bits) {
    const double low = Meaning(bits, fraction, bias), high = Meaning(bits + 1, fraction, bias);
    const auto middle = static_cast<float>((low + high) / 2);
    if (static_cast<double>(middle) != (low + high) / 2) continue;  // no float lies there
    ASSERT_EQ(bits_of(T(middle)), bits + (bits & 1)) << "ties to even";
    ASSERT_EQ(bits_of(T(-middle)), 0x8000 + bits + (bits & 1));
    ASSERT_EQ(bits_of(T(std::nextafterf(middle, 0.0f))), bits);
    ASSERT_EQ(bits_of(T(std::nextafterf(middle, INFINITY))), bits + 1);
    // From float64 there is one rounding, not two.
    ASSERT_EQ(bits_of(T(std::nextafter((low + high) / 2, 0.0))), bits);
    ASSERT_EQ(bits_of(T(std::nextafter((low + high) / 2, INFINITY))), bits + 1);
  }
  EXPECT_EQ(bits_of(T(std::numeric_limits<float>::max())), infinity);
  EXPECT_EQ(bits_of(T(NAN)), 0x7fff);
}

TEST_F(SimtTest, Bfloat16RoundsToNearestEven) { CheckRounding<__nv_bfloat16>(7, 127, 0x7f80); }
TEST_F(SimtTest, HalfRoundsToNearestEven) { CheckRounding<__half>(10, 15, 0x7c00); }

TEST_F(SimtTest, PairsKeepTheirOrder) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.0f);
  EXPECT_EQ(__low2float(pair), 1.5f);
  EXPECT_EQ(__high2float(pair), -2.0f);
  EXPECT_EQ(__bfloat1622float2(pair).y, -2.0f);
  EXPECT_EQ(std::bit_cast<uint32_t>(pair), 0xc0003fc0u);
  EXPECT_EQ(float(__hfma(pair.x, pair.y, pair.x)), -1.5f);
}

}  // namespace
}  // namespace dim0::cuda
