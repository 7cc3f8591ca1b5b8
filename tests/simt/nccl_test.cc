// The emulated NCCL: ranks as threads, each on a device.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/simt/control.h"

namespace dim0::simt {
namespace {

using ::testing::HasSubstr;

// What each rank has.
struct Rank {
  int rank = 0;
  int ranks = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;

  cudaError_t Wait() const { return cudaStreamSynchronize(stream); }
};

// Polls until the communicator's last call is no longer in progress.
ncclResult_t Settle(ncclComm_t comm, ncclResult_t result) {
  while (result == ncclInProgress) {
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
    if (asked != ncclSuccess) return asked;
  }
  return result;
}

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* device = nullptr;
  EXPECT_EQ(cudaMalloc(&device, values.size() * sizeof(T)), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
            cudaSuccess);
  return device;
}

template <typename T>
std::vector<T> Download(const T* device, size_t size) {
  std::vector<T> values(size);
  EXPECT_EQ(cudaMemcpy(values.data(), device, size * sizeof(T), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return values;
}

class NcclTest : public testing::Test {
 protected:
  NcclTest() {
    SetSettings(Settings());
    Reset();
    EXPECT_EQ(ncclGetUniqueId(&id_), ncclSuccess);
  }
  ~NcclTest() override {
    SetSettings(Settings());
    Reset();
  }

  // Runs `run` as each rank, on a thread and a device of its own.
  void RunRanks(int ranks, bool blocking, const std::function<void(const Rank&)>& run) {
    ASSERT_EQ(ncclGetUniqueId(&id_), ncclSuccess);
    std::vector<std::thread> threads;
    for (int i = 0; i < ranks; ++i) {
      threads.emplace_back([&, i] {
        Rank rank = {.rank = i, .ranks = ranks};
        ASSERT_EQ(cudaSetDevice(i), cudaSuccess);
        ASSERT_EQ(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), cudaSuccess);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = blocking;
        const ncclResult_t result = ncclCommInitRankConfig(&rank.comm, ranks, id_, i, &config);
        EXPECT_EQ(result, blocking ? ncclSuccess : ncclInProgress);
        ASSERT_EQ(Settle(rank.comm, result), ncclSuccess);
        run(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static void Close(const Rank& rank) {
    ncclResult_t result = ncclCommFinalize(rank.comm);
    EXPECT_EQ(Settle(rank.comm, result), ncclSuccess);
    EXPECT_EQ(ncclCommDestroy(rank.comm), ncclSuccess);
    EXPECT_EQ(cudaStreamDestroy(rank.stream), cudaSuccess);
  }

  // For 1, 2 and 4 ranks, blocking and not, lazy and not.
  void ForAll(const std::function<void(const Rank&)>& run) {
    for (const int ranks : {1, 2, 4}) {
      for (const bool blocking : {true, false}) {
        for (const bool lazy : {false, true}) {
          Settings settings;
          settings.lazy = lazy;
          SetSettings(settings);
          RunRanks(ranks, blocking, [&](const Rank& rank) {
            run(rank);
            Close(rank);
          });
        }
      }
    }
  }

  ncclUniqueId id_;
};

TEST_F(NcclTest, AllGatherPlacesEachRanksPart) {
  ForAll([](const Rank& rank) {
    for (const bool in_place : {false, true}) {
      const int count = 5;
      std::vector<int> all(rank.ranks * count, -7);
      const std::vector<int> mine = {rank.rank, 1, 2, 3, 10 * rank.rank};
      std::copy(mine.begin(), mine.end(), all.begin() + rank.rank * count);
      int* to = Upload(all);
      int* from = in_place ? to + rank.rank * count : Upload(mine);
      EXPECT_EQ(
          Settle(rank.comm, ncclAllGather(from, to, count, ncclInt32, rank.comm, rank.stream)),
          ncclSuccess);
      ASSERT_EQ(rank.Wait(), cudaSuccess);
      std::vector<int> expected;
      for (int i = 0; i < rank.ranks; ++i) {
        for (const int value : {i, 1, 2, 3, 10 * i}) expected.push_back(value);
      }
      EXPECT_EQ(Download(to, expected.size()), expected);
    }
  });
}

TEST_F(NcclTest, ReduceScatterSumsInRankOrderAndRoundsOnce) {
  ForAll([](const Rank& rank) {
    for (const bool in_place : {false, true}) {
      const int count = 3;
      std::vector<__nv_bfloat16> mine(rank.ranks * count);
      // 1 + 2^-9 + 2^-9 + ...: rounded after each addition to bfloat16 it would stay 1.
      for (auto& value : mine) value = rank.rank == 0 ? 1.0f : 0x1p-8f;
      __nv_bfloat16* from = Upload(mine);
      __nv_bfloat16* to =
          in_place ? from + rank.rank * count : Upload(std::vector<__nv_bfloat16>(count, 9.0f));
      EXPECT_EQ(Settle(rank.comm, ncclReduceScatter(from, to, count, ncclBfloat16, ncclSum,
                                                    rank.comm, rank.stream)),
                ncclSuccess);
      ASSERT_EQ(rank.Wait(), cudaSuccess);
      const float sum = 1.0f + 0x1p-8f * static_cast<float>(rank.ranks - 1);
      for (const __nv_bfloat16 value : Download(to, count)) {
        EXPECT_EQ(float(value), float(__nv_bfloat16(sum)));
      }
    }
  });
}

TEST_F(NcclTest, AllReduceReduceAndBroadcastReachTheirRanks) {
  ForAll([](const Rank& rank) {
    const auto settle = [&](ncclResult_t result) {
      EXPECT_EQ(Settle(rank.comm, result), ncclSuccess);
    };
    const int last = rank.ranks - 1;
    float* sum = Upload(std::vector<float>{1.0f + rank.rank, -2.0f});
    double* greatest = Upload(std::vector<double>{1.0 * rank.rank, -1.0 * rank.rank});
    int64_t* part = Upload(std::vector<int64_t>{rank.rank, 1});
    int64_t* total = Upload(std::vector<int64_t>{-5, -5});
    __half* message = Upload(std::vector<__half>(4, __half(1.5f * rank.rank)));
    settle(ncclAllReduce(sum, sum, 2, ncclFloat32, ncclSum, rank.comm, rank.stream));
    settle(ncclAllReduce(greatest, greatest, 2, ncclFloat64, ncclMax, rank.comm, rank.stream));
    settle(ncclReduce(part, total, 2, ncclInt64, ncclSum, last, rank.comm, rank.stream));
    settle(ncclBroadcast(message, message, 4, ncclFloat16, last, rank.comm, rank.stream));
    ASSERT_EQ(rank.Wait(), cudaSuccess);
    const float n = static_cast<float>(rank.ranks);
    EXPECT_EQ(Download(sum, 2), (std::vector<float>{n * (n + 1) / 2, -2 * n}));
    EXPECT_EQ(Download(greatest, 2), (std::vector<double>{1.0 * last, 0.0}));
    EXPECT_EQ(Download(total, 2), rank.rank == last
                                      ? (std::vector<int64_t>{rank.ranks * last / 2, rank.ranks})
                                      : (std::vector<int64_t>{-5, -5}));
    for (const __half value : Download(message, 4)) EXPECT_EQ(float(value), 1.5f * last);
  });
}

TEST_F(NcclTest, GroupedSendsAndReceivesMakeAnUnevenExchange) {
  ForAll([](const Rank& rank) {
    // Rank s sends to rank r s + 2 r numbers, of value 100 s + r.
    const auto count = [](int sender, int receiver) { return sender + 2 * receiver; };
    std::vector<int> out;
    int in_size = 0;
    for (int i = 0; i < rank.ranks; ++i) {
      out.insert(out.end(), count(rank.rank, i), 100 * rank.rank + i);
      in_size += count(i, rank.rank);
    }
    int* from = Upload(out.empty() ? std::vector<int>(1) : out);
    int* to = Upload(std::vector<int>(in_size + 1, -1));
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(ncclGroupStart(), ncclSuccess);
      int sent = 0, received = 0;
      for (int i = 0; i < rank.ranks; ++i) {
        EXPECT_EQ(ncclSend(from + sent, count(rank.rank, i), ncclInt32, i, rank.comm, rank.stream),
                  ncclSuccess);
        EXPECT_EQ(
            ncclRecv(to + received, count(i, rank.rank), ncclInt32, i, rank.comm, rank.stream),
            ncclSuccess);
        sent += count(rank.rank, i);
        received += count(i, rank.rank);
      }
      EXPECT_EQ(Settle(rank.comm, ncclGroupEnd()), ncclSuccess);
    }
    ASSERT_EQ(rank.Wait(), cudaSuccess);
    std::vector<int> expected;
    for (int i = 0; i < rank.ranks; ++i) {
      expected.insert(expected.end(), count(i, rank.rank), 100 * i + rank.rank);
    }
    expected.push_back(-1);
    EXPECT_EQ(Download(to, in_size + 1), expected);
  });
}

TEST_F(NcclTest, OperationsTakeTheirPlaceInTheStream) {
  RunRanks(2, true, [](const Rank& rank) {
    int* values = Upload(std::vector<int>{rank.rank, 0});
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(ncclAllReduce(values, values, 1, ncclInt32, ncclSum, rank.comm, rank.stream),
                ncclSuccess);
      EXPECT_EQ(cudaMemcpyAsync(values + 1, values, 4, cudaMemcpyDeviceToDevice, rank.stream),
                cudaSuccess);
      EXPECT_EQ(cudaMemsetAsync(values, 0, 4, rank.stream), cudaSuccess);
      if (i + 1 < 20) {
        EXPECT_EQ(cudaMemcpyAsync(values, values + 1, 4, cudaMemcpyDeviceToDevice, rank.stream),
                  cudaSuccess);
      }
    }
    ASSERT_EQ(rank.Wait(), cudaSuccess);
    EXPECT_EQ(Download(values, 2), (std::vector<int>{0, 1 << 19}));
    Close(rank);
  });
}

// Waits a while for the stream. Has it ended?
bool EndsSoon(const Rank& rank) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (std::chrono::steady_clock::now() < end) {
    if (cudaStreamQuery(rank.stream) != cudaErrorNotReady) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST_F(NcclTest, ARankThatDoesNotCallHoldsUpTheOthersUntilTheyAbort) {
  std::atomic<int> ended = 0;
  RunRanks(3, true, [&](const Rank& rank) {
    int* value = Upload(std::vector<int>{1});
    if (rank.rank != 1) {
      EXPECT_EQ(ncclAllReduce(value, value, 1, ncclInt32, ncclSum, rank.comm, rank.stream),
                ncclSuccess);
      EXPECT_FALSE(EndsSoon(rank));
    }
    ++ended;
    while (ended < 3) std::this_thread::yield();
    EXPECT_EQ(ncclCommAbort(rank.comm), ncclSuccess);
    EXPECT_EQ(rank.Wait(), cudaSuccess);
    EXPECT_EQ(Download(value, 1), std::vector<int>{1});
  });
}

TEST_F(NcclTest, RanksThatDisagreeWaitForever) {
  testing::internal::CaptureStderr();
  std::atomic<int> ended = 0;
  RunRanks(2, true, [&](const Rank& rank) {
    int* value = Upload(std::vector<int>(2, 1));
    EXPECT_EQ(
        ncclAllReduce(value, value, 1 + rank.rank, ncclInt32, ncclSum, rank.comm, rank.stream),
        ncclSuccess);
    EXPECT_FALSE(EndsSoon(rank));
    ++ended;
    while (ended < 2) std::this_thread::yield();
    EXPECT_EQ(ncclCommAbort(rank.comm), ncclSuccess);
    EXPECT_EQ(rank.Wait(), cudaSuccess);
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("they wait forever"));
}

TEST_F(NcclTest, CommunicatorsMayOverlapUnlessTheDeviceHasNoRoomForTwo) {
  for (const bool in_order : {false, true}) {
    for (const bool same_order : {true, false}) {
      Settings settings;
      settings.nccl_in_order = in_order;
      SetSettings(settings);
      ncclUniqueId second_id;
      ASSERT_EQ(ncclGetUniqueId(&second_id), ncclSuccess);
      std::atomic<int> ended = 0;
      RunRanks(2, true, [&](const Rank& rank) {
        Rank second = rank;
        ASSERT_EQ(ncclCommInitRank(&second.comm, 2, second_id, rank.rank), ncclSuccess);
        ASSERT_EQ(cudaStreamCreateWithFlags(&second.stream, cudaStreamNonBlocking), cudaSuccess);
        int* values = Upload(std::vector<int>(2, 1));
        const bool swap = !same_order && rank.rank == 1;
        for (const int i : swap ? std::vector<int>{1, 0} : std::vector<int>{0, 1}) {
          const Rank& use = i == 0 ? rank : second;
          EXPECT_EQ(
              ncclAllReduce(values + i, values + i, 1, ncclInt32, ncclSum, use.comm, use.stream),
              ncclSuccess);
        }
        EXPECT_EQ(EndsSoon(rank) && EndsSoon(second), same_order || !in_order);
        ++ended;
        while (ended < 2) std::this_thread::yield();
        EXPECT_EQ(ncclCommAbort(rank.comm), ncclSuccess);
        EXPECT_EQ(ncclCommAbort(second.comm), ncclSuccess);
        EXPECT_EQ(rank.Wait(), cudaSuccess);
      });
    }
  }
}

TEST_F(NcclTest, TwoRanksOnOneDeviceAreRefused) {
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ncclComm_t comm = nullptr;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id_, rank, &config), ncclInProgress);
      EXPECT_EQ(Settle(comm, ncclInProgress), ncclInvalidUsage);
      EXPECT_THAT(ncclGetLastError(comm), HasSubstr("Duplicate GPU detected"));
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
  testing::internal::GetCapturedStderr();
}

TEST_F(NcclTest, ACommunicatorThatIsNotCompleteIsInProgressUntilItIsAborted) {
  ncclComm_t comm = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, id_, 0, &config), ncclInProgress);
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(ncclCommGetAsyncError(comm, &result), ncclSuccess);
    EXPECT_EQ(result, ncclInProgress);
  }
  int* value = Upload(std::vector<int>{1});
  testing::internal::CaptureStderr();
  EXPECT_EQ(ncclAllReduce(value, value, 1, ncclInt32, ncclSum, comm, nullptr), ncclInvalidArgument);
  EXPECT_EQ(ncclCommDestroy(comm), ncclInvalidArgument);
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
}

TEST_F(NcclTest, BadCallsAreRefused) {
  RunRanks(1, true, [](const Rank& rank) {
    int* values = Upload(std::vector<int>(4, 1));
    int host[4] = {};
    int* elsewhere = nullptr;
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&elsewhere, 16), cudaSuccess);
    cudaStream_t other_stream = nullptr;
    ASSERT_EQ(cudaStreamCreate(&other_stream), cudaSuccess);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    testing::internal::CaptureStderr();
    const auto reduce = [&](void* from, void* to, size_t count, cudaStream_t stream) {
      return ncclAllReduce(from, to, count, ncclInt32, ncclSum, rank.comm, stream);
    };
    EXPECT_EQ(reduce(values, values, 4, rank.stream), ncclSuccess);
    EXPECT_EQ(reduce(values, values, 5, rank.stream), ncclInvalidArgument);
    EXPECT_EQ(reduce(values, values + 1, 2, rank.stream), ncclInvalidArgument);
    EXPECT_EQ(reduce(host, values, 4, rank.stream), ncclInvalidArgument);
    EXPECT_EQ(reduce(values, elsewhere, 4, rank.stream), ncclInvalidArgument);
    EXPECT_EQ(reduce(values, values, 4, other_stream), ncclInvalidUsage);
    EXPECT_EQ(ncclBroadcast(values, values, 1, ncclInt32, 1, rank.comm, rank.stream),
              ncclInvalidArgument);
    EXPECT_EQ(ncclSend(values, 1, ncclInt32, 0, rank.comm, rank.stream), ncclInvalidUsage);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    // An error within a group is the group's.
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    reduce(values, values, 5, rank.stream);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    testing::internal::GetCapturedStderr();
    EXPECT_EQ(rank.Wait(), cudaSuccess);
    void* registration = nullptr;
    EXPECT_EQ(ncclCommRegister(rank.comm, values, 16, &registration), ncclSuccess);
    EXPECT_EQ(ncclCommDeregister(rank.comm, registration), ncclSuccess);
    Close(rank);
  });
  ncclUniqueId stranger = {};
  ncclComm_t comm = nullptr;
  testing::internal::CaptureStderr();
  EXPECT_EQ(ncclCommInitRank(&comm, 1, stranger, 0), ncclSystemError);
  EXPECT_EQ(ncclCommInitRank(&comm, 1, id_, 1), ncclInvalidArgument);
  testing::internal::GetCapturedStderr();
}

