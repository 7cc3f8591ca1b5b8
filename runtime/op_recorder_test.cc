#include "runtime/op_recorder.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "collectives/steady_clock.h"
#include "runtime/device.h"

namespace dim0 {
namespace {

std::unique_ptr<Device> CpuDevice() { return *CreateDevice(Backend::kCpu, 1); }

absl::Time At(int milliseconds) {
  return absl::UnixEpoch() + absl::Hours(1) + absl::Milliseconds(milliseconds);
}

void Add(StreamRecord* stream, OpKind kind, int begin, int end) {
  stream->Add(RecordedOp{.info = {.name = "op", .kind = kind}, .begin = At(begin), .end = At(end)});
}

TEST(OpRecorder, HoldsEveryOpOfEveryStreamInOrderWithItsInfoAndTimes) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto first = device->NewStream("first");
  const auto second = device->NewStream("second");
  const absl::Time before = SteadyNow();
  for (int i = 0; i < 3; ++i) {
    first->Enqueue({.name = "op " + std::to_string(i),
                    .kind = OpKind::kCollective,
                    .flops = 10.0 * i,
                    .bytes = 100.0 * i},
                   [](const OpContext&) { return absl::OkStatus(); });
  }
  second->Wait(first->Record());
  second->Enqueue({.name = "after"}, [](const OpContext&) { return absl::OkStatus(); });
  ASSERT_TRUE(second->Synchronize().ok());
  const absl::Time after = SteadyNow();

  const std::vector<const StreamRecord*> streams = recorder.streams();
  ASSERT_EQ(streams.size(), 2);
  EXPECT_EQ(streams[0]->stream(), "first");
  EXPECT_EQ(streams[1]->stream(), "second");
  ASSERT_EQ(streams[0]->ops().size(), 3);  // waiting and recording are no ops
  absl::Time last = before;
  for (int i = 0; i < 3; ++i) {
    const RecordedOp& op = streams[0]->ops()[i];
    EXPECT_EQ(op.info.name, "op " + std::to_string(i));
    EXPECT_EQ(op.info.kind, OpKind::kCollective);
    EXPECT_EQ(op.info.flops, 10.0 * i);
    EXPECT_EQ(op.info.bytes, 100.0 * i);
    EXPECT_LE(last, op.begin);
    EXPECT_LE(op.begin, op.end);
    last = op.end;
  }
  ASSERT_EQ(streams[1]->ops().size(), 1);
  EXPECT_LE(last, streams[1]->ops()[0].begin);
  EXPECT_LE(streams[1]->ops()[0].end, after);
}

TEST(OpRecorder, AnOpsTimesEncloseItsWork) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("stream");
  absl::Time begin, end;
  stream->Enqueue({.name = "sleep"}, [&](const OpContext&) {
    begin = SteadyNow();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    end = SteadyNow();
    return absl::OkStatus();
  });
  ASSERT_TRUE(stream->Synchronize().ok());
  const RecordedOp& op = recorder.streams()[0]->ops()[0];
  EXPECT_LE(op.begin, begin);
  EXPECT_GE(op.end, end);
}

TEST(OpRecorder, AFailingOpIsRecordedAndTheOpsSkippedAfterItAreNot) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("stream");
  stream->Enqueue({.name = "fails"},
                  [](const OpContext&) { return absl::InternalError("broken"); });
  stream->Enqueue({.name = "skipped"}, [](const OpContext&) { return absl::OkStatus(); });
  EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kInternal);
  ASSERT_EQ(recorder.streams()[0]->ops().size(), 1);
  EXPECT_EQ(recorder.streams()[0]->ops()[0].info.name, "fails");
}

TEST(OpRecorder, HearsOnlyOfStreamsMadeWhileItIsSet) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  const auto before = device->NewStream("before");
  device->SetRecorder(&recorder);
  const auto during = device->NewStream("during");
  device->SetRecorder(nullptr);
  const auto after = device->NewStream("after");
  for (Stream* stream : {before.get(), during.get(), after.get()}) {
    stream->Enqueue({.name = "op"}, [](const OpContext&) { return absl::OkStatus(); });
    ASSERT_TRUE(stream->Synchronize().ok());
  }
  ASSERT_EQ(recorder.streams().size(), 1);
  EXPECT_EQ(recorder.streams()[0]->stream(), "during");
  EXPECT_EQ(recorder.streams()[0]->ops().size(), 1);
}

TEST(OpRecorder, ClearForgetsOpsAndKeepsStreams) {
  OpRecorder recorder;
  StreamRecord* stream = recorder.AddStream("stream");
  Add(stream, OpKind::kCompute, 0, 5);
  recorder.Clear();
  ASSERT_EQ(recorder.streams().size(), 1);
  EXPECT_TRUE(recorder.streams()[0]->ops().empty());
  Add(stream, OpKind::kCompute, 7, 8);
  EXPECT_EQ(recorder.streams()[0]->ops().size(), 1);
}

absl::Status Nothing(const OpContext&) { return absl::OkStatus(); }

