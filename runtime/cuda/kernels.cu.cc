#include "runtime/cuda/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "runtime/cuda/element_type.h"
#include "runtime/cuda/kernel.h"
#include "runtime/cuda/quad.h"

namespace dim0::cuda {
namespace {

constexpr int kThreads = 256;

// Blocks of a kernel whose threads take quads in turns. Many times what a GPU runs at once, so that
// it does not wait long for the last ones.
constexpr int64_t kMostBlocks = 16384;

// The same where every block leaves a partial sum. It is one number for all GPUs, so that sums do
// not depend on the GPU.
constexpr int64_t kMostSums = 4096;
// Of several matrices, each has fewer, so that the sums of so many are made at once. A matrix' sum
// does not depend on how many there are.
constexpr int64_t kMatricesAtOnce = 8;
constexpr int64_t kMostSumsOfMatrix = kMostSums / kMatricesAtOnce;
static_assert(kMostSums * sizeof(double) + kMatricesAtOnce * sizeof(float2) == kSumWorkspaceBytes);

int BlocksFor(int64_t size, int64_t most) {
  return static_cast<int>(std::min(most, CeilDivide(size, int64_t{kThreads} * kQuad)));
}

// Calls body(i) for the first elements i of the quads of this thread of the block, one of `blocks`.
template <typename Body>
__device__ __forceinline__ void ForEachQuad(int64_t size, int block, int blocks, Body body) {
  const int64_t step = int64_t{blocks} * blockDim.x * kQuad;
  for (int64_t i = (int64_t{block} * blockDim.x + threadIdx.x) * kQuad; i < size; i += step) {
    body(i);
  }
}
template <typename Body>
__device__ __forceinline__ void ForEachQuad(int64_t size, Body body) {
  ForEachQuad(size, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), body);
}

// Every thread of a block of whole warps gets the largest value; NaN counts as nothing.
__device__ float BlockMax(float value) {
  __shared__ float largest[kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  value = WarpMax(value);
  if (lane == 0) largest[warp] = value;
  __syncthreads();
  return WarpMax(lane < warps ? largest[lane] : 0.0f);
}

// The block's part of the sum of squares.
template <typename T>
__device__ double SquaresOfBlock(const T* x, int64_t size, int block, int blocks) {
  const bool aligned = IsQuadAligned(x);
  double sum = 0;
  ForEachQuad(size, block, blocks, [&](int64_t i) {
    float v[kQuad];
    LoadQuad(x + i, size - i, aligned, v);
#pragma unroll
    for (const float value : v) sum = fma(double{value}, double{value}, sum);
  });
  return BlockSum(sum);
}

// Of gridDim.y arrays that lie one after another.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumOfSquaresKernel(const T* x, int64_t size, double* partial) {
  const double sum = SquaresOfBlock(x + blockIdx.y * size, size, static_cast<int>(blockIdx.x),
                                    static_cast<int>(gridDim.x));
  if (threadIdx.x == 0) partial[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = sum;
}

// Arrays that lie anywhere: array i has the blocks from first_block[i] up to first_block[i + 1].
constexpr int kArraysAtOnce = 64;
struct Arrays {
  ConstArray array[kArraysAtOnce];
  int first_block[kArraysAtOnce + 1];
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumsOfSquaresKernel(const Arrays arrays, double* partial) {
  const int block = static_cast<int>(blockIdx.x);
  int i = 0;
  while (arrays.first_block[i + 1] <= block) ++i;
  const int first = arrays.first_block[i];
  const double sum =
      SquaresOfBlock(static_cast<const T*>(arrays.array[i].data), arrays.array[i].size,
                     block - first, arrays.first_block[i + 1] - first);
  if (threadIdx.x == 0) partial[block] = sum;
}

// What the block's first thread gets is the sum of those from `begin` up to `end`.
__device__ double AddUp(const double* partial, int begin, int end) {
  double sum = 0;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    sum += partial[i];
  }
  return BlockSum(sum);
}

// A block for each array.
__global__ void __launch_bounds__(kThreads)
    AddPartialSumsOfArraysKernel(const Arrays arrays, const double* partial, double* results) {
  const double sum =
      AddUp(partial, arrays.first_block[blockIdx.x], arrays.first_block[blockIdx.x + 1]);
  if (threadIdx.x == 0) results[blockIdx.x] = sum;
}

// One block.
__global__ void __launch_bounds__(kThreads)
    AddPartialSumsKernel(const double* partial, int count, double* result) {
  const double sum = AddUp(partial, 0, count);
  if (threadIdx.x == 0) *result = sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumOfSquaredDifferencesKernel(const T* a, const T* b, int64_t size, double* partial) {
  const bool aligned_a = IsQuadAligned(a), aligned_b = IsQuadAligned(b);
  double sum = 0;
  ForEachQuad(size, [&](int64_t i) {
    float x[kQuad], y[kQuad];
    LoadQuad(a + i, size - i, aligned_a, x);
    LoadQuad(b + i, size - i, aligned_b, y);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const double difference = double{x[j]} - double{y[j]};
      sum = fma(difference, difference, sum);
    }
  });
  sum = BlockSum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// A block for each matrix: the factor that brings its norm to `length`, as two whose product it is,
// since it may be out of float32's range. Elements are multiplied in float32: GPUs for graphics
// have next to no float64.
__global__ void __launch_bounds__(kThreads)
    FactorsKernel(const double* partial, int count, double length, float2* factors) {
  const double sum = AddUp(partial + int64_t{blockIdx.x} * count, 0, count);
  if (threadIdx.x != 0) return;
  int exponent = 0;
  const double fraction = sum > 0 ? frexp(length / sqrt(sum), &exponent) : 0;
  factors[blockIdx.x] = {static_cast<float>(ldexp(fraction, exponent / 2)),
                         ldexpf(1.0f, exponent - exponent / 2)};
}

template <typename X, typename Out>
__global__ void __launch_bounds__(kThreads)
    NormalizeKernel(const X* x, int64_t size, const float2* factors, Out* out) {
  x += blockIdx.y * size;
  out += blockIdx.y * size;
  const float2 factor = factors[blockIdx.y];
  const bool aligned_x = IsQuadAligned(x), aligned_out = IsQuadAligned(out);
  ForEachQuad(size, [&](int64_t i) {
    float v[kQuad];
    LoadQuad(x + i, size - i, aligned_x, v);
#pragma unroll
    for (float& value : v) value = value * factor.y * factor.x;
    StoreQuad(out + i, size - i, aligned_out, v);
  });
}

__global__ void __launch_bounds__(kThreads)
    ClipScaleKernel(const double* stats, int ranks, int64_t stride, int64_t count, double clip,
                    float* scale) {
  double squares = 0;
  for (int64_t i = threadIdx.x; i < ranks * count; i += blockDim.x) {
    squares += stats[i / count * stride + i % count];
  }
  const double norm = sqrt(BlockSum(squares));
  if (threadIdx.x != 0) return;
  if (!isfinite(norm)) {
    *scale = nanf("");
  } else {
    *scale = clip > 0 ? static_cast<float>(fmin(1.0, clip / (norm + 1e-6))) : 1.0f;
  }
}

// A block copies a row, as words of the largest size that divides it.
template <typename Word>
__global__ void GatherRowsKernel(const Word* source, const int32_t* rows, int64_t words,
                                 Word* target) {
  const Word* from = source + rows[blockIdx.x] * words;
  Word* to = target + blockIdx.x * words;
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}

template <typename T>
__global__ void AddRowsKernel(const T* source, const int32_t* rows, int64_t cols, T* target) {
  const T* from = source + blockIdx.x * cols;
  T* to = target + rows[blockIdx.x] * cols;
  const bool aligned_from = IsQuadAligned(from), aligned_to = IsQuadAligned(to);
  for (int64_t i = int64_t{threadIdx.x} * kQuad; i < cols; i += int64_t{blockDim.x} * kQuad) {
    float sum[kQuad], addend[kQuad];
    LoadQuad(to + i, cols - i, aligned_to, sum);
    LoadQuad(from + i, cols - i, aligned_from, addend);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) sum[j] += addend[j];
    StoreQuad(to + i, cols - i, aligned_to, sum);
  }
}

template <typename Source, typename Target>
__global__ void __launch_bounds__(kThreads)
    CastKernel(const Source* source, int64_t size, Target* target) {
  const bool aligned_source = IsQuadAligned(source), aligned_target = IsQuadAligned(target);
  ForEachQuad(size, [&](int64_t i) {
    float v[kQuad];
    LoadQuad(source + i, size - i, aligned_source, v);
    StoreQuad(target + i, size - i, aligned_target, v);
  });
}

__global__ void __launch_bounds__(kThreads)
    TriadKernel(const float* b, float factor, const float* c, int64_t size, float* a) {
  const bool aligned_a = IsQuadAligned(a), aligned_b = IsQuadAligned(b),
             aligned_c = IsQuadAligned(c);
  ForEachQuad(size, [&](int64_t i) {
    float x[kQuad], y[kQuad];
    LoadQuad(b + i, size - i, aligned_b, x);
    LoadQuad(c + i, size - i, aligned_c, y);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) x[j] += factor * y[j];
    StoreQuad(a + i, size - i, aligned_a, x);
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) FillKernel(uint32_t seed, int64_t size, T* out) {
  const bool aligned = IsQuadAligned(out);
  ForEachQuad(size, [&](int64_t i) {
    float v[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      uint32_t bits = (static_cast<uint32_t>(i + j) + seed) * 0x9e3779b9u;
      bits = (bits ^ (bits >> 16)) * 0x7feb352du;
      bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
      // 23 bits are a float's, so that 1 is not reached by rounding in float32; -1 may be.
      v[j] = static_cast<float>(bits >> 9) * 0x1p-22f - 1.0f;
    }
    StoreQuad(out + i, size - i, aligned, v);
  });
}

__global__ void __launch_bounds__(kThreads)
    LargestKernel(const float* x, int64_t size, float* partial) {
  const bool aligned = IsQuadAligned(x);
  float largest = 0;
  ForEachQuad(size, [&](int64_t i) {
    float v[kQuad];
    LoadQuad(x + i, size - i, aligned, v);
#pragma unroll
    for (const float value : v) largest = fmaxf(largest, fabsf(value));
  });
  largest = BlockMax(largest);
  if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}

__global__ void __launch_bounds__(kThreads)
    ScaleToUnitRangeKernel(float* x, int64_t size, const float* partial, int count) {
  float largest = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) largest = fmaxf(largest, partial[i]);
  largest = BlockMax(largest);
  if (largest == 0 || !isfinite(largest)) return;
  int exponent;
  frexpf(largest, &exponent);
  // In two factors: one power of two may itself be out of range.
  const float half = ldexpf(1.0f, -(exponent / 2));
  const float rest = ldexpf(1.0f, -(exponent - exponent / 2));
  const bool aligned = IsQuadAligned(x);
  ForEachQuad(size, [&](int64_t i) {
    float v[kQuad];
    LoadQuad(x + i, size - i, aligned, v);
#pragma unroll
    for (float& value : v) value = value * half * rest;
    StoreQuad(x + i, size - i, aligned, v);
  });
}

__global__ void __launch_bounds__(kThreads)
    DominanceRatiosKernel(const float* products, int64_t m, int64_t stride, double* ratios) {
  const float* row = products + blockIdx.x * m;
  const int64_t diagonal = blockIdx.x * stride;
  double others = 0;
  for (int64_t j = threadIdx.x; j < m; j += blockDim.x) {
    if (j != diagonal) others += fabsf(row[j]);
  }
  others = BlockSum(others);
  if (threadIdx.x == 0) {
    ratios[blockIdx.x] = row[diagonal] / (others / static_cast<double>(m - 1));
  }
}

// Threads of a block that takes a row of `items` accesses.
int ThreadsForRow(int64_t items) {
  const int64_t threads = CeilDivide(items, kWarpSize) * kWarpSize;
  return static_cast<int>(std::min<int64_t>(threads, kThreads));
}

template <typename Word>
bool IsMadeOf(const void* source, const void* target, int64_t row_bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target) |
                    static_cast<uintptr_t>(row_bytes);
  return bits % sizeof(Word) == 0;
}

template <typename Word>
cudaError_t LaunchGatherWords(const void* source, const int32_t* rows, int64_t num_rows,
                              int64_t row_bytes, void* target, cudaStream_t stream) {
  const int64_t words = row_bytes / static_cast<int64_t>(sizeof(Word));
  return Launch(GatherRowsKernel<Word>, static_cast<unsigned>(num_rows), ThreadsForRow(words), 0,
                stream, static_cast<const Word*>(source), rows, words, static_cast<Word*>(target));
}

}  // namespace

