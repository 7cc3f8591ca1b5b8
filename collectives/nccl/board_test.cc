#include "collectives/nccl/board.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/call_errors.h"
#include "collectives/nccl/news.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

CallName Call(const char* text, int64_t sequence, const char* channel = "c") {
  return {text, sequence, channel};
}

TEST(BoardTest, RanksThatAgreeMayBeAnyNumberOfCallsApart) {
  Board board(2);
  for (int64_t n = 1; n <= 100; ++n) EXPECT_EQ(board.Post(0, Call("a", n), {}), absl::OkStatus());
  EXPECT_THAT(board.Missing(Call("a", 1)), ElementsAre(1));
  for (int64_t n = 1; n <= 100; ++n) EXPECT_EQ(board.Post(1, Call("a", n), {}), absl::OkStatus());
  EXPECT_THAT(board.Missing(Call("a", 100)), IsEmpty());
  EXPECT_THAT(board.Missing(Call("a", 101)), ElementsAre(0, 1));
  EXPECT_THAT(board.Missing(Call("a", 1, "never used")), ElementsAre(0, 1));
}

TEST(BoardTest, TheSecondOfTwoThatDisagreeIsToldBothSides) {
  Board board(3);
  ASSERT_EQ(board.Post(2, Call("gather", 1), {}), absl::OkStatus());
  ASSERT_EQ(board.Post(2, Call("reduce", 2), {}), absl::OkStatus());
  ASSERT_EQ(board.Post(0, Call("gather", 1), {}), absl::OkStatus());
  const absl::Status status = board.Post(0, Call("scatter", 2), {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 0 called scatter as call 2 on channel 'c'"),
                    HasSubstr("rank 2 called reduce as call 2 on channel 'c'")));
}

TEST(BoardTest, ARankThatLeavesIsMissedByTheCallsThatItHasNotPosted) {
  Board board(2);
  ASSERT_EQ(board.Post(0, Call("a", 1), {}), absl::OkStatus());
  ASSERT_EQ(board.Post(1, Call("a", 1), {}), absl::OkStatus());
  ASSERT_EQ(board.Post(1, Call("a", 2), {}), absl::OkStatus());
  EXPECT_EQ(board.Leave(1, "c"), absl::OkStatus()) << "nobody waits for it";
  EXPECT_EQ(board.Post(0, Call("a", 2), {}), absl::OkStatus()) << "it has posted this one";
  const absl::Status status = board.Post(0, Call("a", 3), {});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("a as call 3 on channel 'c'"), HasSubstr("rank 1 has left")));
  EXPECT_EQ(board.Post(0, Call("a", 1, "another"), {}), absl::OkStatus());
}

TEST(BoardTest, WhoeverWaitsForARankThatLeavesIsNamed) {
  Board board(2);
  ASSERT_EQ(board.Post(0, Call("waiting", 1), {}), absl::OkStatus());
  const absl::Status status = board.LeaveAll(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("waiting as call 1"));
  EXPECT_EQ(board.Post(0, Call("a", 1, "opened later"), {}).code(), absl::StatusCode::kUnavailable);
}

TEST(BoardTest, LengthsOfAnAllToAllMustMatchWhoeverPostsFirst) {
  // What rank 0 sends to rank 1 is 2 elements; rank 1 expects 3.
  const Lengths zero = {{7, 2}, {7, 5}}, one = {{5, 9}, {3, 9}};
  for (bool zero_first : {true, false}) {
    Board board(2);
    ASSERT_EQ(board.Post(zero_first ? 0 : 1, Call("a", 1), zero_first ? zero : one),
              absl::OkStatus());
    const absl::Status status =
        board.Post(zero_first ? 1 : 0, Call("a", 1), zero_first ? one : zero);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("rank 0 sends 2 elements to rank 1, which expects 3 from it"));
  }
  const Lengths fitting = {{5, 9}, {2, 9}};
  Board board(2);
  EXPECT_EQ(board.Post(0, Call("a", 1), zero), absl::OkStatus());
  EXPECT_EQ(board.Post(1, Call("a", 1), fitting), absl::OkStatus());
}

TEST(NewsTest, ComesOutAsItWentIn) {
  News news;
  news.posted = {{"c", 3, "barrier(unit 'h.1', control)", {}}, {"d", 1, "", {{1, 0}, {0, -2}}}};
  news.left = {"c", ""};
  news.left_all = true;
  const absl::StatusOr<News> read = Unpack(Pack(news));
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->posted.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(read->posted[i].channel, news.posted[i].channel);
    EXPECT_EQ(read->posted[i].sequence, news.posted[i].sequence);
    EXPECT_EQ(read->posted[i].text, news.posted[i].text);
    EXPECT_EQ(read->posted[i].lengths.send, news.posted[i].lengths.send);
    EXPECT_EQ(read->posted[i].lengths.recv, news.posted[i].lengths.recv);
  }
  EXPECT_EQ(read->left, news.left);
  EXPECT_TRUE(read->left_all);
}

TEST(NewsTest, BytesThatAreCutOffOrTooManyAreRefused) {
  News news;
  news.posted = {{"channel", 3, "text", {{1, 2}, {3, 4}}}};
  const std::string bytes = Pack(news);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(Unpack(bytes.substr(0, size)).status().code(), absl::StatusCode::kInternal) << size;
  }
  EXPECT_EQ(Unpack(bytes + "x").status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace dim0
