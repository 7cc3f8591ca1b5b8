// The order in which Muon's pipeline does things, seen by kernels that compute nothing and wait.
#include "optim/muon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/process_group.h"
#include "optim/kernels.h"
#include "runtime/allocator.h"
#include "runtime/device.h"

namespace dim0 {
namespace {

constexpr auto kDeadline = std::chrono::seconds(60);

// Counts what has begun: one Momentum, one Normalize and one ApplyUpdate a matrix.
class Probe : public OptimizerKernels {
 public:
  struct Counts {
    int momentum = 0, normalize = 0, apply = 0;
  };

  // Blocks until `reached` holds of the counts; false after a minute.
  template <typename Predicate>
  bool WaitFor(Predicate reached) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kDeadline, [&] { return reached(counts_); });
  }
  Counts counts() {
    std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }
  // Runs inside every Normalize, with the number of those before it.
  std::function<void(int)> during_normalize = [](int) {};

  void Momentum(Stream& stream, const Tensor&, const Tensor&, float, bool, const float*,
                const Tensor&) override {
    Count(stream, &Counts::momentum);
  }
  void ApplyUpdate(Stream& stream, const Tensor&, const Tensor&, const Tensor&, float, float,
                   const float*) override {
    Count(stream, &Counts::apply);
  }
  DType matrix_dtype() const override { return DType::kFloat32; }
  int64_t matrix_elements_at_once() const override { return 0; }
  void Normalize(Stream& stream, int64_t, const Tensor&, double, const Tensor&) override {
    const int before = normalized_++;
    Count(stream, &Counts::normalize);
    stream.Enqueue({.name = "wait"}, [this, before](const OpContext&) {
      during_normalize(before);
      return absl::OkStatus();
    });
  }
  void AdamW(Stream&, std::vector<AdamWTensor>, const AdamWArguments&) override {}
  void SignMomentum(Stream&, std::vector<SignMomentumTensor>,
                    const SignMomentumArguments&) override {}
  void Rmnp(Stream&, std::vector<RmnpTensor>, const RmnpArguments&) override {}
  void RmnpRowSquares(Stream&, std::vector<RmnpTensor>, const RmnpArguments&) override {}
  void RmnpApply(Stream&, std::vector<RmnpTensor>, const RmnpArguments&) override {}
  void SymmetricProduct(Stream&, int64_t, float, const Tensor&, bool, float, const Tensor&,
                        const Tensor&) override {}
  void SymmetricMatMul(Stream&, int64_t, float, const Tensor&, const Tensor&, float, const Tensor&,
                       const Tensor&) override {}
  void MatMul(Stream&, int64_t, float, const Tensor&, bool, const Tensor&, bool, float,
              const Tensor&, const Tensor&) override {}
  void AddToDiagonal(Stream&, int64_t, const Tensor&, float) override {}
  void Copy(Stream&, const Tensor&, const Tensor&) override {}

 private:
  void Count(Stream& stream, int Counts::*which) {
    stream.Enqueue({.name = "count"}, [this, which](const OpContext&) {
      std::lock_guard<std::mutex> lock(mutex_);
      ++(counts_.*which);
      changed_.notify_all();
      return absl::OkStatus();
    });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Counts counts_;
  int normalized_ = 0;  // of the host thread
};

// Muon on one rank over units of matrices of 4 rows by 4.
class MuonPipeline : public testing::TestWithParam<MuonSchedule> {
 protected:
  void Plan(const std::vector<int>& matrices_of_units) {
    std::vector<UnitSpec> specs;
    for (const int matrices : matrices_of_units) {
      UnitSpec& unit = specs.emplace_back();
      unit.name = "u" + std::to_string(specs.size());
      for (int i = 0; i < matrices; ++i) {
        unit.parameters.push_back(
            {unit.name + "." + std::to_string(i), 4, 4, ParameterRole::kMatrix, {}});
      }
    }
    const ParameterTable table(specs);
    muon_ =
        std::make_unique<Muon>(MuonConfig{.schedule = GetParam()}, probe_, *device_, *groups_[0]);
    std::vector<int> ids, order;
    for (int id = 0; id < table.size(); ++id) ids.push_back(id);
    for (int u = 0; u < table.num_units(); ++u) order.push_back(u);
    ASSERT_TRUE(muon_->Plan(table, ids, {&allocator_, 0, 1, order}).ok());
    values_.resize(table.size(), std::vector<float>(32));
    units_.resize(table.num_units());
    for (int id = 0; id < table.size(); ++id) {
      Unit& unit = units_[table[id].unit];
      unit.index = table[id].unit;
      unit.parameters.push_back(
          {id, {0, 4}, F32(values_[id].data(), 4, 4), F32(values_[id].data() + 16, 4, 4)});
    }
  }
  void Update(int unit, const Event& ready) {
    ASSERT_TRUE(muon_->Update(units_[unit], {.gradient_scale = &scale_}, ready).ok());
  }

