#include "runtime/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/check.h"
#include "runtime/random.h"

namespace dim0 {
namespace {

// Every tensor in a shared buffer starts on a cache line.
constexpr int64_t kAlignFloats = 16;

int64_t Aligned(int64_t floats) {
  return (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
}

}  // namespace

Engine::Engine(const EngineOptions& options, Model& model, ProcessGroup& group, Device& device,
               Allocator& allocator, Optimizer* optimizer)
    : options_(options),
      model_(model),
      group_(group),
      device_(device),
      allocator_(allocator),
      optimizer_(optimizer),
      table_(model.units()) {
  const absl::Span<const Stage> stages = model_.stages();
  units_.resize(table_.num_units());
  for (int u = 0; u < table_.num_units(); ++u) units_[u].first_stage = -1;
  for (int s = 0; s < static_cast<int>(stages.size()); ++s) {
    UnitState& state = units_[stages[s].unit];
    if (state.first_stage < 0) {
      state.first_stage = s;
      update_order_.push_back(stages[s].unit);
    } else {
      state.several_stages = true;
    }
    state.last_stage = s;
  }
  for (int u = 0; u < table_.num_units(); ++u) {
    UnitState& state = units_[u];
    DIM0_CHECK(state.first_stage >= 0);
    state.stays = state.several_stages || !options_.reshard_after_forward;
    state.unit.index = u;
    for (int id = table_.first(u); id < table_.first(u + 1); ++id) {
      const ParameterSpec& spec = table_[id].spec;
      const RowRange rows = RowsOfRank(spec.rows, group_.world_size(), group_.rank());
      state.unit.parameters.push_back({.id = id,
                                       .rows = rows,
                                       .value = F32(nullptr, rows.size(), spec.cols),
                                       .gradient = F32(nullptr, rows.size(), spec.cols)});
      state.counts.push_back(ElementsPerRank(spec.rows, spec.cols, group_.world_size()));
    }
  }
  // After clipping all updates are ready at once and the next forward wants the first stage's unit
  // first. Without it units become ready as backward leaves them: in reverse order of first stages.
  if (options_.clip == 0) std::reverse(update_order_.begin(), update_order_.end());
}

Engine::~Engine() {
  // A rank that leaves must not take its memory from under collectives in flight.
  (void)Synchronize();
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, Model& model,
                                                       ProcessGroup& group, Device& device,
                                                       Allocator& allocator, Optimizer* optimizer) {
  if (options.prefetch < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("prefetch depth is ", options.prefetch, "; it must be 0 or more"));
  }
  auto engine = absl::WrapUnique(new Engine(options, model, group, device, allocator, optimizer));
  DIM0_RETURN_IF_ERROR(engine->Allocate());
  if (optimizer != nullptr) {
    std::vector<int> ids(engine->table_.size());
    for (int id = 0; id < engine->table_.size(); ++id) ids[id] = id;
    DIM0_RETURN_IF_ERROR(optimizer->Plan(engine->table_, ids,
                                         {.allocator = &allocator,
                                          .rank = group.rank(),
                                          .world_size = group.world_size(),
                                          .update_order = engine->update_order_}));
  }
  if (!allocator.plan_only()) DIM0_RETURN_IF_ERROR(engine->OpenChannels());
  return engine;
}

absl::Status Engine::Allocate() {
  const auto allocate = [&](MemoryPurpose purpose, int64_t floats, Buffer& buffer) -> absl::Status {
    DIM0_ASSIGN_OR_RETURN(buffer, allocator_.Allocate(purpose, floats * sizeof(float)));
    return absl::OkStatus();
  };

  int64_t shard_floats = 0;
  for (const UnitState& state : units_) {
    for (const ParameterShard& shard : state.unit.parameters) {
      shard_floats += Aligned(shard.value.size());
    }
  }
  DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kParameters, shard_floats, shard_values_));
  const bool trains = optimizer_ != nullptr;
  if (trains) {
    DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kGradients, shard_floats, shard_gradients_));
  }
  if (!allocator_.plan_only()) {
    int64_t offset = 0;
    for (UnitState& state : units_) {
      for (ParameterShard& shard : state.unit.parameters) {
        shard.value.data = shard_values_.f32() + offset;
        if (trains) shard.gradient.data = shard_gradients_.f32() + offset;
        offset += Aligned(shard.value.size());
      }
    }
  }

  // Whole units, gathered and as gradients.
  int64_t largest_gathered = 0, largest_gradient = 0;
  int sharing_gathered = 0, sharing_gradient = 0;
  for (UnitState& state : units_) {
    int64_t floats = 0;
    for (const ParameterShard& shard : state.unit.parameters) {
      floats += Aligned(table_[shard.id].spec.size());
    }
    if (state.stays) {
      DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kGathered, floats, state.own_gathered.buffer));
    } else {
      largest_gathered = std::max(largest_gathered, floats);
      ++sharing_gathered;
    }
    if (!trains) continue;
    if (state.several_stages || !options_.sync_every_micro_batch) {
      DIM0_RETURN_IF_ERROR(
          allocate(MemoryPurpose::kCommunication, floats, state.own_gradient.buffer));
    } else {
      largest_gradient = std::max(largest_gradient, floats);
      ++sharing_gradient;
    }
  }
  // No more slots than a micro-batch has gathers into them.
  gathered_slots_.resize(
      std::min(int64_t{options_.prefetch} + 1, int64_t{sharing_gathered} * (trains ? 2 : 1)));
  for (Slot& slot : gathered_slots_) {
    DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kGathered, largest_gathered, slot.buffer));
  }
  gradient_slots_.resize(std::min(2, sharing_gradient));
  for (Slot& slot : gradient_slots_) {
    DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kCommunication, largest_gradient, slot.buffer));
  }

  stats_size_ = kSquares + table_.size();
  DIM0_ASSIGN_OR_RETURN(
      stats_, allocator_.Allocate(MemoryPurpose::kCommunication, stats_size_ * sizeof(double)));
  DIM0_ASSIGN_OR_RETURN(all_stats_,
                        allocator_.Allocate(MemoryPurpose::kCommunication,
                                            group_.world_size() * stats_size_ * sizeof(double)));
  DIM0_ASSIGN_OR_RETURN(gradient_scale_,
                        allocator_.Allocate(MemoryPurpose::kCommunication, sizeof(float)));
  return absl::OkStatus();
}

