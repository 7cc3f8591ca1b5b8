// GPT-2 as a whole: logits, loss and every gradient against PyTorch's, and against finite
// differences of its own loss; recomputation, accumulation and the decoder against the plain pass.
#include "model/gpt2.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/gpt2_decoder.h"
#include "runtime/device.h"
#include "runtime/file.h"
#include "runtime/safetensors.h"

namespace dim0 {
namespace {

constexpr Gpt2Config kTiny = {.layers = 2, .width = 24, .heads = 3, .vocab = 37, .positions = 12};
constexpr int64_t kBatch = 2, kSeqLen = 11;

class TinyGpt2 : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  TinyGpt2() : file_(*SafetensorsFile::Open("tests/fixtures/gpt2_tiny.safetensors")) {}

  void SetUp() override { Make(std::get<0>(GetParam()), std::get<1>(GetParam())); }

  void Make(int threads, bool recompute) {
    device_ = *CreateDevice(Backend::kCpu, threads);
    allocator_ = std::make_unique<Allocator>(device_.get());
    stream_ = device_->NewStream("s");
    model_ = std::make_unique<Gpt2>(kTiny, recompute, *device_);
    ASSERT_TRUE(model_->Allocate(*allocator_, kBatch, kSeqLen, true).ok());
    for (const UnitSpec& unit : model_->units()) {
      values_.emplace_back();
      gradients_.emplace_back();
      parameter_views_.emplace_back();
      gradient_views_.emplace_back();
      for (const ParameterSpec& spec : unit.parameters) {
        values_.back().push_back(Read("param." + spec.name));
        gradients_.back().emplace_back(spec.size(), std::nanf(""));  // all must be written
      }
      for (size_t i = 0; i < unit.parameters.size(); ++i) {
        const ParameterSpec& spec = unit.parameters[i];
        parameter_views_.back().push_back(F32(values_.back()[i].data(), spec.rows, spec.cols));
        gradient_views_.back().push_back(F32(gradients_.back()[i].data(), spec.rows, spec.cols));
      }
    }
    tokens_ = ReadInts("tokens");
    targets_ = ReadInts("targets");
  }

  std::vector<float> Read(const std::string& name) const {
    const auto* tensor = file_.Find(name);
    EXPECT_NE(tensor, nullptr) << name;
    std::vector<float> values(tensor->elements);
    EXPECT_TRUE(file_.ReadFloats(*tensor, 0, absl::MakeSpan(values)).ok());
    return values;
  }
  std::vector<int32_t> ReadInts(const std::string& name) const {
    const auto* tensor = file_.Find(name);
    std::vector<int32_t> values(tensor->elements);
    std::memcpy(values.data(), tensor->data.data(), tensor->data.size());
    return values;
  }

  // Sum of the losses.
  double Forward(bool training) {
    double loss = 0;
    const Batch batch = {kBatch, kSeqLen, tokens_.data(), targets_.data()};
    const std::vector<std::vector<int32_t>> rows = model_->RowUses(batch);
    std::vector<std::vector<int32_t>> uses(rows.size());
    for (size_t k = 0; k < rows.size(); ++k) {
      distinct_[k] = std::set<int32_t>(rows[k].begin(), rows[k].end());
      for (const int32_t row : rows[k]) {
        uses[k].push_back(std::distance(distinct_[k].begin(), distinct_[k].find(row)));
      }
    }
    model_->Begin(*stream_, batch, uses, 1.0f / (kBatch * kSeqLen));
    // What the rows of logits have beyond the vocabulary may be anything.
    const Tensor logits = model_->logits();
    std::fill_n(logits.f32(), logits.size(), std::nanf(""));
    // The first stage's tables of the rows in use.
    std::vector<std::vector<float>> values(rows.size());
    std::vector<Tensor> tables;
    for (size_t k = 0; k < rows.size(); ++k) {
      for (const int32_t row : distinct_[k]) {
        const float* value = values_[0][k].data() + row * kTiny.width;
        values[k].insert(values[k].end(), value, value + kTiny.width);
      }
      tables.push_back(F32(values[k].data(), distinct_[k].size(), kTiny.width));
    }
    for (size_t s = 0; s < model_->stages().size(); ++s) {
      model_->Forward(s, s == 0 ? tables : parameter_views_[model_->stages()[s].unit], training,
                      &loss, *stream_);
    }
    EXPECT_TRUE(stream_->Synchronize().ok());
    return loss;
  }
  void Backward(bool accumulate) {
    for (int s = static_cast<int>(model_->stages().size()) - 1; s > 0; --s) {
      const int unit = model_->stages()[s].unit;
      model_->Backward(s, parameter_views_[unit], gradient_views_[unit], accumulate, *stream_);
    }
    std::vector<std::vector<float>> gradients;
    std::vector<Tensor> tables;
    for (const std::set<int32_t>& rows : distinct_) {
      gradients.emplace_back(rows.size() * kTiny.width, std::nanf(""));  // all must be written
      tables.push_back(F32(gradients.back().data(), rows.size(), kTiny.width));
    }
    model_->Backward(0, {}, tables, /*accumulate=*/false, *stream_);
    EXPECT_TRUE(stream_->Synchronize().ok());
    for (size_t k = 0; k < distinct_.size(); ++k) {
      const float* gradient = gradients[k].data();
      for (const int32_t row : distinct_[k]) {
        for (int64_t c = 0; c < kTiny.width; ++c) {
          gradients_[0][k][row * kTiny.width + c] += *gradient++;
        }
      }
    }
  }

