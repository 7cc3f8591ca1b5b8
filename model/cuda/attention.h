// What the two sets of attention kernels share: where a head lies, and how their launches are told
// apart. The tensor-core kernels take bfloat16 heads of 64 or 128; the plain ones take anything.
#ifndef DIM0_MODEL_CUDA_ATTENTION_H_
#define DIM0_MODEL_CUDA_ATTENTION_H_

#include <cmath>
#include <cstdint>

#include "model/cuda/block_order.h"
#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {

// The heads of all sequences, "pairs" of a sequence and a head, inside qkv [B*T, 3C], its gradient,
// and out [B*T, C]. A pair has a block at least, so their number has 32 bits, which GPUs divide at
// a fraction of the cost of 64.
struct HeadLayout {
  int64_t seq_len;
  uint32_t heads;
  int64_t head_size;
  uint32_t pairs;
  uint32_t pairs_per_group;  // see block_order.h
  float scale;

  explicit HeadLayout(const AttentionSize& size)
      : seq_len(size.seq_len),
        heads(static_cast<uint32_t>(size.heads)),
        head_size(size.head_size),
        pairs(static_cast<uint32_t>(size.batch * size.heads)),
        pairs_per_group(PairsPerGroup(pairs, seq_len, head_size)),
        scale(1.0f / std::sqrt(static_cast<float>(size.head_size))) {}

  __device__ int64_t width() const { return heads * head_size; }
  // Rows of qkv are this far apart.
  __device__ int64_t qkv_stride() const { return 3 * width(); }
  // Where a pair's queries start in qkv. Keys and values follow at width() and 2 * width().
  __device__ int64_t QkvOffset(uint32_t pair) const {
    return pair / heads * seq_len * qkv_stride() + pair % heads * head_size;
  }
  __device__ int64_t OutOffset(uint32_t pair) const {
    return pair / heads * seq_len * width() + pair % heads * head_size;
  }
};

// A block's tile of rows and its pair.
struct BlockPlace {
  int64_t first_row;
  uint32_t pair;
};
__device__ __forceinline__ BlockPlace PlaceOfBlock(const HeadLayout& layout, int rows_per_tile,
                                                   bool last_is_longest) {
  const auto tiles = static_cast<uint32_t>(CeilDivide(layout.seq_len, rows_per_tile));
  const RankedTile tile = TileOfBlock(blockIdx.x, tiles, layout.pairs, layout.pairs_per_group);
  const uint32_t index = last_is_longest ? tile.rank : tiles - 1 - tile.rank;
  return {int64_t{index} * rows_per_tile, tile.pair};
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
