// What ran when: a device that is given a recorder reports every op of its streams here. Recorded
// ops are host memory and cost nothing while no recorder is set.
#ifndef DIM0_RUNTIME_OP_RECORDER_H_
#define DIM0_RUNTIME_OP_RECORDER_H_

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/stream.h"

namespace dim0 {

// An op that ran, whether it succeeded or not.
struct RecordedOp {
  OpInfo info;
  absl::Time begin, end;
};

// The ops of one stream, in the order in which they ran.
class StreamRecord {
 public:
  explicit StreamRecord(absl::string_view stream) : stream_(stream) {}

  // Called by the one thread that runs the stream's ops, before anything that waits for the op goes
  // on. No lock: whoever has waited for the stream may read.
  void Add(const OpInfo& info, absl::Time begin, absl::Time end) {
    ops_.push_back({info, begin, end});
  }

  const std::string& stream() const { return stream_; }
  const std::vector<RecordedOp>& ops() const { return ops_; }
  void Clear() { ops_.clear(); }

 private:
  const std::string stream_;
  std::vector<RecordedOp> ops_;
};

// How long one rank communicated and computed: unions of the ops' times, over all its streams. A
// collective's time includes waiting for the other ranks.
struct OverlapTimes {
  absl::Duration communication;  // some kCollective op was running
  absl::Duration computation;    // some other op was running
  absl::Duration exposed;        // the part of `communication` in which no other op was running
};

// One rank's ops. Reading and clearing are for the times when no recorded stream has work in
// flight.
class OpRecorder {
 public:
  OpRecorder() = default;
  OpRecorder(const OpRecorder&) = delete;
  OpRecorder& operator=(const OpRecorder&) = delete;

  // For a new stream of the device; the record is the recorder's. Thread-safe.
  StreamRecord* AddStream(absl::string_view name);

  // In the order in which the streams were added.
  std::vector<const StreamRecord*> streams() const;
  OverlapTimes Overlap() const;
  // Forgets the ops; the streams stay.
  void Clear();

 private:
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<StreamRecord>> streams_;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_OP_RECORDER_H_
