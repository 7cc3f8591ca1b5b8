#include "collectives/nccl/news.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dim0 {
namespace {

void Put(std::string& out, int64_t value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
void Put(std::string& out, absl::string_view text) {
  Put(out, static_cast<int64_t>(text.size()));
  out.append(text.data(), text.size());
}
void Put(std::string& out, const std::vector<int64_t>& values) {
  Put(out, static_cast<int64_t>(values.size()));
  for (int64_t value : values) Put(out, value);
}

// Takes values off the front of bytes. Once they do not suffice, ok() is false and what is taken is
// empty.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  int64_t Number() {
    int64_t value = 0;
    const absl::string_view bytes = Bytes(sizeof(value));
    if (ok_) std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
  std::string Text() { return std::string(Bytes(Number())); }
  std::vector<int64_t> Numbers() {
    std::vector<int64_t> values;
    for (int64_t count = Number(); ok_ && count > 0; --count) values.push_back(Number());
    return values;
  }

  bool ok() const { return ok_; }
  bool done() const { return rest_.empty(); }

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

}  // namespace

std::string Pack(const News& news) {
  std::string bytes;
  Put(bytes, static_cast<int64_t>(news.posted.size()));
  for (const News::Posted& call : news.posted) {
    Put(bytes, call.channel);
    Put(bytes, call.sequence);
    Put(bytes, call.text);
    Put(bytes, call.lengths.send);
    Put(bytes, call.lengths.recv);
  }
  Put(bytes, static_cast<int64_t>(news.left.size()));
  for (const std::string& channel : news.left) Put(bytes, channel);
  Put(bytes, static_cast<int64_t>(news.left_all));
  return bytes;
}

absl::StatusOr<News> Unpack(absl::string_view bytes) {
  News news;
  Reader reader(bytes);
  for (int64_t count = reader.Number(); reader.ok() && count > 0; --count) {
    News::Posted& call = news.posted.emplace_back();
    call.channel = reader.Text();
    call.sequence = reader.Number();
    call.text = reader.Text();
    call.lengths.send = reader.Numbers();
    call.lengths.recv = reader.Numbers();
  }
  for (int64_t count = reader.Number(); reader.ok() && count > 0; --count) {
    news.left.push_back(reader.Text());
  }
  news.left_all = reader.Number() != 0;
  if (!reader.ok() || !reader.done()) {
    return absl::InternalError("another process's report on its collectives cannot be read");
  }
  return news;
}

}  // namespace dim0