TEST_F(NcclTest, ABufferFreedBeforeItsOperationShows) {
  Settings settings;
  settings.lazy = true;
  SetSettings(settings);
  testing::internal::CaptureStderr();
  RunRanks(1, true, [](const Rank& rank) {
    int* values = nullptr;
    ASSERT_EQ(cudaMallocAsync(&values, 16, rank.stream), cudaSuccess);
    ASSERT_EQ(rank.Wait(), cudaSuccess);
    EXPECT_EQ(ncclAllReduce(values, values, 4, ncclInt32, ncclSum, rank.comm, rank.stream),
              ncclSuccess);
    ASSERT_EQ(cudaFree(values), cudaSuccess);
    EXPECT_EQ(rank.Wait(), cudaErrorIllegalAddress);
    EXPECT_EQ(ncclCommAbort(rank.comm), ncclSuccess);
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("freed"));
}

using NcclDeathTest = NcclTest;

// The call is in progress until it is settled, in one of three.
TEST_F(NcclDeathTest, AStreamDestroyedBeforeNcclHasLaunchedOnItEndsTheProcessByAClearLine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto destroy = [&](const std::function<ncclResult_t(const Rank&, ncclResult_t)>& between) {
    RunRanks(1, false, [&](const Rank& rank) {
      int* const values = Upload(std::vector<int>(4));
      ncclResult_t result = ncclSuccess;
      while (result == ncclSuccess) {
        result = ncclAllReduce(values, values, 4, ncclInt32, ncclSum, rank.comm, rank.stream);
      }
      EXPECT_EQ(between(rank, result), ncclSuccess);
      EXPECT_EQ(cudaStreamDestroy(rank.stream), cudaSuccess);
    });
  };
  EXPECT_DEATH(destroy([](const Rank&, ncclResult_t) { return ncclSuccess; }),
               "simt: a stream is destroyed on which NCCL has yet to launch");
  destroy([](const Rank& rank, ncclResult_t result) { return Settle(rank.comm, result); });
  destroy([](const Rank& rank, ncclResult_t) { return ncclCommAbort(rank.comm); });
}

}  // namespace
}  // namespace dim0::simt
