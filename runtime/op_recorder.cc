#include "runtime/op_recorder.h"

#include <algorithm>

namespace dim0 {
namespace {

struct Interval {
  absl::Time begin, end;
};

// The same instants as intervals that are disjoint and ascending.
std::vector<Interval> Union(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> merged;
  for (const Interval& interval : intervals) {
    if (merged.empty() || merged.back().end < interval.begin) {
      merged.push_back(interval);
    } else {
      merged.back().end = std::max(merged.back().end, interval.end);
    }
  }
  return merged;
}

absl::Duration Length(const std::vector<Interval>& disjoint) {
  absl::Duration length;
  for (const Interval& interval : disjoint) length += interval.end - interval.begin;
  return length;
}

}  // namespace

StreamRecord* OpRecorder::AddStream(absl::string_view name) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<StreamRecord>(name));
  return streams_.back().get();
}

std::vector<const StreamRecord*> OpRecorder::streams() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<const StreamRecord*> streams;
  for (const auto& stream : streams_) streams.push_back(stream.get());
  return streams;
}

OverlapTimes OpRecorder::Overlap() const {
  std::vector<Interval> communication, computation;
  for (const StreamRecord* stream : streams()) {
    for (const RecordedOp& op : stream->ops()) {
      (op.info.kind == OpKind::kCollective ? communication : computation)
          .push_back({op.begin, op.end});
    }
  }
  std::vector<Interval> either = communication;
  either.insert(either.end(), computation.begin(), computation.end());
  OverlapTimes times;
  times.communication = Length(Union(std::move(communication)));
  times.computation = Length(Union(std::move(computation)));
  times.exposed = Length(Union(std::move(either))) - times.computation;
  return times;
}

void OpRecorder::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_) stream->Clear();
}

}  // namespace dim0
