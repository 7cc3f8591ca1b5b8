// The optimizer interface. An optimizer sees shards, a plan made from global shapes, and events;
// what it communicates, if anything, is its own affair and goes through communicators given to its
// constructor. An optimizer that is given none cannot communicate.
#ifndef DIM0_RUNTIME_OPTIMIZER_H_
#define DIM0_RUNTIME_OPTIMIZER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "runtime/allocator.h"
#include "runtime/parameter.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"
#include "runtime/unit.h"

namespace dim0 {

struct StepParams {
  int64_t step = 1;     // counted from 1
  double lr_scale = 1;  // the schedule's factor; multiplies every learning rate
  // Device memory, one float: what gradients are multiplied by first (clipping). Not finite when
  // the step's gradients are not: then parameters and state must stay as they are.
  const float* gradient_scale = nullptr;
};

// What an optimizer may use. No communicator.
struct OptimizerResources {
  Allocator* allocator = nullptr;  // in plan mode, memory is counted and must not be touched
  int rank = 0;
  int world_size = 1;
  // Units in the order in which Update will be called, every step.
  std::vector<int> update_order;
};

// State of one parameter, sharded as the parameter is.
struct StateTensor {
  std::string name;  // "momentum", ...
  int parameter = 0;
  Tensor shard;
};

struct NewtonSchulzWork {
  int64_t calls = 0;
  double flops = 0;    // as predicted from shapes, which is what owners are chosen by
  double seconds = 0;  // from the start of each run to its end on the device

  NewtonSchulzWork& operator+=(const NewtonSchulzWork& other) {
    calls += other.calls;
    flops += other.flops;
    seconds += other.seconds;
    return *this;
  }
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Once, before step 1, on every rank, from the same table. Updates the parameters in `ids`
  // (ascending) and no others. Decides owners, order, buffers; allocates all memory; no collective.
  virtual absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                            const OptimizerResources& resources) = 0;

  // Once, after Plan and before the first Update, on every rank, when all of them have planned the
  // same: for an optimizer that communicates, to connect what it has opened. Blocks. Errors: the
  // communicators'.
  virtual absl::Status Start() { return absl::OkStatus(); }

  // The unit's gradient shards and the gradient scale are final once `ready` has passed. Enqueues
  // the update and returns. The shards' memory lives as long as the engine.
  virtual absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) = 0;

  // After the step's last Update: the point from which the unit's parameters are new.
  virtual Event Updated(const Unit& unit) = 0;

  // Named, sharded state; valid after Plan.
  virtual std::vector<StateTensor> State() = 0;

  // What this rank has done so far; nothing for optimizers without Newton-Schulz. Waits for runs in
  // progress.
  virtual NewtonSchulzWork newton_schulz_work() { return {}; }

  // Of every decision of Plan that all ranks must share.
  virtual uint64_t PlanHash() const = 0;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_OPTIMIZER_H_
