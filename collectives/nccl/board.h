// Which rank has enqueued which call. Ranks whose calls run later, on streams, cannot compare them
// when the data moves, as ranks that meet on the host do; and a rank that does not come leaves only
// a kernel that never ends. So every rank says on a board what it enqueues when it enqueues it:
// there disagreements show at once, and there one reads who is missing.
#ifndef DIM0_COLLECTIVES_NCCL_BOARD_H_
#define DIM0_COLLECTIVES_NCCL_BOARD_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "collectives/call_errors.h"

namespace dim0 {

// The elements that a rank sends to and expects from each rank; empty but for an all-to-all.
struct Lengths {
  std::vector<int64_t> send, recv;
};

// Not thread-safe.
class Board {
 public:
  explicit Board(int world_size) : world_size_(world_size), gone_(world_size) {}

  // `rank` enqueues `call`, its next on the channel. Errors, as Communicator has them:
  // FailedPrecondition, Unavailable.
  absl::Status Post(int rank, const CallName& call, const Lengths& lengths);

  // `rank` has left the channel, or all of them. Error: Unavailable, about the first call that some
  // rank has posted and this one has not.
  absl::Status Leave(int rank, absl::string_view channel);
  absl::Status LeaveAll(int rank);

  // Who has not posted the call.
  std::vector<int> Missing(const CallName& call) const;

 private:
  // A call that some ranks have posted and others have not.
  struct Call {
    std::string text;
    int first = 0;                 // the first rank to post it; all agree with it
    std::vector<Lengths> lengths;  // by rank, for those that have posted it
  };
  struct Channel {
    std::vector<int64_t> posted;    // by rank: the last sequence number
    std::vector<bool> left;         // by rank
    std::map<int64_t, Call> calls;  // by sequence number
  };

  Channel& Find(absl::string_view channel);
  absl::Status Leave(int rank, absl::string_view name, Channel& channel);

  const int world_size_;
  std::vector<bool> gone_;  // by rank: from all channels
  std::map<std::string, Channel, std::less<>> channels_;
};

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_NCCL_BOARD_H_
