// One rank's membership in a job: its number, its ledger, and the communicators it opens. This is
// the factory through which a backend is picked; nothing outside a backend's folder names it.
#ifndef DIM0_COLLECTIVES_PROCESS_GROUP_H_
#define DIM0_COLLECTIVES_PROCESS_GROUP_H_

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/launch.h"
#include "collectives/ledger.h"
#include "collectives/link.h"

namespace dim0 {

struct ProcessGroupOptions {
  // How long a rank waits in one collective for the others. absl::InfiniteDuration() waits forever.
  absl::Duration timeout = absl::Minutes(10);
  // How long ranks in different processes wait for all to be started.
  absl::Duration start_timeout = absl::Minutes(10);
  // What ranks in one process pretend to be connected by; none: collectives are as fast as memory.
  std::optional<LinkSpeed> link;
};

// Destroying a rank's group, or one of its communicators, means that the rank has left: the others'
// pending and later calls that need it fail at once, naming it. Communicators may outlive the
// group.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // What carries Open's channels, by the name that trace viewers know the like of it: "nccl"
  // between GPUs, "gloo" between host memories.
  virtual absl::string_view trace_backend() const { return "gloo"; }

  // Opens the channel called `name`. Every rank opens the same names, each name once; channels are
  // independent of each other, so each stream that communicates has its own. Never blocks. Its
  // buffers are in the memory that the ranks compute in. Errors: AlreadyExists.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Open(absl::string_view name) = 0;

  // The same for buffers that are in host memory whatever the ranks compute in, for small exchanges
  // between the ranks' hosts: a call returns when its result is there. Both kinds share the names.
  absl::StatusOr<std::unique_ptr<Communicator>> OpenHost(absl::string_view name) {
    return OpenHost(name, nullptr);
  }
  // With `ledger` the channel's bytes are entered there and not in the rank's ledger: for what one
  // backend does with another's channels.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> OpenHost(
      absl::string_view name, std::shared_ptr<ByteLedger> ledger) = 0;

  // Makes every pending and later collective of every rank fail with `why` (the first reason given
  // wins). A rank that fails elsewhere calls this so that the others do not wait for the deadline.
  // A call that every rank has already entered may still complete. `why` must be an error.
  // Thread-safe.
  virtual void Abort(const absl::Status& why) = 0;

  // The error that has failed the whole group, if any. Where collectives are asynchronous, one that
  // its stream has passed may have been given up on: who waits for a stream asks for the group's
  // health afterwards, before the results are used. Thread-safe.
  virtual absl::Status Health() = 0;

  // Bytes sent by this rank over all its communicators. Thread-safe.
  virtual const ByteLedger& ledger() const = 0;
};

// `world_size` ranks as threads of this process, one ProcessGroup each, in rank order; the caller
// runs the threads. Errors: InvalidArgument for world_size < 1 or a timeout that is not positive.
absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateThreadRanks(
    int world_size, const ProcessGroupOptions& options);

// One rank of a job whose ranks are processes, on one machine or several, with host memory and for
// small exchanges: everything passes through rank 0, which listens at launch.address and
// launch.port. Blocks until all ranks have come. Process groups and their communicators use one
// connection; a process that ends without a word has left.
// Errors: InvalidArgument, for options out of range, a link, an address that cannot be found, or
// ranks that were started with contradictory options; Unavailable, if rank 0 cannot listen;
// DeadlineExceeded, naming the missing ranks.
absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateTcpRank(const Launch& launch,
                                                            const ProcessGroupOptions& options);

// The ranks of this process, of a job whose ranks have a GPU each: hosts[i] becomes a rank on CUDA
// device devices[i]. The hosts are some or all ranks of one group, which carries host channels and
// what the ranks tell each other besides. Open's channels are NCCL's, over device memory, and
// asynchronous:
// - A call enqueues its work on CallInfo.native_stream (null: CUDA's default stream) and returns.
//   "Returns" in a call's contract then reads "its stream passes". It leaves the rank's device as
//   the calling thread's current one. A channel's first call blocks until all ranks have made it.
// - What goes wrong once a call has returned fails the group: streams go on, Health() and all later
//   calls of all channels return the error. Ranks that disagree are noticed when they enqueue,
//   those of different processes within a second; a deadline counts from when a stream gets to the
//   call. The ledger counts what was enqueued.
// - All ranks make the calls of all their channels in one order.
// - Sums are in NCCL's order, the same in every run on the same machines; bfloat16 is rounded once
//   for each rank that adds to a sum.
// - Destroying a communicator waits until its calls have run.
// - All device memory that it takes is its own: NCCL's buffers and 256 KiB for each channel.
//
// Errors: InvalidArgument, for a device that is not there or is given twice, and for a link, which
// cannot be pretended between GPUs; FailedPrecondition, if NCCL's library is older than this build
// needs; Unimplemented, in builds without CUDA.
absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateNcclRanks(
    std::vector<std::unique_ptr<ProcessGroup>> hosts, absl::Span<const int> devices,
    const ProcessGroupOptions& options);

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_PROCESS_GROUP_H_
