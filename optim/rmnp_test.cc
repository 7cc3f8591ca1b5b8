// RMNP's kernels and its layouts, against float64 and against each other.
#include "optim/rmnp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "collectives/process_group.h"
#include "optim/kernels.h"
#include "optim/rmnp_layouts.h"
#include "runtime/allocator.h"
#include "runtime/device.h"

namespace dim0 {
namespace {

using Values = std::vector<float>;

Values Random(int64_t size, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Values values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

// A problem: whole matrices, their first values, and their gradients by step.
struct Problem {
  std::vector<MatrixShape> shapes;
  std::vector<Values> values;
  std::vector<std::vector<Values>> gradients;  // [step][matrix]
};

Problem RandomProblem(const std::vector<MatrixShape>& shapes, int steps = 3) {
  Problem problem{shapes, {}, std::vector<std::vector<Values>>(steps)};
  int seed = 0;
  for (const MatrixShape& shape : shapes) {
    problem.values.push_back(Random(shape.rows * shape.cols, ++seed));
    for (auto& step : problem.gradients) step.push_back(Random(shape.rows * shape.cols, ++seed));
  }
  return problem;
}

// Rows and columns fewer than ranks, rows longer and shorter than a vector, rows that span several
// ranks of the flat layout, matrices of one row, one column and one element.
Problem UnevenProblem() {
  return RandomProblem({{21, 7}, {28, 7}, {1, 33}, {5, 1}, {7, 131}, {1, 1}, {3, 300}, {16, 16}});
}

// The definition, unsharded, in float64.
std::vector<Values> Reference(const Problem& problem, const RmnpConfig& config) {
  std::vector<Values> results;
  for (size_t i = 0; i < problem.shapes.size(); ++i) {
    const auto [rows, cols] = problem.shapes[i];
    const double scale = std::sqrt(std::max(1.0, 1.0 * rows / cols));
    std::vector<double> w(problem.values[i].begin(), problem.values[i].end());
    std::vector<double> v(w.size()), u(w.size());
    for (const auto& gradients : problem.gradients) {
      for (int64_t row = 0; row < rows; ++row) {
        double squares = 0;
        for (int64_t k = row * cols; k < (row + 1) * cols; ++k) {
          const double g = gradients[i][k];
          v[k] = config.momentum * v[k] + g;
          u[k] = config.nesterov ? g + config.momentum * v[k] : v[k];
          squares += u[k] * u[k];
        }
        const double divisor = std::pow(std::max(std::sqrt(squares), config.eps), 1 - config.power);
        for (int64_t k = row * cols; k < (row + 1) * cols; ++k) {
          w[k] = (1 - config.lr * config.weight_decay) * w[k] - config.lr * scale * u[k] / divisor;
        }
      }
    }
    results.emplace_back(w.begin(), w.end());
  }
  return results;
}

enum class Layout { kRowBlocks, kColumns, kFlat };

// Cut points that follow no rule: a rank may hold many rows, few, or none.
std::vector<std::vector<int64_t>> UnevenCuts(const std::vector<MatrixShape>& shapes,
                                             int world_size) {
  std::mt19937 generator(7);
  std::vector<std::vector<int64_t>> cuts;
  for (const MatrixShape& shape : shapes) {
    std::vector<int64_t> cut = {0, shape.rows};
    for (int rank = 1; rank < world_size; ++rank) cut.push_back(generator() % (shape.rows + 1));
    std::sort(cut.begin(), cut.end());
    cuts.push_back(cut);
  }
  return cuts;
}

RmnpLayout Make(Layout layout, const std::vector<MatrixShape>& shapes, int world_size, int rank) {
  switch (layout) {
    case Layout::kRowBlocks:
      return RowBlockLayout(shapes, UnevenCuts(shapes, world_size), rank);
    case Layout::kColumns:
      return ColumnLayout(shapes, world_size, rank);
    case Layout::kFlat:
      return FlatLayout(shapes, world_size, rank);
  }
  return {};
}

// Calls body(position in the rank's buffers, matrix, element of the matrix) for all that a rank
// holds.
template <typename Body>
void ForEachElement(const RmnpLayout& layout, const std::vector<MatrixShape>& shapes, Body body) {
  for (const RmnpPart& part : layout.parts) {
    for (int64_t row = 0; row < part.rows; ++row) {
      for (int64_t col = 0; col < part.cols; ++col) {
        body(part.offset + row * part.cols + col, part.matrix,
             (part.first_row + row) * shapes[part.matrix].cols + part.first_col + col);
      }
    }
  }
}

struct Outcome {
  std::vector<Values> values;
  std::vector<int64_t> optimizer_bytes;  // by rank
  std::vector<int64_t> other_bytes;      // by rank
};

// Values are NaN where no rank holds an element.
Outcome Update(const Problem& problem, const RmnpConfig& config, Layout kind, int world_size,
               int threads_per_rank = 1, float gradient_scale = 1) {
  auto groups = *CreateThreadRanks(world_size, {.timeout = absl::Seconds(60)});
  Outcome outcome;
  for (const Values& values : problem.values) {
    outcome.values.emplace_back(values.size(), std::numeric_limits<float>::quiet_NaN());
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto device = *CreateDevice(Backend::kCpu, threads_per_rank);
      Allocator allocator(device.get());
      const std::shared_ptr<Stream> stream = device->NewStream("optimizer");
      RmnpLayout layout = Make(kind, problem.shapes, world_size, rank);
      // Row blocks get nothing to communicate with.
      auto communicator = kind == Layout::kRowBlocks ? nullptr : *groups[rank]->Open("rmnp");
      const auto rmnp =
          *ShardedRmnp::Create(layout, problem.shapes, config, allocator, *device,
                               CreateOptimizerKernels(*device), stream, std::move(communicator));
      Values value(layout.elements), gradient(layout.elements), momentum(layout.elements);
      ForEachElement(layout, problem.shapes, [&](int64_t at, int matrix, int64_t element) {
        value[at] = problem.values[matrix][element];
      });
      for (size_t step = 0; step < problem.gradients.size(); ++step) {
        ForEachElement(layout, problem.shapes, [&](int64_t at, int matrix, int64_t element) {
          gradient[at] = problem.gradients[step][matrix][element];
        });
        rmnp->Step({value.data(), gradient.data(), momentum.data()},
                   {.step = static_cast<int64_t>(step) + 1, .gradient_scale = &gradient_scale},
                   Event());
        ASSERT_TRUE(stream->Synchronize().ok());
      }
      ForEachElement(layout, problem.shapes, [&](int64_t at, int matrix, int64_t element) {
        outcome.values[matrix][element] = value[at];
      });
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const auto& group : groups) {
    const ByteLedger& ledger = group->ledger();
    outcome.optimizer_bytes.push_back(ledger.bytes(Purpose::kOptimizer));
    outcome.other_bytes.push_back(ledger.bytes(Purpose::kParameter) +
                                  ledger.bytes(Purpose::kGradient) +
                                  ledger.bytes(Purpose::kControl));
  }
  return outcome;
}

void ExpectClose(const std::vector<Values>& actual, const std::vector<Values>& expected,
                 double tolerance = 2e-6) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].size(), expected[i].size());
    for (size_t k = 0; k < actual[i].size(); ++k) {
      ASSERT_NEAR(actual[i][k], expected[i][k], tolerance * (1 + std::abs(expected[i][k])))
          << "matrix " << i << ", element " << k;
    }
  }
}

