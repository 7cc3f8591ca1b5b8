#include <algorithm>

#include "model/cpu/column_sums.h"
#include "model/cpu/cpu_kernels.h"
#include "model/cpu/row_math.h"
#include "runtime/check.h"

namespace dim0::cpu {

void CpuKernels::EmbeddingForward(Stream& stream, const int32_t* tokens, int64_t seq_len,
                                  const Tensor& wte, const Tensor& wpe, const Tensor& out) {
  const int64_t count = out.rows, width = out.cols, vocabulary = wte.rows;
  DIM0_CHECK(wte.cols == width && wpe.cols == width && wpe.rows >= seq_len);
  DIM0_CHECK(seq_len > 0 && count % seq_len == 0);
  OpInfo info{.name = "embedding_forward",
              .flops = 1.0 * count * width,
              .bytes = 12.0 * count * width + 4.0 * count};
  stream.Enqueue(std::move(info),
                 [=, this, wte = wte.f32(), wpe = wpe.f32(), out = out.f32()](auto&) {
                   pool_.ParallelFor(count, 1, [=](int64_t begin, int64_t end) {
                     for (int64_t n = begin; n < end; ++n) {
                       DIM0_CHECK(0 <= tokens[n] && tokens[n] < vocabulary);
                       const float* token = wte + tokens[n] * width;
                       const float* position = wpe + n % seq_len * width;
                       float* row = out + n * width;
#pragma omp simd
                       for (int64_t c = 0; c < width; ++c) row[c] = token[c] + position[c];
                     }
                   });
                   return absl::OkStatus();
                 });
}

void CpuKernels::EmbeddingBackward(Stream& stream, const int32_t* tokens, int64_t seq_len,
                                   const Tensor& dout, const Tensor& dwte, const Tensor& dwpe) {
  const int64_t count = dout.rows, width = dout.cols, vocabulary = dwte.rows;
  const int64_t positions = dwpe.rows;
  DIM0_CHECK(dwte.cols == width && dwpe.cols == width && positions >= seq_len);
  DIM0_CHECK(seq_len > 0 && count % seq_len == 0);
  // Each element of dout is added to one of dwte and one of dwpe.
  OpInfo info{.name = "embedding_backward",
              .flops = 2.0 * count * width,
              .bytes = 20.0 * count * width + 4.0 * count};
  stream.Enqueue(std::move(info),
                 [=, this, dout = dout.f32(), dwte = dwte.f32(), dwpe = dwpe.f32()](auto&) {
                   // By columns, because tokens repeat: each thread adds all tokens in order to its
                   // own columns.
                   ForColumnStrips(pool_, width, [=](int64_t begin, int64_t strip) {
                     for (int64_t t = 0; t < vocabulary; ++t)
                       std::fill_n(dwte + t * width + begin, strip, 0.0f);
                     for (int64_t t = 0; t < positions; ++t)
                       std::fill_n(dwpe + t * width + begin, strip, 0.0f);
                     for (int64_t n = 0; n < count; ++n) {
                       DIM0_CHECK(0 <= tokens[n] && tokens[n] < vocabulary);
                       const float* row = dout + n * width + begin;
                       Store(row, strip, Write::kAccumulate, dwte + tokens[n] * width + begin);
                       Store(row, strip, Write::kAccumulate, dwpe + n % seq_len * width + begin);
                     }
                   });
                   return absl::OkStatus();
                 });
}

}  // namespace dim0::cpu
