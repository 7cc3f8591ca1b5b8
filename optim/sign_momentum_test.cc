// Sign momentum against the same formula in float64, and the promises every optimizer makes.
#include "optim/sign_momentum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "collectives/dtype.h"
#include "optim/kernels.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/sharding.h"

namespace dim0 {
namespace {

using Values = std::vector<float>;

constexpr SignMomentumConfig kConfig = {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1};

// Rows that no world size here divides, and fewer rows than ranks.
std::vector<UnitSpec> Units() {
  return {{"h.0",
           {{"up", 7, 5, ParameterRole::kMatrix, {}}, {"row", 1, 9, ParameterRole::kMatrix, {}}}},
          {"h.1", {{"bias", 4, 1, ParameterRole::kVector, {}}}}};
}

Values Random(int64_t size, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Values values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

struct Parameters {
  std::vector<Values> values, momenta;  // whole, by parameter
};

Values Initial(const ParameterTable& table, int id) { return Random(table[id].spec.size(), id); }
Values Gradient(const ParameterTable& table, int step, int id) {
  return Random(table[id].spec.size(), 100 * step + id);
}

// The ranks one after another: the optimizer knows no others. Learning rates are halved at step 2.
Parameters RunSteps(int world_size, int steps, float gradient_scale) {
  const ParameterTable table(Units());
  Parameters whole;
  for (int id = 0; id < table.size(); ++id) {
    whole.values.push_back(Initial(table, id));
    whole.momenta.push_back(Values(table[id].spec.size()));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    const auto device = *CreateDevice(Backend::kCpu, 1);
    Allocator allocator(device.get());
    SignMomentum optimizer(kConfig, CreateOptimizerKernels(*device),
                           device->NewStream("optimizer"));
    std::vector<int> ids(table.size());
    for (int id = 0; id < table.size(); ++id) ids[id] = id;
    EXPECT_TRUE(optimizer.Plan(table, ids, {&allocator, rank, world_size, {0, 1}}).ok());

    std::vector<Unit> units(table.num_units());
    std::vector<Values> gradients(table.size());
    for (int id = 0; id < table.size(); ++id) {
      const ParameterSpec& spec = table[id].spec;
      const RowRange rows = RowsOfRank(spec.rows, world_size, rank);
      gradients[id].resize(spec.size());
      Unit& unit = units[table[id].unit];
      unit.index = table[id].unit;
      const int64_t first = rows.begin * spec.cols;
      unit.parameters.push_back({id, rows,
                                 F32(whole.values[id].data() + first, rows.size(), spec.cols),
                                 F32(gradients[id].data() + first, rows.size(), spec.cols)});
    }
    for (int step = 1; step <= steps; ++step) {
      for (int id = 0; id < table.size(); ++id) {
        const Values gradient = Gradient(table, step, id);
        std::copy(gradient.begin(), gradient.end(), gradients[id].begin());
      }
      for (const Unit& unit : units) {
        const StepParams params = {
            .step = step, .lr_scale = step == 2 ? 0.5 : 1, .gradient_scale = &gradient_scale};
        EXPECT_TRUE(optimizer.Update(unit, params, Event()).ok());
      }
      for (const Unit& unit : units) EXPECT_TRUE(optimizer.Updated(unit).Wait().ok());
    }
    for (const StateTensor& state : optimizer.State()) {
      EXPECT_EQ(state.name, "momentum");
      const ParameterSpec& spec = table[state.parameter].spec;
      const int64_t first = RowsOfRank(spec.rows, world_size, rank).begin * spec.cols;
      std::copy_n(state.shard.f32(), state.shard.size(),
                  whole.momenta[state.parameter].begin() + first);
    }
  }
  return whole;
}

TEST(SignMomentum, AgreesWithFloat64OnEveryWorldSize) {
  constexpr int kSteps = 5;
  constexpr double kScale = 0.25;
  const ParameterTable table(Units());
  for (const int world_size : {1, 2, 3}) {
    const Parameters actual = RunSteps(world_size, kSteps, kScale);
    for (int id = 0; id < table.size(); ++id) {
      const Values initial = Initial(table, id);
      std::vector<double> w(initial.begin(), initial.end()), v(w.size());
      for (int step = 1; step <= kSteps; ++step) {
        const Values gradient = Gradient(table, step, id);
        const double lr = kConfig.lr * (step == 2 ? 0.5 : 1);
        for (size_t i = 0; i < w.size(); ++i) {
          v[i] = kConfig.momentum * v[i] + (1 - kConfig.momentum) * kScale * gradient[i];
          const double sign = v[i] > 0 ? 1 : -1;
          w[i] = w[i] * (1 - lr * kConfig.weight_decay) - lr * sign;
        }
      }
      for (size_t i = 0; i < w.size(); ++i) {
        EXPECT_NEAR(actual.values[id][i], w[i], 1e-6);
        EXPECT_NEAR(actual.momenta[id][i], v[i], 1e-6);
      }
    }
  }
}

TEST(SignMomentum, IsBitIdenticalForEveryWorldSize) {
  const Parameters one = RunSteps(1, 3, 1);
  for (const int world_size : {2, 3, 8}) {
    EXPECT_EQ(RunSteps(world_size, 3, 1).values, one.values);
    EXPECT_EQ(RunSteps(world_size, 3, 1).momenta, one.momenta);
  }
}

TEST(SignMomentum, AGradientScaleThatIsNotFiniteChangesNothing) {
  const ParameterTable table(Units());
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float scale : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
    const Parameters after = RunSteps(2, 2, scale);
    for (int id = 0; id < table.size(); ++id) {
      EXPECT_EQ(after.values[id], Initial(table, id));
      EXPECT_EQ(after.momenta[id], Values(table[id].spec.size(), 0.0f));
    }
  }
}

TEST(SignMomentum, AZeroMomentumTakesNoStep) {
  const ParameterTable table(Units());
  const Parameters after = RunSteps(1, 1, 0);
  // What is left is the decay.
  for (int id = 0; id < table.size(); ++id) {
    const Values initial = Initial(table, id);
    for (size_t i = 0; i < initial.size(); ++i) {
      EXPECT_NEAR(after.values[id][i], initial[i] * (1 - kConfig.lr * kConfig.weight_decay), 1e-6);
    }
  }
}

// A tensor of the kernel's, in any types.
template <typename Value, typename Gradient>
struct Typed {
  std::vector<Value> value;
  std::vector<Gradient> gradient;
  Values momentum;
  std::vector<BFloat16> copy;

