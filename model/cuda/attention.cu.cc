// Attention on tensor cores, for bfloat16 heads of 64 and 128; other heads go to the plain kernels.
//
// A block of four warps has a tile of 64 rows, 16 a warp, and goes through tiles of columns, which
// the warps share. Scores exist in a warp's registers and its own 16 rows of shared memory only;
// products take bfloat16 and sum in float32. Which element of a matrix a lane's fragment holds is
// not specified, so each warp finds that out once, by loading a matrix of the elements' numbers.
#include "model/cuda/attention.h"

#include <mma.h>

#include <cfloat>
#include <cstring>
#include <type_traits>

#include "model/cuda/elements.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {
namespace {

namespace wmma = nvcuda::wmma;

using BFloat = __nv_bfloat16;

constexpr int kEdge = 16;  // of the fragments
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRows = kWarps * kEdge;  // of a block's tile
constexpr float kLog2E = 1.44269504f;

using Left = wmma::fragment<wmma::matrix_a, kEdge, kEdge, kEdge, BFloat, wmma::row_major>;
// A matrix as it lies in memory, and its transpose.
using Right = wmma::fragment<wmma::matrix_b, kEdge, kEdge, kEdge, BFloat, wmma::row_major>;
using RightTransposed =
    wmma::fragment<wmma::matrix_b, kEdge, kEdge, kEdge, BFloat, wmma::col_major>;
using Sums = wmma::fragment<wmma::accumulator, kEdge, kEdge, kEdge, float>;
constexpr int kElements = Sums::num_elements;

// Rows of shared memory are longer than the matrix's by 16 bytes, so that the rows of a fragment
// lie in different banks.
template <int kHeadSize>
inline constexpr int kStride = kHeadSize + 8;

// fragment = the matrix at `tile` in shared memory, whose rows, or columns, are `stride` apart.
// This is wmma::load_matrix_sync; but of bfloat16 nvcc makes that a load from a generic address, so
// four loads of 4 bytes, and shuffles where the matrix is transposed, instead of one LDSM. The
// instruction below differs from nvcc's in ".shared" only, which no register's contents depend on.
template <typename Fragment>
__device__ __forceinline__ void LoadShared(Fragment& fragment, const BFloat* tile,
                                           unsigned stride) {
#ifdef __CUDA_ARCH__
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  unsigned values[4];
  static_assert(sizeof(values) == sizeof(fragment.x));
  if constexpr (std::is_same_v<Fragment, Left>) {
    asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(address), "r"(stride)
                 : "memory");
  } else if constexpr (std::is_same_v<Fragment, Right>) {
    asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(address), "r"(stride)
                 : "memory");
  } else {
    static_assert(std::is_same_v<Fragment, RightTransposed>);
    asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(address), "r"(stride)
                 : "memory");
  }
  memcpy(fragment.x, values, sizeof(values));
#else
  wmma::load_matrix_sync(fragment, tile, stride);
#endif
}

struct ElementPlaces {
  int row[kElements];
  int column[kElements];
};

// `scratch`: 16 x 16 floats of this warp's own.
__device__ ElementPlaces FindElements(float* scratch) {
  const int lane = threadIdx.x % kWarpSize;
  for (int i = lane; i < kEdge * kEdge; i += kWarpSize) scratch[i] = static_cast<float>(i);
  __syncwarp();
  Sums numbers;
  wmma::load_matrix_sync(numbers, scratch, kEdge, wmma::mem_row_major);
  __syncwarp();  // before others use the scratch again
  ElementPlaces places;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int number = static_cast<int>(numbers.x[i]);
    places.row[i] = number / kEdge;
    places.column[i] = number % kEdge;
  }
  return places;
}

