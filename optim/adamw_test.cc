// AdamW's kernel on many tensors at once, against float64. Agreement with PyTorch is in
// optim_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "optim/kernels.h"
#include "runtime/device.h"

namespace dim0 {
namespace {

using Values = std::vector<float>;

struct Parameter {
  Values value, gradient, first_moment, second_moment;
  double weight_decay = 0;
};

// Sizes around vector lengths, and some for which several threads are woken; half of them decay.
std::vector<Parameter> Parameters() {
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  std::vector<int64_t> sizes = {0, 1280, 70'001, 3, 1280, 50'000};
  for (int64_t size = 1; size <= 40; ++size) sizes.push_back(size);
  std::vector<Parameter> parameters;
  for (const int64_t size : sizes) {
    Parameter parameter;
    for (int64_t i = 0; i < size; ++i) {
      parameter.value.push_back(normal(generator));
      parameter.gradient.push_back(normal(generator));
      parameter.first_moment.push_back(normal(generator));
      parameter.second_moment.push_back(std::abs(normal(generator)));
    }
    if (parameters.size() % 2 == 0) parameter.weight_decay = 0.1;
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

std::vector<Parameter> Updated(std::vector<Parameter> parameters, const AdamWArguments& arguments,
                               int threads) {
  const auto device = *CreateDevice(Backend::kCpu, threads);
  const auto kernels = CreateOptimizerKernels(*device);
  const auto stream = device->NewStream("optimizer");
  std::vector<AdamWTensor> tensors;
  for (Parameter& parameter : parameters) {
    const auto size = static_cast<int64_t>(parameter.value.size());
    tensors.push_back({.value = F32(parameter.value.data(), size),
                       .gradient = F32(parameter.gradient.data(), size),
                       .first_moment = F32(parameter.first_moment.data(), size),
                       .second_moment = F32(parameter.second_moment.data(), size),
                       .weight_decay = parameter.weight_decay});
  }
  kernels->AdamW(*stream, std::move(tensors), arguments);
  EXPECT_TRUE(stream->Synchronize().ok());
  return parameters;
}

const float kGradientScale = 0.5f;
const AdamWArguments kArguments = {.lr = 0.01,
                                   .beta1 = 0.9,
                                   .beta2 = 0.95,
                                   .eps = 1e-8,
                                   .step = 3,
                                   .gradient_scale = &kGradientScale};

TEST(AdamWKernel, UpdatesManyTensorsInOneOpAsFloat64Does) {
  const std::vector<Parameter> before = Parameters();
  const std::vector<Parameter> after = Updated(before, kArguments, 2);
  const auto& [lr, beta1, beta2, eps, step, scale] = kArguments;
  for (size_t p = 0; p < before.size(); ++p) {
    for (size_t i = 0; i < before[p].value.size(); ++i) {
      const double g = static_cast<double>(*scale) * before[p].gradient[i];
      const double m = beta1 * before[p].first_moment[i] + (1 - beta1) * g;
      const double v = beta2 * before[p].second_moment[i] + (1 - beta2) * g * g;
      const double w = before[p].value[i] * (1 - lr * before[p].weight_decay) -
                       lr * (m / (1 - std::pow(beta1, step))) /
                           (std::sqrt(v / (1 - std::pow(beta2, step))) + eps);
      ASSERT_NEAR(after[p].first_moment[i], m, 1e-6) << p << ", " << i;
      ASSERT_NEAR(after[p].second_moment[i], v, 1e-6 * (1 + v)) << p << ", " << i;
      ASSERT_NEAR(after[p].value[i], w, 1e-6 * (1 + std::abs(w))) << p << ", " << i;
    }
  }
}

TEST(AdamWKernel, IsTheSameToTheBitOnAnyNumberOfThreadsAndTensorByTensor) {
  const std::vector<Parameter> before = Parameters();
  const std::vector<Parameter> one = Updated(before, kArguments, 1);
  for (const int threads : {2, 3, 4}) {
    const std::vector<Parameter> many = Updated(before, kArguments, threads);
    for (size_t p = 0; p < before.size(); ++p) EXPECT_EQ(many[p].value, one[p].value) << threads;
  }
  for (size_t p = 0; p < before.size(); ++p) {
    EXPECT_EQ(Updated({before[p]}, kArguments, 1)[0].value, one[p].value);
  }
}

}  // namespace
}  // namespace dim0
