#include "runtime/trace/trace_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace dim0 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kStart = 1790000000000000;  // a time of 2026

std::string Fresh(const std::string& name) {
  const fs::path path = fs::path(testing::TempDir()) / name;
  fs::remove_all(path);
  fs::create_directories(path);
  return path.string();
}

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void Overwrite(const std::string& path, absl::string_view text) {
  // Some file systems wait for the disk when a file is cut to nothing, but not when it is new.
  fs::remove(path);
  std::ofstream(path, std::ios::binary) << text;
}

TraceOp Op(int64_t id, int64_t begin, int64_t end, const std::string& name,
           OpKind kind = OpKind::kCompute) {
  TraceOp op;
  op.name = name;
  op.kind = kind;
  op.id = id;
  op.step = 3;
  op.enqueued = kStart + id;
  op.begin = kStart + begin;
  op.end = kStart + end;
  return op;
}

// Two steps with something in every field.
RankTrace Sample(int rank, int world_size) {
  RankTrace trace;
  trace.rank = rank;
  trace.world_size = world_size;
  trace.backend = "gloo";
  trace.model = "5f3a";
  trace.parameters = 124439808;
  trace.flags = {{"optimizer", "rmnp"}, {"data", "a \"b\"\\c\n\t\x01 é 日本 😀"}};
  trace.metrics = "../metrics.jsonl";

  TraceStream compute{"compute", 7, {}, {}};
  compute.ops = {Op(1, 10, 50, "forward"), Op(3, 60, 60, "loss \"x\"\n")};
  compute.ops[0].unit = "h.0";
  compute.ops[0].phase = "forward";
  compute.ops[0].flops = 1e300;
  compute.ops[0].bytes = 0.1;
  compute.ops[1].kind = OpKind::kCopy;
  compute.ops[1].failed = true;
  compute.ops[1].flops = 12345678901234567.0;
  compute.waits = {{kStart + 50, kStart + 60, 2, "all_gather"}, {kStart + 60, kStart + 60, 0, ""}};

  TraceStream gather{"all_gather", 20, {}, {}};
  gather.ops = {Op(2, 5, 60, "gather h.0", OpKind::kCollective),
                Op(4, 60, 75, "gather none", OpKind::kCollective)};
  gather.ops[0].collective =
      TraceCollective{"all_gather", "parameters", Purpose::kParameter, DType::kBFloat16, 9, 50,
                      100,          100,          kStart + 20};

  TraceStream optimizer{"optimizer", 22, {}, {}};
  optimizer.ops = {Op(5, 100, 110, "update", OpKind::kOptimizer)};

  trace.streams = {compute, gather, optimizer, {"idle", 23, {}, {}}};
  trace.steps = {{3, kStart, kStart + 80, 5.123456789012345}, {4, kStart + 90, kStart + 120}};
  trace.memory = {{kStart, {1, 2, 3, 4, 5, 6, 7}}, {kStart + 30, {1, 0, 0, 0, 0, 0, 1 << 30}}};
  return trace;
}

// A folder with the two ranks' files of a run.
std::string SampleDir(const std::string& name) {
  const std::string dir = Fresh(name);
  EXPECT_TRUE(WriteTrace(dir, Sample(0, 2)).ok());
  EXPECT_TRUE(WriteTrace(dir, Sample(1, 2)).ok());
  return dir;
}

// Reading `dir` fails with one line that has all of `parts`.
void ExpectError(const std::string& dir, absl::StatusCode code,
                 const std::vector<std::string>& parts) {
  const auto traces = ReadTraces(dir);
  ASSERT_FALSE(traces.ok());
  EXPECT_EQ(traces.status().code(), code) << traces.status();
  const std::string message(traces.status().message());
  EXPECT_FALSE(absl::StrContains(message, "\n")) << message;
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(message, part)) << message << "\nlacks: " << part;
  }
}

TEST(TraceFile, WhatIsReadEqualsWhatWasWritten) {
  const std::string dir = SampleDir("round_trip");
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  ASSERT_EQ(traces->size(), 2u);
  EXPECT_EQ((*traces)[0], Sample(0, 2));
  EXPECT_EQ((*traces)[1], Sample(1, 2));
}

