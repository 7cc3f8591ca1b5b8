// The seam between ranks. A Communicator is one rank's handle on one ordered channel of
// collectives; code above it never knows whether the other ranks are threads, processes or GPUs.
//
// Every public call, in this order: validates its arguments, compares its fingerprint with the
// other ranks' (a disagreement is an error that names both sides), moves the data, and enters its
// bytes in the rank's ledger. A call that fails leaves the communicator failed: later calls return
// the first error. A rank that does not arrive within the deadline makes the others fail with an
// error that names the operation and the missing rank, so nothing hangs.
//
// Counts are in elements; offsets follow rank order. The row-uneven form is the only form: counts
// may differ between ranks and may be 0. Even collectives are the case of equal counts.
//
// Bytes entered are what this rank sends by the bandwidth-optimal (ring) schedule, whichever
// schedule the backend runs. With S the bytes of the whole buffer and N ranks:
//   all-gather       S less the chunk of rank r+1, which a ring never forwards; even: (N-1)/N S
//   reduce-scatter   S less this rank's own chunk; even: (N-1)/N S
//   all-reduce       both of the above on chunks that differ by at most one element; 2 (N-1)/N S
//   broadcast        S on every rank, by convention; 0 for one rank. (A pipelined ring from the
//                    root sends S from all but its last rank; the ledger does not tell them apart.)
//   gather, scatter, all-to-all   what leaves this rank for another rank
//   barrier          nothing
// Summed over ranks, all-gather and reduce-scatter are exactly (N-1) S, uneven or not. A call is
// entered when it has succeeded, and a failed one not at all.
#ifndef DIM0_COLLECTIVES_COMMUNICATOR_H_
#define DIM0_COLLECTIVES_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/dtype.h"
#include "collectives/ledger.h"
#include "collectives/link.h"
#include "collectives/steady_clock.h"

namespace dim0 {

enum class ReduceOp : uint8_t { kSum, kMax };

constexpr absl::string_view Name(ReduceOp op) { return op == ReduceOp::kSum ? "sum" : "max"; }

// What a call did, for traces. A record that several calls were given holds the first one's times
// and names, and the sums of their counts.
struct CallRecord {
  int calls = 0;
  std::string operation;  // "all_gather", ...
  std::string channel;    // the communicator's name
  Purpose purpose = Purpose::kControl;
  DType dtype = DType::kByte;
  int64_t sequence = 0;      // on the channel, from 1
  int64_t in_elements = 0;   // what this rank brought
  int64_t out_elements = 0;  // what it got
  int64_t bytes_sent = 0;    // as the ledger counts them
  // When all ranks had entered the call: from then on data moved. Only where ranks meet on the
  // host; InfinitePast otherwise, and for a call in which they did not meet.
  absl::Time met = absl::InfinitePast();
};

// Who asks, and why. `unit` names the engine's unit in errors and traces. `native_stream` is the
// device stream on which an asynchronous backend enqueues the call (a cudaStream_t); CPU backends
// ignore it and return when the call's result is in memory. `record`, which may be null, is filled
// in before the call returns.
struct CallInfo {
  Purpose purpose = Purpose::kControl;
  std::string unit;
  void* native_stream = nullptr;
  CallRecord* record = nullptr;
};

// One tensor of an all-gather. `send` holds counts[rank] elements; `recv` holds the sum of counts,
// rank r's elements at offset sum(counts[0..r)). In place when send == recv + own offset; any other
// overlap is not allowed. `counts` has world_size entries, the same on every rank.
struct AllGatherPart {
  const void* send = nullptr;
  void* recv = nullptr;
  absl::Span<const int64_t> counts;
};

// One tensor of a reduce-scatter. `send` holds the sum of counts; `recv` gets this rank's
// counts[rank] elements, summed over ranks in rank order. With `accumulate` the sum is added to
// what recv holds, on every rank. `recv` must not overlap `send`.
struct ReduceScatterPart {
  const void* send = nullptr;
  void* recv = nullptr;
  absl::Span<const int64_t> counts;
  bool accumulate = false;
};

// `count` elements at `data`. Not owned.
struct ConstSegment {
  const void* data = nullptr;
  int64_t count = 0;
};
struct Segment {
  void* data = nullptr;
  int64_t count = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& name() const { return name_; }

  // A communicator is one ordered channel: calls come from one thread at a time, and in the same
  // order on every rank. All buffers stay the caller's and must live until the call has completed;
  // they are aligned to their element type, and may be null where they hold no element.
  //
  // Errors, each one line that names the operation, the unit and the rank, by code:
  //   InvalidArgument      the caller's own arguments; the other ranks are not told (see
  //                        ProcessGroup::Abort)
  //   FailedPrecondition   ranks called different things, or all-to-all lengths that do not match
  //   DeadlineExceeded     some rank did not arrive in time
  //   Unavailable          some rank has left
  //   the reason given     after ProcessGroup::Abort

  // Makes what the calls to come would otherwise make when each kind of them is first called:
  // connections, and the backend's own memory for them. On every rank, in the order in which the
  // channels are then first used, before anything waits for another rank; blocks until all have
  // come, but not for what is enqueued. Moves nothing, counts as no call, and does nothing where
  // ranks need no connection.
  absl::Status Connect(const CallInfo& call) {
    if (failure_.ok()) failure_ = DoConnect(call);
    return failure_;
  }

  // Several tensors gather as one operation, each part to its own buffer.
  absl::Status AllGather(const CallInfo& call, DType dtype, absl::Span<const AllGatherPart> parts);

