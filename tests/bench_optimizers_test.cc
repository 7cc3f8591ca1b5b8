// bench_optimizers as users run it: the files that it writes, bytes against formulas, and bad
// input.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/run_program.h"

namespace dim0 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr char kProgram[] = "tools/bench_optimizers";
constexpr char kAllSchemes[] =
    "rmnp_rows,rmnp_row_blocks,rmnp_columns,rmnp_flat,muon_redundant,muon_broadcast,muon_owner,"
    "adamw";

struct Shape {
  int64_t rows, cols;
};

// Of GPT-2's blocks: fused query, key and value; projection; up; down.
std::vector<Shape> Shapes(int64_t layers, int64_t width) {
  std::vector<Shape> shapes;
  for (int64_t layer = 0; layer < layers; ++layer) {
    shapes.insert(shapes.end(),
                  {{3 * width, width}, {width, width}, {4 * width, width}, {width, 4 * width}});
  }
  return shapes;
}

// Rows that rank `rank` stores when each stores ceil(rows / ranks) while there are any.
int64_t RowsOn(int64_t rows, int ranks, int rank) {
  const int64_t chunk = (rows + ranks - 1) / ranks;
  return std::clamp<int64_t>(rows - rank * chunk, 0, chunk);
}

// What `rank` sends to all-reduce `count` floats in a ring whose chunks differ by at most one.
int64_t AllReduceBytes(int64_t count, int ranks, int rank) {
  const auto chunk = [&](int r) { return count / ranks + (r < count % ranks ? 1 : 0); };
  return 4 * (2 * count - chunk(rank) - chunk((rank + 1) % ranks));
}

// Rows of which the flat layout gives no rank all elements.
int64_t CutRows(const std::vector<Shape>& shapes, int ranks) {
  int64_t elements = 0;
  for (const Shape& shape : shapes) elements += shape.rows * shape.cols;
  const int64_t chunk = (elements + ranks - 1) / ranks;
  int64_t cut_rows = 0, first = 0;
  for (const Shape& shape : shapes) {
    for (int64_t row = 0; row < shape.rows; ++row, first += shape.cols) {
      if (first / chunk != (first + shape.cols - 1) / chunk) ++cut_rows;
    }
  }
  return cut_rows;
}

// FLOPs of Newton-Schulz by whichever algorithm needs fewer, a symmetric product counted as a
// triangle: five steps of three products; or on the s x s matrices with one restart.
double NewtonSchulzFlops(const Shape& shape) {
  const double s = std::min(shape.rows, shape.cols), l = std::max(shape.rows, shape.cols);
  const double triangle = s * (s + 1), full = 2 * s * s * l;
  return std::min(5 * (triangle * l + triangle * s + full),
                  2 * triangle * l + 2 * full + 14 * triangle * s);
}

// The costliest matrix first, each to the rank with the least work.
std::vector<int> Owners(const std::vector<Shape>& shapes, int ranks) {
  std::vector<size_t> order(shapes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return NewtonSchulzFlops(shapes[a]) > NewtonSchulzFlops(shapes[b]);
  });
  std::vector<double> work(ranks);
  std::vector<int> owners(shapes.size());
  for (const size_t i : order) {
    owners[i] = std::min_element(work.begin(), work.end()) - work.begin();
    work[owners[i]] += NewtonSchulzFlops(shapes[i]);
  }
  return owners;
}

// Bytes that each rank sends in a step, matrices travelling as bfloat16.
std::vector<int64_t> BytesByRank(const std::string& scheme, const std::vector<Shape>& shapes,
                                 int ranks) {
  std::vector<int64_t> bytes(ranks);
  if (ranks == 1) return bytes;
  const std::vector<int> owners = Owners(shapes, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t all_gather = 0, broadcast = 0, owner = 0, rows = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const Shape& shape = shapes[i];
      const int64_t here = RowsOn(shape.rows, ranks, rank);
      rows += shape.rows;
      // A ring passes on everything but what its next rank brought.
      all_gather += 2 * (shape.rows - RowsOn(shape.rows, ranks, (rank + 1) % ranks)) * shape.cols;
      broadcast += 2 * shape.rows * shape.cols;
      owner += 2 * (owners[i] == rank ? shape.rows - here : here) * shape.cols;
    }
    if (scheme == "rmnp_columns") bytes[rank] = AllReduceBytes(rows, ranks, rank);
    if (scheme == "rmnp_flat") bytes[rank] = AllReduceBytes(CutRows(shapes, ranks), ranks, rank);
    if (scheme == "muon_redundant") bytes[rank] = all_gather;
    if (scheme == "muon_broadcast") bytes[rank] = all_gather + broadcast;
    if (scheme == "muon_owner") bytes[rank] = owner;
  }
  return bytes;
}

