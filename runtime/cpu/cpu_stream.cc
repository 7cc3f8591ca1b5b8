#include "runtime/cpu/cpu_stream.h"

#include <pthread.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dim0::cpu {
namespace {

class CpuEventPoint : public EventPoint {
 public:
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
    time_ = absl::Now();
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
  Push([this, info = std::move(info), op = std::move(op)](const absl::Status& so_far) {
    if (!so_far.ok()) return so_far;
    if (record_ == nullptr) return op(OpContext{});
    const absl::Time begin = absl::Now();
    absl::Status status = op(OpContext{});
    record_->Add(info, begin, absl::Now());
    return status;
  });
}

void CpuStream::Wait(const Event& event) {
  if (event.points().empty()) return;
  Push([event](const absl::Status& so_far) {
    absl::Status status = event.Wait();
    return so_far.ok() ? status : so_far;
  });
}

Event CpuStream::Record() {
  auto point = std::make_shared<CpuEventPoint>();
  Push([point](const absl::Status& so_far) {
    point->Pass(so_far);
    return so_far;
  });
  return Event(std::move(point));
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
