#include "runtime/cuda/cuda_device.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "collectives/cuda_status.h"
#include "collectives/steady_clock.h"
#include "runtime/check.h"
#include "runtime/cuda/kernels.h"
#include "runtime/median.h"

namespace dim0::cuda {
namespace {

// The generation of the first GPUs that multiply bfloat16 matrices, Ampere's.
constexpr int kOldestMajor = 8;

// Of a GPU's memory, what a rank may take beside its plan: cuBLAS' workspaces for the model, for
// the optimizer and for measuring, kernels that are loaded when they are first run, and NCCL's
// buffers. These are reported to take 1 GiB for a communicator of 8 GPUs, and half a one for each
// peer that is sent to, of which the channels that CreateNcclRanks leaves are a quarter; a run has
// up to five communicators. Small GPUs have fewer peers and links, and less is kept.
int64_t OutsidePlan(int64_t total, int world_size) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  const int64_t peers = std::min(world_size - 1, 7);
  const int64_t nccl = peers == 0 ? 0 : 5 * (kGiB + peers * kGiB / 8);
  return 3 * kMatMulWorkspaceBytes + std::min(kGiB / 2 + nccl, total / 16);
}

ElementType TypeOf(DType dtype) {
  if (dtype == DType::kBFloat16) return ElementType::kBFloat16;
  DIM0_CHECK(dtype == DType::kFloat32);
  return ElementType::kFloat32;
}
ElementType TypeOf(const Tensor& tensor) { return TypeOf(tensor.dtype); }

cudaStream_t Native(const OpContext& context) {
  return static_cast<cudaStream_t>(context.native_stream);
}

// 13000 is version 13.0.
std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// A kernel of this build's, run once on the current device.
absl::Status ProbeKernels(const std::string& gpu, const cudaDeviceProp& properties) {
  void* memory = nullptr;
  DIM0_RETURN_IF_ERROR(
      ToStatus(cudaMalloc(&memory, 2 * sizeof(float)), absl::StrCat("8 bytes on ", gpu)));
  auto* const floats = static_cast<float*>(memory);
  cudaError_t error =
      LaunchCast(ElementType::kFloat32, floats, 1, ElementType::kBFloat16, floats + 1, nullptr);
  if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
  cudaFree(memory);
  const absl::Status status = ToStatus(error, absl::StrCat(gpu, " does not run a kernel"));
  const bool no_code = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidPtx ||
                       error == cudaErrorUnsupportedPtxVersion;
  if (!no_code) return status;
  return absl::UnavailableError(
      absl::StrCat(status.message(), "; build with --define=cuda_architectures=", properties.major,
                   properties.minor));
}

absl::Status CheckGpu(int ordinal, std::string* name, int* compute_capability_major) {
  cudaDeviceProp properties;
  DIM0_RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, ordinal),
                                absl::StrCat("asking GPU ", ordinal, " what it is")));
  *name = absl::StrCat("GPU ", ordinal, " (", properties.name, ", sm_", properties.major,
                       properties.minor, ")");
  *compute_capability_major = properties.major;
  if (properties.major < kOldestMajor) {
    return absl::UnavailableError(
        absl::StrCat(*name, " is too old: it takes sm_", kOldestMajor, "0, Ampere"));
  }
  DIM0_RETURN_IF_ERROR(ToStatus(cudaSetDevice(ordinal), absl::StrCat("using ", *name)));
  return ProbeKernels(*name, properties);
}

// Of the runs of `body`, which blocks, within about `duration`, three at least; the first run is
// not counted.
double MedianSeconds(const std::function<absl::Status()>& body, absl::Duration duration,
                     absl::Status* status) {
  std::vector<double> seconds;
  *status = body();
  const absl::Time end = SteadyNow() + duration;
  while (status->ok() && (seconds.size() < 3 || SteadyNow() < end)) {
    const absl::Time start = SteadyNow();
    *status = body();
    seconds.push_back(absl::ToDoubleSeconds(SteadyNow() - start));
  }
  return seconds.empty() ? 0 : Median(std::move(seconds));
}

}  // namespace