cudaError_t LaunchSumsOfSquares(ElementType type, const std::vector<ConstArray>& arrays,
                                void* workspace, double* results, cudaStream_t stream) {
  auto* const partial = static_cast<double*>(workspace);
  for (size_t done = 0; done < arrays.size(); done += kArraysAtOnce) {
    const int count = static_cast<int>(std::min<size_t>(kArraysAtOnce, arrays.size() - done));
    double all = 0;
    for (int i = 0; i < count; ++i) all += static_cast<double>(arrays[done + i].size);
    // Each array has a block, and the others are shared out by size.
    Arrays at_once = {};
    for (int i = 0; i < count; ++i) {
      at_once.array[i] = arrays[done + i];
      const auto size = static_cast<double>(arrays[done + i].size);
      const auto share = static_cast<int64_t>(all > 0 ? (kMostSums - count) * (size / all) : 0);
      at_once.first_block[i + 1] =
          at_once.first_block[i] + std::max(1, BlocksFor(arrays[done + i].size, 1 + share));
    }
    cudaError_t error = WithElementType(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      return Launch(SumsOfSquaresKernel<T>, at_once.first_block[count], kThreads, 0, stream,
                    at_once, partial);
    });
    if (error != cudaSuccess) return error;
    error = Launch(AddPartialSumsOfArraysKernel, count, kThreads, 0, stream, at_once,
                   static_cast<const double*>(partial), results + done);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchSumOfSquaredDifferences(ElementType type, const void* a, const void* b,
                                          int64_t size, void* workspace, double* result,
                                          cudaStream_t stream) {
  const int blocks = BlocksFor(size, kMostSums);
  auto* const partial = static_cast<double*>(workspace);
  if (size > 0) {
    const cudaError_t error = WithElementType(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      return Launch(SumOfSquaredDifferencesKernel<T>, blocks, kThreads, 0, stream,
                    static_cast<const T*>(a), static_cast<const T*>(b), size, partial);
    });
    if (error != cudaSuccess) return error;
  }
  return Launch(AddPartialSumsKernel, 1, kThreads, 0, stream, partial, blocks, result);
}

