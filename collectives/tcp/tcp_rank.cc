// A rank as a process: its connection to the hub in rank 0's process, and channels over it. A call
// offers what the rank has for each other rank, and gets what each has for it; sums are made by who
// wants them, in rank order, so that ranks of any backend round alike.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/call_errors.h"
#include "collectives/communicator.h"
#include "collectives/dtype.h"
#include "collectives/launch.h"
#include "collectives/ledger.h"
#include "collectives/process_group.h"
#include "collectives/reduce.h"
#include "collectives/steady_clock.h"
#include "collectives/tcp/hub.h"
#include "collectives/tcp/socket.h"
#include "collectives/tcp/wire.h"

namespace dim0 {
namespace {

// The hub tells of deadlines. That it does not is told after so much longer.
constexpr absl::Duration kPatience = absl::Seconds(10);
// How long the hub may take to see that the rank closes its connection.
constexpr absl::Duration kFarewell = absl::Seconds(2);

// A rank's connection to the hub. Kept alive by its group and communicators. Thread-safe.
class Line {
 public:
  // `hub` is there for rank 0 and ends with the connection.
  Line(int rank, int world_size, absl::Duration timeout, std::string place, Socket socket,
       std::unique_ptr<Hub> hub)
      : rank(rank),
        world_size(world_size),
        timeout(timeout),
        ledger(std::make_shared<ByteLedger>()),
        place_(std::move(place)),
        hub_(std::move(hub)),
        socket_(std::move(socket)) {
    reader_ = std::thread([this] { Read(); });
  }

  ~Line() {
    // What was sent last must be read before the connection is closed.
    (void)shutdown(socket_.fd(), SHUT_WR);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, absl::ToChronoMilliseconds(kFarewell), [&] { return lost_; });
    }
    (void)shutdown(socket_.fd(), SHUT_RDWR);
    reader_.join();
  }

  const int rank;
  const int world_size;
  const absl::Duration timeout;
  const std::shared_ptr<ByteLedger> ledger;

  // Waits until all ranks have come.
  absl::Status Join(absl::Time deadline) {
    (void)Send(FrameKind::kHello, Pack(Hello{rank, world_size}));
    std::unique_lock<std::mutex> lock(mutex_);
    WaitUntil(lock, deadline + kPatience, [&] { return welcome_.has_value() || lost_; });
    if (welcome_.has_value()) return *welcome_;
    if (lost_) {
      return absl::UnavailableError(
          absl::StrCat("the connection to ", place_,
                       " was closed before all ranks had come; see that rank 0 of "
                       "this job, and nothing else, listens there"));
    }
    return absl::DeadlineExceededError(
        absl::StrCat("rank 0 at ", place_,
                     " does not answer; see that rank 0 of this job, and "
                     "nothing else, listens there"));
  }

  absl::Status Send(FrameKind kind, absl::string_view body) {
    std::lock_guard<std::mutex> lock(sending_);
    return SendAll(socket_, Encode(kind, body));
  }

  // Whether it was not opened before.
  bool Open(absl::string_view channel) {
    std::lock_guard<std::mutex> lock(mutex_);
    return opened_.emplace(channel).second;
  }

