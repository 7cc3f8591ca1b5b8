// What ranks of different processes and the hub say to each other: frames of a length, a kind and a
// body of packed values.
#ifndef DIM0_COLLECTIVES_TCP_WIRE_H_
#define DIM0_COLLECTIVES_TCP_WIRE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dim0 {

enum class FrameKind : uint8_t {
  // A rank's.
  kHello,         // the first frame: Hello
  kOffer,         // Offer
  kLeaveChannel,  // the channel's name
  kLeave,         // nothing: all channels
  kAbort,         // a status
  // The hub's.
  kWelcome,  // nothing: every rank has come
  kRefused,  // a status: the rank will not be welcomed
  kResult,   // Result
  kFailed,   // the channel's name and a status: in place of a result, or of all to come
  kAborted,  // a status: of all later calls
  kLeft,     // a rank, as a number: from all channels
};

struct Frame {
  FrameKind kind = FrameKind::kHello;
  std::string body;
};

// A rank introduces itself.
struct Hello {
  int rank = 0;
  int world_size = 0;
};

// A rank's side of a call. `lengths` are the bytes for each rank, which lie one after another in
// `data`; or all of `data` is for every rank, if there are none. `expected` are the bytes that the
// rank will take from each rank; none: any number.
struct Offer {
  std::string channel;
  int64_t sequence = 0;
  std::string text;
  std::vector<int64_t> lengths, expected;
  int64_t unit = 1;  // bytes of an element, for errors
  std::string data;
};

// What each rank had for the receiver, in rank order one after another in `data`.
struct Result {
  std::string channel;
  std::vector<int64_t> lengths;
  std::string data;
};

// A frame's bytes.
std::string Encode(FrameKind kind, absl::string_view body);

std::string Pack(const Hello& hello);
std::string Pack(const Offer& offer);
std::string Pack(const Result& result);
std::string Pack(const absl::Status& status);
std::string Pack(absl::string_view channel, const absl::Status& status);
std::string Pack(int rank);

// Nothing if the body is not what Pack makes. Offers and results are checked to be consistent:
// lengths are not negative and add up to the data.
std::optional<Hello> UnpackHello(absl::string_view body);
std::optional<Offer> UnpackOffer(absl::string_view body, int world_size);
std::optional<Result> UnpackResult(absl::string_view body, int world_size);
std::optional<absl::Status> UnpackStatus(absl::string_view body);
std::optional<int> UnpackRank(absl::string_view body, int world_size);
// Sets *channel.
std::optional<absl::Status> UnpackStatus(absl::string_view body, std::string* channel);

// Cuts a stream of bytes into frames.
class FrameReader {
 public:
  void Add(absl::string_view bytes) { bytes_.append(bytes.data(), bytes.size()); }

  // Bytes that no frame has been made of yet.
  int64_t size() const { return static_cast<int64_t>(bytes_.size() - begin_); }

  // The next frame, if it is complete.
  std::optional<Frame> Next();
  // The bytes cannot be frames.
  bool broken() const { return broken_; }

 private:
  std::string bytes_;
  size_t begin_ = 0;  // what is before has been handed out
  bool broken_ = false;
};

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_TCP_WIRE_H_
