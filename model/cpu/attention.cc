// Causal attention by tiles: a block of queries against blocks of keys, scores on the stack only.
#include <algorithm>
#include <cmath>

#include "model/cpu/cpu_kernels.h"
#include "model/cpu/row_math.h"
#include "runtime/check.h"
#include "runtime/cpu/gemm.h"

namespace dim0::cpu {
namespace {

// A tile of scores is kQueries x kKeys floats, 64 KiB: a quarter of a small L2. It is wide because
// the fewer and larger the products, the nearer BLAS comes to its peak. kKeys is a multiple of
// kQueries, so that in every tile that is not skipped each query sees at least one key.
constexpr int64_t kQueries = 64;
constexpr int64_t kKeys = 256;

struct alignas(64) ScoreTile {
  float scores[kQueries * kKeys];
};

// One head of one sequence inside qkv [B*T, 3C] or its gradient.
struct HeadLayout {
  int64_t seq_len;
  int64_t heads;
  int64_t head_size;
  float scale;

  HeadLayout(const AttentionShape& shape, int64_t width)
      : seq_len(shape.seq_len),
        heads(shape.heads),
        head_size(width / shape.heads),
        scale(1.0f / std::sqrt(static_cast<float>(head_size))) {}

  int64_t width() const { return heads * head_size; }
  // Rows of qkv are this far apart.
  int64_t stride() const { return 3 * width(); }
  // Where (sequence, head) number `pair` starts in qkv: its queries. Keys and values follow at
  // width() and 2 * width().
  int64_t QkvOffset(int64_t pair) const {
    return pair / heads * seq_len * stride() + pair % heads * head_size;
  }
  // The same in out [B*T, C].
  int64_t OutOffset(int64_t pair) const {
    return pair / heads * seq_len * width() + pair % heads * head_size;
  }
};

// tile [queries, keys] = scale * Q K^T.
void Scores(const HeadLayout& layout, const float* q, int64_t queries, const float* k, int64_t keys,
            ScoreTile& tile) {
  GemmOnThisThread(Transpose::kNo, Transpose::kYes, queries, keys, layout.head_size, layout.scale,
                   q, layout.stride(), k, layout.stride(), 0.0f, tile.scores, kKeys);
}

// How many of the keys [first_key, first_key + keys) query number `query` sees.
int64_t Visible(int64_t query, int64_t first_key, int64_t keys) {
  return std::min(keys, query + 1 - first_key);
}

// q: the head's first query; out, logsumexp: its first output row and entry.
void HeadForward(const HeadLayout& layout, const float* q, float* out, float* logsumexp) {
  const int64_t width = layout.width(), stride = layout.stride(), head_size = layout.head_size;
  const float* k = q + width;
  const float* v = k + width;
  ScoreTile tile;
  for (int64_t i0 = 0; i0 < layout.seq_len; i0 += kQueries) {
    const int64_t queries = std::min(kQueries, layout.seq_len - i0);
    // Per query, over the keys so far: the greatest score, and the sum of e^(score - greatest).
    float max[kQueries];
    float sum[kQueries] = {};
    std::fill_n(max, kQueries, kLowest);
    for (int64_t j0 = 0; j0 < i0 + queries; j0 += kKeys) {
      const int64_t keys = std::min(kKeys, i0 + queries - j0);
      Scores(layout, q + i0 * stride, queries, k + j0 * stride, keys, tile);
      for (int64_t i = 0; i < queries; ++i) {
        float* row = tile.scores + i * kKeys;
        const int64_t visible = Visible(i0 + i, j0, keys);
        const float new_max = Max(row, visible, max[i]);
        if (j0 > 0 && new_max > max[i]) {
          const float correction = Exp(max[i] - new_max);
          sum[i] *= correction;
          float* out_row = out + (i0 + i) * width;
#pragma omp simd
          for (int64_t d = 0; d < head_size; ++d) out_row[d] *= correction;
        }
        max[i] = new_max;
        sum[i] += ExpInPlace(row, visible, new_max);
        std::fill(row + visible, row + keys, 0.0f);
      }
      // out += P V, unnormalised.
      GemmOnThisThread(Transpose::kNo, Transpose::kNo, queries, head_size, keys, 1.0f, tile.scores,
                       kKeys, v + j0 * stride, stride, j0 > 0 ? 1.0f : 0.0f, out + i0 * width,
                       width);
    }
    for (int64_t i = 0; i < queries; ++i) {
      const float factor = 1.0f / sum[i];
      float* out_row = out + (i0 + i) * width;
#pragma omp simd
      for (int64_t d = 0; d < head_size; ++d) out_row[d] *= factor;
      logsumexp[i0 + i] = max[i] + std::log(sum[i]);
    }
  }
}

// Pointers as in HeadForward; dq points at the head's first query in dqkv. With P recomputed from
// logsumexp and delta = sum over d of dout * out:
//   dV = P^T dO,  dS = P (dO V^T - delta) * scale,  dQ = dS K,  dK = dS^T Q.
void HeadBackward(const HeadLayout& layout, const float* q, const float* out, const float* dout,
                  const float* logsumexp, float* dq) {
  const int64_t width = layout.width(), stride = layout.stride(), head_size = layout.head_size;
  const float* k = q + width;
  const float* v = k + width;
  float* dk = dq + width;
  float* dv = dk + width;
  ScoreTile probabilities;
  ScoreTile gradients;
  for (int64_t i0 = 0; i0 < layout.seq_len; i0 += kQueries) {
    const int64_t queries = std::min(kQueries, layout.seq_len - i0);
    const float* q_rows = q + i0 * stride;
    const float* dout_rows = dout + i0 * width;
    float delta[kQueries];
    for (int64_t i = 0; i < queries; ++i) {
      delta[i] = Dot(dout_rows + i * width, out + (i0 + i) * width, head_size);
    }
    // No earlier query saw these keys.
    for (int64_t i = i0; i < i0 + queries; ++i) {
      std::fill_n(dk + i * stride, head_size, 0.0f);
      std::fill_n(dv + i * stride, head_size, 0.0f);
    }
    for (int64_t j0 = 0; j0 < i0 + queries; j0 += kKeys) {
      const int64_t keys = std::min(kKeys, i0 + queries - j0);
      Scores(layout, q_rows, queries, k + j0 * stride, keys, probabilities);
      GemmOnThisThread(Transpose::kNo, Transpose::kYes, queries, keys, head_size, 1.0f, dout_rows,
                       width, v + j0 * stride, stride, 0.0f, gradients.scores, kKeys);
      for (int64_t i = 0; i < queries; ++i) {
        float* p = probabilities.scores + i * kKeys;
        float* ds = gradients.scores + i * kKeys;
        const int64_t visible = Visible(i0 + i, j0, keys);
        const float lse = logsumexp[i0 + i];
#pragma omp simd
        for (int64_t j = 0; j < visible; ++j) {
          p[j] = Exp(p[j] - lse);
          ds[j] = p[j] * (ds[j] - delta[i]) * layout.scale;
        }
        std::fill(p + visible, p + keys, 0.0f);
        std::fill(ds + visible, ds + keys, 0.0f);
      }
      GemmOnThisThread(Transpose::kYes, Transpose::kNo, keys, head_size, queries, 1.0f,
                       probabilities.scores, kKeys, dout_rows, width, 1.0f, dv + j0 * stride,
                       stride);
      GemmOnThisThread(Transpose::kYes, Transpose::kNo, keys, head_size, queries, 1.0f,
                       gradients.scores, kKeys, q_rows, stride, 1.0f, dk + j0 * stride, stride);
      GemmOnThisThread(Transpose::kNo, Transpose::kNo, queries, head_size, keys, 1.0f,
                       gradients.scores, kKeys, k + j0 * stride, stride, j0 > 0 ? 1.0f : 0.0f,
                       dq + i0 * stride, stride);
    }
  }
}

// One query of one head against `count` cached keys and values, rows `width` apart.
void HeadDecode(const float* q, const float* keys, const float* values, int64_t count,
                int64_t width, int64_t head_size, float* out) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_size));
  float scores[kKeys];
  float max = kLowest;
  float sum = 0;
  std::fill_n(out, head_size, 0.0f);
  for (int64_t j0 = 0; j0 < count; j0 += kKeys) {
    const int64_t size = std::min(kKeys, count - j0);
    for (int64_t j = 0; j < size; ++j) {
      scores[j] = scale * Dot(q, keys + (j0 + j) * width, head_size);
    }
    const float new_max = Max(scores, size, max);
    const float correction = Exp(max - new_max);
    max = new_max;
    sum = sum * correction + ExpInPlace(scores, size, max);
#pragma omp simd
    for (int64_t d = 0; d < head_size; ++d) out[d] *= correction;
    for (int64_t j = 0; j < size; ++j) {
      const float* value = values + (j0 + j) * width;
      const float p = scores[j];
#pragma omp simd
      for (int64_t d = 0; d < head_size; ++d) out[d] += p * value[d];
    }
  }
  const float factor = 1.0f / sum;