// tile [kCount][kStride] = `count` rows of a head, zeros behind them. The whole block takes part.
template <int kHeadSize, int kCount>
__device__ void LoadTile(const BFloat* source, int64_t stride, int64_t count, BFloat* tile) {
  constexpr int kPack = Pack<BFloat>::kSize;
  constexpr int kPacks = kHeadSize / kPack;  // a row
  static_assert(kCount * kPacks % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kCount * kPacks / kThreads; ++i) {
    const int e = threadIdx.x + i * kThreads;
    const int row = e / kPacks, d = e % kPacks * kPack;
    // One store of a variable for both cases would make nvcc pack it anew from single elements.
    auto* const target = reinterpret_cast<Pack<BFloat>*>(tile + row * kStride<kHeadSize> + d);
    if (row < count) {
      *target = *reinterpret_cast<const Pack<BFloat>*>(source + row * stride + d);
    } else {
      *target = {};
    }
  }
}

// Writes the first `count` of a warp's 16 rows of a head, by way of 16 x kStoreStride floats of
// scratch of its own.
constexpr int kStoreColumns = 2 * kEdge;
constexpr int kStoreStride = kStoreColumns + 4;
template <int kHeadSize>
__device__ void StoreRows(const Sums (&sums)[kHeadSize / kEdge], float* scratch, int64_t count,
                          BFloat* target, int64_t stride) {
  constexpr int kPack = Pack<BFloat>::kSize;
  constexpr int kPacks = kStoreColumns / kPack;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int c = 0; c < kHeadSize / kStoreColumns; ++c) {
    __syncwarp();  // what was in the scratch has been read
    wmma::store_matrix_sync(scratch, sums[2 * c], kStoreStride, wmma::mem_row_major);
    wmma::store_matrix_sync(scratch + kEdge, sums[2 * c + 1], kStoreStride, wmma::mem_row_major);
    __syncwarp();
#pragma unroll
    for (int e = lane; e < kEdge * kPacks; e += kWarpSize) {
      const int row = e / kPacks, column = e % kPacks * kPack;
      if (row >= count) continue;
      float values[kPack];
      Load(scratch + row * kStoreStride + column, values);
      Store(values, target + row * stride + c * kStoreColumns + column);
    }
  }
}

// For __launch_bounds__: `blocks` with shared memory of this type, or as many as a multiprocessor
// has room for. To leave registers for more would only make the compiler spill.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kSharedMemory = 100 << 10;  // of a multiprocessor
#else
constexpr int kSharedMemory = 164 << 10;  // at least
#endif
template <typename Shared>
constexpr int BlocksWithRoom(int blocks) {
  constexpr int kReserved = 1 << 10;  // a block's, by the system
  constexpr int kRoom = kSharedMemory / (sizeof(Shared) + kReserved);
  return blocks < kRoom ? blocks : kRoom;
}

// ---- forward -----------------------------------------------------------------------------------

constexpr int kKeys = 64;  // a tile
// Lanes read a score row in float4s, two lanes a row: with this stride eight lanes meet in no bank.
constexpr int kScoreStride = kKeys + 8;

template <int kHeadSize>
struct ForwardShared {
  alignas(32) BFloat keys[kKeys * kStride<kHeadSize>];  // at first the queries
  alignas(32) BFloat values[kKeys * kStride<kHeadSize>];
  // Per warp: scores, and in their place, as bfloat16, probabilities.
  alignas(32) float scores[kWarps][kEdge * kScoreStride];
  float factors[kWarps][kEdge];  // what a row of the output is to be multiplied by
};

