// A stream as a worker thread with a queue.
#ifndef DIM0_RUNTIME_CPU_CPU_STREAM_H_
#define DIM0_RUNTIME_CPU_CPU_STREAM_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/strings/string_view.h"
#include "runtime/op_recorder.h"
#include "runtime/stream.h"

namespace dim0::cpu {

class CpuStream : public Stream {
 public:
  // Ops are reported to `record`, which outlives the stream, unless it is null.
  explicit CpuStream(absl::string_view name, StreamRecord* record = nullptr);
  // Runs what is queued first.
  ~CpuStream() override;

  void Enqueue(OpInfo info, Op op) override;
  void Wait(const Event& event) override;
  Event Record() override;
  void CountLive(MemoryPurpose purpose, int64_t bytes) override;
  absl::Status Synchronize() override;
  const std::string& name() const override { return name_; }

 private:
  // An entry gets the stream's status so far and returns the status after it.
  using Entry = std::function<absl::Status(const absl::Status&)>;
  void Push(Entry entry);
  void Work();

  bool recording() const { return record_ != nullptr && record_->recording(); }

  const std::string name_;
  StreamRecord* const record_;
  int64_t last_op_ = 0;  // the last one enqueued that is recorded
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> queue_;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace dim0::cpu

#endif  // DIM0_RUNTIME_CPU_CPU_STREAM_H_
