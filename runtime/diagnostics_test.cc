// Diagnostics of a toy run whose momenta and parameters are also computed in float64, from the
// formulas and without sharding.
#include "runtime/diagnostics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "collectives/process_group.h"

namespace dim0 {
namespace {

constexpr double kLr = 0.25;
constexpr double kMomentum = 0.5;

// Uneven rows, fewer rows than ranks, a matrix of one row, one whose gradient is always zero, and
// one long enough for rows to be sampled.
std::vector<UnitSpec> ToyUnits() {
  return {{"root",
           {{"table", 5, 4, ParameterRole::kEmbedding, {}},
            {"gain", 4, 1, ParameterRole::kVector, {}}}},
          {"h.0",
           {{"square", 7, 7, ParameterRole::kMatrix, {}},
            {"row", 1, 9, ParameterRole::kMatrix, {}},
            {"dead", 3, 2, ParameterRole::kMatrix, {}}}},
          {"h.1",
           {{"bias", 3, 1, ParameterRole::kVector, {}},
            {"tall", 601, 3, ParameterRole::kMatrix, {}},
            {"pair", 2, 5, ParameterRole::kMatrix, {}}}}};
}

// What all ranks' gradients add up to. Row 2 of "square" never gets one.
float GradientOf(const ParameterSpec& spec, int step, int id, int64_t element) {
  if (spec.name == "dead" || (spec.name == "square" && element / spec.cols == 2)) return 0;
  uint32_t hash = 2654435761u * static_cast<uint32_t>(step * 1000003 + id * 7919 + element + 1);
  hash ^= hash >> 15;
  hash *= 2246822519u;
  return static_cast<float>(hash >> 8) / (1 << 23) - 0.75f;
}

class ToyModel : public Model {
 public:
  explicit ToyModel(std::vector<UnitSpec> units) : units_(std::move(units)), table_(units_) {
    for (int u = 0; u < table_.num_units(); ++u) stages_.push_back({units_[u].name, u});
  }
  absl::Span<const UnitSpec> units() const override { return units_; }
  absl::Span<const Stage> stages() const override { return stages_; }
  absl::Status Allocate(Allocator&, int64_t, int64_t, bool) override { return absl::OkStatus(); }
  double FlopsPerToken(int64_t) const override { return 1; }
  void Begin(Stream&, const Batch& batch, absl::Span<const std::vector<int32_t>>,
             float gradient_scale) override {
    step_ = batch.tokens[0];
    gradient_scale_ = gradient_scale;
  }
  void Forward(int, absl::Span<const Tensor>, bool, double*, Stream&) override {}
  void Backward(int stage, absl::Span<const Tensor>, absl::Span<const Tensor> gradients, bool,
                Stream& stream) override {
    const std::vector<Tensor> targets(gradients.begin(), gradients.end());
    stream.Enqueue({.name = "backward"},
                   [this, stage, targets, step = step_, scale = gradient_scale_](const OpContext&) {
                     for (size_t i = 0; i < targets.size(); ++i) {
                       const int id = table_.first(stages_[stage].unit) + i;
                       for (int64_t e = 0; e < targets[i].size(); ++e) {
                         targets[i].f32()[e] = scale * GradientOf(table_[id].spec, step, id, e);
                       }
                     }
                     return absl::OkStatus();
                   });
  }

