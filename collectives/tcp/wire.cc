#include "collectives/tcp/wire.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "collectives/packing.h"

namespace dim0 {
namespace {

// Before a frame's body.
struct Head {
  uint32_t magic;
  uint32_t kind;
  uint64_t size;  // of the body
};
// "dim0" and the version of this protocol.
constexpr uint32_t kMagic = 0x64'30'00'01;
// No exchange between hosts comes near; garbage does.
constexpr uint64_t kMaxSize = uint64_t{1} << 36;

bool AddUp(const std::vector<int64_t>& lengths, size_t bytes) {
  size_t sum = 0;
  for (int64_t length : lengths) {
    if (length < 0 || static_cast<size_t>(length) > bytes - sum) return false;
    sum += static_cast<size_t>(length);
  }
  return sum == bytes;
}

std::optional<absl::Status> TakeStatus(Reader& reader) {
  const int64_t code = reader.Number();
  const absl::string_view message = reader.Text();
  if (!reader.done()) return std::nullopt;
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

}  // namespace

std::string Encode(FrameKind kind, absl::string_view body) {
  const Head head = {kMagic, static_cast<uint32_t>(kind), body.size()};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof(head));
  bytes.append(body.data(), body.size());
  return bytes;
}

std::string Pack(const Hello& hello) {
  std::string body;
  Put(body, int64_t{hello.rank});
  Put(body, int64_t{hello.world_size});
  return body;
}

std::string Pack(const Offer& offer) {
  std::string body;
  Put(body, offer.channel);
  Put(body, offer.sequence);
  Put(body, offer.text);
  Put(body, offer.lengths);
  Put(body, offer.expected);
  Put(body, offer.unit);
  Put(body, offer.data);
  return body;
}

std::string Pack(const Result& result) {
  std::string body;
  Put(body, result.channel);
  Put(body, result.lengths);
  Put(body, result.data);
  return body;
}

std::string Pack(const absl::Status& status) {
  std::string body;
  Put(body, int64_t{static_cast<int>(status.code())});
  Put(body, status.message());
  return body;
}

std::string Pack(absl::string_view channel, const absl::Status& status) {
  std::string body;
  Put(body, channel);
  return body + Pack(status);
}

std::string Pack(int rank) {
  std::string body;
  Put(body, int64_t{rank});
  return body;
}

std::optional<Hello> UnpackHello(absl::string_view body) {
  Reader reader(body);
  const int64_t rank = reader.Number(), world_size = reader.Number();
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  if (!reader.done() || rank < 0 || rank > kMax || world_size < 1 || world_size > kMax) {
    return std::nullopt;
  }
  return Hello{static_cast<int>(rank), static_cast<int>(world_size)};
}

std::optional<Offer> UnpackOffer(absl::string_view body, int world_size) {
  Reader reader(body);
  Offer offer;
  offer.channel = std::string(reader.Text());
  offer.sequence = reader.Number();
  offer.text = std::string(reader.Text());
  offer.lengths = reader.Numbers();
  offer.expected = reader.Numbers();
  offer.unit = reader.Number();
  offer.data = std::string(reader.Text());
  const size_t ranks = static_cast<size_t>(world_size);
  if (!reader.done() || offer.unit < 1) return std::nullopt;
  if (!offer.expected.empty() && offer.expected.size() != ranks) return std::nullopt;
  if (!offer.lengths.empty() &&
      (offer.lengths.size() != ranks || !AddUp(offer.lengths, offer.data.size()))) {
    return std::nullopt;
  }
  return offer;
}

std::optional<Result> UnpackResult(absl::string_view body, int world_size) {
  Reader reader(body);
  Result result;
  result.channel = std::string(reader.Text());
  result.lengths = reader.Numbers();
  result.data = std::string(reader.Text());
  if (!reader.done() || result.lengths.size() != static_cast<size_t>(world_size) ||
      !AddUp(result.lengths, result.data.size())) {
    return std::nullopt;
  }
  return result;
}

std::optional<absl::Status> UnpackStatus(absl::string_view body) {
  Reader reader(body);
  return TakeStatus(reader);
}

std::optional<absl::Status> UnpackStatus(absl::string_view body, std::string* channel) {
  Reader reader(body);
  *channel = std::string(reader.Text());
  return TakeStatus(reader);
}

std::optional<int> UnpackRank(absl::string_view body, int world_size) {
  Reader reader(body);
  const int64_t rank = reader.Number();
  if (!reader.done() || rank < 0 || rank >= world_size) return std::nullopt;
  return static_cast<int>(rank);
}

std::optional<Frame> FrameReader::Next() {
  if (bytes_.size() - begin_ < sizeof(Head)) return std::nullopt;
  Head head;
  std::memcpy(&head, bytes_.data() + begin_, sizeof(head));
  if (head.magic != kMagic || head.kind > static_cast<uint32_t>(FrameKind::kLeft) ||
      head.size > kMaxSize) {
    broken_ = true;
    return std::nullopt;
  }
  if (bytes_.size() - begin_ - sizeof(head) < head.size) {
    bytes_.erase(0, std::exchange(begin_, 0));
    return std::nullopt;
  }
  Frame frame = {static_cast<FrameKind>(head.kind),
                 bytes_.substr(begin_ + sizeof(head), head.size)};
  begin_ += sizeof(head) + head.size;
  return frame;
}

}  // namespace dim0