#pragma omp simd
  for (int64_t d = 0; d < head_size; ++d) out[d] *= factor;
}

// Multiply-adds of one causal product, both operands' and the mask's shapes considered: T (T + 1) /
// 2 pairs of a query and a key, D each, for each head of each sequence.
double ProductFlops(const AttentionShape& shape, int64_t width) {
  return 1.0 * shape.batch * shape.seq_len * (shape.seq_len + 1) * width;
}

}  // namespace

void CpuKernels::AttentionForward(Stream& stream, const AttentionShape& shape, const Tensor& qkv,
                                  const Tensor& out, const Tensor& logsumexp) {
  const int64_t width = out.cols, tokens = shape.batch * shape.seq_len;
  DIM0_CHECK(shape.heads > 0 && width % shape.heads == 0);
  DIM0_CHECK(out.rows == tokens && qkv.rows == tokens && qkv.cols == 3 * width);
  DIM0_CHECK(logsumexp.rows == shape.batch * shape.heads && logsumexp.cols == shape.seq_len);
  // Two products; qkv is read once and out written once.
  OpInfo info{.name = "attention_forward",
              .flops = 2 * ProductFlops(shape, width),
              .bytes = 4.0 * (4 * tokens * width + logsumexp.size())};
  const HeadLayout layout(shape, width);
  stream.Enqueue(std::move(info),
                 [=, this, qkv = qkv.f32(), out = out.f32(), logsumexp = logsumexp.f32()](auto&) {
                   pool_.ParallelFor(shape.batch * shape.heads, 1, [=](int64_t begin, int64_t end) {
                     for (int64_t pair = begin; pair < end; ++pair) {
                       HeadForward(layout, qkv + layout.QkvOffset(pair),
                                   out + layout.OutOffset(pair), logsumexp + pair * shape.seq_len);
                     }
                   });
                   return absl::OkStatus();
                 });
}