  void ExpectGradients(double times) {
    for (size_t u = 0; u < model_->units().size(); ++u) {
      const UnitSpec& unit = model_->units()[u];
      for (size_t i = 0; i < unit.parameters.size(); ++i) {
        const std::vector<float> expected = Read("grad." + unit.parameters[i].name);
        double largest = 0;
        for (const float value : expected) largest = std::max<double>(largest, std::abs(value));
        for (size_t e = 0; e < expected.size(); ++e) {
          ASSERT_NEAR(gradients_[u][i][e], times * expected[e], times * (1e-5 * largest + 1e-7))
              << unit.parameters[i].name << "[" << e << "]";
        }
      }
    }
  }

  SafetensorsFile file_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Allocator> allocator_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Gpt2> model_;
  std::vector<std::vector<std::vector<float>>> values_, gradients_;
  std::vector<std::vector<Tensor>> parameter_views_, gradient_views_;
  std::vector<int32_t> tokens_, targets_;
  std::array<std::set<int32_t>, 2> distinct_;  // of the first stage's two lookups
};

TEST_P(TinyGpt2, LogitsAndLossAgreeWithPyTorch) {
  const double loss = Forward(false) / (kBatch * kSeqLen);
  EXPECT_NEAR(loss, Read("loss")[0], 1e-6 * Read("loss")[0]);
  const std::vector<float> expected = Read("logits");
  const Tensor logits = model_->logits();
  ASSERT_EQ(logits.rows, kBatch * kSeqLen);
  ASSERT_EQ(logits.cols, 64);
  for (int64_t n = 0; n < logits.rows; ++n) {
    for (int64_t v = 0; v < logits.cols; ++v) {
      const float logit = logits.f32()[n * logits.cols + v];
      if (v < kTiny.vocab) {
        ASSERT_NEAR(logit, expected[n * kTiny.vocab + v], 2e-5) << n << ", " << v;
      } else {
        ASSERT_TRUE(std::isnan(logit)) << n << ", " << v;
      }
    }
  }
  EXPECT_NEAR(Forward(true) / (kBatch * kSeqLen), Read("loss")[0], 1e-6 * Read("loss")[0]);
}

TEST_P(TinyGpt2, EveryGradientAgreesWithPyTorch) {
  Forward(true);
  Backward(false);
  ExpectGradients(1);
}

TEST_P(TinyGpt2, AccumulatedGradientsAreTheSum) {
  Forward(true);
  Backward(false);
  Forward(true);
  Backward(true);
  ExpectGradients(2);
}

TEST_P(TinyGpt2, DirectionalDerivativesAgreeWithFiniteDifferences) {
  Forward(true);
  Backward(false);
  constexpr double kStep = 1e-2;
  for (size_t u = 0; u < values_.size(); ++u) {
    for (size_t i = 0; i < values_[u].size(); ++i) {
      // Along the gradient itself, of length 1, so that the derivative is the gradient's norm.
      double squares = 0;
      for (const float g : gradients_[u][i]) squares += double{g} * g;
      const double norm = std::sqrt(squares);
      const std::vector<float> saved = values_[u][i];
      const auto loss_at = [&](double t) {
        for (size_t e = 0; e < saved.size(); ++e) {
          values_[u][i][e] = saved[e] + static_cast<float>(t * gradients_[u][i][e] / norm);
        }
        const double loss = Forward(false) / (kBatch * kSeqLen);
        values_[u][i] = saved;
        return loss;
      };
      const double slope = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      EXPECT_NEAR(slope, norm, 5e-3 * norm + 2e-5) << model_->units()[u].parameters[i].name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ThreadsAndRecompute, TinyGpt2,
                         testing::Combine(testing::Values(1, 3), testing::Bool()),
                         [](const auto& info) {
                           return "Threads" + std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "Recompute" : "Store");
                         });

using TinyGpt2Decoder = TinyGpt2;
INSTANTIATE_TEST_SUITE_P(One, TinyGpt2Decoder, testing::Values(std::tuple<int, bool>(2, false)));

// Saves the fixture's weights as a run does, with or without the prefix that some files have.
std::string SaveTiny(const std::string& name, const std::string& prefix,
                     const std::vector<std::vector<std::vector<float>>>& values) {
  const std::string folder = testing::TempDir() + "/" + name;
  std::filesystem::create_directories(folder);
  const std::vector<UnitSpec> units = Gpt2Units(kTiny);
  std::vector<TensorDescription> tensors;
  for (const UnitSpec& unit : units) {
    for (const ParameterSpec& spec : unit.parameters) {
      std::vector<int64_t> shape = {spec.rows, spec.cols};
      if (spec.role == ParameterRole::kVector) shape = {spec.rows};
      if (Gpt2StoredTransposed(spec)) shape = {spec.cols, spec.rows};
      tensors.push_back({prefix + spec.name, StoredType::kF32, shape});
    }
  }
  auto writer = *SafetensorsWriter::Create(folder + "/model.safetensors", tensors);
  for (size_t u = 0; u < units.size(); ++u) {
    for (size_t i = 0; i < units[u].parameters.size(); ++i) {
      const ParameterSpec& spec = units[u].parameters[i];
      std::vector<float> stored = values[u][i];
      if (Gpt2StoredTransposed(spec)) {
        for (int64_t r = 0; r < spec.rows; ++r) {
          for (int64_t c = 0; c < spec.cols; ++c) {
            stored[c * spec.rows + r] = values[u][i][r * spec.cols + c];
          }
        }
      }
      EXPECT_TRUE(writer.AppendFloats(prefix + spec.name, stored).ok());
    }
  }
  EXPECT_TRUE(writer.Commit().ok());
  EXPECT_TRUE(WriteFileAtomically(folder + "/config.json", Gpt2ConfigJson(kTiny)).ok());
  return folder;
}

TEST_P(TinyGpt2Decoder, LogitsAgreeWithPyTorchTokenByToken) {
  const std::vector<float> expected = Read("logits");
  for (const char* prefix : {"", "transformer."}) {
    const std::string folder = SaveTiny("decoder", prefix, values_);
    for (int64_t b = 0; b < kBatch; ++b) {
      const auto decoder = Gpt2Decoder::Load(folder, *device_);
      ASSERT_TRUE(decoder.ok()) << decoder.status();
      for (int64_t t = 0; t < kSeqLen; ++t) {
        const auto logits = (*decoder)->Next(tokens_[b * kSeqLen + t]);
        ASSERT_TRUE(logits.ok());
        for (int64_t v = 0; v < kTiny.vocab; ++v) {
          ASSERT_NEAR((*logits)[v], expected[(b * kSeqLen + t) * kTiny.vocab + v], 2e-5);
        }
      }
    }
  }
}

TEST_P(TinyGpt2Decoder, GoesOnPastItsPositionsFromTheLaterHalf) {
  const std::string folder = SaveTiny("decoder_long", "", values_);
  const auto decoder = *Gpt2Decoder::Load(folder, *device_);
  const auto fresh = *Gpt2Decoder::Load(folder, *device_);
  std::vector<float> last;
  for (int i = 0; i <= kTiny.positions; ++i) {
    const auto logits = decoder->Next(i % kTiny.vocab);
    ASSERT_TRUE(logits.ok());
    last.assign(logits->begin(), logits->end());
  }
  absl::Span<const float> expected;
  for (int i = kTiny.positions / 2; i <= kTiny.positions; ++i) {
    expected = *fresh->Next(i % kTiny.vocab);
  }
  EXPECT_EQ(last, std::vector<float>(expected.begin(), expected.end()));
}

TEST_P(TinyGpt2Decoder, BadFilesAndTokensAreErrorsThatSayWhat) {
  const std::string folder = SaveTiny("decoder_bad", "", values_);
  const auto decoder = *Gpt2Decoder::Load(folder, *device_);
  EXPECT_FALSE(decoder->Next(kTiny.vocab).ok());
  EXPECT_FALSE(decoder->Next(-1).ok());
  Gpt2Config other = kTiny;
  other.vocab = 38;
  ASSERT_TRUE(WriteFileAtomically(folder + "/config.json", Gpt2ConfigJson(other)).ok());
  EXPECT_NE(Gpt2Decoder::Load(folder, *device_).status().message().find("wte.weight"),
            absl::string_view::npos);
  for (const char* bad : {"", "{", "[]", "{\"n_layer\": \"two\"}"}) {
    ASSERT_TRUE(WriteFileAtomically(folder + "/config.json", bad).ok());
    EXPECT_NE(Gpt2Decoder::Load(folder, *device_).status().message().find("config.json"),
              absl::string_view::npos);
  }
  EXPECT_FALSE(Gpt2Decoder::Load(testing::TempDir() + "/nothing", *device_).ok());
}

TEST(Gpt2Presets, HaveThePublishedSizes) {
  const auto count = [](const char* name) {
    return ParameterTable(Gpt2Units(*Gpt2Preset(name))).elements();
  };
  EXPECT_EQ(count("gpt2"), 124'439'808);
  EXPECT_EQ(count("gpt2-medium"), 354'823'168);
  EXPECT_EQ(count("gpt2-large"), 774'030'080);
  EXPECT_EQ(count("gpt2-xl"), 1'557'611'200);
  const ParameterTable large(Gpt2Units(*Gpt2Preset("gpt2-large")));
  EXPECT_EQ(large.unit_elements(0), 65'642'240);
  EXPECT_EQ(large.unit_elements(1), 19'677'440);
  EXPECT_FALSE(Gpt2Preset("gpt5").ok());
}

TEST(Gpt2ModelFlops, AreThePublishedFigureForLarge) {
  const auto device = *CreateDevice(Backend::kCpu, 1);
  const Gpt2 model(*Gpt2Preset("gpt2-large"), false, *device);
  EXPECT_NEAR(model.FlopsPerToken(1024) * 1e-9, 4.93, 0.005);
}

TEST(Gpt2Config, RefusesShapesThatCannotBe) {
  Gpt2Config config = kTiny;
  config.heads = 5;
  EXPECT_NE(config.Validate().message().find("--width=24 is not divisible by --heads=5"),
            absl::string_view::npos);
  for (int64_t Gpt2Config::*field : {&Gpt2Config::layers, &Gpt2Config::width, &Gpt2Config::heads,
                                     &Gpt2Config::vocab, &Gpt2Config::positions}) {
    config = kTiny;
    config.*field = 0;
    EXPECT_FALSE(config.Validate().ok());
  }
}

TEST(Gpt2ConfigJson, ComesBackAsItWas) {
  const Gpt2Config back = *ParseGpt2ConfigJson(Gpt2ConfigJson(kTiny));
  EXPECT_EQ(back.layers, kTiny.layers);
  EXPECT_EQ(back.width, kTiny.width);
  EXPECT_EQ(back.heads, kTiny.heads);
  EXPECT_EQ(back.vocab, kTiny.vocab);
  EXPECT_EQ(back.positions, kTiny.positions);
}

TEST(Gpt2Memory, RowsOfLogitsTakeWholePiecesOf64Elements) {
  const auto device = *CreateDevice(Backend::kCpu, 1);
  const auto activations = [&](int64_t vocab) {
    Gpt2Config config = kTiny;
    config.vocab = vocab;
    Allocator plan = Allocator::ForPlan();
    Gpt2 model(config, false, *device);
    EXPECT_TRUE(model.Allocate(plan, 4, 8, true).ok());
    return plan.peak()[MemoryPurpose::kActivations];
  };
  EXPECT_EQ(activations(1), activations(64));
  EXPECT_EQ(activations(65) - activations(64), 4 * 8 * 64 * 4);
  EXPECT_EQ(activations(65), activations(128));
}

TEST(Gpt2Memory, RecomputeKeepsLessAndEvaluationLeast) {
  const auto device = *CreateDevice(Backend::kCpu, 1);
  const auto activations = [&](bool recompute, bool training) {
    Allocator plan = Allocator::ForPlan();
    Gpt2 model(*Gpt2Preset("gpt2"), recompute, *device);
    EXPECT_TRUE(model.Allocate(plan, 4, 512, training).ok());
    return plan.peak()[MemoryPurpose::kActivations];
  };
  EXPECT_LT(activations(true, true), activations(false, true));
  EXPECT_LT(activations(false, false), activations(true, true));
}

}  // namespace
}  // namespace dim0
