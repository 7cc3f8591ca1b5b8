// The functions that CUDA gives to device code: thread indices, barriers, warp exchanges, atomics,
// bit casts and mathematics.
#ifndef DIM0_TESTS_SIMT_INCLUDE_SIMT_DEVICE_FUNCTIONS_H_
#define DIM0_TESTS_SIMT_INCLUDE_SIMT_DEVICE_FUNCTIONS_H_

#include <math.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/collective.h"
#include "simt/vector_types.h"

// Set before each switch to a thread. Not to be written by kernels; const would let a compiler
// believe that they never change.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// ---- Barriers

inline void __syncthreads(dim0::simt::Location where = dim0::simt::Location::current()) {
  dim0::simt::BlockBarrier(where);
}
inline int __syncthreads_count(int predicate,
                               dim0::simt::Location where = dim0::simt::Location::current()) {
  return dim0::simt::BlockCount(predicate != 0, where);
}
inline int __syncthreads_or(int predicate,
                            dim0::simt::Location where = dim0::simt::Location::current()) {
  return dim0::simt::BlockCount(predicate != 0, where) > 0;
}
inline int __syncthreads_and(int predicate,
                             dim0::simt::Location where = dim0::simt::Location::current()) {
  return dim0::simt::BlockCount(predicate == 0, where) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       dim0::simt::Location where = dim0::simt::Location::current()) {
  dim0::simt::WarpBarrier(mask, where);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
[[noreturn]] inline void __trap(dim0::simt::Location where = dim0::simt::Location::current()) {
  dim0::simt::Fail(dim0::simt::Fault::kLaunchFailure, "__trap", where);
}

// ---- Exchanges within a warp

namespace dim0::simt {

template <typename T>
struct ShuffleLane {
  T value;
  int source;  // a lane
  Location where;
};

// The value that lane `source` has handed in.
template <typename T>
T Shuffle(unsigned mask, T value, int source, Location where) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move 4 or 8 bytes");
  ShuffleLane<T> lane = {value, source, where};
  MeetWarp(
      mask, &lane,
      [](void* const(&lanes)[32]) {
        T values[32] = {};
        for (int i = 0; i < 32; ++i) {
          if (lanes[i]) values[i] = static_cast<ShuffleLane<T>*>(lanes[i])->value;
        }
        for (int i = 0; i < 32; ++i) {
          if (!lanes[i]) continue;
          auto& to = *static_cast<ShuffleLane<T>*>(lanes[i]);
          if (!lanes[to.source]) {
            Fail(Fault::kLaunchFailure,
                 "lane " + std::to_string(i) + " reads lane " + std::to_string(to.source) +
                     ", which is not in the shuffle's mask",
                 to.where);
          }
          to.value = values[to.source];
        }
      },
      where);
  return lane.value;
}

// Of the `width` lanes among which the caller's lies: the first.
inline int SegmentStart(int width) { return Lane() & ~(width - 1); }

// Calls combine(a, b) over the values of the mask's lanes, in lane order.
template <typename T, typename Combine>
T Reduce(unsigned mask, T value, Location where, Combine) {
  MeetWarp(
      mask, &value,
      [](void* const(&lanes)[32]) {
        T total = {};
        bool first = true;
        for (void* lane : lanes) {
          if (!lane) continue;
          const T value = *static_cast<T*>(lane);
          total = first ? value : Combine()(total, value);
          first = false;
        }
        for (void* lane : lanes) {
          if (lane) *static_cast<T*>(lane) = total;
        }
      },
      where);
  return value;
}

template <typename T>
concept WarpInteger = std::same_as<T, int> || std::same_as<T, unsigned>;

}  // namespace dim0::simt

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              dim0::simt::Location where = dim0::simt::Location::current()) {
  return dim0::simt::Shuffle(mask, value, dim0::simt::SegmentStart(width) + (source & (width - 1)),
                             where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 dim0::simt::Location where = dim0::simt::Location::current()) {
  const int lane = dim0::simt::Lane(), source = lane - static_cast<int>(delta & 31);
  return dim0::simt::Shuffle(mask, value, source < dim0::simt::SegmentStart(width) ? lane : source,
                             where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   dim0::simt::Location where = dim0::simt::Location::current()) {
  const int lane = dim0::simt::Lane(), source = lane + static_cast<int>(delta & 31);
  return dim0::simt::Shuffle(
      mask, value, source >= dim0::simt::SegmentStart(width) + width ? lane : source, where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  dim0::simt::Location where = dim0::simt::Location::current()) {
  const int lane = dim0::simt::Lane(), source = lane ^ (lane_mask & 31);
  return dim0::simt::Shuffle(
      mask, value, source >= dim0::simt::SegmentStart(width) + width ? lane : source, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              dim0::simt::Location where = dim0::simt::Location::current()) {
  const unsigned bit = predicate ? 1u << dim0::simt::Lane() : 0u;
  return dim0::simt::Reduce(mask, bit, where, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate,
                      dim0::simt::Location where = dim0::simt::Location::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      dim0::simt::Location where = dim0::simt::Location::current()) {
  return __ballot_sync(mask, predicate, where) == mask;
}
template <dim0::simt::WarpInteger T>
T __reduce_add_sync(unsigned mask, T value,
                    dim0::simt::Location where = dim0::simt::Location::current()) {
  return static_cast<T>(dim0::simt::Reduce(mask, static_cast<unsigned>(value), where,
                                           [](unsigned a, unsigned b) { return a + b; }));
}
template <dim0::simt::WarpInteger T>
T __reduce_max_sync(unsigned mask, T value,
                    dim0::simt::Location where = dim0::simt::Location::current()) {
  return dim0::simt::Reduce(mask, value, where, [](T a, T b) { return a > b ? a : b; });
}
template <dim0::simt::WarpInteger T>
T __reduce_min_sync(unsigned mask, T value,
                    dim0::simt::Location where = dim0::simt::Location::current()) {
  return dim0::simt::Reduce(mask, value, where, [](T a, T b) { return a < b ? a : b; });
}

// ---- Atomics: threads take turns only where they wait, so nothing comes between

namespace dim0::simt {
template <typename T>
concept AtomicNumber = std::same_as<T, int> || std::same_as<T, unsigned> ||
    std::same_as<T, unsigned long long> || std::same_as<T, float> || std::same_as<T, double>;
// Returns what was there before; update() of it is now. Not an access that may race.
template <typename T, typename Update>
__attribute__((no_sanitize("thread"))) T Exchange(T* address, const Update& update) {
  const T old = *address;
  *address = update(old);
  return old;
}
}  // namespace dim0::simt

template <dim0::simt::AtomicNumber T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return dim0::simt::Exchange(address, [value](T old) {
    if constexpr (std::is_same_v<T, int>) {
      return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value));
    } else {
      return old + value;
    }
  });
}
template <dim0::simt::AtomicNumber T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return atomicAdd(address, T(0) - value);
}
template <dim0::simt::AtomicNumber T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return dim0::simt::Exchange(address, [value](T) { return value; });
}
template <dim0::simt::AtomicNumber T>
requires std::integral<T> T atomicMax(T* address, std::type_identity_t<T> value) {
  return dim0::simt::Exchange(address, [value](T old) { return std::max(old, value); });
}
template <dim0::simt::AtomicNumber T>
requires std::integral<T> T atomicMin(T* address, std::type_identity_t<T> value) {
  return dim0::simt::Exchange(address, [value](T old) { return std::min(old, value); });
}
template <dim0::simt::AtomicNumber T>
requires std::integral<T> T atomicOr(T* address, std::type_identity_t<T> value) {
  return dim0::simt::Exchange(address, [value](T old) { return old | value; });
}
template <dim0::simt::AtomicNumber T>
requires std::integral<T> T atomicAnd(T* address, std::type_identity_t<T> value) {
  return dim0::simt::Exchange(address, [value](T old) { return old & value; });
}
// Counts up to `limit`, then starts at 0 again.
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return dim0::simt::Exchange(address,
                              [limit](unsigned old) { return old >= limit ? 0u : old + 1; });
}
template <dim0::simt::AtomicNumber T>
requires std::integral<T> T atomicCAS(T* address, std::type_identity_t<T> expected,
                                      std::type_identity_t<T> value) {
  return dim0::simt::Exchange(address, [=](T old) { return old == expected ? value : old; });
}

