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
#include "collectives/communicator.h"
#include "collectives/ledger.h"
#include "collectives/link.h"

namespace dim0 {

struct ProcessGroupOptions {
  // How long a rank waits in one collective for the others. absl::InfiniteDuration() waits forever.
  absl::Duration timeout = absl::Minutes(10);
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

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_PROCESS_GROUP_H_