TEST(TraceFile, EveryKindPurposeAndElementTypeIsReadBack) {
  const std::string dir = Fresh("enums");
  RankTrace trace;
  trace.streams = {{"all", 7, {}, {}}};
  int64_t id = 0;
  for (const OpKind kind :
       {OpKind::kCompute, OpKind::kCollective, OpKind::kOptimizer, OpKind::kCopy}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kBFloat16, DType::kInt32, DType::kInt64, DType::kByte}) {
      for (int purpose = 0; purpose < kNumPurposes; ++purpose) {
        ++id;
        TraceOp op = Op(id, id, id + 1, "op", kind);
        op.collective.emplace().dtype = dtype;
        op.collective->purpose = static_cast<Purpose>(purpose);
        trace.streams[0].ops.push_back(op);
      }
    }
  }
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->at(0), trace);
}

TEST(TraceFile, ATraceWithoutStepsOrStreamsIsReadBack) {
  const std::string dir = Fresh("nothing");
  RankTrace trace;
  trace.cut_short = true;
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->at(0), trace);
}

TEST(TraceFile, BytesThatAreNotUtf8BecomeReplacementCharacters) {
  const std::string dir = Fresh("bytes");
  RankTrace trace;
  trace.model = "a\xff\xfe z\xc3";
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->at(0).model, "a\xef\xbf\xbd\xef\xbf\xbd z\xef\xbf\xbd");
}

TEST(TraceFile, NumbersThatJsonLacksAreWrittenAsZero) {
  const std::string dir = Fresh("infinite");
  RankTrace trace;
  trace.streams = {{"compute", 7, {Op(1, 0, 1, "op")}, {}}};
  trace.streams[0].ops[0].flops = HUGE_VAL;
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->at(0).streams[0].ops[0].flops, 0);
}

TEST(TraceFile, LossesAreReadBackToTheLastBit) {
  const std::string dir = Fresh("losses");
  RankTrace trace = Sample(0, 1);
  trace.steps.clear();
  const double losses[] = {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, 10, 0, -2.5};
  for (const double loss : losses) {
    const int64_t step = static_cast<int64_t>(trace.steps.size());
    trace.steps.push_back({step, kStart + step, kStart + step + 1, loss});
  }
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->at(0).steps, trace.steps);
}

TEST(TraceFile, ALossThatIsNoNumberIsLeftOut) {
  const std::string dir = Fresh("no_loss");
  RankTrace trace = Sample(0, 1);
  trace.steps[0].loss = std::nan("");
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->at(0).steps[0].loss, std::nullopt);
}

TEST(TraceFile, WhatEndsBeforeItBeginsIsWrittenAsOfNoLength) {
  const std::string dir = Fresh("backwards");
  RankTrace trace = Sample(0, 1);
  trace.steps = {{3, kStart + 80, kStart}};
  trace.streams[0].ops = {Op(1, 50, 10, "forward")};
  trace.streams[0].waits = {{kStart + 60, kStart + 50, 2, "all_gather"}};
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  const RankTrace& read = traces->at(0);
  EXPECT_EQ(read.steps[0].end, kStart + 80);
  EXPECT_EQ(read.streams[0].ops[0].end, kStart + 50);
  EXPECT_EQ(read.streams[0].waits[0].end, kStart + 60);
}

TEST(TraceFile, TheHeadNamesTheRankAsHtaLooksForIt) {
  const std::string text = Contents(SampleDir("head") + "/rank1.json");
  EXPECT_TRUE(absl::StartsWith(text,
                               "{\n  \"schemaVersion\": 1,\n  \"distributedInfo\": {\"backend\": "
                               "\"gloo\", \"rank\": 1, \"world_size\": 2},\n"))
      << text.substr(0, 200);
  for (const char c : text) ASSERT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << int{c};
}