const RmnpConfig kConfig = {.lr = 0.05, .weight_decay = 0.1};

TEST(Rmnp, AgreesWithFloat64ForEveryPowerWithAndWithoutNesterov) {
  const Problem problem = UnevenProblem();
  for (const double power : {0.0, 0.125, 0.5}) {
    for (const bool nesterov : {true, false}) {
      RmnpConfig config = kConfig;
      config.power = power;
      config.nesterov = nesterov;
      ExpectClose(Update(problem, config, Layout::kRowBlocks, 1).values,
                  Reference(problem, config));
    }
  }
}

TEST(Rmnp, AgreesWithFloat64AtRowLengthsAroundTheVectorLength) {
  std::vector<MatrixShape> shapes;
  for (int64_t cols = 1; cols <= 50; ++cols) shapes.push_back({3, cols});
  const Problem problem = RandomProblem(shapes);
  ExpectClose(Update(problem, kConfig, Layout::kRowBlocks, 1).values, Reference(problem, kConfig));
}

TEST(Rmnp, UpdatesLongRowsAndColumns) {
  const Problem problem = RandomProblem({{1, 100'003}, {40'001, 1}}, 2);
  const RmnpConfig config = {.lr = 1e-3, .weight_decay = 0.1};  // the column's scale is 200
  ExpectClose(Update(problem, config, Layout::kRowBlocks, 1, 2).values, Reference(problem, config));
}