// The average.
int64_t ExpectedBytes(const std::string& scheme, const std::vector<Shape>& shapes, int ranks) {
  const std::vector<int64_t> bytes = BytesByRank(scheme, shapes, ranks);
  return (std::accumulate(bytes.begin(), bytes.end(), int64_t{0}) + ranks / 2) / ranks;
}

class BenchOptimizersTest : public ProgramTest {
 protected:
  using Row = std::map<std::string, std::string>;

  // Runs the program into Path("out") and returns what it printed.
  std::string Bench(const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {absl::StrCat("--out=", Path("out"))};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const Outcome outcome = Run(kProgram, all);
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return outcome.out;
  }

  // A file's rows by column.
  std::vector<Row> Csv(const std::string& name, const std::string& header) {
    std::vector<std::string> lines = absl::StrSplit(Slurp(Path(name)), '\n');
    EXPECT_EQ(lines.back(), "");
    lines.pop_back();
    if (lines.empty()) {
      ADD_FAILURE() << name << " is missing or empty";
      return {};
    }
    EXPECT_EQ(lines[0], header);
    const std::vector<std::string> columns = absl::StrSplit(header, ',');
    std::vector<Row> rows;
    for (size_t i = 1; i < lines.size(); ++i) {
      const std::vector<std::string> fields = absl::StrSplit(lines[i], ',');
      EXPECT_EQ(fields.size(), columns.size()) << lines[i];
      Row& row = rows.emplace_back();
      for (size_t c = 0; c < std::min(fields.size(), columns.size()); ++c) {
        row[columns[c]] = fields[c];
      }
    }
    return rows;
  }
  std::vector<Row> DistOpt() {
    return Csv("out/dist_opt.csv",
               "scheme,ms_per_step,bytes_per_step,mib_per_step,comm_ms,compute_ms,exposed_comm_ms,"
               "gflops,gb_per_s");
  }

  static double Number(const std::string& text) {
    double value;
    EXPECT_TRUE(absl::SimpleAtod(text, &value)) << "'" << text << "' is no number";
    return value;
  }
  // The number of whose line `text` is a part.
  static double NumberBefore(const std::string& out, const std::string& text) {
    const size_t end = out.find(text);
    if (end == std::string::npos) {
      ADD_FAILURE() << "no '" << text << "' in " << out;
      return 0;
    }
    const size_t begin = out.rfind(' ', end - 1) + 1;
    return Number(out.substr(begin, end - begin));
  }
};

TEST_F(BenchOptimizersTest, BytesAreThoseOfTheFormulasForEveryScheme) {
  const std::vector<std::string> schemes = absl::StrSplit(kAllSchemes, ',');
  for (const int64_t width : {12, 14}) {  // divisible by 1, 2 and 3 ranks; and not
    for (const int ranks : {1, 2, 3, 5}) {
      SCOPED_TRACE(absl::StrCat("width ", width, ", ", ranks, " ranks"));
      Bench({"--layers=3", absl::StrCat("--width=", width), "--heads=2",
             absl::StrCat("--ranks=", ranks), absl::StrCat("--schemes=", kAllSchemes),
             "--ledger_only"});
      const std::vector<Row> rows = DistOpt();
      ASSERT_THAT(rows, SizeIs(schemes.size()));
      for (size_t i = 0; i < schemes.size(); ++i) {
        EXPECT_EQ(rows[i].at("scheme"), schemes[i]);
        EXPECT_EQ(rows[i].at("bytes_per_step"),
                  absl::StrCat(ExpectedBytes(schemes[i], Shapes(3, width), ranks)))
            << schemes[i];
        EXPECT_EQ(rows[i].at("ms_per_step"), "");
      }
    }
  }
  EXPECT_THAT(Names(), ElementsAre("out", "out/dist_opt.csv"));
}

