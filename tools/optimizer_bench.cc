#include "tools/optimizer_bench.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "optim/factory.h"
#include "optim/newton_schulz.h"
#include "optim/rmnp_layouts.h"
#include "runtime/bandwidth.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/median.h"
#include "runtime/op_recorder.h"
#include "runtime/random.h"
#include "runtime/sharding.h"
#include "runtime/trace/trace_report.h"
#include "runtime/trace/tracer.h"

namespace dim0 {
namespace {

constexpr uint64_t kSeed = 1;
constexpr absl::Duration kYardstick = absl::Milliseconds(100);
using Groups = std::vector<std::unique_ptr<ProcessGroup>>;

int64_t FloatBytes(int64_t floats) { return floats * static_cast<int64_t>(sizeof(float)); }

// The arithmetic left out of a schedule.
class NoArithmetic : public OptimizerKernels {
 public:
  void AdamW(Stream&, std::vector<AdamWTensor>, const AdamWArguments&) override {}
  void SignMomentum(Stream&, std::vector<SignMomentumTensor>,
                    const SignMomentumArguments&) override {}
  void Rmnp(Stream&, std::vector<RmnpTensor>, const RmnpArguments&) override {}
  void RmnpRowSquares(Stream&, std::vector<RmnpTensor>, const RmnpArguments&) override {}
  void RmnpApply(Stream&, std::vector<RmnpTensor>, const RmnpArguments&) override {}
  void Momentum(Stream&, const Tensor&, const Tensor&, float, bool, const float*,
                const Tensor&) override {}
  void ApplyUpdate(Stream&, const Tensor&, const Tensor&, const Tensor&, float, float,
                   const float*) override {}
  DType matrix_dtype() const override { return DType::kFloat32; }
  int64_t matrix_elements_at_once() const override { return 0; }
  void Normalize(Stream&, int64_t, const Tensor&, double, const Tensor&) override {}
  void SymmetricProduct(Stream&, int64_t, float, const Tensor&, bool, float, const Tensor&,
                        const Tensor&) override {}
  void SymmetricMatMul(Stream&, int64_t, float, const Tensor&, const Tensor&, float, const Tensor&,
                       const Tensor&) override {}
  void MatMul(Stream&, int64_t, float, const Tensor&, bool, const Tensor&, bool, float,
              const Tensor&, const Tensor&) override {}
  void AddToDiagonal(Stream&, int64_t, const Tensor&, float) override {}
  void Copy(Stream&, const Tensor&, const Tensor&) override {}
};

// Runs body(rank) on a thread per rank. An error of one ends the others' collectives in `aborted`.
absl::Status RunRanks(int ranks, absl::Span<const Groups> aborted,
                      const std::function<absl::Status(int rank)>& body) {
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = body(rank);
      if (statuses[rank].ok()) return;
      for (const Groups& groups : aborted) groups[rank]->Abort(statuses[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) DIM0_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

std::vector<MatrixShape> Shapes(const ParameterTable& table) {
  std::vector<MatrixShape> shapes;
  for (int id = 0; id < table.size(); ++id) {
    shapes.push_back({table[id].spec.rows, table[id].spec.cols});
  }
  return shapes;
}

// A rank's device.
absl::StatusOr<std::unique_ptr<Device>> DeviceOf(const OptimizerBenchOptions& options, int rank) {
  return CreateDevice(options.backend, options.threads_per_rank,
                      options.ledger_only ? Residency::kOnTouch : Residency::kAtOnce, rank);
}

// Elements [first, first + count) of the random numbers of `sequence`, to device memory, made on
// `threads` threads. Blocks.
absl::Status FillRandom(Device& device, Stream& stream, int threads, uint32_t sequence,
                        int64_t first, int64_t count, float* target) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  std::vector<float> piece;
  for (int64_t done = 0; done < count; done += kPiece * threads) {
    piece.resize(std::min(kPiece * threads, count - done));
    std::vector<std::thread> others;
    const auto fill = [&](int64_t begin) {
      const int64_t size = std::min<int64_t>(kPiece, piece.size() - begin);
      FillNormal(kSeed, sequence, first + done + begin, 1.0f,
                 absl::MakeSpan(piece).subspan(begin, size));
    };
    for (int64_t begin = kPiece; begin < static_cast<int64_t>(piece.size()); begin += kPiece) {
      others.emplace_back(fill, begin);
    }
    fill(0);
    for (std::thread& thread : others) thread.join();
    device.CopyFromHost(stream, target + done, piece.data(), FloatBytes(piece.size()));
    DIM0_RETURN_IF_ERROR(stream.Synchronize());
  }
  return absl::OkStatus();
}

// One rank's share of the matrices by rows, and the gradient scale 1.
class Shards {
 public:
  absl::Status Allocate(const ParameterTable& table, Allocator& allocator, int rank,
                        int world_size) {
    std::vector<int64_t> offsets;
    int64_t floats = 0;
    for (int id = 0; id < table.size(); ++id) {
      offsets.push_back(floats);
      const int64_t rows = RowsOfRank(table[id].spec.rows, world_size, rank).size();
      floats += (rows * table[id].spec.cols + 15) / 16 * 16;  // on cache lines
    }
    DIM0_ASSIGN_OR_RETURN(values_,
                          allocator.Allocate(MemoryPurpose::kParameters, FloatBytes(floats)));
    DIM0_ASSIGN_OR_RETURN(gradients_,
                          allocator.Allocate(MemoryPurpose::kGradients, FloatBytes(floats)));
    units_.resize(table.num_units());
    for (int id = 0; id < table.size(); ++id) {
      const ParameterSpec& spec = table[id].spec;
      const RowRange rows = RowsOfRank(spec.rows, world_size, rank);
      Unit& unit = units_[table[id].unit];
      unit.index = table[id].unit;
      const bool real = values_.data() != nullptr;
      const auto place = [&](const Buffer& buffer) {
        return F32(real ? buffer.f32() + offsets[id] : nullptr, rows.size(), spec.cols);
      };
      unit.parameters.push_back(
          {.id = id, .rows = rows, .value = place(values_), .gradient = place(gradients_)});
    }
    return absl::OkStatus();
  }

  // Gradients are a function of parameter and global element, whatever the number of ranks; `first`
  // is the number of the first parameter. Values stay 0. Blocks.
  absl::Status FillGradients(Device& device, Stream& stream, int threads, int first = 0) {
    for (const Unit& unit : units_) {
      for (const ParameterShard& shard : unit.parameters) {
        DIM0_RETURN_IF_ERROR(FillRandom(device, stream, threads, first + shard.id,
                                        shard.rows.begin * shard.value.cols, shard.value.size(),
                                        shard.gradient.f32()));
      }
    }
    return absl::OkStatus();
  }

  const std::vector<Unit>& units() const { return units_; }

 private:
  Buffer values_, gradients_;
  std::vector<Unit> units_;
};

// What one rank's schemes have in common.
struct Rank {
  const OptimizerBenchOptions& options;
  const ParameterTable& table;
  int rank;
  Device& device;
  Allocator& allocator;  // may only count
  const Shards& shards;
};

// One rank's side of a scheme.
class Stepper {
 public:
  virtual ~Stepper() = default;
  // Runs a step; returns when it has ended on this rank. Every rank calls it.
  virtual absl::Status Step(const StepParams& params) = 0;
};

// The optimizers of training, on shards of whole rows.
class RowStepper : public Stepper {
 public:
  static absl::StatusOr<std::unique_ptr<Stepper>> Create(
      const OptimizerConfig& config, const Rank& rank, ProcessGroup& group,
      const std::shared_ptr<OptimizerKernels>& kernels) {
    auto stepper = std::make_unique<RowStepper>(rank.shards);
    DIM0_ASSIGN_OR_RETURN(stepper->optimizer_,
                          CreateOptimizer(config, rank.device, group, kernels));
    std::vector<int> ids(rank.table.size()), order(rank.table.num_units());
    std::iota(ids.begin(), ids.end(), 0);
    std::iota(order.begin(), order.end(), 0);
    DIM0_RETURN_IF_ERROR(stepper->optimizer_->Plan(rank.table, ids,
                                                   {.allocator = &rank.allocator,
                                                    .rank = rank.rank,
                                                    .world_size = rank.options.ranks,
                                                    .update_order = order}));
    return stepper;
  }

  explicit RowStepper(const Shards& shards) : shards_(shards) {}

  absl::Status Step(const StepParams& params) override {
    for (const Unit& unit : shards_.units()) {
      DIM0_RETURN_IF_ERROR(optimizer_->Update(unit, params, Event()));
    }
    for (const Unit& unit : shards_.units()) {
      DIM0_RETURN_IF_ERROR(optimizer_->Updated(unit).Wait());
    }
    return absl::OkStatus();
  }

 private:
  const Shards& shards_;
  std::unique_ptr<Optimizer> optimizer_;
};

// RMNP in layouts that training does not use; they have buffers of their own.
class LayoutStepper : public Stepper {
 public:
  static absl::StatusOr<std::unique_ptr<Stepper>> Create(
      Scheme scheme, const Rank& rank, ProcessGroup& group,
      std::shared_ptr<OptimizerKernels> kernels) {
    const std::vector<MatrixShape> shapes = Shapes(rank.table);
    const int world_size = rank.options.ranks;
    RmnpLayout layout;
    if (scheme == Scheme::kRmnpRowBlocks) {
      std::vector<std::vector<int64_t>> cuts(shapes.size());
      for (size_t i = 0; i < shapes.size(); ++i) {
        for (int r = 0; r <= world_size; ++r) cuts[i].push_back(shapes[i].rows * r / world_size);
      }
      layout = RowBlockLayout(shapes, cuts, rank.rank);
    } else if (scheme == Scheme::kRmnpColumns) {
      layout = ColumnLayout(shapes, world_size, rank.rank);
    } else {
      layout = FlatLayout(shapes, world_size, rank.rank);
    }
    auto stepper = std::make_unique<LayoutStepper>();
    stepper->stream_ = rank.device.NewStream("optimizer");
    const int64_t bytes = FloatBytes(layout.elements);
    const auto allocate = [&](MemoryPurpose purpose, Buffer& buffer) -> absl::Status {
      DIM0_ASSIGN_OR_RETURN(buffer, rank.allocator.Allocate(purpose, bytes));
      return absl::OkStatus();
    };
    DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kParameters, stepper->value_));
    DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kGradients, stepper->gradient_));
    DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kOptimizer, stepper->momentum_));
    if (!rank.allocator.plan_only() && !rank.options.ledger_only) {
      DIM0_RETURN_IF_ERROR(FillRandom(rank.device, *stepper->stream_, rank.options.threads_per_rank,
                                      rank.rank, 0, layout.elements, stepper->gradient_.f32()));
    }
    DIM0_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> channel, group.Open("rmnp"));
    if (kernels == nullptr) kernels = CreateOptimizerKernels(rank.device);
    DIM0_ASSIGN_OR_RETURN(
        stepper->rmnp_,
        ShardedRmnp::Create(std::move(layout), shapes, RmnpConfig(), rank.allocator, rank.device,
                            std::move(kernels), stepper->stream_, std::move(channel)));
    return stepper;
  }

  absl::Status Step(const StepParams& params) override {
    rmnp_->Step({value_.f32(), gradient_.f32(), momentum_.f32()}, params, Event());
    return stream_->Synchronize();
  }

 private:
  Buffer value_, gradient_, momentum_;
  std::shared_ptr<Stream> stream_;
  std::unique_ptr<ShardedRmnp> rmnp_;
};

