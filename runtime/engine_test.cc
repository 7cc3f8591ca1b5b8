// The engine against a model whose every value has a closed form: a unit's output is linear in its
// parameters, so gradients are constants, and plain SGD gives the parameters of any step. The model
// checks, where a real one would compute, that each whole parameter holds exactly the value it must
// have: a gather that came too late, a buffer reused too early or an update that was missed shows
// as a wrong number.
#include "runtime/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collectives/process_group.h"
#include "runtime/op_recorder.h"

namespace dim0 {
namespace {

constexpr double kLr = 0.25;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr DType kF32 = DType::kFloat32, kBF16 = DType::kBFloat16;

float Round(float value, DType dtype) {
  return dtype == kBF16 ? static_cast<float>(BFloat16(value)) : value;
}

float Get(const Tensor& tensor, int64_t element) {
  float value = 0;
  WithElements(tensor, [&](const auto* values) { value = static_cast<float>(values[element]); });
  return value;
}

void Set(const Tensor& tensor, int64_t element, float value) {
  WithElements(tensor, [&](auto* values) {
    values[element] = std::remove_reference_t<decltype(*values)>(value);
  });
}

// Small integers and powers of two throughout: float32 holds every value exactly.
float GradientOf(int parameter, int64_t element) {
  return static_cast<float>((parameter * 7 + element * 3) % 5 - 2);
}

// Units: root, whole in the last stage, while the first looks up rows of two of its parameters, as
// tied embeddings do; and `blocks` others. Rows are uneven, and some parameters have fewer rows
// than there are ranks.
constexpr int kTable = 0, kPlaces = 2;
std::vector<UnitSpec> ToyUnits(int blocks) {
  std::vector<UnitSpec> units = {{"root",
                                  {{"table", 7, 3, ParameterRole::kEmbedding, {}},
                                   {"bias", 1, 1, ParameterRole::kVector, {Init::Kind::kOne}},
                                   {"places", 4, 2, ParameterRole::kEmbedding, {}}}}};
  for (int i = 0; i < blocks; ++i) {
    units.push_back({absl::StrCat("h.", i),
                     {{absl::StrCat("w", i), 5 + i, 2, ParameterRole::kMatrix, {}},
                      {absl::StrCat("b", i), 2, 1, ParameterRole::kVector, {}}}});
  }
  return units;
}

// The first stage looks up the rows of `table` that the tokens name, and rows 3, 2, 1, 0, 3, ... of
// `places`, one a token. A batch's first target is its weight.
std::vector<std::vector<int32_t>> ToyRowUses(const Batch& batch) {
  std::vector<std::vector<int32_t>> uses(2);
  for (int64_t i = 0; i < batch.seq_len; ++i) {
    uses[0].push_back(batch.tokens[i]);
    uses[1].push_back(3 - i % 4);
  }
  return uses;
}

class ToyModel : public Model {
 public:
  static constexpr int64_t kMostTokens = 5;

  // `computes` is the type of what it is given and writes.
  ToyModel(int blocks, bool jitter, const EngineOptions& options = {}, DType computes = kF32)
      : units_(ToyUnits(blocks)),
        table_(units_),
        jitter_(jitter),
        master_(options.master_dtype),
        gathered_(options.param_dtype),
        computes_(computes) {
    stages_.push_back({"first", 0, {{kTable, kMostTokens}, {kPlaces, kMostTokens}}});
    for (int i = 0; i < blocks; ++i) stages_.push_back({units_[i + 1].name, i + 1});
    stages_.push_back({"last", 0});
  }

  absl::Span<const UnitSpec> units() const override { return units_; }
  absl::Span<const Stage> stages() const override { return stages_; }
  DType parameter_dtype() const override { return computes_; }
  DType gradient_dtype() const override { return computes_; }
  absl::Status Allocate(Allocator&, int64_t, int64_t, bool) override { return absl::OkStatus(); }
  double FlopsPerToken(int64_t) const override { return 1; }

