// A gradient that is not finite, met by the real optimizers in the middle of a run: the step ends
// with an error that names it, and neither parameters nor optimizer state have changed.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "collectives/process_group.h"
#include "optim/factory.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/engine.h"

namespace dim0 {
namespace {

std::vector<UnitSpec> Units() {
  const Init normal = {Init::Kind::kNormal, 1};
  return {{"root",
           {{"table", 7, 3, ParameterRole::kEmbedding, normal},
            {"gain", 3, 1, ParameterRole::kVector, normal}}},
          {"h.0",
           {{"up", 8, 3, ParameterRole::kMatrix, normal},
            {"bias", 8, 1, ParameterRole::kVector, normal}}},
          {"h.1", {{"down", 3, 8, ParameterRole::kMatrix, normal}}}};
}

// Gradients that differ from element to element; one of them as asked for.
class ToyModel : public Model {
 public:
  ToyModel() : units_(Units()), table_(units_) {
    for (int u = 0; u < table_.num_units(); ++u) stages_.push_back({units_[u].name, u});
  }
  absl::Span<const UnitSpec> units() const override { return units_; }
  absl::Span<const Stage> stages() const override { return stages_; }
  absl::Status Allocate(Allocator&, int64_t, int64_t, bool) override { return absl::OkStatus(); }
  double FlopsPerToken(int64_t) const override { return 1; }
  void Begin(Stream&, const Batch&, absl::Span<const std::vector<int32_t>>, float) override {}
  void Forward(int, absl::Span<const Tensor>, bool, double*, Stream&) override {}
  void Backward(int stage, absl::Span<const Tensor>, absl::Span<const Tensor> gradients, bool,
                Stream& stream) override {
    const std::vector<Tensor> targets(gradients.begin(), gradients.end());
    const int first = table_.first(stages_[stage].unit);
    stream.Enqueue({.name = "backward"}, [this, targets, first](const OpContext&) {
      for (size_t i = 0; i < targets.size(); ++i) {
        for (int64_t e = 0; e < targets[i].size(); ++e) {
          targets[i].f32()[e] = static_cast<float>((e * 5 + first) % 7 - 3);
        }
        if (first + static_cast<int>(i) == broken_) targets[i].f32()[element_] = value_;
      }
      return absl::OkStatus();
    });
  }
  void Break(int parameter, int64_t element, float value) {
    broken_ = parameter;
    element_ = element;
    value_ = value;
  }

 private:
  const std::vector<UnitSpec> units_;
  const ParameterTable table_;
  std::vector<Stage> stages_;
  int broken_ = -1;
  int64_t element_ = 0;
  float value_ = 0;
};

void OnRanks(int world_size, const std::function<void(int, ProcessGroup&)>& body) {
  auto groups = *CreateThreadRanks(world_size, {.timeout = absl::Seconds(60)});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { body(rank, *groups[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

// This rank's parameters and optimizer state.
std::vector<float> Snapshot(const Engine& engine, Optimizer& optimizer) {
  std::vector<Tensor> tensors;
  for (int u = 0; u < engine.table().num_units(); ++u) {
    for (const ParameterShard& shard : engine.unit(u).parameters) tensors.push_back(shard.value);
  }
  for (const StateTensor& state : optimizer.State()) tensors.push_back(state.shard);
  std::vector<float> values;
  for (const Tensor& tensor : tensors) {
    values.insert(values.end(), tensor.f32(), tensor.f32() + tensor.size());
  }
  return values;
}

class BrokenGradient : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Optimizers, BrokenGradient,
                         testing::Values("adamw", "rmnp", "muon", "sign_momentum"),
                         [](const auto& info) { return info.param; });

TEST_P(BrokenGradient, StopsTheStepByNameBeforeAnythingChanges) {
  const float infinity = std::numeric_limits<float>::infinity();
  const ParameterTable table(Units());
  for (const int world_size : {1, 2, 3}) {
    for (const double clip : {1.0, std::numeric_limits<double>::infinity()}) {
      for (const float value : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
        for (int id = 0; id < table.size(); ++id) {
          OnRanks(world_size, [&](int rank, ProcessGroup& group) {
            const auto device = *CreateDevice(Backend::kCpu, 1);
            Allocator allocator(device.get());
            ToyModel model;
            const auto optimizer = *CreateOptimizer({.name = GetParam()}, *device, group);
            const auto engine =
                *Engine::Create({.clip = clip}, model, group, *device, allocator, optimizer.get());
            ASSERT_TRUE(engine->Start(1).ok());
            const int32_t token = 0;
            const Batch batch = {1, 1, &token, nullptr};
            const auto step = [&](int64_t number) {
              return engine->TrainStep({&batch, 1}, 1, {.step = number}, nullptr).status();
            };
            const std::vector<float> start = Snapshot(*engine, *optimizer);
            ASSERT_TRUE(step(1).ok());
            ASSERT_TRUE(engine->Synchronize().ok());
            const std::vector<float> before = Snapshot(*engine, *optimizer);
            EXPECT_NE(before, start);

            // On one rank only, in the last row, which the last rank to have any stores.
            const ParameterSpec& spec = table[id].spec;
            if (rank == world_size - 1) model.Break(id, spec.size() - 1, value);
            int owner = 0;
            while (RowsOfRank(spec.rows, world_size, owner).end < spec.rows) ++owner;
            const absl::Status status = step(2);
            const std::string expected =
                absl::StrCat("the gradient of ", spec.name, " (unit ",
                             table.unit_name(table[id].unit), ") is not finite on rank ", owner);
            EXPECT_NE(status.message().find(expected), absl::string_view::npos) << status;
            // Muon's collectives may have been told to end by then.
            (void)engine->Synchronize();
            EXPECT_EQ(Snapshot(*engine, *optimizer), before) << spec.name;
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace dim0