bool HoldsWholeRowsAsTrainingDoes(Scheme scheme) {
  return scheme != Scheme::kRmnpRowBlocks && scheme != Scheme::kRmnpColumns &&
         scheme != Scheme::kRmnpFlat;
}

absl::StatusOr<std::unique_ptr<Stepper>> CreateStepper(Scheme scheme, const Rank& rank,
                                                       ProcessGroup& group) {
  std::shared_ptr<OptimizerKernels> kernels;  // the device's own
  if (rank.options.ledger_only) kernels = std::make_shared<NoArithmetic>();
  if (!HoldsWholeRowsAsTrainingDoes(scheme)) {
    return LayoutStepper::Create(scheme, rank, group, std::move(kernels));
  }
  OptimizerConfig config;
  switch (scheme) {
    case Scheme::kAdamW:
      config.name = "adamw";
      break;
    case Scheme::kMuonRedundant:
      config = {.name = "muon", .muon = {.schedule = MuonSchedule::kRedundant}};
      break;
    case Scheme::kMuonBroadcast:
      config = {.name = "muon", .muon = {.schedule = MuonSchedule::kBroadcast}};
      break;
    case Scheme::kMuonOwner:
      config = {.name = "muon", .muon = {.schedule = MuonSchedule::kOwner}};
      break;
    default:
      config.name = "rmnp";
      break;
  }
  return RowStepper::Create(config, rank, group, kernels);
}