  std::vector<std::vector<int32_t>> RowUses(const Batch& batch) const override {
    return ToyRowUses(batch);
  }

  void Begin(Stream&, const Batch& batch, absl::Span<const std::vector<int32_t>> uses,
             float gradient_scale) override {
    weight_ = batch.targets[0];
    gradient_scale_ = gradient_scale;
    rows_ = ToyRowUses(batch);
    distinct_.clear();
    ASSERT_EQ(uses.size(), rows_.size());
    for (size_t k = 0; k < rows_.size(); ++k) {
      const std::set<int32_t> distinct(rows_[k].begin(), rows_[k].end());
      distinct_.emplace_back(distinct.begin(), distinct.end());
      ASSERT_EQ(uses[k].size(), rows_[k].size());
      for (size_t i = 0; i < uses[k].size(); ++i) {
        EXPECT_EQ(distinct_[k].at(uses[k][i]), rows_[k][i]);
      }
    }
  }

  void Forward(int stage, absl::Span<const Tensor> parameters, bool, double* loss_sum,
               Stream& stream) override {
    if (stage == 0) {
      CheckTables(parameters, stream);
    } else {
      CheckParameters(stage, parameters, stream);
    }
    if (stage + 1 < static_cast<int>(stages_.size())) return;
    stream.Enqueue({.name = "loss"}, [loss_sum, weight = weight_](const OpContext&) {
      *loss_sum += weight;
      return absl::OkStatus();
    });
  }

  void Backward(int stage, absl::Span<const Tensor> parameters, absl::Span<const Tensor> gradients,
                bool accumulate, Stream& stream) override {
    const std::vector<Tensor> targets(gradients.begin(), gradients.end());
    const float scale = gradient_scale_ * weight_;
    if (stage == 0) {
      EXPECT_TRUE(parameters.empty());
      EXPECT_FALSE(accumulate);
      ASSERT_EQ(targets.size(), 2u);
      stream.Enqueue({.name = "backward"},
                     [this, targets, scale, rows = rows_, distinct = distinct_](const OpContext&) {
                       Jitter();
                       WriteRowGradients(targets, scale, rows, distinct);
                       return absl::OkStatus();
                     });
      return;
    }
    CheckParameters(stage, parameters, stream);
    const int unit = stages_[stage].unit;
    stream.Enqueue(
        {.name = "backward"}, [this, unit, accumulate, targets, scale](const OpContext&) {
          Jitter();
          for (size_t i = 0; i < targets.size(); ++i) {
            const int id = table_.first(unit) + i;
            for (int64_t e = 0; e < targets[i].size(); ++e) {
              EXPECT_EQ(targets[i].dtype, computes_);
              const float held = accumulate ? Get(targets[i], e) : 0;
              Set(targets[i], e, held + scale * GradientOf(id, e));
            }
          }
          const int position = poison_.parameter - table_.first(unit);
          if (!poison_.looked_up && position >= 0 && position < static_cast<int>(targets.size())) {
            Set(targets[position], poison_.element, poison_.value);
          }
          return absl::OkStatus();
        });
  }

  // The step whose parameters are to be expected, counted from 0, the mean gradient's weight per
  // step, and what each use adds to a row's weight: those of `table`'s rows and of `places`'.
  struct Weights {
    double whole = 0;
    std::vector<double> table = std::vector<double>(7);
    std::vector<double> places = std::vector<double>(4);

    // Adds one rank's micro-batch.
    void Add(const Batch& batch, double share) {
      whole += share * batch.targets[0];
      const std::vector<std::vector<int32_t>> uses = ToyRowUses(batch);
      for (const int32_t row : uses[0]) table[row] += share * batch.targets[0];
      for (const int32_t row : uses[1]) places[row] += share * batch.targets[0];
    }
    double Of(int id, int64_t element) const {
      if (id == kTable) return whole + table[element / 3];
      if (id == kPlaces) return whole + places[element / 2];
      return whole;
    }
  };
  void Expect(int64_t steps_done, const Weights& weights) {
    steps_done_ = steps_done;
    weights_ = weights;
  }
  // What this rank's backward writes instead of one element of a gradient: the first stage's if
  // `looked_up`, which must use the row.
  struct Poison {
    int parameter = -1;
    int64_t element = 0;
    float value = 0;
    bool looked_up = false;
  };
  void SetPoison(const Poison& poison) { poison_ = poison; }
  int64_t wrong() const { return wrong_; }
  int64_t checked() const { return checked_; }

