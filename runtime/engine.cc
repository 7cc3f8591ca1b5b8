#include "runtime/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/check.h"
#include "runtime/host_copy.h"
#include "runtime/random.h"

namespace dim0 {
namespace {

// Every tensor in a shared buffer starts on a cache line.
constexpr int64_t kAlignBytes = 64;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

bool IsFloating(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16; }

int64_t Sum(absl::Span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

int64_t BytesOf(absl::Span<const Tensor> tensors) {
  int64_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

// The pieces of `table` for an all-to-all: counts[r] rows for each rank r, one behind the other.
template <typename Piece>
std::vector<Piece> PiecesOf(const Tensor& table, absl::Span<const int64_t> counts) {
  std::vector<Piece> pieces;
  int64_t next = 0;
  for (const int64_t count : counts) {
    pieces.push_back({table.at(next), count * table.cols});
    next += count * table.cols;
  }
  return pieces;
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
  std::vector<int> whole(table_.num_units());  // stages that use the unit whole
  for (int s = 0; s < static_cast<int>(stages.size()); ++s) {
    UnitState& state = units_[stages[s].unit];
    if (state.first_stage < 0) {
      state.first_stage = s;
      update_order_.push_back(stages[s].unit);
    }
    DIM0_CHECK(s == 0 || stages[s].lookups.empty());
    if (stages[s].lookups.empty()) ++whole[stages[s].unit];
  }
  for (const Lookup& lookup : stages[0].lookups) {
    const int id = table_.first(stages[0].unit) + lookup.position;
    lookups_.push_back({.id = id, .most = std::min(lookup.most, table_[id].spec.rows)});
  }
  for (int u = 0; u < table_.num_units(); ++u) {
    UnitState& state = units_[u];
    DIM0_CHECK(whole[u] == 1);
    const bool is_last = u == stages.back().unit;
    state.stays = is_last || !options_.reshard_after_forward;
    // The last stage's unit is often the largest by far: two slots of its size would take more, and
    // backward's third unit would wait for the slot until its gradient has been reduced.
    state.own_gradient = is_last || !options_.sync_every_micro_batch;
    state.unit.index = u;
    for (int id = table_.first(u); id < table_.first(u + 1); ++id) {
      const ParameterSpec& spec = table_[id].spec;
      const RowRange rows = RowsOfRank(spec.rows, group_.world_size(), group_.rank());
      const auto shaped = [&](DType dtype) {
        return Tensor{nullptr, dtype, rows.size(), spec.cols};
      };
      const bool copied = options_.param_dtype != options_.master_dtype;
      state.unit.parameters.push_back({.id = id,
                                       .rows = rows,
                                       .value = shaped(options_.master_dtype),
                                       .gradient = shaped(options_.reduce_dtype),
                                       .copy = copied ? shaped(options_.param_dtype) : Tensor()});
      state.counts.push_back(ElementsPerRank(spec.rows, spec.cols, group_.world_size()));
    }
  }
  // After clipping all updates are ready at once and the next forward wants the first stage's unit
  // first. Without it units become ready as backward leaves them: in reverse order of first stages.
  if (options_.clip == 0) std::reverse(update_order_.begin(), update_order_.end());
}

Engine::~Engine() {
  device_.SetFailureHandler(nullptr);
  // A rank that leaves must not take its memory from under collectives in flight.
  (void)Synchronize();
}

absl::Status EngineOptions::Validate() const {
  if (prefetch < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("prefetch depth is ", prefetch, "; it must be 0 or more"));
  }
  for (const auto& [name, dtype] :
       {std::pair("master_dtype", master_dtype), std::pair("param_dtype", param_dtype),
        std::pair("reduce_dtype", reduce_dtype)}) {
    if (IsFloating(dtype)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", Name(dtype), "; choose float32 or bfloat16"));
  }
  if (master_dtype == DType::kBFloat16 && param_dtype == DType::kFloat32) {
    return absl::InvalidArgumentError(
        "--param_dtype=float32 with --master_dtype=bfloat16 would send twice the bytes of the same "
        "values; choose --param_dtype=bfloat16 too, or --master_dtype=float32");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, Model& model,
                                                       ProcessGroup& group, Device& device,
                                                       Allocator& allocator, Optimizer* optimizer) {
  DIM0_RETURN_IF_ERROR(options.Validate());
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
  const auto allocate = [&](MemoryPurpose purpose, int64_t bytes, Buffer& buffer) -> absl::Status {
    DIM0_ASSIGN_OR_RETURN(buffer, allocator_.Allocate(purpose, bytes));
    return absl::OkStatus();
  };
  // One buffer for that tensor of all shards.
  const auto allocate_shards = [&](MemoryPurpose purpose, Tensor ParameterShard::*tensor,
                                   Buffer& buffer) -> absl::Status {
    int64_t bytes = 0;
    for (const UnitState& state : units_) {
      for (const ParameterShard& shard : state.unit.parameters) {
        bytes += Aligned((shard.*tensor).bytes());
      }
    }
    DIM0_RETURN_IF_ERROR(allocate(purpose, bytes, buffer));
    if (buffer.data() == nullptr) return absl::OkStatus();
    auto* next = static_cast<char*>(buffer.data());
    for (UnitState& state : units_) {
      for (ParameterShard& shard : state.unit.parameters) {
        (shard.*tensor).data = next;
        next += Aligned((shard.*tensor).bytes());
      }
    }
    return absl::OkStatus();
  };
  const bool trains = optimizer_ != nullptr;
  DIM0_RETURN_IF_ERROR(
      allocate_shards(MemoryPurpose::kParameters, &ParameterShard::value, shard_values_));
  DIM0_RETURN_IF_ERROR(
      allocate_shards(MemoryPurpose::kParameters, &ParameterShard::copy, shard_copies_));
  if (trains) {
    DIM0_RETURN_IF_ERROR(
        allocate_shards(MemoryPurpose::kGradients, &ParameterShard::gradient, shard_gradients_));
  }

  // Whole units, gathered and as gradients.
  int64_t largest_gathered = 0, largest_gradient = 0;
  int sharing_gathered = 0, sharing_gradient = 0;
  for (UnitState& state : units_) {
    const int64_t gathered = WholeBytes(state, model_.parameter_dtype());
    const int64_t gradient = WholeBytes(state, model_.gradient_dtype());
    if (state.stays) {
      DIM0_RETURN_IF_ERROR(
          allocate(MemoryPurpose::kGathered, gathered, state.gathered_buffer.buffer));
    } else {
      largest_gathered = std::max(largest_gathered, gathered);
      ++sharing_gathered;
    }
    if (!trains) continue;
    if (state.own_gradient) {
      DIM0_RETURN_IF_ERROR(
          allocate(MemoryPurpose::kCommunication, gradient, state.gradient_buffer.buffer));
    } else {
      largest_gradient = std::max(largest_gradient, gradient);
      ++sharing_gradient;
    }
  }
  for (UnitState& state : units_) {
    const bool ahead = state.stays && options_.prefetch > 0 && largest_gathered > 0;
    const int64_t bytes = WholeBytes(state, model_.parameter_dtype());
    Cut(state, ahead ? (bytes + largest_gathered - 1) / largest_gathered : 1);
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
  for (LookupState& lookup : lookups_) DIM0_RETURN_IF_ERROR(AllocateLookup(lookup));
  DIM0_RETURN_IF_ERROR(AllocateWires());

  stats_size_ = kSquares + table_.size();
  DIM0_ASSIGN_OR_RETURN(
      stats_, allocator_.Allocate(MemoryPurpose::kCommunication, stats_size_ * sizeof(double)));
  DIM0_ASSIGN_OR_RETURN(all_stats_,
                        allocator_.Allocate(MemoryPurpose::kCommunication,
                                            group_.world_size() * stats_size_ * sizeof(double)));
  host_stats_.resize(group_.world_size() * stats_size_);
  DIM0_ASSIGN_OR_RETURN(gradient_scale_,
                        allocator_.Allocate(MemoryPurpose::kCommunication, sizeof(float)));
  return absl::OkStatus();
}

void Engine::Cut(UnitState& state, int64_t pieces) {
  state.pieces.resize(pieces);
  for (size_t i = 0; i < state.unit.parameters.size(); ++i) {
    const ParameterSpec& spec = table_[state.unit.parameters[i].id].spec;
    const int position = static_cast<int>(i);
    if (pieces == 1) {
      state.pieces[0].push_back({.position = position, .counts = state.counts[i]});
      continue;
    }
    for (int64_t piece = 0; piece < pieces; ++piece) {
      for (int rank = 0; rank < group_.world_size(); ++rank) {
        const RowRange rows = RowsOfRank(spec.rows, group_.world_size(), rank);
        const int64_t begin = rows.size() * piece / pieces;
        const int64_t end = rows.size() * (piece + 1) / pieces;
        if (begin == end) continue;
        // A rank's rows do not follow the other ranks' here, so each rank's are a portion.
        Portion portion = {.position = position,
                           .in_whole = (rows.begin + begin) * spec.cols,
                           .in_shard = rank == group_.rank() ? begin * spec.cols : 0,
                           .counts = std::vector<int64_t>(group_.world_size())};
        portion.counts[rank] = (end - begin) * spec.cols;
        state.pieces[piece].push_back(std::move(portion));
      }
    }
  }
}

absl::Status Engine::AllocateLookup(LookupState& lookup) {
  const int64_t served = group_.world_size() * std::min(lookup.most, ShardOf(lookup).rows.size());
  // `asked` is the model's side, `served` what travels.
  const auto allocate = [&](MemoryPurpose purpose, DType model, DType wire,
                            RowBuffers& buffers) -> absl::Status {
    const int64_t cols = table_[lookup.id].spec.cols;
    DIM0_ASSIGN_OR_RETURN(buffers.asked,
                          allocator_.Allocate(purpose, lookup.most * cols * SizeOf(model)));
    DIM0_ASSIGN_OR_RETURN(buffers.served,
                          allocator_.Allocate(purpose, served * cols * SizeOf(wire)));
    DIM0_ASSIGN_OR_RETURN(buffers.indices, allocator_.Allocate(purpose, served * sizeof(int32_t)));
    return absl::OkStatus();
  };
  DIM0_RETURN_IF_ERROR(allocate(MemoryPurpose::kGathered, model_.parameter_dtype(),
                                options_.param_dtype, lookup.values));
  if (optimizer_ == nullptr) return absl::OkStatus();
  return allocate(MemoryPurpose::kCommunication, model_.gradient_dtype(), options_.reduce_dtype,
                  lookup.gradients);
}

absl::Status Engine::AllocateWires() {
  // The most that one call moves: a piece or a lookup's rows.
  const auto most_bytes = [this](DType dtype) {
    int64_t most = 0;
    for (const UnitState& state : units_) {
      for (const Piece& piece : state.pieces) {
        int64_t bytes = 0;
        for (const Portion& portion : piece) bytes += Aligned(Sum(portion.counts) * SizeOf(dtype));
        most = std::max(most, bytes);
      }
    }
    for (const LookupState& lookup : lookups_) {
      most = std::max(most, lookup.most * table_[lookup.id].spec.cols * SizeOf(dtype));
    }
    return most;
  };
  if (casts_parameters()) {
    DIM0_ASSIGN_OR_RETURN(parameter_wire_, allocator_.Allocate(MemoryPurpose::kCommunication,
                                                               most_bytes(options_.param_dtype)));
  }
  if (casts_gradients() && optimizer_ != nullptr) {
    DIM0_ASSIGN_OR_RETURN(gradient_wire_, allocator_.Allocate(MemoryPurpose::kCommunication,
                                                              most_bytes(options_.reduce_dtype)));
  }
  return absl::OkStatus();
}

absl::Status Engine::OpenChannels() {
  device_.SetFailureHandler([&group = group_](const absl::Status& error) { group.Abort(error); });
  DIM0_ASSIGN_OR_RETURN(parameter_channel_, group_.Open("parameter"));
  DIM0_ASSIGN_OR_RETURN(gradient_channel_, group_.Open("gradient"));
  DIM0_ASSIGN_OR_RETURN(control_channel_, group_.Open("control"));
  DIM0_ASSIGN_OR_RETURN(host_channel_, group_.OpenHost("host"));
  compute_ = device_.NewStream("compute");
  all_gather_ = device_.NewStream("all_gather", StreamPriority::kHigh);
  reduce_scatter_ = device_.NewStream("reduce_scatter", StreamPriority::kHigh);
  return absl::OkStatus();
}

absl::Status Engine::Connect() {
  DIM0_RETURN_IF_ERROR(dim0::Connect(*parameter_channel_, *all_gather_));
  DIM0_RETURN_IF_ERROR(dim0::Connect(*gradient_channel_, *reduce_scatter_));
  DIM0_RETURN_IF_ERROR(dim0::Connect(*control_channel_, *reduce_scatter_));
  if (optimizer_ != nullptr) DIM0_RETURN_IF_ERROR(optimizer_->Start());
  return Settled(absl::OkStatus());
}

absl::Status Engine::Start(uint64_t seed) {
  uint64_t plan = table_.Hash();
  if (optimizer_ != nullptr) plan ^= optimizer_->PlanHash();
  const char dtypes[] = {static_cast<char>(options_.master_dtype),
                         static_cast<char>(options_.param_dtype),
                         static_cast<char>(options_.reduce_dtype)};
  plan = HashBytes(dtypes, plan);
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

  if (absl::Status status = Connect(); !status.ok()) return Fail(std::move(status));

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
        DIM0_RETURN_IF_ERROR(CopyFloatsFromHost(
            device_, *compute_, rows,
            {shard.value.at(done), shard.value.dtype, /*rows=*/count, /*cols=*/1}));
      }
      if (shard.copy.size() > 0) device_.Cast(*compute_, shard.value, shard.copy);
    }
  }
  return compute_->Synchronize();
}

MemoryUse Engine::LiveBetweenSteps() const {
  MemoryUse use = allocator_.current();
  const auto take = [&use](MemoryPurpose purpose, const Buffer& buffer) {
    use.bytes[static_cast<int>(purpose)] -= buffer.bytes();
  };
  for (const UnitState& state : units_) {
    take(MemoryPurpose::kGathered, state.gathered_buffer.buffer);
    take(MemoryPurpose::kCommunication, state.gradient_buffer.buffer);
  }
  for (const Slot& slot : gathered_slots_) take(MemoryPurpose::kGathered, slot.buffer);
  for (const Slot& slot : gradient_slots_) take(MemoryPurpose::kCommunication, slot.buffer);
  take(MemoryPurpose::kCommunication, parameter_wire_);
  take(MemoryPurpose::kCommunication, gradient_wire_);
  for (const LookupState& lookup : lookups_) {
    for (const Buffer RowBuffers::*buffer :
         {&RowBuffers::asked, &RowBuffers::served, &RowBuffers::indices}) {
      take(MemoryPurpose::kGathered, lookup.values.*buffer);
      take(MemoryPurpose::kCommunication, lookup.gradients.*buffer);
    }
  }
  return use;
}

int64_t Engine::WholeBytes(const UnitState& state, DType dtype) const {
  int64_t bytes = 0;
  for (const ParameterShard& shard : state.unit.parameters) {
    bytes += Aligned(table_[shard.id].spec.size() * SizeOf(dtype));
  }
  return bytes;
}

Engine::Views Engine::ViewsOf(const UnitState& state, const Slot& slot, DType dtype) const {
  Views views;
  auto* next = static_cast<char*>(slot.buffer.data());
  for (const ParameterShard& shard : state.unit.parameters) {
    const ParameterSpec& spec = table_[shard.id].spec;
    views.push_back({next, dtype, spec.rows, spec.cols});
    next += Aligned(views.back().bytes());
  }
  return views;
}

Engine::Views Engine::PortionsOf(const Piece& piece, const Views& whole) {
  Views portions;
  for (const Portion& portion : piece) {
    const Tensor& parameter = whole[portion.position];
    portions.push_back(
        {parameter.at(portion.in_whole), parameter.dtype, Sum(portion.counts), /*cols=*/1});
  }
  return portions;
}

Engine::Views Engine::OnWire(const Buffer& wire, DType dtype, const Views& portions) {
  Views views;
  auto* next = static_cast<char*>(wire.data());
  for (const Tensor& portion : portions) {
    views.push_back({next, dtype, portion.rows, portion.cols});
    next += Aligned(views.back().bytes());
  }
  return views;
}

Engine::Gathered Engine::Gather(UnitState& state, size_t piece, Phase phase) {
  Slot* slot = &state.gathered_buffer;
  if (!state.stays) {
    slot = &gathered_slots_[next_gathered_slot_++ % gathered_slots_.size()];
    ++slots_held_;
  }
  const std::string& name = table_.unit_name(state.unit.index);
  const RecordedUnit recorded(device_.recorder(), name, phase);
  if (piece == 0) {
    all_gather_->Wait(slot->free);
    if (optimizer_ != nullptr) all_gather_->Wait(optimizer_->Updated(state.unit));
    // What stays has its buffer to itself, which would let it go ahead of the stages before.
    if (options_.prefetch == 0) all_gather_->Wait(compute_->Record());
    all_gather_->CountLive(MemoryPurpose::kGathered, GatheredBytes(state));
  }

  const Views targets = PortionsOf(state.pieces[piece], GatheredViews(state, *slot));
  Views received = targets;
  if (casts_parameters()) {
    received = OnWire(parameter_wire_, options_.param_dtype, targets);
    all_gather_->CountLive(MemoryPurpose::kCommunication, BytesOf(received));
  }
  std::vector<AllGatherPart> parts;
  for (size_t i = 0; i < received.size(); ++i) {
    const Portion& portion = state.pieces[piece][i];
    const Tensor& shard = state.unit.parameters[portion.position].gathered();
    parts.push_back(
        {.send = shard.at(portion.in_shard), .recv = received[i].data, .counts = portion.counts});
  }
  const auto bytes = static_cast<double>(BytesOf(received));
  all_gather_->Enqueue(
      {.name = absl::StrCat("all_gather ", name), .kind = OpKind::kCollective, .bytes = bytes},
      [this, name, parts = std::move(parts)](const OpContext& context) {
        return parameter_channel_->AllGather(
            {Purpose::kParameter, name, context.native_stream, context.call}, options_.param_dtype,
            parts);
      });
  if (casts_parameters()) {
    CastAll(*all_gather_, received, targets);
    all_gather_->CountLive(MemoryPurpose::kCommunication, -BytesOf(received));
  }
  return {slot, all_gather_->Record()};
}

void Engine::AddToGatherOrder(const UnitState& state) {
  std::vector<GatherStep> before;
  before.swap(gather_order_);
  const size_t pieces = state.pieces.size();
  size_t piece = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    gather_order_.push_back(before[i]);
    while (pieces > 1 && (piece + 1) * before.size() <= (i + 1) * pieces) {
      gather_order_.push_back({.unit = state.unit.index, .piece = piece++});
    }
  }
  while (piece < pieces) gather_order_.push_back({.unit = state.unit.index, .piece = piece++});
}

void Engine::IssueGathers() {
  while (gathered_.size() < gather_order_.size()) {
    const size_t next = gathered_.size();
    UnitState& state = units_[gather_order_[next].unit];
    const bool may_go_ahead =
        options_.prefetch > 0 && (state.stays || slots_held_ < gathered_slots_.size());
    if (next >= gathers_used_ && !may_go_ahead) return;
    gathered_.push_back(Gather(state, gather_order_[next].piece,
                               next < forward_gathers_ ? Phase::kForward : Phase::kBackward));
  }
}

void Engine::Unshard(UnitState& state, bool gathers_here) {
  if (gathers_here) {
    const auto is_last_piece = [&](const GatherStep& step) {
      return step.unit == state.unit.index && step.piece + 1 == state.pieces.size();
    };
    while (!is_last_piece(gather_order_[gathers_used_++])) {
    }
  }
  IssueGathers();
  if (!gathers_here) return;
  const Gathered& gathered = gathered_[gathers_used_ - 1];
  state.gathered = gathered.slot;
  compute_->Wait(gathered.ready);
}

void Engine::Reshard(UnitState& state) {
  DIM0_CHECK(state.gathered != nullptr);
  compute_->CountLive(MemoryPurpose::kGathered, -GatheredBytes(state));
  state.gathered->free = compute_->Record();
  state.gathered = nullptr;
  if (!state.stays) --slots_held_;
}

void Engine::AcquireGradient(UnitState& state) {
  if (state.gradient != nullptr) return;  // still that of an earlier micro-batch
  state.gradient = state.own_gradient
                       ? &state.gradient_buffer
                       : &gradient_slots_[next_gradient_slot_++ % gradient_slots_.size()];
  compute_->Wait(state.gradient->free);
  compute_->CountLive(MemoryPurpose::kCommunication, GradientBytes(state));
}

void Engine::ReduceScatter(UnitState& state) {
  const absl::Span<const Stage> stages = model_.stages();
  state.pieces_reduced = 0;
  reducible_ = compute_->Record();
  // What is looked up gets the rest of its gradient from the first stage.
  const bool may_wait = !lookups_.empty() && state.unit.index == stages[0].unit;
  if (may_wait && state.pieces.size() > 1) {
    reducing_ = &state;
    ReducePieces(state, 1);
    return;
  }
  ReducePieces(state, state.pieces.size());
  if (reducing_ == nullptr) return;
  // Evenly behind the stages between the last and the first.
  const size_t all = stages.size() - 2, passed = stages.size() - 1 - state.first_stage;
  const size_t pieces = reducing_->pieces.size();
  ReducePieces(*reducing_, std::min(pieces, 1 + passed * pieces / all));
}

void Engine::ReducePieces(UnitState& state, size_t target) {
  if (state.pieces_reduced >= target) return;
  for (; state.pieces_reduced < target; ++state.pieces_reduced) {
    ReducePiece(state, state.pieces[state.pieces_reduced]);
  }
  if (state.pieces_reduced < state.pieces.size()) return;
  state.has_gradient = true;
  reduce_scatter_->CountLive(MemoryPurpose::kCommunication, -GradientBytes(state));
  state.gradient->free = reduce_scatter_->Record();
  state.gradient = nullptr;
  if (reducing_ == &state) reducing_ = nullptr;
}

void Engine::ReducePiece(UnitState& state, const Piece& piece) {
  const std::string& name = table_.unit_name(state.unit.index);
  const RecordedUnit recorded(device_.recorder(), name, Phase::kBackward);
  reduce_scatter_->Wait(reducible_);
  Views sent = PortionsOf(piece, GradientViews(state, *state.gradient));
  if (casts_gradients()) {
    const Views on_wire = OnWire(gradient_wire_, options_.reduce_dtype, sent);
    reduce_scatter_->CountLive(MemoryPurpose::kCommunication, BytesOf(on_wire));
    CastAll(*reduce_scatter_, sent, on_wire);
    sent = on_wire;
  }
  std::vector<ReduceScatterPart> parts;
  for (size_t i = 0; i < sent.size(); ++i) {
    const Tensor& shard = state.unit.parameters[piece[i].position].gradient;
    parts.push_back({.send = sent[i].data,
                     .recv = shard.at(piece[i].in_shard),
                     .counts = piece[i].counts,
                     .accumulate = state.has_gradient});
  }
  const int64_t bytes = BytesOf(sent);
  reduce_scatter_->Enqueue({.name = absl::StrCat("reduce_scatter ", name),
                            .kind = OpKind::kCollective,
                            .bytes = static_cast<double>(bytes)},
                           [this, name, parts = std::move(parts)](const OpContext& context) {
                             return gradient_channel_->ReduceScatter(
                                 {Purpose::kGradient, name, context.native_stream, context.call},
                                 options_.reduce_dtype, parts);
                           });
  if (casts_gradients()) reduce_scatter_->CountLive(MemoryPurpose::kCommunication, -bytes);
}

void Engine::CastAll(Stream& stream, const Views& sources, const Views& targets) {
  for (size_t i = 0; i < sources.size(); ++i) device_.Cast(stream, sources[i], targets[i]);
}

void Engine::MeasureGradient(UnitState& state) {
  auto* squares = static_cast<double*>(stats_.data()) + kSquares;
  std::vector<Tensor> gradients;
  for (const ParameterShard& shard : state.unit.parameters) gradients.push_back(shard.gradient);
  device_.SumsOfSquares(*reduce_scatter_, std::move(gradients),
                        squares + table_.first(state.unit.index));
}

absl::Status Engine::RouteRows(absl::Span<const Batch> batches) {
  micro_batches_.clear();
  for (const Batch& batch : batches) micro_batches_.push_back({.batch = batch});
  if (lookups_.empty()) return absl::OkStatus();

  // For every micro-batch and lookup its distinct rows, filled up to the same length on all ranks.
  constexpr int32_t kNone = -1;
  std::vector<int32_t> mine;
  for (MicroBatch& micro_batch : micro_batches_) {
    micro_batch.uses = model_.RowUses(micro_batch.batch);
    DIM0_CHECK(micro_batch.uses.size() == lookups_.size());
    for (size_t k = 0; k < lookups_.size(); ++k) {
      std::vector<int32_t> rows = micro_batch.uses[k];
      std::sort(rows.begin(), rows.end());
      rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
      DIM0_CHECK(static_cast<int64_t>(rows.size()) <= lookups_[k].most);
      DIM0_CHECK(rows.front() >= 0 && rows.back() < table_[lookups_[k].id].spec.rows);
      for (int32_t& use : micro_batch.uses[k]) {
        use = static_cast<int32_t>(std::lower_bound(rows.begin(), rows.end(), use) - rows.begin());
      }
      rows.resize(lookups_[k].most, kNone);
      mine.insert(mine.end(), rows.begin(), rows.end());
    }
  }
  DIM0_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                        Exchange(std::string(reinterpret_cast<const char*>(mine.data()),
                                             mine.size() * sizeof(int32_t))));

