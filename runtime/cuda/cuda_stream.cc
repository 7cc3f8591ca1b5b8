#include "runtime/cuda/cuda_stream.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "collectives/cuda_status.h"
#include "runtime/check.h"

namespace dim0::cuda {
namespace {

class CudaEventPoint : public EventPoint {
 public:
  // `event` is null where the stream had failed with `status`.
  CudaEventPoint(TracePoint trace_point, std::shared_ptr<StreamContext> context,
                 std::shared_ptr<TimedEvent> event, absl::Status status)
      : EventPoint(std::move(trace_point)),
        context_(std::move(context)),
        event_(std::move(event)),
        status_(std::move(status)) {}

  absl::Status Wait() override {
    if (!status_.ok()) return status_;
    absl::Status status = ToStatus(cudaEventSynchronize(event_->event()),
                                   absl::StrCat("waiting for GPU ", context_->ordinal));
    context_->Collect();
    return status;
  }
  absl::Status known_error() const override { return status_; }
  absl::Time time() const override {
    return event_ == nullptr ? absl::InfinitePast() : event_->time();
  }

  const TimedEvent* event() const { return event_.get(); }

 private:
  const std::shared_ptr<StreamContext> context_;
  const std::shared_ptr<TimedEvent> event_;
  const absl::Status status_;
};

// What profilers show of an op: the range on the host in which its work was enqueued.
class NvtxRange {
 public:
  explicit NvtxRange(const std::string& name) { nvtxRangePushA(name.c_str()); }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

absl::Status Annotated(const absl::Status& status, absl::string_view op) {
  const absl::string_view unit = RecordedUnit::current();
  return absl::Status(
      status.code(),
      absl::StrCat(
          op, unit.empty() || absl::StrContains(op, unit) ? "" : absl::StrCat(" (unit ", unit, ")"),
          ": ", status.message()));
}

}  // namespace

absl::Status StreamContext::Activate() const {
  return ToStatus(cudaSetDevice(ordinal), absl::StrCat("using GPU ", ordinal));
}

void StreamContext::Collect() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (CudaStream* stream : streams) stream->Collect();
  }
  // The host has waited anyway. Without a new anchor times stay right, if coarser.
  if (Activate().ok()) (void)events->RefreshAnchor();
}

CudaStream::CudaStream(absl::string_view name, int priority, std::shared_ptr<StreamContext> context,
                       StreamRecord* record)
    : name_(name), context_(std::move(context)), record_(record) {
  Fail(context_->Activate());
  if (!status_.ok()) return;
  Fail(ToStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority),
                absl::StrCat("creating stream ", name)));
  std::lock_guard<std::mutex> lock(context_->mutex);
  context_->streams.insert(this);
}

CudaStream::~CudaStream() {
  if (stream_ != nullptr) {
    (void)context_->Activate();
    (void)AwaitAll();
    cudaStreamDestroy(stream_);
  }
  std::lock_guard<std::mutex> lock(context_->mutex);
  context_->streams.erase(this);
}

std::shared_ptr<TimedEvent> CudaStream::Mark() {
  if (!status_.ok()) return nullptr;
  absl::StatusOr<std::shared_ptr<TimedEvent>> event = context_->events->Record(stream_);
  if (event.ok()) return *std::move(event);
  Fail(Annotated(event.status(), name_));
  return nullptr;
}

void CudaStream::Enqueue(OpInfo info, Op op) {
  if (!status_.ok()) return;
  Fail(context_->Activate());
  const bool recorded = recording();
  const std::string name = info.name;
  PendingOp pending;
  if (recorded) {
    pending.op = record_->Launch(std::move(info));
    last_op_ = pending.op.id;
    pending.begin = Mark();
  }
  if (!status_.ok()) return;
  absl::Status status;
  {
    const NvtxRange range(name);
    status = op({.native_stream = stream_, .call = recorded ? &pending.op.call : nullptr});
  }
  if (!status.ok()) Fail(Annotated(status, name));
  if (!recorded) return;
  // A failed op is reported, too, if the device still takes events.
  pending.op.failed = !status.ok();
  if (absl::StatusOr<std::shared_ptr<TimedEvent>> end = context_->events->Record(stream_);
      end.ok()) {
    pending.end = *std::move(end);
    pending_.push_back(std::move(pending));
  }
}

void CudaStream::Wait(const Event& event) {
  if (event.points().empty() || !status_.ok()) return;
  Fail(context_->Activate());
  const bool recorded = recording();
  PendingWait pending;
  if (recorded) {
    pending.begin = Mark();
    pending.event = event;
    pending.step = record_->step();
  }
  for (const auto& point : event.points()) {
    // All streams that meet are of one device's kind.
    const auto& cuda_point = static_cast<const CudaEventPoint&>(*point);
    Fail(cuda_point.known_error());
    if (!status_.ok()) return;
    Fail(ToStatus(cudaStreamWaitEvent(stream_, cuda_point.event()->event(), 0),
                  absl::StrCat(name_, " waiting for another stream")));
  }
  if (!recorded) return;
  pending.end = Mark();
  if (status_.ok()) pending_.push_back(std::move(pending));
}

Event CudaStream::Record() {
  Fail(context_->Activate());
  TracePoint trace_point = recording() ? TracePoint{last_op_, name_} : TracePoint{};
  std::shared_ptr<TimedEvent> event = Mark();
  return Event(std::make_shared<CudaEventPoint>(std::move(trace_point), context_, std::move(event),
                                                status_));
}

void CudaStream::CountLive(MemoryPurpose purpose, int64_t bytes) {
  if (!recording()) return;
  PendingMemory pending = {.end = Mark(), .memory = {record_->step(), {}, purpose, bytes}};
  if (status_.ok()) pending_.push_back(std::move(pending));
}

absl::Status CudaStream::AwaitAll() {
  absl::Status waited =
      ToStatus(cudaStreamSynchronize(stream_),
               absl::StrCat("waiting for stream ", name_, " of GPU ", context_->ordinal));
  context_->Collect();
  return waited;
}

absl::Status CudaStream::Synchronize() {
  Fail(context_->Activate());
  if (stream_ != nullptr) Fail(AwaitAll());
  return status_;
}

void CudaStream::Collect() {
  const auto end = [](const auto& pending) { return pending.end.get(); };
  while (!pending_.empty() && std::visit(end, pending_.front())->passed()) {
    std::visit([this](auto& pending) { Report(pending); }, pending_.front());
    pending_.pop_front();
  }
}

absl::Time CudaStream::TimeOf(const TimedEvent& event) {
  reported_ = std::max(reported_, event.time());
  return reported_;
}

void CudaStream::Report(PendingOp& pending) {
  pending.op.begin = TimeOf(*pending.begin);
  pending.op.end = TimeOf(*pending.end);
  record_->Add(std::move(pending.op));
}

void CudaStream::Report(PendingWait& pending) {
  const absl::Time begin = TimeOf(*pending.begin), end = TimeOf(*pending.end);
  const EventPoint* last = pending.event.points().front().get();
  for (const auto& point : pending.event.points()) {
    if (point->time() > last->time()) last = point.get();
  }
  // Without waiting there is nothing to tell.
  if (last->time() > begin) {
    record_->Add(RecordedWait{pending.step, begin, end, last->trace_point()});
  }
}

void CudaStream::Report(PendingMemory& pending) {
  pending.memory.time = TimeOf(*pending.end);
  record_->Add(std::move(pending.memory));
}

}  // namespace dim0::cuda
