// The optimizers through their interface, on sharded parameters, against PyTorch (AdamW), a float64
// program (RMNP, Muon; see tests/make_fixture.py) and themselves at other world sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/process_group.h"
#include "optim/factory.h"
#include "optim/kernels.h"
#include "optim/newton_schulz.h"
#include "runtime/device.h"
#include "runtime/safetensors.h"

namespace dim0 {
namespace {

using Values = std::vector<float>;

// Whole parameters by id, and what one rank reports of a run.
struct Outcome {
  std::vector<Values> values;
  int64_t optimizer_bytes = 0;      // summed over ranks
  int64_t newton_schulz_calls = 0;  // summed over ranks
  int64_t most_at_once = 0;         // matrices of one Newton-Schulz, if they are counted
};

// The CPU's kernels for a device that takes several matrices at once.
class ManyAtOnce : public OptimizerKernels {
 public:
  ManyAtOnce(std::unique_ptr<OptimizerKernels> kernels, int64_t elements)
      : kernels_(std::move(kernels)), elements_(elements) {}

  int64_t most_at_once() const { return most_; }

  void AdamW(Stream& stream, std::vector<AdamWTensor> tensors,
             const AdamWArguments& arguments) override {
    kernels_->AdamW(stream, std::move(tensors), arguments);
  }
  void Rmnp(Stream& stream, std::vector<RmnpTensor> matrices,
            const RmnpArguments& arguments) override {
    kernels_->Rmnp(stream, std::move(matrices), arguments);
  }
  void RmnpRowSquares(Stream& stream, std::vector<RmnpTensor> parts,
                      const RmnpArguments& arguments) override {
    kernels_->RmnpRowSquares(stream, std::move(parts), arguments);
  }
  void RmnpApply(Stream& stream, std::vector<RmnpTensor> parts,
                 const RmnpArguments& arguments) override {
    kernels_->RmnpApply(stream, std::move(parts), arguments);
  }
  void Momentum(Stream& stream, const Tensor& gradient, const Tensor& momentum, float mu,
                bool nesterov, const float* gradient_scale, const Tensor& out) override {
    kernels_->Momentum(stream, gradient, momentum, mu, nesterov, gradient_scale, out);
  }
  void ApplyUpdate(Stream& stream, const Tensor& value, const Tensor& copy, const Tensor& update,
                   float step, float decay, const float* gradient_scale) override {
    kernels_->ApplyUpdate(stream, value, copy, update, step, decay, gradient_scale);
  }
  DType matrix_dtype() const override { return kernels_->matrix_dtype(); }
  int64_t matrix_elements_at_once() const override { return elements_; }
  void Normalize(Stream& stream, int64_t batch, const Tensor& x, double length,
                 const Tensor& out) override {
    most_ = std::max(most_, batch);
    kernels_->Normalize(stream, batch, x, length, out);
  }
  void SymmetricProduct(Stream& stream, int64_t batch, float alpha, const Tensor& x,
                        bool transposed, float beta, const Tensor& added,
                        const Tensor& c) override {
    kernels_->SymmetricProduct(stream, batch, alpha, x, transposed, beta, added, c);
  }
  void SymmetricMatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a, const Tensor& b,
                       float beta, const Tensor& added, const Tensor& c) override {
    kernels_->SymmetricMatMul(stream, batch, alpha, a, b, beta, added, c);
  }
  void MatMul(Stream& stream, int64_t batch, float alpha, const Tensor& a, bool transpose_a,
              const Tensor& b, bool transpose_b, float beta, const Tensor& added,
              const Tensor& c) override {
    kernels_->MatMul(stream, batch, alpha, a, transpose_a, b, transpose_b, beta, added, c);
  }
  void AddToDiagonal(Stream& stream, int64_t batch, const Tensor& c, float value) override {
    kernels_->AddToDiagonal(stream, batch, c, value);
  }
  void Copy(Stream& stream, const Tensor& source, const Tensor& target) override {
    kernels_->Copy(stream, source, target);
  }

