// Float32 matrix products for one CPU rank: OpenBLAS on one thread per slice, sliced over the
// rank's own pool, because OpenBLAS's threads are one per process and would serialise the ranks.
#ifndef DIM0_RUNTIME_CPU_GEMM_H_
#define DIM0_RUNTIME_CPU_GEMM_H_

#include <cstdint>

#include "runtime/cpu/thread_pool.h"

namespace dim0::cpu {

enum class Transpose : bool { kNo, kYes };

// C = alpha op(A) op(B) + beta C; op(A) is [m, k], op(B) [k, n], C [m, n], row-major with leading
// dimensions lda, ldb, ldc (in elements). With beta 0, C is not read. Any of m, n, k may be 0.
void Gemm(ThreadPool& pool, Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n,
          int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
          float beta, float* c, int64_t ldc);

// The same on the calling thread only.
void GemmOnThisThread(Transpose transpose_a, Transpose transpose_b, int64_t m, int64_t n, int64_t k,
                      float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                      float beta, float* c, int64_t ldc);

// C = alpha op(A) op(A)^T + beta C, where op(A) is [n, k]; all of the symmetric C [n, n] is
// written.
void SymmetricProduct(ThreadPool& pool, Transpose transpose, int64_t n, int64_t k, float alpha,
                      const float* a, int64_t lda, float beta, float* c, int64_t ldc);

// C = alpha A B + beta C, all [n, n] without gaps, where C and A B are symmetric. Computes the upper
// triangle, in panels, and mirrors it.
void SymmetricMatMul(ThreadPool& pool, int64_t n, float alpha, const float* a, const float* b,
                     float beta, float* c);

}  // namespace dim0::cpu

#endif  // DIM0_RUNTIME_CPU_GEMM_H_