template <int kHeadSize>
__global__ void __launch_bounds__(kThreads,
                                  BlocksWithRoom<ForwardShared<kHeadSize>>(kHeadSize == 64 ? 4 : 2))
    ForwardKernel(HeadLayout layout, const BFloat* qkv, BFloat* out, float* logsumexp) {
  constexpr int kHeadEdges = kHeadSize / kEdge, kKeyEdges = kKeys / kEdge;
  auto& shared = *DynamicSharedMemory<ForwardShared<kHeadSize>>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const BlockPlace place = PlaceOfBlock(layout, kRows, /*last_is_longest=*/true);
  const int64_t i0 = place.first_row, stride = layout.qkv_stride();
  const uint32_t pair = place.pair;
  const BFloat* q = qkv + layout.QkvOffset(pair);
  const BFloat* k = q + layout.width();
  const BFloat* v = k + layout.width();
  float* scores = shared.scores[warp];
  float* factors = shared.factors[warp];
  BFloat* probabilities = reinterpret_cast<BFloat*>(scores);
  constexpr int kProbabilityStride = 2 * kScoreStride;

  const ElementPlaces places = FindElements(scores);
  LoadTile<kHeadSize, kRows>(q + i0 * stride, stride, layout.seq_len - i0, shared.keys);
  __syncthreads();
  Left queries[kHeadEdges];
#pragma unroll
  for (int d = 0; d < kHeadEdges; ++d) {
    LoadShared(queries[d], shared.keys + warp * kEdge * kStride<kHeadSize> + d * kEdge,
               kStride<kHeadSize>);
  }
  Sums result[kHeadEdges];
#pragma unroll
  for (int d = 0; d < kHeadEdges; ++d) wmma::fill_fragment(result[d], 0.0f);

  // Two lanes have a row: of each eight keys, one has the first four and one the last.
  const int row = lane / 2;
  const int64_t query = i0 + warp * kEdge + row;
  const float scale = layout.scale * kLog2E;  // powers of 2 are what the hardware computes
  // Over the keys so far: the greatest unscaled score, from a finite start, and the sum of
  // e^(scale (score - greatest)).
  float max = -FLT_MAX, sum = 0;
  for (int64_t j0 = 0; j0 <= i0; j0 += kKeys) {
    // On the diagonal, the edges of keys behind the warp's own are behind all its queries.
    const int edges = j0 == i0 ? warp + 1 : kKeyEdges;
    __syncthreads();  // the tiles before have been read
    LoadTile<kHeadSize, kKeys>(k + j0 * stride, stride, layout.seq_len - j0, shared.keys);
    LoadTile<kHeadSize, kKeys>(v + j0 * stride, stride, layout.seq_len - j0, shared.values);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kKeyEdges; ++j) {
      if (j >= edges) break;
      Sums score;
      wmma::fill_fragment(score, 0.0f);
#pragma unroll
      for (int d = 0; d < kHeadEdges; ++d) {
        RightTransposed key;
        LoadShared(key, shared.keys + j * kEdge * kStride<kHeadSize> + d * kEdge,
                   kStride<kHeadSize>);
        wmma::mma_sync(score, queries[d], key, score);
      }
      wmma::store_matrix_sync(scores + j * kEdge, score, kScoreStride, wmma::mem_row_major);
    }
    __syncwarp();

    constexpr int kFours = kKeys / 8;  // a lane's share of a row
    float mine[4 * kFours];
    float new_max = max;
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int column = 8 * four + lane % 2 * 4;
      float values[4];
      Load(scores + row * kScoreStride + column, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Behind the diagonal there may be anything.
        mine[4 * four + i] = j0 + column + i <= query ? values[i] : -FLT_MAX;
        new_max = fmaxf(new_max, mine[4 * four + i]);
      }
    }
    new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, 1));
    const float correction = exp2f((max - new_max) * scale);
    max = new_max;
    float tile_sum = 0;
    __syncwarp();  // the scores have been read
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      struct alignas(8) {
        BFloat values[4];
      } rounded;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float p = exp2f((mine[4 * four + i] - max) * scale);
        tile_sum += p;
        rounded.values[i] = FromFloat<BFloat>(p);
      }
      const int column = 8 * four + lane % 2 * 4;
      *reinterpret_cast<decltype(rounded)*>(probabilities + row * kProbabilityStride + column) =
          rounded;
    }
    sum = sum * correction + tile_sum + __shfl_xor_sync(kAllLanes, tile_sum, 1);
    if (lane % 2 == 0) factors[row] = correction;
    __syncwarp();

#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float factor = factors[places.row[i]];
#pragma unroll
      for (int d = 0; d < kHeadEdges; ++d) result[d].x[i] *= factor;
    }
