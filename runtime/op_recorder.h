// What ran when: a device that is given a recorder reports here what its streams did. Nothing is
// paid where no recorder is set, and next to nothing while a recorder does not record.
//
// Each stream writes to a record of its own without locks. All records of a recorder share a budget
// of entries: when it is spent, recording ends, and first_lost_step() says which steps are no
// longer whole.
#ifndef DIM0_RUNTIME_OP_RECORDER_H_
#define DIM0_RUNTIME_OP_RECORDER_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "collectives/communicator.h"
#include "runtime/memory_purpose.h"
#include "runtime/stream.h"

namespace dim0 {

// The part of a step that an op belongs to.
enum class Phase : uint8_t { kNone, kForward, kBackward, kUpdate };

// An op that ran, whether it succeeded or not.
struct RecordedOp {
  OpInfo info;
  const std::string* unit = nullptr;  // the recorder's; empty where no unit is in charge
  Phase phase = Phase::kNone;
  int64_t id = 0;  // from 1, by the order of enqueueing on all of the recorder's streams
  int64_t step = 0;
  absl::Time enqueued, begin, end;
  CallRecord call;  // of a collective
  bool failed = false;
};

// A stream had to wait for others; `cause` was the last of them to let it go on.
struct RecordedWait {
  int64_t step = 0;
  absl::Time begin, end;
  TracePoint cause;
};

// From `time` on, `bytes` more of what `purpose` has allocated hold live data.
struct RecordedMemory {
  int64_t step = 0;
  absl::Time time;
  MemoryPurpose purpose = MemoryPurpose::kGathered;
  int64_t bytes = 0;
};

class OpRecorder;

// What one stream did, in the order in which it happened.
class StreamRecord {
 public:
  StreamRecord(absl::string_view stream, OpRecorder& recorder)
      : stream_(stream), recorder_(recorder) {}

  // For the thread that enqueues.
  bool recording() const;
  int64_t step() const;
  // What is known of an op when it is enqueued. Takes part of the budget of entries.
  RecordedOp Launch(OpInfo info);

  // Called by the one thread that runs the stream's ops, before anything that waits for the op goes
  // on. No lock: whoever has waited for the stream may read.
  void Add(RecordedOp op) { ops_.push_back(std::move(op)); }
  void Add(RecordedWait wait);
  void Add(RecordedMemory memory);

  const std::string& stream() const { return stream_; }
  const std::deque<RecordedOp>& ops() const { return ops_; }
  const std::deque<RecordedWait>& waits() const { return waits_; }
  const std::deque<RecordedMemory>& memory() const { return memory_; }
  void Clear();

 private:
  const std::string stream_;
  OpRecorder& recorder_;
  std::deque<RecordedOp> ops_;
  std::deque<RecordedWait> waits_;
  std::deque<RecordedMemory> memory_;
};

// One rank's ops. Reading and clearing are for the times when no recorded stream has work in
// flight; recording is switched and described by the one thread that enqueues.
class OpRecorder {
 public:
  // Entries are ops, waits and counts of live memory, of about 300 bytes.
  static constexpr int64_t kDefaultBudget = int64_t{1} << 17;

  explicit OpRecorder(int64_t budget = kDefaultBudget) : budget_(budget), left_(budget) {}
  OpRecorder(const OpRecorder&) = delete;
  OpRecorder& operator=(const OpRecorder&) = delete;

  // For a new stream of the device; the record is the recorder's. Thread-safe.
  StreamRecord* AddStream(absl::string_view name);

  // What is enqueued from now on is recorded, or not. It is, at first.
  void SetRecording(bool recording) { wanted_ = recording; }
  bool recording() const { return wanted_ && !full(); }
  // The step that ops enqueued from now on belong to.
  void SetStep(int64_t step) { step_ = step; }
  int64_t step() const { return step_; }

  // The first step of which something was not recorded; the largest number if nothing was lost.
  int64_t first_lost_step() const { return first_lost_step_.load(std::memory_order_relaxed); }

  // Of the budget, what has been taken.
  int64_t entries() const {
    return budget_ - std::max<int64_t>(0, left_.load(std::memory_order_relaxed));
  }

  // In the order in which the streams were added.
  std::vector<const StreamRecord*> streams() const;
  // Forgets what was recorded; the streams stay.
  void Clear();

 private:
  friend class StreamRecord;
  friend class RecordedUnit;

  // One entry's worth of the budget, for `step`; false if there is none left.
  bool Spend(int64_t step);
  bool full() const {
    return first_lost_step_.load(std::memory_order_relaxed) != std::numeric_limits<int64_t>::max();
  }
  const std::string* Intern(absl::string_view unit);

  std::set<std::string, std::less<>> units_;  // by name; their places never change

  const int64_t budget_;
  std::atomic<int64_t> left_;
  std::atomic<int64_t> first_lost_step_ = std::numeric_limits<int64_t>::max();

  // Of the thread that enqueues.
  bool wanted_ = true;
  int64_t step_ = 0;
  int64_t last_id_ = 0;
  const std::string* unit_ = Intern("");
  Phase phase_ = Phase::kNone;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<StreamRecord>> streams_;
};

// While it lives, ops that this thread enqueues are this unit's work, in this phase: they are
// recorded so, and errors may name it. Nests: the innermost counts. `recorder` may be null; `unit`
// outlives this.
class RecordedUnit {
 public:
  RecordedUnit(OpRecorder* recorder, absl::string_view unit, Phase phase);
  ~RecordedUnit();
  RecordedUnit(const RecordedUnit&) = delete;
  RecordedUnit& operator=(const RecordedUnit&) = delete;

  // This thread's; empty if there is none.
  static absl::string_view current();

 private:
  OpRecorder* const recorder_;
  const absl::string_view outer_;
  const std::string* outer_unit_ = nullptr;
  Phase outer_phase_ = Phase::kNone;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_OP_RECORDER_H_