  // What the shards hold; a bfloat16 master is rounded in every step.
  float Master(int id, int64_t element, int64_t steps) const {
    const float start = table_[id].spec.init.kind == Init::Kind::kOne ? 1 : 0;
    const double step = kLr * weights_.Of(id, element) * GradientOf(id, element);
    if (master_ == kF32) return start - static_cast<float>(step * steps);
    float value = start;
    for (int64_t s = 0; s < steps; ++s) value = Round(value - static_cast<float>(step), master_);
    return value;
  }
  // What the model is given.
  float Expected(int id, int64_t element, int64_t steps) const {
    return Round(Master(id, element, steps), gathered_);
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
        EXPECT_EQ(whole[i].dtype, computes_);
        for (int64_t e = 0; e < whole[i].size(); ++e) {
          ++checked_;
          if (Get(whole[i], e) != Expected(id, e, steps)) ++wrong_;
        }
      }
      return absl::OkStatus();
    });
  }

  void CheckTables(absl::Span<const Tensor> parameters, Stream& stream) {
    const std::vector<Tensor> tables(parameters.begin(), parameters.end());
    ASSERT_EQ(tables.size(), 2u);
    for (int k = 0; k < 2; ++k) {
      ASSERT_EQ(tables[k].rows, static_cast<int64_t>(distinct_[k].size()));
      ASSERT_EQ(tables[k].cols, table_[kLookedUp[k]].spec.cols);
    }
    stream.Enqueue({.name = "check"},
                   [this, tables, distinct = distinct_, steps = steps_done_](const OpContext&) {
                     Jitter();
                     for (int k = 0; k < 2; ++k) {
                       for (int64_t e = 0; e < tables[k].size(); ++e) {
                         const int64_t cols = tables[k].cols;
                         const int64_t element = distinct[k][e / cols] * cols + e % cols;
                         ++checked_;
                         if (Get(tables[k], e) != Expected(kLookedUp[k], element, steps)) ++wrong_;
                       }
                     }
                     return absl::OkStatus();
                   });
  }

  void WriteRowGradients(const std::vector<Tensor>& targets, float scale,
                         const std::vector<std::vector<int32_t>>& rows,
                         const std::vector<std::vector<int32_t>>& distinct) {
    for (int k = 0; k < 2; ++k) {
      const int64_t cols = targets[k].cols;
      for (int64_t e = 0; e < targets[k].size(); ++e) {
        const int32_t row = distinct[k][e / cols];
        const int64_t element = row * cols + e % cols;
        const auto uses = std::count(rows[k].begin(), rows[k].end(), row);
        Set(targets[k], e, scale * uses * GradientOf(kLookedUp[k], element));
        if (poison_.looked_up && poison_.parameter == kLookedUp[k] && poison_.element == element) {
          Set(targets[k], e, poison_.value);
        }
      }
    }
  }

  static constexpr int kLookedUp[] = {kTable, kPlaces};

  const std::vector<UnitSpec> units_;
  const ParameterTable table_;
  const bool jitter_;
  const DType master_, gathered_, computes_;
  std::vector<Stage> stages_;
  // Of the micro-batch being enqueued: what it uses of each lookup, and the distinct rows of that.
  std::vector<std::vector<int32_t>> rows_, distinct_;
  float weight_ = 0;
  float gradient_scale_ = 0;
  int64_t steps_done_ = 0;
  Weights weights_;
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
          const float step =
              static_cast<float>(kLr) * *params.gradient_scale * Get(shard.gradient, i);
          const float value = Get(shard.value, i) - step;
          Set(shard.value, i, value);
          if (shard.copy.rows > 0) Set(shard.copy, i, value);
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