TEST(Rmnp, DividesRowsShorterThanEpsByEps) {
  const Problem problem = UnevenProblem();
  RmnpConfig config = kConfig;
  for (const double power : {0.0, 0.125}) {
    config.power = power;
    config.eps = 20;  // above the norm of short rows and below that of long ones
    const std::vector<Values> expected = Reference(problem, config);
    ExpectClose(Update(problem, config, Layout::kRowBlocks, 1).values, expected);
    ExpectClose(Update(problem, config, Layout::kColumns, 3).values, expected);
  }
}

TEST(Rmnp, ARowWithoutGradientStaysAsItIs) {
  Problem problem = RandomProblem({{6, 20}, {4, 3}});
  for (auto& step : problem.gradients) {
    std::fill_n(step[0].begin() + 2 * 20, 20, 0.0f);
    std::fill(step[1].begin(), step[1].end(), 0.0f);
  }
  for (const double eps : {1e-12, 0.0}) {
    for (const double power : {0.0, 0.125}) {
      const RmnpConfig config = {.lr = 0.05, .eps = eps, .power = power};
      for (const Layout layout : {Layout::kRowBlocks, Layout::kColumns, Layout::kFlat}) {
        const Outcome outcome = Update(problem, config, layout, 3);
        for (int64_t k = 2 * 20; k < 3 * 20; ++k) {
          EXPECT_EQ(outcome.values[0][k], problem.values[0][k]);
        }
        EXPECT_NE(outcome.values[0][0], problem.values[0][0]);
        EXPECT_EQ(outcome.values[1], problem.values[1]);
      }
    }
  }
}

TEST(Rmnp, ARowTooShortForFloat32SquaresTakesNoLongerAStepThanOthers) {
  Problem problem = RandomProblem({{6, 20}, {16, 16}, {3, 300}}, 1);  // scales are 1
  for (Values& values : problem.values) std::fill(values.begin(), values.end(), 0.0f);
  const RmnpConfig config = {.lr = 1, .eps = 0};
  for (const float length : {1e-18f, 1e-19f, 1e-20f, 1e-22f, 1e-23f, 1e-25f, 1e-40f}) {
    for (const Layout layout : {Layout::kRowBlocks, Layout::kColumns, Layout::kFlat}) {
      const Outcome outcome = Update(problem, config, layout, 2, 1, length);
      for (size_t i = 0; i < problem.shapes.size(); ++i) {
        const int64_t cols = problem.shapes[i].cols;
        for (int64_t row = 0; row < problem.shapes[i].rows; ++row) {
          double squares = 0;
          for (int64_t k = row * cols; k < (row + 1) * cols; ++k) {
            squares += std::pow(double{outcome.values[i][k]}, 2);
          }
          EXPECT_LE(std::sqrt(squares), 1 + 1e-5) << length << ", matrix " << i << ", row " << row;
        }
      }
    }
  }
}