bool AnyHoldsWholeRows(absl::Span<const Scheme> schemes) {
  return std::any_of(schemes.begin(), schemes.end(), HoldsWholeRowsAsTrainingDoes);
}

// Bytes a parameter that a pass of the scheme must move if each value is read and written once; 0
// for schemes that are more than one pass.
double BytesPerParameter(Scheme scheme) {
  if (scheme == Scheme::kRmnpRows) return 20;
  return scheme == Scheme::kAdamW ? 28 : 0;
}

// One rank's measurements of one step.
struct Sample {
  absl::Time begin, end;
  RankReport report;            // not of a run that only counts bytes
  double flops = 0, bytes = 0;  // of the ops that are no collectives
  int64_t sent = 0;
  double bandwidth = 0;
};
using Samples = std::vector<Sample>;  // by repeat

// One rank's part of MeasureSchemes. `groups` holds a group per scheme and one for barriers.
absl::Status MeasureOnRank(const OptimizerBenchOptions& options, const ParameterTable& table,
                           absl::Span<const Scheme> schemes, int rank,
                           absl::Span<const Groups> groups, absl::Span<Samples> samples) {
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, DeviceOf(options, rank));
  Allocator allocator(device.get());
  const std::unique_ptr<Stream> stream = device->NewStream("setup");
  DIM0_ASSIGN_OR_RETURN(const Buffer gradient_scale,
                        allocator.Allocate(MemoryPurpose::kCommunication, sizeof(float)));
  device->ClipScale(*stream, nullptr, 0, 0, 0, 0, gradient_scale.f32());  // 1
  DIM0_RETURN_IF_ERROR(stream->Synchronize());

  Shards shards;
  if (AnyHoldsWholeRows(schemes)) {
    DIM0_RETURN_IF_ERROR(shards.Allocate(table, allocator, rank, options.ranks));
    if (!options.ledger_only) {
      DIM0_RETURN_IF_ERROR(shards.FillGradients(*device, *stream, options.threads_per_rank));
    }
  }
  // Before the steppers, whose streams report to them.
  std::vector<std::unique_ptr<OpRecorder>> recorders;
  std::vector<std::unique_ptr<Stepper>> steppers;
  for (size_t i = 0; i < schemes.size(); ++i) {
    recorders.push_back(std::make_unique<OpRecorder>());
    device->SetRecorder(recorders.back().get());
    DIM0_ASSIGN_OR_RETURN(
        std::unique_ptr<Stepper> stepper,
        CreateStepper(schemes[i], {options, table, rank, *device, allocator, shards},
                      *groups[i][rank]));
    steppers.push_back(std::move(stepper));
  }
  device->SetRecorder(nullptr);
  device->SetFailureHandler([&](const absl::Status& error) {
    for (const Groups& of_scheme : groups) of_scheme[rank]->Abort(error);
  });

  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> meeting,
                        groups.back()[rank]->OpenHost("bench"));
  const CallInfo call{.unit = "bench"};
  const int warmup = options.ledger_only ? 0 : options.warmup;
  const int repeats = options.ledger_only ? 1 : options.repeats;
  for (int step = 1; step <= warmup + repeats; ++step) {
    for (size_t i = 0; i < schemes.size(); ++i) {
      Sample sample;
      if (!options.ledger_only && step > warmup && BytesPerParameter(schemes[i]) > 0) {
        DIM0_RETURN_IF_ERROR(meeting->Barrier(call));
        DIM0_ASSIGN_OR_RETURN(sample.bandwidth, MeasureBandwidth(*device, kYardstick));
      }
      recorders[i]->Clear();
      const ByteLedger& ledger = groups[i][rank]->ledger();
      const int64_t sent_before = ledger.bytes(Purpose::kOptimizer);
      DIM0_RETURN_IF_ERROR(meeting->Barrier(call));
      sample.begin = SteadyNow();
      DIM0_RETURN_IF_ERROR(
          steppers[i]->Step({.step = step, .gradient_scale = gradient_scale.f32()}));
      sample.end = SteadyNow();
      DIM0_RETURN_IF_ERROR(groups[i][rank]->Health());
      sample.sent = ledger.bytes(Purpose::kOptimizer) - sent_before;
      if (!options.ledger_only) {
        const TraceStep whole = {step, absl::ToUnixMicros(sample.begin),
                                 absl::ToUnixMicros(sample.end)};
        DIM0_ASSIGN_OR_RETURN(const TraceReport report,
                              AnalyzeTraces({MakeTrace(*recorders[i], {}, {whole}, {})}));
        sample.report = report.mean;
      }
      for (const StreamRecord* record : recorders[i]->streams()) {
        for (const RecordedOp& op : record->ops()) {
          if (op.info.kind == OpKind::kCollective) continue;
          sample.flops += op.info.flops;
          sample.bytes += op.info.bytes;
        }
      }
      if (step > warmup) samples[i].push_back(sample);
    }
  }
  return absl::OkStatus();
}

