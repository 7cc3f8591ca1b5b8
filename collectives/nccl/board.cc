#include "collectives/nccl/board.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "collectives/call_errors.h"

namespace dim0 {

absl::Status Board::Post(int rank, const CallName& call, const Lengths& lengths) {
  Channel& channel = Find(call.channel);
  for (int r = 0; r < world_size_; ++r) {
    if (channel.left[r] && channel.posted[r] < call.sequence) return LeftError(call, r);
  }
  channel.posted[rank] = call.sequence;
  auto [found, is_first] = channel.calls.try_emplace(call.sequence);
  Call& agreed = found->second;
  if (is_first) {
    agreed = {std::string(call.text), rank, std::vector<Lengths>(world_size_)};
  } else if (agreed.text != call.text) {
    return DisagreementError(agreed.first, {agreed.text, call.sequence, call.channel}, rank, call);
  }
  if (!lengths.send.empty()) {
    agreed.lengths[rank] = lengths;
    for (int r = 0; r < world_size_; ++r) {
      const Lengths& other = agreed.lengths[r];
      if (other.send.empty()) continue;  // not there yet: it will compare
      if (lengths.send[r] != other.recv[rank]) {
        return LengthsError(call, rank, r, lengths.send[r], other.recv[rank]);
      }
      if (other.send[rank] != lengths.recv[r]) {
        return LengthsError(call, r, rank, other.send[rank], lengths.recv[r]);
      }
    }
  }
  if (*std::min_element(channel.posted.begin(), channel.posted.end()) >= call.sequence) {
    channel.calls.erase(found);
  }
  return absl::OkStatus();
}

absl::Status Board::Leave(int rank, absl::string_view channel) {
  return Leave(rank, channel, Find(channel));
}

absl::Status Board::LeaveAll(int rank) {
  gone_[rank] = true;
  absl::Status first;
  for (auto& [name, channel] : channels_) {
    absl::Status status = Leave(rank, name, channel);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

absl::Status Board::Leave(int rank, absl::string_view name, Channel& channel) {
  channel.left[rank] = true;
  const auto waiting = channel.calls.upper_bound(channel.posted[rank]);
  if (waiting == channel.calls.end()) return absl::OkStatus();
  return LeftError({waiting->second.text, waiting->first, name}, rank);
}

std::vector<int> Board::Missing(const CallName& call) const {
  std::vector<int> missing;
  const auto channel = channels_.find(call.channel);
  for (int r = 0; r < world_size_; ++r) {
    if (channel == channels_.end() || channel->second.posted[r] < call.sequence) {
      missing.push_back(r);
    }
  }
  return missing;
}

Board::Channel& Board::Find(absl::string_view channel) {
  auto found = channels_.find(channel);
  if (found == channels_.end()) {
    found =
        channels_
            .emplace(std::string(channel), Channel{std::vector<int64_t>(world_size_), gone_, {}})
            .first;
  }
  return found->second;
}

}  // namespace dim0