TEST(Rmnp, ALearningRateOf0ChangesNothing) {
  Problem problem = RandomProblem({{6, 20}, {4, 3}});
  for (auto& step : problem.gradients) std::fill(step[1].begin(), step[1].end(), 0.0f);
  for (const double power : {0.0, 0.125}) {
    const RmnpConfig config = {.lr = 0, .eps = 0, .weight_decay = 0.1, .power = power};
    EXPECT_EQ(Update(problem, config, Layout::kRowBlocks, 2).values, problem.values);
  }
}

TEST(Rmnp, ARowIsTheSameToTheBitWhereverItIsCutAndOnAnyNumberOfThreads) {
  // Enough for three threads of one rank.
  const Problem problem =
      RandomProblem({{3, 1}, {201, 257}, {1, 40}, {33, 1280}, {5, 5120}, {7, 9}, {11, 131}}, 2);
  const Outcome one = Update(problem, kConfig, Layout::kRowBlocks, 1);
  for (const int world_size : {1, 2, 3, 4, 8}) {
    for (const int threads : {1, 2, 3}) {
      EXPECT_EQ(Update(problem, kConfig, Layout::kRowBlocks, world_size, threads).values,
                one.values)
          << world_size << " ranks of " << threads << " threads";
    }
  }
}

TEST(Rmnp, AGradientScaleThatIsNotFiniteChangesNothing) {
  const Problem problem = UnevenProblem();
  for (const Layout layout : {Layout::kRowBlocks, Layout::kColumns, Layout::kFlat}) {
    EXPECT_EQ(Update(problem, kConfig, layout, 3, 1, std::numeric_limits<float>::infinity()).values,
              problem.values);
  }
}

class Layouts : public testing::TestWithParam<std::tuple<Layout, int>> {
 protected:
  Layout layout() const { return std::get<0>(GetParam()); }
  int world_size() const { return std::get<1>(GetParam()); }
};

std::string NameOf(const testing::TestParamInfo<std::tuple<Layout, int>>& info) {
  const char* const names[] = {"RowBlocks", "Columns", "Flat"};
  return names[static_cast<int>(std::get<0>(info.param))] + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Ranks, Layouts,
                         testing::Combine(testing::Values(Layout::kRowBlocks, Layout::kColumns,
                                                          Layout::kFlat),
                                          testing::Values(1, 2, 3, 4, 8)),
                         NameOf);

TEST_P(Layouts, HoldEveryElementOnce) {
  const Problem problem = UnevenProblem();
  std::set<std::pair<int, int64_t>> held;
  int64_t elements = 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    const RmnpLayout held_here = Make(layout(), problem.shapes, world_size(), rank);
    std::set<int64_t> places;
    ForEachElement(held_here, problem.shapes, [&](int64_t at, int matrix, int64_t element) {
      places.insert(at);
      held.insert({matrix, element});
      ++elements;
    });
    EXPECT_EQ(static_cast<int64_t>(places.size()), held_here.elements);
    if (held_here.elements > 0) {
      EXPECT_EQ(*places.begin(), 0);
      EXPECT_EQ(*places.rbegin(), held_here.elements - 1);
    }
  }
  int64_t all = 0;
  for (const MatrixShape& shape : problem.shapes) all += shape.rows * shape.cols;
  EXPECT_EQ(static_cast<int64_t>(held.size()), all);
  EXPECT_EQ(elements, all);
}

TEST_P(Layouts, AgreeWithTheUnshardedUpdateInFloat64) {
  const Problem problem = UnevenProblem();
  for (const double power : {0.0, 0.125}) {
    RmnpConfig config = kConfig;
    config.power = power;
    ExpectClose(Update(problem, config, layout(), world_size()).values, Reference(problem, config));
  }
}

TEST_P(Layouts, AgreeWithTheUnshardedUpdateOnTwoThreadsPerRank) {
  const Problem problem = RandomProblem({{90, 700}, {10, 2000}}, 2);
  ExpectClose(Update(problem, kConfig, layout(), world_size(), 2).values,
              Reference(problem, kConfig));
}