#pragma unroll
    for (int j = 0; j < kKeyEdges; ++j) {
      if (j >= edges) break;
      Left probability;
      LoadShared(probability, probabilities + j * kEdge, kProbabilityStride);
#pragma unroll
      for (int d = 0; d < kHeadEdges; ++d) {
        Right value;
        LoadShared(value, shared.values + j * kEdge * kStride<kHeadSize> + d * kEdge,
                   kStride<kHeadSize>);
        wmma::mma_sync(result[d], probability, value, result[d]);
      }
    }
  }

  __syncwarp();  // the factors before have been read
  if (lane % 2 == 0) {
    factors[row] = 1.0f / sum;
    if (query < layout.seq_len) {
      logsumexp[pair * layout.seq_len + query] = max * layout.scale + logf(sum);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float factor = factors[places.row[i]];
#pragma unroll
    for (int d = 0; d < kHeadEdges; ++d) result[d].x[i] *= factor;
  }
  const int64_t first = i0 + warp * kEdge;
  StoreRows<kHeadSize>(result, scores, layout.seq_len - first,
                       out + layout.OutOffset(pair) + first * layout.width(), layout.width());
}

// ---- backward ----------------------------------------------------------------------------------

constexpr int kDeltaLanes = 8;  // of a query: 16 bytes each are 128 at once
constexpr int kDeltaRows = 32;  // queries of a block
constexpr int kDeltaRowsEach = kDeltaRows * kDeltaLanes / kThreads;

