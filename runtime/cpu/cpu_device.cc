#include "runtime/cpu/cpu_device.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/steady_clock.h"
#include "runtime/cpu/cpu_stream.h"
#include "runtime/cpu/elements.h"
#include "runtime/cpu/gemm.h"
#include "runtime/printable.h"

namespace dim0::cpu {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Rows that one thread copies or adds at least.
constexpr int64_t kRowGrain = 16;

// Elements that one thread casts at least.
constexpr int64_t kCastGrain = 1 << 14;

// From /proc/meminfo, in bytes.
absl::StatusOr<int64_t> MachineAvailable() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  int64_t kib;
  while (meminfo >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    meminfo.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return absl::UnavailableError("/proc/meminfo has no MemAvailable line");
}

// What the version 2 cgroup this process sits in still allows, or no limit.
int64_t CgroupAvailable() {
  std::ifstream maximum("/sys/fs/cgroup/memory.max"), current("/sys/fs/cgroup/memory.current");
  int64_t limit, used;
  if (!(maximum >> limit) || !(current >> used)) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(0, limit - used);
}

// What `ulimit -v` still allows for the ranks' memory, or no limit. OpenBLAS maps 128 MiB for each
// thread that multiplies and, if it is refused, tries again for ever; so a run that would get there
// must not begin. Stacks and malloc's arenas of that thread, and its share of a rank's other
// threads, take the rest of kBytesPerThread.
absl::StatusOr<int64_t> AddressSpaceAvailable(int threads) {
  constexpr int64_t kBytesPerThread = int64_t{512} << 20;
  struct rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::numeric_limits<int64_t>::max();
  }
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const int64_t available = static_cast<int64_t>(limit.rlim_cur) - pages * sysconf(_SC_PAGESIZE) -
                            threads * kBytesPerThread;
  if (available > 0) return available;
  return absl::ResourceExhaustedError(absl::StrCat(
      "the limit on address space (ulimit -v) is ", FormatBytes(limit.rlim_cur), ", and ", threads,
      " threads take up to ", FormatBytes(threads * kBytesPerThread),
      " of it beside the ranks' memory; raise it, or lower --ranks or --threads_per_rank"));
}

// Float64 sum of value(i)^2 for i in [begin, end); eight partial sums keep the vector units busy
// and fix the order.
template <typename Value>
double SumOfSquaresOf(int64_t begin, int64_t end, Value value) {
  double partial[8] = {};
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {
#pragma omp simd
    for (int j = 0; j < 8; ++j) {
      const double x = value(i + j);
      partial[j] += x * x;
    }
  }
  for (; i < end; ++i) {
    const double x = value(i);
    partial[i % 8] += x * x;
  }
  double sum = 0;
  for (double p : partial) sum += p;
  return sum;
}

template <typename Value>
double SumOfSquaresOf(ThreadPool& pool, int64_t size, Value value) {
  // The cut is fixed, so that the sum does not depend on the number of threads.
  constexpr int64_t kPiece = int64_t{1} << 18;
  std::vector<double> sums((size + kPiece - 1) / kPiece);
  pool.Run(sums.size(), [&](int64_t i) {
    sums[i] = SumOfSquaresOf(i * kPiece, std::min(size, (i + 1) * kPiece), value);
  });
  double sum = 0;
  for (const double s : sums) sum += s;
  return sum;
}

// Scales `values` by the power of two that brings the largest magnitude into [0.5, 1). Values that
// are all zero, or not all finite, stay as they are.
void ScaleToUnitRange(ThreadPool& pool, float* values, int64_t size) {
  constexpr int64_t kGrain = 1 << 14;
  std::vector<float> largest(pool.threads(), 0.0f);
  const int64_t share = (size + pool.threads() - 1) / pool.threads();
  pool.Run(pool.threads(), [&](int64_t t) {
    float most = 0;
    for (int64_t i = t * share; i < std::min(size, (t + 1) * share); ++i) {
      most = std::max(most, std::abs(values[i]));
    }
    largest[t] = most;
  });
  const float most = *std::max_element(largest.begin(), largest.end());
  if (most == 0 || !std::isfinite(most)) return;
  int exponent;
  std::frexp(most, &exponent);
  // In two factors: one power of two may itself be out of range.
  const float half = std::ldexp(1.0f, -(exponent / 2));
  const float rest = std::ldexp(1.0f, -(exponent - exponent / 2));
  pool.ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = values[i] * half * rest;
  });
}

