// The byte ledger: what each rank sent, split by what it was sent for. It exists so that claims
// about an optimizer's communication are counted where the bytes move and not computed beside them.
#ifndef DIM0_COLLECTIVES_LEDGER_H_
#define DIM0_COLLECTIVES_LEDGER_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace dim0 {

// What a collective is for. kControl is the runtime's own small talk (loss, norms, plan hashes,
// weights collected for a file); it is kept apart so that the other three are exact.
enum class Purpose : uint8_t { kParameter, kGradient, kOptimizer, kControl };
inline constexpr int kNumPurposes = 4;

constexpr absl::string_view Name(Purpose purpose) {
  switch (purpose) {
    case Purpose::kParameter:
      return "parameter";
    case Purpose::kGradient:
      return "gradient";
    case Purpose::kOptimizer:
      return "optimizer";
    case Purpose::kControl:
      return "control";
  }
  return "?";
}

// Bytes and calls of one rank. Thread-safe: the streams of a rank share one ledger.
class ByteLedger {
 public:
  void Add(Purpose purpose, int64_t bytes) {
    bytes_[static_cast<int>(purpose)].fetch_add(bytes, std::memory_order_relaxed);
    calls_[static_cast<int>(purpose)].fetch_add(1, std::memory_order_relaxed);
  }
  int64_t bytes(Purpose purpose) const {
    return bytes_[static_cast<int>(purpose)].load(std::memory_order_relaxed);
  }
  int64_t calls(Purpose purpose) const {
    return calls_[static_cast<int>(purpose)].load(std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<int64_t>, kNumPurposes> bytes_{};
  std::array<std::atomic<int64_t>, kNumPurposes> calls_{};
};

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_LEDGER_H_