struct ToyBatch {
  std::vector<int32_t> tokens;
  int32_t weight = 1;
  Batch batch() const { return {1, static_cast<int64_t>(tokens.size()), tokens.data(), &weight}; }
};

// One rank's engine with a toy model and SGD.
struct ToyRank {
  ToyRank(ProcessGroup& group, const EngineOptions& options, int blocks, bool jitter = false,
          DType computes = kF32)
      : device(*CreateDevice(Backend::kCpu, 1)),
        allocator(device.get()),
        model(blocks, jitter, options, computes),
        sgd(*device, jitter),
        engine(*Engine::Create(options, model, group, *device, allocator, &sgd)) {}

  // A step of one micro-batch of weight 1.
  absl::StatusOr<StepResult> Step(int64_t global_tokens = 1, bool stop = false) {
    const std::atomic<bool> wish = stop;
    return engine->TrainStep({&batch, 1}, global_tokens, {}, &wish);
  }

  const ToyBatch data = {{6, 0, 6}, 1};
  const Batch batch = data.batch();
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
  DType computes = kF32;
};

class EngineTest : public testing::TestWithParam<Case> {};

// Rank r's micro-batch m: 1 to 4 tokens with repeats, of which others use some as well.
ToyBatch DataOf(int rank, int micro_batch) {
  ToyBatch data = {{}, 1 + (rank + micro_batch) % 2};
  for (int i = 0; i <= (rank + 2 * micro_batch) % 4; ++i) {
    data.tokens.push_back((rank * 3 + micro_batch * 2 + i * (i - 1)) % 7);
  }
  return data;
}

TEST_P(EngineTest, EveryStageSeesTheParametersOfItsStep) {
  const Case& c = GetParam();
  constexpr int kSteps = 5;
  OnRanks(c.world_size, [&](int rank, ProcessGroup& group) {
    ToyRank toy(group, c.options, c.blocks, /*jitter=*/true, c.computes);
    ASSERT_TRUE(toy.engine->Start(1).ok());
    // The sum over ranks and micro-batches is divided by global_tokens, 8.
    ToyModel::Weights weights;
    for (int r = 0; r < c.world_size; ++r) {
      for (int m = 0; m < c.micro_batches; ++m) weights.Add(DataOf(r, m).batch(), 1.0 / 8);
    }
    std::vector<ToyBatch> data;
    std::vector<Batch> batches;
    for (int m = 0; m < c.micro_batches; ++m) data.push_back(DataOf(rank, m));
    for (const ToyBatch& micro_batch : data) batches.push_back(micro_batch.batch());
    const ParameterTable& table = toy.engine->table();
    double squares = 0;
    for (int id = 0; id < table.size(); ++id) {
      for (int64_t e = 0; e < table[id].spec.size(); ++e) {
        squares += std::pow(weights.Of(id, e) * GradientOf(id, e), 2);
      }
    }
    for (int64_t step = 0; step < kSteps; ++step) {
      toy.model.Expect(step, weights);
      const auto result =
          toy.engine->TrainStep(batches, /*global_tokens=*/8, {.step = step + 1}, nullptr);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_DOUBLE_EQ(result->loss, weights.whole);
      EXPECT_NEAR(result->gradient_norm, std::sqrt(squares), 1e-9 * std::sqrt(squares));
    }
    toy.model.Expect(kSteps, weights);
    EXPECT_DOUBLE_EQ(*toy.engine->Evaluate(batches), 8 * weights.whole);
    for (int id = 0; id < table.size(); ++id) {
      std::vector<float> whole(rank == 0 ? table[id].spec.size() : 0);
      ASSERT_TRUE(toy.engine->GatherToRankZero(id, absl::MakeSpan(whole)).ok());
      for (size_t e = 0; e < whole.size(); ++e)
        EXPECT_EQ(whole[e], toy.model.Master(id, e, kSteps));
    }
    EXPECT_GT(toy.model.checked(), 0);
    EXPECT_EQ(toy.model.wrong(), 0) << "of " << toy.model.checked();
  });
}