  for (MicroBatch& micro_batch : micro_batches_) {
    micro_batch.routes.assign(lookups_.size(), {.asked = std::vector<int64_t>(group_.world_size()),
                                                .served = std::vector<int64_t>(group_.world_size()),
                                                .indices = {}});
  }
  std::vector<int32_t> theirs(mine.size());
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    std::memcpy(theirs.data(), all[rank].data(), all[rank].size());
    auto lists = theirs.cbegin();
    for (MicroBatch& micro_batch : micro_batches_) {
      for (size_t k = 0; k < lookups_.size(); ++k) {
        const RowRange stored = ShardOf(lookups_[k]).rows;
        const int64_t rows = table_[lookups_[k].id].spec.rows;
        RowRoute& route = micro_batch.routes[k];
        for (auto row = lists; row != lists + lookups_[k].most && *row != kNone; ++row) {
          if (rank == group_.rank()) ++route.asked[RankOfRow(rows, group_.world_size(), *row)];
          if (*row < stored.begin || *row >= stored.end) continue;
          ++route.served[rank];
          route.indices.push_back(static_cast<int32_t>(*row - stored.begin));
        }
        lists += lookups_[k].most;
      }
    }
  }
  return absl::OkStatus();
}

Engine::Views Engine::LookupTables(const MicroBatch& micro_batch,
                                   RowBuffers LookupState::*direction) const {
  const bool values = direction == &LookupState::values;
  const DType dtype = values ? model_.parameter_dtype() : model_.gradient_dtype();
  Views tables;
  for (size_t k = 0; k < lookups_.size(); ++k) {
    tables.push_back({(lookups_[k].*direction).asked.data(), dtype,
                      Sum(micro_batch.routes[k].asked), table_[lookups_[k].id].spec.cols});
  }
  return tables;
}

