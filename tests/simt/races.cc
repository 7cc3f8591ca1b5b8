#include "tests/simt/races.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "tests/simt/control.h"

namespace dim0::simt {
namespace {

// What has happened to a byte, or to a word that has been accessed as a whole only. Times are those
// of `now`.
struct Cell {
  uint32_t written = 0;  // when last
  uint32_t read = 0;     // when last
  uint32_t lanes = 0;    // of the reader's warp that have read it lately; 0: several warps have
  uint16_t writer = 0;   // the last one
  uint16_t reader = 0;
};

constexpr size_t kWarps = 32;
constexpr uint32_t kLate = uint32_t{1} << 31;

constexpr size_t kWord = 4;

std::vector<Cell> cells;     // a byte each; of a word that is not split, the first one counts
std::vector<char> is_split;  // of each word, in this grid
// Steps with each thing that orders accesses: what happened before one has an earlier time.
uint32_t now = 1;
uint32_t block_ordered = 1;
uint32_t warp_ordered[kWarps];

// Of the thread that runs grids; the sanitizer's calls come from others, too.
thread_local const unsigned char* watched = nullptr;
thread_local size_t watched_bytes = 0;
bool has_calls = false;

// Returns false, having reported it, if the access races with one before.
inline bool Check(Cell& cell, int thread, const Race& access) {
  const int warp = thread / 32;
  const uint32_t lane = uint32_t{1} << thread % 32;
  const uint32_t ordered = warp_ordered[warp];
  const auto fail = [&](bool other_wrote, int other) {
    Race race = access;
    race.other_wrote = other_wrote;
    race.other_thread = other;
    ReportRace(race);
    return false;
  };
  if (cell.written >= block_ordered && cell.writer != thread &&
      (cell.writer / 32 != warp || cell.written >= ordered)) {
    return fail(true, cell.writer);
  }
  const bool was_read = cell.read >= block_ordered;
  const bool by_this_warp = cell.lanes != 0 && cell.reader / 32 == warp;
  if (access.writes) {
    if (was_read && !by_this_warp) return fail(false, cell.lanes != 0 ? cell.reader : -1);
    const uint32_t others = cell.lanes & ~lane;
    if (was_read && cell.read >= ordered && others != 0) {
      return fail(false, warp * 32 + std::countr_zero(others));
    }
    cell.written = now;
    cell.writer = static_cast<uint16_t>(thread);
    return true;
  }
  if (!was_read || by_this_warp) {
    cell.lanes = was_read && cell.read >= ordered ? cell.lanes | lane : lane;
    cell.reader = static_cast<uint16_t>(thread);
  } else {
    cell.lanes = 0;
  }
  cell.read = now;
  return true;
}

void Record(size_t offset, size_t bytes, bool writes, const void* code) {
  const int thread = RunningThread();
  if (thread < 0) return;
  const Race access = {code, writes, static_cast<int>(bytes), false, -1};
  const size_t end = std::min(watched_bytes, offset + bytes);
  while (offset < end) {
    const size_t word = offset / kWord, first = word * kWord;
    if (!is_split[word]) {
      if (offset == first && end - offset >= kWord) {
        if (!Check(cells[first], thread, access)) return;
        offset += kWord;
        continue;
      }
      is_split[word] = true;
      for (size_t i = 1; i < kWord; ++i) cells[first + i] = cells[first];
    }
    if (!Check(cells[offset++], thread, access)) return;
  }
}

}  // namespace

void WatchForRaces(std::span<unsigned char> shared) {
  is_split.assign(shared.size() / kWord + 1, false);
  if (cells.size() < kWord * is_split.size()) cells.resize(kWord * is_split.size());
  watched = shared.data();
  watched_bytes = shared.size();
}

void OrderBlock() {
  if (now >= kLate) {
    std::fill(cells.begin(), cells.end(), Cell());
    std::fill(std::begin(warp_ordered), std::end(warp_ordered), 0);
    now = 0;
  }
  block_ordered = ++now;
}

void OrderWarp(size_t warp) { warp_ordered[warp] = ++now; }

bool FindsRaces() { return has_calls; }

}  // namespace dim0::simt

// With the sanitizer itself, its library has these.
#if !defined(__SANITIZE_THREAD__)

namespace {

inline void Access(const void* address, size_t bytes, bool writes, const void* code) {
  using namespace dim0::simt;
  const size_t offset = static_cast<const unsigned char*>(address) - watched;
  if (offset >= watched_bytes) return;
  Record(offset, bytes, writes, code);
}

}  // namespace

#define DIM0_ACCESS(name, bytes, writes) \
  void __tsan_##name(void* address) { Access(address, bytes, writes, __builtin_return_address(0)); }
#define DIM0_ACCESSES(bytes)                       \
  DIM0_ACCESS(read##bytes, bytes, false)           \
  DIM0_ACCESS(write##bytes, bytes, true)           \
  DIM0_ACCESS(unaligned_read##bytes, bytes, false) \
  DIM0_ACCESS(unaligned_write##bytes, bytes, true)

// Atomics of host code that is compiled along with kernels: they only have to be what they are.
#define DIM0_ATOMIC_UPDATE(bits, name)                                                           \
  uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t* to, uint##bits##_t value, \
                                              int) {                                             \
    return __atomic_##name(to, value, __ATOMIC_SEQ_CST);                                         \
  }
#define DIM0_ATOMIC_COMPARE_EXCHANGE(bits, strength)                                           \
  int __tsan_atomic##bits##_compare_exchange_##strength(                                       \
      volatile uint##bits##_t* to, uint##bits##_t* expected, uint##bits##_t value, int, int) { \
    return __atomic_compare_exchange_n(to, expected, value, false, __ATOMIC_SEQ_CST,           \
                                       __ATOMIC_SEQ_CST);                                      \
  }
#define DIM0_ATOMICS(bits)                                                                         \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* from, int) {            \
    return __atomic_load_n(from, __ATOMIC_SEQ_CST);                                                \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* to, uint##bits##_t value, int) {       \
    __atomic_store_n(to, value, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_exchange(volatile uint##bits##_t* to, uint##bits##_t value, \
                                                int) {                                             \
    return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST);                                       \
  }                                                                                                \
  DIM0_ATOMIC_UPDATE(bits, fetch_add)                                                              \
  DIM0_ATOMIC_UPDATE(bits, fetch_sub)                                                              \
  DIM0_ATOMIC_UPDATE(bits, fetch_and)                                                              \
  DIM0_ATOMIC_UPDATE(bits, fetch_or)                                                               \
  DIM0_ATOMIC_UPDATE(bits, fetch_xor)                                                              \
  DIM0_ATOMIC_COMPARE_EXCHANGE(bits, strong)                                                       \
  DIM0_ATOMIC_COMPARE_EXCHANGE(bits, weak)

extern "C" {
void __tsan_init() { dim0::simt::has_calls = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
DIM0_ACCESSES(1)
DIM0_ACCESSES(2)
DIM0_ACCESSES(4)
DIM0_ACCESSES(8)
DIM0_ACCESSES(16)
void __tsan_read_range(void* address, size_t bytes) {
  Access(address, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  Access(address, bytes, true, __builtin_return_address(0));
}
DIM0_ATOMICS(8)
DIM0_ATOMICS(16)
DIM0_ATOMICS(32)
DIM0_ATOMICS(64)
}

#undef DIM0_ATOMICS
#undef DIM0_ATOMIC_COMPARE_EXCHANGE
#undef DIM0_ATOMIC_UPDATE
#undef DIM0_ACCESSES
#undef DIM0_ACCESS

#endif
