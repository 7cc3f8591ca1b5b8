// Ranks as processes: what the contract of every backend, tested elsewhere, does not cover. How a
// job comes together, what may go wrong there, and processes that die.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "collectives/communicator.h"
#include "collectives/free_port.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Rank = absl::StatusOr<std::unique_ptr<ProcessGroup>>;

constexpr absl::Duration kPatience = absl::Seconds(60);

Rank Create(int rank, int world_size, int port, absl::Duration timeout = kPatience,
            const std::string& address = "127.0.0.1") {
  ProcessGroupOptions options;
  options.timeout = options.start_timeout = timeout;
  return CreateTcpRank({.rank = rank, .world_size = world_size, .address = address, .port = port},
                       options);
}

// Creates ranks at once, each on a thread.
std::vector<Rank> CreateAll(const std::vector<std::function<Rank()>>& creators) {
  std::vector<Rank> ranks(creators.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < creators.size(); ++i) {
    threads.emplace_back([&, i] { ranks[i] = creators[i](); });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

std::string Message(const Rank& rank) {
  EXPECT_FALSE(absl::StrContains(rank.status().message(), "\n"));
  return std::string(rank.status().message());
}

CallInfo Call(const char* unit) {
  CallInfo call;
  call.unit = unit;
  return call;
}

// A connection that is not a rank's; waits until somebody listens.
int Stranger(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (;;) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
    close(fd);
    absl::SleepFor(absl::Milliseconds(1));
  }
}

// A port at which somebody who is not a rank listens.
class Listener {
 public:
  Listener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(fd_, 8), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~Listener() { close(fd_); }
  int Accept() const { return accept(fd_, nullptr, nullptr); }
  int port() const { return port_; }

 private:
  const int fd_;
  int port_ = 0;
};

TEST(TcpTest, RanksComeInAnyOrderAndNumber) {
  const int port = FreePort();
  std::vector<std::function<Rank()>> creators;
  for (int r = 0; r < 20; ++r) {
    creators.push_back([r, port] {
      absl::SleepFor(absl::Milliseconds(r == 0 ? 100 : 5 * (20 - r)));  // rank 0 comes late
      return Create(r, 20, port);
    });
  }
  const std::vector<Rank> ranks = CreateAll(creators);
  for (int r = 0; r < 20; ++r) {
    ASSERT_TRUE(ranks[r].ok()) << ranks[r].status();
    EXPECT_EQ((*ranks[r])->rank(), r);
    EXPECT_EQ((*ranks[r])->world_size(), 20);
  }
}

TEST(TcpTest, OneRankNeedsNoNetwork) {
  const Rank rank = CreateTcpRank({}, {});
  ASSERT_TRUE(rank.ok()) << rank.status();
  EXPECT_EQ((*rank)->OpenHost("a").value()->Barrier(Call("u")), absl::OkStatus());
}

TEST(TcpTest, OptionsOutOfRangeAreRefused) {
  EXPECT_THAT(Message(Create(2, 2, 1)), HasSubstr("rank 2 of 2 ranks"));
  EXPECT_THAT(Message(Create(-1, 2, 1)), HasSubstr("rank -1"));
  EXPECT_THAT(Message(Create(0, 2, 0)), HasSubstr("port 0"));
  EXPECT_THAT(Message(Create(0, 2, 65536)), HasSubstr("port 65536"));
  EXPECT_THAT(Message(Create(0, 2, 1, absl::ZeroDuration())), HasSubstr("timeout"));
  ProcessGroupOptions options;
  options.link = LinkSpeed{};
  EXPECT_THAT(Message(CreateTcpRank({}, options)), HasSubstr("link"));
}

TEST(TcpTest, AnAddressThatCannotBeFoundIsRefusedOnEveryRank) {
  for (int r : {0, 1}) {
    const Rank rank = Create(r, 2, FreePort(), kPatience, "no such host");
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Message(rank), AllOf(HasSubstr("'no such host'"), HasSubstr("MASTER_ADDR")));
  }
}

TEST(TcpTest, APortThatIsTakenIsRefusedAtOnce) {
  const Listener other;
  const Rank rank = Create(0, 2, other.port());
  EXPECT_EQ(rank.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(rank), AllOf(HasSubstr(absl::StrCat("port ", other.port())),
                                   HasSubstr("choose another MASTER_PORT")));
}

