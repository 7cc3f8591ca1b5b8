#include "optim/muon.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "optim/state.h"

namespace dim0 {
namespace {

RowRange Intersect(const RowRange& a, const RowRange& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// How many equal blocks of rows a parameter is split into.
int NumBlocks(const ParameterSpec& spec, MatrixSplit split) {
  switch (split) {
    case MatrixSplit::kOff:
      return 1;
    case MatrixSplit::kQkv:
      return spec.fused;
    case MatrixSplit::kHeads:
      return spec.fused * spec.heads;
  }
  return 1;
}

// Those rows of `shard`'s copy, if it has one.
Tensor CopyRows(const ParameterShard& shard, int64_t begin, int64_t rows) {
  return shard.copy.rows > 0 ? Rows(shard.copy, begin, rows) : shard.copy;
}

}  // namespace

absl::StatusOr<MuonSchedule> ParseMuonSchedule(absl::string_view name) {
  if (name == "owner") return MuonSchedule::kOwner;
  if (name == "redundant") return MuonSchedule::kRedundant;
  if (name == "broadcast") return MuonSchedule::kBroadcast;
  return absl::NotFoundError(
      absl::StrCat("--muon_schedule=", name, " is unknown; choose owner, redundant or broadcast"));
}

absl::StatusOr<MatrixSplit> ParseMatrixSplit(absl::string_view name) {
  if (name == "off") return MatrixSplit::kOff;
  if (name == "qkv") return MatrixSplit::kQkv;
  if (name == "heads") return MatrixSplit::kHeads;
  return absl::NotFoundError(
      absl::StrCat("--muon_split=", name, " is unknown; choose off, qkv or heads"));
}

absl::StatusOr<DType> ParseMuonWire(absl::string_view name) {
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float32") return DType::kFloat32;
  return absl::NotFoundError(
      absl::StrCat("--muon_wire=", name, " is unknown; choose bfloat16 or float32"));
}

std::vector<int> AssignOwners(absl::Span<const double> costs, int world_size) {
  std::vector<int> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return costs[a] > costs[b]; });
  std::vector<double> work(world_size, 0);
  std::vector<int> owners(costs.size());
  for (const int i : order) {
    owners[i] = std::min_element(work.begin(), work.end()) - work.begin();
    work[owners[i]] += costs[i];
  }
  return owners;
}

Muon::~Muon() {
  for (Stream* stream : {gather_.get(), newton_schulz_.get(), scatter_.get()}) {
    if (stream != nullptr) (void)stream->Synchronize();
  }
}

bool Muon::Receives(const Block& block) const {
  return config_.schedule != MuonSchedule::kOwner || block.owner == group_.rank();
}

bool Muon::Orthogonalizes(const Block& block) const {
  return config_.schedule == MuonSchedule::kRedundant || block.owner == group_.rank();
}

absl::Status Muon::Plan(const ParameterTable& table, absl::Span<const int> ids,
                        const OptimizerResources& resources) {
  update_order_ = resources.update_order;
  std::vector<int> position(table.num_units(), 0);
  for (size_t i = 0; i < update_order_.size(); ++i) position[update_order_[i]] = i;
  std::vector<int> ordered(ids.begin(), ids.end());
  std::stable_sort(ordered.begin(), ordered.end(),
                   [&](int a, int b) { return position[table[a].unit] < position[table[b].unit]; });

  DIM0_RETURN_IF_ERROR(MakeBlocks(table, ordered, resources));
  MakeGroups(table, position);
  DIM0_RETURN_IF_ERROR(Allocate(resources));
  if (resources.allocator->plan_only()) return absl::OkStatus();
  DIM0_RETURN_IF_ERROR(kernels_->Prepare());
  DIM0_ASSIGN_OR_RETURN(gather_channel_, group_.Open("muon_gather"));
  DIM0_ASSIGN_OR_RETURN(scatter_channel_, group_.Open("muon_scatter"));
  gather_ = device_.NewStream("muon_gather", StreamPriority::kHigh);
  newton_schulz_ = device_.NewStream("newton_schulz");
  scatter_ = device_.NewStream("muon_scatter", StreamPriority::kHigh);
  return absl::OkStatus();
}

absl::Status Muon::Start() {
  DIM0_RETURN_IF_ERROR(Connect(*gather_channel_, *gather_));
  return Connect(*scatter_channel_, *scatter_);
}