 private:
  const std::vector<UnitSpec> units_;
  const ParameterTable table_;
  std::vector<Stage> stages_;
  int step_ = 0;
  float gradient_scale_ = 0;
};

// V <- mu V + G; W <- W - lr V. Has a second state, which is nobody's momentum.
class HeavyBall : public Optimizer {
 public:
  HeavyBall(Device& device, std::string state_name)
      : stream_(device.NewStream("heavy_ball")), state_name_(std::move(state_name)) {}
  absl::Status Plan(const ParameterTable& table, absl::Span<const int> ids,
                    const OptimizerResources& resources) override {
    for (const int id : ids) {
      const ParameterSpec& spec = table[id].spec;
      shapes_[id] = F32(nullptr, RowsOfRank(spec.rows, resources.world_size, resources.rank).size(),
                        spec.cols);
      momenta_[id].resize(shapes_[id].size());
      others_[id].resize(shapes_[id].size(), 3.0f);
    }
    return absl::OkStatus();
  }
  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override {
    stream_->Wait(ready);
    stream_->Enqueue({.name = "heavy_ball"}, [this, &unit, params](const OpContext&) {
      for (const ParameterShard& shard : unit.parameters) {
        std::vector<float>& momentum = momenta_[shard.id];
        for (int64_t i = 0; i < shard.value.size(); ++i) {
          momentum[i] = kMomentum * momentum[i] + *params.gradient_scale * shard.gradient.f32()[i];
          shard.value.f32()[i] -= kLr * momentum[i];
        }
      }
      return absl::OkStatus();
    });
    updated_[unit.index] = stream_->Record();
    return absl::OkStatus();
  }
  Event Updated(const Unit& unit) override { return updated_[unit.index]; }
  std::vector<StateTensor> State() override {
    std::vector<StateTensor> state;
    for (auto& [id, shape] : shapes_) {
      Tensor momentum = shape, other = shape;
      momentum.data = momenta_[id].data();
      other.data = others_[id].data();
      state.push_back({state_name_, id, momentum});
      state.push_back({"second_moment", id, other});
    }
    return state;
  }
  uint64_t PlanHash() const override { return 0; }

