#include "runtime/dataset.h"

#include <stdlib.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

std::vector<int64_t> Order(int64_t size, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < size; ++i) order.push_back(PermutedIndex(i, size, seed, epoch));
  return order;
}

std::vector<int64_t> Sorted(std::vector<int64_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}

std::vector<int64_t> Iota(int64_t size) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(i);
  return values;
}

TEST(PermutedIndexTest, PlacesEveryIndexOnce) {
  std::vector<int64_t> sizes = {1023, 1024, 1025, 65535, 65537, 100'003};
  for (int64_t size = 1; size <= 300; ++size) sizes.push_back(size);
  for (const int64_t size : sizes) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      ASSERT_EQ(Sorted(Order(size, seed, 3)), Iota(size)) << size << " " << seed;
    }
  }
}

TEST(PermutedIndexTest, StaysInRangeAndApartAtSizesNoTableCouldHold) {
  for (const int64_t size :
       {(int64_t{1} << 40) + 12'345, (int64_t{1} << 33) - 1, std::numeric_limits<int64_t>::max()}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 1000; ++i) {
      for (const int64_t index : {i, size - 1 - i, size / 2 + i}) {
        const int64_t place = PermutedIndex(index, size, 7, 1);
        ASSERT_GE(place, 0);
        ASSERT_LT(place, size);
        ASSERT_TRUE(seen.insert(place).second);
      }
    }
  }
}

// The values are from an independent program (Python, arbitrary-precision integers). If this test
// fails, runs that were interrupted before the change no longer resume with the same data.
TEST(PermutedIndexTest, KeepsTheOrderOfASeedForever) {
  EXPECT_EQ(Order(10, 0, 0), (std::vector<int64_t>{7, 8, 2, 6, 9, 3, 0, 4, 5, 1}));
  EXPECT_EQ(Order(10, 0, 1), (std::vector<int64_t>{6, 2, 5, 4, 8, 0, 9, 3, 7, 1}));
  EXPECT_EQ(Order(10, 1337, 0), (std::vector<int64_t>{7, 2, 5, 6, 1, 4, 9, 3, 0, 8}));
  EXPECT_EQ(Order(7, ~uint64_t{0}, int64_t{1} << 62), (std::vector<int64_t>{3, 6, 0, 5, 1, 4, 2}));
  constexpr int64_t kLarge = (int64_t{1} << 40) + 12'345;
  EXPECT_EQ(PermutedIndex(0, kLarge, 42, 3), 462'100'140'446);
  EXPECT_EQ(PermutedIndex(1, kLarge, 42, 3), 307'396'723'206);
  EXPECT_EQ(PermutedIndex(int64_t{1} << 39, kLarge, 42, 3), 88'512'881'460);
  EXPECT_EQ(PermutedIndex(kLarge - 1, kLarge, 42, 3), 443'769'190'323);
}

TEST(PermutedIndexTest, DiffersBetweenEpochsAndSeeds) {
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (int64_t epoch = 0; epoch < 20; ++epoch) orders.insert(Order(50, seed, epoch));
  }
  EXPECT_EQ(orders.size(), 400u);
}

// Each of `size` places is equally likely for each index. The bound is six standard deviations of
// the binomial distribution.
TEST(PermutedIndexTest, IsUniformOverEpochs) {
  constexpr int kEpochs = 20'000;
  for (const int size : {2, 3, 5, 8, 13}) {
    std::vector<std::vector<int>> count(size, std::vector<int>(size, 0));
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      for (int i = 0; i < size; ++i) ++count[i][PermutedIndex(i, size, 5, epoch)];
    }
    const double p = 1.0 / size;
    const double bound = 6 * std::sqrt(kEpochs * p * (1 - p));
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j) {
        EXPECT_NEAR(count[i][j], kEpochs * p, bound) << size << ": " << i << " to " << j;
      }
    }
  }
}

// In a uniform order of n, how many neighbours stay neighbours is close to Poisson with mean
// about 1: in 200 orders about 200.
TEST(PermutedIndexTest, TearsNeighboursApart) {
  int kept = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const std::vector<int64_t> order = Order(1000, seed, 0);
    for (size_t i = 1; i < order.size(); ++i) kept += order[i] == order[i - 1] + 1;
  }
  EXPECT_NEAR(kept, 200, 6 * std::sqrt(200));
}