// delta [pairs, T]. kN elements an access.
template <int kN, typename T>
__global__ void __launch_bounds__(kThreads)
    DeltaKernel(HeadLayout layout, const T* dout, const T* out, float* delta) {
  const auto tiles = static_cast<uint32_t>(CeilDivide(layout.seq_len, kDeltaRows));
  const uint32_t pair = blockIdx.x / tiles;
  const int lane = threadIdx.x % kDeltaLanes;
  int64_t queries[kDeltaRowsEach], offsets[kDeltaRowsEach];
  float sums[kDeltaRowsEach] = {};
#pragma unroll
  for (int i = 0; i < kDeltaRowsEach; ++i) {
    queries[i] = int64_t{blockIdx.x % tiles} * kDeltaRows + i * (kThreads / kDeltaLanes) +
                 threadIdx.x / kDeltaLanes;
    // Behind the last query that one is read again: loads without a condition can start early.
    offsets[i] = layout.OutOffset(pair) + min(queries[i], layout.seq_len - 1) * layout.width();
  }
#pragma unroll 1
  for (int64_t d = lane * kN; d < layout.head_size; d += kDeltaLanes * kN) {
    float a[kDeltaRowsEach][kN], b[kDeltaRowsEach][kN];
#pragma unroll
    for (int i = 0; i < kDeltaRowsEach; ++i) {
      Load(dout + offsets[i] + d, a[i]);
      Load(out + offsets[i] + d, b[i]);
    }
#pragma unroll
    for (int i = 0; i < kDeltaRowsEach; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) sums[i] += a[i][j] * b[i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < kDeltaRowsEach; ++i) {
    for (int offset = kDeltaLanes / 2; offset > 0; offset /= 2) {
      sums[i] += __shfl_xor_sync(kAllLanes, sums[i], offset);
    }
    if (lane == 0 && queries[i] < layout.seq_len) {
      delta[pair * layout.seq_len + queries[i]] = sums[i];
    }
  }
}

constexpr int kColumns = 32;  // of a tile; more would not leave registers for the results

template <int kHeadSize, bool kKeyRows>
struct BackwardShared {
  static constexpr int kTileStride = kColumns + 8;
  // The block's rows of k and v, or of q and dout; the columns' of the other two.
  alignas(32) BFloat first_rows[kRows * kStride<kHeadSize>];
  alignas(32) BFloat second_rows[kRows * kStride<kHeadSize>];
  alignas(32) BFloat first_columns[kColumns * kStride<kHeadSize>];
  alignas(32) BFloat second_columns[kColumns * kStride<kHeadSize>];
  // Per warp, dS and, for keys, P; before that, scratch.
  alignas(32) BFloat gradients[kWarps][kEdge * kTileStride];
  alignas(32) BFloat probabilities[kKeyRows ? kWarps : 1][kEdge * kTileStride];
  // Of the queries, which are the columns or the rows.
  float logsumexp[kKeyRows ? kColumns : kRows];
  float delta[kKeyRows ? kColumns : kRows];
};

// As the plain kernel of the same name: with kKeyRows a block has a tile of keys, and sums their dk
// and dv over the queries; without, a tile of queries, and sums their dq over the keys.
template <int kHeadSize, bool kKeyRows>
__global__ void __launch_bounds__(
    kThreads, BlocksWithRoom<BackwardShared<kHeadSize, kKeyRows>>(kHeadSize == 64 ? 3 : 2))
    BackwardKernel(HeadLayout layout, const BFloat* dout, const BFloat* qkv, const float* logsumexp,
                   const float* delta, BFloat* dqkv) {
  using Shared = BackwardShared<kHeadSize, kKeyRows>;
  constexpr int kHeadEdges = kHeadSize / kEdge;
  constexpr int kTileEdges = kColumns / kEdge;
  constexpr int kRowStride = kStride<kHeadSize>, kTileStride = Shared::kTileStride;
  static_assert(kEdge * kTileStride * sizeof(BFloat) >= kEdge * kEdge * sizeof(float));
  static_assert(kEdge * kRowStride * sizeof(BFloat) >= kEdge * kStoreStride * sizeof(float));
  auto& shared = *DynamicSharedMemory<Shared>();
  const int warp = threadIdx.x / kWarpSize;
  const BlockPlace place = PlaceOfBlock(layout, kRows, /*last_is_longest=*/!kKeyRows);
  const int64_t r0 = place.first_row;
  const uint32_t pair = place.pair;
  const int64_t stride = layout.qkv_stride(), width = layout.width(), seq_len = layout.seq_len;
  const BFloat* q = qkv + layout.QkvOffset(pair);
  const BFloat* k = q + width;
  const BFloat* v = k + width;
  dout += layout.OutOffset(pair);
  logsumexp += pair * seq_len;
  delta += pair * seq_len;
  BFloat* gradients = shared.gradients[warp];
  BFloat* probabilities = shared.probabilities[kKeyRows ? warp : 0];
  const BFloat* my_first_rows = shared.first_rows + warp * kEdge * kRowStride;
  const BFloat* my_second_rows = shared.second_rows + warp * kEdge * kRowStride;
  const float scale = layout.scale * kLog2E;

  const ElementPlaces places = FindElements(reinterpret_cast<float*>(gradients));
  const int64_t rows_left = seq_len - r0;
  LoadTile<kHeadSize, kRows>((kKeyRows ? k : q) + r0 * stride, stride, rows_left,
                             shared.first_rows);
  if constexpr (kKeyRows) {
    LoadTile<kHeadSize, kRows>(v + r0 * stride, stride, rows_left, shared.second_rows);
  } else {
    LoadTile<kHeadSize, kRows>(dout + r0 * width, width, rows_left, shared.second_rows);
  }
  const auto load_statistics = [&](int64_t first, int count) {
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const bool inside = first + i < seq_len;
      shared.logsumexp[i] = inside ? logsumexp[first + i] * kLog2E : 0.0f;
      shared.delta[i] = inside ? delta[first + i] : 0.0f;
    }
  };
  if constexpr (!kKeyRows) load_statistics(r0, kRows);

  Sums d_first[kHeadEdges];  // of k or q
  Sums d_value[kKeyRows ? kHeadEdges : 1];
#pragma unroll
  for (auto& sums : d_first) wmma::fill_fragment(sums, 0.0f);
#pragma unroll
  for (auto& sums : d_value) wmma::fill_fragment(sums, 0.0f);

  const int64_t begin = kKeyRows ? r0 : 0;
  const int64_t end = kKeyRows ? seq_len : min(seq_len, r0 + kRows);
  for (int64_t c0 = begin; c0 < end; c0 += kColumns) {
    __syncthreads();  // the tiles before have been read
    const int64_t columns_left = seq_len - c0;
    LoadTile<kHeadSize, kColumns>((kKeyRows ? q : k) + c0 * stride, stride, columns_left,
                                  shared.first_columns);
    if constexpr (kKeyRows) {
      LoadTile<kHeadSize, kColumns>(dout + c0 * width, width, columns_left, shared.second_columns);
      load_statistics(c0, kColumns);
    } else {
      LoadTile<kHeadSize, kColumns>(v + c0 * stride, stride, columns_left, shared.second_columns);
    }
    __syncthreads();

    // Edges of columns in which some row of the warp and some column see each other: queries from
    // the warp's keys on, or keys up to the warp's queries.
    const int64_t own_edge = (r0 - c0) / kEdge + warp;
    const auto is_visible = [=](int edge) {
      return kKeyRows ? edge >= own_edge : edge <= own_edge;
    };
    Sums scores[kTileEdges], products[kTileEdges];
#pragma unroll
    for (int e = 0; e < kTileEdges; ++e) {
      wmma::fill_fragment(scores[e], 0.0f);
      wmma::fill_fragment(products[e], 0.0f);
    }
#pragma unroll
    for (int d = 0; d < kHeadEdges; ++d) {
      Left first, second;
      LoadShared(first, my_first_rows + d * kEdge, kRowStride);
      LoadShared(second, my_second_rows + d * kEdge, kRowStride);
#pragma unroll
      for (int e = 0; e < kTileEdges; ++e) {
        if (!is_visible(e)) continue;
        RightTransposed column;
        LoadShared(column, shared.first_columns + e * kEdge * kRowStride + d * kEdge, kRowStride);
        wmma::mma_sync(scores[e], first, column, scores[e]);
        LoadShared(column, shared.second_columns + e * kEdge * kRowStride + d * kEdge, kRowStride);
        wmma::mma_sync(products[e], second, column, products[e]);
      }
    }

#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int row = warp * kEdge + places.row[i];
#pragma unroll
      for (int e = 0; e < kTileEdges; ++e) {
        const int column = e * kEdge + places.column[i];
        const int64_t query = kKeyRows ? c0 + column : r0 + row;
        const int64_t key = kKeyRows ? r0 + row : c0 + column;
        const int statistic = kKeyRows ? column : row;
        const bool visible = key <= query && query < seq_len;
        const float p =
            visible ? exp2f(scores[e].x[i] * scale - shared.logsumexp[statistic]) : 0.0f;
        const float ds = visible ? p * (products[e].x[i] - shared.delta[statistic]) : 0.0f;
        const int place_in_tile = places.row[i] * kTileStride + column;
        gradients[place_in_tile] = FromFloat<BFloat>(ds);
        if constexpr (kKeyRows) probabilities[place_in_tile] = FromFloat<BFloat>(p);
      }
    }
    __syncwarp();

#pragma unroll
    for (int e = 0; e < kTileEdges; ++e) {
      if (!is_visible(e)) continue;
      Left weights;
      LoadShared(weights, gradients + e * kEdge, kTileStride);
#pragma unroll
      for (int d = 0; d < kHeadEdges; ++d) {
        Right column;
        LoadShared(column, shared.first_columns + e * kEdge * kRowStride + d * kEdge, kRowStride);
        wmma::mma_sync(d_first[d], weights, column, d_first[d]);
      }
      if constexpr (kKeyRows) {
        LoadShared(weights, probabilities + e * kEdge, kTileStride);
#pragma unroll
        for (int d = 0; d < kHeadEdges; ++d) {
          Right column;
          LoadShared(column, shared.second_columns + e * kEdge * kRowStride + d * kEdge,
                     kRowStride);
          wmma::mma_sync(d_value[d], weights, column, d_value[d]);
        }
      }
    }
  }

  // The factor that dS has left out.