// Every choice of types that may be chosen but float32 throughout.
std::vector<EngineOptions> DTypeChoices() {
  std::vector<EngineOptions> choices;
  for (const DType master : {kF32, kBF16}) {
    for (const DType param : {kF32, kBF16}) {
      for (const DType reduce : {kF32, kBF16}) {
        EngineOptions options = {
            .master_dtype = master, .param_dtype = param, .reduce_dtype = reduce};
        const bool all_float32 = master == kF32 && param == kF32 && reduce == kF32;
        if (options.Validate().ok() && !all_float32) choices.push_back(options);
      }
    }
  }
  return choices;
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
  // With casts on the way, and with a model that takes and writes what travels as it is.
  for (const int world_size : {1, 3, 8}) {
    for (const DType computes : {kF32, kBF16}) {
      for (EngineOptions types : DTypeChoices()) {
        cases.push_back({world_size, 3, types, 1, computes});
        types.sync_every_micro_batch = false;
        types.clip = kInfinity;
        cases.push_back({world_size, 2, types, 3, computes});
      }
    }
  }
  return cases;
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return absl::StrCat("Ranks", c.world_size, "Blocks", c.blocks,
                      c.options.reshard_after_forward ? "Reshard" : "Keep", "Prefetch",
                      c.options.prefetch, c.options.sync_every_micro_batch ? "Sync" : "NoSync",
                      c.options.clip > 0 ? "Clip" : "", "Micro", c.micro_batches,
                      c.options.master_dtype == kBF16 ? "MasterBFloat16" : "",
                      c.options.param_dtype == kBF16 ? "ParamBFloat16" : "",
                      c.options.reduce_dtype == kBF16 ? "ReduceBFloat16" : "",
                      c.computes == kBF16 ? "ModelBFloat16" : "");
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
  // Tokens 6, 0 and 6: every rank looks up 2 rows of 3 floats and 3 rows of 2, and whoever stores a
  // row sends it to all others.
  const int64_t rows = (2 * 3 + 3 * 2) * 4;
  for (const int n : {1, 2, 3, 5, 8}) {
    // Over all ranks a ring all-gather or reduce-scatter of S bytes sends (N-1) S. Blocks are
    // gathered for forward and for backward; the root, with which backward begins, once.
    EXPECT_EQ(BytesOfOneStep(n, {}, 1, Purpose::kParameter), (n - 1) * (2 * all - root + rows));
    EXPECT_EQ(BytesOfOneStep(n, {}, 1, Purpose::kGradient), (n - 1) * (all + rows));
    EXPECT_EQ(BytesOfOneStep(n, {}, 1, Purpose::kOptimizer), 0);
    // Kept from forward to backward, every unit is gathered once.
    EXPECT_EQ(BytesOfOneStep(n, {.reshard_after_forward = false}, 1, Purpose::kParameter),
              (n - 1) * (all + rows));
    // What stays, stays through all micro-batches of the step.
    EXPECT_EQ(BytesOfOneStep(n, {}, 3, Purpose::kParameter),
              (n - 1) * (root + 3 * 2 * (all - root) + 3 * rows));
    EXPECT_EQ(BytesOfOneStep(n, {.reshard_after_forward = false}, 3, Purpose::kParameter),
              (n - 1) * (all + 3 * rows));
    // With sync every micro-batch is reduced; without, only the last. Rows are always sent.
    EXPECT_EQ(BytesOfOneStep(n, {}, 3, Purpose::kGradient), 3 * (n - 1) * (all + rows));
    EXPECT_EQ(BytesOfOneStep(n, {.sync_every_micro_batch = false}, 3, Purpose::kGradient),
              (n - 1) * (all + 3 * rows));
  }
}

