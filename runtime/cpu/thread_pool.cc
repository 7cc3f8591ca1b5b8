#include "runtime/cpu/thread_pool.h"

#include <algorithm>

#include "runtime/check.h"

namespace dim0::cpu {

// One call of Run; it lives on the caller's stack. Guarded by the pool's mutex.
struct ThreadPool::Job {
  const std::function<void(int64_t)>* task;
  int64_t count;
  int64_t next = 0;
  int64_t done = 0;
  std::condition_variable finished;
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  DIM0_CHECK(threads >= 1);
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int64_t count, const std::function<void(int64_t)>& task) {
  if (threads_ == 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  Job job{.task = &task, .count = count, .next = 0, .done = 0, .finished = {}};
  std::unique_lock<std::mutex> lock(mutex_);
  jobs_.push_back(&job);
  wake_.notify_all();
  while (RunOne(job, lock)) {
  }
  job.finished.wait(lock, [&] { return job.done == job.count; });
}

bool ThreadPool::RunOne(Job& job, std::unique_lock<std::mutex>& lock) {
  if (job.next == job.count) return false;
  const int64_t i = job.next++;
  // Taken off the list with its last piece, so that no worker looks at it once Run may return.
  if (job.next == job.count) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  lock.unlock();
  (*job.task)(i);
  lock.lock();
  if (++job.done == job.count) job.finished.notify_all();
  return true;
}

void ThreadPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    RunOne(*jobs_.front(), lock);
  }
}

void ThreadPool::ParallelFor(int64_t size, int64_t grain,
                             const std::function<void(int64_t, int64_t)>& body) {
  if (size <= 0) return;
  const int64_t grains = (size + grain - 1) / grain;
  const int64_t pieces = std::min<int64_t>(threads_, grains);
  const int64_t step = (grains + pieces - 1) / pieces * grain;
  Run((size + step - 1) / step, [&](int64_t i) { body(i * step, std::min(size, (i + 1) * step)); });
}

}  // namespace dim0::cpu
