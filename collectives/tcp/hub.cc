#include "collectives/tcp/hub.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "collectives/call_errors.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "collectives/tcp/socket.h"
#include "collectives/tcp/wire.h"

namespace dim0 {
namespace {

// A connection says which rank it is within this time and so many bytes, or is a stranger's.
constexpr absl::Duration kIntroduction = absl::Seconds(10);
constexpr int64_t kIntroductionBytes = 1024;
// Strangers beyond so many wait.
constexpr size_t kMaxStrangers = 256;
// How long the last words may take once rank 0 is gone.
constexpr absl::Duration kFarewell = absl::Seconds(2);

// Where the bytes for `to` lie in the offer of `from`'s data.
absl::string_view PieceFor(int to, const Offer& offer) {
  if (offer.lengths.empty()) return offer.data;
  int64_t begin = 0;
  for (int r = 0; r < to; ++r) begin += offer.lengths[r];
  return absl::string_view(offer.data).substr(begin, offer.lengths[to]);
}

}  // namespace

Hub::Hub(int world_size, const ProcessGroupOptions& options, std::string place, Socket listener,
         Socket own)
    : world_size_(world_size),
      timeout_(options.timeout),
      start_timeout_(options.start_timeout),
      place_(std::move(place)),
      started_(SteadyNow()),
      listener_(std::move(listener)),
      ranks_(world_size) {
  SetNonBlocking(own);
  connections_.emplace_back();
  connections_.back().socket = std::move(own);
  connections_.back().is_own = true;
  connections_.back().accepted = started_;
  thread_ = std::thread([this] { Run(); });
}

Hub::~Hub() { thread_.join(); }

void Hub::Run() {
  absl::Time end = absl::InfiniteFuture();
  for (;;) {
    if (ending_ && end == absl::InfiniteFuture()) end = SteadyNow() + kFarewell;
    std::vector<pollfd> polled;
    std::vector<Connection*> order;
    size_t strangers = 0;
    for (Connection& connection : connections_) {
      if (connection.rank < 0) ++strangers;
      const int events = POLLIN | (connection.out.empty() ? 0 : POLLOUT);
      polled.push_back({connection.socket.fd(), static_cast<short>(events), 0});
      order.push_back(&connection);
    }
    // Ranks that come yet get to know why the job did not come about.
    if (ending_ && order.empty() && refused_.ok()) return;
    if ((!ending_ || !refused_.ok()) && strangers < kMaxStrangers) {
      polled.push_back({listener_.fd(), POLLIN, 0});
    }
    const absl::Duration wait = std::clamp(std::min(NextDeadline(), end) - SteadyNow(),
                                           absl::ZeroDuration(), absl::Hours(1));
    // Rounded up, so that what is due is due afterwards.
    const int milliseconds = static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1;
    const int ready = poll(polled.data(), polled.size(), milliseconds);
    if (ready > 0) {
      for (size_t i = 0; i < order.size(); ++i) {
        if ((polled[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) Receive(*order[i]);
        if ((polled[i].revents & POLLOUT) != 0) Transmit(*order[i]);
      }
      if (polled.size() > order.size() && polled.back().revents != 0) Accept();
    }
    const absl::Time now = SteadyNow();
    CheckDeadlines(now);
    // What was said in this round goes out without waiting for the next one.
    for (Connection& connection : connections_) Transmit(connection);
    connections_.remove_if([](const Connection& connection) { return connection.gone; });
    if (now >= end) return;
  }
}

absl::Time Hub::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  if (!complete_ && refused_.ok()) next = started_ + start_timeout_;
  for (const Connection& connection : connections_) {
    if (connection.rank < 0 && !connection.is_own) {
      next = std::min(next, connection.accepted + kIntroduction);
    }
  }
  for (const auto& [name, channel] : channels_) {
    if (channel.arrived > 0) next = std::min(next, channel.since + timeout_);
  }
  return next;
}

void Hub::CheckDeadlines(absl::Time now) {
  if (!complete_ && refused_.ok() && now >= started_ + start_timeout_) {
    std::vector<int> missing;
    for (int r = 0; r < world_size_; ++r) {
      if (ranks_[r] == nullptr) missing.push_back(r);
    }
    RefuseAll(absl::DeadlineExceededError(
        absl::StrCat(RanksText(missing), " did not come to rank 0 at ", place_, " within ",
                     absl::FormatDuration(start_timeout_), "; see that all ", world_size_,
                     " ranks are started, with the same MASTER_ADDR and MASTER_PORT")));
  }
  for (Connection& connection : connections_) {
    if (connection.rank < 0 && !connection.is_own && now >= connection.accepted + kIntroduction) {
      Drop(connection);
    }
  }
  for (auto& [name, channel] : channels_) {
    if (channel.arrived == 0 || now < channel.since + timeout_) continue;
    std::vector<int> missing;
    for (int r = 0; r < world_size_; ++r) {
      if (channel.waiting[r] == nullptr) missing.push_back(r);
    }
    const int first = channel.first;
    Fail(name, channel,
         MissingError(NameOf(name, channel.offers[first]), missing, first, timeout_));
  }
}

void Hub::Accept() {
  Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.fd() < 0) {  // it has gone again, or there are too many files open: later
    absl::SleepFor(absl::Milliseconds(10));
    return;
  }
  Tune(socket);
  connections_.emplace_back();
  connections_.back().socket = std::move(socket);
  connections_.back().accepted = SteadyNow();
}

void Hub::Receive(Connection& connection) {
  char buffer[1 << 16];
  while (!connection.gone) {
    const ssize_t size = recv(connection.socket.fd(), buffer, sizeof(buffer), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (size <= 0) return Drop(connection);
    connection.in.Add(absl::string_view(buffer, size));
    if (connection.rank < 0 && connection.in.size() > kIntroductionBytes) return Drop(connection);
    while (!connection.gone && !connection.closing) {
      const std::optional<Frame> frame = connection.in.Next();
      if (!frame.has_value()) break;
      Handle(connection, *frame);
    }
    if (connection.in.broken()) return Drop(connection);
  }
}

void Hub::Transmit(Connection& connection) {
  while (!connection.gone && !connection.out.empty()) {
    const ssize_t sent =
        send(connection.socket.fd(), connection.out.data(), connection.out.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) return Drop(connection);
    connection.out.erase(0, sent);
  }
  if (connection.gone) return;
  // The peer closes in turn, when it has read all.
  if (connection.closing || (ending_ && connection.rank >= 0))
    (void)shutdown(connection.socket.fd(), SHUT_WR);
}

void Hub::Drop(Connection& connection) {
  if (std::exchange(connection.gone, true)) return;
  if (connection.is_own) ending_ = true;
  if (connection.rank < 0) return;
  const int rank = connection.rank;
  ranks_[rank] = nullptr;
  for (auto& [name, channel] : channels_) {
    if (channel.waiting[rank] == nullptr) continue;
    channel.waiting[rank] = nullptr;
    --channel.arrived;
  }
  if (!complete_) {
    RefuseAll(absl::UnavailableError(absl::StrCat(
        "rank ", rank, " has left before all ranks had come; look for the error on that rank")));
  }
  LeaveAll(rank);
}

void Hub::Send(Connection& connection, FrameKind kind, absl::string_view body) {
  if (!connection.gone && !connection.closing) connection.out += Encode(kind, body);
}

void Hub::Handle(Connection& connection, const Frame& frame) {
  if (connection.rank < 0) return Introduce(connection, frame);
  switch (frame.kind) {
    case FrameKind::kOffer: {
      std::optional<Offer> offer = UnpackOffer(frame.body, world_size_);
      if (!offer.has_value()) return Drop(connection);
      return Meet(connection, *std::move(offer));
    }
    case FrameKind::kLeaveChannel:
      return Leave(connection.rank, frame.body);
    case FrameKind::kLeave:
      return LeaveAll(connection.rank);
    case FrameKind::kAbort: {
      const std::optional<absl::Status> why = UnpackStatus(frame.body);
      if (!why.has_value() || why->ok()) return Drop(connection);
      return Abort(*why);
    }
    default:
      return Drop(connection);  // not for the hub
  }
}

void Hub::Introduce(Connection& connection, const Frame& frame) {
  const std::optional<Hello> hello =
      frame.kind == FrameKind::kHello ? UnpackHello(frame.body) : std::nullopt;
  if (!hello.has_value()) return Drop(connection);
  absl::Status wrong;
  if (hello->world_size != world_size_) {
    wrong = absl::InvalidArgumentError(
        absl::StrCat("rank ", hello->rank, " was started with WORLD_SIZE=", hello->world_size,
                     ", rank 0 with WORLD_SIZE=", world_size_, "; it must be the same everywhere"));
  } else if (hello->rank >= world_size_) {
    wrong = absl::InvalidArgumentError(absl::StrCat("a process was started with RANK=", hello->rank,
                                                    ", but ranks are 0 to ", world_size_ - 1));
  } else if (ranks_[hello->rank] != nullptr || (hello->rank == 0) != connection.is_own) {
    wrong = absl::InvalidArgumentError(
        absl::StrCat("two processes were started with RANK=", hello->rank, " for ", place_,
                     "; each rank must be started once, and each job needs a port of its own"));
  } else if (complete_) {
    wrong = absl::UnavailableError(absl::StrCat("rank ", hello->rank, " of the job at ", place_,
                                                " has left and cannot come back"));
  } else if (!refused_.ok()) {
    wrong = refused_;
  }
  if (!wrong.ok()) {
    Send(connection, FrameKind::kRefused, Pack(wrong));
    connection.closing = true;
    if (!complete_) RefuseAll(wrong);
    return;
  }
  connection.rank = hello->rank;
  ranks_[hello->rank] = &connection;
  if (++joined_ < world_size_) return;
  complete_ = true;
  for (Connection* rank : ranks_) Send(*rank, FrameKind::kWelcome, "");
}

void Hub::Meet(Connection& connection, Offer offer) {
  const int rank = connection.rank;
  const std::string name = offer.channel;
  Channel& channel = Find(name);
  if (!complete_ || channel.waiting[rank] != nullptr) return Drop(connection);  // out of turn
  if (channel.arrived == 0) {
    channel.first = rank;
    channel.since = SteadyNow();
  }
  channel.waiting[rank] = &connection;
  channel.offers[rank] = std::move(offer);
  ++channel.arrived;
  const Offer& own = channel.offers[rank];
  absl::Status status = WhyBroken(NameOf(name, own), channel);
  if (status.ok()) status = Compare(rank, name, channel);
  if (status.ok() && channel.arrived == world_size_) status = CheckLengths(name, channel);
  if (!status.ok()) return Fail(name, channel, status);
  if (channel.arrived == world_size_) Deliver(name, channel);
}

void Hub::Deliver(const std::string& name, Channel& channel) {
  for (int to = 0; to < world_size_; ++to) {
    Result result;
    result.channel = name;
    for (const Offer& offer : channel.offers) {
      const absl::string_view piece = PieceFor(to, offer);
      result.lengths.push_back(piece.size());
      result.data.append(piece.data(), piece.size());
    }
    Send(*std::exchange(channel.waiting[to], nullptr), FrameKind::kResult, Pack(result));
  }
  channel.arrived = 0;
  channel.offers.assign(world_size_, {});
}

absl::Status Hub::WhyBroken(const CallName& call, const Channel& channel) const {
  if (!channel.failure.ok()) return channel.failure;
  if (!aborted_.ok()) return aborted_;
  if (channel.left.empty()) return absl::OkStatus();
  return LeftError(call, channel.left.front());
}

absl::Status Hub::Compare(int rank, const std::string& name, const Channel& channel) const {
  // All who arrived before agree with one another.
  const Offer& own = channel.offers[rank];
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank || channel.waiting[r] == nullptr) continue;
    const Offer& other = channel.offers[r];
    if (own.text == other.text && own.sequence == other.sequence) break;
    return DisagreementError(rank, NameOf(name, own), r, NameOf(name, other));
  }
  return absl::OkStatus();
}

