// How fast the fused updates move parameters and state, against what this machine's memory can do.
//
//   bazel run //optim:bench_update -- --ranks=2 --threads_per_rank=1
//
// Counted bytes are those that an update must read and write: 20 a parameter for RMNP, 28 for
// AdamW, and 12 an element for the triad (a = b + s c) that runs in turns with them in the same
// memory, on as many threads. What the caches add is left out: the triad reads a before it
// overwrites it, the updates overwrite what they have read anyway.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optim/kernels.h"
#include "runtime/allocator.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/sharding.h"

ABSL_FLAG(int, ranks, 2, "ranks, each a thread of this process");
ABSL_FLAG(int, threads_per_rank, 1, "threads of each rank");
ABSL_FLAG(int64_t, layers, 2, "transformer blocks updated at a time");
ABSL_FLAG(int64_t, width, 1280, "width of the model");
ABSL_FLAG(int, repeats, 15, "measurements of each; the median counts");

namespace dim0 {
namespace {

struct Shape {
  int64_t rows, cols;
};

// The matrices or the biases and gains of GPT-2's blocks.
std::vector<Shape> Shapes(bool vectors) {
  const int64_t width = absl::GetFlag(FLAGS_width);
  std::vector<Shape> shapes;
  for (int64_t layer = 0; layer < absl::GetFlag(FLAGS_layers); ++layer) {
    for (const int64_t multiple : {3, 1, 4}) {
      shapes.push_back({multiple * width, vectors ? 1 : width});
    }
    shapes.push_back({width, vectors ? 1 : 4 * width});
    if (vectors) shapes.insert(shapes.end(), 4, {width, 1});
  }
  return shapes;
}

// One rank and its shards.
struct Rank {
  std::unique_ptr<Device> device;
  std::unique_ptr<Allocator> allocator;
  std::unique_ptr<OptimizerKernels> kernels;
  std::unique_ptr<Stream> stream;
  Buffer value, gradient, first_moment, second_moment;
  std::vector<RmnpTensor> matrices;
  std::vector<AdamWTensor> tensors;
  int64_t matrix_elements = 0, elements = 0;
};

absl::StatusOr<Rank> MakeRank(int rank, int world_size) {
  Rank result;
  DIM0_ASSIGN_OR_RETURN(result.device,
                        CreateDevice(Backend::kCpu, absl::GetFlag(FLAGS_threads_per_rank)));
  result.allocator = std::make_unique<Allocator>(result.device.get());
  result.kernels = CreateOptimizerKernels(*result.device);
  result.stream = result.device->NewStream("optimizer");
  std::vector<Shape> shapes = Shapes(false);
  const size_t matrices = shapes.size();
  for (const Shape& shape : Shapes(true)) shapes.push_back(shape);
  for (Shape& shape : shapes) {
    shape.rows = RowsOfRank(shape.rows, world_size, rank).size();
    result.elements += shape.rows * shape.cols;
  }
  const auto allocate = [&](MemoryPurpose purpose) {
    return result.allocator->Allocate(purpose, 4 * result.elements);
  };
  DIM0_ASSIGN_OR_RETURN(result.value, allocate(MemoryPurpose::kParameters));
  DIM0_ASSIGN_OR_RETURN(result.gradient, allocate(MemoryPurpose::kGradients));
  DIM0_ASSIGN_OR_RETURN(result.first_moment, allocate(MemoryPurpose::kOptimizer));
  DIM0_ASSIGN_OR_RETURN(result.second_moment, allocate(MemoryPurpose::kOptimizer));
  std::fill_n(result.value.f32(), result.elements, 1.0f);
  std::fill_n(result.gradient.f32(), result.elements, 1e-2f);
  int64_t first = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto [rows, cols] = shapes[i];
    const Tensor value = F32(result.value.f32() + first, rows, cols);
    const Tensor gradient = F32(result.gradient.f32() + first, rows, cols);
    const Tensor first_moment = F32(result.first_moment.f32() + first, rows, cols);
    const Tensor second_moment = F32(result.second_moment.f32() + first, rows, cols);
    if (i < matrices) {
      result.matrices.push_back({.value = value, .gradient = gradient, .momentum = first_moment});
      result.matrix_elements += value.size();
    }
    result.tensors.push_back({value, gradient, first_moment, second_moment, 0.1});
    first += value.size();
  }
  return result;
}

// The triad over a slice of each of a rank's buffers.
void Triad(const Rank& rank, const RowRange& elements) {
  float* __restrict a = rank.value.f32();
  const float* __restrict b = rank.gradient.f32();
  const float* __restrict c = rank.first_moment.f32();
#pragma omp simd
  for (int64_t i = elements.begin; i < elements.end; ++i) a[i] = b[i] + 0.5f * c[i];
}

double Seconds(const std::function<void()>& body) {
  const absl::Time begin = absl::Now();
  body();
  return absl::ToDoubleSeconds(absl::Now() - begin);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

absl::Status Bench() {
  const int world_size = absl::GetFlag(FLAGS_ranks);
  const int threads_per_rank = absl::GetFlag(FLAGS_threads_per_rank);
  const int repeats = absl::GetFlag(FLAGS_repeats);
  std::vector<Rank> ranks;
  int64_t matrix_elements = 0, elements = 0;
  for (int r = 0; r < world_size; ++r) {
    DIM0_ASSIGN_OR_RETURN(Rank rank, MakeRank(r, world_size));
    ranks.push_back(std::move(rank));
    matrix_elements += ranks.back().matrix_elements;
    elements += ranks.back().elements;
  }
  const auto triad = [&] {
    std::vector<std::thread> threads;
    for (const Rank& rank : ranks) {
      for (int t = 0; t < threads_per_rank; ++t) {
        threads.emplace_back(Triad, std::cref(rank),
                             RowsOfRank(rank.elements, threads_per_rank, t));
      }
    }
    for (std::thread& thread : threads) thread.join();
  };
  const float gradient_scale = 1;
  const auto on_all_ranks = [&](const std::function<void(Rank&)>& enqueue) {
    for (Rank& rank : ranks) enqueue(rank);
    for (Rank& rank : ranks) DIM0_CHECK(rank.stream->Synchronize().ok());
  };
  const auto rmnp = [&] {
    on_all_ranks([&](Rank& rank) {
      rank.kernels->Rmnp(*rank.stream, rank.matrices,
                         {.lr = 1e-3,
                          .momentum = 0.95,
                          .eps = 1e-12,
                          .weight_decay = 0.1,
                          .nesterov = true,
                          .power = 0,
                          .gradient_scale = &gradient_scale});
    });
  };
  const auto adamw = [&] {
    on_all_ranks([&](Rank& rank) {
      rank.kernels->AdamW(*rank.stream, rank.tensors,
                          {.lr = 1e-3,
                           .beta1 = 0.9,
                           .beta2 = 0.95,
                           .eps = 1e-8,
                           .step = 10,
                           .gradient_scale = &gradient_scale});
    });
  };
  std::printf("%d ranks x %d threads, %.1f M parameters\n", world_size, threads_per_rank,
              1e-6 * elements);
  const auto report = [&](const char* name, double bytes, const std::function<void()>& update) {
    std::vector<double> ratios, rates;
    triad();
    update();
    for (int i = 0; i < repeats; ++i) {
      const double triad_rate = 12.0 * elements / Seconds(triad);
      rates.push_back(bytes / Seconds(update));
      ratios.push_back(rates.back() / triad_rate);
    }
    std::printf("  %-6s %6.2f GB/s  %5.2f of the triad\n", name, 1e-9 * Median(rates),
                Median(ratios));
  };
  report("rmnp", 20.0 * matrix_elements, rmnp);
  report("adamw", 28.0 * elements, adamw);
  return absl::OkStatus();
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Measures the optimizers' updates on ranks of this process.");
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_ranks) < 1 || absl::GetFlag(FLAGS_threads_per_rank) < 1 ||
      absl::GetFlag(FLAGS_layers) < 1 || absl::GetFlag(FLAGS_width) < 1 ||
      absl::GetFlag(FLAGS_repeats) < 1) {
    std::fprintf(stderr, "all flags must be at least 1\n");
    return 2;
  }
  if (const absl::Status status = dim0::Bench(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}
