// What the engine needs of a model: its units, the stages it runs in, and a way to enqueue each
// stage's forward and backward. The engine knows nothing of layers; the model knows nothing of
// ranks.
#ifndef DIM0_RUNTIME_MODEL_H_
#define DIM0_RUNTIME_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "collectives/dtype.h"
#include "runtime/allocator.h"
#include "runtime/parameter.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace dim0 {

// A parameter of which a stage reads some rows only.
struct Lookup {
  int position = 0;  // of the parameter in the stage's unit
  int64_t most = 0;  // how many rows a micro-batch may need; known once the model has allocated
};

// A step of the forward pass that uses one unit. Backward runs the stages in reverse. Every unit
// has one stage that uses it whole. The first stage may instead look up rows of a unit that another
// stage uses whole (tied embeddings do).
struct Stage {
  std::string name;
  int unit = 0;
  std::vector<Lookup> lookups;
};

// B sequences of T tokens in host memory, [B, T] each; a target of -1 does not count. Must live
// until the micro-batch's work has passed.
struct Batch {
  int64_t sequences = 0;
  int64_t seq_len = 0;
  const int32_t* tokens = nullptr;
  const int32_t* targets = nullptr;
};

class Model {
 public:
  virtual ~Model() = default;

  virtual absl::Span<const UnitSpec> units() const = 0;
  virtual absl::Span<const Stage> stages() const = 0;

  // The types, float32 or bfloat16, of the `parameters` that Forward and Backward are given and of
  // the `gradients` that Backward writes. Where ranks send others, the engine casts.
  virtual DType parameter_dtype() const { return DType::kFloat32; }
  virtual DType gradient_dtype() const { return DType::kFloat32; }

  // Allocates activations and workspaces for batches of at most `sequences` x `seq_len`; with
  // `training` false, for forward only. Memory must not be touched: the allocator may only count.
  virtual absl::Status Allocate(Allocator& allocator, int64_t sequences, int64_t seq_len,
                                bool training) = 0;

  // For each lookup: the row of every use that `batch` makes of it, in the model's own order and
  // with repeats.
  virtual std::vector<std::vector<int32_t>> RowUses(const Batch& /*batch*/) const { return {}; }

  // Starts a micro-batch. Gradients will be those of gradient_scale * (sum of the tokens' losses).
  // `uses` are RowUses(batch), each row replaced by its place in the table of the distinct rows
  // that the first stage will get; host memory that lives as long as the batch.
  virtual void Begin(Stream& stream, const Batch& batch,
                     absl::Span<const std::vector<int32_t>> uses, float gradient_scale) = 0;

  // Enqueues one stage. `parameters` are the stage's unit's, whole, in unit order; or, of a stage
  // with lookups, a table for each: the distinct rows in use, in increasing order. `training` says
  // whether a backward follows. The last stage adds the tokens' losses to *loss_sum (device
  // memory).
  virtual void Forward(int stage, absl::Span<const Tensor> parameters, bool training,
                       double* loss_sum, Stream& stream) = 0;

  // Enqueues one stage's backward. `gradients` are shaped as Forward's `parameters`; with
  // `accumulate` they hold an earlier micro-batch's, to be added to, otherwise every element is
  // overwritten. `parameters` are Forward's too, but empty for a stage with lookups, which never
  // accumulates either.
  virtual void Backward(int stage, absl::Span<const Tensor> parameters,
                        absl::Span<const Tensor> gradients, bool accumulate, Stream& stream) = 0;

  // Model FLOPs of forward and backward per token at sequence length `seq_len`: 6 P + 6 L C T.
  virtual double FlopsPerToken(int64_t seq_len) const = 0;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_MODEL_H_