absl::StatusOr<int> CountGpus() {
  // Read when CUDA starts. There are more streams than the 8 connections to a GPU that it takes by
  // itself, and streams of one connection wait for each other. A user's own setting stays.
  [[maybe_unused]] static const int set =
      setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  int driver = 0, runtime = 0, count = 0;
  DIM0_RETURN_IF_ERROR(ToStatus(cudaDriverGetVersion(&driver), "asking for the NVIDIA driver"));
  DIM0_RETURN_IF_ERROR(ToStatus(cudaRuntimeGetVersion(&runtime), "asking for CUDA's version"));
  if (driver == 0) return absl::UnavailableError("this machine has no NVIDIA driver");
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    return absl::UnavailableError(absl::StrCat("the NVIDIA driver knows CUDA up to ",
                                               VersionText(driver), ", and this build needs ",
                                               VersionText(runtime), ": update the driver"));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return absl::UnavailableError(
        "CUDA shows this process no GPU (nvidia-smi and CUDA_VISIBLE_DEVICES tell more)");
  }
  if (error != cudaSuccess)
    return absl::UnavailableError(ToStatus(error, "looking for GPUs").message());
  return count;
}

absl::Status CheckGpu(int ordinal) {
  std::string name;
  int compute_capability_major = 0;
  return CheckGpu(ordinal, &name, &compute_capability_major);
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(int ordinal) {
  DIM0_ASSIGN_OR_RETURN(const int count, CountGpus());
  if (ordinal < 0 || ordinal >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no GPU ", ordinal, ": CUDA shows this process ", count,
                     "; a rank has a GPU of its own, so lower --ranks"));
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice);
  DIM0_RETURN_IF_ERROR(CheckGpu(ordinal, &device->name_, &device->compute_capability_major_));
  device->context_->ordinal = ordinal;
  DIM0_ASSIGN_OR_RETURN(device->context_->events, EventPool::Create());
  DIM0_ASSIGN_OR_RETURN(device->staging_, Staging::Create(device->context_->events));
  return device;
}

CudaDevice::~CudaDevice() {
  (void)context_->Activate();
  for (const auto& [stream, workspace] : sum_workspaces_) cudaFree(workspace);
}

std::string CudaDevice::name() const {
  return absl::StrCat(name_, ", CUDA ", VersionText(CUDART_VERSION));
}

std::unique_ptr<Stream> CudaDevice::NewStream(absl::string_view name, StreamPriority priority) {
  (void)context_->Activate();
  int lowest = 0, highest = 0;  // the highest priority is the least number
  (void)cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  auto stream = std::make_unique<CudaStream>(
      name, priority == StreamPriority::kHigh ? highest : lowest, context_, RecordOf(name));
  if (stream->native() != nullptr) {
    void* workspace = nullptr;
    stream->Fail(ToStatus(cudaMalloc(&workspace, kSumWorkspaceBytes), "a workspace for sums"));
    // A stream's address may be that of one destroyed before.
    cudaFree(std::exchange(sum_workspaces_[stream->native()], workspace));
  }
  return stream;
}

absl::StatusOr<void*> CudaDevice::Allocate(int64_t bytes) {
  DIM0_RETURN_IF_ERROR(context_->Activate());
  // All of a run's memory is allocated before its first step: what synchronises here costs no step.
  void* data = nullptr;
  DIM0_RETURN_IF_ERROR(
      ToStatus(cudaMalloc(&data, bytes), absl::StrCat(bytes, " bytes on ", name_)));
  const std::string zeroing = absl::StrCat("zeroing ", bytes, " bytes on ", name_);
  absl::Status zeroed = ToStatus(cudaMemsetAsync(data, 0, bytes, nullptr), zeroing);
  if (zeroed.ok()) zeroed = ToStatus(cudaStreamSynchronize(nullptr), zeroing);
  if (zeroed.ok()) return data;
  cudaFree(data);
  return zeroed;
}

