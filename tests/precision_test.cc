// A step of GPT-2 whose parameters and gradients travel in bfloat16, against the same step by hand:
// the model itself run on rounded weights, and its gradients rounded and added here.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "collectives/process_group.h"
#include "model/gpt2.h"
#include "optim/factory.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/engine.h"
#include "runtime/host_copy.h"
#include "runtime/sharding.h"

namespace dim0 {
namespace {

using Floats = std::vector<float>;

constexpr Gpt2Config kTiny = {.layers = 2, .width = 24, .heads = 3, .vocab = 37, .positions = 12};
constexpr int64_t kSequences = 2, kSeqLen = 11;
constexpr int64_t kTokens = kSequences * kSeqLen;
constexpr DType kBF16 = DType::kBFloat16;
constexpr int kWte = 0, kWpe = 1;  // the root unit's

float Rounded(float value) { return static_cast<float>(BFloat16(value)); }
Floats Rounded(Floats values) {
  for (float& value : values) value = Rounded(value);
  return values;
}

// Rank r's tokens, some of them also other ranks'.
struct Data {
  explicit Data(int rank) {
    for (int64_t i = 0; i < kTokens; ++i) {
      tokens.push_back((i * i + 5 * rank) % kTiny.vocab);
      targets.push_back((tokens.back() + 1 + i) % kTiny.vocab);
    }
  }
  Batch batch() const { return {kSequences, kSeqLen, tokens.data(), targets.data()}; }
  std::vector<int32_t> tokens, targets;
};

// What one rank's forward and backward on whole weights give.
struct Pass {
  double loss_sum = 0;
  std::vector<Floats> gradients;                       // by parameter; of the first stage nothing
  std::map<int, std::map<int32_t, Floats>> looked_up;  // wte's and wpe's, by row
};

class HandRun {
 public:
  HandRun() : device_(*CreateDevice(Backend::kCpu, 1)), allocator_(device_.get()) {
    EXPECT_TRUE(model_.Allocate(allocator_, kSequences, kSeqLen, /*training=*/true).ok());
  }

  Pass Run(const std::vector<Floats>& weights, const Batch& batch, float gradient_scale) {
    const ParameterTable table(model_.units());
    std::vector<std::vector<Tensor>> parameters(table.num_units()), gradients(table.num_units());
    for (int id = 0; id < table.size(); ++id) {
      const ParameterSpec& spec = table[id].spec;
      parameters[table[id].unit].push_back(Make(spec.rows, spec.cols));
      gradients[table[id].unit].push_back(Make(spec.rows, spec.cols));
      Fill(parameters[table[id].unit].back(), weights[id]);
    }
    std::vector<std::vector<int32_t>> uses = model_.RowUses(batch), rows;
    std::vector<Tensor> tables, table_gradients;
    for (int k : {kWte, kWpe}) {
      const std::set<int32_t> distinct(uses[k].begin(), uses[k].end());
      rows.emplace_back(distinct.begin(), distinct.end());
      const int64_t count = rows[k].size(), cols = kTiny.width;
      tables.push_back(Make(count, cols));
      table_gradients.push_back(Make(count, cols));
      Floats values;
      for (const int32_t row : rows[k]) {
        const auto begin = weights[k].begin() + row * cols;
        values.insert(values.end(), begin, begin + cols);
      }
      Fill(tables.back(), values);
      for (int32_t& use : uses[k]) {
        use = std::lower_bound(rows[k].begin(), rows[k].end(), use) - rows[k].begin();
      }
    }
    const Tensor loss = Make(2, 1);  // a float64
    const auto stages = model_.stages();
    const int last = static_cast<int>(stages.size()) - 1;
    model_.Begin(*stream_, batch, uses, gradient_scale);
    model_.Forward(0, tables, true, static_cast<double*>(loss.data), *stream_);
    for (int s = 1; s <= last; ++s) {
      model_.Forward(s, parameters[stages[s].unit], true, static_cast<double*>(loss.data),
                     *stream_);
    }
    for (int s = last; s > 0; --s) {
      const int unit = stages[s].unit;
      model_.Backward(s, parameters[unit], gradients[unit], false, *stream_);
    }
    model_.Backward(0, {}, table_gradients, false, *stream_);

    Pass pass;
    device_->CopyToHost(*stream_, &pass.loss_sum, loss.data, sizeof(double));
    for (int id = 0; id < table.size(); ++id) {
      pass.gradients.push_back(Read(gradients[table[id].unit][table[id].position]));
    }
    for (int k : {kWte, kWpe}) {
      const Floats values = Read(table_gradients[k]);
      for (size_t i = 0; i < rows[k].size(); ++i) {
        const auto begin = values.begin() + i * kTiny.width;
        pass.looked_up[k][rows[k][i]] = Floats(begin, begin + kTiny.width);
      }
    }
    return pass;
  }

 private:
  Tensor Make(int64_t rows, int64_t cols) {
    buffers_.push_back(
        *allocator_.Allocate(MemoryPurpose::kActivations, rows * cols * sizeof(float)));
    return F32(buffers_.back().f32(), rows, cols);
  }
  void Fill(const Tensor& tensor, const Floats& values) {
    EXPECT_TRUE(CopyFloatsFromHost(*device_, *stream_, values, tensor).ok());
  }
  Floats Read(const Tensor& tensor) {
    Floats values(tensor.size());
    EXPECT_TRUE(CopyFloatsToHost(*device_, *stream_, tensor, absl::MakeSpan(values)).ok());
    return values;
  }

