// In which order blocks take attention's tiles of rows.
//
// Blocks start in the order of their index. Pairs of a sequence and a head are taken in groups so
// small that their keys and values stay in the L2 cache while all of their tiles are at work; of
// all pairs at once, every tile would read them from memory anew. Within a group the tiles with the
// most work come first, so that no long one is left for the end; and the group that may be smaller
// is the first, for the last one's tiles must keep the whole GPU busy.
#ifndef DIM0_MODEL_CUDA_BLOCK_ORDER_H_
#define DIM0_MODEL_CUDA_BLOCK_ORDER_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace dim0::cuda {

// Of `pairs`. A group's keys are 8 MiB of bfloat16, and so are its values: L2 caches of 32 MiB and
// more have room for them and for what else is at work. Its blocks, a thousand for heads of 64 and
// half of that for 128, are about twice what runs at once.
constexpr uint32_t PairsPerGroup(int64_t pairs, int64_t seq_len, int64_t head_size) {
  constexpr int64_t kElements = 4 << 20;
  const int64_t group = kElements / std::max<int64_t>(seq_len * head_size, 1);
  return static_cast<uint32_t>(std::clamp<int64_t>(group, 1, std::max<int64_t>(pairs, 1)));
}

struct RankedTile {
  uint32_t pair;
  uint32_t rank;  // among the pair's tiles, by their work: 0 has the least
};

// The tile of each of the tiles * pairs blocks. 1 <= pairs_per_group <= pairs.
__host__ __device__ constexpr RankedTile TileOfBlock(uint32_t block, uint32_t tiles, uint32_t pairs,
                                                     uint32_t pairs_per_group) {
  const uint32_t from_end = tiles * pairs - 1 - block;
  const uint32_t group = from_end / (tiles * pairs_per_group);
  const uint32_t first_pair = group * pairs_per_group;
  const uint32_t pairs_left = pairs - first_pair;
  const uint32_t size = pairs_left < pairs_per_group ? pairs_left : pairs_per_group;
  const uint32_t in_group = from_end - tiles * first_pair;
  return {first_pair + in_group % size, in_group / size};
}

}  // namespace dim0::cuda

#endif  // DIM0_MODEL_CUDA_BLOCK_ORDER_H_