// What a scheme's samples, by rank, say together.
SchemeResult Summarize(const OptimizerBenchOptions& options, int64_t elements, Scheme scheme,
                       const std::vector<const Samples*>& by_rank) {
  SchemeResult result{.scheme = scheme};
  int64_t sent = 0;
  for (const Samples* samples : by_rank) {
    sent += samples->back().sent;
    result.most_bytes_per_step = std::max(result.most_bytes_per_step, samples->back().sent);
  }
  result.bytes_per_step = (sent + options.ranks / 2) / options.ranks;
  if (options.ledger_only) return result;

  const size_t repeats = by_rank[0]->size();
  std::vector<absl::Time> begins(repeats, absl::InfiniteFuture());
  for (const Samples* samples : by_rank) {
    for (size_t k = 0; k < repeats; ++k) begins[k] = std::min(begins[k], (*samples)[k].begin);
  }
  result.step_ms.resize(repeats);
  std::vector<double> bandwidths(repeats);
  double flops = 0, bytes = 0;
  for (const Samples* samples : by_rank) {
    std::vector<double> step_ms, comm_ms, compute_ms, exposed_ms;
    for (size_t k = 0; k < repeats; ++k) {
      const Sample& sample = (*samples)[k];
      step_ms.push_back(absl::ToDoubleMilliseconds(sample.end - begins[k]));
      const Overlap& all = sample.report.all;
      comm_ms.push_back(all.communication);
      compute_ms.push_back(sample.report.split.compute + sample.report.split.optimizer_compute);
      exposed_ms.push_back(all.communication - all.hidden);
      result.step_ms[k] = std::max(result.step_ms[k], step_ms.back());
      bandwidths[k] += sample.bandwidth;
    }
    flops += samples->back().flops;
    bytes += samples->back().bytes;
    if (Median(step_ms) <= result.ms_per_step) continue;
    result.ms_per_step = Median(step_ms);
    result.comm_ms = Median(comm_ms);
    result.compute_ms = Median(compute_ms);
    result.exposed_comm_ms = Median(exposed_ms);
  }
  result.gflops = flops / result.ms_per_step * 1e-6;
  result.gb_per_s = bytes / result.ms_per_step * 1e-6;
  if (const double per_parameter = BytesPerParameter(scheme); per_parameter > 0) {
    std::vector<double> ratios;
    for (size_t k = 0; k < repeats; ++k) {
      ratios.push_back(per_parameter * elements / (result.step_ms[k] * 1e-3) / bandwidths[k]);
    }
    result.of_bandwidth = Median(ratios);
  }
  return result;
}