void CudaDevice::Free(void* data, int64_t /*bytes*/) {
  (void)context_->Activate();
  cudaFree(data);
}

absl::StatusOr<AvailableMemory> CudaDevice::Available(int world_size, int /*threads*/,
                                                      int /*processes*/) const {
  DIM0_RETURN_IF_ERROR(context_->Activate());
  size_t free = 0, total = 0;
  DIM0_RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free, &total),
                                absl::StrCat("asking for the free memory of ", name_)));
  const int64_t kept = OutsidePlan(total, world_size);
  return AvailableMemory{.bytes = std::max<int64_t>(0, static_cast<int64_t>(free) - kept),
                         .of_each_rank = true,
                         .kept = kept};
}

absl::StatusOr<MatMul*> CudaDevice::Products() {
  if (products_ == nullptr) {
    DIM0_ASSIGN_OR_RETURN(products_, MatMul::Create());
  }
  return products_.get();
}

double CudaDevice::MeasureMatMulRate(DType parameters, absl::Duration duration) {
  // The largest size up to kLargest at which one product takes no more than a tenth of the time.
  constexpr int64_t kLargest = 8192;
  double rate = 0;
  const auto measure = [&]() -> absl::Status {
    DIM0_RETURN_IF_ERROR(context_->Activate());
    DIM0_ASSIGN_OR_RETURN(MatMul* const products, Products());
    for (int64_t n = 128; n <= kLargest; n *= 2) {
      const int64_t bytes = n * n * SizeOf(parameters);
      void* matrices = nullptr;
      DIM0_RETURN_IF_ERROR(ToStatus(cudaMalloc(&matrices, 3 * bytes), "matrices to measure with"));
      auto* const a = static_cast<char*>(matrices);
      const Product product = {.m = n,
                               .n = n,
                               .k = n,
                               .type = parameters,
                               .c_type = parameters,
                               .a = a,
                               .b = a + bytes,
                               .c = a + 2 * bytes};
      absl::Status status = ToStatus(
          LaunchFill(TypeOf(parameters), 1, 2 * n * n, matrices, nullptr), "filling matrices");
      const auto once = [&]() -> absl::Status {
        DIM0_RETURN_IF_ERROR(products->Enqueue(product, nullptr));
        return ToStatus(cudaStreamSynchronize(nullptr), "measuring the rate of matrix products");
      };
      double seconds = 0;
      if (status.ok()) {
        seconds = MedianSeconds(once, n == kLargest ? duration : absl::ZeroDuration(), &status);
      }
      const bool long_enough = seconds > absl::ToDoubleSeconds(duration) / 10;
      if (status.ok() && long_enough && n < kLargest) {
        seconds = MedianSeconds(once, duration, &status);
      }
      cudaFree(matrices);
      DIM0_RETURN_IF_ERROR(status);
      rate = 2.0 * n * n * n / seconds;
      if (long_enough) break;
    }
    return absl::OkStatus();
  };
  if (!measure().ok()) return 0;
  return rate;
}

