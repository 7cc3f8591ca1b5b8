#include "runtime/op_recorder.h"

#include <algorithm>

#include "absl/time/clock.h"

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

bool StreamRecord::recording() const { return recorder_.recording(); }

int64_t StreamRecord::step() const { return recorder_.step(); }

RecordedOp StreamRecord::Launch(OpInfo info) {
  // Also if the budget has just run out: one op too many does no harm, and the step is marked.
  recorder_.Spend(recorder_.step_);
  return {.info = std::move(info),
          .unit = recorder_.unit_,
          .phase = recorder_.phase_,
          .id = ++recorder_.last_id_,
          .step = recorder_.step_,
          .enqueued = absl::Now()};
}

void StreamRecord::Add(RecordedWait wait) {
  if (recorder_.Spend(wait.step)) waits_.push_back(std::move(wait));
}

void StreamRecord::Add(RecordedMemory memory) {
  if (recorder_.Spend(memory.step)) memory_.push_back(memory);
}

void StreamRecord::Clear() {
  ops_.clear();
  waits_.clear();
  memory_.clear();
}

StreamRecord* OpRecorder::AddStream(absl::string_view name) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<StreamRecord>(name, *this));
  return streams_.back().get();
}

bool OpRecorder::Spend(int64_t step) {
  if (left_.fetch_sub(1, std::memory_order_relaxed) > 0) return true;
  int64_t first = first_lost_step_.load(std::memory_order_relaxed);
  while (step < first &&
         !first_lost_step_.compare_exchange_weak(first, step, std::memory_order_relaxed)) {
  }
  return false;
}

const std::string* OpRecorder::Intern(absl::string_view unit) {
  return &*units_.emplace(unit).first;
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
  left_ = budget_;
  first_lost_step_ = std::numeric_limits<int64_t>::max();
}

RecordedUnit::RecordedUnit(OpRecorder* recorder, absl::string_view unit, Phase phase)
    : recorder_(recorder) {
  if (recorder_ == nullptr) return;
  outer_unit_ = std::exchange(recorder_->unit_, recorder_->Intern(unit));
  outer_phase_ = std::exchange(recorder_->phase_, phase);
}

RecordedUnit::~RecordedUnit() {
  if (recorder_ == nullptr) return;
  recorder_->unit_ = outer_unit_;
  recorder_->phase_ = outer_phase_;
}

}  // namespace dim0
