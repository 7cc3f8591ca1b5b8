#include "optim/muon.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "optim/newton_schulz.h"
#include "optim/state.h"

namespace dim0 {

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

absl::Status Muon::Plan(const ParameterTable& table, absl::Span<const int> ids,
                        const OptimizerResources& resources) {
  update_order_ = resources.update_order;
  std::vector<int> position(table.num_units(), 0);
  for (size_t i = 0; i < update_order_.size(); ++i) position[update_order_[i]] = i;

  std::vector<int> ordered(ids.begin(), ids.end());
  std::stable_sort(ordered.begin(), ordered.end(),
                   [&](int a, int b) { return position[table[a].unit] < position[table[b].unit]; });
  std::vector<double> costs;
  StateLayout layout(resources);
  for (const int id : ordered) {
    const ParameterSpec& spec = table[id].spec;
    costs.push_back(NewtonSchulzFlops(spec.rows, spec.cols));
    matrices_.push_back({.id = id,
                         .spec = spec,
                         .owner = 0,
                         .scale = ScaleOf(config_.scale, spec.rows, spec.cols),
                         .momentum = layout.Add(spec)});
  }
  DIM0_ASSIGN_OR_RETURN(state_, layout.Allocate());
  for (Matrix& matrix : matrices_) layout.Place(state_, matrix.momentum);

  // Batch k holds the k-th matrix of every owner, in update order.
  const std::vector<int> owners = AssignOwners(costs, resources.world_size);
  std::vector<size_t> owned(resources.world_size, 0);
  for (size_t i = 0; i < matrices_.size(); ++i) {
    Matrix& matrix = matrices_[i];
    matrix.owner = owners[i];
    const size_t k = owned[matrix.owner]++;
    if (k == batches_.size()) batches_.emplace_back();
    batches_[k].matrices.push_back(i);
    const int unit = table[matrix.id].unit;
    batches_[k].last_unit_position = std::max(batches_[k].last_unit_position, position[unit]);
    last_batch_[unit] = std::max<int>(last_batch_[unit], k);
  }
  batch_done_.resize(batches_.size());

  int64_t rows_floats = 0, matrix_floats = 0, workspace_floats = 0;
  for (const Batch& batch : batches_) {
    int64_t floats = 0;
    for (const int i : batch.matrices) floats += matrices_[i].momentum.size();
    rows_floats = std::max(rows_floats, floats);
  }
  for (const Matrix& matrix : matrices_) {
    if (matrix.owner != resources.rank) continue;
    matrix_floats = std::max(matrix_floats, matrix.spec.size());
    workspace_floats =
        std::max(workspace_floats, NewtonSchulzWorkspace(matrix.spec.rows, matrix.spec.cols));
  }
  const auto allocate = [&](int64_t floats, Buffer& buffer) -> absl::Status {
    DIM0_ASSIGN_OR_RETURN(buffer, resources.allocator->Allocate(MemoryPurpose::kCommunication,
                                                                floats * sizeof(float)));
    return absl::OkStatus();
  };
  for (Slot& slot : slots_) {
    DIM0_RETURN_IF_ERROR(allocate(rows_floats, slot.rows));
    DIM0_RETURN_IF_ERROR(allocate(matrix_floats, slot.matrix));
  }
  DIM0_RETURN_IF_ERROR(allocate(workspace_floats, workspace_));

  if (!resources.allocator->plan_only()) {
    DIM0_ASSIGN_OR_RETURN(gather_channel_, group_.Open("muon_gather"));
    DIM0_ASSIGN_OR_RETURN(scatter_channel_, group_.Open("muon_scatter"));
    gather_ = device_.NewStream("muon_gather");
    newton_schulz_ = device_.NewStream("newton_schulz");
    scatter_ = device_.NewStream("muon_scatter");
  }
  return absl::OkStatus();
}

absl::Status Muon::Update(const Unit& unit, const StepParams& params, const Event& ready) {
  DIM0_CHECK(update_order_[units_arrived_] == unit.index);
  for (const ParameterShard& shard : unit.parameters) shards_[shard.id] = shard;

  gather_->Wait(ready);
  while (batches_launched_ < batches_.size() &&
         batches_[batches_launched_].last_unit_position <= units_arrived_) {
    RunBatch(batches_[batches_launched_], slots_[batches_launched_ % slots_.size()], params);
    batch_done_[batches_launched_++] = scatter_->Record();
  }
  if (++units_arrived_ < static_cast<int>(update_order_.size())) return absl::OkStatus();

  for (const auto& [unit_index, batch] : last_batch_) updated_[unit_index] = batch_done_[batch];
  units_arrived_ = 0;
  batches_launched_ = 0;
  return absl::OkStatus();
}

void Muon::RunBatch(const Batch& batch, Slot& slot, const StepParams& params) {
  const int world_size = group_.world_size();
  const int rank = group_.rank();
  const double lr = config_.lr * params.lr_scale;

  // Local rows of each matrix, by owner; and the whole matrix this rank owns, if the batch has one.
  std::vector<ConstSegment> rows_out(world_size);
  std::vector<Segment> rows_in(world_size);
  std::vector<ConstSegment> whole_out(world_size);
  std::vector<Segment> whole_in(world_size);
  std::vector<Tensor> local(batch.matrices.size());
  const Matrix* owned = nullptr;
  int64_t offset = 0;
  for (size_t i = 0; i < batch.matrices.size(); ++i) {
    const Matrix& matrix = matrices_[batch.matrices[i]];
    const Tensor& momentum = matrix.momentum;
    local[i] = F32(slot.rows.f32() + offset, momentum.rows, momentum.cols);
    offset += momentum.size();
    rows_out[matrix.owner] = {local[i].data, local[i].size()};
    rows_in[matrix.owner] = {local[i].data, local[i].size()};
    if (matrix.owner != rank) continue;
    owned = &matrix;
    for (int peer = 0; peer < world_size; ++peer) {
      const RowRange rows = RowsOfRank(matrix.spec.rows, world_size, peer);
      float* start = slot.matrix.f32() + rows.begin * matrix.spec.cols;
      whole_in[peer] = {start, rows.size() * matrix.spec.cols};
      whole_out[peer] = {start, rows.size() * matrix.spec.cols};
    }
  }
  const double wire_bytes = 4.0 * offset;

  gather_->Wait(slot.free);
  for (size_t i = 0; i < batch.matrices.size(); ++i) {
    const Matrix& matrix = matrices_[batch.matrices[i]];
    kernels_->Momentum(*gather_, shards_[matrix.id].gradient, matrix.momentum,
                       static_cast<float>(config_.momentum), config_.nesterov,
                       params.gradient_scale, local[i]);
  }
  gather_->Enqueue({.name = "muon_gather", .kind = OpKind::kCollective, .bytes = wire_bytes},
                   [this, rows_out, whole_in](const OpContext& context) {
                     return gather_channel_->AllToAll(
                         {Purpose::kOptimizer, "muon_gather", context.native_stream},
                         DType::kFloat32, rows_out, whole_in);
                   });

  newton_schulz_->Wait(gather_->Record());
  if (owned != nullptr) {
    NewtonSchulz(*kernels_, *newton_schulz_,
                 F32(slot.matrix.f32(), owned->spec.rows, owned->spec.cols), workspace_.f32());
    ++newton_schulz_calls_;
  }

  scatter_->Wait(newton_schulz_->Record());
  scatter_->Enqueue({.name = "muon_scatter", .kind = OpKind::kCollective, .bytes = wire_bytes},
                    [this, whole_out, rows_in](const OpContext& context) {
                      return scatter_channel_->AllToAll(
                          {Purpose::kOptimizer, "muon_scatter", context.native_stream},
                          DType::kFloat32, whole_out, rows_in);
                    });
  for (size_t i = 0; i < batch.matrices.size(); ++i) {
    const Matrix& matrix = matrices_[batch.matrices[i]];
    kernels_->ApplyUpdate(*scatter_, shards_[matrix.id].value, local[i],
                          static_cast<float>(lr * matrix.scale),
                          static_cast<float>(lr * config_.weight_decay), params.gradient_scale);
  }
  slot.free = scatter_->Record();
}

std::vector<StateTensor> Muon::State() {
  std::vector<StateTensor> state;
  for (const Matrix& matrix : matrices_) state.push_back({"momentum", matrix.id, matrix.momentum});
  return state;
}

uint64_t Muon::PlanHash() const {
  std::string text = absl::StrCat("muon ", config_.lr, " ", config_.momentum, " ", config_.nesterov,
                                  " ", config_.weight_decay, " ", static_cast<int>(config_.scale));
  for (const Matrix& matrix : matrices_) absl::StrAppend(&text, " ", matrix.id, "@", matrix.owner);
  return HashBytes(text);
}

}  // namespace dim0
