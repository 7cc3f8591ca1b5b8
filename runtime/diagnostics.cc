#include "runtime/diagnostics.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"

namespace dim0 {
namespace {

// Takes r_i after r_i.
class DominanceSums {
 public:
  void Add(double ratio) {
    if (!std::isfinite(ratio)) return;
    sum_ += ratio;
    result_.smallest = result_.rows == 0 ? ratio : std::min(result_.smallest, ratio);
    result_.largest = result_.rows == 0 ? ratio : std::max(result_.largest, ratio);
    ++result_.rows;
  }
  Dominance Result() const {
    Dominance result = result_;
    if (result.rows > 0) result.average = sum_ / result.rows;
    return result;
  }

 private:
  double sum_ = 0;
  Dominance result_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Diagnostics>> Diagnostics::Create(Engine& engine,
                                                                 Optimizer& optimizer,
                                                                 const ProcessGroup& group,
                                                                 Device& device,
                                                                 Allocator& allocator) {
  auto diagnostics = absl::WrapUnique(new Diagnostics(engine, group, device));
  DIM0_RETURN_IF_ERROR(diagnostics->Plan(optimizer));
  DIM0_RETURN_IF_ERROR(diagnostics->Allocate(allocator));
  if (!allocator.plan_only()) diagnostics->stream_ = device.NewStream("diagnostics");
  return diagnostics;
}

absl::Status Diagnostics::Plan(Optimizer& optimizer) {
  std::map<int, Tensor> momenta;
  const std::vector<StateTensor> state = optimizer.State();
  for (const char* name : {"first_moment", "momentum"}) {
    for (const StateTensor& tensor : state) {
      if (tensor.name == name) momenta[tensor.parameter] = tensor.shard;
    }
  }
  const ParameterTable& table = engine_.table();
  bool has_matrices = false;
  for (int id = 0; id < table.size(); ++id) {
    const ParameterSpec& spec = table[id].spec;
    if (spec.role != ParameterRole::kMatrix) continue;
    has_matrices = true;
    const auto momentum = momenta.find(id);
    if (momentum == momenta.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "diagnostics need the momentum of ", spec.name,
          ", and the optimizer keeps none; choose another optimizer or turn diagnostics off"));
    }
    if (spec.rows < 2) continue;  // nothing off the diagonal
    const int64_t stride = (spec.rows + kMostRows - 1) / kMostRows;
    matrices_.push_back({.parameter = id,
                         .momentum = momentum->second,
                         .stride = stride,
                         .sampled = (spec.rows + stride - 1) / stride});
  }
  if (has_matrices) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "diagnostics are about hidden matrices, and the model has none; turn diagnostics off");
}

absl::Status Diagnostics::Allocate(Allocator& allocator) {
  const auto allocate = [&](int64_t bytes, Buffer& buffer) -> absl::Status {
    DIM0_ASSIGN_OR_RETURN(buffer, allocator.Allocate(MemoryPurpose::kDiagnostics, bytes));
    return absl::OkStatus();
  };
  int64_t shard_bytes = 0;
  ForEachShard(
      [&](const ParameterShard& shard, const Tensor&) { shard_bytes += shard.value.bytes(); });
  DIM0_RETURN_IF_ERROR(allocate(shard_bytes, before_));
  DIM0_RETURN_IF_ERROR(allocate(engine_.table().size() * sizeof(double), differences_));
  if (group_.rank() != 0) return absl::OkStatus();

  int64_t elements = 0, products = 0, sampled = 0;
  for (const Matrix& matrix : matrices_) {
    const ParameterSpec& spec = engine_.table()[matrix.parameter].spec;
    elements = std::max(elements, spec.size());
    products = std::max(products, matrix.sampled * spec.rows);
    sampled = std::max(sampled, matrix.sampled);
  }
  DIM0_RETURN_IF_ERROR(allocate(elements * sizeof(float), whole_));
  DIM0_RETURN_IF_ERROR(allocate(products * sizeof(float), products_));
  return allocate(sampled * sizeof(double), ratios_);
}

template <typename Body>
void Diagnostics::ForEachShard(Body body) {
  const ParameterTable& table = engine_.table();
  int64_t offset = 0;
  for (int u = 0; u < table.num_units(); ++u) {
    for (const ParameterShard& shard : engine_.unit(u).parameters) {
      Tensor before = shard.value;
      before.data =
          before_.data() == nullptr ? nullptr : static_cast<char*>(before_.data()) + offset;
      body(shard, before);
      offset += shard.value.bytes();
    }
  }
}

absl::Status Diagnostics::BeforeStep() {
  DIM0_RETURN_IF_ERROR(engine_.Synchronize());
  ForEachShard([&](const ParameterShard& shard, const Tensor& before) {
    if (shard.value.size() == 0) return;
    device_.Copy(*stream_, before.data, shard.value.data, shard.value.bytes());
  });
  return stream_->Synchronize();
}

absl::StatusOr<DiagnosticsReport> Diagnostics::AfterStep() {
  DIM0_RETURN_IF_ERROR(engine_.Synchronize());
  DiagnosticsReport report;
  DIM0_ASSIGN_OR_RETURN(report.update_rms, UpdateRms());

  DominanceSums all;
  for (const Matrix& matrix : matrices_) {
    DIM0_RETURN_IF_ERROR(
        engine_.GatherToRankZero(matrix.parameter, matrix.momentum, whole_.data()));
    if (group_.rank() != 0) continue;
    const ParameterSpec& spec = engine_.table()[matrix.parameter].spec;
    auto* ratios = static_cast<double*>(ratios_.data());
    device_.DiagonalDominance(*stream_, F32(whole_.f32(), spec.rows, spec.cols), matrix.stride,
                              F32(products_.f32(), matrix.sampled, spec.rows), ratios);
    std::vector<double> host_ratios(matrix.sampled);
    device_.CopyToHost(*stream_, host_ratios.data(), ratios, matrix.sampled * sizeof(double));
    DIM0_RETURN_IF_ERROR(stream_->Synchronize());
    DominanceSums rows;
    for (const double ratio : host_ratios) {
      rows.Add(ratio);
      all.Add(ratio);
    }
    report.matrices.push_back({spec.name, rows.Result()});
  }
  report.all = all.Result();
  return report;
}

absl::StatusOr<std::array<double, kNumParameterRoles>> Diagnostics::UpdateRms() {
  const ParameterTable& table = engine_.table();
  auto* differences = static_cast<double*>(differences_.data());
  ForEachShard([&](const ParameterShard& shard, const Tensor& before) {
    device_.SumOfSquaredDifferences(*stream_, shard.value, before, differences + shard.id);
  });
  std::string mine(table.size() * sizeof(double), '\0');
  device_.CopyToHost(*stream_, mine.data(), differences, mine.size());
  DIM0_RETURN_IF_ERROR(stream_->Synchronize());
  DIM0_ASSIGN_OR_RETURN(const std::vector<std::string> ranks, engine_.Exchange(mine));

  std::array<double, kNumParameterRoles> squares{}, elements{};
  for (int id = 0; id < table.size(); ++id) {
    const auto role = static_cast<int>(table[id].spec.role);
    elements[role] += table[id].spec.size();
    for (const std::string& rank : ranks) {
      double sum;
      std::memcpy(&sum, rank.data() + id * sizeof(double), sizeof(double));
      squares[role] += sum;
    }
  }
  std::array<double, kNumParameterRoles> rms;
  for (int role = 0; role < kNumParameterRoles; ++role) {
    rms[role] = std::sqrt(squares[role] / elements[role]);  // NaN for a role without parameters
  }
  return rms;
}

}  // namespace dim0