absl::Status Engine::OpenChannels() {
  DIM0_ASSIGN_OR_RETURN(parameter_channel_, group_.Open("parameter"));
  DIM0_ASSIGN_OR_RETURN(gradient_channel_, group_.Open("gradient"));
  DIM0_ASSIGN_OR_RETURN(control_channel_, group_.Open("control"));
  compute_ = device_.NewStream("compute");
  all_gather_ = device_.NewStream("all_gather");
  reduce_scatter_ = device_.NewStream("reduce_scatter");
  return absl::OkStatus();
}

absl::Status Engine::Start(uint64_t seed) {
  uint64_t plan = table_.Hash();
  if (optimizer_ != nullptr) plan ^= optimizer_->PlanHash();
  DIM0_ASSIGN_OR_RETURN(const std::vector<std::string> plans,
                        Exchange(std::string(reinterpret_cast<const char*>(&plan), sizeof(plan))));
  std::vector<int> others;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    if (plans[rank] != plans[0]) others.push_back(rank);
  }
  if (!others.empty()) {
    return Fail(absl::FailedPreconditionError(
        absl::StrCat("ranks planned different runs: rank(s) ", absl::StrJoin(others, ", "),
                     " disagree with rank 0 on parameters or optimizer; start all ranks with the "
                     "same flags")));
  }

  if (options_.clip == 0) {  // a scale of 1, from no statistics, for the whole run
    device_.ClipScale(*compute_, nullptr, 0, 0, 0, 0, gradient_scale_.f32());
  }

  std::vector<float> rows;
  constexpr int64_t kPiece = int64_t{1} << 20;
  for (UnitState& state : units_) {
    for (ParameterShard& shard : state.unit.parameters) {
      const ParameterSpec& spec = table_[shard.id].spec;
      const int64_t first = shard.rows.begin * spec.cols;
      for (int64_t done = 0; done < shard.value.size(); done += kPiece) {
        const int64_t count = std::min(kPiece, shard.value.size() - done);
        rows.assign(count, spec.init.kind == Init::Kind::kOne ? 1.0f : 0.0f);
        if (spec.init.kind == Init::Kind::kNormal) {
          FillNormal(seed, shard.id, first + done, spec.init.stddev, absl::MakeSpan(rows));
        }
        device_.CopyFromHost(*compute_, shard.value.f32() + done, rows.data(),
                             count * sizeof(float));
        DIM0_RETURN_IF_ERROR(compute_->Synchronize());
      }
    }
  }
  return absl::OkStatus();
}

