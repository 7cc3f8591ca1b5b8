// The engine's schedule against its arithmetic, on a model that only sleeps: L equal units, forward
// c a unit, backward 2 c, and a link over which a unit's all-gather, and its reduce-scatter, take
// m.
//
//   bazel run //runtime:bench_schedule -- --units=8 --compute_ms=20 --gather_ms=15
//
// What is to be expected, with m < c, the first all-gather and the last reduce-scatter having
// nothing to hide behind:
//   prefetch 1 or more   forward m + L c, backward 2 L c + m (its first unit is still gathered)
//   prefetch 0           forward L (m + c), backward L (2 c + 2 m) - m: nothing is hidden, for a
//                        unit's reduce-scatter and the next one's all-gather begin together and
//                        share the link
// A second table has a model whose middle unit takes 3 times as long to gather: a prefetch of one
// unit gives its gather c to hide behind, a prefetch of two gives it 2 c less the gather between.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "runtime/allocator.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/engine.h"
#include "runtime/median.h"
#include "runtime/model.h"
#include "runtime/op_recorder.h"
#include "runtime/optimizer.h"
#include "runtime/trace/trace_report.h"
#include "runtime/trace/tracer.h"

ABSL_FLAG(int, units, 8, "L, equal units");
ABSL_FLAG(double, compute_ms, 20, "c, a unit's forward; its backward takes twice as long");
ABSL_FLAG(double, gather_ms, 15, "m, a unit's all-gather over the link, and its reduce-scatter");
ABSL_FLAG(int, repeats, 5, "steps; the medians are printed");

namespace dim0 {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kRows = int64_t{1} << 16;  // of a unit's one parameter; 256 KiB

// Sleeps where a model would compute.
class SleepingModel : public Model {
 public:
  // `rows` of each unit.
  SleepingModel(const std::vector<int64_t>& rows, absl::Duration forward) : forward_(forward) {
    for (size_t u = 0; u < rows.size(); ++u) {
      const std::string name = absl::StrCat("h.", u);
      units_.push_back({name, {{name + ".w", rows[u], 1, ParameterRole::kMatrix, {}}}});
      stages_.push_back({name, static_cast<int>(u)});
    }
  }

  absl::Span<const UnitSpec> units() const override { return units_; }
  absl::Span<const Stage> stages() const override { return stages_; }
  absl::Status Allocate(Allocator&, int64_t, int64_t, bool) override { return absl::OkStatus(); }
  void Begin(Stream&, const Batch&, absl::Span<const std::vector<int32_t>>, float) override {}
  void Forward(int, absl::Span<const Tensor>, bool, double*, Stream& stream) override {
    Sleep("forward", forward_, stream);
  }
  void Backward(int, absl::Span<const Tensor>, absl::Span<const Tensor>, bool,
                Stream& stream) override {
    Sleep("backward", 2 * forward_, stream);
  }
  double FlopsPerToken(int64_t) const override { return 0; }

 private:
  static void Sleep(const char* name, absl::Duration duration, Stream& stream) {
    stream.Enqueue({.name = name}, [duration](const OpContext&) {
      absl::SleepFor(duration);
      return absl::OkStatus();
    });
  }

  const absl::Duration forward_;
  std::vector<UnitSpec> units_;
  std::vector<Stage> stages_;
};

// Leaves the parameters as they are.
class NoOptimizer : public Optimizer {
 public:
  absl::Status Plan(const ParameterTable&, absl::Span<const int>,
                    const OptimizerResources&) override {
    return absl::OkStatus();
  }
  absl::Status Update(const Unit&, const StepParams&, const Event&) override {
    return absl::OkStatus();
  }
  Event Updated(const Unit&) override { return Event(); }
  std::vector<StateTensor> State() override { return {}; }
  uint64_t PlanHash() const override { return 0; }
};

// Milliseconds of rank 0's steps, and the bytes of its buffers for gathered units.
struct Times {
  std::vector<double> forward, backward, exposed;
  int64_t gathered_bytes = 0;
};

absl::Status RunRank(ProcessGroup& group, const std::vector<int64_t>& rows, int prefetch,
                     absl::Duration compute, int repeats, Times& times) {
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(Backend::kCpu, 1));
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  Allocator allocator(device.get());
  SleepingModel model(rows, compute);
  NoOptimizer optimizer;
  DIM0_ASSIGN_OR_RETURN(
      const std::unique_ptr<Engine> engine,
      Engine::Create({.prefetch = prefetch}, model, group, *device, allocator, &optimizer));
  DIM0_RETURN_IF_ERROR(engine->Start(/*seed=*/0));
  times.gathered_bytes = allocator.current()[MemoryPurpose::kGathered];
  const Batch batch = {.sequences = 1, .seq_len = 1};
  for (int step = 1; step <= repeats; ++step) {
    recorder.Clear();
    const absl::Time step_begin = SteadyNow();
    DIM0_RETURN_IF_ERROR(
        engine->TrainStep({&batch, 1}, /*global_tokens=*/1, {.step = step}, nullptr).status());
    DIM0_RETURN_IF_ERROR(engine->Synchronize());
    absl::Time begin = absl::InfiniteFuture(), turn = absl::InfinitePast(),
               end = absl::InfinitePast();
    for (const StreamRecord* stream : recorder.streams()) {
      for (const RecordedOp& op : stream->ops()) {
        if (op.call.purpose == Purpose::kParameter && op.call.calls > 0) {
          begin = std::min(begin, op.begin);
        }
        if (op.info.name == "forward") turn = std::max(turn, op.end);
        if (op.call.purpose == Purpose::kGradient) end = std::max(end, op.end);
      }
    }
    times.forward.push_back(absl::ToDoubleMilliseconds(turn - begin));
    times.backward.push_back(absl::ToDoubleMilliseconds(end - turn));
    const TraceStep whole = {step, absl::ToUnixMicros(step_begin), absl::ToUnixMicros(SteadyNow())};
    DIM0_ASSIGN_OR_RETURN(const TraceReport report,
                          AnalyzeTraces({MakeTrace(recorder, {}, {whole}, {})}));
    times.exposed.push_back(report.mean.all.communication - report.mean.all.hidden);
  }
  return absl::OkStatus();
}

