#include "optim/rmnp_layouts.h"

#include <algorithm>

#include "optim/scale.h"
#include "runtime/check.h"
#include "runtime/sharding.h"

namespace dim0 {
namespace {

// Appends `part`, behind those that are there, unless it is empty.
void Append(RmnpPart part, RmnpLayout& layout) {
  if (part.rows == 0 || part.cols == 0) return;
  part.offset = layout.elements;
  layout.elements += part.rows * part.cols;
  layout.parts.push_back(part);
}

// The matrices' first elements in the flat layout, and behind them the number of all elements.
std::vector<int64_t> FlatStarts(absl::Span<const MatrixShape> matrices) {
  std::vector<int64_t> starts = {0};
  for (const MatrixShape& matrix : matrices) {
    starts.push_back(starts.back() + matrix.rows * matrix.cols);
  }
  return starts;
}

// The first elements of the rows that lie on more than one rank, ascending.
std::vector<int64_t> CutRows(absl::Span<const MatrixShape> matrices,
                             absl::Span<const int64_t> starts, int world_size) {
  std::vector<int64_t> rows;
  for (int rank = 1; rank < world_size; ++rank) {
    const int64_t boundary = RowsOfRank(starts.back(), world_size, rank).begin;
    if (boundary == starts.back()) break;
    const auto matrix =
        std::upper_bound(starts.begin(), starts.end(), boundary) - starts.begin() - 1;
    const int64_t row = boundary - (boundary - starts[matrix]) % matrices[matrix].cols;
    const bool cut = row != boundary;
    if (cut && (rows.empty() || rows.back() != row)) rows.push_back(row);
  }
  return rows;
}

}  // namespace

RmnpLayout RowBlockLayout(absl::Span<const MatrixShape> matrices,
                          absl::Span<const std::vector<int64_t>> cuts, int rank) {
  DIM0_CHECK(cuts.size() == matrices.size());
  RmnpLayout layout;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const std::vector<int64_t>& cut = cuts[i];
    DIM0_CHECK(rank + 1 < static_cast<int>(cut.size()) && cut.front() == 0 &&
               cut.back() == matrices[i].rows && std::is_sorted(cut.begin(), cut.end()));
    Append({.matrix = static_cast<int>(i),
            .first_row = cut[rank],
            .rows = cut[rank + 1] - cut[rank],
            .cols = matrices[i].cols},
           layout);
  }
  return layout;
}

RmnpLayout ColumnLayout(absl::Span<const MatrixShape> matrices, int world_size, int rank) {
  RmnpLayout layout;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const RowRange columns = RowsOfRank(matrices[i].cols, world_size, rank);
    Append({.matrix = static_cast<int>(i),
            .rows = matrices[i].rows,
            .first_col = columns.begin,
            .cols = columns.size(),
            .first_sum = layout.shared_sums},
           layout);
    layout.shared_sums += matrices[i].rows;
  }
  return layout;
}

RmnpLayout FlatLayout(absl::Span<const MatrixShape> matrices, int world_size, int rank) {
  const std::vector<int64_t> starts = FlatStarts(matrices);
  const std::vector<int64_t> cut_rows = CutRows(matrices, starts, world_size);
  // The rule of rows, applied to elements.
  const RowRange range = RowsOfRank(starts.back(), world_size, rank);
  RmnpLayout layout;
  layout.shared_sums = cut_rows.size();
  for (size_t i = 0; i < matrices.size(); ++i) {
    const int64_t cols = matrices[i].cols;
    const int64_t end = std::clamp(range.end, starts[i], starts[i + 1]) - starts[i];
    int64_t element = std::clamp(range.begin, starts[i], starts[i + 1]) - starts[i];
    // Up to three parts: the rest of a row that another rank begins, whole rows, and the begin of a
    // row that another rank ends.
    while (element < end) {
      RmnpPart part{.matrix = static_cast<int>(i),
                    .first_row = element / cols,
                    .rows = 1,
                    .first_col = element % cols};
      if (part.first_col == 0 && end - element >= cols) {
        part.rows = (end - element) / cols;
        part.cols = cols;
      } else {
        part.cols = std::min(cols - part.first_col, end - element);
        const int64_t row = starts[i] + part.first_row * cols;
        part.first_sum = std::lower_bound(cut_rows.begin(), cut_rows.end(), row) - cut_rows.begin();
      }
      Append(part, layout);
      element += part.rows * part.cols;
    }
  }
  return layout;
}

