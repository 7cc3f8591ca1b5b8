// Ranks as threads of one process. There is nothing to send: a rank can read another's buffers. So
// a collective is a meeting. Every rank offers its buffers and waits until all have (Arrive); each
// then copies or sums what it needs straight out of the others' buffers; nobody returns before all
// have finished (Sync), since a returning caller may reuse its buffers.
//
// Only Arrive can fail. Once all ranks are inside a call, what is left is copying, which always
// ends; so the data moves for every rank or for none, and no rank is ever left reading a buffer
// whose owner has given up. Whatever makes Arrive fail lasts (the channel is broken, the job is
// aborted, a rank is gone) and is looked at before anything else, so the offers of a failed call
// are never read.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
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
#include "collectives/ledger.h"
#include "collectives/process_group.h"
#include "collectives/reduce.h"

namespace dim0 {
namespace {

// What a rank in a call lets the others see. It points into the caller's frame and is valid from
// the rank's Arrive to its last Sync.
struct Offer {
  bool present = false;  // false: the rank has not arrived
  int64_t sequence = 0;
  absl::string_view text;               // the call in words
  absl::Span<const ConstSegment> send;  // what the others may read
  absl::Span<const Segment> recv;       // all-to-all: what the rank expects from each other
};

// All ranks' side of the channel of one name. World::mutex guards it, except that during a call a
// rank reads the others' offers without it.
struct Channel {
  Channel(absl::string_view name, int world_size, std::vector<int> left)
      : name(name), opened(world_size), left(std::move(left)), offers(world_size) {}

  const std::string name;
  std::vector<bool> opened;   // by rank
  std::vector<int> left;      // ranks, the first to leave first
  std::vector<Offer> offers;  // by rank
  int waiting = 0;            // ranks at the current meeting point
  int64_t meetings = 0;       // meeting points that all ranks have passed
  absl::Status failure;
  std::condition_variable changed;
};

// What the ranks of one job share. Kept alive by every group and communicator.
struct World {
  World(int size, const ProcessGroupOptions& options)
      : size(size), timeout(options.timeout), ledgers(size) {
    for (int rank = 0; options.link && rank < size; ++rank) links.emplace_back(*options.link);
  }

  const int size;
  const absl::Duration timeout;
  std::vector<ByteLedger> ledgers;  // by rank; not guarded
  std::deque<Link> links;           // by rank, or none; not guarded

  // One mutex for all channels: it is held for moments, never while data moves.
  std::mutex mutex;
  std::map<std::string, Channel, std::less<>> channels;
  std::vector<int> left;  // ranks whose groups are gone, the first to leave first
  absl::Status aborted;
};

void Copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

char* At(void* data, DType dtype, int64_t element) {
  return static_cast<char*>(data) + element * SizeOf(dtype);
}
const char* At(const void* data, DType dtype, int64_t element) {
  return static_cast<const char*>(data) + element * SizeOf(dtype);
}

class ThreadCommunicator final : public Communicator {
 public:
  // `ledger`: the rank's if null.
  ThreadCommunicator(std::shared_ptr<World> world, Channel* channel, int rank,
                     std::shared_ptr<ByteLedger> ledger)
      : Communicator(channel->name, rank, world->size,
                     ledger != nullptr ? std::move(ledger)
                                       : std::shared_ptr<ByteLedger>(world, &world->ledgers[rank]),
                     world->links.empty() ? nullptr : &world->links[rank]),
        world_(std::move(world)),
        channel_(*channel) {}

  ~ThreadCommunicator() override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    channel_.left.push_back(rank());
    channel_.changed.notify_all();
  }