  const std::shared_ptr<Probe> probe_ = std::make_shared<Probe>();
  const std::unique_ptr<Device> device_ = *CreateDevice(Backend::kCpu, 1);
  const std::vector<std::unique_ptr<ProcessGroup>> groups_ = *CreateThreadRanks(1, {});
  Allocator allocator_{device_.get()};
  const float scale_ = 1;
  std::vector<std::vector<float>> values_;
  std::vector<Unit> units_;
  std::unique_ptr<Muon> muon_;  // goes first: its destructor waits for its streams
};
INSTANTIATE_TEST_SUITE_P(Schedules, MuonPipeline,
                         testing::Values(MuonSchedule::kOwner, MuonSchedule::kRedundant,
                                         MuonSchedule::kBroadcast));

TEST_P(MuonPipeline, GathersTheNextMatrixAndNoMoreWhileOneIsOrthogonalized) {
  constexpr int kMatrices = 5;
  Plan({kMatrices});
  bool gathered_ahead = true, bounded = true, scattered_behind = true;
  probe_->during_normalize = [&](int k) {
    const int ahead = std::min(k + 2, kMatrices);
    gathered_ahead &= probe_->WaitFor([&](const auto& c) { return c.momentum >= ahead; });
    scattered_behind &= probe_->WaitFor([&](const auto& c) { return c.apply >= k; });
    // Time for a gather too many to show itself.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    bounded &= probe_->counts().momentum <= ahead;
  };
  Update(0, Event());
  ASSERT_TRUE(muon_->Updated(units_[0]).Wait().ok());
  EXPECT_TRUE(gathered_ahead);
  EXPECT_TRUE(scattered_behind);
  EXPECT_TRUE(bounded);
  EXPECT_EQ(probe_->counts().apply, kMatrices);
}

TEST_P(MuonPipeline, StartsWithTheUnitsWhoseGradientsAreThere) {
  Plan({2, 1});
  Update(0, Event());
  // Before the second unit's gradients are even announced.
  EXPECT_TRUE(probe_->WaitFor([](const auto& c) { return c.apply == 2; }));
  Update(1, Event());
  EXPECT_TRUE(muon_->Updated(units_[1]).Wait().ok());
}

TEST_P(MuonPipeline, AUnitIsNewBeforeLaterUnitsAre) {
  Plan({2, 1});
  const auto backward = device_->NewStream("backward");
  std::mutex mutex;
  std::condition_variable changed;
  bool released = false;
  backward->Enqueue({.name = "long"}, [&](const OpContext&) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, kDeadline, [&] { return released; });
    return absl::OkStatus();
  });
  Update(0, Event());
  Update(1, backward->Record());
  EXPECT_TRUE(muon_->Updated(units_[0]).Wait().ok());
  EXPECT_EQ(probe_->counts().apply, 2);
  {
    std::lock_guard<std::mutex> lock(mutex);
    released = true;
  }
  changed.notify_all();
  EXPECT_TRUE(muon_->Updated(units_[1]).Wait().ok());
  EXPECT_EQ(probe_->counts().apply, 3);
}

}  // namespace
}  // namespace dim0