int64_t Engine::BytesOf(const UnitState& state) const {
  return table_.unit_elements(state.unit.index) * static_cast<int64_t>(sizeof(float));
}

MemoryUse Engine::LiveBetweenSteps() const {
  MemoryUse use = allocator_.current();
  const auto take = [&use](MemoryPurpose purpose, const Slot& slot) {
    use.bytes[static_cast<int>(purpose)] -= slot.buffer.bytes();
  };
  for (const UnitState& state : units_) {
    take(MemoryPurpose::kGathered, state.own_gathered);
    take(MemoryPurpose::kCommunication, state.own_gradient);
  }
  for (const Slot& slot : gathered_slots_) take(MemoryPurpose::kGathered, slot);
  for (const Slot& slot : gradient_slots_) take(MemoryPurpose::kCommunication, slot);
  return use;
}

Engine::Views Engine::ViewsOf(const UnitState& state, const Slot& slot) const {
  Views views;
  int64_t offset = 0;
  for (const ParameterShard& shard : state.unit.parameters) {
    const ParameterSpec& spec = table_[shard.id].spec;
    views.push_back(F32(slot.buffer.f32() + offset, spec.rows, spec.cols));
    offset += Aligned(spec.size());
  }
  return views;
}

Engine::Gathered Engine::Gather(UnitState& state, Phase phase) {
  Slot* const slot = state.stays ? &state.own_gathered
                                 : &gathered_slots_[next_gathered_slot_++ % gathered_slots_.size()];
  const std::string& name = table_.unit_name(state.unit.index);
  const RecordedUnit recorded(device_.recorder(), name, phase);
  all_gather_->Wait(slot->free);
  if (optimizer_ != nullptr) all_gather_->Wait(optimizer_->Updated(state.unit));
  all_gather_->CountLive(MemoryPurpose::kGathered, BytesOf(state));

  const Views whole = ViewsOf(state, *slot);
  std::vector<AllGatherPart> parts;
  for (size_t i = 0; i < whole.size(); ++i) {
    parts.push_back({.send = state.unit.parameters[i].value.data,
                     .recv = whole[i].data,
                     .counts = state.counts[i]});
  }
  all_gather_->Enqueue({.name = absl::StrCat("all_gather ", name),
                        .kind = OpKind::kCollective,
                        .bytes = 4.0 * table_.unit_elements(state.unit.index)},
                       [this, name, parts = std::move(parts)](const OpContext& context) {
                         return parameter_channel_->AllGather(
                             {Purpose::kParameter, name, context.native_stream, context.call},
                             DType::kFloat32, parts);
                       });
  return {slot, all_gather_->Record()};
}

void Engine::IssueGathers(int64_t limit) {
  while (gathered_.size() < std::min<size_t>(limit, gather_order_.size())) {
    const size_t next = gathered_.size();
    gathered_.push_back(Gather(units_[gather_order_[next]],
                               next < forward_gathers_ ? Phase::kForward : Phase::kBackward));
  }
}

void Engine::Unshard(UnitState& state, bool gathers_here) {
  if (gathers_here) ++gathers_used_;
  IssueGathers(int64_t{gathers_used_} + options_.prefetch);
  if (!gathers_here) return;  // its first stage in this direction has waited already
  const Gathered& gathered = gathered_[gathers_used_ - 1];
  state.gathered = gathered.slot;
  compute_->Wait(gathered.ready);
}

void Engine::Reshard(UnitState& state) {
  DIM0_CHECK(state.gathered != nullptr);
  compute_->CountLive(MemoryPurpose::kGathered, -BytesOf(state));
  state.gathered->free = compute_->Record();
  state.gathered = nullptr;
}

