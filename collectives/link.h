// A network to look at, on one machine: collectives between ranks of one process take at least as
// long as they would over a link of a given speed. The time is slept, not computed, so a small
// machine shows the overlap of a cluster whose ratio of communication to computation is the same.
#ifndef DIM0_COLLECTIVES_LINK_H_
#define DIM0_COLLECTIVES_LINK_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dim0 {

// What connects a rank to the others, in each direction.
struct LinkSpeed {
  double bytes_per_second = 0;
  absl::Duration latency;  // of each hop of a ring
};

// "GB/s,microseconds" (1 GB is 10^9 bytes), or one of these. Bandwidths are the nominal ones in
// each direction; latencies are round assumptions, not measurements:
//
//   pcie4     32 GB/s, 5 us    x16
//   pcie5     64 GB/s, 5 us    x16
//   nvlink4  450 GB/s, 2 us    18 links of a GPU
//   10gbe   1.25 GB/s, 30 us
//   100gbe  12.5 GB/s, 10 us
//   400gbe    50 GB/s, 5 us
//
// Error: InvalidArgument, saying what is accepted.
absl::StatusOr<LinkSpeed> ParseLink(absl::string_view text);

// One rank's link. Transfers of all its communicators share it: those under way at one time have
// equal parts of its bandwidth, as flows through one network adapter do. Thread-safe.
class Link {
 public:
  explicit Link(const LinkSpeed& speed) : speed_(speed) {}

  // Begins a transfer now. Every transfer is waited for.
  int64_t Start(int64_t bytes);
  // Sleeps until the transfer is done and `hops` messages, each of which waits for the one before,
  // have arrived.
  void WaitFor(int64_t transfer, int hops);

 private:
  struct Transfer {
    double bytes_left = 0;
    absl::Time done;  // once none are left
  };

  // Lets all transfers go on until `now`. Returns when the next one will be done if none begins.
  absl::Time Advance(absl::Time now);

  const LinkSpeed speed_;
  std::mutex mutex_;
  std::map<int64_t, Transfer> transfers_;
  int64_t last_ = 0;
  absl::Time advanced_;  // where the transfers stand
};

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_LINK_H_