// The events of rank 0 for which all of `members` hold, in the file's order.
std::vector<Json> Events(const Json& file, const Json& members) {
  std::vector<Json> found;
  for (const Json& event : file["traceEvents"]) {
    bool matches = true;
    for (const auto& [key, value] : members.items()) {
      matches = matches && event.contains(key) && event[key] == value;
    }
    if (matches) found.push_back(event);
  }
  return found;
}

TEST(TraceFile, EveryEventHasAnIntegerTimeAndItsRanksProcess) {
  const Json file = Json::parse(Contents(SampleDir("times") + "/rank1.json"));
  EXPECT_EQ(file["displayTimeUnit"], "ms");
  EXPECT_EQ(file["baseTimeNanoseconds"], 0);
  EXPECT_EQ(file["traceName"], "rank1.json");
  for (const Json& event : file["traceEvents"]) {
    EXPECT_TRUE(event.at("ts").is_number_unsigned()) << event;
    EXPECT_GE(event.at("ts"), kStart) << event;
    EXPECT_TRUE(!event.contains("dur") || event["dur"].is_number_unsigned()) << event;
    EXPECT_EQ(event.at("pid"), 1) << event;
  }
}

TEST(TraceFile, AnOpIsLaunchedOnTheHostRowAndTiedToItsRun) {
  const Json file = Json::parse(Contents(SampleDir("launches") + "/rank0.json"));
  const Json& events = file["traceEvents"];
  std::set<int64_t> seen;
  for (size_t i = 0; i < events.size(); ++i) {
    if (events[i].value("cat", "") != "kernel") continue;
    const int64_t id = events[i]["args"]["correlation"];
    seen.insert(id);
    ASSERT_GE(i, 2u);
    ASSERT_LT(i + 1, events.size());
    EXPECT_EQ(events[i - 2], Json({{"ph", "X"},
                                   {"pid", 0},
                                   {"tid", 1},
                                   {"ts", kStart + id},
                                   {"dur", 0},
                                   {"cat", "cuda_runtime"},
                                   {"name", "cudaLaunchKernel"},
                                   {"args", {{"correlation", id}}}}));
    EXPECT_EQ(events[i - 1], Json({{"ph", "s"},
                                   {"pid", 0},
                                   {"tid", 1},
                                   {"ts", kStart + id},
                                   {"id", id},
                                   {"cat", "ac2g"},
                                   {"name", "ac2g"}}));
    EXPECT_EQ(events[i]["tid"], events[i]["args"]["stream"]);
    EXPECT_EQ(events[i + 1], Json({{"ph", "f"},
                                   {"pid", 0},
                                   {"tid", events[i]["tid"]},
                                   {"ts", events[i]["ts"]},
                                   {"id", id},
                                   {"bp", "e"},
                                   {"cat", "ac2g"},
                                   {"name", "ac2g"}}));
  }
  EXPECT_EQ(seen, (std::set<int64_t>{1, 2, 3, 4, 5}));
}

TEST(TraceFile, ACollectiveHasWhatPyTorchsHave) {
  const Json file = Json::parse(Contents(SampleDir("collective") + "/rank0.json"));
  const auto found = Events(file, {{"name", "ncclKernel_all_gather"}});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0], Json({{"ph", "X"},
                            {"pid", 0},
                            {"tid", 20},
                            {"ts", kStart + 5},
                            {"dur", 55},
                            {"cat", "kernel"},
                            {"name", "ncclKernel_all_gather"},
                            {"args",
                             {{"stream", 20},
                              {"correlation", 2},
                              {"kind", "collective"},
                              {"unit", ""},
                              {"phase", ""},
                              {"step", 3},
                              {"enqueued", kStart + 2},
                              {"flops", 0},
                              {"bytes", 0},
                              {"op", "gather h.0"},
                              {"Collective name", "all_gather"},
                              {"Process Group Name", "parameters"},
                              {"Process Group Ranks", "[0, 1]"},
                              {"Group size", 2},
                              {"dtype", "BFloat16"},
                              {"Seq", 9},
                              {"In msg nelems", 50},
                              {"Out msg nelems", 100},
                              {"purpose", "parameter"},
                              {"bytes sent", 100},
                              {"met", kStart + 20}}}}));
}