TEST(TcpTest, WithoutRankZeroTheOthersSayWhereTheyLookedForIt) {
  const int port = FreePort();
  const Rank rank = Create(1, 2, port, absl::Milliseconds(100));
  EXPECT_EQ(rank.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Message(rank), AllOf(HasSubstr(absl::StrCat("127.0.0.1:", port)),
                                   HasSubstr("see that rank 0 runs there")));
}

TEST(TcpTest, RanksThatDoNotComeAreNamedOnEveryRankThatHas) {
  const int port = FreePort();
  const absl::Duration timeout = absl::Milliseconds(300);
  const auto ranks = CreateAll(
      {[&] { return Create(0, 4, port, timeout); }, [&] { return Create(2, 4, port, timeout); }});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kDeadlineExceeded) << rank.status();
    EXPECT_THAT(Message(rank), HasSubstr("ranks 1, 3 did not come to rank 0"));
  }
}

TEST(TcpTest, ContradictoryStartsFailEveryRankAtOnceWithTheContradiction) {
  const absl::Time start = SteadyNow();
  int port = FreePort();
  auto ranks = CreateAll({[&] { return Create(0, 3, port); }, [&] { return Create(1, 3, port); },
                          [&] { return Create(2, 4, port); }});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kInvalidArgument) << rank.status();
    EXPECT_THAT(Message(rank), HasSubstr("rank 2 was started with WORLD_SIZE=4, rank 0 with "
                                         "WORLD_SIZE=3"));
  }
  port = FreePort();
  ranks = CreateAll({[&] { return Create(0, 3, port); }, [&] { return Create(1, 3, port); },
                     [&] { return Create(1, 3, port); }});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kInvalidArgument) << rank.status();
    EXPECT_THAT(Message(rank), HasSubstr("two processes were started with RANK=1"));
  }
  EXPECT_LT(SteadyNow() - start, kPatience / 2) << "they waited for the deadline";
}

TEST(TcpTest, AProcessTooManyDoesNotDisturbAJobThatIsComplete) {
  const int port = FreePort();
  auto ranks = CreateAll({[&] { return Create(0, 2, port); }, [&] { return Create(1, 2, port); }});
  ASSERT_TRUE(ranks[0].ok() && ranks[1].ok());
  EXPECT_THAT(Message(Create(1, 2, port)), HasSubstr("two processes were started with RANK=1"));
  EXPECT_THAT(Message(Create(1, 3, port)), HasSubstr("WORLD_SIZE=3"));
  std::thread other(
      [&] { EXPECT_EQ((*ranks[1])->Open("a").value()->Barrier(Call("u")), absl::OkStatus()); });
  EXPECT_EQ((*ranks[0])->Open("a").value()->Barrier(Call("u")), absl::OkStatus());
  other.join();
}

TEST(TcpTest, StrangersAreIgnoredWhateverTheySay) {
  const int port = FreePort();
  std::vector<int> strangers;
  std::thread rude([&] {
    const std::string garbage(1 << 20, '\xff');
    std::string huge(24, '\0');  // a frame of 2^63 bytes, but for the magic number
    std::memset(huge.data() + 8, 0x7f, 8);
    for (const std::string& words :
         {std::string(), std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), garbage, huge}) {
      const int fd = Stranger(port);
      (void)send(fd, words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      strangers.push_back(fd);  // and stays connected
    }
    close(Stranger(port));
  });
  auto ranks = CreateAll({[&] { return Create(0, 2, port); },
                          [&] {
                            rude.join();
                            return Create(1, 2, port);
                          }});
  ASSERT_TRUE(ranks[0].ok()) << ranks[0].status();
  ASSERT_TRUE(ranks[1].ok()) << ranks[1].status();
  std::thread other(
      [&] { EXPECT_EQ((*ranks[1])->Open("a").value()->Barrier(Call("u")), absl::OkStatus()); });
  EXPECT_EQ((*ranks[0])->Open("a").value()->Barrier(Call("u")), absl::OkStatus());
  other.join();
  for (int fd : strangers) close(fd);
}

TEST(TcpTest, SomethingElseAtRankZerosPlaceIsRecognized) {
  const Listener other;
  std::thread server([&] {
    const int fd = other.Accept();
    const std::string words = "HTTP/1.1 400 Bad Request\r\n\r\n";
    (void)send(fd, words.data(), words.size(), MSG_NOSIGNAL);
    char rest;
    while (recv(fd, &rest, 1, 0) > 0) {
    }
    close(fd);
  });
  const Rank rank = Create(1, 2, other.port());
  EXPECT_EQ(rank.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(rank), HasSubstr("see that rank 0 of this job, and nothing else, listens"));
  server.join();
}