  absl::Status aborted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return aborted_;
  }

  // Hands the offer to the hub and waits for what it gives in return.
  absl::StatusOr<Result> Meet(const Offer& offer) {
    const CallName call{offer.text, offer.sequence, offer.channel};
    std::optional<absl::StatusOr<Result>> answer;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (lost_) return Lost(call);
      waiting_[offer.channel] = &answer;
    }
    // If it cannot be sent, what the hub said last is still to be read.
    (void)Send(FrameKind::kOffer, Pack(offer));
    std::unique_lock<std::mutex> lock(mutex_);
    WaitUntil(lock, SteadyNow() + timeout + kPatience, [&] { return answer.has_value() || lost_; });
    waiting_.erase(offer.channel);
    if (answer.has_value()) return *std::move(answer);
    if (lost_) return Lost(call);
    return MissingError(call, {0}, rank, timeout);
  }

 private:
  template <typename Condition>
  void WaitUntil(std::unique_lock<std::mutex>& lock, absl::Time deadline, Condition condition) {
    while (!condition()) {
      const absl::Duration left = deadline - SteadyNow();
      if (left <= absl::ZeroDuration()) return;
      changed_.wait_for(lock, absl::ToChronoNanoseconds(std::min(left, absl::Hours(1))));
    }
  }

  // Why the call fails without a hub: what the hub said last, in the order in which it would have
  // answered.
  absl::Status Lost(const CallName& call) const {
    if (const auto failed = failed_.find(call.channel); failed != failed_.end()) {
      return failed->second;
    }
    return aborted_.ok() ? LeftError(call, first_left_.value_or(0)) : aborted_;
  }

  void Read() {
    std::vector<char> buffer(1 << 16);
    FrameReader frames;
    bool fine = true;
    while (fine) {
      const ssize_t size = recv(socket_.fd(), buffer.data(), buffer.size(), 0);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) break;
      frames.Add(absl::string_view(buffer.data(), size));
      while (fine) {
        const std::optional<Frame> frame = frames.Next();
        if (!frame.has_value()) break;
        fine = Handle(*frame);
      }
      fine = fine && !frames.broken();
    }
    // So that the hub need not wait for a rank that has heard all there is to hear.
    (void)shutdown(socket_.fd(), SHUT_RDWR);
    std::lock_guard<std::mutex> lock(mutex_);
    lost_ = true;
    changed_.notify_all();
  }

  // False for what the hub does not say.
  bool Handle(const Frame& frame) {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
    switch (frame.kind) {
      case FrameKind::kWelcome:
        welcome_ = absl::OkStatus();
        return true;
      case FrameKind::kRefused:
        welcome_ = UnpackStatus(frame.body);
        return welcome_.has_value();
      case FrameKind::kAborted:
        if (std::optional<absl::Status> why = UnpackStatus(frame.body); why.has_value()) {
          aborted_ = *why;
          return true;
        }
        return false;
      case FrameKind::kResult:
        if (std::optional<Result> result = UnpackResult(frame.body, world_size);
            result.has_value()) {
          const std::string channel = result->channel;
          return Answer(channel, *std::move(result));
        }
        return false;
      case FrameKind::kFailed: {
        std::string channel;
        const std::optional<absl::Status> why = UnpackStatus(frame.body, &channel);
        if (!why.has_value() || why->ok()) return false;
        failed_.try_emplace(channel, *why);
        return Answer(channel, *why);
      }
      case FrameKind::kLeft: {
        const std::optional<int> rank = UnpackRank(frame.body, world_size);
        if (!first_left_.has_value()) first_left_ = rank;
        return rank.has_value();
      }
      default:
        return false;
    }
  }

  bool Answer(const std::string& channel, absl::StatusOr<Result> answer) {
    // The caller may have given up, or may not have taken its answer yet.
    const auto found = waiting_.find(channel);
    if (found != waiting_.end() && !found->second->has_value()) *found->second = std::move(answer);
    return true;
  }

  const std::string place_;
  const std::unique_ptr<Hub> hub_;  // goes after the socket, whose end it waits for
  const Socket socket_;
  std::mutex sending_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<absl::Status> welcome_;
  absl::Status aborted_;
  std::map<std::string, absl::Status, std::less<>> failed_;  // by channel
  std::optional<int> first_left_;
  bool lost_ = false;  // nothing more will come
  std::set<std::string, std::less<>> opened_;
  std::map<std::string, std::optional<absl::StatusOr<Result>>*> waiting_;  // by channel
  std::thread reader_;
};

class TcpCommunicator final : public Communicator {
 public:
  TcpCommunicator(std::shared_ptr<Line> line, absl::string_view name,
                  std::shared_ptr<ByteLedger> ledger)
      : Communicator(std::string(name), line->rank, line->world_size, std::move(ledger)),
        line_(std::move(line)) {}

  ~TcpCommunicator() override { (void)line_->Send(FrameKind::kLeaveChannel, name()); }

 private:
  absl::Status DoAllGather(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                           absl::Span<const AllGatherPart> parts) override {
    Offer offer;
    for (const AllGatherPart& part : parts) {
      Append(offer.data, dtype, part.send, part.counts[rank()]);
    }
    absl::StatusOr<Result> result = Meet(fingerprint, dtype, std::move(offer));
    if (!result.ok()) return result.status();
    const char* from = result->data.data();
    std::vector<int64_t> offsets(parts.size());
    for (int r = 0; r < world_size(); ++r) {
      for (size_t p = 0; p < parts.size(); ++p) {
        const int64_t count = parts[p].counts[r];
        from = Take(from, dtype, At(parts[p].recv, dtype, offsets[p]), count);
        offsets[p] += count;
      }
    }
    return absl::OkStatus();
  }

