// What a rank is told when a collective cannot come about. The words are here so that every backend
// gives the same error for the same mistake.
#ifndef DIM0_COLLECTIVES_CALL_ERRORS_H_
#define DIM0_COLLECTIVES_CALL_ERRORS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace dim0 {

// One call on one channel; `text` as in Communicator's fingerprints.
struct CallName {
  absl::string_view text;
  int64_t sequence = 0;
  absl::string_view channel;
};

// "rank 2" or "ranks 2, 3".
std::string RanksText(absl::Span<const int> ranks);

// FailedPrecondition: ranks a and b called different things. The lower rank is named first.
absl::Status DisagreementError(int a, const CallName& call_a, int b, const CallName& call_b);

// FailedPrecondition: rank `from` brings `sent` elements of an all-to-all for rank `to`, which
// expects another number.
absl::Status LengthsError(const CallName& call, int from, int to, int64_t sent, int64_t expected);

// DeadlineExceeded: `rank` waited for `timeout`, and the ranks `missing` did not come.
absl::Status MissingError(const CallName& call, absl::Span<const int> missing, int rank,
                          absl::Duration timeout);

// Unavailable: the call needs `rank`, which has left.
absl::Status LeftError(const CallName& call, int rank);

// AlreadyExists: the rank opens a channel again.
absl::Status OpenedBeforeError(int rank, absl::string_view channel);

// `why`, which `rank` gives for aborting the job, or an error in its place if it is none.
absl::Status AbortReason(int rank, const absl::Status& why);

// InvalidArgument unless ranks can wait so long for one another.
absl::Status CheckTimeout(absl::Duration timeout);

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_CALL_ERRORS_H_
