// The seam between the runtime and what computes: memory, streams, and the few operations that the
// engine itself needs on shards. Models and optimizers bring their own kernels for each backend.
#ifndef DIM0_RUNTIME_DEVICE_H_
#define DIM0_RUNTIME_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "collectives/launch.h"
#include "collectives/process_group.h"
#include "runtime/op_recorder.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace dim0 {

enum class Backend : uint8_t { kCpu, kCuda };

// Which of two streams that both have work goes first, where the device can choose.
enum class StreamPriority : uint8_t { kNormal, kHigh };

struct AvailableMemory {
  int64_t bytes = 0;
  bool of_each_rank = false;  // each rank of this process has so much; otherwise all together
  int64_t kept = 0;           // bytes that are free, too, but left to the backend's libraries
};

// When allocated memory takes up room.
enum class Residency : uint8_t {
  kAtOnce,   // so that no step pays for it
  kOnTouch,  // page by page, for schedules whose arithmetic is left out
};

class Device {
 public:
  virtual ~Device() = default;

  virtual Backend backend() const = 0;
  // For people: which device, and what drives it.
  virtual std::string name() const = 0;

  // Collectives want high priority: others wait for what they bring.
  virtual std::unique_ptr<Stream> NewStream(absl::string_view name, StreamPriority priority) = 0;
  std::unique_ptr<Stream> NewStream(absl::string_view name) {
    return NewStream(name, StreamPriority::kNormal);
  }

  // Streams made from now on report their ops to `recorder`, which outlives them; null: to nobody.
  void SetRecorder(OpRecorder* recorder) { recorder_ = recorder; }
  OpRecorder* recorder() const { return recorder_; }

  // `handler` hears of the first error of each stream as soon as it is known, where ops run, and
  // fail, as they are enqueued: a stream that has failed leaves out its collectives, and the hosts
  // of other ranks may wait for these before anyone here looks. Empty: nobody hears. Elsewhere it
  // is never called.
  virtual void SetFailureHandler(std::function<void(const absl::Status&)> /*handler*/) {}

  // Zero-filled memory aligned to at least 64 bytes. Error: ResourceExhausted. `bytes` > 0.
  virtual absl::StatusOr<void*> Allocate(int64_t bytes) = 0;
  virtual void Free(void* data, int64_t bytes) = 0;

  // What the ranks of this process, of a job of `world_size`, may still allocate when `threads`
  // threads of theirs compute, and `processes` like this one, itself included, share the machine's
  // memory. ResourceExhausted, with advice, if so many threads cannot even start.
  virtual absl::StatusOr<AvailableMemory> Available(int world_size, int threads,
                                                    int processes) const = 0;

  // The rate in FLOP/s of matrix products as models whose parameters are `parameters` compute them
  // here, over about `duration`, on square matrices that exceed the caches: the yardstick of a run.
  // Blocks.
  virtual double MeasureMatMulRate(DType parameters, absl::Duration duration) = 0;
  // What it is called: "SGEMM" for products of float32 matrices on a CPU.
  virtual absl::string_view matmul_name(DType parameters) const = 0;

  // The memory bandwidth in bytes/s of this rank's threads, over about `duration`: a triad
  // a = b + s c on float32 buffers that exceed the caches, counting 12 bytes an element. Blocks.
  // Error: ResourceExhausted.
  virtual absl::StatusOr<double> MeasureTriadRate(absl::Duration duration) = 0;

  // In this and all that follows, tensors are float32 or bfloat16 unless it says float32.

  // results[i] = sum of squares of tensors[i], accumulated in float64, as one op. All tensors have
  // one type; `results` is device memory.
  virtual void SumsOfSquares(Stream& stream, std::vector<Tensor> tensors, double* results) = 0;
  // *result = the same of a - b; both have one shape and one type. `result` is device memory.
  virtual void SumOfSquaredDifferences(Stream& stream, const Tensor& a, const Tensor& b,
                                       double* result) = 0;

  // How far v v^T is from a diagonal matrix, v being [m, n] float32 and m at least 2. For every
  // `stride`-th row i from row 0, ratios[i / stride] = (v v^T)_ii / mean over j != i of
  // |(v v^T)_ij|: infinite for a row orthogonal to all others, NaN for a row of zeros. `products`
  // [ceil(m / stride), m] float32 is workspace, and v is scaled, so that neither tiny nor huge
  // values leave float32's range. All of it is device memory.
  virtual void DiagonalDominance(Stream& stream, const Tensor& v, int64_t stride,
                                 const Tensor& products, double* ratios) = 0;

