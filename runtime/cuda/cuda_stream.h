// A stream as a cudaStream_t. Ops run at once on the host and enqueue their work there.
#ifndef DIM0_RUNTIME_CUDA_CUDA_STREAM_H_
#define DIM0_RUNTIME_CUDA_CUDA_STREAM_H_

#include <cuda_runtime.h>

#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/cuda/cuda_event.h"
#include "runtime/op_recorder.h"
#include "runtime/stream.h"

namespace dim0::cuda {

class CudaStream;

// What the streams of one device share.
struct StreamContext {
  int ordinal = 0;  // of the device
  std::shared_ptr<EventPool> events;
  std::function<void(const absl::Status&)> on_failure;  // see Device::SetFailureHandler

  // Makes the device current for the calling thread.
  absl::Status Activate() const;
  // Hands what has run by now to the recorder, without waiting for more. A host thread that has
  // waited for the device calls it.
  void Collect();

  std::mutex mutex;
  std::set<CudaStream*> streams;
};

class CudaStream : public Stream {
 public:
  // `priority` as CUDA counts it: the lowest number goes first. Ops are reported to `record`, which
  // outlives the stream, unless it is null. If CUDA makes no stream, this one has failed.
  CudaStream(absl::string_view name, int priority, std::shared_ptr<StreamContext> context,
             StreamRecord* record);
  // Waits for what is queued.
  ~CudaStream() override;

  void Enqueue(OpInfo info, Op op) override;
  void Wait(const Event& event) override;
  Event Record() override;
  void CountLive(MemoryPurpose purpose, int64_t bytes) override;
  absl::Status Synchronize() override;
  const std::string& name() const override { return name_; }

  // Later ops are skipped, and whoever waits for the stream's events gets the first error. OK does
  // nothing.
  void Fail(const absl::Status& status) {
    if (status.ok() || !status_.ok()) return;
    status_ = status;
    if (context_->on_failure) context_->on_failure(status);
  }

  // Null if there is none.
  cudaStream_t native() const { return stream_; }

  // See StreamContext::Collect.
  void Collect();

 private:
  // What is recorded of the stream and has not run yet, as it will be reported but for the times.
  struct PendingOp {
    std::shared_ptr<TimedEvent> begin, end;
    RecordedOp op;
  };
  struct PendingWait {
    std::shared_ptr<TimedEvent> begin, end;
    Event event;
    int64_t step = 0;
  };
  struct PendingMemory {
    std::shared_ptr<TimedEvent> end;
    RecordedMemory memory;
  };
  using Pending = std::variant<PendingOp, PendingWait, PendingMemory>;

  // Blocks until all has run.
  absl::Status AwaitAll();
  bool recording() const { return record_ != nullptr && record_->recording(); }
  // A point of this stream; null if the stream has failed, or fails with this.
  std::shared_ptr<TimedEvent> Mark();
  // When the event passed, but no earlier than what has been reported of the stream: times from
  // different anchors may differ by what the anchors are inexact.
  absl::Time TimeOf(const TimedEvent& event);
  void Report(PendingOp& pending);
  void Report(PendingWait& pending);
  void Report(PendingMemory& pending);

  const std::string name_;
  const std::shared_ptr<StreamContext> context_;
  StreamRecord* const record_;
  cudaStream_t stream_ = nullptr;
  absl::Status status_;  // of the first op that failed; later ops are skipped
  int64_t last_op_ = 0;  // the last one enqueued that is recorded
  std::deque<Pending> pending_;
  absl::Time reported_ = absl::InfinitePast();  // up to when
};

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_CUDA_STREAM_H_