absl::Status Muon::MakeBlocks(const ParameterTable& table, absl::Span<const int> ids,
                              const OptimizerResources& resources) {
  StateLayout layout(resources);
  for (const int id : ids) momentum_[id] = layout.Add(table[id].spec);
  DIM0_ASSIGN_OR_RETURN(state_, layout.Allocate());
  for (auto& [id, momentum] : momentum_) layout.Place(state_, momentum);

  std::vector<double> costs;
  for (const int id : ids) {
    const ParameterSpec& spec = table[id].spec;
    const int count = NumBlocks(spec, config_.split);
    DIM0_CHECK(spec.rows % count == 0);
    const int64_t rows = spec.rows / count;
    for (int i = 0; i < count; ++i) {
      Block block = {.id = id,
                     .name = count == 1 ? spec.name : absl::StrCat(spec.name, "[", i, "]"),
                     .unit = table.unit_name(table[id].unit),
                     .rows = {i * rows, (i + 1) * rows},
                     .cols = spec.cols,
                     .scale = ScaleOf(config_.scale, rows, spec.cols),
                     .newton_schulz = NewtonSchulz(config_.newton_schulz, rows, spec.cols)};
      for (int rank = 0; rank < resources.world_size; ++rank) {
        const RowRange shard = RowsOfRank(spec.rows, resources.world_size, rank);
        const RowRange local = Intersect(block.rows, shard);
        block.rows_of_rank.push_back(local);
        if (rank != resources.rank) continue;
        block.offset = local.begin - shard.begin;
        block.momentum = Rows(momentum_[id], block.offset, local.size());
      }
      costs.push_back(block.newton_schulz.flops());
      blocks_.push_back(std::move(block));
    }
  }
  const std::vector<int> owners = AssignOwners(costs, resources.world_size);
  for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i].owner = owners[i];
  return absl::OkStatus();
}

void Muon::MakeGroups(const ParameterTable& table, absl::Span<const int> position) {
  // A batch gives each owner one block, in update order; where all ranks do all, it is one block.
  std::vector<Batch> batches;
  std::vector<int> owned(group_.world_size(), 0);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const bool alone = config_.schedule == MuonSchedule::kRedundant;
    const size_t k = alone ? i : owned[blocks_[i].owner]++;
    if (k == batches.size()) batches.emplace_back();
    batches[k].blocks.push_back(i);
  }
  int64_t elements = 0;  // of the last group's largest blocks: the same on all ranks
  for (Batch& batch : batches) {
    batch.unit = blocks_[batch.blocks.front()].unit;
    for (const int i : batch.blocks) {
      if (blocks_[i].unit != batch.unit) batch.unit.clear();
    }
    batch.name = absl::StrJoin(batch.blocks, ", ", [this](std::string* out, int i) {
      absl::StrAppend(out, blocks_[i].name);
    });

    int64_t largest = 0;
    for (const int i : batch.blocks) largest = std::max(largest, blocks_[i].size());
    elements += largest;
    if (groups_.empty() || elements > kernels_->matrix_elements_at_once()) {
      groups_.emplace_back();
      elements = largest;
    }
    for (const int i : batch.blocks) {
      const int unit = table[blocks_[i].id].unit;
      groups_.back().last_unit_position =
          std::max(groups_.back().last_unit_position, position[unit]);
      last_group_[unit] = static_cast<int>(groups_.size()) - 1;
    }
    groups_.back().batches.push_back(std::move(batch));
  }
  for (Group& group : groups_) group.stacks = MakeStacks(group.batches);
  group_done_.resize(groups_.size());
}

std::vector<Muon::Stack> Muon::MakeStacks(absl::Span<const Batch> batches) const {
  std::vector<Stack> stacks;
  for (const Batch& batch : batches) {
    for (const int i : batch.blocks) {
      const Block& block = blocks_[i];
      if (!Orthogonalizes(block)) continue;
      auto stack = std::find_if(stacks.begin(), stacks.end(), [&](const Stack& other) {
        return other.whole.cols == block.cols &&
               blocks_[other.blocks.front()].rows.size() == block.rows.size();
      });
      if (stack == stacks.end()) {
        stack =
            stacks.insert(stack, {.blocks = {}, .whole = {nullptr, config_.wire, 0, block.cols}});
      }
      stack->blocks.push_back(i);
      stack->whole.rows += block.rows.size();
    }
  }
  return stacks;
}