TEST(OpRecorder, OpsCarryTheUnitAndPhaseOfTheInnermostScopeAndTheStepOfTheirEnqueueing) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("stream");
  recorder.SetStep(4);
  stream->Enqueue({.name = "outside"}, Nothing);
  {
    const RecordedUnit outer(device->recorder(), "h.0", Phase::kForward);
    stream->Enqueue({.name = "outer"}, Nothing);
    {
      const RecordedUnit inner(device->recorder(), "h.1", Phase::kUpdate);
      stream->Enqueue({.name = "inner"}, Nothing);
    }
    recorder.SetStep(5);
    stream->Enqueue({.name = "outer again"}, Nothing);
  }
  stream->Enqueue({.name = "outside again"}, Nothing);
  ASSERT_TRUE(stream->Synchronize().ok());

  const auto& ops = recorder.streams()[0]->ops();
  ASSERT_EQ(ops.size(), 5);
  const std::vector<std::string> units = {"", "h.0", "h.1", "h.0", ""};
  const std::vector<Phase> phases = {Phase::kNone, Phase::kForward, Phase::kUpdate, Phase::kForward,
                                     Phase::kNone};
  const std::vector<int64_t> steps = {4, 4, 4, 5, 5};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(*ops[i].unit, units[i]) << i;
    EXPECT_EQ(ops[i].phase, phases[i]) << i;
    EXPECT_EQ(ops[i].step, steps[i]) << i;
    EXPECT_EQ(ops[i].id, i + 1);
    EXPECT_LE(ops[i].enqueued, ops[i].begin);
  }
}

TEST(OpRecorder, AWaitIsRecordedWithTheOpThatEndedItOnlyIfTheStreamHadToWait) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto fast = device->NewStream("fast");
  const auto slow = device->NewStream("slow");
  const auto waits = device->NewStream("waits");
  fast->Enqueue({.name = "at once"}, Nothing);
  const Event passed = fast->Record();
  ASSERT_TRUE(passed.Wait().ok());
  waits->Wait(passed);  // is over already
  slow->Enqueue({.name = "long"}, [](const OpContext&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return absl::OkStatus();
  });
  waits->Wait(Event::Join(slow->Record(), passed));
  waits->Enqueue({.name = "after"}, Nothing);
  ASSERT_TRUE(waits->Synchronize().ok());

  const StreamRecord& record = *recorder.streams()[2];
  ASSERT_EQ(record.waits().size(), 1);
  const RecordedWait& wait = record.waits()[0];
  const RecordedOp& cause = recorder.streams()[1]->ops()[0];
  EXPECT_EQ(wait.cause.op, cause.id);
  EXPECT_EQ(wait.cause.stream, "slow");
  EXPECT_GE(wait.end, cause.end);
  EXPECT_LE(wait.end, record.ops()[0].begin);
  EXPECT_TRUE(recorder.streams()[0]->waits().empty());
}

TEST(OpRecorder, LiveMemoryIsCountedWhenTheStreamGetsThere) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("stream");
  stream->Enqueue({.name = "before"}, Nothing);
  stream->CountLive(MemoryPurpose::kGathered, 100);
  stream->Enqueue({.name = "after"}, Nothing);
  stream->CountLive(MemoryPurpose::kGathered, -100);
  ASSERT_TRUE(stream->Synchronize().ok());
  const StreamRecord& record = *recorder.streams()[0];
  ASSERT_EQ(record.memory().size(), 2);
  EXPECT_EQ(record.memory()[0].purpose, MemoryPurpose::kGathered);
  EXPECT_EQ(record.memory()[0].bytes, 100);
  EXPECT_EQ(record.memory()[1].bytes, -100);
  EXPECT_LE(record.ops()[0].end, record.memory()[0].time);
  EXPECT_LE(record.memory()[0].time, record.ops()[1].begin);
  EXPECT_LE(record.ops()[1].end, record.memory()[1].time);
}

TEST(OpRecorder, RecordsWhatIsEnqueuedWhileItIsRecording) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("stream");
  recorder.SetRecording(false);
  stream->Enqueue({.name = "no"}, Nothing);
  stream->CountLive(MemoryPurpose::kGathered, 1);
  recorder.SetRecording(true);
  stream->Enqueue({.name = "yes"}, Nothing);
  recorder.SetRecording(false);
  stream->Enqueue({.name = "no more"}, Nothing);
  ASSERT_TRUE(stream->Synchronize().ok());
  const StreamRecord& record = *recorder.streams()[0];
  ASSERT_EQ(record.ops().size(), 1);
  EXPECT_EQ(record.ops()[0].info.name, "yes");
  EXPECT_TRUE(record.memory().empty());
}

TEST(OpRecorder, ASpentBudgetEndsTheRecordingAndNamesTheFirstStepThatIsNotWhole) {
  const auto device = CpuDevice();
  OpRecorder recorder(/*budget=*/5);
  device->SetRecorder(&recorder);
  const auto a = device->NewStream("a");
  const auto b = device->NewStream("b");
  for (int step = 1; step <= 4; ++step) {
    recorder.SetStep(step);
    a->Enqueue({.name = "a"}, Nothing);
    b->Enqueue({.name = "b"}, Nothing);
  }
  ASSERT_TRUE(a->Synchronize().ok());
  ASSERT_TRUE(b->Synchronize().ok());
  EXPECT_FALSE(recorder.recording());
  EXPECT_EQ(recorder.first_lost_step(), 3);  // of which one of two ops had room
  for (const StreamRecord* record : recorder.streams()) EXPECT_LE(record->ops().size(), 3);

  recorder.Clear();
  EXPECT_TRUE(recorder.recording());
  EXPECT_GT(recorder.first_lost_step(), 1000000);
}

TEST(OpRecorder, AFailedOpIsMarked) {
  const auto device = CpuDevice();
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  const auto stream = device->NewStream("stream");
  stream->Enqueue({.name = "works"}, Nothing);
  stream->Enqueue({.name = "fails"}, [](const OpContext&) { return absl::InternalError("no"); });
  EXPECT_FALSE(stream->Synchronize().ok());
  EXPECT_FALSE(recorder.streams()[0]->ops()[0].failed);
  EXPECT_TRUE(recorder.streams()[0]->ops()[1].failed);
}

}  // namespace
}  // namespace dim0