 private:
  const std::unique_ptr<OptimizerKernels> kernels_;
  const int64_t elements_;
  int64_t most_ = 0;
};

// The types that shards have in a run.
struct ShardTypes {
  DType value = DType::kFloat32;
  DType gradient = DType::kFloat32;
  bool copy = false;
};

// One shard's values in either type.
class Shard {
 public:
  Shard() = default;
  Shard(DType dtype, const Values& values) : dtype_(dtype), size_(values.size()) {
    dtype_ == DType::kBFloat16 ? halves_.resize(size_) : floats_.resize(size_);
    Set(values);
  }
  Tensor tensor(int64_t rows, int64_t cols) {
    void* data = floats_.data();
    if (dtype_ == DType::kBFloat16) data = halves_.data();
    return {data, dtype_, rows, cols};
  }
  void Set(const Values& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      dtype_ == DType::kBFloat16 ? void(halves_[i] = BFloat16(values[i]))
                                 : void(floats_[i] = values[i]);
    }
  }
  Values Get() const {
    Values values = floats_;
    for (const BFloat16 half : halves_) values.push_back(static_cast<float>(half));
    return values;
  }

 private:
  DType dtype_ = DType::kFloat32;
  size_t size_ = 0;
  Values floats_;
  std::vector<BFloat16> halves_;
};

Values Rounded(Values values) {
  for (float& value : values) value = static_cast<float>(BFloat16(value));
  return values;
}

// Runs `steps` steps of an optimizer over `world_size` ranks. gradients(step, id) gives a whole
// gradient; units are updated in the order of the table, or in reverse. After each step every copy
// must be its value, rounded. Where `elements_at_once` is not 0, the optimizer is Muon for a device
// that takes so many elements of matrices at once.
Outcome RunOptimizer(const OptimizerConfig& config, int world_size,
                     const std::vector<UnitSpec>& units, std::vector<Values> values, int steps,
                     const std::function<Values(int step, int id)>& gradients,
                     float gradient_scale = 1, bool reverse = false, int threads_per_rank = 1,
                     const ShardTypes& types = {}, int64_t elements_at_once = 0) {
  const ParameterTable table(units);
  auto groups = *CreateThreadRanks(world_size, {.timeout = absl::Seconds(60)});
  std::vector<int64_t> calls(world_size), most_at_once(world_size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto device = *CreateDevice(Backend::kCpu, threads_per_rank);
      Allocator allocator(device.get());
      std::unique_ptr<Optimizer> optimizer;
      std::shared_ptr<ManyAtOnce> kernels;
      if (elements_at_once == 0) {
        optimizer = *CreateOptimizer(config, *device, *groups[rank]);
      } else {
        kernels = std::make_shared<ManyAtOnce>(CreateOptimizerKernels(*device), elements_at_once);
        optimizer = std::make_unique<Muon>(config.muon, kernels, *device, *groups[rank]);
      }
      std::vector<int> ids(table.size()), order(table.num_units());
      for (int id = 0; id < table.size(); ++id) ids[id] = id;
      for (int u = 0; u < table.num_units(); ++u) {
        order[u] = reverse ? table.num_units() - 1 - u : u;
      }
      ASSERT_TRUE(optimizer->Plan(table, ids, {&allocator, rank, world_size, order}).ok());

      std::vector<Shard> value_shards(table.size()), gradient_shards(table.size());
      std::vector<Shard> copies(table.size());
      std::vector<Unit> shards(table.num_units());
      const auto local = [&](const Values& whole, int id) {
        const RowRange rows = RowsOfRank(table[id].spec.rows, world_size, rank);
        const int64_t cols = table[id].spec.cols;
        return Values(whole.begin() + rows.begin * cols, whole.begin() + rows.end * cols);
      };
      for (int id = 0; id < table.size(); ++id) {
        value_shards[id] = Shard(types.value, local(values[id], id));
        gradient_shards[id] = Shard(types.gradient, local(values[id], id));
        const RowRange rows = RowsOfRank(table[id].spec.rows, world_size, rank);
        Unit& unit = shards[table[id].unit];
        unit.index = table[id].unit;
        const int64_t cols = table[id].spec.cols;
        unit.parameters.push_back({.id = id,
                                   .rows = rows,
                                   .value = value_shards[id].tensor(rows.size(), cols),
                                   .gradient = gradient_shards[id].tensor(rows.size(), cols)});
        if (!types.copy) continue;
        copies[id] = Shard(DType::kBFloat16, local(values[id], id));
        unit.parameters.back().copy = copies[id].tensor(rows.size(), cols);
      }
      for (int step = 1; step <= steps; ++step) {
        for (int id = 0; id < table.size(); ++id) {
          gradient_shards[id].Set(local(gradients(step, id), id));
        }
        for (const int u : order) {
          ASSERT_TRUE(
              optimizer
                  ->Update(shards[u], {.step = step, .gradient_scale = &gradient_scale}, Event())
                  .ok());
        }
        for (const int u : order) ASSERT_TRUE(optimizer->Updated(shards[u]).Wait().ok());
        for (int id = 0; types.copy && id < table.size(); ++id) {
          EXPECT_EQ(copies[id].Get(), Rounded(value_shards[id].Get())) << step;
        }
      }
      calls[rank] = optimizer->newton_schulz_work().calls;
      if (kernels != nullptr) most_at_once[rank] = kernels->most_at_once();
      for (int id = 0; id < table.size(); ++id) {
        const int64_t begin = RowsOfRank(table[id].spec.rows, world_size, rank).begin;
        const Values shard = value_shards[id].Get();
        std::copy(shard.begin(), shard.end(), values[id].begin() + begin * table[id].spec.cols);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  Outcome outcome{std::move(values)};
  for (int rank = 0; rank < world_size; ++rank) {
    outcome.optimizer_bytes += groups[rank]->ledger().bytes(Purpose::kOptimizer);
    outcome.newton_schulz_calls += calls[rank];
    outcome.most_at_once = std::max(outcome.most_at_once, most_at_once[rank]);
  }
  return outcome;
}

Values Random(int64_t size, int seed, float scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  Values values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

class Fixture {
 public:
  explicit Fixture(const std::string& name)
      : file_(*SafetensorsFile::Open("tests/fixtures/" + name + ".safetensors")) {}
  Values Get(const std::string& name) const {
    const auto* tensor = file_.Find(name);
    EXPECT_NE(tensor, nullptr) << name;
    Values values(tensor->elements);
    EXPECT_TRUE(file_.ReadFloats(*tensor, 0, absl::MakeSpan(values)).ok());
    return values;
  }

 private:
  SafetensorsFile file_;
};

Values Slice(const Values& stacked, int step, int64_t size) {
  return Values(stacked.begin() + (step - 1) * size, stacked.begin() + step * size);
}

void ExpectClose(const Values& actual, const Values& expected, double relative, double absolute) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], absolute + relative * std::abs(expected[i])) << i;
  }
}

class WorldSizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, WorldSizes, testing::Values(1, 2, 3, 4, 8));

TEST_P(WorldSizes, AdamWAgreesWithPyTorchOver20Steps) {
  const Fixture fixture("adamw");
  const std::vector<std::string> names = {"ordinary", "small", "large", "late"};
  UnitSpec unit{"u", {}};
  std::vector<Values> initial, gradients;
  for (const std::string& name : names) {
    initial.push_back(fixture.Get(name + ".initial"));
    gradients.push_back(fixture.Get(name + ".grads"));
    // A table, since vectors are not decayed and the fixture decays.
    unit.parameters.push_back(
        {name, static_cast<int64_t>(initial.back().size()), 1, ParameterRole::kEmbedding, {}});
  }
  const OptimizerConfig config{.name = "adamw", .adamw = {.lr = 1e-2}};
  for (const int steps : {1, 20}) {
    const Outcome outcome = RunOptimizer(
        config, GetParam(), {unit}, initial, steps,
        [&](int step, int id) { return Slice(gradients[id], step, initial[id].size()); });
    for (size_t id = 0; id < names.size(); ++id) {
      ExpectClose(outcome.values[id], fixture.Get(names[id] + ".step_" + std::to_string(steps)),
                  2e-6, 2e-7);
    }
    EXPECT_EQ(outcome.optimizer_bytes, 0);
  }
}

const std::vector<std::string> kShapes = {"6x10", "10x6", "8x8"};

std::vector<UnitSpec> FixtureUnits() {
  return {
      {"h.0", {{"a", 6, 10, ParameterRole::kMatrix, {}}, {"b", 10, 6, ParameterRole::kMatrix, {}}}},
      {"h.1", {{"c", 8, 8, ParameterRole::kMatrix, {}}}}};
}

