#include "runtime/cuda/cuda_event.h"

#include <utility>

#include "collectives/cuda_status.h"
#include "collectives/steady_clock.h"
#include "runtime/check.h"

namespace dim0::cuda {
namespace {

constexpr absl::Duration kAnchorAge = absl::Seconds(1);

}  // namespace

struct TimedEvent::Anchor {
  ~Anchor() {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaEvent_t event = nullptr;
  absl::Time time;
};

TimedEvent::~TimedEvent() {
  if (event_ != nullptr) pool_->Return(event_);
}

absl::Time TimedEvent::time() const {
  float milliseconds = 0;
  // An error here is the device's and shows wherever the host waits for it.
  if (cudaEventElapsedTime(&milliseconds, anchor_->event, event_) != cudaSuccess) {
    return anchor_->time;
  }
  return anchor_->time + absl::Milliseconds(milliseconds);
}

absl::StatusOr<std::shared_ptr<EventPool>> EventPool::Create() {
  std::shared_ptr<EventPool> pool(new EventPool);
  DIM0_RETURN_IF_ERROR(ToStatus(
      cudaStreamCreateWithPriority(&pool->idle_, cudaStreamNonBlocking, 0), "creating a stream"));
  DIM0_RETURN_IF_ERROR(pool->MakeAnchor());
  return pool;
}

EventPool::~EventPool() {
  for (cudaEvent_t event : free_) cudaEventDestroy(event);
  if (idle_ != nullptr) cudaStreamDestroy(idle_);
}

absl::StatusOr<std::shared_ptr<TimedEvent>> EventPool::Record(cudaStream_t stream) {
  std::shared_ptr<TimedEvent> made(new TimedEvent);
  made->pool_ = shared_from_this();
  DIM0_ASSIGN_OR_RETURN(made->event_, Take());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    made->anchor_ = anchor_;
  }
  DIM0_RETURN_IF_ERROR(ToStatus(cudaEventRecord(made->event_, stream), "recording an event"));
  return made;
}

absl::Status EventPool::RefreshAnchor() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (SteadyNow() - anchor_->time < kAnchorAge) return absl::OkStatus();
  }
  return MakeAnchor();
}

absl::Status EventPool::MakeAnchor() {
  // The event passed somewhere between its recording and the end of the wait for it: the attempt
  // counts that leaves the least doubt.
  constexpr int kAttempts = 5;
  std::shared_ptr<TimedEvent::Anchor> best;
  absl::Duration least = absl::InfiniteDuration();
  for (int i = 0; i < kAttempts; ++i) {
    auto anchor = std::make_shared<TimedEvent::Anchor>();
    DIM0_RETURN_IF_ERROR(
        ToStatus(cudaEventCreateWithFlags(&anchor->event, cudaEventDefault), "creating an event"));
    const absl::Time before = SteadyNow();
    DIM0_RETURN_IF_ERROR(ToStatus(cudaEventRecord(anchor->event, idle_), "recording an event"));
    DIM0_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(anchor->event), "waiting for the GPU"));
    const absl::Duration doubt = SteadyNow() - before;
    if (doubt >= least) continue;
    least = doubt;
    anchor->time = before + doubt / 2;
    best = std::move(anchor);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  // Behind other streams' work an event may be late by as much as that takes.
  constexpr absl::Duration kMostDoubt = absl::Microseconds(200);
  if (anchor_ == nullptr || least <= kMostDoubt) anchor_ = std::move(best);
  return absl::OkStatus();
}

absl::StatusOr<cudaEvent_t> EventPool::Take() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  DIM0_RETURN_IF_ERROR(
      ToStatus(cudaEventCreateWithFlags(&event, cudaEventDefault), "creating an event"));
  return event;
}

void EventPool::Return(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(event);
}

}  // namespace dim0::cuda
