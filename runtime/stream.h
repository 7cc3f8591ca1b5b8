// Ordered queues of device work, and the points in them that other queues wait for. The engine, the
// models and the optimizers are written once against these two classes; whether an op runs on a
// worker thread or on a GPU is the device's affair.
#ifndef DIM0_RUNTIME_STREAM_H_
#define DIM0_RUNTIME_STREAM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "collectives/communicator.h"
#include "runtime/memory_purpose.h"

namespace dim0 {

enum class OpKind : uint8_t { kCompute, kCollective, kOptimizer, kCopy };

// What an op is, for traces and cost models. `flops` and `bytes` are what the op must do and move,
// as its formula says; 0 where it makes no sense.
struct OpInfo {
  std::string name;
  OpKind kind = OpKind::kCompute;
  double flops = 0;
  double bytes = 0;
};

// What a running op is given: the native stream, for backends that enqueue on one (null on CPU),
// and where a collective says what it did (null unless it is traced). Both are handed on in the
// collective's CallInfo.
struct OpContext {
  void* native_stream = nullptr;
  CallRecord* call = nullptr;
};

// Where in a trace a point lies: behind this op of this stream. No op: the trace has none there.
struct TracePoint {
  int64_t op = 0;
  std::string stream;
};

// One recorded point of one stream. Thread-safe.
class EventPoint {
 public:
  virtual ~EventPoint() = default;
  // Empty unless the stream was being recorded.
  const TracePoint& trace_point() const { return trace_point_; }
  // Blocks the calling thread until the stream has passed the point. Returns the error that had
  // failed the stream by then, if any.
  virtual absl::Status Wait() = 0;
  // The error that had failed the stream when the point was recorded, where ops run, and fail, as
  // they are enqueued; OK elsewhere. Does not block.
  virtual absl::Status known_error() const { return absl::OkStatus(); }
  // When the stream passed the point; only after Wait has returned.
  virtual absl::Time time() const = 0;

 protected:
  explicit EventPoint(TracePoint trace_point) : trace_point_(std::move(trace_point)) {}

 private:
  const TracePoint trace_point_;
};

// A set of points, all of which must have passed. A default-constructed Event has passed. Copies
// are cheap and refer to the same points.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<EventPoint> point) : points_{std::move(point)} {}

  // The event that has passed when both have.
  static Event Join(const Event& a, const Event& b) {
    Event joined = a;
    joined.points_.insert(joined.points_.end(), b.points_.begin(), b.points_.end());
    return joined;
  }

  // Blocks the host; see EventPoint::Wait. Returns the first error among the points.
  absl::Status Wait() const {
    absl::Status first;
    for (const auto& point : points_) {
      absl::Status status = point->Wait();
      if (first.ok()) first = std::move(status);
    }
    return first;
  }

  // The first among the points.
  absl::Status known_error() const {
    for (const auto& point : points_) {
      if (absl::Status status = point->known_error(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const std::vector<std::shared_ptr<EventPoint>>& points() const { return points_; }

 private:
  std::vector<std::shared_ptr<EventPoint>> points_;
};

// Calls on one stream come from one host thread. None of them blocks except Synchronize. A stream
// whose op failed skips its later ops and hands the error to whoever waits for its events, so an
// error travels along the same edges as the data and nothing deadlocks.
class Stream {
 public:
  virtual ~Stream() = default;

  using Op = std::function<absl::Status(const OpContext&)>;

  // Appends `op`. On a CPU device it runs later on the stream's worker; on a GPU it runs at once on
  // the host and enqueues its kernels on the native stream. What it captures must live until then.
  virtual void Enqueue(OpInfo info, Op op) = 0;

  // Later ops run after `event` has passed. If it passes with an error, this stream fails with it.
  virtual void Wait(const Event& event) = 0;

  // A point after all that has been enqueued so far.
  virtual Event Record() = 0;

  // For traces, and free without one: once the stream gets here, `bytes` more of what `purpose` has
  // allocated hold live data, or fewer if negative.
  virtual void CountLive(MemoryPurpose /*purpose*/, int64_t /*bytes*/) {}

  // Blocks the host until the queue is empty; returns the first error.
  virtual absl::Status Synchronize() = 0;

  virtual const std::string& name() const = 0;
};

// Connects a channel whose calls will be enqueued on `stream`; see Communicator::Connect. Blocks.
inline absl::Status Connect(Communicator& channel, Stream& stream) {
  stream.Enqueue({.name = "connect", .kind = OpKind::kCollective}, [&](const OpContext& context) {
    return channel.Connect({.native_stream = context.native_stream});
  });
  return stream.Synchronize();
}

}  // namespace dim0

#endif  // DIM0_RUNTIME_STREAM_H_
