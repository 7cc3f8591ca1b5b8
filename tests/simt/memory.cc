#include "tests/simt/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace dim0::simt {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 64;
constexpr size_t kArena = size_t{256} << 30;  // addresses only
constexpr unsigned char kAround = 0xc5;
constexpr unsigned char kUndefined = 0xff;
// How much of what lies before an allocation is looked at after every kernel.
constexpr size_t kNear = 256;
constexpr size_t kMaxFreed = 1 << 16;

// The pages of an allocation, and behind them one that is never accessible.
struct Block {
  Allocation allocation;
  uintptr_t first_page = 0;
  uintptr_t guard = 0;
  bool damage_told = false;

  uintptr_t end() const { return allocation.start + allocation.bytes; }
};

class Arena {
 public:
  static Arena& Get() {
    static Arena& arena = *new Arena;
    return arena;
  }

  void* Allocate(MemoryKind kind, int device, size_t bytes, bool stream_ordered) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > kArena / 2) return nullptr;
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const size_t pages = (rounded + kPage - 1) / kPage * kPage;
    const uintptr_t first_page = FindGap(pages + kPage);
    if (first_page == 0) return nullptr;
    cursor_ = first_page + pages + kPage;
    Block block;
    block.first_page = first_page;
    block.guard = first_page + pages;
    block.allocation = {.start = block.guard - rounded,
                        .bytes = bytes,
                        .kind = kind,
                        .device = device,
                        .number = ++count_,
                        .stream_ordered = stream_ordered};
    // What was freed here is forgotten.
    for (auto it = freed_.lower_bound(first_page); it != freed_.end() && it->first < cursor_;) {
      it = freed_.erase(it);
    }
    live_[first_page] = block;
    return reinterpret_cast<void*>(block.allocation.start);
  }

  void MakeAccessible(void* start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* block = Find(start);
    auto* page = reinterpret_cast<unsigned char*>(block->first_page);
    const size_t pages = block->guard - block->first_page;
    if (mprotect(page, pages, PROT_READ | PROT_WRITE) != 0) std::abort();
    std::memset(page, kAround, pages);
    std::memset(start, kUndefined, block->allocation.bytes);
    block->allocation.accessible = true;
  }

  std::string Free(void* start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* found = Find(start);
    const std::string damage = Damage(*found, true);
    const Block block = *found;
    Release(block);
    live_.erase(block.first_page);
    freed_[block.first_page] = block;
    freed_order_.push_back(block.first_page);
    if (freed_order_.size() > kMaxFreed) {
      freed_.erase(freed_order_.front());
      freed_order_.pop_front();
    }
    return damage;
  }

  std::optional<Allocation> FindAllocation(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Block* block = Find(address);
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (!block || at < block->allocation.start || at >= block->end()) return std::nullopt;
    return block->allocation;
  }

  bool IsFreed(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = reinterpret_cast<uintptr_t>(address);
    const Block* block = Below(freed_, at);
    return block && at >= block->allocation.start && at < block->end();
  }

  bool MarkBeingFreed(void* start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* block = Find(start);
    if (!block || block->allocation.start != reinterpret_cast<uintptr_t>(start) ||
        block->allocation.being_freed) {
      return false;
    }
    block->allocation.being_freed = true;
    return true;
  }

  int64_t DeviceBytesInUse(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t bytes = 0;
    for (const auto& [page, block] : live_) {
      const Allocation& allocation = block.allocation;
      if (allocation.kind == MemoryKind::kDevice && allocation.device == device &&
          !allocation.being_freed) {
        bytes += allocation.bytes;
      }
    }
    return bytes;
  }

  std::string FindDamage(int device, bool thorough) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [page, block] : live_) {
      if (block.allocation.device != device || block.damage_told) continue;
      std::string damage = Damage(block, thorough);
      if (damage.empty()) continue;
      block.damage_told = true;
      return damage;
    }
    return "";
  }

  std::string DescribeAddress(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (at < base_ || at >= base_ + kArena) return "";
    // Of the blocks around it, the one to which it is nearest.
    const Block* nearest = nullptr;
    uintptr_t least = ~uintptr_t{0};
    for (Blocks* blocks : {&live_, &freed_}) {
      const auto next = blocks->upper_bound(at);
      for (auto it : {next == blocks->begin() ? next : std::prev(next), next}) {
        if (it == blocks->end()) continue;
        const Block& block = it->second;
        const uintptr_t start = block.allocation.start;
        const uintptr_t distance =
            at < start ? start - at : (at < block.end() ? 0 : at - block.end());
        if (distance >= least) continue;
        least = distance;
        nearest = &block;
      }
    }
    if (nearest) {
      const bool live = live_.contains(nearest->first_page);
      return Place(*nearest, at,
                   !live                            ? ", freed"
                   : nearest->allocation.accessible ? ""
                                                    : ", not yet allocated there");
    }
    return "not in any allocation";
  }

  void Forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [page, block] : live_) Release(block);
    live_.clear();
    freed_.clear();
    freed_order_.clear();
  }

 private:
  using Blocks = std::map<uintptr_t, Block>;

  Arena() {
    void* base =
        mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) std::abort();
    base_ = reinterpret_cast<uintptr_t>(base);
    cursor_ = base_ + kPage;
  }

  static void Release(const Block& block) {
    auto* page = reinterpret_cast<void*>(block.first_page);
    madvise(page, block.guard - block.first_page, MADV_DONTNEED);
    mprotect(page, block.guard - block.first_page, PROT_NONE);
  }

  // The first gap from the cursor on, or from the start if there is none.
  uintptr_t FindGap(size_t bytes) const {
    for (const uintptr_t from : {cursor_, base_ + kPage}) {
      uintptr_t at = from;
      for (auto it = live_.lower_bound(from); at + bytes <= base_ + kArena; ++it) {
        if (it == live_.end() || it->first - at >= bytes) return at;
        at = it->second.guard + kPage;
      }
    }
    return 0;
  }

  // The block that begins last at or before the address.
  static Block* Below(Blocks& blocks, uintptr_t at) {
    auto next = blocks.upper_bound(at);
    return next == blocks.begin() ? nullptr : &std::prev(next)->second;
  }

  Block* Find(const void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    Block* block = Below(live_, at);
    return block && at < block->guard ? block : nullptr;
  }

  static std::string Name(const Block& block) {
    const Allocation& allocation = block.allocation;
    return "allocation " + std::to_string(allocation.number) + " (" +
           std::to_string(allocation.bytes) + " bytes of " +
           (allocation.kind == MemoryKind::kPinned
                ? "pinned host memory"
                : "device " + std::to_string(allocation.device)) +
           ")";
  }

  static std::string Place(const Block& block, uintptr_t at, const std::string& state) {
    const uintptr_t start = block.allocation.start, end = block.end();
    std::string place;
    if (at < start) {
      place = std::to_string(start - at) + " bytes before the start of ";
    } else if (at >= end) {
      place = std::to_string(at - end) + " bytes past the end of ";
    } else {
      place = "byte " + std::to_string(at - start) + " of ";
    }
    return place + Name(block) + state;
  }

  static std::string Damage(const Block& block, bool thorough) {
    if (!block.allocation.accessible) return "";
    const uintptr_t start = block.allocation.start;
    const uintptr_t from =
        thorough || start - block.first_page < kNear ? block.first_page : start - kNear;
    for (const auto& [first, last] :
         {std::pair(from, start), std::pair(block.end(), block.guard)}) {
      for (uintptr_t at = first; at < last; ++at) {
        if (*reinterpret_cast<const unsigned char*>(at) != kAround) {
          return "written " + Place(block, at, "");
        }
      }
    }
    return "";
  }

  std::mutex mutex_;
  uintptr_t base_ = 0;
  uintptr_t cursor_ = 0;
  int64_t count_ = 0;
  Blocks live_;   // by first page
  Blocks freed_;  // by first page
  std::deque<uintptr_t> freed_order_;
};

}  // namespace

void* Allocate(MemoryKind kind, int device, size_t bytes, bool stream_ordered) {
  return Arena::Get().Allocate(kind, device, bytes, stream_ordered);
}
void MakeAccessible(void* start) { Arena::Get().MakeAccessible(start); }
std::string Free(void* start) { return Arena::Get().Free(start); }
std::optional<Allocation> FindAllocation(const void* address) {
  return Arena::Get().FindAllocation(address);
}
bool IsFreed(const void* address) { return Arena::Get().IsFreed(address); }
bool MarkBeingFreed(void* start) { return Arena::Get().MarkBeingFreed(start); }
int64_t DeviceBytesInUse(int device) { return Arena::Get().DeviceBytesInUse(device); }
std::string FindDamage(int device, bool thorough) {
  return Arena::Get().FindDamage(device, thorough);
}
std::string DescribeAddress(const void* address) { return Arena::Get().DescribeAddress(address); }
void ForgetMemory() { Arena::Get().Forget(); }

}  // namespace dim0::simt