absl::Status Hub::CheckLengths(const std::string& name, const Channel& channel) const {
  for (int from = 0; from < world_size_; ++from) {
    const Offer& offer = channel.offers[from];
    for (int to = 0; to < world_size_; ++to) {
      const std::vector<int64_t>& expected = channel.offers[to].expected;
      const int64_t sent = PieceFor(to, offer).size();
      if (expected.empty() || expected[from] == sent) continue;
      return LengthsError(NameOf(name, offer), from, to, sent / offer.unit,
                          expected[from] / offer.unit);
    }
  }
  return absl::OkStatus();
}

void Hub::Fail(const std::string& name, Channel& channel, const absl::Status& why) {
  const std::string body = Pack(name, why);
  // What lasts otherwise, an abort or a rank that left, is told to each call in its own words. This
  // is told to all at once: rank 0, and the hub with it, may be gone before their next call.
  const bool is_new = channel.failure.ok() && aborted_.ok() && channel.left.empty();
  if (is_new) channel.failure = why;
  for (int r = 0; r < world_size_; ++r) {
    const bool waits = std::exchange(channel.waiting[r], nullptr) != nullptr;
    if (ranks_[r] != nullptr && (waits || is_new)) Send(*ranks_[r], FrameKind::kFailed, body);
  }
  channel.arrived = 0;
}

