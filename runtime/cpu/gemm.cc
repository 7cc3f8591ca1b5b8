#include "runtime/cpu/gemm.h"

#include <cblas.h>

#include <algorithm>
#include <mutex>
#include <semaphore>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace dim0::cpu {
namespace {

// Slices are cut at multiples of this, a multiple of every OpenBLAS micro-tile.
constexpr int64_t kSliceGrain = 48;

CBLAS_TRANSPOSE ToCblas(Transpose transpose) {
  return transpose == Transpose::kYes ? CblasTrans : CblasNoTrans;
}

// OpenBLAS reads its thread count from the environment; one thread a call is what this file is
// built on.
void UseOneThreadPerCall() {
  static std::once_flag once;
  std::call_once(once, [] { openblas_set_num_threads(1); });
}

// How many threads OpenBLAS has working memory for, as it was built: at least one.
int MostCallsAtOnce() {
  const absl::string_view config = openblas_get_config();  // "... Haswell MAX_THREADS=64"
  constexpr absl::string_view kName = "MAX_THREADS=";
  const size_t at = config.find(kName);
  int threads = 0;
  if (at == absl::string_view::npos) return 1;  // a build that knows of no threads
  absl::string_view digits = config.substr(at + kName.size());
  digits = digits.substr(0, digits.find_first_not_of("0123456789"));
  return absl::SimpleAtoi(digits, &threads) ? std::max(threads, 1) : 1;
}

// Held during a call of OpenBLAS. Where more threads are in it at once than it has memory for, it
// says so on standard error, and OpenBLAS 0.3.21, Debian 12's, then writes beyond its tables.
class Call {
 public:
  Call() { room().acquire(); }
  ~Call() { room().release(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  static std::counting_semaphore<>& room() {
    static std::counting_semaphore<> room(MostCallsAtOnce());
    return room;
  }
};

// Copies the upper triangle's rows [begin, end) below the diagonal, in blocks that stay in cache.
void MirrorUpper(float* c, int64_t ldc, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 32;
  for (int64_t i0 = begin; i0 < end; i0 += kBlock) {
    const int64_t i1 = std::min(end, i0 + kBlock);
    for (int64_t j0 = 0; j0 < i1; j0 += kBlock) {
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t j = j0; j < std::min(i, j0 + kBlock); ++j) c[i * ldc + j] = c[j * ldc + i];
      }
    }
  }
}

}  // namespace

void GemmOnThisThread(Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n, int64_t k,
                      float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                      float beta, float* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  UseOneThreadPerCall();
  const Call call;
  cblas_sgemm(CblasRowMajor, ToCblas(transpose_a), ToCblas(transpose_b), m, n, k, alpha, a, lda, b,
              ldb, beta, c, ldc);
}

void Gemm(ThreadPool& pool, Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n,
          int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
          float beta, float* c, int64_t ldc) {
  if (n >= m) {
    pool.ParallelFor(n, kSliceGrain, [&](int64_t begin, int64_t end) {
      const float* slice = transpose_b == Transpose::kYes ? b + begin * ldb : b + begin;
      GemmOnThisThread(transpose_a, transpose_b, m, end - begin, k, alpha, a, lda, slice, ldb, beta,
                       c + begin, ldc);
    });
  } else {
    pool.ParallelFor(m, kSliceGrain, [&](int64_t begin, int64_t end) {
      const float* slice = transpose_a == Transpose::kYes ? a + begin : a + begin * lda;
      GemmOnThisThread(transpose_a, transpose_b, end - begin, n, k, alpha, slice, lda, b, ldb, beta,
                       c + begin * ldc, ldc);
    });
  }
}

void SymmetricProduct(ThreadPool& pool, Transpose transpose, int64_t n, int64_t k, float alpha,
                      const float* a, int64_t lda, float beta, float* c, int64_t ldc) {
  if (n == 0) return;
  UseOneThreadPerCall();
  const auto rows_from = [&](int64_t row) {
    return transpose == Transpose::kYes ? a + row : a + row * lda;
  };
  const Transpose other = transpose == Transpose::kYes ? Transpose::kNo : Transpose::kYes;
  // Row panels of the upper triangle: a triangle on the diagonal by ssyrk, the rectangle to its
  // right by sgemm. Several panels a thread even out their unequal work.
  const int64_t panels = pool.threads() == 1 ? 1 : 4 * pool.threads();
  const int64_t step = (n / panels + kSliceGrain) / kSliceGrain * kSliceGrain;
  pool.Run((n + step - 1) / step, [&](int64_t i) {
    const int64_t begin = i * step;
    const int64_t end = std::min(n, begin + step);
    {
      const Call call;
      cblas_ssyrk(CblasRowMajor, CblasUpper, ToCblas(transpose), end - begin, k, alpha,
                  rows_from(begin), lda, beta, c + begin * ldc + begin, ldc);
    }
    if (end == n) return;
    GemmOnThisThread(transpose, other, end - begin, n - end, k, alpha, rows_from(begin), lda,
                     rows_from(end), lda, beta, c + begin * ldc + end, ldc);
  });
  pool.ParallelFor(n, kSliceGrain,
                   [&](int64_t begin, int64_t end) { MirrorUpper(c, ldc, begin, end); });
}

void SymmetricMatMul(ThreadPool& pool, int64_t n, float alpha, const float* a, const float* b,
                     float beta, float* c) {
  if (n == 0) return;
  // A panel's square on the diagonal is computed whole: narrow panels waste less and multiply
  // slower.
  constexpr int64_t kPanels = 8;
  const int64_t panels = std::max<int64_t>(kPanels, 4 * pool.threads());
  const int64_t step = (n / panels + kSliceGrain) / kSliceGrain * kSliceGrain;
  pool.Run((n + step - 1) / step, [&](int64_t i) {
    const int64_t begin = i * step;
    const int64_t end = std::min(n, begin + step);
    GemmOnThisThread(Transpose::kNo, Transpose::kNo, end - begin, n - begin, n, alpha,
                     a + begin * n, n, b + begin, n, beta, c + begin * n + begin, n);
  });
  pool.ParallelFor(n, kSliceGrain,
                   [&](int64_t begin, int64_t end) { MirrorUpper(c, n, begin, end); });
}

}  // namespace dim0::cpu
