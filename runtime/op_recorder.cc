#include "runtime/op_recorder.h"

#include <utility>

#include "collectives/steady_clock.h"

namespace dim0 {
namespace {

thread_local absl::string_view current_unit;

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
          .enqueued = SteadyNow()};
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

void OpRecorder::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_) stream->Clear();
  left_ = budget_;
  first_lost_step_ = std::numeric_limits<int64_t>::max();
}

absl::string_view RecordedUnit::current() { return current_unit; }

RecordedUnit::RecordedUnit(OpRecorder* recorder, absl::string_view unit, Phase phase)
    : recorder_(recorder), outer_(std::exchange(current_unit, unit)) {
  if (recorder_ == nullptr) return;
  outer_unit_ = std::exchange(recorder_->unit_, recorder_->Intern(unit));
  outer_phase_ = std::exchange(recorder_->phase_, phase);
}

RecordedUnit::~RecordedUnit() {
  current_unit = outer_;
  if (recorder_ == nullptr) return;
  recorder_->unit_ = outer_unit_;
  recorder_->phase_ = outer_phase_;
}

}  // namespace dim0