TEST(EngineBytes, OfWhatTravelsInBFloat16AreHalf) {
  for (const int n : {2, 3, 8}) {
    for (const EngineOptions& base : {EngineOptions{}, EngineOptions{.prefetch = 0},
                                      EngineOptions{.reshard_after_forward = false},
                                      EngineOptions{.sync_every_micro_batch = false}}) {
      const int64_t parameter = BytesOfOneStep(n, base, 2, Purpose::kParameter);
      const int64_t gradient = BytesOfOneStep(n, base, 2, Purpose::kGradient);
      EngineOptions options = base;
      options.param_dtype = kBF16;
      EXPECT_EQ(2 * BytesOfOneStep(n, options, 2, Purpose::kParameter), parameter);
      EXPECT_EQ(BytesOfOneStep(n, options, 2, Purpose::kGradient), gradient);
      options = base;
      options.reduce_dtype = kBF16;
      EXPECT_EQ(BytesOfOneStep(n, options, 2, Purpose::kParameter), parameter);
      EXPECT_EQ(2 * BytesOfOneStep(n, options, 2, Purpose::kGradient), gradient);
    }
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
        EXPECT_NEAR(whole[e], -kLr * coefficient * GradientOf(id, e), 1e-7);
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
    bool looked_up;
    const char* named;
    const char* rank;  // that stores the element's row, of 3
  };
  const std::vector<Broken> cases = {{kTable, 20, false, "table (unit root)", "rank 2"},
                                     {kTable, 20, true, "table (unit root)", "rank 2"},
                                     {kTable, 0, true, "table (unit root)", "rank 0"},
                                     {1, 0, false, "bias (unit root)", "rank 0"},
                                     {kPlaces, 5, true, "places (unit root)", "rank 1"},
                                     {5, 1, false, "w1 (unit h.1)", "rank 0"},
                                     {5, 11, false, "w1 (unit h.1)", "rank 2"},
                                     {6, 1, false, "b1 (unit h.1)", "rank 1"}};
  for (const double clip : {1.0, kInfinity}) {
    for (const float value : kNotFinite) {
      for (const Broken& broken : cases) {
        OnRanks(3, [&](int rank, ProcessGroup& group) {
          ToyRank toy(group, {.clip = clip}, 2);
          ASSERT_TRUE(toy.engine->Start(1).ok());
          if (rank == 1) {
            toy.model.SetPoison({broken.parameter, broken.element, value, broken.looked_up});
          }
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
    ToyModel::Weights weights;
    for (int r = 0; r < 3; ++r) weights.Add(toy.batch, 1.0 / 3);
    toy.model.Expect(0, weights);
    if (rank == 1) toy.model.SetPoison({5, 1, kNotFinite[0]});
    const auto result = toy.Step(/*global_tokens=*/3);
    ASSERT_FALSE(result.ok());
    EXPECT_NE(result.status().message().find("w1 (unit h.1)"), absl::string_view::npos);
    ASSERT_TRUE(toy.engine->Synchronize().ok());
    const ParameterTable& table = toy.engine->table();
    for (int u = 0; u < table.num_units(); ++u) {
      for (const ParameterShard& shard : toy.engine->unit(u).parameters) {
        const int64_t first = shard.rows.begin * table[shard.id].spec.cols;
        for (int64_t e = 0; e < shard.value.size(); ++e) {
          if (shard.id == 5 && first + e == 1) {
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

TEST(Engine, RanksThatSendDifferentTypesAreRefusedByName) {
  for (const EngineOptions& types : DTypeChoices()) {
    OnRanks(3, [&](int rank, ProcessGroup& group) {
      ToyRank toy(group, rank == 1 ? types : EngineOptions{}, 1);
      const absl::Status status = toy.engine->Start(1);
      ASSERT_FALSE(status.ok());
      EXPECT_NE(status.message().find("rank(s) 1"), absl::string_view::npos) << status;
    });
  }
}

TEST(Engine, TypesThatMakeNoSenseAreRefused) {
  const absl::Status wider = EngineOptions{.master_dtype = kBF16, .param_dtype = kF32}.Validate();
  EXPECT_EQ(wider.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(wider.message().find("--param_dtype=bfloat16"), absl::string_view::npos) << wider;
  for (DType EngineOptions::*dtype :
       {&EngineOptions::master_dtype, &EngineOptions::param_dtype, &EngineOptions::reduce_dtype}) {
    EngineOptions options;
    options.*dtype = DType::kInt32;
    EXPECT_EQ(options.Validate().code(), absl::StatusCode::kInvalidArgument);
  }
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
        const ToyBatch data = {{6, 0, 6}};
        const Batch batch = data.batch();
        ASSERT_TRUE(engine->TrainStep({&batch, 1}, 1, {}, nullptr).ok());
        EXPECT_EQ(plan.peak().bytes, allocator.peak().bytes);
      });
    }
  }
}

TEST(Engine, PlannedMemoryIsWhatARunAllocatesInEveryType) {
  for (const EngineOptions& options : DTypeChoices()) {
    for (const DType computes : {kF32, kBF16}) {
      OnRanks(3, [&](int, ProcessGroup& group) {
        const auto device = *CreateDevice(Backend::kCpu, 1);
        ToyModel model(4, false, options, computes);
        Sgd sgd(*device, false);
        Allocator plan = Allocator::ForPlan();
        ASSERT_TRUE(Engine::Create(options, model, group, *device, plan, &sgd).ok());
        ToyRank toy(group, options, 4, false, computes);
        ASSERT_TRUE(toy.engine->Start(1).ok());
        ASSERT_TRUE(toy.Step().ok());
        EXPECT_EQ(plan.peak().bytes, toy.allocator.peak().bytes);
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

// What a step of one rank and 3 blocks enqueues, in that order.
std::vector<RecordedOp> OpsOfOneStep(const EngineOptions& options) {
  auto groups = *CreateThreadRanks(1, {});
  const auto device = *CreateDevice(Backend::kCpu, 1);
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  Allocator allocator(device.get());
  ToyModel model(3, false);
  Sgd sgd(*device, false);
  const auto engine = *Engine::Create(options, model, *groups[0], *device, allocator, &sgd);
  EXPECT_TRUE(engine->Start(1).ok());
  const ToyBatch data = {{6, 0, 6}};
  const Batch batch = data.batch();
  EXPECT_TRUE(engine->TrainStep({&batch, 1}, 1, {}, nullptr).ok());
  EXPECT_TRUE(engine->Synchronize().ok());

  std::vector<RecordedOp> ops;
  static auto* const units = new std::set<std::string>;  // outlive the recorder
  for (const StreamRecord* stream : recorder.streams()) {
    for (RecordedOp op : stream->ops()) {
      op.unit = &*units->insert(*op.unit).first;
      ops.push_back(std::move(op));
    }
  }
  std::sort(ops.begin(), ops.end(),
            [](const RecordedOp& a, const RecordedOp& b) { return a.id < b.id; });
  return ops;
}

// By unit: the sending of rows, all-gathers, forward and backward.
std::vector<std::string> OrderOfOneStep(const EngineOptions& options) {
  std::vector<std::string> names;
  for (const RecordedOp& op : OpsOfOneStep(options)) {
    if (op.call.purpose == Purpose::kParameter && op.call.calls > 0) {
      names.push_back(absl::StrCat(op.call.operation, " ", *op.unit));
    } else if (op.info.name == "check" && op.phase != Phase::kBackward) {
      names.push_back(absl::StrCat("forward ", *op.unit));
    } else if (op.info.name == "backward") {
      names.push_back(absl::StrCat("backward ", *op.unit));
    }
  }
  return names;
}

TEST(Engine, GathersAheadIntoFreeSlotsAndWhatStaysAsSoonAsItIsNext) {
  using Order = std::vector<std::string>;
  EXPECT_EQ(OrderOfOneStep({.prefetch = 0}),
            (Order{"all_to_all root", "all_to_all root", "forward root",  //
                   "all_gather h.0", "forward h.0",                       //
                   "all_gather h.1", "forward h.1",                       //
                   "all_gather h.2", "forward h.2",                       //
                   "all_gather root", "forward root", "backward root",    //
                   "all_gather h.2", "backward h.2",                      //
                   "all_gather h.1", "backward h.1",                      //
                   "all_gather h.0", "backward h.0", "backward root"}));
  // Two slots: while the first and the last stage compute, which use none, both are filled. The
  // root, larger than a block, comes in two pieces, the first between the blocks.
  EXPECT_EQ(OrderOfOneStep({.prefetch = 1}),
            (Order{"all_to_all root", "all_to_all root",                     //
                   "all_gather h.0",  "all_gather h.1",  "all_gather root",  //
                   "forward root",    "forward h.0",                         //
                   "all_gather h.2",  "all_gather root", "forward h.1",      //
                   "all_gather h.2",  "forward h.2",                         //
                   "all_gather h.1",  "forward root",    "backward root",    //
                   "backward h.2",                                           //
                   "all_gather h.0",  "backward h.1",    "backward h.0",    "backward root"}));
  EXPECT_EQ(OrderOfOneStep({.reshard_after_forward = false}),
            (Order{"all_to_all root", "all_to_all root", "all_gather h.0", "all_gather h.1",
                   "all_gather h.2", "all_gather root", "forward root", "forward h.0",
                   "forward h.1", "forward h.2", "forward root", "backward root", "backward h.2",
                   "backward h.1", "backward h.0", "backward root"}));
}

TEST(Engine, AHeadLargerThanABlockIsReducedBetweenTheBlocksAndWhollyBeforeItsRowsAreAdded) {
  std::vector<std::string> calls;
  for (const RecordedOp& op : OpsOfOneStep({})) {
    if (op.call.purpose != Purpose::kGradient || op.call.calls == 0) continue;
    EXPECT_EQ(op.phase, Phase::kBackward);
    calls.push_back(absl::StrCat(op.call.operation, " ", *op.unit));
  }
  EXPECT_EQ(calls,
            (std::vector<std::string>{"reduce_scatter root", "reduce_scatter h.2",
                                      "reduce_scatter h.1", "reduce_scatter root",
                                      "reduce_scatter h.0", "all_to_all root", "all_to_all root"}));
}

TEST(Engine, WithoutPrefetchNothingIsGatheredBeforeTheStageBeforeIsDone) {
  std::vector<RecordedOp> computed;
  int gathers = 0;
  for (const RecordedOp& op : OpsOfOneStep({.prefetch = 0})) {
    if (op.info.name == "check" || op.info.name == "backward") computed.push_back(op);
    if (op.call.operation != "all_gather" || op.call.purpose != Purpose::kParameter) continue;
    ++gathers;
    for (const RecordedOp& before : computed) EXPECT_LE(before.end, op.begin) << *op.unit;
  }
  EXPECT_EQ(gathers, 7);  // three blocks for forward and for backward, and the root
}

TEST(Engine, EvaluatesWithoutAnOptimizer) {
  OnRanks(3, [&](int rank, ProcessGroup& group) {
    const auto device = *CreateDevice(Backend::kCpu, 1);
    ToyModel model(2, true);
    Allocator allocator(device.get());
    const auto engine = *Engine::Create({}, model, group, *device, allocator, nullptr);
    ASSERT_TRUE(engine->Start(1).ok());
    const std::vector<ToyBatch> data = {DataOf(rank, 0), DataOf(rank, 1), DataOf(rank, 2)};
    const std::vector<Batch> batches = {data[0].batch(), data[1].batch(), data[2].batch()};
    // Weights 1 + (rank + micro-batch) % 2: 1 2 1, 2 1 2, 1 2 1.
    EXPECT_EQ(*engine->Evaluate(batches), 13);
    EXPECT_EQ(model.wrong(), 0);
    EXPECT_EQ(allocator.peak()[MemoryPurpose::kGradients], 0);
  });
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
