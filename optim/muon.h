// Muon under row sharding. Newton-Schulz needs a whole matrix and every rank stores some of its
// rows, so ranks exchange rows, by one of three schedules. Matrices are handled in batches, as a
// pipeline on three streams:
//
//   gather         momentum of the local rows, then one collective of the batch's rows
//   newton_schulz  those of the batch's matrices that this rank orthogonalises
//   scatter        the collective that brings results to where the rows are, if the schedule has
//                  one; then the local rows' update
//
// Two slots of buffers: the gather of batch k+1 and the scatter of batch k-1 run during the
// Newton-Schulz of batch k. A batch starts when the gradients of all its matrices are there.
#ifndef DIM0_OPTIM_MUON_H_
#define DIM0_OPTIM_MUON_H_

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives/process_group.h"
#include "optim/kernels.h"
#include "optim/newton_schulz.h"
#include "optim/scale.h"
#include "runtime/optimizer.h"
#include "runtime/sharding.h"

namespace dim0 {

// How the ranks come by whole matrices. Bytes are what a rank sends in a step, S being all
// matrices' bytes on the wire and N the ranks, when rows divide evenly.
enum class MuonSchedule : uint8_t {
  kOwner,      // rows to the owner, its result's rows back: 2 (N-1)/N S / N
  kRedundant,  // all-gather, every rank orthogonalises everything: (N-1)/N S
  kBroadcast,  // all-gather, the owner orthogonalises, broadcast: (N-1)/N S + S
};

// A fused weight as one matrix or as several.
enum class MatrixSplit : uint8_t { kOff, kQkv, kHeads };

struct MuonConfig {
  double lr = 2e-2;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0;
  UpdateScale scale = UpdateScale::kSpectral;
  MuonSchedule schedule = MuonSchedule::kOwner;
  // Of momentum and results between ranks: kBFloat16 or kFloat32. A rank's own rows are rounded
  // alike, so that the result does not depend on who owns what.
  DType wire = DType::kBFloat16;
  NewtonSchulzConfig newton_schulz;
  MatrixSplit split = MatrixSplit::kOff;
};

// "owner", "redundant" or "broadcast"; "off", "qkv" or "heads"; "bfloat16" or "float32". Errors:
// NotFound, listing these.
absl::StatusOr<MuonSchedule> ParseMuonSchedule(absl::string_view name);
absl::StatusOr<MatrixSplit> ParseMatrixSplit(absl::string_view name);
absl::StatusOr<DType> ParseMuonWire(absl::string_view name);

class Muon : public Optimizer {
 public:
  // `device` and `group` outlive the optimizer. Plan opens the channels "muon_gather" and
  // "muon_scatter" of `group` unless it only counts memory.
  Muon(const MuonConfig& config, std::shared_ptr<OptimizerKernels> kernels, Device& device,
       ProcessGroup& group)
      : config_(config), kernels_(std::move(kernels)), device_(device), group_(group) {}
  ~Muon() override;

  absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                    const OptimizerResources& resources) override;
  absl::Status Start() override;
  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override;
  Event Updated(const Unit& unit) override { return updated_[unit.index]; }
  std::vector<StateTensor> State() override;
  NewtonSchulzWork newton_schulz_work() override;
  uint64_t PlanHash() const override;

 private:
  // What Newton-Schulz treats as one matrix: a parameter, or some of its rows.
  struct Block {
    int id = 0;
    std::string name;
    std::string unit;
    RowRange rows;  // of the parameter
    int64_t cols = 0;
    double scale = 1;
    NewtonSchulz newton_schulz;
    int owner = 0;
    std::vector<RowRange> rows_of_rank;  // of the parameter, those in the block
    Tensor momentum;                     // the local rows
    int64_t offset = 0;                  // of the local rows in this rank's shard

    int64_t size() const { return rows.size() * cols; }
    int64_t size_on(int rank) const { return rows_of_rank[rank].size() * cols; }
  };

