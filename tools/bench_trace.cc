// What recording costs: steps of a GPT-2 are recorded and not, in turns, in one run.
//
//   bazel run //tools:bench_trace -- --ranks=2 --layers=12 --width=768
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"
#include "model/gpt2.h"
#include "optim/factory.h"
#include "runtime/allocator.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/engine.h"
#include "runtime/median.h"
#include "runtime/op_recorder.h"
#include "tools/flags.h"

ABSL_FLAG(int64_t, layers, 12, "blocks");
ABSL_FLAG(int64_t, width, 768, "width of the residual stream");
ABSL_FLAG(int64_t, heads, 12, "attention heads");
ABSL_FLAG(int64_t, vocab, 50257, "vocabulary");
ABSL_FLAG(int64_t, batch, 1, "sequences per rank");
ABSL_FLAG(int64_t, seq_len, 128, "tokens per sequence");
ABSL_FLAG(std::string, optimizer, "rmnp", "adamw, muon, rmnp or sign_momentum");
ABSL_FLAG(int, ranks, 2, "ranks, with one thread each");
ABSL_FLAG(int, pairs, 15, "pairs of steps, one of which is recorded");

namespace dim0 {
namespace {

struct Figures {
  std::vector<double> ratios;  // recorded / not, of each pair
  std::vector<double> plain_ms;
  int64_t entries = 0;  // of one recorded step
};

absl::Status RunRank(ProcessGroup& group, const Gpt2Config& config, int64_t batch_size,
                     int64_t seq_len, int pairs, Figures& figures) {
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(Backend::kCpu, 1));
  OpRecorder recorder;
  device->SetRecorder(&recorder);
  Allocator allocator(device.get());
  Gpt2 model(config, /*recompute=*/false, *device);
  OptimizerConfig optimizer_config;
  optimizer_config.name = absl::GetFlag(FLAGS_optimizer);
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Optimizer> optimizer,
                        CreateOptimizer(optimizer_config, *device, group));
  DIM0_RETURN_IF_ERROR(model.Allocate(allocator, batch_size, seq_len, /*training=*/true));
  DIM0_ASSIGN_OR_RETURN(
      const std::unique_ptr<Engine> engine,
      Engine::Create({.clip = 1.0}, model, group, *device, allocator, optimizer.get()));
  DIM0_RETURN_IF_ERROR(engine->Start(/*seed=*/0));

  std::vector<int32_t> tokens(batch_size * seq_len), targets(batch_size * seq_len);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>(i * 7919 % config.vocab);
    targets[i] = static_cast<int32_t>((i + 1) * 7919 % config.vocab);
  }
  const Batch batch = {batch_size, seq_len, tokens.data(), targets.data()};
  int64_t step = 0;
  const auto run = [&](bool recorded) -> absl::StatusOr<double> {
    recorder.Clear();
    recorder.SetRecording(recorded);
    recorder.SetStep(++step);
    const absl::Time begin = SteadyNow();
    DIM0_RETURN_IF_ERROR(engine
                             ->TrainStep({&batch, 1}, batch_size * seq_len * group.world_size(),
                                         {.step = step}, nullptr)
                             .status());
    DIM0_RETURN_IF_ERROR(engine->Synchronize());
    return absl::ToDoubleMilliseconds(SteadyNow() - begin);
  };
  DIM0_RETURN_IF_ERROR(run(true).status());  // warms up
  for (int pair = 0; pair < pairs; ++pair) {
    // The order alternates, so that a drift of the machine favours neither.
    double recorded = 0, plain = 0;
    for (const bool record : {pair % 2 == 0, pair % 2 != 0}) {
      DIM0_ASSIGN_OR_RETURN((record ? recorded : plain), run(record));
      if (!record) continue;
      figures.entries = 0;
      for (const StreamRecord* stream : recorder.streams()) {
        figures.entries += stream->ops().size() + stream->waits().size() + stream->memory().size();
      }
    }
    figures.ratios.push_back(recorded / plain);
    figures.plain_ms.push_back(plain);
  }
  return absl::OkStatus();
}

// Microseconds that an empty op costs the host and its stream, recorded or not.
absl::StatusOr<double> EmptyOp(bool recorded) {
  constexpr int kOps = 20000;
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(Backend::kCpu, 1));
  OpRecorder recorder(2 * kOps);
  recorder.SetRecording(recorded);
  device->SetRecorder(&recorder);
  const std::unique_ptr<Stream> stream = device->NewStream("stream");
  const absl::Time begin = SteadyNow();
  for (int i = 0; i < kOps; ++i) {
    stream->Enqueue({.name = "a name of usual length"},
                    [](const OpContext&) { return absl::OkStatus(); });
  }
  DIM0_RETURN_IF_ERROR(stream->Synchronize());
  return absl::ToDoubleMicroseconds(SteadyNow() - begin) / kOps;
}

absl::Status Bench() {
  const Gpt2Config config = {.layers = absl::GetFlag(FLAGS_layers),
                             .width = absl::GetFlag(FLAGS_width),
                             .heads = absl::GetFlag(FLAGS_heads),
                             .vocab = absl::GetFlag(FLAGS_vocab)};
  DIM0_RETURN_IF_ERROR(config.Validate());
  const int ranks = absl::GetFlag(FLAGS_ranks);
  DIM0_ASSIGN_OR_RETURN(const auto groups, CreateThreadRanks(ranks, {}));
  std::vector<Figures> figures(ranks);
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] =
          RunRank(*groups[rank], config, absl::GetFlag(FLAGS_batch), absl::GetFlag(FLAGS_seq_len),
                  absl::GetFlag(FLAGS_pairs), figures[rank]);
      if (!statuses[rank].ok()) groups[rank]->Abort(statuses[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) DIM0_RETURN_IF_ERROR(status);

  DIM0_ASSIGN_OR_RETURN(const double plain_op, EmptyOp(false));
  DIM0_ASSIGN_OR_RETURN(const double recorded_op, EmptyOp(true));
  const Figures& first = figures[0];
  const double step_ms = Median(first.plain_ms);
  std::printf("a step of rank 0: %.1f ms, %lld ops, waits and counts of memory recorded\n", step_ms,
              static_cast<long long>(first.entries));
  std::printf("recorded / not recorded, median of %zu pairs of steps: %.4f\n", first.ratios.size(),
              Median(first.ratios));
  std::printf("an empty op: %.2f us, recorded %.2f us; times the entries %.4f of a step\n",
              plain_op, recorded_op, (recorded_op - plain_op) * 1e-3 * first.entries / step_ms);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  if (const auto status = HandleCommandLine(
          argc, argv,
          "Measures what recording a trace costs, on steps of a GPT-2.\n  bench_trace --ranks=2")) {
    return *status;
  }
  if (absl::GetFlag(FLAGS_pairs) < 1 || absl::GetFlag(FLAGS_batch) < 1 ||
      absl::GetFlag(FLAGS_seq_len) < 1 || absl::GetFlag(FLAGS_seq_len) > 1024) {
    PrintError("bench_trace", "--pairs and --batch must be 1 or more, --seq_len 1 to 1024");
    return kExitUsage;
  }
  const absl::Status status = Bench();
  if (status.ok()) return kExitOk;
  PrintError("bench_trace", status.message());
  return kExitFailure;
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) { return dim0::Main(argc, argv); }