absl::Status Muon::Allocate(const OptimizerResources& resources) {
  // Stacks, and blocks that are in none, start on cache lines.
  const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  const auto block_bytes = [&](const Block& block) {
    return aligned(block.size() * SizeOf(config_.wire));
  };
  const auto rows_bytes = [&](const Block& block) {
    return aligned(block.momentum.size() * SizeOf(config_.wire));
  };
  int64_t most_rows = 0, most_whole = 0, workspace = 0;
  for (const Group& group : groups_) {
    int64_t rows = 0, whole = 0;
    for (const Batch& batch : group.batches) {
      for (const int i : batch.blocks) {
        if (!Receives(blocks_[i])) {
          rows += rows_bytes(blocks_[i]);
        } else if (!Orthogonalizes(blocks_[i])) {
          whole += block_bytes(blocks_[i]);
        }
      }
    }
    for (const Stack& stack : group.stacks) {
      whole += aligned(stack.whole.bytes());
      const int64_t matrix = blocks_[stack.blocks.front()].newton_schulz.workspace();
      workspace = std::max(workspace, static_cast<int64_t>(stack.blocks.size()) * matrix);
    }
    most_rows = std::max(most_rows, rows);
    most_whole = std::max(most_whole, whole);
  }
  const auto allocate = [&](int64_t bytes, Buffer& buffer) -> absl::Status {
    DIM0_ASSIGN_OR_RETURN(buffer,
                          resources.allocator->Allocate(MemoryPurpose::kCommunication, bytes));
    return absl::OkStatus();
  };
  for (Slot& slot : slots_) {
    DIM0_RETURN_IF_ERROR(allocate(most_rows, slot.rows));
    DIM0_RETURN_IF_ERROR(allocate(most_whole, slot.whole));
  }
  DIM0_RETURN_IF_ERROR(allocate(workspace * SizeOf(kernels_->matrix_dtype()), workspace_));
  if (resources.allocator->plan_only()) return absl::OkStatus();

  for (size_t k = 0; k < groups_.size(); ++k) {
    Group& group = groups_[k];
    const Slot& slot = slots_[k % slots_.size()];
    auto* rows = static_cast<char*>(slot.rows.data());
    auto* whole = static_cast<char*>(slot.whole.data());
    std::map<int, void*> stacked;  // by block
    for (Stack& stack : group.stacks) {
      stack.whole.data = whole;
      whole += aligned(stack.whole.bytes());
      const int64_t block_size = stack.whole.size() / static_cast<int64_t>(stack.blocks.size());
      for (size_t i = 0; i < stack.blocks.size(); ++i) {
        stacked[stack.blocks[i]] = stack.whole.at(static_cast<int64_t>(i) * block_size);
      }
    }
    for (Batch& batch : group.batches) {
      for (const int i : batch.blocks) {
        const Block& block = blocks_[i];
        Placed placed = {.block = &block,
                         .local = {rows, config_.wire, block.momentum.rows, block.cols},
                         .whole = {nullptr, config_.wire, 0, block.cols}};
        if (Receives(block)) {
          placed.whole = {whole, config_.wire, block.rows.size(), block.cols};
          if (Orthogonalizes(block)) {
            placed.whole.data = stacked[i];
          } else {
            whole += block_bytes(block);
          }
          const RowRange& local = block.rows_of_rank[resources.rank];
          placed.local = Rows(placed.whole, local.begin - block.rows.begin, local.size());
        } else {
          rows += rows_bytes(block);
        }
        batch.placed.push_back(placed);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Muon::Update(const Unit& unit, const StepParams& params, const Event& ready) {
  DIM0_CHECK(update_order_[units_arrived_] == unit.index);
  if (units_arrived_ == 0) {
    ReadTimes(earlier_times_);
    earlier_times_.swap(times_);
  }
  for (const ParameterShard& shard : unit.parameters) shards_[shard.id] = shard;

  gather_->Wait(ready);
  while (groups_launched_ < groups_.size() &&
         groups_[groups_launched_].last_unit_position <= units_arrived_) {
    RunGroup(groups_[groups_launched_], slots_[groups_launched_ % slots_.size()], params);
    const Event& done = group_done_[groups_launched_++] = scatter_->Record();
    // The other ranks are about to wait for what this one has not enqueued.
    DIM0_RETURN_IF_ERROR(done.known_error());
  }
  if (++units_arrived_ < static_cast<int>(update_order_.size())) return absl::OkStatus();

  for (const auto& [unit_index, group] : last_group_) updated_[unit_index] = group_done_[group];
  units_arrived_ = 0;
  groups_launched_ = 0;
  return absl::OkStatus();
}

void Muon::RunGroup(const Group& group, Slot& slot, const StepParams& params) {
  gather_->Wait(slot.free);
  for (const Batch& batch : group.batches) {
    const RecordedUnit recorded(device_.recorder(), batch.unit, Phase::kUpdate);
    EnqueueMomentum(batch, params);
    EnqueueGather(batch);
  }
  newton_schulz_->Wait(gather_->Record());
  for (const Stack& stack : group.stacks) EnqueueStack(stack);
  scatter_->Wait(newton_schulz_->Record());
  for (const Batch& batch : group.batches) {
    const RecordedUnit recorded(device_.recorder(), batch.unit, Phase::kUpdate);
    EnqueueScatter(batch);
    EnqueueUpdate(batch, params);
  }
  slot.free = scatter_->Record();
}

void Muon::EnqueueMomentum(const Batch& batch, const StepParams& params) {
  for (const Placed& placed : batch.placed) {
    const Block& block = *placed.block;
    const RecordedUnit recorded(device_.recorder(), block.unit, Phase::kUpdate);
    kernels_->Momentum(*gather_,
                       Rows(shards_[block.id].gradient, block.offset, block.momentum.rows),
                       block.momentum, static_cast<float>(config_.momentum), config_.nesterov,
                       params.gradient_scale, placed.local);
  }
}

void Muon::EnqueueStack(const Stack& stack) {
  const Block& first = blocks_[stack.blocks.front()];
  std::string unit = first.unit;
  for (const int i : stack.blocks) {
    if (blocks_[i].unit != unit) unit.clear();
  }
  const RecordedUnit recorded(device_.recorder(), unit, Phase::kUpdate);
  const Event start = newton_schulz_->Record();
  first.newton_schulz.Enqueue(*kernels_, *newton_schulz_, stack.whole, stack.whole,
                              workspace_.data());
  times_.emplace_back(start, newton_schulz_->Record());
  work_.calls += static_cast<int64_t>(stack.blocks.size());
  work_.flops += static_cast<double>(stack.blocks.size()) * first.newton_schulz.flops();
}

void Muon::EnqueueUpdate(const Batch& batch, const StepParams& params) {
  const double lr = config_.lr * params.lr_scale;
  for (const Placed& placed : batch.placed) {
    const Block& block = *placed.block;
    const RecordedUnit recorded(device_.recorder(), block.unit, Phase::kUpdate);
    const ParameterShard& shard = shards_[block.id];
    kernels_->ApplyUpdate(*scatter_, Rows(shard.value, block.offset, block.momentum.rows),
                          CopyRows(shard, block.offset, block.momentum.rows), placed.local,
                          static_cast<float>(lr * block.scale),
                          static_cast<float>(lr * config_.weight_decay), params.gradient_scale);
  }
}

// The batch's momentum, from the ranks that store its rows to those that get it whole.
void Muon::EnqueueGather(const Batch& batch) {
  const int world_size = group_.world_size();
  double bytes = 0;
  for (const Placed& placed : batch.placed) bytes += placed.whole.bytes();
  const OpInfo info = {
      .name = "muon_gather " + batch.name, .kind = OpKind::kCollective, .bytes = bytes};

  if (config_.schedule != MuonSchedule::kOwner) {
    gather_->Enqueue(info, [this, &batch, world_size](const OpContext& context) {
      std::vector<std::vector<int64_t>> counts;
      std::vector<AllGatherPart> parts;
      for (const Placed& placed : batch.placed) {
        std::vector<int64_t>& of_rank = counts.emplace_back();
        for (int rank = 0; rank < world_size; ++rank) {
          of_rank.push_back(placed.block->size_on(rank));
        }
      }
      for (size_t i = 0; i < batch.placed.size(); ++i) {
        parts.push_back({batch.placed[i].local.data, batch.placed[i].whole.data, counts[i]});
      }
      return gather_channel_->AllGather(
          {Purpose::kOptimizer, batch.name, context.native_stream, context.call}, config_.wire,
          parts);
    });
    return;
  }
  gather_->Enqueue(info, [this, &batch, world_size](const OpContext& context) {
    std::vector<ConstSegment> rows(world_size);
    std::vector<Segment> whole(world_size);
    for (const Placed& placed : batch.placed) {
      rows[placed.block->owner] = {placed.local.data, placed.local.size()};
      if (placed.block->owner == group_.rank()) whole = Segments(placed);
    }
    return gather_channel_->AllToAll(
        {Purpose::kOptimizer, batch.name, context.native_stream, context.call}, config_.wire, rows,
        whole);
  });
}

// The results, from the owners to the ranks that store the rows. Where every rank has them already
// there is nothing to do.
void Muon::EnqueueScatter(const Batch& batch) {
  if (config_.schedule == MuonSchedule::kRedundant) return;
  double bytes = 0;
  for (const Placed& placed : batch.placed) {
    bytes += placed.whole.data != nullptr ? placed.whole.bytes() : placed.local.bytes();
  }
  const OpInfo info = {
      .name = "muon_scatter " + batch.name, .kind = OpKind::kCollective, .bytes = bytes};

  if (config_.schedule == MuonSchedule::kBroadcast) {
    scatter_->Enqueue(info, [this, &batch](const OpContext& context) -> absl::Status {
      for (const Placed& placed : batch.placed) {
        DIM0_RETURN_IF_ERROR(scatter_channel_->Broadcast(
            {Purpose::kOptimizer, placed.block->name, context.native_stream, context.call},
            config_.wire, placed.whole.data, placed.whole.size(), placed.block->owner));
      }
      return absl::OkStatus();
    });
    return;
  }
  scatter_->Enqueue(info, [this, &batch](const OpContext& context) {
    std::vector<ConstSegment> whole(group_.world_size());
    std::vector<Segment> rows(group_.world_size());
    for (const Placed& placed : batch.placed) {
      rows[placed.block->owner] = {placed.local.data, placed.local.size()};
      if (placed.block->owner != group_.rank()) continue;
      const std::vector<Segment> segments = Segments(placed);
      for (size_t rank = 0; rank < segments.size(); ++rank) {
        whole[rank] = {segments[rank].data, segments[rank].count};
      }
    }
    return scatter_channel_->AllToAll(
        {Purpose::kOptimizer, batch.name, context.native_stream, context.call}, config_.wire, whole,
        rows);
  });
}

std::vector<Segment> Muon::Segments(const Placed& placed) const {
  const Block& block = *placed.block;
  std::vector<Segment> segments;
  for (const RowRange& rows : block.rows_of_rank) {
    segments.push_back({Rows(placed.whole, rows.begin - block.rows.begin, rows.size()).data,
                        rows.size() * block.cols});
  }
  return segments;
}

void Muon::ReadTimes(std::vector<std::pair<Event, Event>>& times) {
  for (const auto& [start, end] : times) {
    if (!start.Wait().ok() || !end.Wait().ok()) continue;
    work_.seconds += absl::ToDoubleSeconds(end.points()[0]->time() - start.points()[0]->time());
  }
  times.clear();
}

NewtonSchulzWork Muon::newton_schulz_work() {
  ReadTimes(earlier_times_);
  ReadTimes(times_);
  return work_;
}

std::vector<StateTensor> Muon::State() {
  std::vector<StateTensor> state;
  for (const auto& [id, momentum] : momentum_) state.push_back({"momentum", id, momentum});
  return state;
}

uint64_t Muon::PlanHash() const {
  std::string text = absl::StrCat(
      "muon ", config_.lr, " ", config_.momentum, " ", config_.nesterov, " ", config_.weight_decay,
      " ", static_cast<int>(config_.scale), " ", static_cast<int>(config_.schedule), " ",
      static_cast<int>(config_.wire), " ", static_cast<int>(config_.split), " ",
      static_cast<int>(config_.newton_schulz.coefficients));
  for (const Block& block : blocks_) {
    absl::StrAppend(&text, " ", block.id, ":", block.rows.begin, "@", block.owner, " ",
                    static_cast<int>(block.newton_schulz.algorithm()));
  }
  return HashBytes(text);
}

}  // namespace dim0
