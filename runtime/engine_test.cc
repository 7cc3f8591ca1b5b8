// The engine against a model whose every value has a closed form: a unit's output is linear in its
// parameters, so gradients are constants, and plain SGD gives the parameters of any step. The model
// checks, where a real one would compute, that each whole parameter holds exactly the value it must
// have: a gather that came too late, a buffer reused too early or an update that was missed shows
// as a wrong number.
#include "runtime/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/process_group.h"

namespace dim0 {
namespace {

constexpr double kLr = 0.25;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Small integers and powers of two throughout: float32 holds every value exactly.
float GradientOf(int parameter, int64_t element, int stage_uses) {
  return static_cast<float>((parameter * 7 + element * 3) % 5 - 2) * stage_uses;
}

// Units: root (used by the first and the last stage, like tied embeddings) and `blocks` others.
// Rows are uneven, and some parameters have fewer rows than there are ranks.
std::vector<UnitSpec> ToyUnits(int blocks) {
  std::vector<UnitSpec> units = {{"root",
                                  {{"table", 7, 3, ParameterRole::kEmbedding, {}},
                                   {"bias", 1, 1, ParameterRole::kVector, {Init::Kind::kOne}}}}};
  for (int i = 0; i < blocks; ++i) {
    units.push_back({absl::StrCat("h.", i),
                     {{absl::StrCat("w", i), 5 + i, 2, ParameterRole::kMatrix, {}},
                      {absl::StrCat("b", i), 2, 1, ParameterRole::kVector, {}}}});
  }
  return units;
}

class ToyModel : public Model {
 public:
  ToyModel(int blocks, bool jitter) : units_(ToyUnits(blocks)), table_(units_), jitter_(jitter) {
    stages_.push_back({"first", 0});
    for (int i = 0; i < blocks; ++i) stages_.push_back({units_[i + 1].name, i + 1});
    stages_.push_back({"last", 0});
  }

  absl::Span<const UnitSpec> units() const override { return units_; }
  absl::Span<const Stage> stages() const override { return stages_; }
  absl::Status Allocate(Allocator&, int64_t, int64_t, bool) override { return absl::OkStatus(); }
  double FlopsPerToken(int64_t) const override { return 1; }

  void Begin(Stream&, const Batch& batch, float gradient_scale) override {
    weight_ = batch.tokens[0];
    gradient_scale_ = gradient_scale;
  }

  void Forward(int stage, absl::Span<const Tensor> parameters, bool, double* loss_sum,
               Stream& stream) override {
    CheckParameters(stage, parameters, stream);
    if (stage + 1 < static_cast<int>(stages_.size())) return;
    stream.Enqueue({.name = "loss"}, [loss_sum, weight = weight_](const OpContext&) {
      *loss_sum += weight;
      return absl::OkStatus();
    });
  }

  void Backward(int stage, absl::Span<const Tensor> parameters, absl::Span<const Tensor> gradients,
                bool accumulate, Stream& stream) override {
    CheckParameters(stage, parameters, stream);
    const int unit = stages_[stage].unit;
    // Of the root's two stages the last comes first in backward and writes.
    const bool adds = accumulate || (unit == 0 && stage == 0);
    const std::vector<Tensor> targets(gradients.begin(), gradients.end());
    stream.Enqueue({.name = "backward"}, [this, unit, adds, targets,
                                          scale = gradient_scale_ * weight_](const OpContext&) {
      Jitter();
      for (size_t i = 0; i < targets.size(); ++i) {
        const int id = table_.first(unit) + i;
        for (int64_t e = 0; e < targets[i].size(); ++e) {
          float& target = targets[i].f32()[e];
          target = (adds ? target : 0) + scale * GradientOf(id, e, 1);
        }
      }
      const int position = poison_.parameter - table_.first(unit);
      if (position >= 0 && position < static_cast<int>(targets.size())) {
        targets[position].f32()[poison_.element] = poison_.value;
      }
      return absl::OkStatus();
    });
  }