void ExpectFixture(const std::string& optimizer, int world_size, bool reverse, double tolerance,
                   MuonConfig muon = {}) {
  const Fixture fixture("matrix_optimizers");
  OptimizerConfig config{.name = optimizer};
  config.rmnp = {.lr = 0.02, .weight_decay = 0.1};
  config.muon = muon;
  config.muon.lr = 0.02;
  config.muon.weight_decay = 0.1;
  std::vector<Values> initial, gradients;
  for (const std::string& shape : kShapes) {
    initial.push_back(fixture.Get(shape + ".initial"));
    gradients.push_back(fixture.Get(shape + ".grads"));
  }
  for (const int steps : {1, 5}) {
    const Outcome outcome = RunOptimizer(
        config, world_size, FixtureUnits(), initial, steps,
        [&](int step, int id) { return Slice(gradients[id], step, initial[id].size()); }, 1,
        reverse);
    for (size_t id = 0; id < kShapes.size(); ++id) {
      ExpectClose(outcome.values[id],
                  fixture.Get(kShapes[id] + "." + optimizer + ".step_" + std::to_string(steps)),
                  tolerance, tolerance);
    }
  }
}

TEST_P(WorldSizes, RmnpAgreesWithFloat64) { ExpectFixture("rmnp", GetParam(), false, 1e-6); }

TEST_P(WorldSizes, MuonAgreesWithFloat64) {
  for (const MuonSchedule schedule :
       {MuonSchedule::kOwner, MuonSchedule::kRedundant, MuonSchedule::kBroadcast}) {
    for (const bool reverse : {false, true}) {
      ExpectFixture("muon", GetParam(), reverse, 1e-5,
                    {.schedule = schedule, .wire = DType::kFloat32});
      // Momentum and result are rounded to 8 bits; five steps move a weight by up to about 0.1.
      ExpectFixture("muon", GetParam(), reverse, 2e-3, {.schedule = schedule});
    }
  }
}

std::vector<UnitSpec> UnevenUnits() {
  return {{"root",
           {{"table", 11, 7, ParameterRole::kEmbedding, {}},
            {"gain", 7, 1, ParameterRole::kVector, {}}}},
          {"h.0",
           {{"qkv", 21, 7, ParameterRole::kMatrix, {}},
            {"up", 28, 7, ParameterRole::kMatrix, {}},
            {"row", 1, 33, ParameterRole::kMatrix, {}},
            {"column", 5, 1, ParameterRole::kMatrix, {}}}},
          {"h.1", {{"down", 7, 131, ParameterRole::kMatrix, {}}}}};
}

std::vector<Values> RandomValues(const std::vector<UnitSpec>& units, int seed) {
  std::vector<Values> values;
  for (const UnitSpec& unit : units) {
    for (const ParameterSpec& spec : unit.parameters) values.push_back(Random(spec.size(), seed++));
  }
  return values;
}

TEST(Rmnp, UpdateIsBitIdenticalForEveryWorldSizeAndSendsNothing) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 1);
  const auto gradient = [&](int step, int id) {
    return Random(initial[id].size(), 100 * step + id);
  };
  const OptimizerConfig config{.name = "rmnp", .rmnp = {.weight_decay = 0.05}};
  const Outcome one = RunOptimizer(config, 1, units, initial, 4, gradient);
  for (const int world_size : {2, 3, 4, 8}) {
    for (const int threads : {1, 2}) {
      const Outcome many =
          RunOptimizer(config, world_size, units, initial, 4, gradient, 1, false, threads);
      EXPECT_EQ(many.values, one.values) << world_size;
      EXPECT_EQ(many.optimizer_bytes, 0);
    }
  }
}

