// Attention for every type and head size, without tensor cores, and attention of one new token.
//
// Tiles of 32 rows by 32 columns are staged in shared memory as float32. A block computes 64 of its
// rows' result columns; larger heads take several blocks, which each compute the scores anew, so
// that no head size is too large.
#include <cfloat>

#include "model/cuda/attention.h"
#include "model/cuda/elements.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {
namespace {

constexpr int kTile = 32;   // rows and columns of a tile, and how much of a head is staged at once
constexpr int kStrip = 64;  // result columns of a block
constexpr int kThreads = 256;
// Threads that share a row of a tile. Thread t has row t / kGroup, and of the columns every
// kGroup-th.
constexpr int kGroup = kThreads / kTile;
constexpr int kScores = kTile / kGroup;    // a thread's scores
constexpr int kResults = kStrip / kGroup;  // and results

__device__ __forceinline__ int Row() { return threadIdx.x / kGroup; }
__device__ __forceinline__ int Column(int i) { return threadIdx.x % kGroup + kGroup * i; }

// Some of a head's rows: `count` of them exist, those behind are read as zeros.
template <typename T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t count;

  __device__ Rows From(int64_t first) const {
    return {data + first * stride, stride, count - first};
  }
};

// Two operands of a product, staged.
struct Stage {
  float left[kTile][kTile + 1];
  float right[kTile][kTile + 1];
};

// scores[i] = the inner product of row Row() of `left` and row Column(i) of `right`.
template <typename T>
__device__ void InnerProducts(const Rows<T>& left, const Rows<T>& right, int64_t head_size,
                              Stage& stage, float (&scores)[kScores]) {
  for (float& score : scores) score = 0;
  for (int64_t d0 = 0; d0 < head_size; d0 += kTile) {
    __syncthreads();  // what was staged before has been read
    for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
      const int row = e / kTile, d = e % kTile;
      const bool inside = d0 + d < head_size;
      stage.left[row][d] =
          inside && row < left.count ? ToFloat(left.data[row * left.stride + d0 + d]) : 0.0f;
      stage.right[row][d] =
          inside && row < right.count ? ToFloat(right.data[row * right.stride + d0 + d]) : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < kTile; ++d) {
      const float value = stage.left[Row()][d];
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] += value * stage.right[Column(i)][d];
    }
  }
}

// results[i] += sum over the tile's columns j of weights[Row()][j] * right[j][strip + Column(i)].
template <typename T>
__device__ void AddWeightedRows(const float (&weights)[kTile][kTile + 1], const Rows<T>& right,
                                int64_t strip, int64_t head_size, float (&staged)[kTile][kStrip],
                                float (&results)[kResults]) {
  __syncthreads();  // what was staged before has been read
  for (int e = threadIdx.x; e < kTile * kStrip; e += kThreads) {
    const int row = e / kStrip, d = e % kStrip;
    staged[row][d] = row < right.count && strip + d < head_size
                         ? ToFloat(right.data[row * right.stride + strip + d])
                         : 0.0f;
  }
  __syncthreads();  // `weights` are there, too
#pragma unroll 4
  for (int j = 0; j < kTile; ++j) {
    const float weight = weights[Row()][j];
#pragma unroll
    for (int i = 0; i < kResults; ++i) results[i] += weight * staged[j][Column(i)];
  }
}

// Over the threads of a row.
__device__ __forceinline__ float GroupSum(float value) {
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}
__device__ __forceinline__ float GroupMax(float value) {
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// A block has a tile of queries of one head and kStrip columns of their output.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    PlainForwardKernel(HeadLayout layout, const T* qkv, T* out, float* logsumexp) {
  __shared__ Stage stage;
  __shared__ float weights[kTile][kTile + 1];
  __shared__ float staged[kTile][kStrip];
  const auto [i0, pair] = PlaceOfBlock(layout, kTile, /*last_is_longest=*/true);
  const int64_t strip = static_cast<int64_t>(blockIdx.y) * kStrip;
  const int64_t stride = layout.qkv_stride();
  const Rows<T> q = {qkv + layout.QkvOffset(pair), stride, layout.seq_len};
  const Rows<T> k = {q.data + layout.width(), stride, layout.seq_len};
  const Rows<T> v = {k.data + layout.width(), stride, layout.seq_len};
  const int64_t query = i0 + Row();

  // Over the keys so far: the greatest score, from a finite start, and the sum of
  // e^(score - greatest).
  float max = -FLT_MAX, sum = 0;
  float results[kResults] = {};
  for (int64_t j0 = 0; j0 <= i0; j0 += kTile) {
    float scores[kScores];
    InnerProducts(q.From(i0), k.From(j0), layout.head_size, stage, scores);
    float new_max = max;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = j0 + Column(i) <= query ? scores[i] * layout.scale : -FLT_MAX;
      new_max = fmaxf(new_max, scores[i]);
    }
    // Every query sees the tile's first key, so the maximum is that of a score.
    new_max = GroupMax(new_max);
    const float correction = expf(max - new_max);
    max = new_max;
    float tile_sum = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float p = expf(scores[i] - max);
      tile_sum += p;
      weights[Row()][Column(i)] = p;
    }
    sum = sum * correction + GroupSum(tile_sum);