TEST(TraceFile, ManyRanksAreAbbreviated) {
  const std::string dir = Fresh("many");
  RankTrace trace = Sample(0, 1000);
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const Json file = Json::parse(Contents(dir + "/rank0.json"));
  const std::string ranks =
      Events(file, {{"name", "ncclKernel_all_gather"}}).at(0)["args"]["Process Group Ranks"];
  EXPECT_TRUE(absl::StartsWith(ranks, "[0, 1, 2, ")) << ranks;
  EXPECT_TRUE(absl::EndsWith(ranks, ", 30, ..., 999]")) << ranks;
}

TEST(TraceFile, WaitsStandOnTheirRowWithoutAStream) {
  const Json file = Json::parse(Contents(SampleDir("waits") + "/rank0.json"));
  const auto found = Events(file, {{"cat", "wait"}});
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0], Json({{"ph", "X"},
                            {"pid", 0},
                            {"tid", 7},
                            {"ts", kStart + 50},
                            {"dur", 10},
                            {"cat", "wait"},
                            {"name", "wait"},
                            {"args", {{"cause", 2}, {"cause stream", "all_gather"}}}}));
}

TEST(TraceFile, AnEmptyStepFollowsTheLastStepAndLaunch) {
  const std::string dir = Fresh("steps");
  RankTrace trace = Sample(0, 1);
  trace.streams[2].ops[0].enqueued = trace.steps.back().end;
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  const auto found =
      Events(Json::parse(Contents(dir + "/rank0.json")), {{"cat", "user_annotation"}});
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0]["name"], "ProfilerStep#3");
  EXPECT_EQ(found[0]["ts"], kStart);
  EXPECT_EQ(found[0]["dur"], 80);
  EXPECT_EQ(found[1]["name"], "ProfilerStep#4");
  EXPECT_EQ(found[1]["ts"], kStart + 90);
  EXPECT_EQ(found[1]["dur"], 30);
  EXPECT_EQ(found[2]["name"], "ProfilerStep#5");
  EXPECT_EQ(found[2]["ts"], kStart + 121);
  EXPECT_EQ(found[2]["dur"], 0);
  EXPECT_EQ(ReadTraces(dir)->at(0), trace);
}

TEST(TraceFile, RowsAreNamedAndOrderedAndMemoryIsACounter) {
  const Json file = Json::parse(Contents(SampleDir("rows") + "/rank1.json"));
  std::map<int, std::string> names;
  for (const Json& event : Events(file, {{"name", "thread_name"}, {"ph", "M"}})) {
    names[event["tid"]] = event["args"]["name"];
  }
  EXPECT_EQ(names,
            (std::map<int, std::string>{
                {1, "host"}, {7, "compute"}, {20, "all_gather"}, {22, "optimizer"}, {23, "idle"}}));
  std::map<int, int> order;
  for (const Json& event : Events(file, {{"name", "thread_sort_index"}, {"ph", "M"}})) {
    order[event["tid"]] = event["args"]["sort_index"];
  }
  EXPECT_EQ(order, (std::map<int, int>{{1, 0}, {7, 7}, {20, 20}, {22, 22}, {23, 23}}));
  EXPECT_EQ(Events(file, {{"name", "process_name"}}).at(0)["args"]["name"], "rank 1");
  EXPECT_EQ(Events(file, {{"name", "process_sort_index"}}).at(0)["args"]["sort_index"], 1);

  const auto memory = Events(file, {{"ph", "C"}});
  ASSERT_EQ(memory.size(), 2u);
  EXPECT_EQ(memory[0]["ts"], kStart);
  EXPECT_EQ(memory[0]["args"], Json({{"parameters", 1},
                                     {"gradients", 2},
                                     {"optimizer", 3},
                                     {"gathered", 4},
                                     {"activations", 5},
                                     {"communication", 6},
                                     {"diagnostics", 7}}));
}