void CpuKernels::AttentionBackward(Stream& stream, const AttentionShape& shape, const Tensor& dout,
                                   const Tensor& qkv, const Tensor& out, const Tensor& logsumexp,
                                   const Tensor& dqkv) {
  const int64_t width = out.cols, tokens = shape.batch * shape.seq_len;
  DIM0_CHECK(shape.heads > 0 && width % shape.heads == 0);
  DIM0_CHECK(out.rows == tokens && dout.rows == tokens && dout.cols == width);
  DIM0_CHECK(qkv.rows == tokens && qkv.cols == 3 * width);
  DIM0_CHECK(dqkv.rows == tokens && dqkv.cols == 3 * width);
  DIM0_CHECK(logsumexp.rows == shape.batch * shape.heads && logsumexp.cols == shape.seq_len);
  // Five products, the recomputed scores' included; qkv, out and dout are read, dqkv written.
  OpInfo info{.name = "attention_backward",
              .flops = 5 * ProductFlops(shape, width),
              .bytes = 4.0 * (8 * tokens * width + logsumexp.size())};
  const HeadLayout layout(shape, width);
  stream.Enqueue(std::move(info), [=, this, dout = dout.f32(), qkv = qkv.f32(), out = out.f32(),
                                   logsumexp = logsumexp.f32(), dqkv = dqkv.f32()](auto&) {
    pool_.ParallelFor(shape.batch * shape.heads, 1, [=](int64_t begin, int64_t end) {
      for (int64_t pair = begin; pair < end; ++pair) {
        HeadBackward(layout, qkv + layout.QkvOffset(pair), out + layout.OutOffset(pair),
                     dout + layout.OutOffset(pair), logsumexp + pair * shape.seq_len,
                     dqkv + layout.QkvOffset(pair));
      }
    });
    return absl::OkStatus();
  });
}

void CpuKernels::AttentionDecode(Stream& stream, int64_t heads, int64_t position, const Tensor& qkv,
                                 const Tensor& keys, const Tensor& values, const Tensor& out) {
  const int64_t width = out.cols, count = position + 1;
  DIM0_CHECK(heads > 0 && width % heads == 0 && out.rows == 1);
  DIM0_CHECK(qkv.rows == 1 && qkv.cols == 3 * width);
  DIM0_CHECK(0 <= position && position < keys.rows && position < values.rows);
  DIM0_CHECK(keys.cols == width && values.cols == width);
  // Two products of one query with each cached row.
  OpInfo info{
      .name = "attention_decode", .flops = 4.0 * count * width, .bytes = 8.0 * count * width};
  stream.Enqueue(std::move(info), [=, this, qkv = qkv.f32(), keys = keys.f32(),
                                   values = values.f32(), out = out.f32()](auto&) {
    std::copy_n(qkv + width, width, keys + position * width);
    std::copy_n(qkv + 2 * width, width, values + position * width);
    const int64_t head_size = width / heads;
    pool_.ParallelFor(heads, 1, [=](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) {
        const int64_t offset = h * head_size;
        HeadDecode(qkv + offset, keys + offset, values + offset, count, width, head_size,
                   out + offset);
      }
    });
    return absl::OkStatus();
  });
}

}  // namespace dim0::cpu