// Of the runs of `body` within about `duration`, three at least. The median: a run during which the
// thread was descheduled must not lower a yardstick.
double MedianSeconds(const std::function<void()>& body, absl::Duration duration) {
  std::vector<double> seconds;
  const absl::Time end = SteadyNow() + duration;
  do {
    const absl::Time start = SteadyNow();
    body();
    seconds.push_back(absl::ToDoubleSeconds(SteadyNow() - start));
  } while (SteadyNow() < end || seconds.size() < 3);
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

CpuDevice::CpuDevice(int threads, Residency residency) : pool_(threads), residency_(residency) {}

std::unique_ptr<Stream> CpuDevice::NewStream(absl::string_view name, StreamPriority /*priority*/) {
  return std::make_unique<CpuStream>(name, RecordOf(name));
}

absl::StatusOr<void*> CpuDevice::Allocate(int64_t bytes) {
  // Whole mappings, so that freeing gives memory back and zeroing costs nothing until it is
  // touched.
  const bool at_once = residency_ == Residency::kAtOnce;
  const int extra = at_once ? 0 : MAP_NORESERVE;
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot allocate ", FormatBytes(bytes),
                                                     " of CPU memory: ", std::strerror(errno)));
  }
  // Fewer page faults and TLB misses; a kernel without huge pages refuses, which is fine.
  if (at_once && bytes >= kHugePage) {
    madvise(data, bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
    // Pages are made now and not in the first step; a kernel before 5.14 makes them on first touch.
    madvise(data, bytes, MADV_POPULATE_WRITE);
#endif
  }
  return data;
}

void CpuDevice::Free(void* data, int64_t bytes) { munmap(data, bytes); }

absl::StatusOr<AvailableMemory> CpuDevice::Available(int /*world_size*/, int threads,
                                                     int processes) const {
  absl::StatusOr<int64_t> machine = MachineAvailable();
  if (!machine.ok()) return machine.status();
  absl::StatusOr<int64_t> addresses = AddressSpaceAvailable(threads);
  if (!addresses.ok()) return addresses.status();
  const int64_t shared = std::min(*machine, CgroupAvailable());
  return AvailableMemory{.bytes = std::min(shared / processes, *addresses)};
}

std::string CpuDevice::name() const {
  return absl::StrCat("CPU, ", pool_.threads(), pool_.threads() == 1 ? " thread" : " threads");
}

double CpuDevice::MeasureMatMulRate(DType /*parameters*/, absl::Duration duration) {
  // 1024 x 1024 float32 matrices, 12 MiB in all: past L2, and each product takes tens of
  // milliseconds.
  constexpr int64_t kSize = 1024;
  std::vector<float> a(kSize * kSize, 0.5f), b(kSize * kSize, 0.25f), c(kSize * kSize);
  auto product = [&] {
    Gemm(pool_, Transpose::kNo, Transpose::kYes, kSize, kSize, kSize, 1.0f, a.data(), kSize,
         b.data(), kSize, 0.0f, c.data(), kSize);
  };
  product();
  return 2.0 * kSize * kSize * kSize / MedianSeconds(product, duration);
}