 private:
  absl::Status DoAllGather(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                           absl::Span<const AllGatherPart> parts) override {
    std::vector<ConstSegment> send;
    for (const AllGatherPart& part : parts) send.push_back({part.send, part.counts[rank()]});
    if (absl::Status met = Arrive(fingerprint, send); !met.ok()) return met;
    for (size_t p = 0; p < parts.size(); ++p) {
      int64_t offset = 0;
      for (int r = 0; r < world_size(); ++r) {
        const ConstSegment& shard = Offered(r).send[p];
        Copy(At(parts[p].recv, dtype, offset), shard.data, shard.count * SizeOf(dtype));
        offset += shard.count;
      }
    }
    Sync();
    return absl::OkStatus();
  }

  absl::Status DoReduceScatter(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                               absl::Span<const ReduceScatterPart> parts) override {
    std::vector<ConstSegment> send;
    for (const ReduceScatterPart& part : parts) send.push_back({part.send, /*count=*/0});
    if (absl::Status met = Arrive(fingerprint, send); !met.ok()) return met;
    for (size_t p = 0; p < parts.size(); ++p) {
      const ReduceScatterPart& part = parts[p];
      int64_t offset = 0;
      for (int64_t count : part.counts.first(rank())) offset += count;
      ReduceOffered(dtype, ReduceOp::kSum, p, offset, part.counts[rank()], part.recv,
                    part.accumulate);
    }
    Sync();
    return absl::OkStatus();
  }

  absl::Status DoAllReduce(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                           ReduceOp op, void* data, int64_t count) override {
    const ConstSegment send{data, count};
    if (absl::Status met = Arrive(fingerprint, {&send, 1}); !met.ok()) return met;
    // Each rank overwrites only its own chunk, which no other rank reads before the next meeting.
    const int64_t begin = ChunkBegin(count, rank());
    ReduceOffered(dtype, op, /*part=*/0, begin, ChunkBegin(count, rank() + 1) - begin,
                  At(data, dtype, begin), /*accumulate=*/false);
    Sync();
    for (int r = 0; r < world_size(); ++r) {
      const int64_t chunk = ChunkBegin(count, r);
      Copy(At(data, dtype, chunk), At(Offered(r).send[0].data, dtype, chunk),
           (ChunkBegin(count, r + 1) - chunk) * SizeOf(dtype));
    }
    Sync();
    return absl::OkStatus();
  }

  absl::Status DoBroadcast(const CallInfo&, const Fingerprint& fingerprint, DType dtype, void* data,
                           int64_t count, int root) override {
    const ConstSegment send{data, count};
    if (absl::Status met = Arrive(fingerprint, {&send, 1}); !met.ok()) return met;
    Copy(data, Offered(root).send[0].data, count * SizeOf(dtype));
    Sync();
    return absl::OkStatus();
  }

  absl::Status DoGather(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                        const void* send, void* recv, absl::Span<const int64_t> counts,
                        int root) override {
    const ConstSegment own{send, counts[rank()]};
    if (absl::Status met = Arrive(fingerprint, {&own, 1}); !met.ok()) return met;
    if (rank() == root) {
      int64_t offset = 0;
      for (int r = 0; r < world_size(); ++r) {
        Copy(At(recv, dtype, offset), Offered(r).send[0].data, counts[r] * SizeOf(dtype));
        offset += counts[r];
      }
    }
    Sync();
    return absl::OkStatus();
  }

  absl::Status DoScatter(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                         const void* send, void* recv, absl::Span<const int64_t> counts,
                         int root) override {
    const ConstSegment whole{send, /*count=*/0};
    if (absl::Status met = Arrive(fingerprint, {&whole, 1}); !met.ok()) return met;
    int64_t offset = 0;
    for (int64_t count : counts.first(rank())) offset += count;
    Copy(recv, At(Offered(root).send[0].data, dtype, offset), counts[rank()] * SizeOf(dtype));
    Sync();
    return absl::OkStatus();
  }