absl::StatusOr<std::unique_ptr<ShardedRmnp>> ShardedRmnp::Create(
    RmnpLayout layout, absl::Span<const MatrixShape> matrices, const RmnpConfig& config,
    Allocator& allocator, Device& device, std::shared_ptr<OptimizerKernels> kernels,
    std::shared_ptr<Stream> stream, std::unique_ptr<Communicator> communicator) {
  DIM0_CHECK(layout.shared_sums == 0 || communicator != nullptr);
  DIM0_ASSIGN_OR_RETURN(
      Buffer sums, allocator.Allocate(MemoryPurpose::kCommunication,
                                      layout.shared_sums * static_cast<int64_t>(sizeof(float))));
  return std::unique_ptr<ShardedRmnp>(new ShardedRmnp(std::move(layout), matrices, config, device,
                                                      std::move(kernels), std::move(stream),
                                                      std::move(communicator), std::move(sums)));
}

ShardedRmnp::ShardedRmnp(RmnpLayout layout, absl::Span<const MatrixShape> matrices,
                         const RmnpConfig& config, Device& device,
                         std::shared_ptr<OptimizerKernels> kernels, std::shared_ptr<Stream> stream,
                         std::unique_ptr<Communicator> communicator, Buffer sums)
    : layout_(std::move(layout)),
      config_(config),
      device_(device),
      kernels_(std::move(kernels)),
      stream_(std::move(stream)),
      communicator_(std::move(communicator)),
      sums_(std::move(sums)) {
  for (const MatrixShape& matrix : matrices) {
    scales_.push_back(ScaleOf(UpdateScale::kSpectral, matrix.rows, matrix.cols));
  }
}

ShardedRmnp::~ShardedRmnp() { (void)stream_->Synchronize(); }

void ShardedRmnp::Step(const RmnpBuffers& buffers, const StepParams& params, const Event& ready) {
  const RmnpArguments arguments = KernelArguments(config_, params);
  std::vector<RmnpTensor> whole, cut;
  for (const RmnpPart& part : layout_.parts) {
    const bool is_whole = part.first_sum < 0;
    (is_whole ? whole : cut)
        .push_back({.value = F32(buffers.value + part.offset, part.rows, part.cols),
                    .gradient = F32(buffers.gradient + part.offset, part.rows, part.cols),
                    .momentum = F32(buffers.momentum + part.offset, part.rows, part.cols),
                    .scale = scales_[part.matrix],
                    .row_squares = is_whole ? nullptr : sums_.f32() + part.first_sum});
  }
  stream_->Wait(ready);
  if (!whole.empty()) kernels_->Rmnp(*stream_, std::move(whole), arguments);
  if (layout_.shared_sums == 0) return;
  // Zero is this rank's share of rows of which it holds nothing.
  device_.Zero(*stream_, sums_.data(), sums_.bytes());
  if (!cut.empty()) kernels_->RmnpRowSquares(*stream_, cut, arguments);
  stream_->Enqueue({.name = "rmnp_all_reduce",
                    .kind = OpKind::kCollective,
                    .bytes = static_cast<double>(sums_.bytes())},
                   [this](const OpContext& context) {
                     return communicator_->AllReduce(
                         {Purpose::kOptimizer, "rmnp", context.native_stream, context.call}, DType::kFloat32,
                         ReduceOp::kSum, sums_.data(), layout_.shared_sums);
                   });
  if (!cut.empty()) kernels_->RmnpApply(*stream_, std::move(cut), arguments);
}

}  // namespace dim0