absl::StatusOr<std::vector<Groups>> CreateGroups(Backend backend, int ranks, size_t count,
                                                 const std::optional<LinkSpeed>& link = {}) {
  std::vector<Groups> groups;
  for (size_t i = 0; i < count; ++i) {
    // Ranks wait for each other's arithmetic, which on a busy machine may take any time.
    DIM0_ASSIGN_OR_RETURN(
        Groups created,
        CreateLocalRanks(backend, ranks, {.timeout = absl::InfiniteDuration(), .link = link}));
    groups.push_back(std::move(created));
  }
  return groups;
}

// Newton-Schulz on matrices of one shape at once, with the memory that it needs.
class NewtonSchulzRun {
 public:
  static absl::StatusOr<std::unique_ptr<NewtonSchulzRun>> Create(NewtonSchulzAlgorithm algorithm,
                                                                 const MatrixShape& shape,
                                                                 int64_t count, int threads,
                                                                 Device& device, Stream& stream,
                                                                 Allocator& allocator) {
    auto run = std::make_unique<NewtonSchulzRun>(algorithm, shape, count);
    DIM0_ASSIGN_OR_RETURN(
        run->buffer_, allocator.Allocate(
                          MemoryPurpose::kOptimizer,
                          FloatBytes(2 * run->padded() + count * run->newton_schulz_.workspace())));
    if (allocator.plan_only()) return run;
    DIM0_RETURN_IF_ERROR(FillRandom(device, stream, threads, 0, 0, count * shape.rows * shape.cols,
                                    run->buffer_.f32()));
    return run;
  }

  NewtonSchulzRun(NewtonSchulzAlgorithm algorithm, const MatrixShape& shape, int64_t count)
      : newton_schulz_({.algorithm = algorithm}, shape.rows, shape.cols),
        shape_(shape),
        count_(count) {}

  double flops() const { return count_ * newton_schulz_.flops(); }

  // How long one run takes.
  absl::StatusOr<double> Seconds(OptimizerKernels& kernels, Stream& stream) const {
    float* data = buffer_.f32();
    const absl::Time begin = SteadyNow();
    newton_schulz_.Enqueue(kernels, stream, F32(data, count_ * shape_.rows, shape_.cols),
                           F32(data + padded(), count_ * shape_.rows, shape_.cols),
                           data + 2 * padded());
    DIM0_RETURN_IF_ERROR(stream.Synchronize());
    return absl::ToDoubleSeconds(SteadyNow() - begin);
  }

 private:
  // Elements of the matrices, up to the next cache line.
  int64_t padded() const { return (count_ * shape_.rows * shape_.cols + 15) / 16 * 16; }

  const NewtonSchulz newton_schulz_;
  const MatrixShape shape_;
  const int64_t count_;
  Buffer buffer_;  // input, result, workspace
};

using NewtonSchulzRuns = std::vector<std::unique_ptr<NewtonSchulzRun>>;