class DatasetTest : public ::testing::Test {
 protected:
  struct Sequence {
    std::vector<int32_t> inputs;
    std::vector<int32_t> targets;
  };

  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "dataset_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Path(absl::string_view name) const { return absl::StrCat(folder_, "/", name); }
  std::string PutText(absl::string_view name, const std::string& text) {
    std::ofstream(Path(name), std::ios::binary) << text;
    return Path(name);
  }
  // Writes tokens first, first + 1, ... as a shard.
  void PutShard(absl::string_view name, TokenType type, uint32_t first, int count) {
    std::vector<uint32_t> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(first + i);
    ASSERT_TRUE(WriteTokenFile(Path(name), type, tokens).ok());
  }

  static DatasetOptions Options(std::string path, int64_t seq_len, int64_t global_batch,
                                double val_fraction, int64_t vocabulary = 256) {
    DatasetOptions options;
    options.path = std::move(path);
    options.vocabulary = vocabulary;
    options.seq_len = seq_len;
    options.global_batch = global_batch;
    options.val_fraction = val_fraction;
    options.seed = 1;
    return options;
  }
  static Dataset OpenOrDie(const DatasetOptions& options) {
    absl::StatusOr<Dataset> dataset = Dataset::Open(options);
    EXPECT_TRUE(dataset.ok()) << dataset.status();
    return *std::move(dataset);
  }
  static std::string ErrorOf(const DatasetOptions& options) {
    const absl::Status status = Dataset::Open(options).status();
    EXPECT_FALSE(status.ok());
    EXPECT_FALSE(absl::StrContains(status.message(), "\n"));
    return std::string(status.message());
  }
  static Sequence Train(const Dataset& dataset, int64_t index, int64_t seq_len) {
    Sequence s{std::vector<int32_t>(seq_len), std::vector<int32_t>(seq_len)};
    dataset.TrainSequence(index, absl::MakeSpan(s.inputs), absl::MakeSpan(s.targets));
    return s;
  }
  static Sequence Val(const Dataset& dataset, int64_t index, int64_t seq_len) {
    Sequence s{std::vector<int32_t>(seq_len), std::vector<int32_t>(seq_len)};
    dataset.ValSequence(index, absl::MakeSpan(s.inputs), absl::MakeSpan(s.targets));
    return s;
  }

  std::string folder_;
};

std::string BytesUpTo(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text.push_back(static_cast<char>(i));
  return text;
}

// The stream is 0, 1, 2, ..., so a sequence's first input says which sequence it is.
TEST_F(DatasetTest, CutsTheStreamIntoSequencesWithShiftedTargets) {
  // 256 bytes, of which floor(256 * 0.1) = 25 are held out: 231 for training.
  const Dataset dataset = OpenOrDie(Options(PutText("t", BytesUpTo(256)), 10, 2, 0.1));
  EXPECT_EQ(dataset.tokens(), 256);
  EXPECT_EQ(dataset.train_sequences(), 23);  // (231 - 1) / 10, the last target being token 230
  EXPECT_EQ(dataset.val_sequences(), 2);     // (25 - 1) / 10
  std::vector<int64_t> seen;
  for (int64_t i = 0; i < 23; ++i) {
    const Sequence s = Train(dataset, i, 10);
    EXPECT_EQ(s.inputs[0] % 10, 0);
    for (int t = 0; t < 10; ++t) {
      EXPECT_EQ(s.inputs[t], s.inputs[0] + t);
      EXPECT_EQ(s.targets[t], s.inputs[t] + 1);
    }
    seen.push_back(s.inputs[0] / 10);
  }
  EXPECT_NE(seen, Iota(23));
  EXPECT_EQ(Sorted(seen), Iota(23));
  for (int64_t i = 0; i < 2; ++i) {
    const Sequence s = Val(dataset, i, 10);
    for (int t = 0; t < 10; ++t) {
      EXPECT_EQ(s.inputs[t], 231 + 10 * i + t);
      EXPECT_EQ(s.targets[t], 231 + 10 * i + t + 1);
    }
  }
}

TEST_F(DatasetTest, GoesThroughAllSequencesOnceAnEpochInANewOrder) {
  const Dataset dataset = OpenOrDie(Options(PutText("t", BytesUpTo(101)), 5, 3, 0));
  ASSERT_EQ(dataset.train_sequences(), 20);
  std::set<std::vector<int64_t>> orders;
  for (const int64_t epoch : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{1} << 50}) {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < 20; ++i) {
      order.push_back(Train(dataset, epoch * 20 + i, 5).inputs[0] / 5);
    }
    EXPECT_EQ(Sorted(order), Iota(20));
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 4u);
}