TEST_F(BenchOptimizersTest, MeasuresEverySchemeAndSendsTheSameBytesAsTheLedgerOnlyRun) {
  const std::string out =
      Bench({"--layers=2", "--width=14", "--heads=2", "--ranks=3", "--threads_per_rank=1",
             absl::StrCat("--schemes=", kAllSchemes), "--warmup=1", "--repeats=2", "--sweep=7,16"});
  EXPECT_THAT(Names(),
              ElementsAre("out", "out/dist_opt.csv", "out/exactness.txt", "out/sweep.csv"));
  const std::vector<std::string> schemes = absl::StrSplit(kAllSchemes, ',');
  const std::vector<Row> rows = DistOpt();
  ASSERT_THAT(rows, SizeIs(schemes.size()));
  for (size_t i = 0; i < schemes.size(); ++i) {
    SCOPED_TRACE(schemes[i]);
    const Row& row = rows[i];
    EXPECT_EQ(row.at("scheme"), schemes[i]);
    const int64_t bytes = ExpectedBytes(schemes[i], Shapes(2, 14), 3);
    EXPECT_EQ(row.at("bytes_per_step"), absl::StrCat(bytes));
    EXPECT_NEAR(Number(row.at("mib_per_step")), bytes / 1048576.0, 1e-4);
    EXPECT_GT(Number(row.at("ms_per_step")), 0);
    EXPECT_GT(Number(row.at("compute_ms")), 0);
    EXPECT_GT(Number(row.at("gflops")), 0);
    EXPECT_GT(Number(row.at("gb_per_s")), 0);
    const double communication = Number(row.at("comm_ms"));
    EXPECT_EQ(communication > 0, bytes > 0);
    EXPECT_LE(Number(row.at("exposed_comm_ms")), communication);
    EXPECT_THAT(out, HasSubstr(absl::StrCat("\n", schemes[i], " ")));
  }
  EXPECT_EQ(Slurp(Path("out/exactness.txt")), "ranks 3\nmax_abs_difference 0\n");

  const std::vector<Row> sweep = Csv("out/sweep.csv", "size,rmnp_ms,muon_ms,gather_bytes");
  ASSERT_THAT(sweep, SizeIs(2));
  for (const auto& [row, size] : {std::pair(sweep[0], 7), std::pair(sweep[1], 16)}) {
    EXPECT_EQ(row.at("size"), absl::StrCat(size));
    EXPECT_GT(Number(row.at("rmnp_ms")), 0);
    EXPECT_GT(Number(row.at("muon_ms")), 0);
    EXPECT_EQ(row.at("gather_bytes"),
              absl::StrCat(ExpectedBytes("muon_redundant", {{size, size}}, 3)));
  }

  // Published figures stand beside ours, and every ratio is there.
  EXPECT_THAT(out, HasSubstr("2531 MiB   457.4 ms"));
  EXPECT_GT(NumberBefore(out, " of a triad's bandwidth, counting 20 bytes"), 0);
  EXPECT_GT(NumberBefore(out, " of a triad's bandwidth, counting 28 bytes"), 0);
  EXPECT_GT(NumberBefore(out, " times as fast as muon_redundant"), 0);
  EXPECT_GT(NumberBefore(out, " of the matrix-product rate"), 0);
  EXPECT_GT(NumberBefore(out, " times as fast as the standard algorithm"), 0);
}

TEST_F(BenchOptimizersTest, OneRankSendsNothingAndWritesNoSweepUnlessAskedTo) {
  Bench({"--layers=1", "--width=8", "--heads=2", "--schemes=muon_owner,rmnp_columns", "--warmup=0",
         "--repeats=1"});
  EXPECT_THAT(Names(), ElementsAre("out", "out/dist_opt.csv", "out/exactness.txt"));
  const std::vector<Row> rows = DistOpt();
  ASSERT_THAT(rows, SizeIs(2));
  for (const Row& row : rows) EXPECT_EQ(row.at("bytes_per_step"), "0");
  EXPECT_EQ(Slurp(Path("out/exactness.txt")), "ranks 1\nmax_abs_difference 0\n");
}

TEST_F(BenchOptimizersTest, Gpt2LargeOnEightRanksSendsThePublishedBytes) {
  const std::string out =
      Bench({"--model=gpt2-large", "--ranks=8",
             "--schemes=rmnp_rows,rmnp_columns,muon_redundant,muon_broadcast,muon_owner",
             "--ledger_only"});
  const std::vector<Row> rows = DistOpt();
  ASSERT_THAT(rows, SizeIs(5));
  EXPECT_EQ(rows[0].at("bytes_per_step"), "0");
  EXPECT_NEAR(Number(rows[1].at("mib_per_step")), 2.8, 0.05);
  EXPECT_NEAR(Number(rows[2].at("mib_per_step")), 1181, 0.5);
  EXPECT_NEAR(Number(rows[3].at("mib_per_step")), 2531, 0.5);
  EXPECT_NEAR(Number(rows[4].at("mib_per_step")), 295, 0.5);
  for (const Row& row : rows) {
    EXPECT_EQ(row.at("bytes_per_step"),
              absl::StrCat(ExpectedBytes(row.at("scheme"), Shapes(36, 1280), 8)));
  }
  // Owners share the work, not the bytes, evenly: the fullest rank's stand beside the average.
  const std::vector<int64_t> by_rank = BytesByRank("muon_owner", Shapes(36, 1280), 8);
  const double most = *std::max_element(by_rank.begin(), by_rank.end()) / 1048576.0;
  EXPECT_THAT(out, HasSubstr(absl::StrFormat("%-16s%10.1f%10.1f", "muon_owner", 295.3, most)));
}