#pragma unroll
  for (auto& sums : d_first) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums.x[i] *= layout.scale;
  }
  // A warp's rows of the inputs are read by itself only, so they can be its scratch now.
  float* scratch = reinterpret_cast<float*>(shared.first_rows + warp * kEdge * kRowStride);
  const int64_t first = r0 + warp * kEdge;
  BFloat* target = dqkv + layout.QkvOffset(pair) + first * stride;
  StoreRows<kHeadSize>(d_first, scratch, seq_len - first, target + (kKeyRows ? width : 0), stride);
  if constexpr (kKeyRows) {
    StoreRows<kHeadSize>(d_value, scratch, seq_len - first, target + 2 * width, stride);
  }
}

// ---- launches ----------------------------------------------------------------------------------

// Shared memory beyond 48 KiB is granted on request only.
template <typename Shared, typename... Parameters, typename... Arguments>
cudaError_t LaunchTiles(void (*kernel)(Parameters...), const HeadLayout& layout,
                        cudaStream_t stream, Arguments... arguments) {
  if (sizeof(Shared) > size_t{48} << 10) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(static_cast<unsigned>(CeilDivide(layout.seq_len, kRows) * layout.pairs));
  return Launch(kernel, grid, dim3(kThreads), sizeof(Shared), stream, layout, arguments...);
}

