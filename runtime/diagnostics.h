// What a researcher wants to see of a run beside its loss: how near the momentum's Gram matrices
// are to diagonal ones, which is what justifies row normalization, and how far a step moves the
// parameters. Measured beside training and without touching it: losses with and without are the
// same to the bit.
#ifndef DIM0_RUNTIME_DIAGNOSTICS_H_
#define DIM0_RUNTIME_DIAGNOSTICS_H_

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/process_group.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/engine.h"
#include "runtime/optimizer.h"

namespace dim0 {

// Of the rows i of momenta V [m, n]: r_i = (V V^T)_ii / mean over j != i of |(V V^T)_ij| (Deng et
// al., "RMNP: row-momentum normalized preconditioning"). Rows without a finite r_i are left out:
// those of zeros, and those orthogonal to all others. NaN when no row is left.
struct Dominance {
  double average = std::numeric_limits<double>::quiet_NaN();
  double smallest = std::numeric_limits<double>::quiet_NaN();
  double largest = std::numeric_limits<double>::quiet_NaN();
  int64_t rows = 0;  // that count
};

struct DiagnosticsReport {
  // By parameter name, of every hidden matrix of two or more rows; and of all their rows together.
  std::vector<std::pair<std::string, Dominance>> matrices;
  Dominance all;
  // Root mean square over the elements of all parameters of a role of the step's change, by
  // ParameterRole. NaN where the model has none.
  std::array<double, kNumParameterRoles> update_rms;
};

class Diagnostics {
 public:
  // At most so many rows i of a matrix are looked at, against all rows j: every s-th from row 0
  // with the smallest s that will do.
  static constexpr int64_t kMostRows = 256;

  // `engine` was made with `optimizer` and `group`; all arguments outlive the result. Allocates on
  // every rank a copy of its shards, and on rank 0 the largest matrix and a block of products;
  // with an allocator in plan mode the memory is counted and nothing else may be called. The
  // momentum of a matrix is the optimizer's state called "momentum", else "first_moment" (AdamW's).
  // Errors: InvalidArgument for a model without hidden matrices, or an optimizer that keeps neither
  // of the two for one of them.
  static absl::StatusOr<std::unique_ptr<Diagnostics>> Create(Engine& engine, Optimizer& optimizer,
                                                             const ProcessGroup& group,
                                                             Device& device, Allocator& allocator);

  // Every rank calls both, at the same steps; both block. An error must end the run on all ranks,
  // as any of the engine's.

  // Before the step to be measured.
  absl::Status BeforeStep();

  // After it. Gathers one momentum after another to rank 0 (control bytes). The result is rank 0's;
  // the other ranks' is empty.
  absl::StatusOr<DiagnosticsReport> AfterStep();

 private:
  struct Matrix {
    int parameter = 0;
    Tensor momentum;  // this rank's rows
    int64_t stride = 1;
    int64_t sampled = 0;
  };

  Diagnostics(Engine& engine, const ProcessGroup& group, Device& device)
      : engine_(engine), group_(group), device_(device) {}
  absl::Status Plan(Optimizer& optimizer);
  absl::Status Allocate(Allocator& allocator);
  // Calls body(shard, its values before the step) for every parameter.
  template <typename Body>
  void ForEachShard(Body body);
  absl::StatusOr<std::array<double, kNumParameterRoles>> UpdateRms();

  Engine& engine_;
  const ProcessGroup& group_;
  Device& device_;
  std::vector<Matrix> matrices_;

  Buffer before_;       // this rank's shards, one after another
  Buffer differences_;  // float64, one a parameter
  // Rank 0 only.
  Buffer whole_;     // a momentum
  Buffer products_;  // sampled rows by all rows
  Buffer ratios_;    // float64, one a sampled row
  std::unique_ptr<Stream> stream_;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_DIAGNOSTICS_H_
