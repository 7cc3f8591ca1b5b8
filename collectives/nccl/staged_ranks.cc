#include "collectives/nccl/staged_ranks.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/cuda_status.h"
#include "collectives/dtype.h"
#include "collectives/ledger.h"
#include "collectives/process_group.h"

namespace dim0 {
namespace {

int64_t Sum(absl::Span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::weak_ptr<ProcessGroup> group, std::unique_ptr<Communicator> inner,
                     int device)
      : Communicator(inner->name(), inner->rank(), inner->world_size(),
                     std::make_shared<ByteLedger>()),
        group_(std::move(group)),
        inner_(std::move(inner)),
        device_(device) {
    (void)cudaSetDevice(device_);
    status_ = cuda::ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                             "a staging stream");
  }

  ~StagedCommunicator() override {
    inner_.reset();
    (void)cudaSetDevice(device_);
    (void)cudaStreamDestroy(stream_);
  }

 private:
  // What one call keeps on the GPU.
  class Stage {
   public:
    Stage(cudaStream_t stream, DType dtype) : stream_(stream), dtype_(dtype) {}
    ~Stage() {
      for (const Piece& piece : pieces_) (void)cudaFree(piece.device);
    }

    // Device memory for `count` elements, with what `host` holds.
    void* In(const void* host, int64_t count) { return Add(host, nullptr, count); }
    // The same, whose contents go back at the end.
    void* InOut(void* host, int64_t count) { return Add(host, host, count); }
    char* At(void* device, int64_t element) const {
      return static_cast<char*>(device) + element * SizeOf(dtype_);
    }

    absl::Status Finish() {
      for (const Piece& piece : pieces_) {
        if (piece.host == nullptr) continue;
        Keep(cudaMemcpyAsync(piece.host, piece.device, piece.bytes, cudaMemcpyDeviceToHost,
                             stream_));
      }
      Keep(cudaStreamSynchronize(stream_));
      return status_;
    }
    const absl::Status& status() const { return status_; }

   private:
    struct Piece {
      void* device;
      void* host;
      size_t bytes;
    };

    void* Add(const void* from, void* back, int64_t count) {
      if (count == 0) return nullptr;
      const size_t bytes = count * SizeOf(dtype_);
      void* device = nullptr;
      Keep(cudaMalloc(&device, bytes));
      pieces_.push_back({device, back, bytes});
      if (device != nullptr) {
        Keep(cudaMemcpyAsync(device, from, bytes, cudaMemcpyHostToDevice, stream_));
      }
      return device;
    }
    void Keep(cudaError_t error) {
      if (status_.ok()) status_ = cuda::ToStatus(error, "a staged copy");
    }

    const cudaStream_t stream_;
    const DType dtype_;
    std::vector<Piece> pieces_;
    absl::Status status_;
  };

  // Runs one of the inner communicator's calls between the copies.
  absl::Status Run(const CallInfo& call, Stage& stage,
                   const std::function<absl::Status(const CallInfo&)>& inner) {
    if (!status_.ok()) return status_;
    if (!stage.status().ok()) return stage.status();
    CallInfo on_stream = call;
    on_stream.native_stream = stream_;
    on_stream.record = nullptr;  // this communicator fills it in
    absl::Status status = inner(on_stream);
    const absl::Status passed = cuda::ToStatus(cudaStreamSynchronize(stream_), "a staged call");
    if (const std::shared_ptr<ProcessGroup> group = group_.lock();
        status.ok() && group != nullptr) {
      status = group->Health();
    }
    if (!status.ok()) return status;
    return passed.ok() ? stage.Finish() : passed;
  }