void Engine::FetchRows(const MicroBatch& micro_batch) {
  if (lookups_.empty()) return;
  const UnitState& state = units_[model_.stages()[0].unit];
  const std::string& unit = table_.unit_name(state.unit.index);
  const RecordedUnit recorded(device_.recorder(), unit, Phase::kForward);
  const Views tables = LookupTables(micro_batch, &LookupState::values);
  all_gather_->Wait(tables_free_);
  if (optimizer_ != nullptr) all_gather_->Wait(optimizer_->Updated(state.unit));
  all_gather_->CountLive(MemoryPurpose::kGathered, BytesOf(tables));
  for (size_t k = 0; k < lookups_.size(); ++k) {
    const RowRoute& route = micro_batch.routes[k];
    const RowBuffers& buffers = lookups_[k].values;
    const Tensor served = {buffers.served.data(), options_.param_dtype,
                           static_cast<int64_t>(route.indices.size()), tables[k].cols};
    Tensor received = tables[k];
    if (casts_parameters()) {
      received = OnWire(parameter_wire_, options_.param_dtype, {tables[k]})[0];
      all_gather_->CountLive(MemoryPurpose::kCommunication, received.bytes());
    }
    auto* const indices = static_cast<int32_t*>(buffers.indices.data());
    all_gather_->CountLive(MemoryPurpose::kGathered, served.bytes());
    if (served.rows > 0) {
      device_.CopyFromHost(*all_gather_, indices, route.indices.data(),
                           served.rows * sizeof(int32_t));
      device_.GatherRows(*all_gather_, ShardOf(lookups_[k]).gathered(), indices, served);
    }
    all_gather_->Enqueue(
        {.name = absl::StrCat("all_to_all rows ", table_[lookups_[k].id].spec.name),
         .kind = OpKind::kCollective,
         .bytes = 1.0 * (served.bytes() + received.bytes())},
        [this, unit, send = PiecesOf<ConstSegment>(served, route.served),
         recv = PiecesOf<Segment>(received, route.asked)](const OpContext& context) {
          return parameter_channel_->AllToAll(
              {Purpose::kParameter, unit, context.native_stream, context.call},
              options_.param_dtype, send, recv);
        });
    if (casts_parameters()) {
      device_.Cast(*all_gather_, received, tables[k]);
      all_gather_->CountLive(MemoryPurpose::kCommunication, -received.bytes());
    }
    all_gather_->CountLive(MemoryPurpose::kGathered, -served.bytes());
  }
  rows_fetched_ = all_gather_->Record();
}

