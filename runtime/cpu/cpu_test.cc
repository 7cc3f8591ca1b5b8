// The thread pool and the matrix products of a CPU rank.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "runtime/cpu/gemm.h"
#include "runtime/cpu/thread_pool.h"

namespace dim0::cpu {
namespace {

TEST(ThreadPool, RunsEveryPieceOnce) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 2, 7, 100}) {
      std::vector<std::atomic<int>> runs(count);
      pool.Run(count, [&](int64_t i) { ++runs[i]; });
      for (const auto& run : runs) EXPECT_EQ(run, 1);
    }
  }
}

TEST(ThreadPool, ServesSeveralCallersAtOnce) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) pool.Run(5, [&](int64_t i) { sum += i; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 3 * 200 * 10);
}

TEST(ThreadPool, RangesCoverTheWholeOnceAndStartAtGrains) {
  for (const int threads : {1, 2, 3, 4}) {
    ThreadPool pool(threads);
    for (const int64_t size : {0, 1, 15, 16, 17, 100, 1000}) {
      std::vector<std::atomic<int>> covered(size);
      std::atomic<int> ranges = 0;
      pool.ParallelFor(size, 16, [&](int64_t begin, int64_t end) {
        EXPECT_EQ(begin % 16, 0);
        EXPECT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) ++covered[i];
        ++ranges;
      });
      EXPECT_LE(ranges, threads);
      for (const auto& count : covered) EXPECT_EQ(count, 1);
    }
  }
}

std::vector<float> Random(int64_t size, int seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(size);
  for (float& value : values) value = uniform(generator);
  return values;
}

// |error| of a float32 sum of k products of values below 1, in any order.
double Tolerance(int64_t k) { return 1e-6 + k * 1.2e-7; }

TEST(Gemm, AgreesWithFloat64AtEverySizeAndTranspose) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{{1, 1, 1},
                                                                     {3, 1, 5},
                                                                     {1, 200, 7},
                                                                     {200, 1, 3},
                                                                     {5, 97, 31},
                                                                     {97, 5, 0},
                                                                     {130, 150, 64}}) {
      for (const auto transpose_a : {Transpose::kNo, Transpose::kYes}) {
        for (const auto transpose_b : {Transpose::kNo, Transpose::kYes}) {
          const auto a = Random(m * k + 1, 1), b = Random(k * n + 1, 2), c0 = Random(m * n, 3);
          const int64_t lda = transpose_a == Transpose::kYes ? m : std::max<int64_t>(1, k);
          const int64_t ldb = transpose_b == Transpose::kYes ? std::max<int64_t>(1, k) : n;
          auto c = c0;
          Gemm(pool, transpose_a, transpose_b, m, n, k, 0.5f, a.data(), lda, b.data(), ldb, 2.0f,
               c.data(), n);
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              double sum = 2.0 * c0[i * n + j];
              for (int64_t l = 0; l < k; ++l) {
                const double x = transpose_a == Transpose::kYes ? a[l * m + i] : a[i * k + l];
                const double y = transpose_b == Transpose::kYes ? b[j * k + l] : b[l * n + j];
                sum += 0.5 * x * y;
              }
              ASSERT_NEAR(c[i * n + j], sum, Tolerance(k)) << m << " " << n << " " << k;
            }
          }
        }
      }
    }
  }
}

TEST(Gemm, WithBetaZeroDoesNotReadTheTarget) {
  ThreadPool pool(2);
  const std::vector<float> a(64, 1.0f), b(64, 1.0f);
  std::vector<float> c(64, std::nanf(""));
  Gemm(pool, Transpose::kNo, Transpose::kNo, 8, 8, 8, 1, a.data(), 8, b.data(), 8, 0, c.data(), 8);
  for (const float value : c) EXPECT_EQ(value, 8);
}

// More than a build of OpenBLAS has memory for, on few cores too: a product takes longer than a
// thread's turn on a core, so many are under way at once.
TEST(Gemm, FromHundredsOfThreadsAtOnceIsRightAndSaysNothing) {
  constexpr int64_t kThreads = 300, kRows = 32, kInner = int64_t{1} << 18;
  const std::vector<float> a(kRows * kInner, 0.5f);
  std::atomic<int> ready = 0, wrong = 0;
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      std::vector<float> c(kRows * kRows);
      ++ready;
      while (ready < kThreads) std::this_thread::yield();
      GemmOnThisThread(Transpose::kNo, Transpose::kYes, kRows, kRows, kInner, 1, a.data(), kInner,
                       a.data(), kInner, 0, c.data(), kRows);
      for (const float sum : c) {
        if (sum != kInner / 4) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(wrong, 0);
}

TEST(SymmetricProduct, AgreesWithFloat64AndIsExactlySymmetric) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    for (const auto& [n, k] : std::vector<std::array<int64_t, 2>>{
             {1, 1}, {1, 9}, {9, 1}, {48, 3}, {49, 50}, {200, 33}, {517, 8}}) {
      for (const auto transpose : {Transpose::kNo, Transpose::kYes}) {
        const auto a = Random(n * k, 4);
        auto c0 = Random(n * n, 5);
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < i; ++j) c0[i * n + j] = c0[j * n + i];
        }
        auto c = c0;
        SymmetricProduct(pool, transpose, n, k, 2.0f, a.data(),
                         transpose == Transpose::kYes ? n : k, -1.0f, c.data(), n);
        const auto at = [&](int64_t i, int64_t l) {
          return double{transpose == Transpose::kYes ? a[l * n + i] : a[i * k + l]};
        };
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            double sum = -c0[i * n + j];
            for (int64_t l = 0; l < k; ++l) sum += 2 * at(i, l) * at(j, l);
            ASSERT_NEAR(c[i * n + j], sum, 2 * Tolerance(k)) << n << " " << k;
            ASSERT_EQ(c[i * n + j], c[j * n + i]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dim0::cpu