TEST_F(DatasetTest, DependsOnTheSeedAndNotOnTheBatch) {
  DatasetOptions options = Options(PutText("t", BytesUpTo(250)), 4, 1, 0.05);
  const Dataset one = OpenOrDie(options);
  options.global_batch = 12;
  const Dataset twelve = OpenOrDie(options);
  options.seed = 2;
  const Dataset other = OpenOrDie(options);
  int differ = 0;
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(Train(one, i, 4).inputs, Train(twelve, i, 4).inputs);
    differ += Train(one, i, 4).inputs != Train(other, i, 4).inputs;
  }
  EXPECT_GT(differ, 80);
}

TEST_F(DatasetTest, ReadsBytesAboveAsciiAsThemselves) {
  const Dataset dataset = OpenOrDie(Options(PutText("t", "\xff\x80\x7f\x01\xfe"), 4, 1, 0));
  const Sequence s = Train(dataset, 0, 4);
  EXPECT_EQ(s.inputs, (std::vector<int32_t>{255, 128, 127, 1}));
  EXPECT_EQ(s.targets, (std::vector<int32_t>{128, 127, 1, 254}));
}

TEST_F(DatasetTest, ReadsShardsAsOneStreamWhereverTheyAreCut) {
  for (const TokenType type : {TokenType::kUint16, TokenType::kUint32}) {
    const std::string folder(Name(type));
    fs::create_directory(Path(folder));
    // 100 tokens from 1000 on, cut after 1, 2, 33 and 34: shards shorter than a sequence, and
    // sequences over three shards.
    PutShard(folder + "/s_0.bin", type, 1000, 1);
    PutShard(folder + "/s_1.bin", type, 1001, 1);
    PutShard(folder + "/s_2.bin", type, 1002, 31);
    PutShard(folder + "/s_3.bin", type, 1033, 1);
    PutShard(folder + "/s_4.bin", type, 1034, 66);
    for (const int64_t seq_len : {1, 2, 3, 7, 32, 33}) {
      const Dataset dataset =
          OpenOrDie(Options(Path(folder + "/s_*.bin"), seq_len, 1, 0.3, 50'257));
      EXPECT_EQ(dataset.tokens(), 100);
      EXPECT_EQ(dataset.paths().size(), 5u);
      std::vector<int64_t> seen;
      for (int64_t i = 0; i < dataset.train_sequences(); ++i) {
        const Sequence s = Train(dataset, i, seq_len);
        for (int64_t t = 0; t < seq_len; ++t) {
          ASSERT_EQ(s.inputs[t], s.inputs[0] + t);
          ASSERT_EQ(s.targets[t], s.inputs[t] + 1);
        }
        seen.push_back((s.inputs[0] - 1000) / seq_len);
      }
      EXPECT_EQ(Sorted(seen), Iota(dataset.train_sequences()));
      const int64_t val_begin = 1100 - std::max<int64_t>(30, seq_len + 1);
      for (int64_t i = 0; i < dataset.val_sequences(); ++i) {
        const Sequence s = Val(dataset, i, seq_len);
        for (int64_t t = 0; t < seq_len; ++t) {
          ASSERT_EQ(s.inputs[t], val_begin + i * seq_len + t);
          ASSERT_EQ(s.targets[t], val_begin + i * seq_len + t + 1);
        }
      }
    }
  }
}

TEST_F(DatasetTest, ReadsSeveralTextsInNameOrder) {
  PutText("b.txt", "def");
  PutText("a.txt", "abc");
  const Dataset dataset = OpenOrDie(Options(Path("*.txt"), 5, 1, 0));
  EXPECT_EQ(Train(dataset, 0, 5).inputs, (std::vector<int32_t>{'a', 'b', 'c', 'd', 'e'}));
  EXPECT_EQ(dataset.paths(), (std::vector<std::string>{Path("a.txt"), Path("b.txt")}));
}

TEST_F(DatasetTest, HoldsOutAtLeastOneSequenceIfAnyIsWanted) {
  const std::string path = PutText("t", BytesUpTo(111));
  const Dataset some = OpenOrDie(Options(path, 10, 1, 0.001));
  EXPECT_EQ(some.val_sequences(), 1);
  EXPECT_EQ(some.train_sequences(), 9);  // 111 - 11 = 100 tokens: 9 sequences and a target
  EXPECT_EQ(Val(some, 0, 10).targets[9], 110);
  const Dataset none = OpenOrDie(Options(path, 10, 1, 0));
  EXPECT_EQ(none.val_sequences(), 0);
  EXPECT_EQ(none.train_sequences(), 11);
}

TEST_F(DatasetTest, MovesWithItsFiles) {
  Dataset first = OpenOrDie(Options(PutText("t", BytesUpTo(100)), 4, 1, 0.05));
  const std::vector<int32_t> expected = Train(first, 3, 4).inputs;
  const Dataset second = std::move(first);
  EXPECT_EQ(Train(second, 3, 4).inputs, expected);
}

TEST_F(DatasetTest, ServesManyThreadsAtOnce) {
  for (int i = 0; i < 4; ++i) {
    PutShard(absl::StrCat("s_", i, ".bin"), TokenType::kUint16, 100 * i, 100);
  }
  const Dataset dataset = OpenOrDie(Options(Path("s_*.bin"), 7, 4, 0.1, 400));
  std::array<std::vector<std::vector<int32_t>>, 4> read;
  std::vector<std::thread> threads;
  for (auto& mine : read) {
    threads.emplace_back([&dataset, &mine] {
      for (int64_t i = 0; i < 200; ++i) mine.push_back(Train(dataset, i, 7).targets);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& mine : read) EXPECT_EQ(mine, read[0]);
}

TEST_F(DatasetTest, SaysWhatTooFewTokensWouldNeed) {
  // 8 * 16 + 1 = 129 to train on and, as 17 is more than 5% of the sum, 17 held out: 146.
  const std::string path = PutText("t", BytesUpTo(145));
  EXPECT_EQ(ErrorOf(Options(path, 16, 8, 0.05)),
            absl::StrCat(path,
                         ": 145 tokens are too few: one batch of 8 sequences of 16 tokens and 5% "
                         "held out for validation need 146; lower --batch, --grad_accum or "
                         "--seq_len, or give more text in --data"));
  PutText("t", BytesUpTo(146));
  EXPECT_EQ(OpenOrDie(Options(path, 16, 8, 0.05)).train_sequences(), 8);

  PutText("t", BytesUpTo(128));
  EXPECT_EQ(ErrorOf(Options(path, 16, 8, 0)),
            absl::StrCat(path,
                         ": 128 tokens are too few: one batch of 8 sequences of 16 tokens need "
                         "129; lower --batch, --grad_accum or --seq_len, or give more text in "
                         "--data"));
  PutText("t", BytesUpTo(129));
  EXPECT_EQ(OpenOrDie(Options(path, 16, 8, 0)).train_sequences(), 8);
}

// At every size around the limit: refused exactly when the message says so.
TEST_F(DatasetTest, NamesExactlyTheSmallestSizeThatIsEnough) {
  for (const double fraction : {0.0, 0.05, 0.5, 0.9}) {
    for (const int64_t seq_len : {1, 5}) {
      std::string message = ErrorOf(Options(PutText("t", "ab"), seq_len, 6, fraction));
      const size_t at = message.find(" need ");
      ASSERT_NE(at, std::string::npos) << message;
      const int needed = std::stoi(message.substr(at + 6));
      const std::string path = PutText("t", std::string(needed - 1, 'x'));
      EXPECT_TRUE(absl::StrContains(ErrorOf(Options(path, seq_len, 6, fraction)),
                                    absl::StrCat(" need ", needed, ";")));
      PutText("t", std::string(needed, 'x'));
      EXPECT_GE(OpenOrDie(Options(path, seq_len, 6, fraction)).train_sequences(), 6);
    }
  }
}

TEST_F(DatasetTest, RefusesABatchBeyondAnyData) {
  const std::string path = PutText("t", "abc");
  EXPECT_EQ(ErrorOf(Options(path, int64_t{1} << 40, int64_t{1} << 40, 0.05)),
            "a batch of 1099511627776 sequences of 1099511627776 tokens is larger than any data");
}

TEST_F(DatasetTest, NamesWhatIsMissing) {
  EXPECT_EQ(ErrorOf(Options("", 4, 1, 0)),
            "no data: give a text file or a glob of .bin token files in --data");
  EXPECT_EQ(ErrorOf(Options(Path("no.txt"), 4, 1, 0)),
            absl::StrCat("cannot open ", Path("no.txt"), ": No such file or directory"));
  EXPECT_EQ(ErrorOf(Options(Path("*.bin"), 4, 1, 0)),
            absl::StrCat("no file matches ", Path("*.bin")));
  EXPECT_EQ(ErrorOf(Options(folder_, 4, 1, 0)),
            absl::StrCat("cannot read ", folder_, ": it is a directory"));
  EXPECT_EQ(ErrorOf(Options(PutText("empty", ""), 4, 1, 0)),
            absl::StrCat(Path("empty"), ": the file is empty"));
  EXPECT_EQ(ErrorOf(Options(PutText("empty.bin", ""), 4, 1, 0)),
            absl::StrCat(Path("empty.bin"),
                         ": the file is empty; a token file begins with a header of 1024 bytes"));
}

TEST_F(DatasetTest, NamesTheDamagedShard) {
  PutShard("s_0.bin", TokenType::kUint16, 0, 100);
  PutShard("s_1.bin", TokenType::kUint16, 0, 100);
  fs::resize_file(Path("s_1.bin"), 1223);
  EXPECT_EQ(ErrorOf(Options(Path("s_*.bin"), 4, 1, 0)),
            absl::StrCat(Path("s_1.bin"),
                         ": the file is truncated at byte 1223; 100 uint16 tokens need 1224 "
                         "bytes"));
}

TEST_F(DatasetTest, NamesTheTokenBeyondTheVocabulary) {
  PutShard("s_0.bin", TokenType::kUint16, 0, 100);
  PutShard("s_1.bin", TokenType::kUint16, 190, 20);
  EXPECT_EQ(ErrorOf(Options(Path("s_*.bin"), 4, 1, 0, 200)),
            absl::StrCat(Path("s_1.bin"),
                         ": token 10 at byte 1044 is 200, beyond the vocabulary of 200; raise "
                         "--vocab to at least 210 or give the data that this vocabulary belongs "
                         "to"));
  std::string text(10'000, 'a');
  text[9'000] = '\xe9';
  EXPECT_EQ(ErrorOf(Options(PutText("t", text), 4, 1, 0, 128)),
            absl::StrCat(Path("t"),
                         ": byte 9000 is 233, beyond the vocabulary of 128; text needs --vocab of "
                         "at least 256"));
  text[9'000] = 'z';
  PutText("t", text);
  EXPECT_EQ(OpenOrDie(Options(Path("t"), 4, 1, 0, 128)).tokens(), 10'000);
}

TEST_F(DatasetTest, RefusesFilesThatDoNotBelongTogether) {
  PutShard("s_0.bin", TokenType::kUint16, 0, 100);
  PutShard("s_1.bin", TokenType::kUint32, 0, 100);
  PutText("s_2.txt", "abc");
  EXPECT_EQ(ErrorOf(Options(Path("s_*.bin"), 4, 1, 0)),
            absl::StrCat(Path("s_*.bin"), " matches shards of different data: ", Path("s_0.bin"),
                         " has uint16 tokens and ", Path("s_1.bin"), " has uint32"));
  EXPECT_EQ(ErrorOf(Options(Path("s_[02]*"), 4, 1, 0)),
            absl::StrCat(Path("s_[02]*"), " matches both text and token files: ", Path("s_0.bin"),
                         " and ", Path("s_2.txt"), "; give a narrower pattern"));
}

TEST_F(DatasetTest, RefusesATokenFileWhoseNameMakesItText) {
  PutShard("tokens", TokenType::kUint16, 0, 100);
  EXPECT_EQ(ErrorOf(Options(Path("tokens"), 4, 1, 0)),
            absl::StrCat(Path("tokens"),
                         ": this is a token file, but its name would make it text; rename it to ",
                         Path("tokens"), ".bin"));
}

TEST_F(DatasetTest, RefusesNonsenseInItsOptions) {
  const std::string path = PutText("t", BytesUpTo(100));
  EXPECT_EQ(ErrorOf(Options(path, 0, 1, 0)),
            "sequence length, batch and vocabulary must be at least 1, not 0, 1 and 256");
  for (const double fraction : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(
        ErrorOf(Options(path, 1, 1, fraction)),
        absl::StrCat("the validation part must be at least 0 and less than 1, not ", fraction));
  }
}

}  // namespace
}  // namespace dim0