  // Sums in rank order; bfloat16 is summed in float32 and rounded once; integers wrap around. kByte
  // cannot be reduced.
  absl::Status ReduceScatter(const CallInfo& call, DType dtype,
                             absl::Span<const ReduceScatterPart> parts);

  // In place over `count` elements. Same summing rules. kMax of a NaN is NaN.
  absl::Status AllReduce(const CallInfo& call, DType dtype, ReduceOp op, void* data, int64_t count);

  // `data` of `root` replaces every rank's.
  absl::Status Broadcast(const CallInfo& call, DType dtype, void* data, int64_t count, int root);

  // `root` receives the ranks' pieces in rank order; `recv` is used on root only. `counts`, and the
  // root's own piece in place, as in AllGatherPart.
  absl::Status Gather(const CallInfo& call, DType dtype, const void* send, void* recv,
                      absl::Span<const int64_t> counts, int root);

  // The reverse: `send` is used on root only.
  absl::Status Scatter(const CallInfo& call, DType dtype, const void* send, void* recv,
                       absl::Span<const int64_t> counts, int root);

  // send[r] goes to rank r; recv[r] comes from rank r. Both have world_size entries; what i sends
  // to j must be as long as what j expects from i (an error naming both otherwise). A rank's
  // segment to itself is copied, or skipped when both pointers are the same; otherwise no segment
  // of recv may overlap another or one of send (not checked).
  absl::Status AllToAll(const CallInfo& call, DType dtype, absl::Span<const ConstSegment> send,
                        absl::Span<const Segment> recv);

  // Returns when every rank has called it. No bytes.
  absl::Status Barrier(const CallInfo& call);

 protected:
  // `link` outlives the communicator and may be null. With a link a call returns no sooner than its
  // bytes would have passed over it, counted from AllArrived().
  Communicator(std::string name, int rank, int world_size, std::shared_ptr<ByteLedger> ledger,
               Link* link = nullptr)
      : name_(std::move(name)),
        rank_(rank),
        world_size_(world_size),
        ledger_(std::move(ledger)),
        link_(link) {}

  // A backend whose ranks meet on the host calls this in every call as soon as all have entered it.
  void AllArrived() {
    met_ = SteadyNow();
    if (link_ != nullptr) transfer_ = link_->Start(sending_);
  }

  // What every backend call carries; ranks agree when their fingerprints are equal. `text` says in
  // words all that the ranks must agree on (operation, unit, purpose, type, counts, root) and is
  // what errors show. `sequence` counts the calls on this communicator from 1. `hash` covers the
  // channel's name, the sequence and the text, and is the same in every process, for backends that
  // would rather not send the text.
  struct Fingerprint {
    uint64_t hash = 0;
    int64_t sequence = 0;
    std::string text;
  };

  // The first element of rank r's chunk of an all-reduce over `count` elements; r == world_size()
  // gives `count`. Chunks differ by at most one element, the longer ones first.
  int64_t ChunkBegin(int64_t count, int r) const {
    return count / world_size_ * r + (r < count % world_size_ ? r : count % world_size_);
  }

  // The backend calls. Arguments are valid on this rank; the ranks have not been compared yet.

  virtual absl::Status DoConnect(const CallInfo& /*call*/) { return absl::OkStatus(); }
  virtual absl::Status DoAllGather(const CallInfo& call, const Fingerprint& fingerprint,
                                   DType dtype, absl::Span<const AllGatherPart> parts) = 0;
  virtual absl::Status DoReduceScatter(const CallInfo& call, const Fingerprint& fingerprint,
                                       DType dtype, absl::Span<const ReduceScatterPart> parts) = 0;
  virtual absl::Status DoAllReduce(const CallInfo& call, const Fingerprint& fingerprint,
                                   DType dtype, ReduceOp op, void* data, int64_t count) = 0;
  virtual absl::Status DoBroadcast(const CallInfo& call, const Fingerprint& fingerprint,
                                   DType dtype, void* data, int64_t count, int root) = 0;
  virtual absl::Status DoGather(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                                const void* send, void* recv, absl::Span<const int64_t> counts,
                                int root) = 0;
  virtual absl::Status DoScatter(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                                 const void* send, void* recv, absl::Span<const int64_t> counts,
                                 int root) = 0;
  virtual absl::Status DoAllToAll(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                                  absl::Span<const ConstSegment> send,
                                  absl::Span<const Segment> recv) = 0;
  virtual absl::Status DoBarrier(const CallInfo& call, const Fingerprint& fingerprint) = 0;

 private:
  // How much a call moves, in elements.
  struct Moved {
    int64_t in = 0, out = 0;
    int64_t sent = 0;
    int hops = 0;  // messages of a ring that wait for one another
  };

  // The fingerprint of the next call, which sends so many bytes.
  Fingerprint Identify(std::string text, int64_t bytes);
  // Enters a successful call in the ledger and lets the link's time pass, or keeps the first error
  // for later calls. Fills in the call's record.
  absl::Status Finish(absl::string_view operation, const CallInfo& call, DType dtype,
                      const Moved& moved, absl::Status status);
  // A call whose arguments are wrong.
  absl::Status Refuse(absl::Status status);

  const std::string name_;
  const int rank_;
  const int world_size_;
  const std::shared_ptr<ByteLedger> ledger_;
  Link* const link_;
  absl::Time met_ = absl::InfinitePast();  // when all ranks had entered the call
  int64_t sending_ = 0;                    // bytes that the call sends
  int64_t transfer_ = 0;                   // the call's on the link; 0: none has begun
  int64_t sequence_ = 0;
  absl::Status failure_;  // of the first call that failed
};

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_COMMUNICATOR_H_