 private:
  const std::unique_ptr<Stream> stream_;
  const std::string state_name_;
  std::map<int, Tensor> shapes_;
  std::map<int, std::vector<float>> momenta_, others_;
  std::map<int, Event> updated_;
};

void OnRanks(int world_size, const std::function<void(int, ProcessGroup&)>& body) {
  auto groups = *CreateThreadRanks(world_size, {.timeout = absl::Seconds(60)});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { body(rank, *groups[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

struct ToyRank {
  ToyRank(ProcessGroup& group, Allocator& allocator, Device& device, std::vector<UnitSpec> units,
          const std::string& state_name = "momentum")
      : world_size(group.world_size()),
        model(std::move(units)),
        optimizer(device, state_name),
        engine(*Engine::Create({}, model, group, device, allocator, &optimizer)),
        diagnostics(Diagnostics::Create(*engine, optimizer, group, device, allocator)) {}

  absl::Status Step(int step) {
    const int32_t token = step;
    const Batch batch = {1, 1, &token, nullptr};
    return engine->TrainStep({&batch, 1}, world_size, {.step = step}, nullptr).status();
  }

  const int world_size;
  ToyModel model;
  HeavyBall optimizer;
  const std::unique_ptr<Engine> engine;
  const absl::StatusOr<std::unique_ptr<Diagnostics>> diagnostics;
};

struct Expected {
  std::map<std::string, std::vector<double>> ratios;  // of the rows that count
  std::map<ParameterRole, double> update_rms;
};

Expected ExpectedAfter(int steps) {
  const ParameterTable table(ToyUnits());
  Expected expected;
  std::map<ParameterRole, double> squares, elements;
  for (int id = 0; id < table.size(); ++id) {
    const ParameterSpec& spec = table[id].spec;
    std::vector<double> v(spec.size());
    for (int step = 1; step <= steps; ++step) {
      for (int64_t e = 0; e < spec.size(); ++e) {
        v[e] = kMomentum * v[e] + GradientOf(spec, step, id, e);
      }
    }
    for (const double x : v) squares[spec.role] += kLr * x * kLr * x;
    elements[spec.role] += spec.size();
    if (spec.role != ParameterRole::kMatrix || spec.rows == 1) continue;
    std::vector<double>& ratios = expected.ratios[spec.name];
    // 601 rows are sampled in steps of 3: steps of 2 would make 301 of them.
    const int64_t stride = spec.rows == 601 ? 3 : 1;
    for (int64_t i = 0; i < spec.rows; i += stride) {
      double diagonal = 0, others = 0;
      for (int64_t j = 0; j < spec.rows; ++j) {
        double product = 0;
        for (int64_t k = 0; k < spec.cols; ++k) {
          product += v[i * spec.cols + k] * v[j * spec.cols + k];
        }
        (i == j ? diagonal : others) += std::abs(product);
      }
      if (diagonal > 0) ratios.push_back(diagonal / (others / (spec.rows - 1)));
    }
  }
  for (const auto& [role, sum] : squares) {
    expected.update_rms[role] = std::sqrt(sum / elements[role]);
  }
  return expected;
}

void ExpectDominance(const Dominance& actual, const std::vector<double>& ratios) {
  ASSERT_EQ(actual.rows, static_cast<int64_t>(ratios.size()));
  if (ratios.empty()) {
    EXPECT_TRUE(std::isnan(actual.average));
    EXPECT_TRUE(std::isnan(actual.smallest));
    EXPECT_TRUE(std::isnan(actual.largest));
    return;
  }
  double sum = 0;
  for (const double ratio : ratios) sum += ratio;
  const double average = sum / ratios.size();
  EXPECT_NEAR(actual.average, average, 1e-5 * average);
  const auto [smallest, largest] = std::minmax_element(ratios.begin(), ratios.end());
  EXPECT_NEAR(actual.smallest, *smallest, 1e-5 * *smallest);
  EXPECT_NEAR(actual.largest, *largest, 1e-5 * *largest);
}

TEST(Diagnostics, AgreeWithFloat64AtEveryWorldSize) {
  for (const int world_size : {1, 2, 3, 8}) {
    OnRanks(world_size, [&](int rank, ProcessGroup& group) {
      const auto device = *CreateDevice(Backend::kCpu, 2);
      Allocator allocator(device.get());
      ToyRank toy(group, allocator, *device, ToyUnits());
      ASSERT_TRUE(toy.diagnostics.ok()) << toy.diagnostics.status();
      ASSERT_TRUE(toy.engine->Start(1).ok());
      for (int step = 1; step <= 4; ++step) {
        const bool measured = step != 2;  // in a row, and after a step that is not
        if (measured) {
          ASSERT_TRUE((*toy.diagnostics)->BeforeStep().ok());
        }
        ASSERT_TRUE(toy.Step(step).ok());
        if (!measured) continue;
        const auto report = (*toy.diagnostics)->AfterStep();
        ASSERT_TRUE(report.ok()) << report.status();
        const Expected expected = ExpectedAfter(step);
        for (const auto& [role, rms] : expected.update_rms) {
          EXPECT_NEAR(report->update_rms[static_cast<int>(role)], rms, 1e-5 * rms);
        }
        if (rank != 0) {
          EXPECT_TRUE(report->matrices.empty());
          continue;
        }
        std::vector<std::string> names;
        std::vector<double> all;
        for (const auto& [name, dominance] : report->matrices) {
          names.push_back(name);
          const std::vector<double>& ratios = expected.ratios.at(name);
          ExpectDominance(dominance, ratios);
          all.insert(all.end(), ratios.begin(), ratios.end());
        }
        // One row has nothing off the diagonal.
        EXPECT_EQ(names, (std::vector<std::string>{"square", "dead", "tall", "pair"}));
        // Of 7, 3, 601 and 2 rows: all but one of zeros, none, every third, both.
        EXPECT_EQ(all.size(), 6u + 0u + 201u + 2u);
        ExpectDominance(report->all, all);
      }
    });
  }
}

TEST(Diagnostics, TakeAFirstMomentForTheMomentum) {
  auto groups = *CreateThreadRanks(1, {});
  const auto device = *CreateDevice(Backend::kCpu, 1);
  Allocator allocator(device.get());
  ToyRank toy(*groups[0], allocator, *device, ToyUnits(), "first_moment");
  ASSERT_TRUE(toy.diagnostics.ok()) << toy.diagnostics.status();
  ASSERT_TRUE(toy.engine->Start(1).ok());
  ASSERT_TRUE((*toy.diagnostics)->BeforeStep().ok());
  ASSERT_TRUE(toy.Step(1).ok());
  const auto report = (*toy.diagnostics)->AfterStep();
  ASSERT_TRUE(report.ok());
  ExpectDominance(report->matrices[0].second, ExpectedAfter(1).ratios.at("square"));
}

TEST(Diagnostics, SendNothingThatIsCountedAsTraining) {
  OnRanks(3, [&](int rank, ProcessGroup& group) {
    const auto device = *CreateDevice(Backend::kCpu, 1);
    Allocator allocator(device.get());
    ToyRank toy(group, allocator, *device, ToyUnits());
    ASSERT_TRUE(toy.engine->Start(1).ok());
    const auto unchanged = [&](const std::function<void()>& measure) {
      ASSERT_TRUE(toy.engine->Synchronize().ok());
      std::vector<int64_t> before, after;
      for (const Purpose p : {Purpose::kParameter, Purpose::kGradient, Purpose::kOptimizer}) {
        before.push_back(group.ledger().bytes(p));
      }
      measure();
      for (const Purpose p : {Purpose::kParameter, Purpose::kGradient, Purpose::kOptimizer}) {
        after.push_back(group.ledger().bytes(p));
      }
      EXPECT_EQ(after, before);
    };
    unchanged([&] { ASSERT_TRUE((*toy.diagnostics)->BeforeStep().ok()); });
    ASSERT_TRUE(toy.Step(1).ok());
    const int64_t control = group.ledger().bytes(Purpose::kControl);
    unchanged([&] { ASSERT_TRUE((*toy.diagnostics)->AfterStep().ok()); });
    // Ranks other than 0 have sent the rows they store.
    const int64_t sent = group.ledger().bytes(Purpose::kControl) - control;
    if (rank == 1) {
      EXPECT_GE(sent, 4 * (3 * 7 + 1 * 2 + 201 * 3 + 1 * 5));
    }
  });
}

TEST(Diagnostics, PlannedMemoryIsWhatARunAllocates) {
  OnRanks(3, [&](int rank, ProcessGroup& group) {
    const auto device = *CreateDevice(Backend::kCpu, 1);
    Allocator plan = Allocator::ForPlan();
    { ToyRank toy(group, plan, *device, ToyUnits()); }
    Allocator allocator(device.get());
    ToyRank toy(group, allocator, *device, ToyUnits());
    ASSERT_TRUE(toy.engine->Start(1).ok());
    ASSERT_TRUE((*toy.diagnostics)->BeforeStep().ok());
    ASSERT_TRUE(toy.Step(1).ok());
    ASSERT_TRUE((*toy.diagnostics)->AfterStep().ok());
    EXPECT_EQ(plan.peak().bytes, allocator.peak().bytes);

    const ParameterTable table(ToyUnits());
    int64_t expected = 8 * table.size();  // a sum for each parameter
    for (int id = 0; id < table.size(); ++id) {
      expected += 4 * RowsOfRank(table[id].spec.rows, 3, rank).size() * table[id].spec.cols;
    }
    // The largest matrix, its sampled rows' products and their ratios.
    if (rank == 0) expected += 4 * 601 * 3 + 4 * 201 * 601 + 8 * 201;
    EXPECT_EQ(plan.peak()[MemoryPurpose::kDiagnostics], expected);
  });
}

TEST(Diagnostics, AModelWithoutMatricesIsRefused) {
  auto groups = *CreateThreadRanks(1, {});
  const auto device = *CreateDevice(Backend::kCpu, 1);
  Allocator plan = Allocator::ForPlan();
  const ToyRank toy(*groups[0], plan, *device, {ToyUnits()[0]});
  EXPECT_EQ(toy.diagnostics.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(toy.diagnostics.status().message().find("the model has none"), absl::string_view::npos);
}

TEST(Diagnostics, AnOptimizerWithoutMomentumIsRefused) {
  auto groups = *CreateThreadRanks(1, {});
  const auto device = *CreateDevice(Backend::kCpu, 1);
  Allocator plan = Allocator::ForPlan();
  const ToyRank toy(*groups[0], plan, *device, ToyUnits(), "velocity");
  EXPECT_EQ(toy.diagnostics.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(toy.diagnostics.status().message().find("momentum of square"), absl::string_view::npos);
}

TEST(Diagnostics, ARankThatFailsTakesTheOthersWithIt) {
  OnRanks(3, [&](int rank, ProcessGroup& group) {
    const auto device = *CreateDevice(Backend::kCpu, 1);
    Allocator allocator(device.get());
    ToyRank toy(group, allocator, *device, ToyUnits());
    ASSERT_TRUE(toy.engine->Start(1).ok());
    ASSERT_TRUE((*toy.diagnostics)->BeforeStep().ok());
    absl::Status status = toy.Step(1);
    if (rank == 1) {
      ASSERT_TRUE(status.ok()) << status;
      group.Abort(absl::UnavailableError("rank 1 gave up"));
      return;
    }
    // Rank 1 may be that early that the step's figures are not believed.
    if (status.ok()) status = (*toy.diagnostics)->AfterStep().status();
    EXPECT_NE(status.message().find("rank 1 gave up"), absl::string_view::npos) << status;
  });
}

}  // namespace
}  // namespace dim0
