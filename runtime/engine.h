// The sharding engine of one rank. It owns the rank's shards and streams and decides when each unit
// is gathered, computed, reduced and updated. One training step reads, per unit:
//
//   forward    wait for the all-gather (issued `prefetch` units ahead), compute, reshard
//   backward   the same in reverse, then reduce-scatter the unit's gradient and free it
//   update     as each reduce-scatter lands, or after all of them when clipping needs the global
//              norm
//
// The last stage's unit, with which backward begins, stays gathered, and so do all units without
// reshard_after_forward. If it is larger than the others (a head with its vocabulary is) it is
// gathered in pieces between the others' gathers; in one piece it would come too late. If rows of
// it are looked up too, so that its gradient is final with the first stage only, that is reduced in
// pieces between the others' reduce-scatters; in one piece it would hold them up.
//
// A first stage that looks up rows gathers nothing: shards are whole rows,
// so the ranks that store them send each rank those that it needs, and get its gradient of them to
// add to their shards.
//
// Everything is enqueued. The host blocks twice a step: at its start, when nothing could run yet,
// for the ranks to tell each other which rows they will look up, so that every count is known when
// a call is enqueued; and where the loss and the norm are read. All memory is allocated by Create,
// so the plan is the peak:
//   gathered       `prefetch` + 1 slots of the largest unit that does not stay, a buffer for each
//                  that does, and for each lookup a table of the rows that this rank may need and
//                  one of those that all ranks may need of it
//   communication  2 slots for unsharded gradients (one filling, one being reduced), a buffer for
//                  the last stage's unit, and for each lookup two tables as above; with
//                  sync_every_micro_batch off, a buffer for every unit, since gradients then
//                  accumulate unsharded. Where what travels has another type than the model's, a
//                  wire buffer each way, of the most that one call moves: calls on a stream take
//                  turns
#ifndef DIM0_RUNTIME_ENGINE_H_
#define DIM0_RUNTIME_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/dtype.h"
#include "collectives/process_group.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/model.h"
#include "runtime/optimizer.h"
#include "runtime/parameter.h"
#include "runtime/unit.h"

namespace dim0 {

struct EngineOptions {
  // Free a unit's gathered parameters after its forward and gather them again for backward, in
  // every micro-batch; otherwise they stay gathered through the step.
  bool reshard_after_forward = true;
  // How many units beyond the one being computed may be gathered into the slots; those that stay
  // have buffers of their own and do not count. 0: none is gathered before it is needed.
  int prefetch = 1;
  // Reduce-scatter after every micro-batch, accumulating in the shard; otherwise accumulate
  // unsharded and reduce once a step.
  bool sync_every_micro_batch = true;
  // Largest global gradient norm. Infinity never clips, but updates wait for the norm all the same,
  // so that a gradient that is not finite changes nothing. 0: no clipping and no waiting (the norm
  // is still measured): a broken gradient is found when the step's updates are under way.
  double clip = 0;

  // Each float32 or bfloat16. Of the shards that the optimizer updates:
  DType master_dtype = DType::kFloat32;
  // of parameters as they are gathered, rounded from the shards;
  DType param_dtype = DType::kFloat32;
  // and of gradients as they are reduced, and accumulate in the shards. Where the model computes
  // in others, values are cast on their way.
  DType reduce_dtype = DType::kFloat32;

  // Error: InvalidArgument, naming the option that is wrong.
  absl::Status Validate() const;
};

struct StepResult {
  double loss = 0;           // mean over all ranks' tokens
  double gradient_norm = 0;  // global, before clipping
  bool clipped = false;      // clipping made the gradient smaller
  bool stop = false;         // some rank asked to stop
  // From the first stage's parameters being there to the end of the last backward.
  absl::Duration forward_backward;
};

class Engine {
 public:
  // Collaborators are the caller's and outlive the engine. With an allocator in plan mode the
  // memory is counted and nothing else may be called. `optimizer` may be null for an engine that
  // only evaluates. Does not communicate.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options, Model& model,
                                                        ProcessGroup& group, Device& device,
                                                        Allocator& allocator, Optimizer* optimizer);
  ~Engine();