  // Sizes of which some are several threads' work.
  static std::vector<Typed> Several() {
    std::vector<Typed> tensors;
    for (const int64_t size : {0, 3, 70'001, 1, 50'000}) {
      Typed tensor;
      for (const float value : Random(size, 1)) tensor.value.push_back(Value(value));
      for (const float value : Random(size, 2)) tensor.gradient.push_back(Gradient(value));
      tensor.momentum = Random(size, 3);
      tensor.copy.resize(size);
      tensors.push_back(std::move(tensor));
    }
    return tensors;
  }
};

template <typename T>
Tensor TensorOf(std::vector<T>& values) {
  return {values.data(), std::is_same_v<T, float> ? DType::kFloat32 : DType::kBFloat16,
          static_cast<int64_t>(values.size()), 1};
}

constexpr float kScale = 0.5f;

template <typename Value, typename Gradient>
std::vector<Typed<Value, Gradient>> Updated(int threads, bool copied) {
  auto tensors = Typed<Value, Gradient>::Several();
  const auto device = *CreateDevice(Backend::kCpu, threads);
  const auto kernels = CreateOptimizerKernels(*device);
  const auto stream = device->NewStream("optimizer");
  std::vector<SignMomentumTensor> arguments;
  for (auto& tensor : tensors) {
    arguments.push_back({.value = TensorOf(tensor.value),
                         .gradient = TensorOf(tensor.gradient),
                         .momentum = TensorOf(tensor.momentum),
                         .copy = copied ? TensorOf(tensor.copy) : Tensor{}});
  }
  kernels->SignMomentum(*stream, std::move(arguments),
                        {.lr = kConfig.lr,
                         .momentum = kConfig.momentum,
                         .weight_decay = kConfig.weight_decay,
                         .gradient_scale = &kScale});
  EXPECT_TRUE(stream->Synchronize().ok());
  return tensors;
}

// `rounding`: half a unit in the last place of Value at 1.
template <typename Value, typename Gradient>
void ExpectKernelAgreesWithFloat64(double rounding, bool copied) {
  const auto before = Typed<Value, Gradient>::Several();
  const auto after = Updated<Value, Gradient>(3, copied);
  for (size_t t = 0; t < before.size(); ++t) {
    for (size_t i = 0; i < before[t].value.size(); ++i) {
      const double g = kScale * static_cast<double>(static_cast<float>(before[t].gradient[i]));
      const double v = kConfig.momentum * before[t].momentum[i] + (1 - kConfig.momentum) * g;
      const double w =
          static_cast<float>(before[t].value[i]) * (1 - kConfig.lr * kConfig.weight_decay) -
          kConfig.lr * (v > 0 ? 1 : -1);
      ASSERT_NEAR(after[t].momentum[i], v, 1e-6) << t << ", " << i;
      ASSERT_NEAR(static_cast<float>(after[t].value[i]), w, rounding * std::abs(w) + 1e-6)
          << t << ", " << i;
      const double rounded = copied ? w : 0;
      ASSERT_NEAR(static_cast<float>(after[t].copy[i]), rounded, 0x1p-8 * std::abs(rounded) + 1e-6)
          << t << ", " << i;
    }
  }
}

TEST(SignMomentum, TheKernelAgreesWithFloat64InEveryType) {
  ExpectKernelAgreesWithFloat64<float, float>(0x1p-24, false);
  ExpectKernelAgreesWithFloat64<float, float>(0x1p-24, true);
  ExpectKernelAgreesWithFloat64<float, BFloat16>(0x1p-24, true);
  ExpectKernelAgreesWithFloat64<BFloat16, float>(0x1p-8, false);
  ExpectKernelAgreesWithFloat64<BFloat16, BFloat16>(0x1p-8, false);
}

TEST(SignMomentum, IsTheSameToTheBitOnAnyNumberOfThreads) {
  const auto one = Updated<float, float>(1, false);
  for (const int threads : {2, 3, 4}) {
    const auto many = Updated<float, float>(threads, false);
    for (size_t t = 0; t < one.size(); ++t) {
      EXPECT_EQ(many[t].value, one[t].value) << threads;
      EXPECT_EQ(many[t].momentum, one[t].momentum) << threads;
    }
  }
}

TEST(SignMomentum, RanksThatPlanDifferentRunsHashDifferently) {
  const ParameterTable table(Units());
  const auto hash = [&](const SignMomentumConfig& config, const std::vector<int>& ids, int rank) {
    const auto device = *CreateDevice(Backend::kCpu, 1);
    Allocator plan = Allocator::ForPlan();
    SignMomentum optimizer(config, CreateOptimizerKernels(*device), device->NewStream("optimizer"));
    EXPECT_TRUE(optimizer.Plan(table, ids, {&plan, rank, 2, {0, 1}}).ok());
    return optimizer.PlanHash();
  };
  const uint64_t expected = hash(kConfig, {0, 1, 2}, 0);
  EXPECT_EQ(hash(kConfig, {0, 1, 2}, 1), expected);
  EXPECT_NE(hash(kConfig, {0, 1}, 0), expected);
  SignMomentumConfig other = kConfig;
  other.momentum = 0.95;
  EXPECT_NE(hash(other, {0, 1, 2}, 0), expected);
}

}  // namespace
}  // namespace dim0