#pragma unroll
    for (int i = 0; i < kResults; ++i) results[i] *= correction;
    AddWeightedRows(weights, v.From(j0), strip, layout.head_size, staged, results);
  }
  if (query >= layout.seq_len) return;
  const float factor = 1.0f / sum;
  T* out_row = out + layout.OutOffset(pair) + query * layout.width();
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    const int64_t d = strip + Column(i);
    if (d < layout.head_size) out_row[d] = FromFloat<T>(results[i] * factor);
  }
  if (strip == 0 && Column(0) == 0) {
    logsumexp[pair * layout.seq_len + query] = max + logf(sum);
  }
}

// With the probabilities P recomputed from logsumexp:
//   dV = P^T dO,  dS = P (dO V^T - delta) * scale,  dQ = dS K,  dK = dS^T Q.
// A block has, of one head, a tile of keys, whose dk and dv it sums over the queries; or, with
// kKeyRows false, a tile of queries, whose dq it sums over the keys. No sum is shared by two
// blocks.
template <bool kKeyRows, typename T>
__global__ void __launch_bounds__(kThreads)
    PlainBackwardKernel(HeadLayout layout, const T* dout, const T* qkv, const float* logsumexp,
                        const float* delta, T* dqkv) {
  __shared__ Stage stage;
  __shared__ float probabilities[kKeyRows ? kTile : 1][kTile + 1];
  __shared__ float gradients[kTile][kTile + 1];
  __shared__ float staged[kTile][kStrip];
  const auto [r0, pair] = PlaceOfBlock(layout, kTile, /*last_is_longest=*/!kKeyRows);
  const int64_t strip = static_cast<int64_t>(blockIdx.y) * kStrip;
  const int64_t stride = layout.qkv_stride(), head_size = layout.head_size;
  const Rows<T> q = {qkv + layout.QkvOffset(pair), stride, layout.seq_len};
  const Rows<T> k = {q.data + layout.width(), stride, layout.seq_len};
  const Rows<T> v = {k.data + layout.width(), stride, layout.seq_len};
  const Rows<T> d_out = {dout + layout.OutOffset(pair), layout.width(), layout.seq_len};
  logsumexp += pair * layout.seq_len;
  delta += pair * layout.seq_len;

  float d_first[kResults] = {};  // of k or q
  float d_value[kResults] = {};
  const int64_t begin = kKeyRows ? r0 : 0;
  const int64_t end = kKeyRows ? layout.seq_len : r0 + 1;
  for (int64_t c0 = begin; c0 < end; c0 += kTile) {
    float scores[kScores], products[kScores];
    InnerProducts((kKeyRows ? k : q).From(r0), (kKeyRows ? q : k).From(c0), head_size, stage,
                  scores);
    InnerProducts((kKeyRows ? v : d_out).From(r0), (kKeyRows ? d_out : v).From(c0), head_size,
                  stage, products);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int64_t row = r0 + Row(), column = c0 + Column(i);
      const int64_t query = kKeyRows ? column : row, key = kKeyRows ? row : column;
      float p = 0, ds = 0;
      if (key <= query && query < layout.seq_len) {
        p = expf(scores[i] * layout.scale - logsumexp[query]);
        ds = p * (products[i] - delta[query]) * layout.scale;
      }
      if constexpr (kKeyRows) probabilities[Row()][Column(i)] = p;
      gradients[Row()][Column(i)] = ds;
    }
    AddWeightedRows(gradients, (kKeyRows ? q : k).From(c0), strip, head_size, staged, d_first);
    if constexpr (kKeyRows) {
      AddWeightedRows(probabilities, d_out.From(c0), strip, head_size, staged, d_value);
    }
  }
  if (r0 + Row() >= layout.seq_len) return;
  T* target = dqkv + layout.QkvOffset(pair) + (r0 + Row()) * stride;
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    const int64_t d = strip + Column(i);
    if (d >= head_size) continue;
    if constexpr (kKeyRows) {
      target[layout.width() + d] = FromFloat<T>(d_first[i]);
      target[2 * layout.width() + d] = FromFloat<T>(d_value[i]);
    } else {
      target[d] = FromFloat<T>(d_first[i]);
    }
  }
}