TEST(Rmnp, UpdateIsBitIdenticalForEveryWorldSizeInEveryType) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 1);
  const auto gradient = [&](int step, int id) {
    return Random(initial[id].size(), 100 * step + id);
  };
  const OptimizerConfig config{.name = "rmnp", .rmnp = {.weight_decay = 0.05}};
  for (const ShardTypes& types :
       {ShardTypes{.copy = true}, ShardTypes{.gradient = DType::kBFloat16},
        ShardTypes{.gradient = DType::kBFloat16, .copy = true},
        ShardTypes{.value = DType::kBFloat16},
        ShardTypes{.value = DType::kBFloat16, .gradient = DType::kBFloat16}}) {
    const auto run = [&](int world_size, int threads) {
      return RunOptimizer(config, world_size, units, initial, 4, gradient, 1, false, threads,
                          types);
    };
    const Outcome one = run(1, 1);
    for (const int world_size : {2, 3, 8}) {
      for (const int threads : {1, 2}) EXPECT_EQ(run(world_size, threads).values, one.values);
    }
  }
}

constexpr MuonSchedule kSchedules[] = {MuonSchedule::kOwner, MuonSchedule::kRedundant,
                                       MuonSchedule::kBroadcast};
constexpr DType kWires[] = {DType::kFloat32, DType::kBFloat16};

TEST(Muon, UpdateIsBitIdenticalForEveryWorldSizeAndSchedule) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 1);
  const auto gradient = [&](int step, int id) {
    return Random(initial[id].size(), 100 * step + id);
  };
  for (const DType wire : kWires) {
    OptimizerConfig config{.name = "muon", .muon = {.wire = wire}};
    const Outcome one = RunOptimizer(config, 1, units, initial, 3, gradient);
    for (const MuonSchedule schedule : kSchedules) {
      config.muon.schedule = schedule;
      for (const int world_size : {1, 2, 3, 4, 8}) {
        const Outcome many = RunOptimizer(config, world_size, units, initial, 3, gradient);
        EXPECT_EQ(many.values, one.values) << world_size;
      }
    }
  }
}

TEST(Muon, SeveralMatricesAtOnceAreOneByOneToTheBit) {
  // Sizes that are no multiples of a cache line, and more ranks than rows.
  std::vector<UnitSpec> units;
  for (int u = 0; u < 4; ++u) {
    UnitSpec& unit = units.emplace_back();
    unit.name = "h." + std::to_string(u);
    unit.parameters = {{unit.name + ".qkv", 21, 7, ParameterRole::kMatrix, {}},
                       {unit.name + ".proj", 7, 7, ParameterRole::kMatrix, {}},
                       {unit.name + ".up", 13, 7, ParameterRole::kMatrix, {}},
                       {unit.name + ".down", 7, 13, ParameterRole::kMatrix, {}}};
    unit.parameters[0].fused = 3;
  }
  const auto initial = RandomValues(units, 1);
  const auto gradient = [&](int step, int id) {
    return Random(initial[id].size(), 100 * step + id);
  };
  for (const DType wire : kWires) {
    for (const MuonSchedule schedule : kSchedules) {
      OptimizerConfig config{.name = "muon", .muon = {.schedule = schedule, .wire = wire}};
      config.muon.split = MatrixSplit::kQkv;
      for (const int world_size : {1, 2, 3}) {
        const auto run = [&](int64_t elements_at_once) {
          return RunOptimizer(config, world_size, units, initial, 3, gradient, 1, false, 1, {},
                              elements_at_once);
        };
        const Outcome alone = run(1);
        EXPECT_EQ(alone.most_at_once, 1);
        for (const int64_t elements : {250, 1000000}) {
          const Outcome together = run(elements);
          EXPECT_EQ(together.values, alone.values) << world_size;
          EXPECT_EQ(together.newton_schulz_calls, alone.newton_schulz_calls);
          EXPECT_EQ(together.optimizer_bytes, alone.optimizer_bytes);
          EXPECT_GT(together.most_at_once, 1);
        }
      }
    }
  }
}