  absl::Status DoAllToAll(const CallInfo&, const Fingerprint& fingerprint, DType dtype,
                          absl::Span<const ConstSegment> send,
                          absl::Span<const Segment> recv) override {
    if (absl::Status met = Arrive(fingerprint, send, recv); !met.ok()) return met;
    // Every rank checks every pair, so all come to the same verdict without another meeting.
    const absl::Status match = CheckAllToAllLengths(fingerprint);
    if (match.ok()) {
      for (int r = 0; r < world_size(); ++r) {
        const ConstSegment& from = Offered(r).send[rank()];
        Copy(recv[r].data, from.data, from.count * SizeOf(dtype));
      }
    }
    Sync();
    return match;
  }

  absl::Status DoBarrier(const CallInfo&, const Fingerprint& fingerprint) override {
    return Arrive(fingerprint, {});
  }

  // Reduces elements [begin, begin + count) of what the ranks offer as their `part`-th segment.
  void ReduceOffered(DType dtype, ReduceOp op, size_t part, int64_t begin, int64_t count, void* out,
                     bool accumulate) {
    if (count == 0) return;
    std::vector<const void*> sources;
    for (int r = 0; r < world_size(); ++r) {
      sources.push_back(At(Offered(r).send[part].data, dtype, begin));
    }
    ReduceInOrder(dtype, op, sources, out, count, accumulate);
  }

  absl::Status CheckAllToAllLengths(const Fingerprint& fingerprint) const {
    for (int from = 0; from < world_size(); ++from) {
      for (int to = 0; to < world_size(); ++to) {
        const int64_t sent = Offered(from).send[to].count;
        const int64_t expected = Offered(to).recv[from].count;
        if (sent != expected) {
          return LengthsError(Name(fingerprint), from, to, sent, expected);
        }
      }
    }
    return absl::OkStatus();
  }

  // Offers this rank's side of a call and waits until all ranks have done so for the same call.
  // Afterwards Offered() is valid up to the last Sync() of the call.
  absl::Status Arrive(const Fingerprint& fingerprint, absl::Span<const ConstSegment> send,
                      absl::Span<const Segment> recv = {}) {
    absl::Status status = Meet(fingerprint, send, recv);
    if (status.ok()) AllArrived();
    return status;
  }

  absl::Status Meet(const Fingerprint& fingerprint, absl::Span<const ConstSegment> send,
                    absl::Span<const Segment> recv) {
    std::unique_lock<std::mutex> lock(world_->mutex);
    if (absl::Status broken = WhyBroken(fingerprint); !broken.ok()) return broken;
    channel_.offers[rank()] = {true, fingerprint.sequence, fingerprint.text, send, recv};
    if (absl::Status agreed = CompareWithFirst(); !agreed.ok()) return Break(std::move(agreed));
    if (channel_.waiting + 1 == world_size()) {
      for (Offer& offer : channel_.offers) offer.present = false;
      Pass();
      return absl::OkStatus();
    }

    const int64_t meeting = channel_.meetings;
    ++channel_.waiting;
    // The cap keeps "forever" inside the range of the clock.
    const auto deadline =
        std::chrono::steady_clock::now() +
        absl::ToChronoNanoseconds(std::min(world_->timeout, absl::Hours(24 * 365)));
    bool in_time = true;
    for (;;) {
      if (channel_.meetings != meeting) return absl::OkStatus();
      if (absl::Status broken = WhyBroken(fingerprint); !broken.ok()) return broken;
      if (!in_time) return Break(Missing(fingerprint));
      in_time = channel_.changed.wait_until(lock, deadline) == std::cv_status::no_timeout;
    }
  }

  // Waits until all ranks have got as far. They are all inside the call, so this cannot fail.
  void Sync() {
    std::unique_lock<std::mutex> lock(world_->mutex);
    if (channel_.waiting + 1 == world_size()) return Pass();
    const int64_t meeting = channel_.meetings;
    ++channel_.waiting;
    while (channel_.meetings == meeting) channel_.changed.wait(lock);
  }

  // The functions below are called with the mutex held.

  void Pass() {
    channel_.waiting = 0;
    ++channel_.meetings;
    channel_.changed.notify_all();
  }