  absl::Status DoReduceScatter(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                               absl::Span<const ReduceScatterPart> parts) override {
    Offer offer;
    std::vector<int64_t> offsets(parts.size());
    for (int r = 0; r < world_size(); ++r) {
      const size_t before = offer.data.size();
      for (size_t p = 0; p < parts.size(); ++p) {
        const int64_t count = parts[p].counts[r];
        Append(offer.data, dtype, At(parts[p].send, dtype, offsets[p]), count);
        offsets[p] += count;
      }
      offer.lengths.push_back(offer.data.size() - before);
    }
    absl::StatusOr<Result> result = Meet(fingerprint, dtype, std::move(offer));
    if (!result.ok()) return result.status();
    std::vector<const void*> sources = Sources(*result);
    for (const ReduceScatterPart& part : parts) {
      const int64_t count = part.counts[rank()];
      if (count == 0) continue;
      ReduceInOrder(dtype, ReduceOp::kSum, sources, part.recv, count, part.accumulate);
      for (const void*& source : sources) source = At(source, dtype, count);
    }
    return absl::OkStatus();
  }

  absl::Status DoAllReduce(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                           ReduceOp op, void* data, int64_t count) override {
    Offer offer;
    Append(offer.data, dtype, data, count);
    absl::StatusOr<Result> result = Meet(fingerprint, dtype, std::move(offer));
    if (!result.ok()) return result.status();
    if (count > 0) {
      ReduceInOrder(dtype, op, Sources(*result), data, count, /*accumulate=*/false);
    }
    return absl::OkStatus();
  }

  absl::Status DoBroadcast(const CallInfo&, const Fingerprint& fingerprint, DType dtype, void* data,
                           int64_t count, int root) override {
    Offer offer;
    if (rank() == root) Append(offer.data, dtype, data, count);
    absl::StatusOr<Result> result = Meet(fingerprint, dtype, std::move(offer));
    if (!result.ok()) return result.status();
    if (rank() != root) Take(result->data.data(), dtype, data, count);
    return absl::OkStatus();
  }

  absl::Status DoGather(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                        const void* send, void* recv, absl::Span<const int64_t> counts,
                        int root) override {
    Offer offer;
    offer.lengths.resize(world_size());
    Append(offer.data, dtype, send, counts[rank()]);
    offer.lengths[root] = offer.data.size();
    absl::StatusOr<Result> result = Meet(fingerprint, dtype, std::move(offer));
    if (!result.ok()) return result.status();
    if (rank() != root) return absl::OkStatus();
    int64_t total = 0;
    for (int64_t count : counts) total += count;
    Take(result->data.data(), dtype, recv, total);
    return absl::OkStatus();
  }

  absl::Status DoScatter(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                         const void* send, void* recv, absl::Span<const int64_t> counts,
                         int root) override {
    Offer offer;
    if (rank() == root) {
      int64_t offset = 0;
      for (int64_t count : counts) {
        Append(offer.data, dtype, At(send, dtype, offset), count);
        offer.lengths.push_back(count * SizeOf(dtype));
        offset += count;
      }
    }
    absl::StatusOr<Result> result = Meet(fingerprint, dtype, std::move(offer));
    if (!result.ok()) return result.status();
    Take(result->data.data(), dtype, recv, counts[rank()]);
    return absl::OkStatus();
  }

  absl::Status DoAllToAll(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                          absl::Span<const ConstSegment> send,
                          absl::Span<const Segment> recv) override {
    Offer offer;
    for (int r = 0; r < world_size(); ++r) {
      Append(offer.data, dtype, send[r].data, send[r].count);
      offer.lengths.push_back(send[r].count * SizeOf(dtype));
      offer.expected.push_back(recv[r].count * SizeOf(dtype));
    }
    absl::StatusOr<Result> result = Meet(fingerprint, dtype, std::move(offer));
    if (!result.ok()) return result.status();
    const char* from = result->data.data();
    for (const Segment& segment : recv) from = Take(from, dtype, segment.data, segment.count);
    return absl::OkStatus();
  }

  absl::Status DoBarrier(const CallInfo&, const Fingerprint& fingerprint) override {
    return Meet(fingerprint, DType::kByte, {}).status();
  }

  static char* At(void* data, DType dtype, int64_t element) {
    return static_cast<char*>(data) + element * SizeOf(dtype);
  }
  static const char* At(const void* data, DType dtype, int64_t element) {
    return static_cast<const char*>(data) + element * SizeOf(dtype);
  }