absl::StatusOr<double> CpuDevice::MeasureTriadRate(absl::Duration duration) {
  // 32 MiB a buffer and thread: past any share of a cache that a thread has.
  constexpr int64_t kPerThread = int64_t{8} << 20;
  const int64_t size = kPerThread * pool_.threads();
  const int64_t bytes = 3 * size * static_cast<int64_t>(sizeof(float));
  const absl::StatusOr<void*> memory = Allocate(bytes);
  if (!memory.ok()) return memory.status();
  float* const a = static_cast<float*>(*memory);
  float* const b = a + size;
  float* const c = b + size;
  auto triad = [&] {
    pool_.ParallelFor(size, kPerThread, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) a[i] = b[i] + 0.5f * c[i];
    });
  };
  triad();
  const double seconds = MedianSeconds(triad, duration);
  Free(*memory, bytes);
  return 12.0 * size / seconds;
}

void CpuDevice::SumsOfSquares(Stream& stream, std::vector<Tensor> tensors, double* results) {
  OpInfo info = SumsOfSquaresInfo(tensors);
  stream.Enqueue(std::move(info), [this, tensors = std::move(tensors), results](const OpContext&) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      WithElements(tensors[i], [&](const auto* x) {
        results[i] = SumOfSquaresOf(pool_, tensors[i].size(),
                                    [x](int64_t j) { return static_cast<float>(x[j]); });
      });
    }
    return absl::OkStatus();
  });
}

void CpuDevice::SumOfSquaredDifferences(Stream& stream, const Tensor& a, const Tensor& b,
                                        double* result) {
  DIM0_CHECK(a.rows == b.rows && a.cols == b.cols && a.dtype == b.dtype);
  const int64_t size = a.size();
  stream.Enqueue({.name = "sum_of_squared_differences",
                  .flops = 3.0 * size,
                  .bytes = 1.0 * (a.bytes() + b.bytes())},
                 [=, this](const OpContext&) {
                   WithElements(a, [&](const auto* x) {
                     const auto* y = static_cast<decltype(x)>(b.data);
                     *result = SumOfSquaresOf(pool_, size, [x, y](int64_t i) {
                       return double{static_cast<float>(x[i])} - static_cast<float>(y[i]);
                     });
                   });
                   return absl::OkStatus();
                 });
}

void CpuDevice::DiagonalDominance(Stream& stream, const Tensor& v, int64_t stride,
                                  const Tensor& products, double* ratios) {
  const int64_t m = v.rows, n = v.cols;
  const int64_t rows = (m + stride - 1) / stride;
  DIM0_CHECK(m >= 2 && products.rows == rows && products.cols == m);
  stream.Enqueue({.name = "diagonal_dominance",
                  .flops = 2.0 * rows * m * n,
                  .bytes = 4.0 * (m * n + rows * m)},
                 [=, this](const OpContext&) {
                   ScaleToUnitRange(pool_, v.f32(), v.size());
                   // The sampled rows are a matrix of their own with longer steps between its rows.
                   Gemm(pool_, Transpose::kNo, Transpose::kYes, rows, m, n, 1.0f, v.f32(),
                        stride * n, v.f32(), n, 0.0f, products.f32(), m);
                   pool_.ParallelFor(rows, 16, [&](int64_t begin, int64_t end) {
                     for (int64_t r = begin; r < end; ++r) {
                       const float* row = products.f32() + r * m;
                       double others = 0;
                       for (int64_t j = 0; j < m; ++j) {
                         if (j != r * stride) others += std::abs(row[j]);
                       }
                       ratios[r] = row[r * stride] / (others / (m - 1));
                     }
                   });
                   return absl::OkStatus();
                 });
}

void CpuDevice::ClipScale(Stream& stream, const double* stats, int ranks, int64_t stride,
                          int64_t count, double clip, float* scale) {
  stream.Enqueue({.name = "clip_scale"}, [=](const OpContext&) {
    double squares = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int64_t i = 0; i < count; ++i) squares += stats[rank * stride + i];
    }
    const double norm = std::sqrt(squares);
    if (!std::isfinite(norm)) {
      *scale = std::numeric_limits<float>::quiet_NaN();
    } else {
      *scale = clip > 0 ? static_cast<float>(std::min(1.0, clip / (norm + 1e-6))) : 1.0f;
    }
    return absl::OkStatus();
  });
}