TEST(Muon, SendsWhatTheScheduleSaysToTheByte) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 1);
  const ParameterTable table(units);
  const auto gradient = [&](int step, int id) { return Random(initial[id].size(), step + id); };
  std::vector<double> costs;
  std::vector<int> ids;
  for (int id = 0; id < table.size(); ++id) {
    if (table[id].spec.role != ParameterRole::kMatrix) continue;
    ids.push_back(id);
    costs.push_back(NewtonSchulz({}, table[id].spec.rows, table[id].spec.cols).flops());
  }
  const auto matrices = static_cast<int64_t>(ids.size());
  for (const int world_size : {1, 2, 3, 8}) {
    // Elements per step and over all ranks: all rows that are not the owner's, there and back; or
    // all-gathers, without and with broadcasts.
    int64_t owner = 0, all = 0;
    const std::vector<int> owners = AssignOwners(costs, world_size);
    for (size_t i = 0; i < ids.size(); ++i) {
      const ParameterSpec& spec = table[ids[i]].spec;
      const int64_t kept = RowsOfRank(spec.rows, world_size, owners[i]).size();
      owner += 2 * (spec.rows - kept) * spec.cols;
      all += spec.size();
    }
    const int64_t redundant = (world_size - 1) * all;
    const int64_t broadcast = redundant + (world_size > 1 ? world_size * all : 0);
    for (const DType wire : kWires) {
      const auto run = [&](MuonSchedule schedule) {
        const OptimizerConfig config{.name = "muon", .muon = {.schedule = schedule, .wire = wire}};
        return RunOptimizer(config, world_size, units, initial, 2, gradient);
      };
      const Outcome by_owner = run(MuonSchedule::kOwner);
      EXPECT_EQ(by_owner.optimizer_bytes, 2 * SizeOf(wire) * owner);
      EXPECT_EQ(by_owner.newton_schulz_calls, 2 * matrices);
      const Outcome by_all = run(MuonSchedule::kRedundant);
      EXPECT_EQ(by_all.optimizer_bytes, 2 * SizeOf(wire) * redundant);
      EXPECT_EQ(by_all.newton_schulz_calls, 2 * matrices * world_size);
      const Outcome by_broadcast = run(MuonSchedule::kBroadcast);
      EXPECT_EQ(by_broadcast.optimizer_bytes, 2 * SizeOf(wire) * broadcast);
      EXPECT_EQ(by_broadcast.newton_schulz_calls, 2 * matrices);
    }
  }
}

// 12 rows of 5 as three matrices, each of two heads of 2 rows.
UnitSpec FusedUnit() {
  return {"h.0", {{"qkv", 12, 5, ParameterRole::kMatrix, {}, /*fused=*/3, /*heads=*/2}}};
}

TEST(Muon, SplitsAFusedWeightAsIfItWereSeveral) {
  const Values initial = Random(60, 1);
  const auto whole_gradient = [](int step) { return Random(60, 10 + step); };
  for (const auto& [split, parts] : std::vector<std::pair<MatrixSplit, int>>{
           {MatrixSplit::kOff, 1}, {MatrixSplit::kQkv, 3}, {MatrixSplit::kHeads, 6}}) {
    UnitSpec separate{"h.0", {}};
    std::vector<Values> separate_initial;
    const int64_t size = 60 / parts;
    for (int i = 0; i < parts; ++i) {
      separate.parameters.push_back(
          {"part" + std::to_string(i), 12 / parts, 5, ParameterRole::kMatrix, {}});
      separate_initial.push_back(
          Values(initial.begin() + i * size, initial.begin() + (i + 1) * size));
    }
    const Outcome expected =
        RunOptimizer({.name = "muon"}, 1, {separate}, separate_initial, 2, [&](int step, int id) {
          const Values all = whole_gradient(step);
          return Values(all.begin() + id * size, all.begin() + (id + 1) * size);
        });
    for (const MuonSchedule schedule : kSchedules) {
      for (const int world_size : {1, 2, 3, 5, 8}) {
        const OptimizerConfig config{.name = "muon",
                                     .muon = {.schedule = schedule, .split = split}};
        const Outcome outcome = RunOptimizer(config, world_size, {FusedUnit()}, {initial}, 2,
                                             [&](int step, int) { return whole_gradient(step); });
        for (int i = 0; i < parts; ++i) {
          EXPECT_EQ(Values(outcome.values[0].begin() + i * size,
                           outcome.values[0].begin() + (i + 1) * size),
                    expected.values[i]);
        }
        const int by_all = schedule == MuonSchedule::kRedundant ? world_size : 1;
        EXPECT_EQ(outcome.newton_schulz_calls, 2 * parts * by_all);
      }
    }
  }
}

