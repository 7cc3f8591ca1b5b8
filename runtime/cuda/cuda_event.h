// Points in CUDA streams and the times at which they passed, on the clock that all of a process'
// ranks share.
#ifndef DIM0_RUNTIME_CUDA_CUDA_EVENT_H_
#define DIM0_RUNTIME_CUDA_CUDA_EVENT_H_

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dim0::cuda {

// A point in a stream. Its cudaEvent_t goes back to the pool in the end.
class TimedEvent {
 public:
  ~TimedEvent();
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  cudaEvent_t event() const { return event_; }
  // Whether the stream has passed it; true, too, if CUDA reports an error, which shows elsewhere.
  bool passed() const { return cudaEventQuery(event_) != cudaErrorNotReady; }
  // When the stream passed it; only once it has.
  absl::Time time() const;

 private:
  friend class EventPool;
  struct Anchor;
  TimedEvent() = default;

  std::shared_ptr<class EventPool> pool_;
  std::shared_ptr<const Anchor> anchor_;
  cudaEvent_t event_ = nullptr;
};

// A device's events. CUDA tells the time between two events as a float32 of milliseconds, on the
// device's own clock: times are therefore taken from an anchor, an event whose time on the host is
// known, that is made anew once in a while. Thread-safe.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  // For the device that is current. Error: what CUDA said.
  static absl::StatusOr<std::shared_ptr<EventPool>> Create();
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // A point behind what `stream` holds by now.
  absl::StatusOr<std::shared_ptr<TimedEvent>> Record(cudaStream_t stream);

  // Makes a new anchor if the last is older than a second. Blocks for some microseconds, not for
  // any other stream's work. The device must be current.
  absl::Status RefreshAnchor();

 private:
  friend class TimedEvent;
  EventPool() = default;
  absl::Status MakeAnchor();
  absl::StatusOr<cudaEvent_t> Take();
  void Return(cudaEvent_t event);

  cudaStream_t idle_ = nullptr;  // has nothing else to do
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
  std::shared_ptr<const TimedEvent::Anchor> anchor_;
};

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_CUDA_EVENT_H_