  // The step whose parameters are to be expected, counted from 0, and the mean gradient's weight
  // per step.
  void Expect(int64_t steps_done, double weight) {
    steps_done_ = steps_done;
    mean_weight_ = weight;
  }
  // What this rank's backward writes instead of one element of a gradient.
  struct Poison {
    int parameter = -1;
    int64_t element = 0;
    float value = 0;
  };
  void SetPoison(const Poison& poison) { poison_ = poison; }
  int64_t wrong() const { return wrong_; }
  int64_t checked() const { return checked_; }

  float Expected(int id, int64_t element, int64_t steps) const {
    const int uses = table_[id].unit == 0 ? 2 : 1;
    const float start = table_[id].spec.init.kind == Init::Kind::kOne ? 1 : 0;
    return start - static_cast<float>(kLr * mean_weight_ * steps) * GradientOf(id, element, uses);
  }

 private:
  void Jitter() {
    if (jitter_) std::this_thread::sleep_for(std::chrono::microseconds(50 * (++calls_ % 7)));
  }

  void CheckParameters(int stage, absl::Span<const Tensor> parameters, Stream& stream) {
    const std::vector<Tensor> whole(parameters.begin(), parameters.end());
    const int unit = stages_[stage].unit;
    stream.Enqueue({.name = "check"}, [this, unit, whole, steps = steps_done_](const OpContext&) {
      Jitter();
      for (size_t i = 0; i < whole.size(); ++i) {
        const int id = table_.first(unit) + i;
        for (int64_t e = 0; e < whole[i].size(); ++e) {
          ++checked_;
          if (whole[i].f32()[e] != Expected(id, e, steps)) ++wrong_;
        }
      }
      return absl::OkStatus();
    });
  }

  const std::vector<UnitSpec> units_;
  const ParameterTable table_;
  const bool jitter_;
  std::vector<Stage> stages_;
  float weight_ = 0;
  float gradient_scale_ = 0;
  int64_t steps_done_ = 0;
  double mean_weight_ = 1;
  Poison poison_;
  int calls_ = 0;  // compute stream only
  std::atomic<int64_t> wrong_ = 0, checked_ = 0;
};

// Plain SGD on its own stream, slow on purpose.
class Sgd : public Optimizer {
 public:
  Sgd(Device& device, bool jitter) : stream_(device.NewStream("sgd")), jitter_(jitter) {}
  absl::Status Plan(const ParameterTable&, absl::Span<const int>,
                    const OptimizerResources& resources) override {
    order_ = resources.update_order;
    return absl::OkStatus();
  }
  absl::Status Update(const Unit& unit, const StepParams& params, const Event& ready) override {
    EXPECT_EQ(unit.index, order_[updates_++ % order_.size()]);
    stream_->Wait(ready);
    stream_->Enqueue({.name = "sgd"}, [this, &unit, params](const OpContext&) {
      if (jitter_) std::this_thread::sleep_for(std::chrono::microseconds(300));
      if (!std::isfinite(*params.gradient_scale)) return absl::OkStatus();
      for (const ParameterShard& shard : unit.parameters) {
        for (int64_t i = 0; i < shard.value.size(); ++i) {
          shard.value.f32()[i] -=
              static_cast<float>(kLr) * *params.gradient_scale * shard.gradient.f32()[i];
        }
      }
      return absl::OkStatus();
    });
    updated_[unit.index] = stream_->Record();
    return absl::OkStatus();
  }
  Event Updated(const Unit& unit) override { return updated_[unit.index]; }
  std::vector<StateTensor> State() override { return {}; }
  uint64_t PlanHash() const override { return plan_hash_; }
  void set_plan_hash(uint64_t hash) { plan_hash_ = hash; }