TEST(WriteTrace, AFolderThatIsMissingIsAnErrorThatNamesTheFile) {
  const std::string dir = Fresh("no_folder") + "/gone";
  const absl::Status status = WriteTrace(dir, Sample(0, 1));
  ASSERT_FALSE(status.ok());
  EXPECT_TRUE(absl::StrContains(status.message(), dir + "/rank0.json")) << status;
}

TEST(ReadTraces, ARunsFolderStandsForTheTraceInIt) {
  const std::string run = Fresh("run");
  fs::rename(SampleDir("run_trace"), run + "/trace");
  EXPECT_EQ(TraceDirOf(run), run + "/trace");
  const auto traces = ReadTraces(run);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->at(1), Sample(1, 2));
}

TEST(ReadTraces, ATraceOfItsOwnComesBeforeTheFolderTrace) {
  const std::string dir = SampleDir("own");
  fs::create_directories(dir + "/trace");
  EXPECT_EQ(TraceDirOf(dir), dir);
  EXPECT_TRUE(ReadTraces(dir).ok());
}

TEST(ReadTraces, OtherFilesInTheFolderDoNotMatter) {
  const std::string dir = SampleDir("others");
  for (const char* name : {"rank.json", "rank02.json", "rank-1.json", "rank2.json.gz", "rank2.jso",
                           "notes.txt", "rank99999999999999999999.json", "rank 2.json"}) {
    Overwrite(absl::StrCat(dir, "/", name), "x");
  }
  EXPECT_TRUE(ReadTraces(dir).ok());
}

TEST(ReadTraces, AFolderWithoutTracesIsAnErrorThatSaysWhatWasExpected) {
  const std::string dir = Fresh("bare");
  ExpectError(dir, absl::StatusCode::kNotFound,
              {dir, "no trace", "rank0.json", "train --trace=DIR"});
  ExpectError(dir + "/gone", absl::StatusCode::kNotFound,
              {dir + "/gone", "no folder", "train --trace=DIR"});
  Overwrite(dir + "/file", "x");
  ExpectError(dir + "/file", absl::StatusCode::kInvalidArgument, {dir + "/file", "not a folder"});
}

TEST(ReadTraces, CompressedTracesAreAnErrorThatSaysToGunzipThem) {
  const std::string dir = SampleDir("compressed");
  fs::rename(dir + "/rank1.json", dir + "/rank1.json.gz");
  ExpectError(dir, absl::StatusCode::kNotFound,
              {dir + "/rank1.json is missing", "gunzip " + dir + "/rank1.json.gz"});
  fs::rename(dir + "/rank0.json", dir + "/rank0.json.gz");
  ExpectError(dir, absl::StatusCode::kNotFound, {dir, "compressed", "gunzip"});
}

TEST(ReadTraces, WhatIsNoTraceIsAnErrorThatSaysWhatItIs) {
  const std::string dir = SampleDir("foreign");
  const std::string path = dir + "/rank1.json";
  const auto expect = [&](absl::string_view text, const std::string& what) {
    Overwrite(path, text);
    ExpectError(dir, absl::StatusCode::kInvalidArgument, {path, what});
  };
  expect("", "is empty");
  expect(" \n", "is empty");
  expect("{\"a\": [1,", "ends too early");
  expect("\x1f\x8b\x08", "gunzip");
  expect("{\"dim0\": \xff}", "not JSON");
  expect("{} {}", "not JSON");
  expect("{}", "not a trace");
  expect("[]", "not a trace");
  expect("17", "not a trace");
  expect("{\"traceEvents\": []}", "another program's trace");
  expect("{\"dim0\": {\"format\": 1}}", "not a trace");
  expect(std::string(1000000, '['), "not a trace");
  expect("{\"dim0\": " + std::string(1000000, '['), "nested");
  expect("{\"x\": " + std::string(1000000, '['), "ends too early");
  expect(
      "{\"schemaVersion\": 1, \"deviceProperties\": [{\"id\": 0}], \"distributedInfo\": "
      "{\"backend\": \"nccl\", \"rank\": 0, \"world_size\": 2, \"pg_config\": [{\"ranks\": [0]}]}, "
      "\"traceEvents\": [{\"ph\": \"X\", \"cat\": \"cpu_op\", \"name\": \"aten::add\", \"ts\": "
      "1.5, "
      "\"dur\": 2.25}]}",
      "PyTorch's profiler");
}