void Engine::LookupForward(const MicroBatch& micro_batch, bool training, double* loss_sum) {
  const Views tables = LookupTables(micro_batch, &LookupState::values);
  IssueGathers();
  compute_->Wait(rows_fetched_);
  model_.Forward(/*stage=*/0, tables, training, loss_sum, *compute_);
  compute_->CountLive(MemoryPurpose::kGathered, -BytesOf(tables));
  tables_free_ = compute_->Record();
}

void Engine::LookupBackward(const MicroBatch& micro_batch) {
  UnitState& state = units_[model_.stages()[0].unit];
  const Views tables = LookupTables(micro_batch, &LookupState::gradients);
  compute_->Wait(row_gradients_free_);
  compute_->CountLive(MemoryPurpose::kCommunication, BytesOf(tables));
  model_.Backward(/*stage=*/0, {}, tables, /*accumulate=*/false, *compute_);

  if (reducing_ != nullptr) ReducePieces(*reducing_, reducing_->pieces.size());
  reduce_scatter_->Wait(compute_->Record());
  if (!state.has_gradient) {  // the unit's own has yet to be reduced
    for (const ParameterShard& shard : state.unit.parameters) {
      device_.Zero(*reduce_scatter_, shard.gradient.data, shard.gradient.bytes());
    }
    state.has_gradient = true;
  }
  for (size_t k = 0; k < lookups_.size(); ++k)
    ReturnRows(lookups_[k], micro_batch.routes[k], tables[k]);
  row_gradients_free_ = reduce_scatter_->Record();
}

