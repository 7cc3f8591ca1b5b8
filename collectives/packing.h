// Values as bytes and back, for what ranks of different processes say to each other. Numbers are in
// the machine's byte order: all ranks of a job run the same program.
#ifndef DIM0_COLLECTIVES_PACKING_H_
#define DIM0_COLLECTIVES_PACKING_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace dim0 {

inline void Put(std::string& out, int64_t value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
inline void Put(std::string& out, absl::string_view text) {
  Put(out, static_cast<int64_t>(text.size()));
  out.append(text.data(), text.size());
}
inline void Put(std::string& out, const std::vector<int64_t>& values) {
  Put(out, static_cast<int64_t>(values.size()));
  for (int64_t value : values) Put(out, value);
}

// Takes values off the front of bytes, which must outlive it. Once they do not suffice, ok() is
// false and all that is taken is 0 or empty.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  int64_t Number() {
    int64_t value = 0;
    const absl::string_view bytes = Bytes(sizeof(value));
    if (ok_) std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
  absl::string_view Text() { return Bytes(Number()); }
  std::vector<int64_t> Numbers() {
    std::vector<int64_t> values;
    for (int64_t count = Number(); ok_ && count > 0; --count) values.push_back(Number());
    return values;
  }

  bool ok() const { return ok_; }
  bool done() const { return ok_ && rest_.empty(); }

 private:
  absl::string_view Bytes(int64_t size) {
    if (!ok_ || size < 0 || static_cast<uint64_t>(size) > rest_.size()) {
      ok_ = false;
      return {};
    }
    const absl::string_view bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return bytes;
  }

  absl::string_view rest_;
  bool ok_ = true;
};

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_PACKING_H_