  const ParameterTable& table() const { return table_; }
  // This rank's shards; read them only after Synchronize.
  const Unit& unit(int index) const { return units_[index].unit; }

  // Compares the plan of all ranks and fails, naming the ranks that differ. Then connects the
  // channels and fills the shards:
  // element i of parameter p is a function of (seed, p, i) alone.
  absl::Status Start(uint64_t seed);

  // One optimizer step over this rank's micro-batches. Gradients are of the mean loss over
  // `global_tokens` tokens. `stop`, which may be null, is this rank's wish to stop after this
  // step, read as late as the ranks' figures are exchanged; the result says whether any had it. A
  // loss or gradient that is not finite is an error that names the rank, unit and parameter; with
  // clipping on, no parameter has changed by then. After an error the engine is dead and the other
  // ranks have been told.
  absl::StatusOr<StepResult> TrainStep(absl::Span<const Batch> micro_batches, int64_t global_tokens,
                                       const StepParams& params, const std::atomic<bool>* stop);

  // Sum of the losses of all ranks' tokens that count, without gradients. Every rank must pass the
  // same number of batches.
  absl::StatusOr<double> Evaluate(absl::Span<const Batch> batches);

  // Collects one parameter, whole, in rank 0's host memory, where `whole` (its size) is filled with
  // exactly the values of the shards; other ranks pass an empty span.
  absl::Status GatherToRankZero(int parameter, absl::Span<float> whole);

  // Collects any tensor that is sharded as `parameter` is in rank 0's device memory: `shard` is
  // this rank's part, `whole` has room for the parameter's elements on rank 0 and is null
  // elsewhere.
  absl::Status GatherToRankZero(int parameter, const Tensor& shard, void* whole);

