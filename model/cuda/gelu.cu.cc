// GELU, where it is not part of a matrix product: one vector of elements a thread.
#include "model/cuda/elements.h"
#include "model/cuda/launch.h"
#include "runtime/cuda/kernel.h"

namespace dim0::cuda {
namespace {

constexpr int kThreads = 256;

// gelu(x) = 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
constexpr float kTwiceRoot2OverPi = 1.59576912f;
constexpr float kCubic = 0.044715f;

struct Gelu {
  __device__ float operator()(float x) const {
    return x / (1.0f + expf(-kTwiceRoot2OverPi * (x + kCubic * x * x * x)));
  }
};

struct GeluGradient {
  __device__ float operator()(float dy, float x) const {
    // Outside [-10, 10] the derivative is 0 or 1 to 1e-35, and x^2 could overflow. NaN stays.
    x = x > 10.0f ? 10.0f : x;
    x = x < -10.0f ? -10.0f : x;
    const float square = x * x;
    const float e = expf(-kTwiceRoot2OverPi * (x + kCubic * x * square));
    const float s = 1.0f / (1.0f + e);
    // s + x s (1 - s) (2u)' with 1 - s = e s, which cancels nothing.
    return dy * (s + x * ((e * s) * s) * kTwiceRoot2OverPi * (1.0f + 3.0f * kCubic * square));
  }
};

// The output may be one of the inputs: a thread reads what it writes, and nothing else, before it.
template <int kElements, typename T, typename Function>
__global__ void __launch_bounds__(kThreads)
    UnaryKernel(const T* x, T* y, int64_t size, Function function) {
  const int64_t begin =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * static_cast<int64_t>(kElements);
  if (begin + kElements <= size) {
    float values[kElements];
    Load(x + begin, values);
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = function(values[i]);
    Store(values, y + begin);
  } else {
    for (int64_t i = begin; i < size; ++i) y[i] = FromFloat<T>(function(ToFloat(x[i])));
  }
}

template <int kElements, typename T, typename Function>
__global__ void __launch_bounds__(kThreads)
    BinaryKernel(const T* a, const T* b, T* y, int64_t size, Function function) {
  const int64_t begin =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * static_cast<int64_t>(kElements);
  if (begin + kElements <= size) {
    float values[kElements], others[kElements];
    Load(a + begin, values);
    Load(b + begin, others);
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = function(values[i], others[i]);
    Store(values, y + begin);
  } else {
    for (int64_t i = begin; i < size; ++i) {
      y[i] = FromFloat<T>(function(ToFloat(a[i]), ToFloat(b[i])));
    }
  }
}

dim3 Blocks(int64_t size, int elements) {
  return dim3(static_cast<unsigned>(CeilDivide(size, int64_t{kThreads} * elements)));
}

template <typename Function>
cudaError_t LaunchUnary(Array x, Array y, int64_t size, Function function, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return WithElementType(x.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return WithVector<T>(AreAligned({x.data, y.data}), [&](auto elements) {
      constexpr int kElements = decltype(elements)::kValue;
      return Launch(UnaryKernel<kElements, T, Function>, Blocks(size, kElements), dim3(kThreads), 0,
                    stream, As<T>(x), As<T>(y), size, function);
    });
  });
}

template <typename Function>
cudaError_t LaunchBinary(Array a, Array b, Array y, int64_t size, Function function,
                         cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return WithElementType(a.type, [&](auto tag) {
    using T = TypeOf<decltype(tag)>;
    return WithVector<T>(AreAligned({a.data, b.data, y.data}), [&](auto elements) {
      constexpr int kElements = decltype(elements)::kValue;
      return Launch(BinaryKernel<kElements, T, Function>, Blocks(size, kElements), dim3(kThreads),
                    0, stream, As<T>(a), As<T>(b), As<T>(y), size, function);
    });
  });
}

}  // namespace

cudaError_t LaunchGeluForward(Array x, Array y, int64_t size, cudaStream_t stream) {
  return LaunchUnary(x, y, size, Gelu(), stream);
}

cudaError_t LaunchGeluBackward(Array dy, Array x, Array dx, int64_t size, cudaStream_t stream) {
  return LaunchBinary(dy, x, dx, size, GeluGradient(), stream);
}

}  // namespace dim0::cuda
