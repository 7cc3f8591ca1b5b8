// Ordered queues of device work, and the points in them that other queues wait for. The engine, the
// models and the optimizers are written once against these two classes; whether an op runs on a
// worker thread or on a GPU is the device's affair.
#ifndef DIM0_RUNTIME_STREAM_H_
#define DIM0_RUNTIME_STREAM_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

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

// What a running op is given: the native stream, for backends that enqueue on one (null on CPU).
struct OpContext {
  void* native_stream = nullptr;
};

// One recorded point of one stream. Thread-safe.
class EventPoint {
 public:
  virtual ~EventPoint() = default;
  // Blocks the calling thread until the stream has passed the point. Returns the error that had
  // failed the stream by then, if any.
  virtual absl::Status Wait() = 0;
  // When the stream passed the point; only after Wait has returned.
  virtual absl::Time time() const = 0;
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

  // Blocks the host until the queue is empty; returns the first error.
  virtual absl::Status Synchronize() = 0;

  virtual const std::string& name() const = 0;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_STREAM_H_