void Engine::AcquireGradient(UnitState& state) {
  if (state.gradient != nullptr) return;
  const bool own = state.several_stages || !options_.sync_every_micro_batch;
  state.gradient =
      own ? &state.own_gradient : &gradient_slots_[next_gradient_slot_++ % gradient_slots_.size()];
  compute_->Wait(state.gradient->free);
  compute_->CountLive(MemoryPurpose::kCommunication, BytesOf(state));
}

void Engine::ReduceScatter(UnitState& state, bool accumulate) {
  const Views whole = ViewsOf(state, *state.gradient);
  std::vector<ReduceScatterPart> parts;
  for (size_t i = 0; i < whole.size(); ++i) {
    parts.push_back({.send = whole[i].data,
                     .recv = state.unit.parameters[i].gradient.data,
                     .counts = state.counts[i],
                     .accumulate = accumulate});
  }
  const std::string& name = table_.unit_name(state.unit.index);
  reduce_scatter_->Wait(compute_->Record());
  reduce_scatter_->Enqueue({.name = absl::StrCat("reduce_scatter ", name),
                            .kind = OpKind::kCollective,
                            .bytes = 4.0 * table_.unit_elements(state.unit.index)},
                           [this, name, parts = std::move(parts)](const OpContext& context) {
                             return gradient_channel_->ReduceScatter(
                                 {Purpose::kGradient, name, context.native_stream, context.call},
                                 DType::kFloat32, parts);
                           });
  reduce_scatter_->CountLive(MemoryPurpose::kCommunication, -BytesOf(state));
  state.gradient->free = reduce_scatter_->Record();
  state.gradient = nullptr;
}

void Engine::MeasureGradient(UnitState& state) {
  auto* squares = static_cast<double*>(stats_.data()) + kSquares;
  for (const ParameterShard& shard : state.unit.parameters) {
    device_.SumOfSquares(*reduce_scatter_, shard.gradient, squares + shard.id);
  }
}

void Engine::RunMicroBatch(const Batch& batch, bool training, bool first, bool last,
                           float gradient_scale, const std::function<void(UnitState&)>& reduced) {
  const absl::Span<const Stage> stages = model_.stages();
  const int num_stages = static_cast<int>(stages.size());
  auto* loss_sum = static_cast<double*>(stats_.data()) + kLoss;

  // A unit is gathered at its first stage in each direction. One that stays is gathered once in a
  // step: its parameters are the same in every micro-batch.
  const auto gathered_in_forward = [&](const UnitState& state, int s) {
    return s == state.first_stage && (first || !state.stays);
  };
  gather_order_.clear();
  gathered_.clear();
  gathers_used_ = 0;
  for (int s = 0; s < num_stages; ++s) {
    if (gathered_in_forward(units_[stages[s].unit], s)) gather_order_.push_back(stages[s].unit);
  }
  forward_gathers_ = gather_order_.size();
  for (int s = num_stages - 1; training && s >= 0; --s) {
    const UnitState& state = units_[stages[s].unit];
    if (state.last_stage == s && !state.stays) gather_order_.push_back(stages[s].unit);
  }

  model_.Begin(*compute_, batch, gradient_scale);
  for (int s = 0; s < num_stages; ++s) {
    UnitState& state = units_[stages[s].unit];
    const RecordedUnit recorded(device_.recorder(), table_.unit_name(stages[s].unit),
                                Phase::kForward);
    Unshard(state, gathered_in_forward(state, s));
    model_.Forward(s, ViewsOf(state, *state.gathered), training, loss_sum, *compute_);
    if (s == state.last_stage && !(training && state.stays)) Reshard(state);
  }
  if (!training) return;

  const bool reduce = last || options_.sync_every_micro_batch;
  for (int s = num_stages - 1; s >= 0; --s) {
    UnitState& state = units_[stages[s].unit];
    const RecordedUnit recorded(device_.recorder(), table_.unit_name(stages[s].unit),
                                Phase::kBackward);
    Unshard(state, s == state.last_stage && !state.stays);
    AcquireGradient(state);
    const bool accumulate = !first && !options_.sync_every_micro_batch;
    model_.Backward(s, ViewsOf(state, *state.gathered), ViewsOf(state, *state.gradient), accumulate,
                    *compute_);
    if (s != state.first_stage) continue;
    if (last || !state.stays) Reshard(state);
    if (reduce) ReduceScatter(state, /*accumulate=*/!first && options_.sync_every_micro_batch);
    if (last) reduced(state);
  }
}

