// A CPU rank as a device: memory from the system, streams as worker threads, kernels on a pool.
#ifndef DIM0_RUNTIME_CPU_CPU_DEVICE_H_
#define DIM0_RUNTIME_CPU_CPU_DEVICE_H_

#include <memory>
#include <string>

#include "runtime/cpu/thread_pool.h"
#include "runtime/device.h"

namespace dim0::cpu {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(int threads, Residency residency = Residency::kAtOnce);

  // What kernels run on.
  ThreadPool& pool() { return pool_; }

  Backend backend() const override { return Backend::kCpu; }
  std::string name() const override;
  using Device::NewStream;
  std::unique_ptr<Stream> NewStream(absl::string_view name, StreamPriority priority) override;
  absl::StatusOr<void*> Allocate(int64_t bytes) override;
  void Free(void* data, int64_t bytes) override;
  // The least of the machine's available memory and what the cgroup leaves.
  absl::StatusOr<AvailableMemory> Available(int world_size, int threads,
                                            int processes) const override;
  // In float32 whatever the parameters are.
  double MeasureMatMulRate(DType parameters, absl::Duration duration) override;
  absl::string_view matmul_name(DType /*parameters*/) const override { return "SGEMM"; }
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
  ThreadPool pool_;
  const Residency residency_;
};

}  // namespace dim0::cpu

#endif  // DIM0_RUNTIME_CPU_CPU_DEVICE_H_