// Runs a rank in a process of its own, which ends with the status that `body` returns.
pid_t Fork(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  return child;
}

int ExitCode(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Which of the three processes is killed in the middle of a call; the others wait in it.
class KilledTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, KilledTest, testing::Values(0, 1, 2));

TEST_P(KilledTest, AKilledProcessIsNoticedAtOnceByName) {
  const int port = FreePort();
  const int killed = GetParam();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  std::vector<pid_t> children;
  for (int r = 0; r < 3; ++r) {
    children.push_back(Fork([&] {
      Rank rank = Create(r, 3, port, absl::InfiniteDuration());
      if (!rank.ok()) return 10;
      std::unique_ptr<Communicator> channel = (*rank)->Open("test").value();
      if (!channel->Barrier(Call("start")).ok()) return 11;
      if (write(ready[1], "x", 1) != 1) return 12;
      if (r == killed) {
        for (;;) absl::SleepFor(absl::Hours(1));
      }
      const absl::Status status = channel->Barrier(Call("h.2"));
      if (status.code() != absl::StatusCode::kUnavailable) return 13;
      return absl::StrContains(status.message(), absl::StrCat("rank ", killed, " has left")) &&
                     absl::StrContains(status.message(), "barrier(unit 'h.2'")
                 ? 0
                 : 14;
    }));
  }
  char byte;
  for (int r = 0; r < 3; ++r) ASSERT_EQ(read(ready[0], &byte, 1), 1);
  absl::SleepFor(absl::Milliseconds(50));  // most likely the others are waiting by now
  ASSERT_EQ(kill(children[killed], SIGKILL), 0);
  const absl::Time start = SteadyNow();
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ExitCode(children[r]), r == killed ? -1 : 0) << r;
  EXPECT_LT(SteadyNow() - start, kPatience / 2);
  close(ready[0]);
  close(ready[1]);
}

TEST(TcpTest, AProcessThatDiesBeforeAllHaveComeFailsTheOthersStart) {
  const int port = FreePort();
  const pid_t early = Fork([&] {
    std::thread killer([] {
      absl::SleepFor(absl::Milliseconds(300));
      _exit(1);
    });
    (void)Create(1, 3, port);
    return 2;
  });
  const Rank rank = Create(0, 3, port);
  EXPECT_EQ(rank.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(rank), HasSubstr("rank 1 has left before all ranks had come"));
  EXPECT_EQ(ExitCode(early), 1);
}

TEST(TcpTest, WhoCallsWhenAllOthersHaveLeftHearsOfTheFirstOfThem) {
  const int port = FreePort();
  auto ranks = CreateAll({[&] { return Create(0, 3, port); }, [&] { return Create(1, 3, port); },
                          [&] { return Create(2, 3, port); }});
  for (const Rank& rank : ranks) ASSERT_TRUE(rank.ok()) << rank.status();
  ranks[1] = absl::UnknownError("gone");
  // Rank 0 fails because of rank 1, and takes the hub along.
  EXPECT_THAT(std::string((*ranks[0])->Open("a").value()->Barrier(Call("u")).message()),
              HasSubstr("rank 1 has left"));
  ranks[0] = absl::UnknownError("gone");
  EXPECT_THAT(std::string((*ranks[2])->Open("a").value()->Barrier(Call("u")).message()),
              HasSubstr("rank 1 has left"));
}

TEST(TcpTest, AnAbortReachesProcessesThatEndRightAfterIt) {
  const int port = FreePort();
  const pid_t failing = Fork([&] {
    Rank rank = Create(1, 2, port);
    if (!rank.ok()) return 10;
    (*rank)->Abort(absl::DataLossError("loss is NaN at step 12"));
    return 0;
  });
  const Rank rank = Create(0, 2, port);
  ASSERT_TRUE(rank.ok()) << rank.status();
  EXPECT_EQ((*rank)->Open("a").value()->Barrier(Call("u")),
            absl::DataLossError("loss is NaN at step 12"));
  EXPECT_EQ((*rank)->Health(), absl::DataLossError("loss is NaN at step 12"));
  EXPECT_EQ(ExitCode(failing), 0);
}

}  // namespace
}  // namespace dim0