TEST(ReadTraces, AMemberThatIsMissingOrWrongIsAnErrorThatNamesIt) {
  const std::string dir = SampleDir("members");
  const std::string path = dir + "/rank0.json";
  const std::string good = Contents(path);
  const auto expect = [&](absl::string_view from, absl::string_view to,
                          const std::vector<std::string>& parts) {
    ASSERT_TRUE(absl::StrContains(good, from)) << from;
    Overwrite(path, absl::StrReplaceAll(good, {{from, to}}));
    std::vector<std::string> all = parts;
    all.push_back(path);
    ExpectError(dir, absl::StatusCode::kInvalidArgument, all);
  };
  expect("\"format\": 1", "\"format\": 2", {"format 2", "reads 1"});
  expect("\"format\": 1", "\"format\": \"1\"", {"dim0", "\"format\""});
  expect("\"format\": 1, ", "", {"\"format\" is missing"});
  expect("\"model\": \"5f3a\"", "\"model\": null", {"\"model\" is not a string"});
  expect("\"parameters\": 124439808", "\"parameters\": -1", {"\"parameters\""});
  expect("\"cut_short\": false", "\"cut_short\": 0", {"\"cut_short\""});
  expect("\"optimizer\": \"rmnp\"", "\"optimizer\": 1", {"flag"});
  expect("\"flags\": {", "\"flag\": {", {"\"flags\" is missing"});
  expect("\"streams\": [", "\"streams\": 1, \"x\": [", {"\"streams\" is not an array"});
  expect("\"number\": 7}", "\"number\": 1}", {"\"number\""});
  expect("\"number\": 7}", "\"number\": 20}", {"two streams have number 20"});
  expect("\"number\": 7}", "\"number\": 8}", {"no stream 7"});
  expect("\"world_size\": 2", "\"world_size\": 0", {"\"world_size\""});
  expect("\"world_size\": 2", "\"world_size\": 1e9", {"\"world_size\""});
  expect("\"rank\": 0", "\"rank\": 2", {"\"rank\""});
  expect("\"distributedInfo\"", "\"distributed\"", {"distributedInfo"});
  expect("\"dur\": 55", "\"dur\": -55", {"event", "\"dur\""});
  expect("\"dur\": 55", "\"dur\": 5.5", {"\"dur\""});
  expect("\"dur\": 55", "\"dur\": 18446744073709551615", {"\"dur\""});
  expect("\"dur\": 55", "\"dur\": 99999999999999999999999", {"\"dur\""});
  expect("\"dur\": 55", "\"dur\": 1e999", {"out of range"});
  expect("\"flops\": 1e+300", "\"flops\": -1", {"\"flops\""});
  expect("\"flops\": 1e+300", "\"flops\": 1e400", {"out of range"});
  expect("\"kind\": \"copy\"", "\"kind\": \"move\"", {"\"kind\" has an unknown value"});
  expect("\"correlation\": 2, \"kind\"", "\"correlation\": 0, \"kind\"", {"\"correlation\""});
  expect("\"failed\": true", "\"failed\": 1", {"\"failed\""});
  expect("\"dtype\": \"BFloat16\"", "\"dtype\": \"Half\"", {"\"dtype\""});
  expect("\"purpose\": \"parameter\"", "\"purpose\": 0", {"\"purpose\""});
  expect("\"cause\": 2", "\"cause\": \"2\"", {"\"cause\""});
  expect("\"gathered\": 4", "\"gathered\": -4", {"\"gathered\""});
  expect("\"step\": 3, \"loss\"", "\"step\": 9, \"loss\"", {"steps do not ascend"});
  expect("\"args\": {\"step\": 4}", "\"args\": []", {"\"args\" is not an object"});
  expect("\"loss\": 5.123456789012345", "\"loss\": null", {"\"loss\" is not a number"});
  expect("\"ph\": \"X\"", "\"p\": \"X\"", {"\"ph\" is missing"});
  expect("\"traceEvents\": [", "\"traceEvents\": [7,", {"event 1"});
  expect("\"traceEvents\": [", "\"traceEvents\": {\"a\": [", {"traceEvents", "not an array"});
}

