#include "collectives/reduce.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <type_traits>

#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/dtype.h"

namespace dim0 {
namespace {

// Elements reduced at a time. A constant and small, so that the running result stays in registers
// or the L1 cache and memory sees every source read once, all sources side by side, and `out`
// written once, however many sources there are. Blocks of kilobytes are up to twice as slow: they
// read one source after another, and memory idles at each change.
constexpr int64_t kBlock = 64;

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, BFloat16>, float, T>;

struct Sum {
  template <typename A>
  A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>) {
      using Unsigned = std::make_unsigned_t<A>;  // wraps where the signed type would be undefined
      return static_cast<A>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
      return a + b;
    }
  }
};

struct Max {
  template <typename A>
  A operator()(A a, A b) const {
    return a > b || a != a ? a : b;  // a != a: a NaN stays
  }
};

// Member by member where a struct's copy would keep the loop from becoming vector code.
template <typename T>
void Store(T value, T& to) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    to.bits = value.bits;
  } else {
    to = value;
  }
}

// Elements [begin, begin + n), n <= kBlock. Inlined so that n is a constant where the caller's is.
template <typename T, typename Op>
inline __attribute__((always_inline)) void ReduceBlock(absl::Span<const void* const> sources,
                                                       T* out, int64_t begin, int64_t n,
                                                       bool accumulate) {
  const Op op;
  Accumulator<T> result[kBlock];
  const T* first = static_cast<const T*>(sources[0]) + begin;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) result[i] = static_cast<Accumulator<T>>(first[i]);
  for (const void* source : sources.subspan(1)) {
    const T* next = static_cast<const T*>(source) + begin;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      result[i] = op(result[i], static_cast<Accumulator<T>>(next[i]));
    }
  }
  T* destination = out + begin;
  if (accumulate) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      result[i] = op(static_cast<Accumulator<T>>(destination[i]), result[i]);
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) Store(static_cast<T>(result[i]), destination[i]);
}

template <typename T, typename Op>
void Reduce(absl::Span<const void* const> sources, T* out, int64_t count, bool accumulate) {
  int64_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    ReduceBlock<T, Op>(sources, out, begin, kBlock, accumulate);
  }
  ReduceBlock<T, Op>(sources, out, begin, count - begin, accumulate);
}

template <typename T>
void Reduce(ReduceOp op, absl::Span<const void* const> sources, void* out, int64_t count,
            bool accumulate) {
  switch (op) {
    case ReduceOp::kSum:
      return Reduce<T, Sum>(sources, static_cast<T*>(out), count, accumulate);
    case ReduceOp::kMax:
      return Reduce<T, Max>(sources, static_cast<T*>(out), count, accumulate);
  }
}

}  // namespace

void ReduceInOrder(DType dtype, ReduceOp op, absl::Span<const void* const> sources, void* out,
                   int64_t count, bool accumulate) {
  assert(!sources.empty());
  switch (dtype) {
    case DType::kFloat32:
      return Reduce<float>(op, sources, out, count, accumulate);
    case DType::kBFloat16:
      return Reduce<BFloat16>(op, sources, out, count, accumulate);
    case DType::kInt32:
      return Reduce<int32_t>(op, sources, out, count, accumulate);
    case DType::kInt64:
      return Reduce<int64_t>(op, sources, out, count, accumulate);
    case DType::kByte:
    case DType::kFloat16:
      assert(false && "no sums of this type are offered");
  }
}

}  // namespace dim0
