// Cross-entropy over rows of any length: a vocabulary such as 50257 leaves no two rows alike in
// alignment, so each row is read in 16-byte packs between its own ends.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "model/cuda/elements.h"
#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int32_t kIgnored = -1;

// e^x for x <= 0, in half the instructions of expf: scaling x rounds it, which costs the result
// digits in proportion to |x|, that is where it is small next to the greatest term's 1.
__device__ __forceinline__ float Exp(float x) {
  constexpr float kLog2OfE = 1.44269504f;
  return exp2f(x * kLog2OfE);
}

// Calls visit(values, where the first is) for this thread's part of the row: single elements up to
// the first aligned address and behind the last, packs between.
template <typename T, typename Visit>
__device__ __forceinline__ void ForRow(T* row, int64_t cols, const Visit& visit) {
  constexpr int kElements = kVector<T>;
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T);
  const int64_t head = min(cols, (kElements - misaligned) % kElements);
  const int64_t tail = head + (cols - head) / kElements * kElements;
  T* const packs_end = row + tail;
  for (T* place = row + head + threadIdx.x * kElements; place < packs_end;
       place += blockDim.x * kElements) {
    float values[kElements];
    Load(place, values);
    visit(values, place);
  }
  // The ends are shorter than a pack each.
  const int64_t end_column = threadIdx.x < kElements ? threadIdx.x : tail + threadIdx.x - kElements;
  if (threadIdx.x < kElements ? end_column < head
                              : threadIdx.x < 2 * kElements && end_column < cols) {
    float value[1] = {ToFloat(row[end_column])};
    visit(value, row + end_column);
  }
}

// Every thread gets the greatest of all; NaNs are passed over, they show in the sum that follows.
__device__ float BlockMax(float value) {
  __shared__ float maxima[kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  value = WarpMax(value);
  __syncthreads();  // an earlier call's maxima have been read
  if (lane == 0) maxima[warp] = value;
  __syncthreads();
  return WarpMax(lane < static_cast<int>(blockDim.x) / kWarpSize ? maxima[lane] : -FLT_MAX);
}

// A block has a row, and writes its loss.
template <bool kGradient, typename T>
__global__ void __launch_bounds__(kMaxThreads)
    CrossEntropyKernel(T* logits, const int32_t* targets, int64_t cols, int64_t row_length,
                       float scale, double* losses) {
  const int64_t n = blockIdx.x;
  T* row = logits + n * row_length;
  const int64_t target = targets[n];
  if (target == kIgnored) {
    if (threadIdx.x == 0) losses[n] = 0;
    if constexpr (kGradient) {
      ForRow(row, cols, [=](auto& values, T* place) {
        for (float& value : values) value = 0;
        Store(values, place);
      });
    }
    return;
  }

  const bool in_range = 0 <= target && target < cols;
  // Read before the barriers of the sums, behind which the gradient takes its place.
  const float target_logit = in_range ? ToFloat(row[target]) : NAN;

  // Over this thread's elements so far: the greatest, from a finite start so that e^(x - max) is 0
  // for x = -inf, and the sum of e^(x - max).
  float max = -FLT_MAX, sum = 0;
  ForRow(row, cols, [&](auto& values, T*) {
    float new_max = max;
    for (float value : values) new_max = fmaxf(new_max, value);
    if (new_max > max) {
      sum *= Exp(max - new_max);
      max = new_max;
    }
    for (float value : values) sum += Exp(value - max);
  });
  const float row_max = BlockMax(max);
  const float row_sum = BlockSum(sum * Exp(max - row_max));
  const float factor = scale / row_sum;
  if constexpr (kGradient) {
    ForRow(row, cols, [=](auto& values, T* place) {
      for (float& value : values) value = Exp(value - row_max) * factor;
      Store(values, place);
    });
    __syncthreads();  // the target's element has been written, as those of the others
  }
  if (threadIdx.x > 0) return;
  if constexpr (kGradient) {
    if (in_range) row[target] = FromFloat<T>(Exp(target_logit - row_max) * factor - scale);
  }
  // The maximum is kept apart from the logarithm: their sum as a float would lose what large logits
  // differ by.
  losses[n] = log(static_cast<double>(row_sum)) + (static_cast<double>(row_max) - target_logit);
}

// One block: *loss_sum += losses.
__global__ void __launch_bounds__(kMaxThreads)
    LossSumKernel(const double* losses, int64_t count, double* loss_sum) {
  double sum = 0;
  for (int64_t n = threadIdx.x; n < count; n += blockDim.x) sum += losses[n];
  sum = BlockSum(sum);
  if (threadIdx.x == 0) *loss_sum += sum;
}

// A thread for each vector of elements; whole warps, which have more than the ends of a row need.
dim3 ThreadsFor(int64_t count, int elements) {
  const int64_t warps = CeilDivide(CeilDivide(count, elements), kWarpSize);
  return dim3(
      static_cast<unsigned>(std::clamp<int64_t>(warps * kWarpSize, kWarpSize, kMaxThreads)));
}

}  // namespace

cudaError_t LaunchCrossEntropy(Array logits, const int32_t* targets, int64_t rows,
                               int64_t vocabulary, int64_t row_length, bool write_gradient,
                               float scale, double* loss_sum, float* workspace,
                               cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  double* losses = reinterpret_cast<double*>(workspace);
  const cudaError_t error = WithElementType(logits.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return Launch(write_gradient ? CrossEntropyKernel<true, T> : CrossEntropyKernel<false, T>,
                  dim3(static_cast<unsigned>(rows)), ThreadsFor(vocabulary, kVector<T>), 0, stream,
                  As<T>(logits), targets, vocabulary, row_length, scale, losses);
  });
  if (error != cudaSuccess) return error;
  return Launch(LossSumKernel, dim3(1), ThreadsFor(rows, 1), 0, stream, losses, rows, loss_sum);
}

}  // namespace dim0::cuda