absl::StatusOr<double> CudaDevice::MeasureTriadRate(absl::Duration duration) {
  DIM0_RETURN_IF_ERROR(context_->Activate());
  // Well beyond the level-2 caches of today's GPUs, unless one pass takes too long.
  constexpr int64_t kLargest = int64_t{1} << 28;
  double rate = 0;
  for (int64_t size = int64_t{1} << 20; size <= kLargest; size *= 4) {
    void* memory = nullptr;
    DIM0_RETURN_IF_ERROR(
        ToStatus(cudaMalloc(&memory, 3 * size * sizeof(float)), "buffers to measure with"));
    auto* const a = static_cast<float*>(memory);
    absl::Status status = ToStatus(LaunchFill(ElementType::kFloat32, 1, 3 * size, memory, nullptr),
                                   "filling buffers");
    const auto once = [&]() -> absl::Status {
      DIM0_RETURN_IF_ERROR(ToStatus(LaunchTriad(a + size, 3.0f, a + 2 * size, size, a, nullptr),
                                    "measuring the memory"));
      return ToStatus(cudaStreamSynchronize(nullptr), "measuring the memory");
    };
    double seconds = 0;
    if (status.ok()) {
      seconds = MedianSeconds(once, size == kLargest ? duration : absl::ZeroDuration(), &status);
    }
    cudaFree(memory);
    DIM0_RETURN_IF_ERROR(status);
    rate = 12.0 * size / seconds;
    if (seconds > absl::ToDoubleSeconds(duration) / 10) break;
  }
  return rate;
}

void CudaDevice::SumsOfSquares(Stream& stream, std::vector<Tensor> tensors, double* results) {
  if (tensors.empty()) return;
  std::vector<ConstArray> arrays;
  for (const Tensor& tensor : tensors) {
    DIM0_CHECK(tensor.dtype == tensors[0].dtype);
    arrays.push_back({tensor.data, tensor.size()});
  }
  stream.Enqueue(
      SumsOfSquaresInfo(tensors), [this, type = TypeOf(tensors[0]), arrays = std::move(arrays),
                                   results](const OpContext& context) {
        const cudaStream_t native = Native(context);
        return ToStatus(LaunchSumsOfSquares(type, arrays, sum_workspaces_[native], results, native),
                        "sums_of_squares");
      });
}

void CudaDevice::SumOfSquaredDifferences(Stream& stream, const Tensor& a, const Tensor& b,
                                         double* result) {
  DIM0_CHECK(a.rows == b.rows && a.cols == b.cols && a.dtype == b.dtype);
  stream.Enqueue({.name = "sum_of_squared_differences",
                  .flops = 3.0 * a.size(),
                  .bytes = 1.0 * (a.bytes() + b.bytes())},
                 [this, a, b, result](const OpContext& context) -> absl::Status {
                   const cudaStream_t native = Native(context);
                   return ToStatus(
                       LaunchSumOfSquaredDifferences(TypeOf(a), a.data, b.data, a.size(),
                                                     sum_workspaces_[native], result, native),
                       "sum_of_squared_differences");
                 });
}

void CudaDevice::DiagonalDominance(Stream& stream, const Tensor& v, int64_t stride,
                                   const Tensor& products, double* ratios) {
  DIM0_CHECK(v.rows >= 2 && stride >= 1 && products.cols == v.rows &&
             products.rows == (v.rows + stride - 1) / stride);
  stream.Enqueue({.name = "diagonal_dominance",
                  .flops = 2.0 * products.size() * v.cols,
                  .bytes = 1.0 * (2 * v.bytes() + 2 * products.bytes())},
                 [this, v, stride, products, ratios](const OpContext& context) -> absl::Status {
                   const cudaStream_t native = Native(context);
                   DIM0_ASSIGN_OR_RETURN(MatMul* const matmul, Products());
                   DIM0_RETURN_IF_ERROR(ToStatus(
                       LaunchScaleToUnitRange(v.f32(), v.size(), sum_workspaces_[native], native),
                       "scaling the momentum"));
                   // Rows `stride` apart: a matrix whose rows are that much longer.
                   DIM0_RETURN_IF_ERROR(matmul->Enqueue({.m = products.rows,
                                                         .n = v.rows,
                                                         .k = v.cols,
                                                         .transpose_b = true,
                                                         .a = v.data,
                                                         .b = v.data,
                                                         .c = products.data,
                                                         .a_row_length = stride * v.cols},
                                                        native));
                   return ToStatus(LaunchDominanceRatios(products.f32(), products.rows, v.rows,
                                                         stride, ratios, native),
                                   "diagonal_dominance");
                 });
}

