#include "tools/traced_run.h"

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

namespace fs = std::filesystem;

std::string File(const std::string& name, absl::string_view contents) {
  const std::string path = (fs::path(testing::TempDir()) / name).string();
  std::ofstream(path, std::ios::binary) << contents;
  return path;
}

TEST(RunLabels, AreTheFoldersNamesWithoutTrace) {
  EXPECT_THAT(RunLabels({"runs/adamw", "/x/rmnp/", "runs/muon/trace", "runs/b/trace/", "c/./"}),
              ElementsAre("adamw", "rmnp", "muon", "b", "c"));
  const std::string here = fs::current_path().filename().string();
  EXPECT_THAT(RunLabels({"."}), ElementsAre(here));
  EXPECT_THAT(RunLabels({"/", "/trace"}), ElementsAre("/", "trace"));
}

TEST(RunLabels, DifferByNumberWhereNamesAreEqual) {
  EXPECT_THAT(RunLabels({"x/a", "x/a 2", "y/a", "z/a", "y/b"}),
              ElementsAre("a", "a 2", "a 3", "a 4", "b"));
}

TEST(ReadLossCurve, TakesLossesAndValidationLossesAndPassesOverTheRest) {
  const std::string path = File("metrics.jsonl",
                                R"({"step":1,"loss":5.5,"lr":0.1}
{"step":2,"val_loss":5.25}

{"step":2,"diagnostics":{"loss":3}}
{"step":3,"loss":null}
{"step":"4","loss":1}
{"loss":1}
{"step":-1,"loss":1}
{"step":1e300,"loss":1}
{"step":5,"loss":4}
)");
  const absl::StatusOr<LossCurve> curve = ReadLossCurve(path, {});
  ASSERT_TRUE(curve.ok()) << curve.status();
  EXPECT_THAT(curve->losses, ElementsAre(Pair(1, 5.5), Pair(5, 4.0)));
  EXPECT_THAT(curve->validation_losses, ElementsAre(Pair(2, 5.25)));
}

TEST(ReadLossCurve, OfAnEmptyFileIsEmpty) {
  const absl::StatusOr<LossCurve> curve = ReadLossCurve(File("empty.jsonl", ""), {});
  ASSERT_TRUE(curve.ok()) << curve.status();
  EXPECT_THAT(curve->losses, IsEmpty());
}

TEST(ReadLossCurve, NamesTheFileAndLineThatIsBroken) {
  for (const absl::string_view broken :
       {"{\"step\":2,\"lo", "[1]", "7", "{\"step\":2,\"loss\":1e999}", "\xff\xfe"}) {
    const std::string path =
        File("broken.jsonl", std::string("{\"step\":1,\"loss\":5}\n") + std::string(broken));
    const absl::StatusOr<LossCurve> curve = ReadLossCurve(path, {});
    ASSERT_EQ(curve.status().code(), absl::StatusCode::kInvalidArgument) << broken;
    EXPECT_THAT(std::string(curve.status().message()), HasSubstr(path + ": line 2"));
  }
  EXPECT_EQ(ReadLossCurve("no/such/file", {}).status().code(), absl::StatusCode::kNotFound);
}

TEST(ReadLossCurve, RefusesTheFileOfAnotherRunThanTheTracedSteps) {
  const std::string path =
      File("other.jsonl", "{\"step\":1,\"loss\":5.5}\n{\"step\":2,\"loss\":5.1}\n");
  const auto step = [](int64_t number, std::optional<double> loss) {
    return TraceStep{.step = number, .loss = loss};
  };
  EXPECT_TRUE(ReadLossCurve(path, {step(1, 5.5), step(2, 5.1)}).ok());
  EXPECT_TRUE(ReadLossCurve(path, {step(2, 5.1)}).ok());
  EXPECT_TRUE(ReadLossCurve(path, {step(3, std::nullopt)}).ok());
  for (const TraceStep& other :
       {step(2, std::nextafter(5.1, 6)), step(1, 5.1), step(3, 5.1), step(0, 0)}) {
    const absl::Status status = ReadLossCurve(path, {step(1, 5.5), other}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << other.step;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path + " is of another run"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("step " + std::to_string(other.step)));
  }
}

}  // namespace
}  // namespace dim0