TEST_F(BenchOptimizersTest, BadInputIsOneLineThatSaysWhatToDoAndStatusTwo) {
  const auto error = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {absl::StrCat("--out=", Path("out")), "--layers=1", "--width=8",
                                    "--heads=2"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return ErrorOf(kProgram, all, 2);
  };
  EXPECT_EQ(error({"--schemes=rmnp_rows,muon"}),
            "bench_optimizers: --schemes: scheme 'muon' is unknown; choose from rmnp_rows, "
            "rmnp_row_blocks, rmnp_columns, rmnp_flat, muon_redundant, muon_broadcast, muon_owner, "
            "adamw");
  EXPECT_THAT(error({"--schemes="}), HasSubstr("--schemes is empty; choose from rmnp_rows, "));
  EXPECT_THAT(error({"--schemes=adamw,,rmnp_rows"}), HasSubstr("scheme '' is unknown"));
  EXPECT_THAT(error({"--schemes=adamw,adamw"}), HasSubstr("names adamw twice"));
  for (const char* size : {"0", "-1", "x", "1024,", "70000", "99999999999999999999"}) {
    EXPECT_THAT(error({absl::StrCat("--sweep=", size)}),
                HasSubstr("is no size from 1 to 65536; say for example 1024,2048"));
  }
  EXPECT_EQ(error({"--ranks=0"}),
            "bench_optimizers: --ranks=0 is out of range; it must be from 1 to 1024");
  EXPECT_THAT(error({"--ranks=1000", "--threads_per_rank=1000"}), HasSubstr("choose at most 1024"));
  EXPECT_THAT(error({"--repeats=0"}), HasSubstr("--repeats=0 is out of range"));
  EXPECT_THAT(error({"--warmup=-1"}), HasSubstr("--warmup=-1 is out of range"));
  EXPECT_THAT(error({"--width=9"}), HasSubstr("width"));
  EXPECT_THAT(error({"--layers=-1"}), HasSubstr("--layers=-1 is out of range"));
  EXPECT_THAT(error({"--model=gpt3"}), HasSubstr("gpt2-large"));
  EXPECT_THAT(error({"--optimizer=adamw"}), HasSubstr("unknown flag"));
  EXPECT_THAT(error({"--out="}), HasSubstr("--out is missing; name a folder"));
}

TEST_F(BenchOptimizersTest, AFolderThatCannotBeWrittenIsRefusedBeforeTheMeasurement) {
  Write("file", "not a folder");
  std::filesystem::create_directories(Path("taken/sweep.csv"));
  for (const char* out : {"file", "file/below", "taken"}) {
    const std::string error = ErrorOf(kProgram, {absl::StrCat("--out=", Path(out))}, 2);
    EXPECT_THAT(error, HasSubstr("--out: "));
    EXPECT_THAT(error, HasSubstr("; name a folder that can be written"));
  }
}

TEST_F(BenchOptimizersTest, WhatDoesNotFitIntoMemoryIsRefusedBeforeTheMeasurement) {
  std::filesystem::create_directory(Path("out"));
  const auto error = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {absl::StrCat("--out=", Path("out"))};
    all.insert(all.end(), arguments.begin(), arguments.end());
    std::string out;  // may warn of more threads than cores
    return ErrorOf(kProgram, all, 1, &out);
  };
  EXPECT_THAT(error({"--layers=1000", "--width=20000", "--heads=2", "--schemes=adamw"}),
              HasSubstr("GiB are available; choose fewer --layers or a smaller --width"));
  EXPECT_THAT(error({"--layers=1", "--width=8", "--heads=2", "--schemes=adamw", "--sweep=65536",
                     "--ranks=64"}),
              HasSubstr("leave this size out"));
}

}  // namespace
}  // namespace dim0