  // *scale = the factor that clips a gradient of norm g to `clip`: min(1, clip / (g + 1e-6)), or 1
  // when clip is 0; NaN when g is not finite. g^2 is the sum of stats[r * stride + i] over `ranks`
  // rows r and `count` columns i. All pointers are device memory.
  virtual void ClipScale(Stream& stream, const double* stats, int ranks, int64_t stride,
                         int64_t count, double clip, float* scale) = 0;

  // target[i] = source[rows[i]] for each row i of `target`; both of one type. `rows` is device
  // memory.
  virtual void GatherRows(Stream& stream, const Tensor& source, const int32_t* rows,
                          const Tensor& target) = 0;
  // target[rows[i]] += source[i] for each row i of `source`; both of one type, bfloat16 added in
  // float32 and rounded to nearest, ties to even. No row of `target` is named twice. `rows` is
  // device memory.
  virtual void AddRows(Stream& stream, const Tensor& source, const int32_t* rows,
                       const Tensor& target) = 0;

  // target = source, rounded to nearest, ties to even, where the types differ. Same size; the two
  // do not overlap.
  virtual void Cast(Stream& stream, const Tensor& source, const Tensor& target) = 0;

  // Pointers may be null where there are no bytes: a rank may store no row.
  virtual void Zero(Stream& stream, void* target, int64_t bytes) = 0;
  // Between two places of device memory that do not overlap.
  virtual void Copy(Stream& stream, void* target, const void* source, int64_t bytes) = 0;
  // `target` is host memory, valid once the stream has passed.
  virtual void CopyToHost(Stream& stream, void* target, const void* source, int64_t bytes) = 0;
  // Copies from host memory; `source` must live until the copy has run.
  virtual void CopyFromHost(Stream& stream, void* target, const void* source, int64_t bytes) = 0;

 protected:
  // What SumsOfSquares is, for its stream.
  static OpInfo SumsOfSquaresInfo(const std::vector<Tensor>& tensors) {
    OpInfo info = {.name = "sums_of_squares"};
    for (const Tensor& tensor : tensors) {
      info.flops += 2.0 * tensor.size();
      info.bytes += 1.0 * tensor.bytes();
    }
    return info;
  }

  // For NewStream: where a stream of that name reports, or null.
  StreamRecord* RecordOf(absl::string_view stream_name) const {
    return recorder_ == nullptr ? nullptr : recorder_->AddStream(stream_name);
  }

 private:
  OpRecorder* recorder_ = nullptr;
};

// The type in which parameters are gathered on a device of this backend unless the user chooses:
// what its models compute in fastest.
DType DefaultParameterDType(Backend backend);

// `threads`: how many threads this rank's kernels run on, the stream's own included. `ordinal`: of
// several devices of the kind, which; on a CPU there is one. Errors: InvalidArgument; Unavailable
// where CheckBackend is not OK.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(Backend backend, int threads,
                                                     Residency residency = Residency::kAtOnce,
                                                     int ordinal = 0);

// Whether this build and this machine have the backend and the device of this number; if not, in
// one line, why, and what to do.
absl::Status CheckBackend(Backend backend, int ordinal = 0);

// The backend that a benchmark's --device names, "cpu" or "cuda", if CheckBackend has nothing
// against it. Errors: InvalidArgument for another name, or CheckBackend's; both name the flag.
absl::StatusOr<Backend> UsableBackend(absl::string_view device);

// A process group for each rank of this process, in rank order, whose communicators reach the
// memory of the backend's devices: all of `ranks` ranks, which are then threads; or, if a launcher
// has started a process for each rank, the one that it says. Blocks, with a launcher, until all
// have come. Errors: as CreateThreadRanks' and CreateTcpRank's, or the backend's.
absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateLocalRanks(
    Backend backend, int ranks, const ProcessGroupOptions& options,
    const std::optional<Launch>& launch = std::nullopt);

// The number of a rank's device among those that its process sees, for CreateDevice.
inline int DeviceOrdinal(int rank, const std::optional<Launch>& launch) {
  return launch ? launch->local_rank : rank;
}

}  // namespace dim0

#endif  // DIM0_RUNTIME_DEVICE_H_
