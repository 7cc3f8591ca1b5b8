// Sums of token and position rows, and their gradients.
#include <cmath>

#include "model/cuda/elements.h"
#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {
namespace {

constexpr int kThreads = 256;

// A block has a token, or a row of a gradient.
int ThreadsFor(int64_t width, int elements) {
  const int64_t warps = CeilDivide(CeilDivide(width, elements), kWarpSize);
  return static_cast<int>(warps < kThreads / kWarpSize ? warps * kWarpSize : kThreads);
}

template <int kElements, typename T, typename P>
__global__ void __launch_bounds__(kThreads)
    EmbeddingForwardKernel(const int32_t* tokens, int64_t seq_len, int64_t vocabulary,
                           int64_t width, const P* wte, const P* wpe, T* out) {
  const int64_t n = blockIdx.x;
  const int64_t token = tokens[n];
  const bool valid = 0 <= token && token < vocabulary;
  const P* token_row = wte + (valid ? token : 0) * width;
  const P* position_row = wpe + n % seq_len * width;
  out += n * width;
  for (int64_t c = threadIdx.x * kElements; c < width; c += blockDim.x * kElements) {
    float sum[kElements], position[kElements];
    Load(token_row + c, sum);
    Load(position_row + c, position);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = valid ? sum[i] + position[i] : NAN;
    Store(sum, out + c);
  }
}

// A block has row blockIdx.x of dwte and blockDim.x * kElements of its columns. It reads all
// tokens, kStretch at a time, lists those that are its row, and adds up their gradients in order.
template <int kElements, typename T, typename G>
__global__ void __launch_bounds__(kThreads)
    TokenGradientKernel(const int32_t* tokens, int64_t count, int64_t width, const T* dout,
                        G* dwte) {
  constexpr int kStretch = kWarpSize * kWarpSize;
  __shared__ unsigned masks[kWarpSize];  // a bit per token: whether it is this block's
  __shared__ int16_t uses[kStretch];
  __shared__ int use_count;
  const int64_t row = blockIdx.x;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) *
                         static_cast<int64_t>(kElements);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  float sum[kElements] = {};
  for (int64_t begin = 0; begin < count; begin += kStretch) {
    for (int m = warp; m < kWarpSize; m += warps) {
      const int64_t n = begin + m * kWarpSize + lane;
      const unsigned mask = __ballot_sync(kAllLanes, n < count && tokens[n] == row);
      if (lane == 0) masks[m] = mask;
    }
    __syncthreads();  // the masks are there, and the list before has been read
    if (warp == 0) {
      const int mine = __popc(masks[lane]);
      int end = mine;  // of this lane's part of the list
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const int before = __shfl_up_sync(kAllLanes, end, offset);
        if (lane >= offset) end += before;
      }
      int place = end - mine;
      for (unsigned mask = masks[lane]; mask != 0; mask &= mask - 1) {
        uses[place++] = static_cast<int16_t>(lane * kWarpSize + __ffs(static_cast<int>(mask)) - 1);
      }
      if (lane == kWarpSize - 1) use_count = end;
    }
    __syncthreads();
    if (column >= width) continue;
    const T* source = dout + begin * width + column;
    const int found = use_count;
#pragma unroll 4
    for (int i = 0; i < found; ++i) {
      float values[kElements];
      Load(source + uses[i] * width, values);
#pragma unroll
      for (int j = 0; j < kElements; ++j) sum[j] += values[j];
    }
  }
  if (column < width) Store(sum, dwte + row * width + column);
}

// A block has row blockIdx.x of dwpe: the same position of every sequence.
template <int kElements, typename T, typename G>
__global__ void __launch_bounds__(kThreads)
    PositionGradientKernel(int64_t count, int64_t seq_len, int64_t width, const T* dout, G* dwpe) {
  const int64_t position = blockIdx.x;
  for (int64_t c = threadIdx.x * kElements; c < width; c += blockDim.x * kElements) {
    float sum[kElements] = {};
    if (position < seq_len) {
#pragma unroll 4
      for (int64_t n = position; n < count; n += seq_len) {
        float values[kElements];
        Load(dout + n * width + c, values);
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] += values[i];
      }
    }
    Store(sum, dwpe + position * width + c);
  }
}

}  // namespace

cudaError_t LaunchEmbeddingForward(const int32_t* tokens, int64_t count, int64_t seq_len,
                                   int64_t vocabulary, int64_t width, Array wte, Array wpe,
                                   Array out, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return WithElementType(out.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return WithElementType(wte.type, [&](auto parameter_tag) {
      using P = TypeOf<decltype(parameter_tag)>;
      const bool vectors = width % kVector<T, P> == 0 && AreAligned({wte.data, wpe.data, out.data});
      return WithVector<T, P>(vectors, [&](auto elements) {
        constexpr int kElements = decltype(elements)::kValue;
        return Launch(EmbeddingForwardKernel<kElements, T, P>, dim3(static_cast<unsigned>(count)),
                      dim3(ThreadsFor(width, kElements)), 0, stream, tokens, seq_len, vocabulary,
                      width, As<P>(wte), As<P>(wpe), As<T>(out));
      });
    });
  });
}

cudaError_t LaunchEmbeddingBackward(const int32_t* tokens, int64_t count, int64_t seq_len,
                                    int64_t vocabulary, int64_t positions, int64_t width,
                                    Array dout, Array dwte, Array dwpe, cudaStream_t stream) {
  return WithElementType(dout.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return WithElementType(dwte.type, [&](auto gradient_tag) {
      using G = TypeOf<decltype(gradient_tag)>;
      const bool vectors =
          width % kVector<T, G> == 0 && AreAligned({dout.data, dwte.data, dwpe.data});
      return WithVector<T, G>(vectors, [&](auto elements) {
        constexpr int kElements = decltype(elements)::kValue;
        const int threads = ThreadsFor(width, kElements);
        const int64_t strips = CeilDivide(width, int64_t{threads} * kElements);
        cudaError_t error = cudaSuccess;
        if (vocabulary > 0) {
          error = Launch(TokenGradientKernel<kElements, T, G>,
                         dim3(static_cast<unsigned>(vocabulary), static_cast<unsigned>(strips)),
                         dim3(threads), 0, stream, tokens, count, width, As<T>(dout), As<G>(dwte));
        }
        if (error != cudaSuccess || positions == 0) return error;
        return Launch(PositionGradientKernel<kElements, T, G>,
                      dim3(static_cast<unsigned>(positions)), dim3(threads), 0, stream, count,
                      seq_len, width, As<T>(dout), As<G>(dwpe));
      });
    });
  });
}

}  // namespace dim0::cuda
