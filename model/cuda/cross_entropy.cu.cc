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

// Calls visit(values, first column) for this thread's part of the row: single elements up to the
// first aligned address and behind the last, packs between.
template <typename T, typename Visit>
__device__ __forceinline__ void ForRow(const T* row, int64_t cols, const Visit& visit) {
  constexpr int kElements = kVector<T>;
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T);
  const int64_t head = min(cols, (kElements - misaligned) % kElements);
  const int64_t tail = head + (cols - head) / kElements * kElements;
  for (int64_t c = head + threadIdx.x * kElements; c < tail; c += blockDim.x * kElements) {
    float values[kElements];
    Load(row + c, values);
    visit(values, c);
  }
  // The ends are shorter than a pack each.
  const int64_t end_column = threadIdx.x < kElements ? threadIdx.x : tail + threadIdx.x - kElements;
  if (threadIdx.x < kElements ? end_column < head
                              : threadIdx.x < 2 * kElements && end_column < cols) {
    float value[1] = {ToFloat(row[end_column])};
    visit(value, end_column);
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
      ForRow(row, cols, [=](auto& values, int64_t column) {
        for (float& value : values) value = 0;
        Store(values, row + column);
      });
    }
    return;
  }

  // Over this thread's elements so far: the greatest, from a finite start so that e^(x - max) is 0
  // for x = -inf, and the sum of e^(x - max).
  float max = -FLT_MAX, sum = 0;
  ForRow(row, cols, [&](auto& values, int64_t) {
    float new_max = max;
    for (float value : values) new_max = fmaxf(new_max, value);
    if (new_max > max) {
      sum *= expf(max - new_max);
      max = new_max;
    }
    for (float value : values) sum += expf(value - max);
  });
  const float row_max = BlockMax(max);
  const float row_sum = BlockSum(sum * expf(max - row_max));
  if (threadIdx.x == 0) {
    // The maximum is kept apart from the logarithm: their sum as a float would lose what large
    // logits differ by.
    losses[n] = 0 <= target && target < cols
                    ? log(static_cast<double>(row_sum)) +
                          (static_cast<double>(row_max) - ToFloat(row[target]))
                    : NAN;
  }
  if constexpr (kGradient) {
    __syncthreads();  // the target's logit has been read
    const float factor = scale / row_sum;
    ForRow(row, cols, [=](auto& values, int64_t column) {
      for (float& value : values) {
        value = expf(value - row_max) * factor - (column + (&value - values) == target ? scale : 0);
      }
      Store(values, row + column);
    });
  }
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