  // Every rank's bytes, of equal size, in rank order: the runtime's small talk. Blocks.
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& mine);

  // Waits for everything enqueued; the optimizer's work included.
  absl::Status Synchronize();

  // What is allocated less the buffers of gathered units and of gradients on their way, which hold
  // live data during steps only; Stream::CountLive counts from here.
  MemoryUse LiveBetweenSteps() const;

 private:
  // Where a unit's whole parameters or gradients lie: views into a buffer, in unit order.
  using Views = std::vector<Tensor>;

  // A buffer used by one unit after another. `free` is the point from which it may be filled again.
  struct Slot {
    Buffer buffer;
    Event free;
  };

  // An all-gather in flight or done. A unit may have two: the last block's forward copy is still in
  // use when its copy for backward is prefetched.
  struct Gathered {
    Slot* slot = nullptr;
    Event ready;
  };

  // Of a parameter, the elements that one call gathers or reduces.
  struct Portion {
    int position = 0;                    // of the parameter in the unit
    int64_t in_whole = 0, in_shard = 0;  // where they begin, in elements
    std::vector<int64_t> counts;         // elements of each rank
  };
  // What one call gathers or reduces.
  using Piece = std::vector<Portion>;

  struct UnitState {
    Unit unit;                                 // shards
    std::vector<std::vector<int64_t>> counts;  // per parameter, elements of each rank
    std::vector<Piece> pieces;                 // of the unit
    int first_stage = -1;                      // the first that uses it
    bool stays = false;                        // keeps its gathered buffer through the step
    bool own_gradient = false;                 // does not share the gradient slots
    Slot gathered_buffer;                      // used if `stays`
    Slot gradient_buffer;                      // used if `own_gradient`
    Slot* gathered = nullptr;                  // where compute finds it; null when resharded
    Slot* gradient = nullptr;
    bool has_gradient = false;  // the shards' gradients hold a part of this step's already
    size_t pieces_reduced = 0;  // of this micro-batch's gradient
  };

  // What the rows of one lookup pass through in one direction.
  struct RowBuffers {
    Buffer asked;    // the rows that this rank looks up, or their gradients, in increasing order
    Buffer served;   // those that ranks look up in this one's shard, rank 0's first
    Buffer indices;  // int32: where in the shard `served`'s rows are
  };

  // A lookup of the first stage.
  struct LookupState {
    int id = 0;        // of the parameter
    int64_t most = 0;  // rows that a rank may look up in a micro-batch
    RowBuffers values, gradients;
  };

  // Who sends which rows of one lookup to whom in one micro-batch.
  struct RowRoute {
    std::vector<int64_t> asked;    // how many rows this rank looks up of each rank's
    std::vector<int64_t> served;   // how many rows each rank looks up of this one's
    std::vector<int32_t> indices;  // where in the shard those are, rank 0's first
  };

  struct MicroBatch {
    Batch batch;
    std::vector<std::vector<int32_t>> uses;  // for Model::Begin
    std::vector<RowRoute> routes;            // of each lookup
  };

  Engine(const EngineOptions& options, Model& model, ProcessGroup& group, Device& device,
         Allocator& allocator, Optimizer* optimizer);
  absl::Status Allocate();
  absl::Status AllocateLookup(LookupState& lookup);
  // Cuts the unit into so many pieces, each with a part of every rank's rows.
  void Cut(UnitState& state, int64_t pieces);
  absl::Status OpenChannels();
  // While nothing is under way: in one process a rank that connects, or allocates, may wait for
  // what the others' GPUs do, and these for this rank.
  absl::Status Connect();
  // Whole units, gathered and as gradients: elements of the model's types.
  Views GatheredViews(const UnitState& state, const Slot& slot) const {
    return ViewsOf(state, slot, model_.parameter_dtype());
  }
  Views GradientViews(const UnitState& state, const Slot& slot) const {
    return ViewsOf(state, slot, model_.gradient_dtype());
  }
  Views ViewsOf(const UnitState& state, const Slot& slot, DType dtype) const;
  // Of the buffer in which the whole unit lies as ViewsOf has it.
  int64_t WholeBytes(const UnitState& state, DType dtype) const;
  int64_t GatheredBytes(const UnitState& state) const {
    return table_.unit_elements(state.unit.index) * SizeOf(model_.parameter_dtype());
  }
  int64_t GradientBytes(const UnitState& state) const {
    return table_.unit_elements(state.unit.index) * SizeOf(model_.gradient_dtype());
  }
  // The parts of a unit's tensors that one call moves, as vectors.
  static Views PortionsOf(const Piece& piece, const Views& whole);
  // Tensors of the same shapes one behind the other in a wire buffer.
  static Views OnWire(const Buffer& wire, DType dtype, const Views& portions);
  void CastAll(Stream& stream, const Views& sources, const Views& targets);
  // Whether what travels lies in the wire buffer on its way from or to the model's memory.
  bool casts_parameters() const { return options_.param_dtype != model_.parameter_dtype(); }
  bool casts_gradients() const { return options_.reduce_dtype != model_.gradient_dtype(); }
  absl::Status AllocateWires();

  // Blocks until every rank has told which rows it will look up in `batches`; fills micro_batches_.
  absl::Status RouteRows(absl::Span<const Batch> batches);

  // One pass over the stages: forward, and backward if `training`.
  void RunMicroBatch(const MicroBatch& micro_batch, bool training, bool first, bool last,
                     float gradient_scale, const std::function<void(UnitState&)>& reduced);
  // Puts the unit's gathers behind those that are in order already, or, of several, the last one
  // there and the others evenly between them.
  void AddToGatherOrder(const UnitState& state);
  // Issues all-gathers in visiting order: those needed by now, and those for which there is room.
  void IssueGathers();
  Gathered Gather(UnitState& state, size_t piece, Phase phase);
  // Makes compute wait for the unit, if it is gathered for this stage.
  void Unshard(UnitState& state, bool gathers_here);
  void Reshard(UnitState& state);
  void AcquireGradient(UnitState& state);
  // The unit's gradient is whole: reduces it, or begins to, if the rest may wait.
  void ReduceScatter(UnitState& state);
  // Reduces pieces until so many are done.
  void ReducePieces(UnitState& state, size_t target);
  void ReducePiece(UnitState& state, const Piece& piece);
  void MeasureGradient(UnitState& state);

  // The first stage, if it looks up rows. FetchRows sends for their values, LookupBackward sends
  // off their gradients and adds to this rank's shards what the others send.
  void FetchRows(const MicroBatch& micro_batch);
  void LookupForward(const MicroBatch& micro_batch, bool training, double* loss_sum);
  void LookupBackward(const MicroBatch& micro_batch);
  void ReturnRows(const LookupState& lookup, const RowRoute& route, const Tensor& table);
  // What the stage gets of its lookups, or writes their gradients to.
  Views LookupTables(const MicroBatch& micro_batch, RowBuffers LookupState::*direction) const;
  const ParameterShard& ShardOf(const LookupState& lookup) const {
    const ParameterTable::Entry& entry = table_[lookup.id];
    return units_[entry.unit].unit.parameters[entry.position];
  }
  // What a wait for the streams has returned, or what failed their asynchronous collectives.
  absl::Status Settled(absl::Status waited) const;
  // Fails the other ranks too, so that none waits for this one.
  absl::Status Fail(absl::Status status);
  absl::Status CheckFinite(absl::Span<const double> all_stats) const;

  const EngineOptions options_;
  Model& model_;
  ProcessGroup& group_;
  Device& device_;
  Allocator& allocator_;
  Optimizer* const optimizer_;
  const ParameterTable table_;
  std::vector<int> update_order_;

  std::vector<UnitState> units_;
  std::vector<LookupState> lookups_;       // the first stage's
  std::vector<MicroBatch> micro_batches_;  // of the step or the evaluation
  Event rows_fetched_;                     // the lookups' tables are there
  Event tables_free_;                      // and may be filled again
  Event row_gradients_free_;               // the same of their gradients
  Buffer shard_values_;
  Buffer shard_copies_;  // empty where the values themselves are gathered
  Buffer shard_gradients_;
  Buffer parameter_wire_;  // of the all-gather stream; empty where nothing is cast
  Buffer gradient_wire_;   // of the reduce-scatter stream, likewise
  std::vector<Slot> gathered_slots_;
  std::vector<Slot> gradient_slots_;
  int next_gathered_slot_ = 0;
  int next_gradient_slot_ = 0;

  // A step's figures, float64 on the device, exchanged by all ranks at its end: loss sum, stop,
  // then each parameter's gradient sum of squares over this rank's rows.
  static constexpr int kLoss = 0;
  static constexpr int kStop = 1;
  static constexpr int kSquares = 2;
  int64_t stats_size_ = 0;
  Buffer stats_;           // [stats_size_]
  Buffer all_stats_;       // [world size, stats_size_]
  Buffer gradient_scale_;  // float [1]
  double stop_wish_ = 0;   // host copy of this rank's
  // Host copy of all_stats_. Here, because a step that fails may leave while it is on its way.
  std::vector<double> host_stats_;

  // The order of a micro-batch's all-gathers, and how far it has come.
  struct GatherStep {
    int unit = 0;
    size_t piece = 0;
  };
  std::vector<GatherStep> gather_order_;
  size_t forward_gathers_ = 0;      // those at its beginning that forward is for
  std::vector<Gathered> gathered_;  // those issued
  size_t gathers_used_ = 0;
  size_t slots_held_ = 0;  // by gathers issued and not resharded yet
  // The unit whose gradient is reduced piece by piece behind the stages that are left, if there is
  // one, and the event from which a gradient to be reduced is whole.
  UnitState* reducing_ = nullptr;
  Event reducible_;

  std::unique_ptr<Communicator> parameter_channel_;
  std::unique_ptr<Communicator> gradient_channel_;
  std::unique_ptr<Communicator> control_channel_;
  std::unique_ptr<Communicator> host_channel_;
  // Declared last: their destructors run what is queued, which uses all of the above.
  std::unique_ptr<Stream> compute_;
  std::unique_ptr<Stream> all_gather_;
  std::unique_ptr<Stream> reduce_scatter_;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_ENGINE_H_