  static void Append(std::string& out, DType dtype, const void* data, int64_t count) {
    if (count > 0) out.append(static_cast<const char*>(data), count * SizeOf(dtype));
  }
  // Returns what lies behind the elements taken.
  static const char* Take(const char* from, DType dtype, void* to, int64_t count) {
    if (count > 0) std::memcpy(to, from, count * SizeOf(dtype));
    return from + count * SizeOf(dtype);
  }

  // Where each rank's data begins. It is aligned to its element type, since a string's memory is
  // and every piece holds whole elements.
  static std::vector<const void*> Sources(const Result& result) {
    std::vector<const void*> sources;
    const char* from = result.data.data();
    for (int64_t length : result.lengths) {
      sources.push_back(from);
      from += length;
    }
    return sources;
  }

  // The ranks agree on the call when this succeeds, and so on all lengths.
  absl::StatusOr<Result> Meet(const Fingerprint& fingerprint, DType dtype, Offer offer) {
    offer.channel = name();
    offer.sequence = fingerprint.sequence;
    offer.text = fingerprint.text;
    offer.unit = SizeOf(dtype);
    absl::StatusOr<Result> result = line_->Meet(offer);
    if (result.ok()) AllArrived();
    return result;
  }

  const std::shared_ptr<Line> line_;
};

class TcpProcessGroup final : public ProcessGroup {
 public:
  explicit TcpProcessGroup(std::shared_ptr<Line> line) : line_(std::move(line)) {}

  ~TcpProcessGroup() override { (void)line_->Send(FrameKind::kLeave, ""); }

  int rank() const override { return line_->rank; }
  int world_size() const override { return line_->world_size; }
  const ByteLedger& ledger() const override { return *line_->ledger; }

  // The ranks' memory is the host's.
  absl::StatusOr<std::unique_ptr<Communicator>> Open(absl::string_view name) override {
    return OpenHost(name, nullptr);
  }

  absl::StatusOr<std::unique_ptr<Communicator>> OpenHost(
      absl::string_view name, std::shared_ptr<ByteLedger> ledger) override {
    if (!line_->Open(name)) return OpenedBeforeError(rank(), name);
    return std::make_unique<TcpCommunicator>(line_, name,
                                             ledger != nullptr ? std::move(ledger) : line_->ledger);
  }

  void Abort(const absl::Status& why) override {
    (void)line_->Send(FrameKind::kAbort, Pack(AbortReason(rank(), why)));
  }

  absl::Status Health() override { return line_->aborted(); }

 private:
  const std::shared_ptr<Line> line_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateTcpRank(const Launch& launch,
                                                            const ProcessGroupOptions& options) {
  for (absl::Duration timeout : {options.timeout, options.start_timeout}) {
    if (absl::Status status = CheckTimeout(timeout); !status.ok()) return status;
  }
  if (options.link.has_value()) {
    return absl::InvalidArgumentError(
        "a link is simulated between ranks of one process only; processes have the network that "
        "they have");
  }
  if (launch.world_size < 1 || launch.rank < 0 || launch.rank >= launch.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", launch.rank, " of ", launch.world_size,
                                                   " ranks; ranks are 0 to the number of ranks "
                                                   "less 1"));
  }
  const bool alone = launch.world_size == 1;
  if (!alone && (launch.port < 1 || launch.port > 65535)) {
    return absl::InvalidArgumentError(
        absl::StrCat("port ", launch.port, "; it must be a number from 1 to 65535"));
  }
  const absl::Time deadline = SteadyNow() + options.start_timeout;
  const std::string place = absl::StrCat(launch.address, ":", launch.port);
  Socket socket;
  std::unique_ptr<Hub> hub;
  if (launch.rank == 0) {
    absl::StatusOr<Socket> listener = Socket();
    if (!alone) listener = Listen(launch.address, launch.port);
    if (!listener.ok()) return listener.status();
    absl::StatusOr<std::pair<Socket, Socket>> pair = SocketPair();
    if (!pair.ok()) return pair.status();
    socket = std::move(pair->first);
    hub = std::make_unique<Hub>(launch.world_size, options, place, *std::move(listener),
                                std::move(pair->second));
  } else {
    absl::StatusOr<Socket> connected = Connect(launch.address, launch.port, deadline);
    if (!connected.ok()) return connected.status();
    socket = *std::move(connected);
    Tune(socket);
  }
  auto line = std::make_shared<Line>(launch.rank, launch.world_size, options.timeout, place,
                                     std::move(socket), std::move(hub));
  if (absl::Status joined = line->Join(deadline); !joined.ok()) return joined;
  return std::make_unique<TcpProcessGroup>(std::move(line));
}

}  // namespace dim0
