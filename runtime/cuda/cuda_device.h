// A GPU as one rank's device.
#ifndef DIM0_RUNTIME_CUDA_CUDA_DEVICE_H_
#define DIM0_RUNTIME_CUDA_CUDA_DEVICE_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/cuda/cuda_stream.h"
#include "runtime/cuda/matmul.h"
#include "runtime/cuda/staging.h"
#include "runtime/device.h"

namespace dim0::cuda {

class CudaDevice : public Device {
 public:
  // GPU `ordinal` of those that CUDA shows this process. Errors: as CountGpus' and CheckGpu's;
  // InvalidArgument for a number that is none of them.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(int ordinal);
  ~CudaDevice() override;

  int ordinal() const { return context_->ordinal; }
  // 9 is Hopper.
  int compute_capability_major() const { return compute_capability_major_; }

  Backend backend() const override { return Backend::kCuda; }
  std::string name() const override;
  absl::string_view matmul_name(DType parameters) const override {
    return parameters == DType::kFloat32 ? "float32 GEMM" : "bfloat16 GEMM";
  }
  using Device::NewStream;
  std::unique_ptr<Stream> NewStream(absl::string_view name, StreamPriority priority) override;
  void SetFailureHandler(std::function<void(const absl::Status&)> handler) override {
    context_->on_failure = std::move(handler);
  }
  absl::StatusOr<void*> Allocate(int64_t bytes) override;
  void Free(void* data, int64_t bytes) override;
  absl::StatusOr<AvailableMemory> Available(int world_size, int threads,
                                            int processes) const override;
  double MeasureMatMulRate(DType parameters, absl::Duration duration) override;
  absl::StatusOr<double> MeasureTriadRate(absl::Duration duration) override;
  void SumsOfSquares(Stream& stream, std::vector<Tensor> tensors, double* results) override;
  void SumOfSquaredDifferences(Stream& stream, const Tensor& a, const Tensor& b,
                               double* result) override;
  void DiagonalDominance(Stream& stream, const Tensor& v, int64_t stride, const Tensor& products,
                         double* ratios) override;
  void ClipScale(Stream& stream, const double* stats, int ranks, int64_t stride, int64_t count,
                 double clip, float* scale) override;
  void GatherRows(Stream& stream, const Tensor& source, const int32_t* rows,
                  const Tensor& target) override;
  void AddRows(Stream& stream, const Tensor& source, const int32_t* rows,
               const Tensor& target) override;
  void Cast(Stream& stream, const Tensor& source, const Tensor& target) override;
  void Zero(Stream& stream, void* target, int64_t bytes) override;
  void Copy(Stream& stream, void* target, const void* source, int64_t bytes) override;
  void CopyToHost(Stream& stream, void* target, const void* source, int64_t bytes) override;
  void CopyFromHost(Stream& stream, void* target, const void* source, int64_t bytes) override;

 private:
  CudaDevice() = default;
  // Those of the products that the device itself makes.
  absl::StatusOr<MatMul*> Products();

  std::shared_ptr<StreamContext> context_ = std::make_shared<StreamContext>();
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<MatMul> products_;
  std::map<cudaStream_t, void*> sum_workspaces_;  // where a stream's kernels keep partial sums
  std::string name_;
  int compute_capability_major_ = 0;
};

// How many GPUs CUDA shows this process, one at least. Unavailable, in one line with what to do: no
// driver, one that is too old for this toolkit, no GPU.
absl::StatusOr<int> CountGpus();

// Whether GPU `ordinal` runs this build's kernels. Unavailable for one of a generation before
// Ampere, or for which the build has no code.
absl::Status CheckGpu(int ordinal);

}  // namespace dim0::cuda

#endif  // DIM0_RUNTIME_CUDA_CUDA_DEVICE_H_