TEST(ReadTraces, OpsThatOverlapOnOneStreamAreAnError) {
  const std::string dir = Fresh("overlap");
  RankTrace trace = Sample(0, 1);
  trace.streams[0].ops[1].begin = trace.streams[0].ops[0].end - 1;
  ASSERT_TRUE(WriteTrace(dir, trace).ok());
  ExpectError(dir, absl::StatusCode::kInvalidArgument, {"rank0.json", "begins before"});
}

TEST(ReadTraces, AMissingRankIsAnErrorThatNamesItsFile) {
  const std::string dir = Fresh("missing");
  for (const int rank : {0, 2, 3}) ASSERT_TRUE(WriteTrace(dir, Sample(rank, 4)).ok());
  ExpectError(dir, absl::StatusCode::kNotFound, {dir + "/rank1.json is missing", "4 ranks"});
  ASSERT_TRUE(WriteTrace(dir, Sample(1, 4)).ok());
  EXPECT_TRUE(ReadTraces(dir).ok());
  fs::remove(dir + "/rank3.json");
  ExpectError(dir, absl::StatusCode::kNotFound, {dir + "/rank3.json is missing"});
}

TEST(ReadTraces, AFileUnderAnotherRanksNameIsAnError) {
  const std::string dir = SampleDir("renamed");
  fs::remove(dir + "/rank1.json");
  fs::copy_file(dir + "/rank0.json", dir + "/rank1.json");
  ExpectError(dir, absl::StatusCode::kInvalidArgument, {dir + "/rank1.json", "rank 0"});
}

TEST(ReadTraces, FilesOfDifferentRunsAreAnErrorThatSaysWhatDiffers) {
  const std::string dir = SampleDir("mixed");
  const auto expect = [&](const std::function<void(RankTrace*)>& change, const std::string& what) {
    RankTrace trace = Sample(1, 2);
    change(&trace);
    ASSERT_TRUE(WriteTrace(dir, trace).ok());
    ExpectError(dir, absl::StatusCode::kInvalidArgument,
                {dir + "/rank0.json", dir + "/rank1.json", "different runs", what});
  };
  expect([](RankTrace* trace) { trace->world_size = 3; }, "numbers of ranks");
  expect([](RankTrace* trace) { trace->model = "other"; }, "models");
  expect([](RankTrace* trace) { trace->parameters = 1; }, "models");
  expect([](RankTrace* trace) { trace->flags["optimizer"] = "muon"; }, "flags");
  expect([](RankTrace* trace) { trace->steps.pop_back(); }, "steps");

  RankTrace cut = Sample(1, 2);
  cut.steps.pop_back();
  cut.cut_short = true;
  ASSERT_TRUE(WriteTrace(dir, cut).ok());
  // A rank that was cut short may lack steps; those that both have are left.
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  std::vector<TraceStep> common = Sample(0, 2).steps;
  common.pop_back();
  EXPECT_EQ((*traces)[0].steps, common);
  EXPECT_EQ((*traces)[1].steps, cut.steps);
}

// One of everything, in few bytes.
RankTrace SmallSample() {
  RankTrace trace = Sample(0, 1);
  trace.flags.erase("data");
  trace.streams.resize(2);
  for (TraceStream& stream : trace.streams) stream.ops.resize(1);
  trace.streams[0].waits.resize(1);
  trace.memory.resize(1);
  return trace;
}

