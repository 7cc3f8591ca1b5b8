#include "tools/flags.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

ABSL_FLAG(std::string, text, "none", "Some text.");
ABSL_FLAG(int32_t, steps, 10, "A number of steps.\nSecond line.");
ABSL_FLAG(int64_t, tokens, 10, "A large number.");
ABSL_FLAG(uint64_t, seed, 0, "A seed.");
ABSL_FLAG(double, lr, 0.5, "A rate.");
ABSL_FLAG(bool, prefetch, true, "A switch.");
ABSL_FLAG(bool, recompute, false, "Another switch.");

namespace dim0 {
namespace {

using ::testing::HasSubstr;

class FlagsTest : public ::testing::Test {
 protected:
  static absl::StatusOr<CommandLine> Parse(const std::vector<const char*>& arguments) {
    return ParseFlags(arguments);
  }
  static void Accept(const std::vector<const char*>& arguments) {
    const absl::StatusOr<CommandLine> parsed = Parse(arguments);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, CommandLine::kRun);
  }
  static std::string ErrorOf(const std::vector<const char*>& arguments) {
    const absl::StatusOr<CommandLine> parsed = Parse(arguments);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(parsed.status().message());
  }

  absl::FlagSaver saver_;  // sets every flag back after the test
};

TEST_F(FlagsTest, LeavesDefaultsWithoutArguments) {
  Accept({});
  EXPECT_EQ(absl::GetFlag(FLAGS_text), "none");
  EXPECT_EQ(absl::GetFlag(FLAGS_steps), 10);
}

TEST_F(FlagsTest, TakesValuesWithAnEqualsSignOrAsTheNextArgument) {
  Accept({"--text=a=b c", "--steps", "3", "-tokens=5000000000", "--lr", "-1e-3", "--seed=7"});
  EXPECT_EQ(absl::GetFlag(FLAGS_text), "a=b c");
  EXPECT_EQ(absl::GetFlag(FLAGS_steps), 3);
  EXPECT_EQ(absl::GetFlag(FLAGS_tokens), 5'000'000'000);
  EXPECT_EQ(absl::GetFlag(FLAGS_lr), -1e-3);
  EXPECT_EQ(absl::GetFlag(FLAGS_seed), 7u);
}

TEST_F(FlagsTest, TakesAnEmptyValue) {
  Accept({"--text="});
  EXPECT_EQ(absl::GetFlag(FLAGS_text), "");
  absl::SetFlag(&FLAGS_text, "x");
  Accept({"--text", ""});
  EXPECT_EQ(absl::GetFlag(FLAGS_text), "");
}

TEST_F(FlagsTest, SwitchesBooleansByNameNoNameAndValue) {
  Accept({"--noprefetch", "--recompute"});
  EXPECT_FALSE(absl::GetFlag(FLAGS_prefetch));
  EXPECT_TRUE(absl::GetFlag(FLAGS_recompute));
  Accept({"--prefetch=true", "--recompute=0"});
  EXPECT_TRUE(absl::GetFlag(FLAGS_prefetch));
  EXPECT_FALSE(absl::GetFlag(FLAGS_recompute));
}

TEST_F(FlagsTest, LetsTheLastValueCount) {
  Accept({"--steps=1", "--steps=2"});
  EXPECT_EQ(absl::GetFlag(FLAGS_steps), 2);
}

TEST_F(FlagsTest, SeesTheCallForHelp) {
  for (const char* help : {"--help", "-help", "-h"}) {
    const absl::StatusOr<CommandLine> parsed = Parse({"--steps=2", help, "--nonsense"});
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, CommandLine::kHelp);
  }
}

TEST_F(FlagsTest, NamesAnUnknownFlagAndTheOneThatWasMeant) {
  EXPECT_EQ(ErrorOf({"--stpes=3"}),
            "unknown flag --stpes; did you mean --steps? --help lists all flags");
  EXPECT_EQ(ErrorOf({"--recompute_all"}),
            "unknown flag --recompute_all; did you mean --recompute? --help lists all flags");
  EXPECT_EQ(ErrorOf({"--zebra"}), "unknown flag --zebra; --help lists all flags");
  EXPECT_EQ(ErrorOf({"--nosteps"}),
            "unknown flag --nosteps; did you mean --steps? --help lists all flags");
  EXPECT_EQ(ErrorOf({"--"}), "unknown flag --; --help lists all flags");
}

TEST_F(FlagsTest, SaysWhatAValueShouldHaveBeen) {
  EXPECT_EQ(ErrorOf({"--steps=ten"}), "--steps=ten: expected a whole number below 2^31");
  EXPECT_EQ(ErrorOf({"--steps=3000000000"}),
            "--steps=3000000000: expected a whole number below 2^31");
  EXPECT_EQ(ErrorOf({"--tokens", "1.5"}), "--tokens=1.5: expected a whole number");
  EXPECT_EQ(ErrorOf({"--seed=-1"}), "--seed=-1: expected a whole number from 0");
  EXPECT_EQ(ErrorOf({"--lr="}), "--lr=: expected a number");
  EXPECT_EQ(ErrorOf({"--prefetch=maybe"}), "--prefetch=maybe: expected true or false");
  EXPECT_EQ(ErrorOf({"--noprefetch=1"}), "--noprefetch takes no value");
  EXPECT_EQ(absl::GetFlag(FLAGS_steps), 10);
}

TEST_F(FlagsTest, SaysWhenAValueIsForgotten) {
  EXPECT_EQ(ErrorOf({"--steps"}), "--steps needs a value");
  EXPECT_EQ(ErrorOf({"--text", "--steps=3"}), "--text needs a value");
}

TEST_F(FlagsTest, CollectsArgumentsThatBelongToNoFlagWhereAProgramTakesThem) {
  const std::vector<const char*> arguments = {"runs/a", "--text", "x", "b c", "--steps=3", ""};
  std::vector<std::string> positional;
  const absl::StatusOr<CommandLine> parsed = ParseFlags(arguments, &positional);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(positional, (std::vector<std::string>{"runs/a", "b c", ""}));
  EXPECT_EQ(absl::GetFlag(FLAGS_text), "x");
  EXPECT_EQ(ParseFlags({"-"}, &positional).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(FlagsTest, RefusesArgumentsThatBelongToNoFlag) {
  EXPECT_EQ(ErrorOf({"corpus.txt"}),
            "unexpected argument \"corpus.txt\"; flags are given as --flag=value");
  EXPECT_EQ(ErrorOf({"--prefetch", "false"}),
            "unexpected argument \"false\"; flags are given as --flag=value");
  EXPECT_EQ(ErrorOf({"-"}), "unexpected argument \"-\"; flags are given as --flag=value");
  EXPECT_EQ(ErrorOf({""}), "unexpected argument \"\"; flags are given as --flag=value");
}

TEST_F(FlagsTest, ListsEveryFlagOfTheProgramWithItsDefault) {
  absl::SetFlag(&FLAGS_steps, 99);
  const std::string help = HelpText("prog", "does things.");
  EXPECT_EQ(help.find("prog: does things.\n\nFlags:\n"), 0u);
  EXPECT_THAT(help, HasSubstr("  --steps=10\n      A number of steps.\n      Second line.\n"));
  EXPECT_THAT(help, HasSubstr("  --text=none\n      Some text.\n"));
  EXPECT_THAT(help, HasSubstr("  --prefetch=true\n"));
  EXPECT_LT(help.find("--lr"), help.find("--steps"));
}

TEST_F(FlagsTest, GivesMainItsExitStatus) {
  const char* good[] = {"/bin/prog", "--steps=4"};
  EXPECT_EQ(HandleCommandLine(2, good, "does things."), std::nullopt);
  const char* help[] = {"/bin/prog", "--help"};
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(HandleCommandLine(2, help, "does things."), 0);
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr("prog: does things.\n"));
  const char* bad[] = {"/bin/prog", "--step\n=4"};
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(HandleCommandLine(2, bad, "does things."), 2);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "prog: unknown flag --step ; did you mean --steps? --help lists all flags\n");
}

}  // namespace
}  // namespace dim0
