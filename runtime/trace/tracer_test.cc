#include "runtime/trace/tracer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "runtime/device.h"
#include "runtime/trace/trace_file.h"

namespace dim0 {
namespace {

absl::Status Nothing(const OpContext&) { return absl::OkStatus(); }

std::unique_ptr<Device> CpuDevice() { return *CreateDevice(Backend::kCpu, 1); }

TraceStep Now(int64_t step) {
  const int64_t now = absl::ToUnixMicros(SteadyNow());
  return {step, now, now};
}

TEST(MakeTrace, NumbersStreamsAsViewersKnowThemAndLeavesOutThoseThatDidNothing) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  std::vector<std::unique_ptr<Stream>> streams;
  for (const char* name :
       {"optimizer", "reduce_scatter", "idle", "compute", "all_gather", "more"}) {
    streams.push_back(device->NewStream(name));
    if (streams.back()->name() != "idle") streams.back()->Enqueue({.name = "op"}, Nothing);
    ASSERT_TRUE(streams.back()->Synchronize().ok());
  }
  const RankTrace trace = MakeTrace(recorder, {.rank = 3, .world_size = 4}, {Now(0)}, {});
  EXPECT_EQ(trace.rank, 3);
  std::vector<std::string> rows;
  for (const TraceStream& stream : trace.streams) {
    rows.push_back(absl::StrCat(stream.number, " ", stream.name));
  }
  EXPECT_EQ(rows, (std::vector<std::string>{"7 compute", "20 all_gather", "21 reduce_scatter",
                                            "22 optimizer", "24 more"}));
}

TEST(MakeTrace, SaysOfACollectiveWhatItsCallDidAndOfAnOpWhatItsInfoSays) {
  const auto groups = *CreateThreadRanks(1, {});
  const auto channel = *groups[0]->Open("parameter");
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("all_gather");
  const std::vector<int64_t> counts = {6};
  std::vector<float> send(6), recv(6);
  recorder.SetStep(2);
  {
    const RecordedUnit unit(&recorder, "h.4", Phase::kBackward);
    stream->Enqueue({.name = "all_gather h.4", .kind = OpKind::kCollective, .bytes = 24},
                    [&](const OpContext& context) {
                      const AllGatherPart part = {send.data(), recv.data(), counts};
                      return channel->AllGather(
                          {Purpose::kParameter, "h.4", context.native_stream, context.call},
                          DType::kFloat32, {&part, 1});
                    });
  }
  stream->Enqueue({.name = "kernel", .kind = OpKind::kOptimizer, .flops = 5, .bytes = 7}, Nothing);
  ASSERT_TRUE(stream->Synchronize().ok());

  const RankTrace trace = MakeTrace(recorder, {}, {Now(2)}, {});
  ASSERT_EQ(trace.streams.size(), 1);
  const TraceOp& gather = trace.streams[0].ops.at(0);
  EXPECT_EQ(gather.name, "all_gather h.4");
  EXPECT_EQ(gather.unit, "h.4");
  EXPECT_EQ(gather.phase, "backward");
  EXPECT_EQ(gather.step, 2);
  ASSERT_TRUE(gather.collective.has_value());
  EXPECT_EQ(gather.collective->operation, "all_gather");
  EXPECT_EQ(gather.collective->channel, "parameter");
  EXPECT_EQ(gather.collective->purpose, Purpose::kParameter);
  EXPECT_EQ(gather.collective->dtype, DType::kFloat32);
  EXPECT_EQ(gather.collective->sequence, 1);
  EXPECT_EQ(gather.collective->in_elements, 6);
  EXPECT_EQ(gather.collective->out_elements, 6);
  EXPECT_EQ(gather.collective->bytes_sent, 0);  // one rank
  EXPECT_LE(gather.enqueued, gather.begin);
  EXPECT_LE(gather.begin, gather.collective->met);
  EXPECT_LE(gather.collective->met, gather.end);
  const TraceOp& kernel = trace.streams[0].ops.at(1);
  EXPECT_FALSE(kernel.collective.has_value());
  EXPECT_EQ(kernel.kind, OpKind::kOptimizer);
  EXPECT_EQ(kernel.flops, 5);
  EXPECT_EQ(kernel.bytes, 7);
  EXPECT_EQ(kernel.phase, "");
}

TEST(MakeTrace, AddsChangesOfLiveMemoryOfAllStreamsUpInTheirOrder) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto a = device->NewStream("a"), b = device->NewStream("b");
  const auto count = [](Stream& stream, MemoryPurpose purpose, int64_t bytes) {
    stream.CountLive(purpose, bytes);
    ASSERT_TRUE(stream.Synchronize().ok());
    absl::SleepFor(absl::Microseconds(10));
  };
  count(*a, MemoryPurpose::kGathered, 100);
  count(*b, MemoryPurpose::kCommunication, 30);
  count(*b, MemoryPurpose::kGathered, -100);
  MemoryUse live;
  live.bytes[static_cast<int>(MemoryPurpose::kParameters)] = 7;
  live.bytes[static_cast<int>(MemoryPurpose::kGathered)] = 1;
  const RankTrace trace = MakeTrace(recorder, {}, {{0, 1, 2}}, live);
  ASSERT_EQ(trace.memory.size(), 4);
  const int64_t gathered[] = {1, 101, 101, 1}, communication[] = {0, 0, 30, 30};
  for (int i = 0; i < 4; ++i) {
    const auto& bytes = trace.memory[i].bytes;
    EXPECT_EQ(bytes[static_cast<int>(MemoryPurpose::kParameters)], 7);
    EXPECT_EQ(bytes[static_cast<int>(MemoryPurpose::kGathered)], gathered[i]) << i;
    EXPECT_EQ(bytes[static_cast<int>(MemoryPurpose::kCommunication)], communication[i]) << i;
    EXPECT_LE(trace.memory[std::max(0, i - 1)].time, trace.memory[i].time);
  }
}