TEST(ReadTraces, EveryTruncationIsAnError) {
  const std::string dir = Fresh("truncated");
  ASSERT_TRUE(WriteTrace(dir, SmallSample()).ok());
  // Cut by all but the last line end, which may be missing.
  for (int64_t length = fs::file_size(dir + "/rank0.json") - 2; length >= 0; --length) {
    fs::resize_file(dir + "/rank0.json", length);
    const auto traces = ReadTraces(dir);
    ASSERT_FALSE(traces.ok()) << length;
    const std::string message(traces.status().message());
    ASSERT_TRUE(absl::StrContains(message, "ends too early") ||
                absl::StrContains(message, "is empty"))
        << length << ": " << message;
  }
}

TEST(ReadTraces, ChangedBytesGiveATraceOrAnErrorOfOneLine) {
  const std::string dir = Fresh("fuzz");
  ASSERT_TRUE(WriteTrace(dir, SmallSample()).ok());
  const std::string good = Contents(dir + "/rank0.json");
  std::mt19937 random(7);
  int errors = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string bad = good;
    for (int flips = 1 + random() % 3; flips > 0; --flips) {
      bad[random() % bad.size()] ^= 1 << random() % 8;
    }
    // Half of them look like what a person might have typed.
    if (i % 2 == 0) bad[random() % bad.size()] = "0123456789-.e\"[]{},: \\"[random() % 22];
    Overwrite(dir + "/rank0.json", bad);
    const auto traces = ReadTraces(dir);
    if (traces.ok()) {
      ASSERT_EQ(traces->size(), 1u);
    } else {
      ++errors;
      ASSERT_FALSE(absl::StrContains(traces.status().message(), "\n")) << traces.status();
      ASSERT_TRUE(absl::StrContains(traces.status().message(), dir)) << traces.status();
    }
  }
  EXPECT_GT(errors, 100);
}

TEST(PrepareTraceDir, MakesTheFolderAndMovesAnEarlierTraceAside) {
  const std::string dir = Fresh("prepare") + "/a/b";
  ASSERT_TRUE(PrepareTraceDir(dir).ok());
  EXPECT_TRUE(fs::is_directory(dir));
  ASSERT_TRUE(WriteTrace(dir, Sample(0, 3)).ok());
  ASSERT_TRUE(WriteTrace(dir, Sample(2, 3)).ok());
  Overwrite(dir + "/notes.txt", "mine");
  ASSERT_TRUE(PrepareTraceDir(dir).ok());
  EXPECT_FALSE(fs::exists(dir + "/rank0.json"));
  EXPECT_FALSE(fs::exists(dir + "/rank2.json"));
  EXPECT_TRUE(fs::exists(dir + "/previous-1/rank0.json"));
  EXPECT_TRUE(fs::exists(dir + "/previous-1/rank2.json"));
  EXPECT_EQ(Contents(dir + "/notes.txt"), "mine");
  ASSERT_TRUE(WriteTrace(dir, Sample(0, 1)).ok());
  ASSERT_TRUE(PrepareTraceDir(dir).ok());
  EXPECT_TRUE(fs::exists(dir + "/previous-2/rank0.json"));
}

TEST(PrepareTraceDir, RemovesWhatAKilledRunHadWrittenOfATrace) {
  const std::string dir = Fresh("killed");
  const std::vector<std::string> others = {"/.rank0.json", "/.rank0.json.tmp.x.0",
                                           "/.rank0.json.tmp.1.2.3", "/.notes.txt.tmp.1.2"};
  for (const std::string& name : others) Overwrite(dir + name, "mine");
  for (const char* name : {"/.rank0.json.tmp.123.0", "/.rank17.json.tmp.9.45"}) {
    Overwrite(dir + name, "half a trace");
  }
  ASSERT_TRUE(PrepareTraceDir(dir).ok());
  for (const std::string& name : others) EXPECT_EQ(Contents(dir + name), "mine") << name;
  EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 4);
}

TEST(PrepareTraceDir, AFileInTheWayIsAnErrorThatNamesItAndTheFlag) {
  const std::string path = Fresh("in_the_way") + "/file";
  Overwrite(path, "x");
  for (const std::string& dir : {path, path + "/trace"}) {
    const absl::Status status = PrepareTraceDir(dir);
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "--trace")) << status;
  }
}

}  // namespace
}  // namespace dim0
