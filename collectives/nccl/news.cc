#include "collectives/nccl/news.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "collectives/packing.h"

namespace dim0 {

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
    call.channel = std::string(reader.Text());
    call.sequence = reader.Number();
    call.text = std::string(reader.Text());
    call.lengths.send = reader.Numbers();
    call.lengths.recv = reader.Numbers();
  }
  for (int64_t count = reader.Number(); reader.ok() && count > 0; --count) {
    news.left.emplace_back(reader.Text());
  }
  news.left_all = reader.Number() != 0;
  if (!reader.done()) {
    return absl::InternalError("another process's report on its collectives cannot be read");
  }
  return news;
}

}  // namespace dim0