void Hub::Leave(int rank, const std::string& name) {
  Channel& channel = Find(name);
  if (std::find(channel.left.begin(), channel.left.end(), rank) != channel.left.end()) return;
  channel.left.push_back(rank);
  if (channel.arrived == 0) return;
  const Offer& waiting = channel.offers[std::find_if(channel.waiting.begin(), channel.waiting.end(),
                                                     [](auto* w) { return w != nullptr; }) -
                                        channel.waiting.begin()];
  Fail(name, channel, WhyBroken(NameOf(name, waiting), channel));
}

void Hub::LeaveAll(int rank) {
  if (std::find(left_.begin(), left_.end(), rank) != left_.end()) return;
  left_.push_back(rank);
  for (const auto& entry : channels_) Leave(rank, entry.first);
  for (Connection* other : ranks_) {
    if (other != nullptr) Send(*other, FrameKind::kLeft, Pack(rank));
  }
}

void Hub::Abort(const absl::Status& why) {
  if (!aborted_.ok()) return;
  aborted_ = why;
  for (Connection* rank : ranks_) {
    if (rank != nullptr) Send(*rank, FrameKind::kAborted, Pack(why));
  }
  for (auto& [name, channel] : channels_) {
    if (channel.arrived > 0) Fail(name, channel, why);
  }
}

void Hub::RefuseAll(const absl::Status& why) {
  if (!refused_.ok()) return;
  refused_ = why;
  for (Connection* rank : ranks_) {
    if (rank == nullptr) continue;
    Send(*rank, FrameKind::kRefused, Pack(why));
    rank->closing = true;
  }
}

Hub::Channel& Hub::Find(const std::string& name) {
  const auto [found, is_new] = channels_.try_emplace(name);
  if (is_new) {
    found->second.waiting.resize(world_size_);
    found->second.offers.resize(world_size_);
    found->second.left = left_;
  }
  return found->second;
}

}  // namespace dim0
