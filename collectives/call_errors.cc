#include "collectives/call_errors.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace dim0 {
namespace {

// "barrier(unit 'h.1', control) as call 3 on channel 'parameter'".
std::string CallText(const CallName& call) {
  return absl::StrCat(call.text, " as call ", call.sequence, " on channel '", call.channel, "'");
}

}  // namespace

std::string RanksText(absl::Span<const int> ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

absl::Status DisagreementError(int a, const CallName& call_a, int b, const CallName& call_b) {
  if (a > b) return DisagreementError(b, call_b, a, call_a);
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", a, " called ", CallText(call_a), ", rank ", b, " called ",
                   CallText(call_b), "; every rank must make the same calls in one order"));
}

absl::Status LengthsError(const CallName& call, int from, int to, int64_t sent, int64_t expected) {
  return absl::FailedPreconditionError(absl::StrCat(CallText(call), ": rank ", from, " sends ",
                                                    sent, " elements to rank ", to,
                                                    ", which expects ", expected, " from it"));
}

absl::Status MissingError(const CallName& call, absl::Span<const int> missing, int rank,
                          absl::Duration timeout) {
  return absl::DeadlineExceededError(
      absl::StrCat(CallText(call), ": ", RanksText(missing), " did not arrive; rank ", rank,
                   " waited ", absl::FormatDuration(timeout),
                   " (find out what held up the others, or allow a longer timeout)"));
}

absl::Status LeftError(const CallName& call, int rank) {
  return absl::UnavailableError(
      absl::StrCat(CallText(call), ": rank ", rank, " has left; look for the error on that rank"));
}

absl::Status OpenedBeforeError(int rank, absl::string_view channel) {
  return absl::AlreadyExistsError(
      absl::StrCat("rank ", rank, " opened channel '", channel,
                   "' before; a channel is opened once, so choose another name"));
}

absl::Status AbortReason(int rank, const absl::Status& why) {
  if (!why.ok()) return why;
  return absl::AbortedError(absl::StrCat("rank ", rank, " aborted without a reason"));
}

absl::Status CheckTimeout(absl::Duration timeout) {
  if (timeout > absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the ranks' timeout is ", absl::FormatDuration(timeout), "; it must be longer than 0"));
}

}  // namespace dim0