TEST(SplitOptimizer, GivesTablesToTheMatrixOptimizerIfAskedTo) {
  const std::vector<UnitSpec> units = {{"root", {{"table", 6, 4, ParameterRole::kEmbedding, {}}}}};
  const std::vector<UnitSpec> as_matrix = {{"root", {{"table", 6, 4, ParameterRole::kMatrix, {}}}}};
  const std::vector<Values> initial = {Random(24, 1)};
  const auto gradient = [](int step, int) { return Random(24, step); };
  for (const char* name : {"rmnp", "muon"}) {
    OptimizerConfig config{.name = name};
    const auto hidden = RunOptimizer(config, 2, units, initial, 2, gradient);
    const auto adamw = RunOptimizer({.name = "adamw"}, 2, units, initial, 2, gradient);
    EXPECT_EQ(hidden.values, adamw.values);
    config.matrix_params = MatrixParams::kAll2d;
    EXPECT_EQ(RunOptimizer(config, 2, units, initial, 2, gradient).values,
              RunOptimizer(config, 2, as_matrix, initial, 2, gradient).values);
  }
}

TEST(Optimizers, AGradientScaleThatIsNotFiniteChangesNothing) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 5);
  const auto gradient = [&](int, int id) { return Random(initial[id].size(), id); };
  for (const char* name : {"adamw", "rmnp", "muon"}) {
    const Outcome outcome = RunOptimizer({.name = name}, 2, units, initial, 2, gradient,
                                         std::numeric_limits<float>::quiet_NaN());
    EXPECT_EQ(outcome.values, initial) << name;
  }
}

// Every optimizer, Muon by every schedule.
std::vector<OptimizerConfig> AllConfigs() {
  std::vector<OptimizerConfig> configs = {
      {.name = "adamw"}, {.name = "rmnp"}, {.name = "sign_momentum"}};
  for (const MuonSchedule schedule : kSchedules) {
    configs.push_back({.name = "muon", .muon = {.schedule = schedule}});
  }
  // Values must lie between those that the copy can hold.
  for (OptimizerConfig& config : configs) {
    config.rmnp.weight_decay = config.muon.weight_decay = config.sign_momentum.weight_decay = 0.01;
  }
  return configs;
}

TEST(Optimizers, TheCopyIsTheRoundedValueAfterEveryStepAndChangesNothing) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 5);
  const auto gradient = [&](int step, int id) { return Random(initial[id].size(), step + id); };
  for (const OptimizerConfig& config : AllConfigs()) {
    for (const int world_size : {1, 3}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        const auto run = [&](bool copy) {
          return RunOptimizer(config, world_size, units, initial, 3, gradient, 1, false, 1,
                              {.gradient = dtype, .copy = copy});
        };
        EXPECT_EQ(run(true).values, run(false).values) << config.name;
      }
    }
  }
}

TEST(Optimizers, AGradientScaleThatIsNotFiniteLeavesTheCopyToo) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 5);
  const auto gradient = [&](int, int id) { return Random(initial[id].size(), id); };
  for (const OptimizerConfig& config : AllConfigs()) {
    // The run compares the copies with the values, which have not moved.
    const Outcome outcome =
        RunOptimizer(config, 2, units, initial, 2, gradient,
                     std::numeric_limits<float>::quiet_NaN(), false, 1, {.copy = true});
    EXPECT_EQ(outcome.values, initial) << config.name;
  }
}

TEST(Optimizers, ABFloat16MasterIsTheFloat32OneRoundedToNearest) {
  const auto units = UnevenUnits();
  std::vector<Values> initial = RandomValues(units, 5);
  for (Values& values : initial) values = Rounded(values);
  const auto gradient = [&](int, int id) { return Random(initial[id].size(), id); };
  for (const OptimizerConfig& config : AllConfigs()) {
    const auto run = [&](DType value) {
      return RunOptimizer(config, 3, units, initial, 1, gradient, 1, false, 1, {.value = value});
    };
    std::vector<Values> expected = run(DType::kFloat32).values;
    for (Values& values : expected) values = Rounded(values);
    EXPECT_EQ(run(DType::kBFloat16).values, expected) << config.name;
    EXPECT_NE(expected, initial) << config.name;
  }
}