// Rows whose elements lie on more than one rank, found element by element.
int64_t CutRows(const std::vector<MatrixShape>& shapes, int world_size) {
  int64_t elements = 0;
  for (const MatrixShape& shape : shapes) elements += shape.rows * shape.cols;
  const int64_t chunk = (elements + world_size - 1) / world_size;
  int64_t cut = 0, position = 0;
  for (const MatrixShape& shape : shapes) {
    for (int64_t row = 0; row < shape.rows; ++row) {
      std::set<int64_t> ranks;
      for (int64_t col = 0; col < shape.cols; ++col) ranks.insert(position++ / chunk);
      cut += ranks.size() > 1;
    }
  }
  return cut;
}

TEST_P(Layouts, SendTheSumsOfTheRowsThatAreCutAndNothingElseToTheByte) {
  const Problem problem = UnevenProblem();
  int64_t sums = 0;
  if (layout() == Layout::kColumns) {
    for (const MatrixShape& shape : problem.shapes) sums += shape.rows;
  } else if (layout() == Layout::kFlat) {
    sums = CutRows(problem.shapes, world_size());
  }
  const Outcome outcome = Update(problem, kConfig, layout(), world_size());
  const int64_t steps = problem.gradients.size(), ranks = world_size();
  // An all-reduce's chunks differ by at most one element, the longer ones first; a rank sends all
  // chunks but its own, and then all but its successor's.
  const auto chunk = [&](int64_t rank) { return sums / ranks + (rank < sums % ranks ? 1 : 0); };
  int64_t total = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t floats = 2 * sums - chunk(rank) - chunk((rank + 1) % ranks);
    EXPECT_EQ(outcome.optimizer_bytes[rank], steps * 4 * floats) << "rank " << rank;
    EXPECT_EQ(outcome.other_bytes[rank], 0);
    total += outcome.optimizer_bytes[rank];
  }
  EXPECT_EQ(total, steps * 2 * (ranks - 1) * 4 * sums);
}

TEST(FlatLayout, SharesARowThatSpansSeveralRanksOnce) {
  // Elements 0 to 10 over 4 ranks: 3, 3, 3 and 2 of them; the row of 9 lies on all four.
  const std::vector<MatrixShape> shapes = {{1, 1}, {1, 9}, {1, 1}};
  for (int rank = 0; rank < 4; ++rank) {
    const RmnpLayout layout = FlatLayout(shapes, 4, rank);
    EXPECT_EQ(layout.shared_sums, 1);
    EXPECT_EQ(layout.elements, rank < 3 ? 3 : 2);
    for (const RmnpPart& part : layout.parts) {
      EXPECT_EQ(part.first_sum, part.matrix == 1 ? 0 : -1);
    }
  }
}

TEST(FlatLayout, SharesNothingWhereBoundariesFallBetweenRows) {
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(FlatLayout({{4, 8}, {2, 16}}, 4, rank).shared_sums, 0);
  }
}

TEST(FlatLayout, LeavesTheLastRanksEmptyWhenElementsRunOut) {
  // ceil(5 / 4) = 2: ranks hold 2, 2, 1 and 0 elements.
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(FlatLayout({{5, 1}}, 4, rank).elements, std::vector<int>({2, 2, 1, 0})[rank]);
  }
}

TEST(ColumnLayout, SharesOneFloatForEachRowOfGpt2Large) {
  std::vector<MatrixShape> shapes;
  for (int layer = 0; layer < 36; ++layer) {
    shapes.insert(shapes.end(), {{3840, 1280}, {1280, 1280}, {5120, 1280}, {1280, 5120}});
  }
  EXPECT_EQ(ColumnLayout(shapes, 8, 3).shared_sums, 414'720);
  EXPECT_LE(FlatLayout(shapes, 8, 3).shared_sums, 7);
}

}  // namespace
}  // namespace dim0