// The default algorithm on every distinct shape, matrices and their transposes counting as one: of
// each as many as are worth having at once, if the model has so many.
absl::StatusOr<NewtonSchulzRuns> DefaultRuns(const ParameterTable& table, int threads,
                                             const OptimizerKernels& kernels, Device& device,
                                             Stream& stream, Allocator& allocator) {
  std::set<std::pair<int64_t, int64_t>> seen;
  NewtonSchulzRuns runs;
  const std::vector<MatrixShape> shapes = Shapes(table);
  for (const MatrixShape& shape : shapes) {
    if (!seen.insert(std::minmax({shape.rows, shape.cols})).second) continue;
    const int64_t alike =
        std::count_if(shapes.begin(), shapes.end(), [&](const MatrixShape& other) {
          return other.rows == shape.rows && other.cols == shape.cols;
        });
    const int64_t count = std::clamp<int64_t>(
        kernels.matrix_elements_at_once() / (shape.rows * shape.cols), 1, alike);
    DIM0_ASSIGN_OR_RETURN(std::unique_ptr<NewtonSchulzRun> run,
                          NewtonSchulzRun::Create(NewtonSchulzConfig().algorithm, shape, count,
                                                  threads, device, stream, allocator));
    runs.push_back(std::move(run));
  }
  return runs;
}

MatrixShape LargestShape(const ParameterTable& table) {
  const std::vector<MatrixShape> shapes = Shapes(table);
  return *std::max_element(
      shapes.begin(), shapes.end(),
      [](const MatrixShape& a, const MatrixShape& b) { return a.rows * a.cols < b.rows * b.cols; });
}

struct NewtonSchulzSample {
  double rate = 0, matmul_rate = 0;  // FLOP/s
};

absl::Status MeasureNewtonSchulzOnRank(const OptimizerBenchOptions& options,
                                       const ParameterTable& table, ProcessGroup& group,
                                       std::vector<NewtonSchulzSample>& samples) {
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, DeviceOf(options, group.rank()));
  Allocator allocator(device.get());
  const std::unique_ptr<Stream> stream = device->NewStream("newton_schulz");
  const std::unique_ptr<OptimizerKernels> kernels = CreateOptimizerKernels(*device);
  DIM0_ASSIGN_OR_RETURN(
      const NewtonSchulzRuns runs,
      DefaultRuns(table, options.threads_per_rank, *kernels, *device, *stream, allocator));
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> meeting, group.OpenHost("bench"));
  const CallInfo call{.unit = "bench"};
  for (int repeat = 0; repeat <= options.repeats; ++repeat) {
    NewtonSchulzSample sample;
    DIM0_RETURN_IF_ERROR(meeting->Barrier(call));
    sample.matmul_rate =
        device->MeasureMatMulRate(DefaultParameterDType(options.backend), kYardstick);
    DIM0_RETURN_IF_ERROR(meeting->Barrier(call));
    double flops = 0, seconds = 0;
    for (const auto& run : runs) {
      DIM0_ASSIGN_OR_RETURN(const double run_seconds, run->Seconds(*kernels, *stream));
      seconds += run_seconds;
      flops += run->flops();
    }
    sample.rate = flops / seconds;
    if (repeat > 0) samples.push_back(sample);  // the first brings caches and pages in
  }
  return absl::OkStatus();
}

// The standard algorithm and the default one on the largest shape.
absl::StatusOr<NewtonSchulzRuns> ComparedRuns(const ParameterTable& table, int threads,
                                              Device& device, Stream& stream,
                                              Allocator& allocator) {
  NewtonSchulzRuns runs;
  for (const NewtonSchulzAlgorithm algorithm :
       {NewtonSchulzAlgorithm::kStandard, NewtonSchulzConfig().algorithm}) {
    DIM0_ASSIGN_OR_RETURN(std::unique_ptr<NewtonSchulzRun> run,
                          NewtonSchulzRun::Create(algorithm, LargestShape(table), 1, threads,
                                                  device, stream, allocator));
    runs.push_back(std::move(run));
  }
  return runs;
}

absl::StatusOr<double> MeasureSpeedupOverStandard(const OptimizerBenchOptions& options,
                                                  const ParameterTable& table) {
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, DeviceOf(options, 0));
  Allocator allocator(device.get());
  const std::unique_ptr<Stream> stream = device->NewStream("newton_schulz");
  const std::unique_ptr<OptimizerKernels> kernels = CreateOptimizerKernels(*device);
  DIM0_ASSIGN_OR_RETURN(const NewtonSchulzRuns runs,
                        ComparedRuns(table, options.threads_per_rank, *device, *stream, allocator));
  std::vector<double> ratios;
  for (int repeat = 0; repeat <= options.repeats; ++repeat) {
    DIM0_ASSIGN_OR_RETURN(const double standard, runs[0]->Seconds(*kernels, *stream));
    DIM0_ASSIGN_OR_RETURN(const double chosen, runs[1]->Seconds(*kernels, *stream));
    if (repeat > 0) ratios.push_back(standard / chosen);
  }
  return Median(ratios);
}

