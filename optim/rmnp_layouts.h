// RMNP on shards as other systems cut them, to measure what a layout costs the same optimizer.
// Training stores whole rows (rmnp.h) and uses none of this.
//
// A layout says which parts of which matrices a rank holds and which rows no rank holds whole; it
// is made from global shapes, so every rank can make every rank's. Rows that a rank holds whole are
// updated in one pass. The sums of squares of all others travel in one all-reduce per step:
//
//   layout      whole rows                       floats in the all-reduce
//   row blocks  all                              none, and no call
//   columns     none                             the rows of all matrices
//   flat        all but those a boundary cuts    the cut rows, at most world size - 1
#ifndef DIM0_OPTIM_RMNP_LAYOUTS_H_
#define DIM0_OPTIM_RMNP_LAYOUTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "optim/kernels.h"
#include "optim/rmnp.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/optimizer.h"
#include "runtime/stream.h"

namespace dim0 {

// A whole matrix, [rows, cols] row-major. Both at least 1.
struct MatrixShape {
  int64_t rows = 0;
  int64_t cols = 0;
};

// A rectangle of one matrix, stored row-major and without gaps at `offset` of the rank's buffers.
// Never empty.
struct RmnpPart {
  int matrix = 0;  // index into the shapes
  int64_t first_row = 0, rows = 0;
  int64_t first_col = 0, cols = 0;
  int64_t offset = 0;
  // Where this rank holds the rows only in part: the place of the first one's sum of squares among
  // the shared sums; the others follow. -1 where it holds them whole.
  int64_t first_sum = -1;
};

struct RmnpLayout {
  std::vector<RmnpPart> parts;
  int64_t elements = 0;     // of all parts: what each of the rank's buffers holds
  int64_t shared_sums = 0;  // rows whose sums of squares ranks add up; the same on every rank
};

// Tensor-parallel rows. cuts[i] has world size + 1 ascending entries from 0 to the rows of matrix
// i; `rank` holds rows [cuts[i][rank], cuts[i][rank + 1]) of it.
RmnpLayout RowBlockLayout(absl::Span<const MatrixShape> matrices,
                          absl::Span<const std::vector<int64_t>> cuts, int rank);

// The same columns of every row of a matrix: [rank c, min((rank + 1) c, cols)), c = ceil(cols /
// world size).
RmnpLayout ColumnLayout(absl::Span<const MatrixShape> matrices, int world_size, int rank);

// All matrices one behind the other as one row of elements, cut into ranges of ceil(elements /
// world size); FSDP1's FlatParameter. The last ranks may hold fewer elements or none.
RmnpLayout FlatLayout(absl::Span<const MatrixShape> matrices, int world_size, int rank);

// Device memory of layout.elements floats each, part behind part.
struct RmnpBuffers {
  float* value = nullptr;
  float* gradient = nullptr;
  float* momentum = nullptr;
};

class ShardedRmnp {
 public:
  // Takes the memory for the shared sums from `allocator`, which is `device`'s; both outlive the
  // result. All work runs on `stream`. `communicator` may be null if no sums are shared. Error:
  // ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<ShardedRmnp>> Create(
      RmnpLayout layout, absl::Span<const MatrixShape> matrices, const RmnpConfig& config,
      Allocator& allocator, Device& device, std::shared_ptr<OptimizerKernels> kernels,
      std::shared_ptr<Stream> stream, std::unique_ptr<Communicator> communicator);

  // Waits for what is enqueued.
  ~ShardedRmnp();

  const RmnpLayout& layout() const { return layout_; }

  // Enqueues one update of the rank's parts, after `ready`. Every rank calls it equally often;
  // errors of the collective fail the stream. The buffers must live until the stream has passed.
  void Step(const RmnpBuffers& buffers, const StepParams& params, const Event& ready);

 private:
  ShardedRmnp(RmnpLayout layout, absl::Span<const MatrixShape> matrices, const RmnpConfig& config,
              Device& device, std::shared_ptr<OptimizerKernels> kernels,
              std::shared_ptr<Stream> stream, std::unique_ptr<Communicator> communicator,
              Buffer sums);

  const RmnpLayout layout_;
  std::vector<double> scales_;  // by matrix, from its global shape
  const RmnpConfig config_;
  Device& device_;
  const std::shared_ptr<OptimizerKernels> kernels_;
  const std::shared_ptr<Stream> stream_;
  const std::unique_ptr<Communicator> communicator_;
  const Buffer sums_;  // [shared_sums]
};

}  // namespace dim0

#endif  // DIM0_OPTIM_RMNP_LAYOUTS_H_