void Engine::ReturnRows(const LookupState& lookup, const RowRoute& route, const Tensor& table) {
  const std::string& unit = table_.unit_name(table_[lookup.id].unit);
  const RowBuffers& buffers = lookup.gradients;
  const Tensor served = {buffers.served.data(), options_.reduce_dtype,
                         static_cast<int64_t>(route.indices.size()), table.cols};
  Tensor sent = table;
  if (casts_gradients()) {
    sent = OnWire(gradient_wire_, options_.reduce_dtype, {table})[0];
    reduce_scatter_->CountLive(MemoryPurpose::kCommunication, sent.bytes());
    device_.Cast(*reduce_scatter_, table, sent);
  }
  auto* const indices = static_cast<int32_t*>(buffers.indices.data());
  reduce_scatter_->CountLive(MemoryPurpose::kCommunication, served.bytes());
  reduce_scatter_->Enqueue(
      {.name = absl::StrCat("all_to_all rows ", table_[lookup.id].spec.name),
       .kind = OpKind::kCollective,
       .bytes = 1.0 * (sent.bytes() + served.bytes())},
      [this, unit, send = PiecesOf<ConstSegment>(sent, route.asked),
       recv = PiecesOf<Segment>(served, route.served)](const OpContext& context) {
        return gradient_channel_->AllToAll(
            {Purpose::kGradient, unit, context.native_stream, context.call}, options_.reduce_dtype,
            send, recv);
      });
  reduce_scatter_->CountLive(MemoryPurpose::kCommunication, -table.bytes());
  if (casts_gradients()) {
    reduce_scatter_->CountLive(MemoryPurpose::kCommunication, -sent.bytes());
  }
  if (served.rows == 0) return;
  device_.CopyFromHost(*reduce_scatter_, indices, route.indices.data(),
                       served.rows * sizeof(int32_t));
  // In rank order, so that two runs add alike; one rank names no row twice.
  int64_t begin = 0;
  for (const int64_t rows : route.served) {
    device_.AddRows(*reduce_scatter_, Rows(served, begin, rows), indices + begin,
                    ShardOf(lookup).gradient);
    begin += rows;
  }
  reduce_scatter_->CountLive(MemoryPurpose::kCommunication, -served.bytes());
}