// Runs two steps of RMNP on a table of one unit, sharded over options.ranks; its first parameter
// has the number `first`. Returns the whole values after them, parameter behind parameter.
absl::StatusOr<std::vector<float>> RunRmnp(const OptimizerBenchOptions& options,
                                           const ParameterTable& table, int first) {
  const int ranks = options.ranks;
  std::vector<int64_t> offsets;
  int64_t elements = 0;
  for (int id = 0; id < table.size(); ++id) {
    offsets.push_back(elements);
    elements += table[id].spec.size();
  }
  std::vector<float> values(elements);
  DIM0_ASSIGN_OR_RETURN(const std::vector<Groups> groups, CreateGroups(options.backend, ranks, 1));
  DIM0_RETURN_IF_ERROR(RunRanks(ranks, groups, [&](int rank) -> absl::Status {
    DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, DeviceOf(options, rank));
    Allocator allocator(device.get());
    const std::unique_ptr<Stream> stream = device->NewStream("setup");
    DIM0_ASSIGN_OR_RETURN(const Buffer scale,
                          allocator.Allocate(MemoryPurpose::kCommunication, sizeof(float)));
    device->ClipScale(*stream, nullptr, 0, 0, 0, 0, scale.f32());  // 1
    Shards shards;
    DIM0_RETURN_IF_ERROR(shards.Allocate(table, allocator, rank, ranks));
    DIM0_RETURN_IF_ERROR(shards.FillGradients(*device, *stream, options.threads_per_rank, first));
    DIM0_ASSIGN_OR_RETURN(
        const std::unique_ptr<Stepper> stepper,
        CreateStepper(Scheme::kRmnpRows, {options, table, rank, *device, allocator, shards},
                      *groups[0][rank]));
    for (int step = 1; step <= 2; ++step) {
      DIM0_RETURN_IF_ERROR(stepper->Step({.step = step, .gradient_scale = scale.f32()}));
    }
    for (const ParameterShard& shard : shards.units()[0].parameters) {
      if (shard.value.size() == 0) continue;
      device->CopyToHost(*stream,
                         values.data() + offsets[shard.id] + shard.rows.begin * shard.value.cols,
                         shard.value.data, shard.value.bytes());
    }
    return stream->Synchronize();
  }));
  return values;
}

}  // namespace

absl::string_view Name(Scheme scheme) {
  switch (scheme) {
    case Scheme::kRmnpRows:
      return "rmnp_rows";
    case Scheme::kRmnpRowBlocks:
      return "rmnp_row_blocks";
    case Scheme::kRmnpColumns:
      return "rmnp_columns";
    case Scheme::kRmnpFlat:
      return "rmnp_flat";
    case Scheme::kMuonRedundant:
      return "muon_redundant";
    case Scheme::kMuonBroadcast:
      return "muon_broadcast";
    case Scheme::kMuonOwner:
      return "muon_owner";
    case Scheme::kAdamW:
      return "adamw";
  }
  return "?";
}

