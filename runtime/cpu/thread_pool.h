// The threads of one CPU rank, shared by its streams' workers.
#ifndef DIM0_RUNTIME_CPU_THREAD_POOL_H_
#define DIM0_RUNTIME_CPU_THREAD_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace dim0::cpu {

// `threads` counts the caller: a pool of 1 has no worker and runs everything in place. How the work
// is cut depends on `threads` only, never on who is free, so results repeat exactly.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls task(i) for i in [0, count), on the caller and the workers; returns when all are done.
  // Several callers may run at once; tasks must not call back into the pool.
  void Run(int64_t count, const std::function<void(int64_t)>& task);

  // Cuts [0, size) into at most threads() contiguous ranges of at least `grain` items, starting at
  // multiples of `grain`, and calls body(begin, end) for each.
  void ParallelFor(int64_t size, int64_t grain,
                   const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  struct Job;
  void Work();
  // Runs the job's next piece, if any is left, with `lock` (on mutex_) released meanwhile.
  bool RunOne(Job& job, std::unique_lock<std::mutex>& lock);

  const int threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Job*> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace dim0::cpu

#endif  // DIM0_RUNTIME_CPU_THREAD_POOL_H_