// ---- Loads and stores with cache hints

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
T __ldca(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}
template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}

// ---- Bits

inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __clzll(long long bits) {
  return std::countl_zero(static_cast<unsigned long long>(bits));
}
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
// One plus the place of the lowest bit that is set; 0 if none is.
inline int __ffs(int bits) { return ::__builtin_ffs(bits); }

// ---- Mathematics. What the host's <math.h> has under the same name comes from there.

using std::isfinite;
using std::isinf;
using std::isnan;

namespace dim0::simt {
// Keeps a compiler from fusing a product with a sum.
template <typename T>
T Rounded(T value) {
#if defined(__x86_64__)
  __asm__("" : "+x"(value));
#else
  __asm__("" : "+w"(value));
#endif
  return value;
}
}  // namespace dim0::simt

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __fadd_rn(float a, float b) { return dim0::simt::Rounded(a + b); }
inline float __fsub_rn(float a, float b) { return dim0::simt::Rounded(a - b); }
inline float __fmul_rn(float a, float b) { return dim0::simt::Rounded(a * b); }
inline float __fdiv_rn(float a, float b) { return dim0::simt::Rounded(a / b); }
inline float __fsqrt_rn(float x) { return dim0::simt::Rounded(sqrtf(x)); }
inline float __frcp_rn(float x) { return dim0::simt::Rounded(1.0f / x); }
inline float __frsqrt_rn(float x) {
  return dim0::simt::Rounded(static_cast<float>(1.0 / ::sqrt(static_cast<double>(x))));
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return dim0::simt::Rounded(a + b); }
inline double __dsub_rn(double a, double b) { return dim0::simt::Rounded(a - b); }
inline double __dmul_rn(double a, double b) { return dim0::simt::Rounded(a * b); }
inline double __ddiv_rn(double a, double b) { return dim0::simt::Rounded(a / b); }
inline double __dsqrt_rn(double x) { return dim0::simt::Rounded(::sqrt(x)); }
inline double __fma_rn(double a, double b, double c) { return ::fma(a, b, c); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }

#endif  // DIM0_TESTS_SIMT_INCLUDE_SIMT_DEVICE_FUNCTIONS_H_
