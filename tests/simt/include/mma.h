// CUDA's warp-wide matrix products: tiles spread over the lanes of a warp, 16-bit factors and float
// sums. Which lane holds which element is ours to choose, as it is the GPU's there: fragments of
// one kind agree with each other, and that is all that a kernel may rely on.
#ifndef DIM0_TESTS_SIMT_INCLUDE_MMA_H_
#define DIM0_TESTS_SIMT_INCLUDE_MMA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "simt/collective.h"

namespace nvcuda::wmma {

enum layout_t { mem_row_major, mem_col_major };

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert((M == 16 && N == 16 && K == 16) || (M == 32 && N == 8 && K == 16) ||
                    (M == 8 && N == 32 && K == 16),
                "no such tile");
  static constexpr bool kIsAccumulator = std::is_same_v<Use, accumulator>;
  static constexpr bool kIsLeft = std::is_same_v<Use, matrix_a>;
  static_assert(kIsAccumulator ? std::is_same_v<T, float> || std::is_same_v<T, __half>
                               : std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>,
                "no such element type");
  static_assert(kIsAccumulator == std::is_void_v<Layout>, "factors, and only they, have a layout");
  static constexpr int kRows = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int kColumns = std::is_same_v<Use, matrix_a> ? K : N;

  static constexpr int num_elements = kRows * kColumns / 32;
  T x[num_elements];
};

}  // namespace nvcuda::wmma

namespace dim0::simt {

// Element i of lane's part lies at tile element i * 32 + (lane permuted): neighbouring elements are
// not in neighbouring lanes, and fragments of different kinds have the elements of a tile in
// different lanes, so that nothing comes to rely on a layout.
template <typename Fragment>
int TileElement(int lane, int i) {
  constexpr int kStep = Fragment::kIsAccumulator ? 11 : Fragment::kIsLeft ? 13 : 21;
  return i * 32 + (lane * kStep + i * 7) % 32;
}

template <typename T>
void CheckTile(const T* memory, unsigned leading, Location where) {
  if (reinterpret_cast<uintptr_t>(memory) % 32 != 0) {
    Fail(Fault::kMisalignedAddress, "a matrix tile must start at a multiple of 32 bytes", where);
  }
  if (leading * sizeof(T) % 16 != 0) {
    Fail(Fault::kMisalignedAddress,
         "a matrix tile's rows must be a multiple of 16 bytes apart, not " +
             std::to_string(leading * sizeof(T)),
         where);
  }
}

// Calls visit(element of the fragment, its offset in memory) for this lane's part.
template <typename Fragment, typename Visit>
void VisitTile(Fragment& fragment, unsigned leading, bool row_major, const Visit& visit) {
  const int lane = Lane();
  for (int i = 0; i < Fragment::num_elements; ++i) {
    const int element = TileElement<Fragment>(lane, i);
    const size_t row = element / Fragment::kColumns, column = element % Fragment::kColumns;
    visit(fragment.x[i], row_major ? row * leading + column : column * leading + row);
  }
}

template <typename A, typename B, typename C, typename D>
struct Product {
  const A* a;
  const B* b;
  const C* c;
  D* d;
};

}  // namespace dim0::simt

namespace nvcuda::wmma {

template <typename Use, int M, int N, int K, typename T, typename Layout>
void fill_fragment(fragment<Use, M, N, K, T, Layout>& to, std::type_identity_t<T> value) {
  for (T& element : to.x) element = value;
}

template <typename Use, int M, int N, int K, typename T, typename Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& to, const T* memory, unsigned leading,
                      dim0::simt::Location where = dim0::simt::Location::current()) {
  dim0::simt::CheckTile(memory, leading, where);
  dim0::simt::MeetWarp(0xffffffffu, nullptr, nullptr, where);
  dim0::simt::VisitTile(to, leading, std::is_same_v<Layout, row_major>,
                        [&](T& element, size_t offset) { element = memory[offset]; });
}

template <int M, int N, int K, typename T>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& to, const T* memory, unsigned leading,
                      layout_t layout,
                      dim0::simt::Location where = dim0::simt::Location::current()) {
  dim0::simt::CheckTile(memory, leading, where);
  dim0::simt::MeetWarp(0xffffffffu, nullptr, nullptr, where);
  dim0::simt::VisitTile(to, leading, layout == mem_row_major,
                        [&](T& element, size_t offset) { element = memory[offset]; });
}

template <int M, int N, int K, typename T>
void store_matrix_sync(T* memory, const fragment<accumulator, M, N, K, T>& from, unsigned leading,
                       layout_t layout,
                       dim0::simt::Location where = dim0::simt::Location::current()) {
  dim0::simt::CheckTile(memory, leading, where);
  dim0::simt::MeetWarp(0xffffffffu, nullptr, nullptr, where);
  dim0::simt::VisitTile(from, leading, layout == mem_row_major,
                        [&](const T& element, size_t offset) { memory[offset] = element; });
}

// d = a b + c; products exact, sums in float. d may be c.
template <int M, int N, int K, typename T, typename LayoutA, typename LayoutB, typename TC,
          typename TD>
void mma_sync(fragment<accumulator, M, N, K, TD>& d,
              const fragment<matrix_a, M, N, K, T, LayoutA>& a,
              const fragment<matrix_b, M, N, K, T, LayoutB>& b,
              const fragment<accumulator, M, N, K, TC>& c,
              dim0::simt::Location where = dim0::simt::Location::current()) {
  using A = fragment<matrix_a, M, N, K, T, LayoutA>;
  using B = fragment<matrix_b, M, N, K, T, LayoutB>;
  using C = fragment<accumulator, M, N, K, TC>;
  using D = fragment<accumulator, M, N, K, TD>;
  dim0::simt::Product<A, B, C, D> product = {&a, &b, &c, &d};
  dim0::simt::MeetWarp(
      0xffffffffu, &product,
      [](void* const(&lanes)[32]) {
        const auto part = [&](int lane) {
          return *static_cast<const dim0::simt::Product<A, B, C, D>*>(lanes[lane]);
        };
        float a[M][K], b[K][N], c[M][N];
        for (int lane = 0; lane < 32; ++lane) {
          const auto from = part(lane);
          for (int i = 0; i < A::num_elements; ++i) {
            const int element = dim0::simt::TileElement<A>(lane, i);
            a[element / K][element % K] = static_cast<float>(from.a->x[i]);
          }
          for (int i = 0; i < B::num_elements; ++i) {
            const int element = dim0::simt::TileElement<B>(lane, i);
            b[element / N][element % N] = static_cast<float>(from.b->x[i]);
          }
          for (int i = 0; i < C::num_elements; ++i) {
            const int element = dim0::simt::TileElement<C>(lane, i);
            c[element / N][element % N] = static_cast<float>(from.c->x[i]);
          }
        }
        for (int m = 0; m < M; ++m) {
          for (int k = 0; k < K; ++k) {
            for (int n = 0; n < N; ++n) c[m][n] += a[m][k] * b[k][n];
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          const auto to = part(lane);
          for (int i = 0; i < D::num_elements; ++i) {
            const int element = dim0::simt::TileElement<D>(lane, i);
            to.d->x[i] = TD(c[element / N][element % N]);
          }
        }
      },
      where);
}

}  // namespace nvcuda::wmma

#endif  // DIM0_TESTS_SIMT_INCLUDE_MMA_H_