void Engine::RunMicroBatch(const MicroBatch& micro_batch, bool training, bool first, bool last,
                           float gradient_scale, const std::function<void(UnitState&)>& reduced) {
  const absl::Span<const Stage> stages = model_.stages();
  const int num_stages = static_cast<int>(stages.size());
  auto* loss_sum = static_cast<double*>(stats_.data()) + kLoss;

  // A unit is gathered at its stage in each direction. One that stays is gathered once in a step:
  // its parameters are the same in every micro-batch.
  const auto gathered_in_forward = [first](const UnitState& state) {
    return first || !state.stays;
  };
  gather_order_.clear();
  gathered_.clear();
  gathers_used_ = 0;
  const int first_whole = lookups_.empty() ? 0 : 1;
  for (int s = first_whole; s < num_stages; ++s) {
    const UnitState& state = units_[stages[s].unit];
    if (gathered_in_forward(state)) AddToGatherOrder(state);
  }
  forward_gathers_ = gather_order_.size();
  for (int s = num_stages - 1; training && s >= first_whole; --s) {
    if (!units_[stages[s].unit].stays) gather_order_.push_back({.unit = stages[s].unit});
  }
  if (first) {
    for (UnitState& state : units_) state.has_gradient = false;
  }

  FetchRows(micro_batch);
  model_.Begin(*compute_, micro_batch.batch, micro_batch.uses, gradient_scale);
  for (int s = 0; s < num_stages; ++s) {
    UnitState& state = units_[stages[s].unit];
    const RecordedUnit recorded(device_.recorder(), table_.unit_name(stages[s].unit),
                                Phase::kForward);
    if (s < first_whole) {
      LookupForward(micro_batch, training, loss_sum);
      continue;
    }
    Unshard(state, gathered_in_forward(state));
    model_.Forward(s, GatheredViews(state, *state.gathered), training, loss_sum, *compute_);
    if (!(training && state.stays)) Reshard(state);
  }
  if (!training) return;

  const bool reduce = last || options_.sync_every_micro_batch;
  for (int s = num_stages - 1; s >= 0; --s) {
    UnitState& state = units_[stages[s].unit];
    const RecordedUnit recorded(device_.recorder(), table_.unit_name(stages[s].unit),
                                Phase::kBackward);
    if (s < first_whole) {
      LookupBackward(micro_batch);
    } else {
      Unshard(state, !state.stays);
      AcquireGradient(state);
      const bool accumulate = !first && !options_.sync_every_micro_batch;
      model_.Backward(s, GatheredViews(state, *state.gathered),
                      GradientViews(state, *state.gradient), accumulate, *compute_);
      if (last || !state.stays) Reshard(state);
      if (reduce) ReduceScatter(state);
    }
    if (last && s == state.first_stage) reduced(state);
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
    if (!update_status.ok()) return;
    update_status = optimizer_->Update(state.unit, step, ready);
    // An optimizer whose stream has failed skips its calls to other ranks, who would wait for them.
    if (update_status.ok()) update_status = optimizer_->Updated(state.unit).known_error();
    if (!update_status.ok()) group_.Abort(update_status);
  };
  DIM0_RETURN_IF_ERROR(RouteRows(micro_batches));
  device_.Zero(*compute_, stats, sizeof(double));
  // Issued here already so that the clock starts when the first stage could.
  const Event started = [&] {
    compute_->Wait(optimizer_->Updated(units_[model_.stages()[0].unit].unit));
    return compute_->Record();
  }();
  const auto num_batches = static_cast<int>(micro_batches.size());
  for (int i = 0; i < num_batches; ++i) {
    RunMicroBatch(micro_batches_[i], /*training=*/true, i == 0, i + 1 == num_batches,
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
  device_.CopyToHost(*reduce_scatter_, host_stats_.data(), all_stats,
                     host_stats_.size() * sizeof(double));
  const Event known = reduce_scatter_->Record();
  if (options_.clip > 0) {
    for (const int u : update_order_) update(units_[u], known);
  }

  if (!update_status.ok()) return update_status;
  if (absl::Status status = Settled(known.Wait()); !status.ok()) return Fail(std::move(status));
  if (absl::Status status = CheckFinite(host_stats_); !status.ok()) return Fail(std::move(status));

  StepResult result;
  double squares = 0;
  for (int rank = 0; rank < group_.world_size(); ++rank) {
    const double* row = host_stats_.data() + rank * stats_size_;
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
  DIM0_RETURN_IF_ERROR(RouteRows(batches));
  device_.Zero(*compute_, stats_.data(), sizeof(double));
  for (const MicroBatch& micro_batch : micro_batches_) {
    RunMicroBatch(micro_batch, /*training=*/false, true, true, 0, nullptr);
  }
  double sum = 0;
  device_.CopyToHost(*compute_, &sum, stats_.data(), sizeof(double));
  if (absl::Status status = Settled(compute_->Synchronize()); !status.ok()) {
    return Fail(std::move(status));
  }
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
  const UnitState& state = units_[entry.unit];
  const Tensor& shard = state.unit.parameters[entry.position].value;
  if (optimizer_ != nullptr) reduce_scatter_->Wait(optimizer_->Updated(state.unit));
  std::vector<char> mine(shard.bytes()), all(whole.size() * SizeOf(shard.dtype));
  device_.CopyToHost(*reduce_scatter_, mine.data(), shard.data, shard.bytes());
  absl::Status status = Settled(reduce_scatter_->Synchronize());
  if (status.ok()) {
    status = host_channel_->Gather({Purpose::kControl, entry.spec.name}, shard.dtype, mine.data(),
                                   all.data(), state.counts[entry.position], /*root=*/0);
  }
  if (!status.ok()) return Fail(std::move(status));
  const Tensor gathered = {all.data(), shard.dtype, static_cast<int64_t>(whole.size())};
  WithElements(gathered, [&](const auto* values) {
    for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(values[i]);
  });
  return absl::OkStatus();
}

absl::Status Engine::GatherToRankZero(int parameter, const Tensor& shard, void* whole) {
  const UnitState& state = units_[table_[parameter].unit];
  const int position = table_[parameter].position;
  if (optimizer_ != nullptr) reduce_scatter_->Wait(optimizer_->Updated(state.unit));
  reduce_scatter_->Enqueue(
      {.name = "gather", .kind = OpKind::kCollective}, [&](const OpContext& context) {
        return control_channel_->Gather(
            {Purpose::kControl, table_[parameter].spec.name, context.native_stream, context.call},
            shard.dtype, shard.data, whole, state.counts[position], /*root=*/0);
      });
  absl::Status status = Settled(reduce_scatter_->Synchronize());
  return status.ok() ? status : Fail(std::move(status));
}

absl::StatusOr<std::vector<std::string>> Engine::Exchange(const std::string& mine) {
  const std::vector<int64_t> counts(group_.world_size(), mine.size());
  std::string all(group_.world_size() * mine.size(), '\0');
  reduce_scatter_->Enqueue(
      {.name = "all_gather exchange", .kind = OpKind::kCollective}, [&](const OpContext& context) {
        const AllGatherPart part = {mine.data(), all.data(), counts};
        return host_channel_->AllGather(
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

absl::Status Engine::Settled(absl::Status waited) const {
  return waited.ok() ? group_.Health() : waited;
}

absl::Status Engine::Fail(absl::Status status) {
  group_.Abort(status);
  return status;
}

}  // namespace dim0