absl::StatusOr<StepResult> Engine::TrainStep(absl::Span<const Batch> micro_batches,
                                             int64_t global_tokens, const StepParams& params,
                                             const std::atomic<bool>* stop) {
  DIM0_CHECK(optimizer_ != nullptr && !micro_batches.empty());
  auto* stats = static_cast<double*>(stats_.data());
  auto* all_stats = static_cast<double*>(all_stats_.data());
  StepParams step = params;
  step.gradient_scale = gradient_scale_.f32();
  absl::Status update_status;
  const auto update = [&](UnitState& state, const Event& ready) {
    const RecordedUnit recorded(device_.recorder(), table_.unit_name(state.unit.index),
                                Phase::kUpdate);
    if (update_status.ok()) update_status = optimizer_->Update(state.unit, step, ready);
  };
  device_.Zero(*compute_, stats, sizeof(double));
  // Issued here already so that the clock starts when the first stage could.
  const Event started = [&] {
    compute_->Wait(optimizer_->Updated(units_[model_.stages()[0].unit].unit));
    return compute_->Record();
  }();
  const auto num_batches = static_cast<int>(micro_batches.size());
  for (int i = 0; i < num_batches; ++i) {
    RunMicroBatch(micro_batches[i], /*training=*/true, i == 0, i + 1 == num_batches,
                  static_cast<float>(1.0 / global_tokens), [&](UnitState& state) {
                    MeasureGradient(state);
                    if (options_.clip == 0) update(state, reduce_scatter_->Record());
                  });
  }
  const Event finished = compute_->Record();

  reduce_scatter_->Wait(finished);
  reduce_scatter_->Enqueue({.name = "read_stop"}, [this, stop](const OpContext&) {
    stop_wish_ = stop != nullptr && stop->load() ? 1 : 0;
    return absl::OkStatus();
  });
  device_.CopyFromHost(*reduce_scatter_, stats + kStop, &stop_wish_, sizeof(double));
  const std::vector<int64_t> counts(group_.world_size(), stats_size_ * sizeof(double));
  reduce_scatter_->Enqueue({.name = "all_gather stats", .kind = OpKind::kCollective},
                           [this, counts](const OpContext& context) {
                             const AllGatherPart part = {stats_.data(), all_stats_.data(), counts};
                             return control_channel_->AllGather(
                                 {Purpose::kControl, "stats", context.native_stream, context.call},
                                 DType::kByte, {&part, 1});
                           });
  if (options_.clip > 0) {
    device_.ClipScale(*reduce_scatter_, all_stats + kSquares, group_.world_size(), stats_size_,
                      table_.size(), options_.clip, gradient_scale_.f32());
  }
  std::vector<double> host_stats(group_.world_size() * stats_size_);
  device_.CopyToHost(*reduce_scatter_, host_stats.data(), all_stats,
                     host_stats.size() * sizeof(double));
  const Event known = reduce_scatter_->Record();
  if (options_.clip > 0) {
    for (const int u : update_order_) update(units_[u], known);
  }

  if (absl::Status status = known.Wait(); !status.ok()) return Fail(std::move(status));
  if (!update_status.ok()) return Fail(std::move(update_status));
  if (absl::Status status = CheckFinite(host_stats); !status.ok()) return Fail(std::move(status));

  StepResult result;
  double squares = 0;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    const double* row = host_stats.data() + rank * stats_size_;
    result.loss += row[kLoss];
    result.stop = result.stop || row[kStop] != 0;
    for (int id = 0; id < table_.size(); ++id) squares += row[kSquares + id];
  }
  result.loss /= global_tokens;
  result.gradient_norm = std::sqrt(squares);
  // As Device::ClipScale decides.
  result.clipped = options_.clip > 0 && options_.clip < result.gradient_norm + 1e-6;
  result.forward_backward = finished.points().front()->time() - started.points().front()->time();
  return result;
}

