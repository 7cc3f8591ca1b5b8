#include "runtime/cpu/cpu_stream.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "collectives/steady_clock.h"

namespace dim0::cpu {
namespace {

class CpuEventPoint : public EventPoint {
 public:
  explicit CpuEventPoint(TracePoint trace_point) : EventPoint(std::move(trace_point)) {}
  absl::Status Wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    passed_cv_.wait(lock, [this] { return passed_; });
    return status_;
  }
  absl::Time time() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }
  void Pass(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    passed_ = true;
    status_ = status;
    time_ = SteadyNow();
    passed_cv_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable passed_cv_;
  bool passed_ = false;
  absl::Status status_;
  absl::Time time_;
};

}  // namespace

CpuStream::CpuStream(absl::string_view name, StreamRecord* record)
    : name_(name), record_(record), worker_([this] { Work(); }) {
  // At most 15 characters, so that `top -H` and debuggers show which stream is which.
  pthread_setname_np(worker_.native_handle(), name_.substr(0, 15).c_str());
}

CpuStream::~CpuStream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  worker_.join();
}

void CpuStream::Push(Entry entry) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(entry));
  }
  wake_.notify_one();
}

void CpuStream::Enqueue(OpInfo info, Op op) {
  if (!recording()) {
    Push([op = std::move(op)](const absl::Status& so_far) {
      return so_far.ok() ? op(OpContext{}) : so_far;
    });
    return;
  }
  RecordedOp recorded = record_->Launch(std::move(info));
  last_op_ = recorded.id;
  Push([this, recorded = std::move(recorded),
        op = std::move(op)](const absl::Status& so_far) mutable {
    if (!so_far.ok()) return so_far;
    recorded.begin = SteadyNow();
    absl::Status status = op(OpContext{.call = &recorded.call});
    recorded.end = SteadyNow();
    recorded.failed = !status.ok();
    record_->Add(std::move(recorded));
    return status;
  });
}

void CpuStream::Wait(const Event& event) {
  if (event.points().empty()) return;
  if (!recording()) {
    Push([event](const absl::Status& so_far) {
      absl::Status status = event.Wait();
      return so_far.ok() ? status : so_far;
    });
    return;
  }
  Push([this, event, step = record_->step()](const absl::Status& so_far) {
    const absl::Time begin = SteadyNow();
    absl::Status status = event.Wait();
    const EventPoint* last = event.points().front().get();
    for (const auto& point : event.points()) {
      if (point->time() > last->time()) last = point.get();
    }
    // Without waiting there is nothing to tell.
    if (last->time() > begin) {
      record_->Add(RecordedWait{step, begin, SteadyNow(), last->trace_point()});
    }
    return so_far.ok() ? status : so_far;
  });
}

Event CpuStream::Record() {
  auto point =
      std::make_shared<CpuEventPoint>(recording() ? TracePoint{last_op_, name_} : TracePoint{});
  Push([point](const absl::Status& so_far) {
    point->Pass(so_far);
    return so_far;
  });
  return Event(std::move(point));
}

void CpuStream::CountLive(MemoryPurpose purpose, int64_t bytes) {
  if (!recording()) return;
  Push([this, purpose, bytes, step = record_->step()](const absl::Status& so_far) {
    record_->Add(RecordedMemory{step, SteadyNow(), purpose, bytes});
    return so_far;
  });
}

absl::Status CpuStream::Synchronize() { return Record().Wait(); }

void CpuStream::Work() {
  absl::Status status;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    status = entry(status);
    entry = nullptr;  // what it captured is let go outside the lock
    lock.lock();
  }
}

}  // namespace dim0::cpu
