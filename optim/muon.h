// Muon under row sharding, by owners. Newton-Schulz needs a whole matrix and every rank stores some
// of its rows, so each matrix has an owner: the rows of the momentum go there, the owner
// orthogonalises, and the rows of the result come back. Matrices are handled in batches of at most
// one per owner, as a pipeline on three streams:
//
//   gather        momentum of the local rows, then one all-to-all of rows to owners
//   newton_schulz the owner's matrix
//   scatter       one all-to-all of the result's rows, then the local rows' update
//
// Two slots of buffers: the gather of batch k+1 and the scatter of batch k-1 run during the
// Newton-Schulz of batch k. A batch starts when the gradients of all its matrices are there.
//
// Per step a rank sends the rows it stores of other owners' matrices, and the rows of its own
// matrices that others store: summed over ranks 2 (N-1)/N of all matrices' bytes when rows divide
// evenly.
#ifndef DIM0_OPTIM_MUON_H_
#define DIM0_OPTIM_MUON_H_

#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/process_group.h"
#include "optim/kernels.h"
#include "optim/newton_schulz.h"
#include "optim/scale.h"
#include "runtime/optimizer.h"

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
  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override;
  Event Updated(const Unit& unit) override { return updated_[unit.index]; }
  std::vector<StateTensor> State() override;
  int64_t newton_schulz_calls() const override { return newton_schulz_calls_; }
  uint64_t PlanHash() const override;

 private:
  struct Matrix {
    int id = 0;
    ParameterSpec spec;
    int owner = 0;
    double scale = 1;
    Tensor momentum;
  };

  // At most one matrix per owner; `last_unit_position` is the place in the update order by which
  // the gradients of all of them have come.
  struct Batch {
    std::vector<int> matrices;  // indices into matrices_
    int last_unit_position = 0;
  };

  struct Slot {
    Buffer rows;    // this rank's rows of every matrix in the batch, one after another
    Buffer matrix;  // the matrix this rank owns, whole
    Event free;     // the batch before last has left the buffers
  };

  void RunBatch(const Batch& batch, Slot& slot, const StepParams& params);

  const MuonConfig config_;
  const std::shared_ptr<OptimizerKernels> kernels_;
  Device& device_;
  ProcessGroup& group_;

  std::vector<Matrix> matrices_;  // in update order
  std::vector<Batch> batches_;
  std::map<int, int> last_batch_;  // by unit: the batch after which all its matrices are new
  std::vector<int> update_order_;
  Buffer state_;
  std::array<Slot, 2> slots_;
  Buffer workspace_;

  // The step in progress.
  std::map<int, ParameterShard> shards_;  // by parameter
  int units_arrived_ = 0;
  size_t batches_launched_ = 0;
  std::vector<Event> batch_done_;
  std::map<int, Event> updated_;  // by unit
  int64_t newton_schulz_calls_ = 0;

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