cudaError_t LaunchNormalize(ElementType type_x, const void* x, int64_t size, int64_t batch,
                            double length, ElementType type_out, void* out, void* workspace,
                            cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  auto* const partial = static_cast<double*>(workspace);
  auto* const factors = reinterpret_cast<float2*>(partial + kMostSums);
  const int blocks = BlocksFor(size, kMostSumsOfMatrix);
  for (int64_t first = 0; first < batch; first += kMatricesAtOnce) {
    const int count = static_cast<int>(std::min(kMatricesAtOnce, batch - first));
    const void* const from = static_cast<const char*>(x) + first * size * SizeOf(type_x);
    void* const to = static_cast<char*>(out) + first * size * SizeOf(type_out);
    cudaError_t error = WithMatrixType(type_x, [&](auto tag) {
      using X = typename decltype(tag)::type;
      return Launch(SumOfSquaresKernel<X>, dim3(blocks, count), kThreads, 0, stream,
                    static_cast<const X*>(from), size, partial);
    });
    if (error != cudaSuccess) return error;
    error = Launch(FactorsKernel, count, kThreads, 0, stream, static_cast<const double*>(partial),
                   blocks, length, factors);
    if (error != cudaSuccess) return error;
    error = WithMatrixType(type_x, [&](auto tag_x) {
      return WithMatrixType(type_out, [&](auto tag_out) {
        using X = typename decltype(tag_x)::type;
        using Out = typename decltype(tag_out)::type;
        return Launch(NormalizeKernel<X, Out>, dim3(BlocksFor(size, kMostBlocks), count), kThreads,
                      0, stream, static_cast<const X*>(from), size,
                      static_cast<const float2*>(factors), static_cast<Out*>(to));
      });
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchClipScale(const double* stats, int ranks, int64_t stride, int64_t count,
                            double clip, float* scale, cudaStream_t stream) {
  return Launch(ClipScaleKernel, 1, kThreads, 0, stream, stats, ranks, stride, count, clip, scale);
}

cudaError_t LaunchGatherRows(ElementType type, const void* source, const int32_t* rows,
                             int64_t num_rows, int64_t cols, void* target, cudaStream_t stream) {
  if (num_rows == 0 || cols == 0) return cudaSuccess;
  const int64_t row_bytes = cols * SizeOf(type);
  if (IsMadeOf<uint4>(source, target, row_bytes)) {
    return LaunchGatherWords<uint4>(source, rows, num_rows, row_bytes, target, stream);
  }
  if (IsMadeOf<uint32_t>(source, target, row_bytes)) {
    return LaunchGatherWords<uint32_t>(source, rows, num_rows, row_bytes, target, stream);
  }
  return LaunchGatherWords<uint16_t>(source, rows, num_rows, row_bytes, target, stream);
}

cudaError_t LaunchAddRows(ElementType type, const void* source, const int32_t* rows,
                          int64_t num_rows, int64_t cols, void* target, cudaStream_t stream) {
  if (num_rows == 0 || cols == 0) return cudaSuccess;
  return WithElementType(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Launch(AddRowsKernel<T>, static_cast<unsigned>(num_rows),
                  ThreadsForRow(CeilDivide(cols, kQuad)), 0, stream, static_cast<const T*>(source),
                  rows, cols, static_cast<T*>(target));
  });
}

cudaError_t LaunchCast(ElementType type_source, const void* source, int64_t size,
                       ElementType type_target, void* target, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  if (type_source == type_target) {
    const int64_t bytes = size * SizeOf(type_source);
    return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream);
  }
  return WithMatrixType(type_source, [&](auto tag_source) {
    return WithMatrixType(type_target, [&](auto tag_target) {
      using Source = typename decltype(tag_source)::type;
      using Target = typename decltype(tag_target)::type;
      return Launch(CastKernel<Source, Target>, BlocksFor(size, kMostBlocks), kThreads, 0, stream,
                    static_cast<const Source*>(source), size, static_cast<Target*>(target));
    });
  });
}

cudaError_t LaunchTriad(const float* b, float factor, const float* c, int64_t size, float* a,
                        cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return Launch(TriadKernel, BlocksFor(size, kMostBlocks), kThreads, 0, stream, b, factor, c, size,
                a);
}

cudaError_t LaunchFill(ElementType type, uint32_t seed, int64_t size, void* out,
                       cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return WithElementType(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Launch(FillKernel<T>, BlocksFor(size, kMostBlocks), kThreads, 0, stream, seed, size,
                  static_cast<T*>(out));
  });
}

cudaError_t LaunchScaleToUnitRange(float* x, int64_t size, void* workspace, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  const int blocks = BlocksFor(size, kMostSums);
  auto* partial = static_cast<float*>(workspace);
  const cudaError_t error = Launch(LargestKernel, blocks, kThreads, 0, stream, x, size, partial);
  if (error != cudaSuccess) return error;
  return Launch(ScaleToUnitRangeKernel, blocks, kThreads, 0, stream, x, size, partial, blocks);
}

cudaError_t LaunchDominanceRatios(const float* products, int64_t rows, int64_t m, int64_t stride,
                                  double* ratios, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return Launch(DominanceRatiosKernel, static_cast<unsigned>(rows), kThreads, 0, stream, products,
                m, stride, ratios);
}

}  // namespace dim0::cuda