void CudaDevice::ClipScale(Stream& stream, const double* stats, int ranks, int64_t stride,
                           int64_t count, double clip, float* scale) {
  stream.Enqueue(
      {.name = "clip_scale", .bytes = 8.0 * ranks * count}, [=](const OpContext& context) {
        return ToStatus(LaunchClipScale(stats, ranks, stride, count, clip, scale, Native(context)),
                        "clip_scale");
      });
}

void CudaDevice::GatherRows(Stream& stream, const Tensor& source, const int32_t* rows,
                            const Tensor& target) {
  DIM0_CHECK(source.cols == target.cols && source.dtype == target.dtype);
  stream.Enqueue({.name = "gather_rows", .kind = OpKind::kCopy, .bytes = 2.0 * target.bytes()},
                 [source, rows, target](const OpContext& context) {
                   return ToStatus(LaunchGatherRows(TypeOf(source), source.data, rows, target.rows,
                                                    target.cols, target.data, Native(context)),
                                   "gather_rows");
                 });
}

void CudaDevice::AddRows(Stream& stream, const Tensor& source, const int32_t* rows,
                         const Tensor& target) {
  DIM0_CHECK(source.cols == target.cols && source.dtype == target.dtype);
  stream.Enqueue({.name = "add_rows", .flops = 1.0 * source.size(), .bytes = 3.0 * source.bytes()},
                 [source, rows, target](const OpContext& context) {
                   return ToStatus(LaunchAddRows(TypeOf(source), source.data, rows, source.rows,
                                                 source.cols, target.data, Native(context)),
                                   "add_rows");
                 });
}

void CudaDevice::Cast(Stream& stream, const Tensor& source, const Tensor& target) {
  DIM0_CHECK(source.size() == target.size());
  stream.Enqueue(
      {.name = "cast", .kind = OpKind::kCopy, .bytes = 1.0 * (source.bytes() + target.bytes())},
      [source, target](const OpContext& context) {
        return ToStatus(LaunchCast(TypeOf(source), source.data, source.size(), TypeOf(target),
                                   target.data, Native(context)),
                        "cast");
      });
}

void CudaDevice::Zero(Stream& stream, void* target, int64_t bytes) {
  if (bytes == 0) return;
  stream.Enqueue({.name = "zero", .kind = OpKind::kCopy, .bytes = 1.0 * bytes},
                 [target, bytes](const OpContext& context) {
                   return ToStatus(cudaMemsetAsync(target, 0, bytes, Native(context)), "zero");
                 });
}

void CudaDevice::Copy(Stream& stream, void* target, const void* source, int64_t bytes) {
  if (bytes == 0) return;
  stream.Enqueue({.name = "copy", .kind = OpKind::kCopy, .bytes = 2.0 * bytes},
                 [target, source, bytes](const OpContext& context) {
                   return ToStatus(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice,
                                                   Native(context)),
                                   "copy");
                 });
}

void CudaDevice::CopyToHost(Stream& stream, void* target, const void* source, int64_t bytes) {
  if (bytes == 0) return;
  stream.Enqueue({.name = "copy_to_host", .kind = OpKind::kCopy, .bytes = 1.0 * bytes},
                 [this, target, source, bytes](const OpContext& context) {
                   return staging_->ToHost(target, source, bytes, Native(context));
                 });
}

void CudaDevice::CopyFromHost(Stream& stream, void* target, const void* source, int64_t bytes) {
  if (bytes == 0) return;
  stream.Enqueue({.name = "copy_from_host", .kind = OpKind::kCopy, .bytes = 1.0 * bytes},
                 [this, target, source, bytes](const OpContext& context) {
                   return staging_->ToDevice(target, source, bytes, Native(context));
                 });
}

}  // namespace dim0::cuda