TEST(MakeTrace, HoldsOnlyStepsThatAreWholeWhereTheRecorderWasFull) {
  const auto device = CpuDevice();
  OpRecorder recorder(/*budget=*/5);
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("compute");
  std::vector<TraceStep> steps;
  for (int step = 1; step <= 4; ++step) {
    recorder.SetStep(step);
    for (int i = 0; i < 2; ++i) stream->Enqueue({.name = "op"}, Nothing);
    ASSERT_TRUE(stream->Synchronize().ok());
    steps.push_back(Now(step));
  }
  const RankTrace trace = MakeTrace(recorder, {}, steps, {});
  EXPECT_TRUE(trace.cut_short);
  ASSERT_EQ(trace.steps.size(), 2);
  EXPECT_EQ(trace.steps.back().step, 2);
  ASSERT_EQ(trace.streams.size(), 1);
  ASSERT_EQ(trace.streams[0].ops.size(), 4);
  for (const TraceOp& op : trace.streams[0].ops) EXPECT_LE(op.step, 2);
}

TEST(Tracer, RecordsTheAskedStepsOnlyAndWritesOnce) {
  const std::string dir = absl::StrCat(testing::TempDir(), "/tracer");
  ASSERT_TRUE(PrepareTraceDir(dir).ok());
  Tracer tracer({.dir = dir, .first_step = 2, .last_step = 3}, {});
  const auto device = CpuDevice();
  device->SetRecorder(tracer.recorder());
  const auto stream = device->NewStream("compute");
  stream->Enqueue({.name = "set-up"}, Nothing);
  absl::Time clock = SteadyNow();
  for (int step = 1; step <= 4; ++step) {
    tracer.BeginStep(step);
    stream->Enqueue({.name = absl::StrCat("step ", step)}, Nothing);
    ASSERT_TRUE(stream->Synchronize().ok());
    const absl::Time now = SteadyNow();
    tracer.EndStep(step, clock, now, /*loss=*/1.0 / step);
    clock = now;
    stream->Enqueue({.name = "between"}, Nothing);
    EXPECT_EQ(tracer.last(step), step == 3);
  }
  ASSERT_TRUE(stream->Synchronize().ok());
  ASSERT_TRUE(tracer.Write({}).ok());
  const auto traces = ReadTraces(dir);
  ASSERT_TRUE(traces.ok()) << traces.status();
  const RankTrace& trace = traces->at(0);
  ASSERT_EQ(trace.steps.size(), 2);
  EXPECT_EQ(trace.steps[0].step, 2);
  EXPECT_EQ(trace.steps[1].step, 3);
  EXPECT_EQ(trace.steps[1].loss, 1.0 / 3);
  ASSERT_EQ(trace.streams.size(), 1);
  ASSERT_EQ(trace.streams[0].ops.size(), 2);
  EXPECT_EQ(trace.streams[0].ops[0].name, "step 2");
  EXPECT_EQ(trace.streams[0].ops[1].name, "step 3");

  EXPECT_TRUE(tracer.Write({}).ok());  // and nothing more
  EXPECT_EQ(*ReadTraces(dir), *traces);
}

TEST(Tracer, GivenUpWritesNothing) {
  const std::string dir = absl::StrCat(testing::TempDir(), "/given_up");
  ASSERT_TRUE(PrepareTraceDir(dir).ok());
  Tracer tracer({.dir = dir}, {});
  const auto device = CpuDevice();
  device->SetRecorder(tracer.recorder());
  const auto stream = device->NewStream("compute");
  EXPECT_EQ(tracer.last_ended(), 0);
  EXPECT_EQ(tracer.FileBytes(), 0);
  tracer.BeginStep(1);
  for (int i = 0; i < 3; ++i) stream->Enqueue({.name = "op"}, Nothing);
  ASSERT_TRUE(stream->Synchronize().ok());
  tracer.EndStep(1, SteadyNow(), SteadyNow(), std::nullopt);
  EXPECT_EQ(tracer.last_ended(), 1);
  EXPECT_EQ(tracer.FileBytes(), 3 * 1024);
  tracer.GiveUp();
  tracer.BeginStep(2);
  stream->Enqueue({.name = "op"}, Nothing);
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(tracer.FileBytes(), 0);
  EXPECT_TRUE(tracer.Write({}).ok());
  EXPECT_FALSE(ReadTraces(dir).ok());
}

TEST(Tracer, AFileIsNoLongerThanItSays) {
  const std::string dir = absl::StrCat(testing::TempDir(), "/file_bytes");
  ASSERT_TRUE(PrepareTraceDir(dir).ok());
  Tracer tracer({.dir = dir}, {});
  const auto device = CpuDevice();
  device->SetRecorder(tracer.recorder());
  const auto stream = device->NewStream("compute");
  tracer.BeginStep(1);
  const std::string name(40, 'x');
  for (int i = 0; i < 100; ++i) {
    const RecordedUnit unit(tracer.recorder(), name, Phase::kForward);
    stream->Enqueue({.name = name, .flops = 1e10 / 3, .bytes = 1e10 / 7}, Nothing);
  }
  ASSERT_TRUE(stream->Synchronize().ok());
  tracer.EndStep(1, SteadyNow(), SteadyNow(), 1.0 / 3);
  const int64_t said = tracer.FileBytes();
  ASSERT_TRUE(tracer.Write({}).ok());
  EXPECT_LE(static_cast<int64_t>(std::filesystem::file_size(dir + "/rank0.json")), said);
}

}  // namespace
}  // namespace dim0