absl::StatusOr<Scheme> ParseScheme(absl::string_view name) {
  std::vector<absl::string_view> names;
  for (const Scheme scheme : kAllSchemes) {
    if (name == Name(scheme)) return scheme;
    names.push_back(Name(scheme));
  }
  return absl::NotFoundError(
      absl::StrCat("scheme '", name, "' is unknown; choose from ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<std::vector<SchemeResult>> MeasureSchemes(const OptimizerBenchOptions& options,
                                                         absl::Span<const Scheme> schemes) {
  const ParameterTable table(options.units);
  // A group, and with it a ledger, for each scheme; one more for barriers.
  DIM0_ASSIGN_OR_RETURN(
      const std::vector<Groups> groups,
      CreateGroups(options.backend, options.ranks, schemes.size() + 1, options.link));
  std::vector<std::vector<Samples>> samples(options.ranks, std::vector<Samples>(schemes.size()));
  DIM0_RETURN_IF_ERROR(RunRanks(options.ranks, groups, [&](int rank) {
    return MeasureOnRank(options, table, schemes, rank, groups, absl::MakeSpan(samples[rank]));
  }));
  std::vector<SchemeResult> results;
  for (size_t i = 0; i < schemes.size(); ++i) {
    std::vector<const Samples*> by_rank;
    for (const std::vector<Samples>& rank : samples) by_rank.push_back(&rank[i]);
    results.push_back(Summarize(options, table.elements(), schemes[i], by_rank));
  }
  return results;
}

absl::StatusOr<std::vector<int64_t>> PlanSchemes(const OptimizerBenchOptions& options,
                                                 absl::Span<const Scheme> schemes) {
  const ParameterTable table(options.units);
  // Nothing is sent.
  DIM0_ASSIGN_OR_RETURN(const std::vector<Groups> groups,
                        CreateGroups(Backend::kCpu, options.ranks, schemes.size()));
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, DeviceOf(options, 0));
  std::vector<int64_t> bytes;
  for (int rank = 0; rank < options.ranks; ++rank) {
    Allocator allocator = Allocator::ForPlan();
    Shards shards;
    if (AnyHoldsWholeRows(schemes)) {
      DIM0_RETURN_IF_ERROR(shards.Allocate(table, allocator, rank, options.ranks));
    }
    std::vector<std::unique_ptr<Stepper>> steppers;
    for (size_t i = 0; i < schemes.size(); ++i) {
      DIM0_ASSIGN_OR_RETURN(
          std::unique_ptr<Stepper> stepper,
          CreateStepper(schemes[i], {options, table, rank, *device, allocator, shards},
                        *groups[i][rank]));
      steppers.push_back(std::move(stepper));
    }
    const MemoryUse use = allocator.current();
    bytes.push_back(options.ledger_only ? use[MemoryPurpose::kCommunication] : use.total());
  }
  return bytes;
}

absl::StatusOr<NewtonSchulzResult> MeasureNewtonSchulz(const OptimizerBenchOptions& options) {
  const ParameterTable table(options.units);
  DIM0_ASSIGN_OR_RETURN(const std::vector<Groups> groups,
                        CreateGroups(options.backend, options.ranks, 1));
  std::vector<std::vector<NewtonSchulzSample>> samples(options.ranks);
  DIM0_RETURN_IF_ERROR(RunRanks(options.ranks, groups, [&](int rank) {
    return MeasureNewtonSchulzOnRank(options, table, *groups[0][rank], samples[rank]);
  }));
  std::vector<double> ratios;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    double rate = 0, matmul_rate = 0;
    for (const auto& rank : samples) {
      rate += rank[repeat].rate;
      matmul_rate += rank[repeat].matmul_rate;
    }
    ratios.push_back(rate / matmul_rate);
  }
  const MatrixShape largest = LargestShape(table);
  NewtonSchulzResult result{
      .of_matmul_rate = Median(ratios), .rows = largest.rows, .cols = largest.cols};
  DIM0_ASSIGN_OR_RETURN(result.speedup_over_standard, MeasureSpeedupOverStandard(options, table));
  return result;
}

absl::StatusOr<std::vector<int64_t>> PlanNewtonSchulz(const OptimizerBenchOptions& options) {
  const ParameterTable table(options.units);
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, DeviceOf(options, 0));
  const std::unique_ptr<Stream> stream = device->NewStream("plan");
  const std::unique_ptr<OptimizerKernels> kernels = CreateOptimizerKernels(*device);
  Allocator on_all_ranks = Allocator::ForPlan(), on_one = Allocator::ForPlan();
  DIM0_RETURN_IF_ERROR(
      DefaultRuns(table, options.threads_per_rank, *kernels, *device, *stream, on_all_ranks)
          .status());
  DIM0_RETURN_IF_ERROR(
      ComparedRuns(table, options.threads_per_rank, *device, *stream, on_one).status());
  std::vector<int64_t> bytes(options.ranks, on_all_ranks.peak().total());
  bytes[0] = std::max(bytes[0], on_one.peak().total());
  return bytes;
}

absl::StatusOr<double> MeasureRmnpDifference(const OptimizerBenchOptions& options) {
  OptimizerBenchOptions unsharded = options;
  unsharded.ranks = 1;
  double difference = 0;
  int first = 0;
  for (const UnitSpec& unit : options.units) {
    const ParameterTable table({unit});
    DIM0_ASSIGN_OR_RETURN(const std::vector<float> sharded, RunRmnp(options, table, first));
    DIM0_ASSIGN_OR_RETURN(const std::vector<float> whole, RunRmnp(unsharded, table, first));
    for (size_t i = 0; i < whole.size(); ++i) {
      const double here = std::abs(static_cast<double>(sharded[i]) - whole[i]);
      // A NaN is no agreement.
      difference =
          std::max(difference, std::isnan(here) ? std::numeric_limits<double>::infinity() : here);
    }
    first += table.size();
  }
  return difference;
}

std::vector<int64_t> PlanRmnpDifference(const OptimizerBenchOptions& options) {
  int64_t largest = 0;
  for (const UnitSpec& unit : options.units) {
    largest = std::max(largest, ParameterTable({unit}).elements());
  }
  // Value, gradient, momentum; both runs' results. The run on one rank has them all.
  std::vector<int64_t> bytes(options.ranks);
  bytes[0] = FloatBytes(5 * largest);
  return bytes;
}

}  // namespace dim0