  // A block in a slot's memory, of the wire's type.
  struct Placed {
    const Block* block = nullptr;
    Tensor local;  // this rank's rows; inside `whole` where that is
    Tensor whole;  // empty on ranks that do not get it
  };

  // What is gathered, and scattered, at once.
  struct Batch {
    std::vector<int> blocks;  // indices into blocks_
    std::vector<Placed> placed;
    std::string name;
    std::string unit;  // of its blocks; empty if they are of several
  };

  // Blocks of one shape that this rank orthogonalises at once, one below the other in memory.
  struct Stack {
    std::vector<int> blocks;  // indices into blocks_
    Tensor whole;
  };

  // Batches one after another, so many that Newton-Schulz keeps the device busy: one, where a
  // matrix does.
  struct Group {
    std::vector<Batch> batches;
    std::vector<Stack> stacks;
    int last_unit_position = 0;  // in the update order: by then all gradients have come
  };

  struct Slot {
    Buffer rows;   // local rows of blocks that do not come here whole
    Buffer whole;  // blocks that do
    Event free;    // the group before last has left the buffers
  };

  bool Receives(const Block& block) const;
  bool Orthogonalizes(const Block& block) const;
  // The first part of Plan: what the blocks are, from global shapes. The second: who does what
  // when.
  absl::Status MakeBlocks(const ParameterTable& table, absl::Span<const int> ids,
                          const OptimizerResources& resources);
  void MakeGroups(const ParameterTable& table, absl::Span<const int> position);
  std::vector<Stack> MakeStacks(absl::Span<const Batch> batches) const;
  absl::Status Allocate(const OptimizerResources& resources);

  void RunGroup(const Group& group, Slot& slot, const StepParams& params);
  void EnqueueMomentum(const Batch& batch, const StepParams& params);
  void EnqueueGather(const Batch& batch);
  void EnqueueStack(const Stack& stack);
  void EnqueueScatter(const Batch& batch);
  void EnqueueUpdate(const Batch& batch, const StepParams& params);
  // Each rank's rows in `placed.whole`.
  std::vector<Segment> Segments(const Placed& placed) const;
  // Adds finished Newton-Schulz runs to work_; waits for those that are not.
  void ReadTimes(std::vector<std::pair<Event, Event>>& times);

  const MuonConfig config_;
  const std::shared_ptr<OptimizerKernels> kernels_;
  Device& device_;
  ProcessGroup& group_;

  std::map<int, Tensor> momentum_;  // by parameter
  std::vector<Block> blocks_;       // in update order
  std::vector<Group> groups_;
  std::map<int, int> last_group_;  // by unit: the group after which all its matrices are new
  std::vector<int> update_order_;
  Buffer state_;
  std::array<Slot, 2> slots_;
  Buffer workspace_;

  // The step in progress.
  std::map<int, ParameterShard> shards_;  // by parameter
  int units_arrived_ = 0;
  size_t groups_launched_ = 0;
  std::vector<Event> group_done_;
  std::map<int, Event> updated_;  // by unit

  NewtonSchulzWork work_;
  // Start and end of runs that are not in work_ yet: of this step, and of the one before, whose
  // runs have ended when the next step's gradients come.
  std::vector<std::pair<Event, Event>> times_, earlier_times_;

  std::unique_ptr<Communicator> gather_channel_;
  std::unique_ptr<Communicator> scatter_channel_;
  std::unique_ptr<Stream> gather_;
  std::unique_ptr<Stream> newton_schulz_;
  std::unique_ptr<Stream> scatter_;
};

// Owners by the longest-processing-time rule: the costliest matrix first, each to the rank with the
// least work so far (Graham, "Bounds on multiprocessing timing anomalies", 1969). Ties go to the
// lower index. Returns costs.size() ranks.
std::vector<int> AssignOwners(absl::Span<const double> costs, int world_size);

}  // namespace dim0

#endif  // DIM0_OPTIM_MUON_H_
