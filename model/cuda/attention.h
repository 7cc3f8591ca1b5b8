// What the two sets of attention kernels share: where a head lies, and how their launches are told
// apart. The tensor-core kernels take bfloat16 heads of 64 or 128; the plain ones take anything.
#ifndef DIM0_MODEL_CUDA_ATTENTION_H_
#define DIM0_MODEL_CUDA_ATTENTION_H_

#include <cmath>
#include <cstdint>

#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {

// The heads of all sequences, "pairs" of a sequence and a head, inside qkv [B*T, 3C], its gradient,
// and out [B*T, C].
struct HeadLayout {
  int64_t seq_len;
  int64_t heads;
  int64_t head_size;
  int64_t pairs;
  float scale;

  explicit HeadLayout(const AttentionSize& size)
      : seq_len(size.seq_len),
        heads(size.heads),
        head_size(size.head_size),
        pairs(size.batch * size.heads),
        scale(1.0f / std::sqrt(static_cast<float>(size.head_size))) {}

  __device__ int64_t width() const { return heads * head_size; }
  // Rows of qkv are this far apart.
  __device__ int64_t qkv_stride() const { return 3 * width(); }
  // Where a pair's queries start in qkv. Keys and values follow at width() and 2 * width().
  __device__ int64_t QkvOffset(int64_t pair) const {
    return pair / heads * seq_len * qkv_stride() + pair % heads * head_size;
  }
  __device__ int64_t OutOffset(int64_t pair) const {
    return pair / heads * seq_len * width() + pair % heads * head_size;
  }
};

// A block's tile of rows and its pair. Blocks start in the order of their index: tiles with the
// most work come first, so that no long one is left for the end.
struct BlockPlace {
  int64_t first_row;
  int64_t pair;
};
__device__ __forceinline__ BlockPlace PlaceOfBlock(const HeadLayout& layout, int rows_per_tile,
                                                   bool last_is_longest) {
  const int64_t tiles = CeilDivide(layout.seq_len, rows_per_tile);
  const int64_t tile = blockIdx.x / layout.pairs;
  return {(last_is_longest ? tiles - 1 - tile : tile) * rows_per_tile, blockIdx.x % layout.pairs};
}

// Plain kernels: float32 arithmetic, every head size.
cudaError_t LaunchPlainAttentionForward(const HeadLayout& layout, Array qkv, Array out,
                                        float* logsumexp, cudaStream_t stream);
// `delta` [pairs, T]: the sum of dout * out over a query's head.
cudaError_t LaunchPlainAttentionBackward(const HeadLayout& layout, Array dout, Array qkv,
                                         const float* logsumexp, const float* delta, Array dqkv,
                                         cudaStream_t stream);

}  // namespace dim0::cuda

#endif  // DIM0_MODEL_CUDA_ATTENTION_H_