  absl::Status Break(absl::Status why) {
    channel_.failure = why;
    channel_.changed.notify_all();
    return why;
  }

  // Why no meeting can come about any more; OK when one can.
  absl::Status WhyBroken(const Fingerprint& fingerprint) const {
    if (!channel_.failure.ok()) return channel_.failure;
    if (!world_->aborted.ok()) return world_->aborted;
    // The first to leave is the one with a story to tell; others leave because of it.
    if (channel_.left.empty()) return absl::OkStatus();
    return LeftError(Name(fingerprint), channel_.left.front());
  }

  // All who arrived before agree with one another, so one comparison will do.
  absl::Status CompareWithFirst() const {
    for (int r = 0; r < world_size(); ++r) {
      const Offer& other = channel_.offers[r];
      if (r == rank() || !other.present) continue;
      const Offer& own = channel_.offers[rank()];
      if (own.text == other.text && own.sequence == other.sequence) break;
      return DisagreementError(rank(), {own.text, own.sequence, name()}, r,
                               {other.text, other.sequence, name()});
    }
    return absl::OkStatus();
  }

  absl::Status Missing(const Fingerprint& fingerprint) const {
    std::vector<int> missing;
    for (int r = 0; r < world_size(); ++r) {
      if (!channel_.offers[r].present) missing.push_back(r);
    }
    return MissingError(Name(fingerprint), missing, rank(), world_->timeout);
  }

  CallName Name(const Fingerprint& fingerprint) const {
    return {fingerprint.text, fingerprint.sequence, name()};
  }

  // What rank r offers to the call under way. No lock: nobody changes an offer before all ranks
  // have left the call.
  const Offer& Offered(int r) const { return channel_.offers[r]; }

  const std::shared_ptr<World> world_;
  Channel& channel_;
};

class ThreadProcessGroup final : public ProcessGroup {
 public:
  ThreadProcessGroup(std::shared_ptr<World> world, int rank)
      : world_(std::move(world)), rank_(rank) {}

  ~ThreadProcessGroup() override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    world_->left.push_back(rank_);
    for (auto& [name, channel] : world_->channels) {
      channel.left.push_back(rank_);
      channel.changed.notify_all();
    }
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_->size; }
  const ByteLedger& ledger() const override { return world_->ledgers[rank_]; }

  // The ranks' memory is the host's.
  absl::StatusOr<std::unique_ptr<Communicator>> Open(absl::string_view name) override {
    return OpenHost(name, nullptr);
  }

  absl::StatusOr<std::unique_ptr<Communicator>> OpenHost(
      absl::string_view name, std::shared_ptr<ByteLedger> ledger) override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    Channel& channel =
        world_->channels.try_emplace(std::string(name), name, world_->size, world_->left)
            .first->second;
    if (channel.opened[rank_]) return OpenedBeforeError(rank_, name);
    channel.opened[rank_] = true;
    return std::make_unique<ThreadCommunicator>(world_, &channel, rank_, std::move(ledger));
  }

  void Abort(const absl::Status& why) override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    if (!world_->aborted.ok()) return;
    world_->aborted = AbortReason(rank_, why);
    for (auto& [name, channel] : world_->channels) channel.changed.notify_all();
  }

  absl::Status Health() override {
    std::lock_guard<std::mutex> lock(world_->mutex);
    return world_->aborted;
  }

 private:
  const std::shared_ptr<World> world_;
  const int rank_;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateThreadRanks(
    int world_size, const ProcessGroupOptions& options) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot create ", world_size, " ranks; there must be at least 1"));
  }
  if (absl::Status timeout = CheckTimeout(options.timeout); !timeout.ok()) return timeout;
  auto world = std::make_shared<World>(world_size, options);
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int r = 0; r < world_size; ++r) {
    groups.push_back(std::make_unique<ThreadProcessGroup>(world, r));
  }
  return groups;
}

}  // namespace dim0