dim3 Grid(const HeadLayout& layout) {
  return dim3(static_cast<unsigned>(CeilDivide(layout.seq_len, kTile) * layout.pairs),
              static_cast<unsigned>(CeilDivide(layout.head_size, kStrip)));
}

constexpr int kDecodeThreads = 256;
constexpr int kDecodeWarps = kDecodeThreads / kWarpSize;

// A block has a head and, a thread each, kDecodeThreads columns of its output, whose share of the
// new key and value it stores. The new row is read from qkv, for another block may not have stored
// its share yet.
template <typename T>
__global__ void __launch_bounds__(kDecodeThreads)
    DecodeKernel(int64_t heads, int64_t head_size, int64_t position, const T* qkv, T* keys,
                 T* values, T* out) {
  __shared__ float scores[kDecodeThreads];
  const int64_t width = heads * head_size;
  const int64_t offset = blockIdx.x * head_size;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const float scale = 1.0f / sqrtf(static_cast<float>(head_size));
  const T* q = qkv + offset;
  const T* new_key = q + width;
  const T* new_value = new_key + width;
  keys += offset;
  values += offset;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kDecodeThreads + threadIdx.x;
  if (column < head_size) {
    keys[position * width + column] = new_key[column];
    values[position * width + column] = new_value[column];
  }

  float max = -FLT_MAX, sum = 0, result = 0;
  for (int64_t j0 = 0; j0 <= position; j0 += kDecodeThreads) {
    const int count = static_cast<int>(min(position + 1 - j0, int64_t{kDecodeThreads}));
    __syncthreads();  // the scores before have been read
    for (int j = warp; j < count; j += kDecodeWarps) {
      const T* key = j0 + j == position ? new_key : keys + (j0 + j) * width;
      float product = 0;
      for (int64_t d = lane; d < head_size; d += kWarpSize) {
        product += ToFloat(q[d]) * ToFloat(key[d]);
      }
      product = WarpSum(product);
      if (lane == 0) scores[j] = product * scale;
    }
    __syncthreads();
    // Every thread goes through all the scores, in the same order.
    float new_max = max;
    for (int j = 0; j < count; ++j) new_max = fmaxf(new_max, scores[j]);
    const float correction = expf(max - new_max);
    max = new_max;
    sum *= correction;
    result *= correction;
    for (int j = 0; j < count; ++j) {
      const float p = expf(scores[j] - max);
      sum += p;
      if (column < head_size) {
        const T* value = j0 + j == position ? new_value : values + (j0 + j) * width;
        result += p * ToFloat(value[column]);
      }
    }
  }
  if (column < head_size) out[offset + column] = FromFloat<T>(result / sum);
}

}  // namespace

cudaError_t LaunchPlainAttentionForward(const HeadLayout& layout, Array qkv, Array out,
                                        float* logsumexp, cudaStream_t stream) {
  return WithElementType(qkv.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return Launch(PlainForwardKernel<T>, Grid(layout), dim3(kThreads), 0, stream, layout,
                  As<T>(qkv), As<T>(out), logsumexp);
  });
}

cudaError_t LaunchPlainAttentionBackward(const HeadLayout& layout, Array dout, Array qkv,
                                         const float* logsumexp, const float* delta, Array dqkv,
                                         cudaStream_t stream) {
  return WithElementType(qkv.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    for (const auto kernel : {PlainBackwardKernel<true, T>, PlainBackwardKernel<false, T>}) {
      const cudaError_t error = Launch(kernel, Grid(layout), dim3(kThreads), 0, stream, layout,
                                       As<T>(dout), As<T>(qkv), logsumexp, delta, As<T>(dqkv));
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t LaunchAttentionDecode(int64_t heads, int64_t head_size, int64_t position, Array qkv,
                                  Array keys, Array values, Array out, cudaStream_t stream) {
  return WithElementType(qkv.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    const dim3 grid(static_cast<unsigned>(heads),
                    static_cast<unsigned>(CeilDivide(head_size, kDecodeThreads)));
    return Launch(DecodeKernel<T>, grid, dim3(kDecodeThreads), 0, stream, heads, head_size,
                  position, As<T>(qkv), As<T>(keys), As<T>(values), As<T>(out));
  });
}

}  // namespace dim0::cuda