absl::Status Engine::CheckFinite(absl::Span<const double> all_stats) const {
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    const double* row = all_stats.data() + rank * stats_size_;
    if (!std::isfinite(row[kLoss])) {
      return absl::OutOfRangeError(absl::StrCat("the loss of rank ", rank, " is ", row[kLoss]));
    }
  }
  // Backward meets the last units first: the first one it met that is not finite is the likely
  // origin.
  for (int u = table_.num_units() - 1; u >= 0; --u) {
    for (int id = table_.first(u); id < table_.first(u + 1); ++id) {
      for (int rank = 0; rank < group_.world_size(); ++rank) {
        const double squares = all_stats[rank * stats_size_ + kSquares + id];
        if (std::isfinite(squares)) continue;
        return absl::OutOfRangeError(absl::StrCat("the gradient of ", table_[id].spec.name,
                                                  " (unit ", table_.unit_name(u),
                                                  ") is not finite on rank ", rank));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Engine::Evaluate(absl::Span<const Batch> batches) {
  device_.Zero(*compute_, stats_.data(), sizeof(double));
  for (const Batch& batch : batches) {
    RunMicroBatch(batch, /*training=*/false, true, true, 0, nullptr);
  }
  double sum = 0;
  device_.CopyToHost(*compute_, &sum, stats_.data(), sizeof(double));
  if (absl::Status status = compute_->Synchronize(); !status.ok()) return Fail(std::move(status));
  DIM0_ASSIGN_OR_RETURN(const std::vector<std::string> sums,
                        Exchange(std::string(reinterpret_cast<const char*>(&sum), sizeof(sum))));
  double total = 0;
  for (const std::string& bytes : sums) {
    std::memcpy(&sum, bytes.data(), sizeof(sum));
    total += sum;
  }
  return total;
}

absl::Status Engine::GatherToRankZero(int parameter, absl::Span<float> whole) {
  const ParameterTable::Entry& entry = table_[parameter];
  return GatherToRankZero(parameter, units_[entry.unit].unit.parameters[entry.position].value,
                          whole.data());
}

absl::Status Engine::GatherToRankZero(int parameter, const Tensor& shard, float* whole) {
  const UnitState& state = units_[table_[parameter].unit];
  const int position = table_[parameter].position;
  if (optimizer_ != nullptr) reduce_scatter_->Wait(optimizer_->Updated(state.unit));
  reduce_scatter_->Enqueue(
      {.name = "gather", .kind = OpKind::kCollective}, [&](const OpContext& context) {
        return control_channel_->Gather(
            {Purpose::kControl, table_[parameter].spec.name, context.native_stream, context.call},
            DType::kFloat32, shard.data, whole, state.counts[position], /*root=*/0);
      });
  absl::Status status = reduce_scatter_->Synchronize();
  return status.ok() ? status : Fail(std::move(status));
}

absl::StatusOr<std::vector<std::string>> Engine::Exchange(const std::string& mine) {
  const std::vector<int64_t> counts(group_.world_size(), mine.size());
  std::string all(group_.world_size() * mine.size(), '\0');
  reduce_scatter_->Enqueue(
      {.name = "all_gather exchange", .kind = OpKind::kCollective}, [&](const OpContext& context) {
        const AllGatherPart part = {mine.data(), all.data(), counts};
        return control_channel_->AllGather(
            {Purpose::kControl, "exchange", context.native_stream, context.call}, DType::kByte,
            {&part, 1});
      });
  if (absl::Status status = reduce_scatter_->Synchronize(); !status.ok()) {
    return Fail(std::move(status));
  }
  std::vector<std::string> pieces;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    pieces.push_back(all.substr(rank * mine.size(), mine.size()));
  }
  return pieces;
}

absl::Status Engine::Synchronize() {
  absl::Status first;
  if (compute_ == nullptr) return first;
  if (optimizer_ != nullptr) {
    for (const UnitState& state : units_) {
      absl::Status status = optimizer_->Updated(state.unit).Wait();
      if (first.ok()) first = std::move(status);
    }
  }
  for (Stream* stream : {compute_.get(), all_gather_.get(), reduce_scatter_.get()}) {
    absl::Status status = stream->Synchronize();
    if (first.ok()) first = std::move(status);
  }
  return first;
}

absl::Status Engine::Fail(absl::Status status) {
  group_.Abort(status);
  return status;
}

}  // namespace dim0