  absl::Status DoAllGather(const CallInfo& call, const Fingerprint&, DType dtype,
                           absl::Span<const AllGatherPart> parts) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, dtype);
    std::vector<AllGatherPart> staged;
    for (const AllGatherPart& part : parts) {
      void* const recv = stage.InOut(part.recv, Sum(part.counts));
      const int64_t offset = Sum(part.counts.first(rank()));
      const bool in_place = part.send == stage.At(part.recv, offset);
      staged.push_back(
          {in_place ? stage.At(recv, offset) : stage.In(part.send, part.counts[rank()]), recv,
           part.counts});
    }
    return Run(call, stage, [&](const CallInfo& c) { return inner_->AllGather(c, dtype, staged); });
  }

  absl::Status DoReduceScatter(const CallInfo& call, const Fingerprint&, DType dtype,
                               absl::Span<const ReduceScatterPart> parts) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, dtype);
    std::vector<ReduceScatterPart> staged;
    for (const ReduceScatterPart& part : parts) {
      staged.push_back({stage.In(part.send, Sum(part.counts)),
                        stage.InOut(part.recv, part.counts[rank()]), part.counts, part.accumulate});
    }
    return Run(call, stage,
               [&](const CallInfo& c) { return inner_->ReduceScatter(c, dtype, staged); });
  }

  absl::Status DoAllReduce(const CallInfo& call, const Fingerprint&, DType dtype, ReduceOp op,
                           void* data, int64_t count) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, dtype);
    void* const staged = stage.InOut(data, count);
    return Run(call, stage,
               [&](const CallInfo& c) { return inner_->AllReduce(c, dtype, op, staged, count); });
  }

  absl::Status DoBroadcast(const CallInfo& call, const Fingerprint&, DType dtype, void* data,
                           int64_t count, int root) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, dtype);
    void* const staged = stage.InOut(data, count);
    return Run(call, stage,
               [&](const CallInfo& c) { return inner_->Broadcast(c, dtype, staged, count, root); });
  }

  absl::Status DoGather(const CallInfo& call, const Fingerprint&, DType dtype, const void* send,
                        void* recv, absl::Span<const int64_t> counts, int root) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, dtype);
    const bool is_root = rank() == root;
    const int64_t offset = Sum(counts.first(rank()));
    void* const whole = is_root ? stage.InOut(recv, Sum(counts)) : nullptr;
    const bool in_place = is_root && send == stage.At(recv, offset);
    const void* const own = in_place ? stage.At(whole, offset) : stage.In(send, counts[rank()]);
    return Run(call, stage, [&](const CallInfo& c) {
      return inner_->Gather(c, dtype, own, whole, counts, root);
    });
  }

  absl::Status DoScatter(const CallInfo& call, const Fingerprint&, DType dtype, const void* send,
                         void* recv, absl::Span<const int64_t> counts, int root) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, dtype);
    const bool is_root = rank() == root;
    const int64_t offset = Sum(counts.first(rank()));
    void* const whole = is_root ? stage.In(send, Sum(counts)) : nullptr;
    const bool in_place =
        is_root && recv == static_cast<const char*>(send) + offset * SizeOf(dtype);
    void* const own = in_place ? stage.At(whole, offset) : stage.InOut(recv, counts[rank()]);
    return Run(call, stage, [&](const CallInfo& c) {
      return inner_->Scatter(c, dtype, whole, own, counts, root);
    });
  }

  absl::Status DoAllToAll(const CallInfo& call, const Fingerprint&, DType dtype,
                          absl::Span<const ConstSegment> send,
                          absl::Span<const Segment> recv) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, dtype);
    std::vector<ConstSegment> out;
    std::vector<Segment> in;
    for (const ConstSegment& segment : send) {
      out.push_back({stage.In(segment.data, segment.count), segment.count});
    }
    for (const Segment& segment : recv) {
      in.push_back({stage.InOut(segment.data, segment.count), segment.count});
    }
    return Run(call, stage, [&](const CallInfo& c) { return inner_->AllToAll(c, dtype, out, in); });
  }

  absl::Status DoBarrier(const CallInfo& call, const Fingerprint&) override {
    (void)cudaSetDevice(device_);
    Stage stage(stream_, DType::kByte);
    return Run(call, stage, [&](const CallInfo& c) { return inner_->Barrier(c); });
  }

  const std::weak_ptr<ProcessGroup> group_;  // it goes when the test lets go of it
  std::unique_ptr<Communicator> inner_;
  const int device_;
  cudaStream_t stream_ = nullptr;
  absl::Status status_;
};

class StagedProcessGroup final : public ProcessGroup {
 public:
  StagedProcessGroup(std::unique_ptr<ProcessGroup> inner, int device)
      : inner_(std::move(inner)), device_(device) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  const ByteLedger& ledger() const override { return inner_->ledger(); }
  void Abort(const absl::Status& why) override { inner_->Abort(why); }
  absl::Status Health() override { return inner_->Health(); }

  absl::StatusOr<std::unique_ptr<Communicator>> Open(absl::string_view name) override {
    absl::StatusOr<std::unique_ptr<Communicator>> inner = inner_->Open(name);
    if (!inner.ok()) return inner.status();
    return std::make_unique<StagedCommunicator>(inner_, *std::move(inner), device_);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> OpenHost(
      absl::string_view name, std::shared_ptr<ByteLedger> ledger) override {
    return inner_->OpenHost(name, std::move(ledger));
  }

 private:
  const std::shared_ptr<ProcessGroup> inner_;
  const int device_;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateStagedNcclRanks(
    int world_size, const ProcessGroupOptions& options) {
  absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> hosts =
      CreateThreadRanks(world_size, options);
  if (!hosts.ok()) return hosts.status();
  std::vector<int> devices(world_size);
  std::iota(devices.begin(), devices.end(), 0);
  absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> inner =
      CreateNcclRanks(*std::move(hosts), devices, options);
  if (!inner.ok()) return inner.status();
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int r = 0; r < world_size; ++r) {
    groups.push_back(std::make_unique<StagedProcessGroup>(std::move((*inner)[r]), r));
  }
  return groups;
}

std::string WhyNoNcclRanks(int world_size) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return absl::StrCat("no GPU: ", cudaGetErrorString(error));
  if (devices >= world_size) return "";
  return absl::StrCat(world_size, " ranks need as many GPUs; there are ", devices);
}

}  // namespace dim0