 private:
  const std::unique_ptr<Stream> stream_;
  const bool jitter_;
  std::vector<int> order_;
  size_t updates_ = 0;
  uint64_t plan_hash_ = 0;
  std::map<int, Event> updated_;
};

// Runs body(rank, group) on a thread per rank.
void OnRanks(int world_size, const std::function<void(int, ProcessGroup&)>& body) {
  auto groups = *CreateThreadRanks(world_size, {.timeout = absl::Seconds(60)});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { body(rank, *groups[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

// One rank's engine with a toy model and SGD.
struct ToyRank {
  ToyRank(ProcessGroup& group, const EngineOptions& options, int blocks, bool jitter = false)
      : device(*CreateDevice(Backend::kCpu, 1)),
        allocator(device.get()),
        model(blocks, jitter),
        sgd(*device, jitter),
        engine(*Engine::Create(options, model, group, *device, allocator, &sgd)) {}

  // A step of one micro-batch of weight 1.
  absl::StatusOr<StepResult> Step(int64_t global_tokens = 1, bool stop = false) {
    const std::atomic<bool> wish = stop;
    return engine->TrainStep({&batch, 1}, global_tokens, {}, &wish);
  }

  const int32_t weight = 1;
  const Batch batch = {1, 1, &weight, nullptr};
  const std::unique_ptr<Device> device;
  Allocator allocator;
  ToyModel model;
  Sgd sgd;
  const std::unique_ptr<Engine> engine;
};

struct Case {
  int world_size;
  int blocks;
  EngineOptions options;
  int micro_batches;
};

class EngineTest : public testing::TestWithParam<Case> {};

TEST_P(EngineTest, EveryStageSeesTheParametersOfItsStep) {
  const Case& c = GetParam();
  constexpr int kSteps = 5;
  OnRanks(c.world_size, [&](int rank, ProcessGroup& group) {
    ToyRank toy(group, c.options, c.blocks, /*jitter=*/true);
    ASSERT_TRUE(toy.engine->Start(1).ok());
    // Rank r's micro-batch m weighs 1 + (r + m) % 2; the sum over both is divided by global_tokens.
    std::vector<int32_t> weights(c.micro_batches);
    std::vector<Batch> batches;
    double total = 0;
    for (int r = 0; r < c.world_size; ++r) {
      for (int m = 0; m < c.micro_batches; ++m) total += 1 + (r + m) % 2;
    }
    for (int m = 0; m < c.micro_batches; ++m) {
      weights[m] = 1 + (rank + m) % 2;
      batches.push_back({1, 1, &weights[m], nullptr});
    }
    const ParameterTable& table = toy.engine->table();
    double squares = 0;
    for (int id = 0; id < table.size(); ++id) {
      for (int64_t e = 0; e < table[id].spec.size(); ++e) {
        squares += std::pow(total / 8 * GradientOf(id, e, table[id].unit == 0 ? 2 : 1), 2);
      }
    }
    for (int64_t step = 0; step < kSteps; ++step) {
      toy.model.Expect(step, total / 8);
      const auto result =
          toy.engine->TrainStep(batches, /*global_tokens=*/8, {.step = step + 1}, nullptr);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_DOUBLE_EQ(result->loss, total / 8);
      EXPECT_NEAR(result->gradient_norm, std::sqrt(squares), 1e-9 * std::sqrt(squares));
    }
    toy.model.Expect(kSteps, total / 8);
    EXPECT_DOUBLE_EQ(*toy.engine->Evaluate(batches), total);
    for (int id = 0; id < table.size(); ++id) {
      std::vector<float> whole(rank == 0 ? table[id].spec.size() : 0);
      ASSERT_TRUE(toy.engine->GatherToRankZero(id, absl::MakeSpan(whole)).ok());
      for (size_t e = 0; e < whole.size(); ++e)
        EXPECT_EQ(whole[e], toy.model.Expected(id, e, kSteps));
    }
    EXPECT_GT(toy.model.checked(), 0);
    EXPECT_EQ(toy.model.wrong(), 0) << "of " << toy.model.checked();
  });
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int world_size : {1, 2, 3, 4, 8}) {
    for (const bool reshard : {true, false}) {
      for (const int prefetch : {0, 1, 2, 9}) {
        cases.push_back(
            {world_size, 3, {.reshard_after_forward = reshard, .prefetch = prefetch}, 1});
      }
    }
    for (const bool sync : {true, false}) {
      cases.push_back({world_size, 3, {.sync_every_micro_batch = sync}, 3});
      // A clip that never bites: the same numbers by the other order of updates.
      cases.push_back({world_size, 2, {.sync_every_micro_batch = sync, .clip = kInfinity}, 2});
    }
    cases.push_back({world_size, 1, {}, 2});
    cases.push_back({world_size, 0, {}, 1});
  }
  return cases;
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return absl::StrCat("Ranks", c.world_size, "Blocks", c.blocks,
                      c.options.reshard_after_forward ? "Reshard" : "Keep", "Prefetch",
                      c.options.prefetch, c.options.sync_every_micro_batch ? "Sync" : "NoSync",
                      c.options.clip > 0 ? "Clip" : "", "Micro", c.micro_batches);
}

INSTANTIATE_TEST_SUITE_P(All, EngineTest, testing::ValuesIn(Cases()), CaseName);

// Sum over ranks of the bytes sent for `purpose` in one step.
int64_t BytesOfOneStep(int world_size, const EngineOptions& options, int micro_batches,
                       Purpose purpose) {
  std::atomic<int64_t> bytes = 0;
  OnRanks(world_size, [&](int, ProcessGroup& group) {
    ToyRank toy(group, options, 4);
    ASSERT_TRUE(toy.engine->Start(1).ok());
    const std::vector<Batch> batches(micro_batches, toy.batch);
    toy.model.Expect(0, 1);
    ASSERT_TRUE(toy.engine->TrainStep(batches, 1, {}, nullptr).ok());
    ASSERT_TRUE(toy.engine->Synchronize().ok());
    bytes += group.ledger().bytes(purpose);
  });
  return bytes;
}

TEST(EngineBytes, EqualTheRingFormulasToTheByte) {
  const ParameterTable table(ToyUnits(4));
  const int64_t all = table.elements() * 4;
  const int64_t root = table.unit_elements(0) * 4;
  for (const int n : {1, 2, 3, 5, 8}) {
    // Over all ranks a ring all-gather or reduce-scatter of S bytes sends (N-1) S. Blocks are
    // gathered for forward and for backward; the root, in use from end to end, once.
    EXPECT_EQ(BytesOfOneStep(n, {}, 1, Purpose::kParameter), (n - 1) * (2 * all - root));
    EXPECT_EQ(BytesOfOneStep(n, {}, 1, Purpose::kGradient), (n - 1) * all);
    EXPECT_EQ(BytesOfOneStep(n, {}, 1, Purpose::kOptimizer), 0);
    // Kept from forward to backward, every unit is gathered once.
    EXPECT_EQ(BytesOfOneStep(n, {.reshard_after_forward = false}, 1, Purpose::kParameter),
              (n - 1) * all);
    // What stays, stays through all micro-batches of the step.
    EXPECT_EQ(BytesOfOneStep(n, {}, 3, Purpose::kParameter),
              (n - 1) * (root + 3 * 2 * (all - root)));
    EXPECT_EQ(BytesOfOneStep(n, {.reshard_after_forward = false}, 3, Purpose::kParameter),
              (n - 1) * all);
    // With sync every micro-batch is reduced; without, only the last.
    EXPECT_EQ(BytesOfOneStep(n, {}, 3, Purpose::kGradient), 3 * (n - 1) * all);
    EXPECT_EQ(BytesOfOneStep(n, {.sync_every_micro_batch = false}, 3, Purpose::kGradient),
              (n - 1) * all);
  }
}

TEST(Engine, ClippingScalesTheUpdateByTheGlobalNorm) {
  for (const int world_size : {1, 3}) {
    OnRanks(world_size, [&](int rank, ProcessGroup& group) {
      ToyRank toy(group, {.clip = 0.5}, 2);
      ASSERT_TRUE(toy.engine->Start(1).ok());
      const auto result = toy.Step(world_size);
      ASSERT_TRUE(result.ok());
      const ParameterTable& table = toy.engine->table();
      const int id = table.first(1);
      std::vector<float> whole(rank == 0 ? table[id].spec.size() : 0);
      ASSERT_TRUE(toy.engine->GatherToRankZero(id, absl::MakeSpan(whole)).ok());
      const double coefficient = 0.5 / (result->gradient_norm + 1e-6);
      ASSERT_LT(coefficient, 1);
      for (size_t e = 0; e < whole.size(); ++e) {
        EXPECT_NEAR(whole[e], -kLr * coefficient * GradientOf(id, e, 1), 1e-7);
      }
    });
  }
}

const std::vector<float> kNotFinite = {std::numeric_limits<float>::quiet_NaN(),
                                       std::numeric_limits<float>::infinity(),
                                       -std::numeric_limits<float>::infinity()};

TEST(Engine, ABrokenGradientNamesUnitParameterAndRankAndChangesNothing) {
  struct Broken {
    int parameter;
    int64_t element;
    const char* named;
    const char* rank;  // that stores the element's row, of 3
  };
  const std::vector<Broken> cases = {{0, 20, "table (unit root)", "rank 2"},
                                     {1, 0, "bias (unit root)", "rank 0"},
                                     {4, 1, "w1 (unit h.1)", "rank 0"},
                                     {4, 11, "w1 (unit h.1)", "rank 2"},
                                     {5, 1, "b1 (unit h.1)", "rank 1"}};
  for (const double clip : {1.0, kInfinity}) {
    for (const float value : kNotFinite) {
      for (const Broken& broken : cases) {
        OnRanks(3, [&](int rank, ProcessGroup& group) {
          ToyRank toy(group, {.clip = clip}, 2);
          ASSERT_TRUE(toy.engine->Start(1).ok());
          if (rank == 1) toy.model.SetPoison({broken.parameter, broken.element, value});
          const auto result = toy.Step();
          ASSERT_FALSE(result.ok());
          for (const char* part : {broken.named, broken.rank}) {
            EXPECT_NE(result.status().message().find(part), absl::string_view::npos)
                << result.status();
          }
          ASSERT_TRUE(toy.engine->Synchronize().ok());
          const ParameterTable& table = toy.engine->table();
          for (int u = 0; u < table.num_units(); ++u) {
            for (const ParameterShard& shard : toy.engine->unit(u).parameters) {
              const bool one = table[shard.id].spec.init.kind == Init::Kind::kOne;
              for (int64_t e = 0; e < shard.value.size(); ++e) {
                EXPECT_EQ(shard.value.f32()[e], one ? 1 : 0) << table[shard.id].spec.name;
              }
            }
          }
        });
      }
    }
  }
}

TEST(Engine, WithoutClippingABrokenGradientIsFoundWhenEveryUnitHasItsUpdate) {
  OnRanks(3, [&](int rank, ProcessGroup& group) {
    ToyRank toy(group, {.clip = 0}, 2);
    ASSERT_TRUE(toy.engine->Start(1).ok());
    if (rank == 1) toy.model.SetPoison({4, 1, kNotFinite[0]});
    const auto result = toy.Step(/*global_tokens=*/3);
    ASSERT_FALSE(result.ok());
    EXPECT_NE(result.status().message().find("w1 (unit h.1)"), absl::string_view::npos);
    ASSERT_TRUE(toy.engine->Synchronize().ok());
    const ParameterTable& table = toy.engine->table();
    for (int u = 0; u < table.num_units(); ++u) {
      for (const ParameterShard& shard : toy.engine->unit(u).parameters) {
        const int64_t first = shard.rows.begin * table[shard.id].spec.cols;
        for (int64_t e = 0; e < shard.value.size(); ++e) {
          if (shard.id == 4 && first + e == 1) {
            EXPECT_TRUE(std::isnan(shard.value.f32()[e]));
          } else {
            EXPECT_NEAR(shard.value.f32()[e], toy.model.Expected(shard.id, first + e, 1), 1e-6);
          }
        }
      }
    }
  });
}

TEST(Engine, SaysWhetherClippingMadeTheGradientSmaller) {
  for (const double clip : {0.0, 1e-3, 1e9, kInfinity}) {
    OnRanks(2, [&](int, ProcessGroup& group) {
      ToyRank toy(group, {.clip = clip}, 1);
      ASSERT_TRUE(toy.engine->Start(1).ok());
      const auto result = toy.Step();
      ASSERT_TRUE(result.ok());
      ASSERT_GT(result->gradient_norm, 1);
      ASSERT_LT(result->gradient_norm, 1e3);
      EXPECT_EQ(result->clipped, clip == 1e-3) << clip;
    });
  }
}

TEST(Engine, RanksWithDifferentPlansAreRefusedByName) {
  OnRanks(3, [&](int rank, ProcessGroup& group) {
    ToyRank toy(group, {}, 1);
    if (rank == 2) toy.sgd.set_plan_hash(5);
    const absl::Status status = toy.engine->Start(1);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.message().find("rank(s) 2"), absl::string_view::npos) << status;
  });
}

TEST(Engine, ARankThatFailsTakesTheOthersWithIt) {
  OnRanks(2, [&](int rank, ProcessGroup& group) {
    ToyRank toy(group, {}, 1);
    ASSERT_TRUE(toy.engine->Start(1).ok());
    if (rank == 1) {
      group.Abort(absl::UnavailableError("rank 1 gave up"));
      return;
    }
    const auto result = toy.Step();
    EXPECT_NE(result.status().message().find("rank 1 gave up"), absl::string_view::npos);
  });
}

TEST(Engine, AWishToStopReachesEveryRank) {
  OnRanks(3, [&](int rank, ProcessGroup& group) {
    ToyRank toy(group, {}, 1);
    ASSERT_TRUE(toy.engine->Start(1).ok());
    EXPECT_FALSE(toy.Step()->stop);
    EXPECT_TRUE(toy.Step(1, rank == 1)->stop);
  });
}

TEST(Engine, PlannedMemoryIsWhatARunAllocates) {
  for (const int world_size : {1, 3}) {
    for (const EngineOptions& options :
         {EngineOptions{}, EngineOptions{.prefetch = 0}, EngineOptions{.prefetch = 5},
          EngineOptions{.reshard_after_forward = false},
          EngineOptions{.sync_every_micro_batch = false, .clip = 1}}) {
      OnRanks(world_size, [&](int, ProcessGroup& group) {
        const auto device = *CreateDevice(Backend::kCpu, 1);
        ToyModel model(4, false);
        Sgd sgd(*device, false);
        Allocator plan = Allocator::ForPlan();
        ASSERT_TRUE(Engine::Create(options, model, group, *device, plan, &sgd).ok());
        Allocator allocator(device.get());
        auto engine = *Engine::Create(options, model, group, *device, allocator, &sgd);
        ASSERT_TRUE(engine->Start(1).ok());
        const int32_t weight = 1;
        const Batch batch{1, 1, &weight, nullptr};
        ASSERT_TRUE(engine->TrainStep({&batch, 1}, 1, {}, nullptr).ok());
        EXPECT_EQ(plan.peak().bytes, allocator.peak().bytes);
      });
    }
  }
}

TEST(Engine, PrefetchDepthBoundsTheGatheredMemory) {
  const auto gathered = [](int prefetch) {
    auto groups = *CreateThreadRanks(1, {});
    const auto device = *CreateDevice(Backend::kCpu, 1);
    ToyModel model(6, false);
    Sgd sgd(*device, false);
    Allocator plan = Allocator::ForPlan();
    EXPECT_TRUE(
        Engine::Create({.prefetch = prefetch}, model, *groups[0], *device, plan, &sgd).ok());
    return plan.peak()[MemoryPurpose::kGathered];
  };
  const int64_t slot = gathered(1) - gathered(0);
  EXPECT_GT(slot, 0);
  EXPECT_EQ(gathered(3) - gathered(1), 2 * slot);
}

TEST(Engine, ANegativePrefetchIsRefused) {
  auto groups = *CreateThreadRanks(1, {});
  const auto device = *CreateDevice(Backend::kCpu, 1);
  ToyModel model(1, false);
  Allocator plan = Allocator::ForPlan();
  EXPECT_EQ(
      Engine::Create({.prefetch = -1}, model, *groups[0], *device, plan, nullptr).status().code(),
      absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dim0