bool HasTensorCoreKernel(const HeadLayout& layout, std::initializer_list<Array> arrays) {
  for (const Array& array : arrays) {
    if (array.type != ElementType::kBFloat16 || !AreAligned({array.data})) return false;
  }
  return layout.head_size == 64 || layout.head_size == 128;
}

// Returns body(Constant) of the head's size.
template <typename Body>
cudaError_t WithHeadSize(const HeadLayout& layout, const Body& body) {
  return layout.head_size == 64 ? body(Constant<64>()) : body(Constant<128>());
}

}  // namespace

cudaError_t LaunchAttentionForward(const AttentionSize& size, Array qkv, Array out,
                                   float* logsumexp, cudaStream_t stream) {
  const HeadLayout layout(size);
  if (layout.pairs == 0 || layout.seq_len == 0) return cudaSuccess;
  if (!HasTensorCoreKernel(layout, {qkv, out})) {
    return LaunchPlainAttentionForward(layout, qkv, out, logsumexp, stream);
  }
  return WithHeadSize(layout, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::kValue;
    return LaunchTiles<ForwardShared<kHeadSize>>(ForwardKernel<kHeadSize>, layout, stream,
                                                 As<BFloat>(qkv), As<BFloat>(out), logsumexp);
  });
}

cudaError_t LaunchAttentionBackward(const AttentionSize& size, Array dout, Array qkv, Array out,
                                    const float* logsumexp, Array dqkv, float* workspace,
                                    cudaStream_t stream) {
  const HeadLayout layout(size);
  if (layout.pairs == 0 || layout.seq_len == 0) return cudaSuccess;
  const dim3 delta_grid(
      static_cast<unsigned>(CeilDivide(layout.seq_len, kDeltaRows) * layout.pairs));
  const cudaError_t error = WithElementType(out.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    const bool vectors = AreAligned({dout.data, out.data}) && layout.head_size % kVector<T> == 0;
    return WithVector<T>(vectors, [&](auto n) {
      return Launch(DeltaKernel<decltype(n)::kValue, T>, delta_grid, dim3(kThreads), 0, stream,
                    layout, As<T>(dout), As<T>(out), workspace);
    });
  });
  if (error != cudaSuccess) return error;
  if (!HasTensorCoreKernel(layout, {dout, qkv, dqkv})) {
    return LaunchPlainAttentionBackward(layout, dout, qkv, logsumexp, workspace, dqkv, stream);
  }
  return WithHeadSize(layout, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::kValue;
    const cudaError_t error = LaunchTiles<BackwardShared<kHeadSize, true>>(
        BackwardKernel<kHeadSize, true>, layout, stream, As<BFloat>(dout), As<BFloat>(qkv),
        logsumexp, workspace, As<BFloat>(dqkv));
    if (error != cudaSuccess) return error;
    return LaunchTiles<BackwardShared<kHeadSize, false>>(BackwardKernel<kHeadSize, false>, layout,
                                                         stream, As<BFloat>(dout), As<BFloat>(qkv),
                                                         logsumexp, workspace, As<BFloat>(dqkv));
  });
}

}  // namespace dim0::cuda