  const std::unique_ptr<Device> device_;
  Allocator allocator_;
  std::vector<Buffer> buffers_;
  Gpt2 model_{kTiny, /*recompute=*/false, *device_};
  const std::unique_ptr<Stream> stream_ = device_->NewStream("compute");
};

// What a training step of all ranks gave: whole parameters before it, and gradients.
struct Step {
  double loss = 0, evaluated = 0;
  std::vector<Floats> weights, gradients;
};

Step TrainStep(int world_size, const EngineOptions& options) {
  Step step;
  const ParameterTable table(Gpt2Units(kTiny));
  step.weights.resize(table.size());
  for (int id = 0; id < table.size(); ++id) step.gradients.emplace_back(table[id].spec.size());
  auto groups = *CreateThreadRanks(world_size, {.timeout = absl::Seconds(60)});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = *CreateDevice(Backend::kCpu, 1);
      Allocator allocator(device.get());
      Gpt2 model(kTiny, false, *device, options.param_dtype, options.reduce_dtype);
      const auto optimizer = *CreateOptimizer({.name = "adamw"}, *device, *groups[rank]);
      ASSERT_TRUE(model.Allocate(allocator, kSequences, kSeqLen, true).ok());
      const auto engine =
          *Engine::Create(options, model, *groups[rank], *device, allocator, optimizer.get());
      ASSERT_TRUE(engine->Start(7).ok());
      for (int id = 0; id < table.size(); ++id) {
        Floats whole(rank == 0 ? table[id].spec.size() : 0);
        ASSERT_TRUE(engine->GatherToRankZero(id, absl::MakeSpan(whole)).ok());
        if (rank == 0) step.weights[id] = whole;
      }
      const Data data(rank);
      const Batch batch = data.batch();
      const auto evaluated = engine->Evaluate({&batch, 1});
      ASSERT_TRUE(evaluated.ok()) << evaluated.status();
      const auto result = engine->TrainStep({&batch, 1}, world_size * kTokens, {}, nullptr);
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_TRUE(engine->Synchronize().ok());
      if (rank == 0) {
        step.evaluated = *evaluated;
        step.loss = result->loss;
      }
      const auto stream = device->NewStream("read");
      for (int id = 0; id < table.size(); ++id) {
        const ParameterShard& shard = engine->unit(table[id].unit).parameters[table[id].position];
        EXPECT_EQ(shard.gradient.dtype, options.reduce_dtype);
        const absl::Span<float> rows =
            absl::MakeSpan(step.gradients[id])
                .subspan(shard.rows.begin * shard.gradient.cols, shard.gradient.size());
        ASSERT_TRUE(CopyFloatsToHost(*device, *stream, shard.gradient, rows).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return step;
}

TEST(Precision, AStepThatTravelsInBFloat16IsTheOneByHandToTheBit) {
  const ParameterTable table(Gpt2Units(kTiny));
  for (const int world_size : {1, 2, 3}) {
    for (const DType reduce : {DType::kFloat32, kBF16}) {
      const Step step = TrainStep(world_size, {.param_dtype = kBF16, .reduce_dtype = reduce});
      std::vector<Floats> weights;
      bool all_short = true;
      for (const Floats& whole : step.weights) {
        weights.push_back(Rounded(whole));
        all_short = all_short && weights.back() == whole;
      }
      EXPECT_FALSE(all_short);

      const auto sent = [&](float value) { return reduce == kBF16 ? Rounded(value) : value; };
      double loss_sum = 0;
      std::vector<Floats> sums;
      std::vector<Pass> passes;
      HandRun by_hand;
      for (int rank = 0; rank < world_size; ++rank) {
        const Data data(rank);
        passes.push_back(
            by_hand.Run(weights, data.batch(), static_cast<float>(1.0 / (world_size * kTokens))));
        loss_sum += passes.back().loss_sum;
      }
      EXPECT_DOUBLE_EQ(step.evaluated, loss_sum);
      EXPECT_DOUBLE_EQ(step.loss, loss_sum / (world_size * kTokens));
      for (int id = 0; id < table.size(); ++id) {
        Floats expected(table[id].spec.size());
        for (size_t i = 0; i < expected.size(); ++i) {
          float sum = sent(passes[0].gradients[id][i]);
          for (int rank = 1; rank < world_size; ++rank) sum += sent(passes[rank].gradients[id][i]);
          expected[i] = sent(sum);
        }
        for (const Pass& pass : passes) {
          const auto rows = pass.looked_up.find(id);
          if (rows == pass.looked_up.end()) continue;
          for (const auto& [row, gradient] : rows->second) {
            for (int64_t c = 0; c < kTiny.width; ++c) {
              float& element = expected[row * kTiny.width + c];
              element = sent(element + sent(gradient[c]));
            }
          }
        }
        EXPECT_EQ(step.gradients[id], expected) << table[id].spec.name;
      }
    }
  }
}

}  // namespace
}  // namespace dim0