void CpuDevice::GatherRows(Stream& stream, const Tensor& source, const int32_t* rows,
                           const Tensor& target) {
  DIM0_CHECK(source.cols == target.cols && source.dtype == target.dtype);
  const int64_t row_bytes = target.cols * SizeOf(target.dtype);
  stream.Enqueue({.name = "gather_rows", .kind = OpKind::kCopy, .bytes = 2.0 * target.bytes()},
                 [=, this](const OpContext&) {
                   pool_.ParallelFor(target.rows, kRowGrain, [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       DIM0_CHECK(0 <= rows[i] && rows[i] < source.rows);
                       std::memcpy(static_cast<char*>(target.data) + i * row_bytes,
                                   static_cast<const char*>(source.data) + rows[i] * row_bytes,
                                   row_bytes);
                     }
                   });
                   return absl::OkStatus();
                 });
}

void CpuDevice::AddRows(Stream& stream, const Tensor& source, const int32_t* rows,
                        const Tensor& target) {
  DIM0_CHECK(source.cols == target.cols && source.dtype == target.dtype);
  const int64_t cols = source.cols;
  stream.Enqueue({.name = "add_rows", .flops = 1.0 * source.size(), .bytes = 3.0 * source.bytes()},
                 [=, this](const OpContext&) {
                   WithElements(target, [&](auto* sums) {
                     const auto* addends = static_cast<decltype(sums)>(source.data);
                     pool_.ParallelFor(source.rows, kRowGrain, [&](int64_t begin, int64_t end) {
                       for (int64_t i = begin; i < end; ++i) {
                         DIM0_CHECK(0 <= rows[i] && rows[i] < target.rows);
                         const auto* from = addends + i * cols;
                         auto* to = sums + rows[i] * cols;
#pragma omp simd
                         for (int64_t c = 0; c < cols; ++c) {
                           Set(static_cast<float>(to[c]) + static_cast<float>(from[c]), to[c]);
                         }
                       }
                     });
                   });
                   return absl::OkStatus();
                 });
}

void CpuDevice::Cast(Stream& stream, const Tensor& source, const Tensor& target) {
  DIM0_CHECK(source.size() == target.size());
  if (source.dtype == target.dtype) return Copy(stream, target.data, source.data, source.bytes());
  stream.Enqueue(
      {.name = "cast", .kind = OpKind::kCopy, .bytes = 1.0 * (source.bytes() + target.bytes())},
      [=, this](const OpContext&) {
        WithElements(source, [&](const auto* from) {
          WithElements(target, [&](auto* to) {
            pool_.ParallelFor(source.size(), kCastGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
              for (int64_t i = begin; i < end; ++i) Set(static_cast<float>(from[i]), to[i]);
            });
          });
        });
        return absl::OkStatus();
      });
}

void CpuDevice::Zero(Stream& stream, void* target, int64_t bytes) {
  stream.Enqueue({.name = "zero", .kind = OpKind::kCopy, .bytes = 1.0 * bytes},
                 [=](const OpContext&) {
                   if (bytes > 0) std::memset(target, 0, bytes);
                   return absl::OkStatus();
                 });
}

void CpuDevice::Copy(Stream& stream, void* target, const void* source, int64_t bytes) {
  stream.Enqueue({.name = "copy", .kind = OpKind::kCopy, .bytes = 2.0 * bytes},
                 [=](const OpContext&) {
                   if (bytes > 0) std::memcpy(target, source, bytes);
                   return absl::OkStatus();
                 });
}

// One memory: host and device are copied between as within.
void CpuDevice::CopyToHost(Stream& stream, void* target, const void* source, int64_t bytes) {
  Copy(stream, target, source, bytes);
}

void CpuDevice::CopyFromHost(Stream& stream, void* target, const void* source, int64_t bytes) {
  Copy(stream, target, source, bytes);
}

}  // namespace dim0::cpu