// Rank 0's times of a model whose units have these rows.
absl::StatusOr<Times> Measure(const std::vector<int64_t>& rows, int prefetch, double compute_ms,
                              double gather_ms, int repeats) {
  // Of kRows rows each rank sends half.
  const LinkSpeed link = {kRows * sizeof(float) / kRanks / (gather_ms * 1e-3), {}};
  DIM0_ASSIGN_OR_RETURN(const auto groups, CreateThreadRanks(kRanks, {.link = link}));
  std::vector<Times> times(kRanks);
  std::vector<absl::Status> statuses(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = RunRank(*groups[rank], rows, prefetch, absl::Milliseconds(compute_ms),
                               repeats, times[rank]);
      if (!statuses[rank].ok()) groups[rank]->Abort(statuses[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) DIM0_RETURN_IF_ERROR(status);
  return times[0];
}

absl::Status Bench(int units, double c, double m, int repeats) {
  std::printf(
      "%d equal units, %d ranks: compute %.1f ms forward and %.1f ms backward, link %.1f ms\n",
      units, kRanks, c, 2 * c, m);
  std::printf("%-9s %9s %9s %6s %9s %9s %6s %9s %9s\n", "prefetch", "forward", "expected", "ratio",
              "backward", "expected", "ratio", "exposed", "gathered");
  for (int prefetch = 0; prefetch <= 2; ++prefetch) {
    const std::vector<int64_t> rows(units, kRows);
    DIM0_ASSIGN_OR_RETURN(const Times times, Measure(rows, prefetch, c, m, repeats));
    const double forward = Median(times.forward), backward = Median(times.backward);
    const double forward_expected = prefetch == 0 ? units * (m + c) : m + units * c;
    const double backward_expected =
        prefetch == 0 ? units * (2 * c + 2 * m) - m : 2 * units * c + m;
    std::printf("%-9d %6.1f ms %6.1f ms %6.3f %6.1f ms %6.1f ms %6.3f %6.1f ms %5.0f KiB\n",
                prefetch, forward, forward_expected, forward / forward_expected, backward,
                backward_expected, backward / backward_expected, Median(times.exposed),
                times.gathered_bytes / 1024.0);
  }

  std::printf("\nthe same, but the middle unit's gather takes %.1f ms\n", 3 * m);
  std::printf("%-9s %9s %9s %9s %9s\n", "prefetch", "forward", "backward", "exposed", "gathered");
  for (int prefetch = 0; prefetch <= 3; ++prefetch) {
    std::vector<int64_t> rows(units, kRows);
    rows[units / 2] *= 3;
    DIM0_ASSIGN_OR_RETURN(const Times times, Measure(rows, prefetch, c, m, repeats));
    std::printf("%-9d %6.1f ms %6.1f ms %6.1f ms %5.0f KiB\n", prefetch, Median(times.forward),
                Median(times.backward), Median(times.exposed), times.gathered_bytes / 1024.0);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Holds the engine's schedule against its arithmetic.");
  absl::ParseCommandLine(argc, argv);
  const int units = absl::GetFlag(FLAGS_units), repeats = absl::GetFlag(FLAGS_repeats);
  const double c = absl::GetFlag(FLAGS_compute_ms), m = absl::GetFlag(FLAGS_gather_ms);
  if (units < 2 || units > 1000 || repeats < 1 || !(c > 0 && c < 1e5) || !(m > 0 && m < 1e5)) {
    std::fprintf(stderr,
                 "--units must be 2 to 1000, --repeats 1 or more, --compute_ms and --gather_ms in "
                 "(0, 100000)\n");
    return 2;
  }
  const absl::Status status = dim0::Bench(units, c, m, repeats);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}