TEST(Optimizers, ABFloat16GradientIsReadAsItIs) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 5);
  const auto gradient = [&](int step, int id) {
    return Rounded(Random(initial[id].size(), step + id));
  };
  for (const OptimizerConfig& config : AllConfigs()) {
    const auto run = [&](DType dtype) {
      return RunOptimizer(config, 3, units, initial, 3, gradient, 1, false, 1, {.gradient = dtype});
    };
    EXPECT_EQ(run(DType::kBFloat16).values, run(DType::kFloat32).values) << config.name;
  }
}

TEST(Optimizers, TheGradientScaleMultipliesTheGradient) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 5);
  for (const char* name : {"adamw", "rmnp", "muon"}) {
    OptimizerConfig config{.name = name};
    config.adamw.eps = 1;  // otherwise none of them would notice
    config.rmnp.eps = 100;
    const auto half = RunOptimizer(config, 1, units, initial, 1, [&](int, int id) {
      Values gradient = Random(initial[id].size(), id);
      for (float& value : gradient) value /= 2;
      return gradient;
    });
    const auto scaled = RunOptimizer(
        config, 1, units, initial, 1, [&](int, int id) { return Random(initial[id].size(), id); },
        0.5f);
    EXPECT_EQ(half.values, scaled.values) << name;
  }
}

TEST(Optimizers, ZeroGradientsLeaveMatricesAsTheyAre) {
  const auto units = UnevenUnits();
  const auto initial = RandomValues(units, 5);
  const auto zero = [&](int, int id) { return Values(initial[id].size(), 0.0f); };
  for (const char* name : {"rmnp", "muon"}) {
    OptimizerConfig config{.name = name};
    config.adamw.weight_decay = 0;
    EXPECT_EQ(RunOptimizer(config, 2, units, initial, 2, zero).values, initial) << name;
  }
}

TEST(AdamW, DoesNotDecayVectors) {
  const std::vector<UnitSpec> units = {{"u",
                                        {{"gain", 3, 1, ParameterRole::kVector, {}},
                                         {"table", 3, 1, ParameterRole::kEmbedding, {}}}}};
  const std::vector<Values> ones = {{1, 1, 1}, {1, 1, 1}};
  const auto zero = [](int, int) { return Values(3, 0.0f); };
  const Outcome outcome = RunOptimizer({.name = "adamw", .adamw = {.lr = 0.5, .weight_decay = 0.5}},
                                       2, units, ones, 1, zero);
  EXPECT_EQ(outcome.values[0], ones[0]);
  EXPECT_EQ(outcome.values[1], Values(3, 0.75f));
}

TEST(AssignOwners, GivesEachCostlyMatrixToTheLeastLoadedRank) {
  // 5 to 0, 4 to 1, 3 to 1 (4 < 5), 3 to 0 (5 < 7), 1 to 1 (7 < 8).
  EXPECT_EQ(AssignOwners({5, 1, 4, 3, 3}, 2), (std::vector<int>{0, 1, 1, 1, 0}));
  EXPECT_EQ(AssignOwners({1, 1, 1}, 3), (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(AssignOwners({}, 4).empty());
}

TEST(AssignOwners, BalancesGpt2LargeToOnePercentOn8Ranks) {
  std::vector<double> costs;
  for (int layer = 0; layer < 36; ++layer) {
    for (const auto& [m, n] : std::vector<std::pair<int64_t, int64_t>>{
             {3840, 1280}, {1280, 1280}, {5120, 1280}, {1280, 5120}}) {
      costs.push_back(NewtonSchulz({}, m, n).flops());
    }
  }
  const std::vector<int> owners = AssignOwners(costs, 8);
  std::vector<double> work(8);
  double all = 0;
  for (size_t i = 0; i < costs.size(); ++i) {
    work[owners[i]] += costs[i];
    all += costs[i];
  }
  EXPECT_LT(*std::max_element(work.begin(), work.end()) / (all / 8), 1.015);
  // The published count of FLOPs, symmetric products as one triangle.
  EXPECT_NEAR(all * 1e-12, 9.66, 0.01);
}

TEST(CreateOptimizer, NamesTheChoicesWhenAskedForAnother) {
  EXPECT_NE(CheckOptimizerName("sgd").message().find("adamw, muon, rmnp or sign_momentum"),
            absl::string_view::npos);
  EXPECT_TRUE(CheckOptimizerName("muon").ok());
}

}  // namespace
}  // namespace dim0
