// train: a GPT-2, sharded by rows over ranks, on a text or on token files.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "model/gpt2.h"
#include "optim/factory.h"
#include "optim/schedule.h"
#include "runtime/check.h"
#include "runtime/dataset.h"
#include "runtime/printable.h"
#include "runtime/trainer.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"
#include "tools/flags.h"
#include "tools/process.h"

ABSL_FLAG(std::string, model, "gpt2", "shape: gpt2, gpt2-medium, gpt2-large or gpt2-xl");
ABSL_FLAG(int64_t, layers, 0, "number of blocks; 0: as --model says");
ABSL_FLAG(int64_t, width, 0, "width of the residual stream; 0: as --model says");
ABSL_FLAG(int64_t, heads, 0, "attention heads; 0: as --model says");
ABSL_FLAG(int64_t, vocab, 0, "vocabulary; 0: as --model says");
ABSL_FLAG(int64_t, positions, 0, "longest sequence; 0: 1024 or --seq_len, whichever is more");
ABSL_FLAG(double, init_std, 0.02, "standard deviation of the weights at the start");
ABSL_FLAG(int64_t, seq_len, 256, "tokens of a sequence");
ABSL_FLAG(int64_t, batch, 4, "sequences per rank and micro-batch");
ABSL_FLAG(int64_t, grad_accum, 1, "micro-batches per step");
ABSL_FLAG(bool, accum_sync, true,
          "reduce-scatter after every micro-batch; otherwise gradients accumulate unsharded, which "
          "saves communication and costs memory");
ABSL_FLAG(int64_t, steps, 100, "optimizer steps");
ABSL_FLAG(std::string, device, "cpu",
          "what computes: cpu, cuda (an NVIDIA GPU for each rank), or auto (cuda where this "
          "machine can, else cpu)");
ABSL_FLAG(
    int, ranks, 1,
    "ranks, as threads of this process; where a launcher (torchrun, mpirun, srun) has started "
    "a process for each rank, their number, which need not be given");
ABSL_FLAG(int, threads_per_rank, 0,
          "threads of each rank; 0: the machine's cores divided by its ranks");
ABSL_FLAG(std::string, optimizer, "adamw", "adamw, muon, rmnp or sign_momentum");
ABSL_FLAG(double, lr, 0,
          "learning rate of AdamW, which under the other optimizers updates what is no hidden "
          "matrix; 0: 6e-4 for adamw, 3e-3 under the others");
ABSL_FLAG(double, matrix_lr, 0,
          "learning rate of the hidden matrices under muon, rmnp and sign_momentum; 0: 2e-2 for "
          "muon, 4e-3 for rmnp, 3e-4 for sign_momentum");
ABSL_FLAG(double, weight_decay, 0.1, "AdamW's decoupled weight decay; norms and biases have none");
ABSL_FLAG(double, matrix_weight_decay, 0,
          "weight decay of the hidden matrices under muon, rmnp and sign_momentum");
ABSL_FLAG(double, beta1, 0.9, "AdamW's first decay rate");
ABSL_FLAG(double, beta2, 0.95, "AdamW's second decay rate");
ABSL_FLAG(std::string, matrix_params, "hidden",
          "what muon, rmnp and sign_momentum update: hidden (the blocks' weights), or all2d (the "
          "embeddings too, whose rows then move also in steps in which their tokens do not occur)");
ABSL_FLAG(double, momentum, 0.95, "decay rate of muon's, rmnp's and sign_momentum's momentum");
ABSL_FLAG(bool, nesterov, true, "Nesterov's form of muon's and rmnp's momentum");
ABSL_FLAG(double, rmnp_power, 0,
          "HTRMNP: rows are divided by their norm to the power 1 - rmnp_power; 0 is RMNP");
ABSL_FLAG(double, rmnp_eps, 1e-12, "least norm that RMNP divides a row by");
ABSL_FLAG(std::string, muon_schedule, "owner",
          "how ranks share Muon's work: owner (rows to an owner and back), redundant (every rank "
          "does everything) or broadcast (all rows to all, results from the owner)");
ABSL_FLAG(std::string, muon_wire, "bfloat16",
          "what Muon sends and rounds momentum and results to: bfloat16 or float32");
ABSL_FLAG(std::string, muon_split, "off",
          "Q, K and V in Muon: one matrix (off), three (qkv), or three for each head (heads)");
ABSL_FLAG(std::string, ns_coefficients, "jordan",
          "Newton-Schulz polynomials: jordan, polar_express or you");
ABSL_FLAG(
    std::string, ns_algorithm, "auto",
    "Newton-Schulz products: auto (the fewest FLOPs at each shape), standard, symmetric, gram "
    "or gram_accurate");
ABSL_FLAG(std::string, muon_scale, "spectral",
          "scale of Muon's update: spectral, match_rms or unit");
ABSL_FLAG(int64_t, warmup_steps, 0, "steps over which learning rates rise from 0");
ABSL_FLAG(std::string, schedule, "constant", "after warm-up: constant or cosine");
ABSL_FLAG(double, clip, 1.0,
          "largest global gradient norm; inf: no clipping; 0: none either, and units are updated "
          "during backward, before the norm is known");
ABSL_FLAG(std::string, param_dtype, "auto",
          "type in which parameters are gathered: float32, bfloat16, or auto (what the device "
          "computes in fastest: float32 on a CPU, which then computes in float32 either way)");
ABSL_FLAG(std::string, reduce_dtype, "auto",
          "type in which gradients are reduced and accumulate in the shards: float32, bfloat16, or "
          "auto (float32)");
ABSL_FLAG(std::string, master_dtype, "float32",
          "type of the parameters that the optimizer updates: float32 or bfloat16");
ABSL_FLAG(uint64_t, seed, 0, "seed of the weights and of the order of the data");
ABSL_FLAG(std::string, data, "", "a text file (its bytes are the tokens) or a glob of .bin files");
ABSL_FLAG(double, val_fraction, 0.05, "part of the data, at its end, held out for validation");
ABSL_FLAG(int64_t, val_sequences, 64, "at most so many sequences are used for a validation");
ABSL_FLAG(int64_t, val_every, 0, "steps between validations; 0: after the last step only");
ABSL_FLAG(int64_t, log_every, 1, "steps between lines on the terminal");
ABSL_FLAG(int64_t, diagnostics_every, 0,
          "steps between lines of diagnostics in metrics.jsonl: diagonal dominance of the momenta, "
          "clip rate, size of the updates; 0: none");
ABSL_FLAG(std::string, run_dir, "", "folder of the run; empty: runs/DATE-TIME-OPTIMIZER");
ABSL_FLAG(bool, reshard_after_forward, true,
          "free each block's gathered parameters after its forward and gather them again");
ABSL_FLAG(int, prefetch, 1, "blocks gathered ahead of the one that computes");
ABSL_FLAG(bool, recompute, false,
          "keep only each block's input and run its forward again in backward");
ABSL_FLAG(absl::Duration, collective_timeout, absl::Minutes(10),
          "how long a rank waits for the others in one collective");
ABSL_FLAG(std::string, trace, "",
          "folder for a trace of every rank, for trace_report and ui.perfetto.dev; empty: none");
ABSL_FLAG(
    std::string, trace_steps, "",
    "first and last step of the trace, as in 3:5; empty: all steps, as long as there is room");
ABSL_FLAG(std::string, link, "",
          "what the ranks pretend to be connected by: GB/s and microseconds a hop (12.5,10), or "
          "pcie4, pcie5, nvlink4, 10gbe, 100gbe, 400gbe; empty: as fast as memory");

namespace dim0 {
namespace {

std::atomic<bool> stop_requested = false;

// The first signal ends the run after the step in progress, the second ends it at once.
void HandleSignal(int /*signal*/) {
  stop_requested.store(true);
  constexpr char kNotice[] = "stopping after this step; once more to stop at once\n";
  [[maybe_unused]] const ssize_t ignored = write(STDOUT_FILENO, kNotice, sizeof(kNotice) - 1);
  for (const int either : {SIGINT, SIGTERM}) std::signal(either, SIG_DFL);
}

// Every flag of this program with its value.
std::map<std::string, std::string> ProgramFlags() {
  std::map<std::string, std::string> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::EndsWith(flag->Filename(), "tools/train.cc")) {
      flags[std::string(name)] = flag->CurrentValue();
    }
  }
  return flags;
}

// All that the flags say.
struct Setup {
  Gpt2Config model;
  OptimizerConfig optimizer;
  Schedule schedule;
  TrainerOptions trainer;
  DatasetOptions data;
  bool recompute = false;
  // Flags that say 0, auto or nothing, as they were understood.
  std::map<std::string, std::string> resolved;

  // Whether rank 0, which tells how it goes, is this process'.
  bool leads() const { return !trainer.launch || trainer.launch->rank == 0; }

  Workload MakeWorkload() const {
    Workload workload;
    workload.make_model = [config = model, recompute = recompute,
                           param = trainer.engine.param_dtype,
                           reduce = trainer.engine.reduce_dtype](
                              Device& device) -> absl::StatusOr<std::unique_ptr<Model>> {
      return std::make_unique<Gpt2>(config, recompute, device, param, reduce);
    };
    workload.make_optimizer = [config = optimizer](Device& device, ProcessGroup& group) {
      return CreateOptimizer(config, device, group);
    };
    workload.lr_factor = [schedule = schedule](int64_t step) { return schedule.Factor(step); };
    workload.learning_rates = optimizer.LearningRates();
    workload.flags = ProgramFlags();
    for (const auto& [name, value] : resolved) workload.flags[name] = value;
    workload.store_transposed = Gpt2StoredTransposed;
    workload.extra_files = {{"config.json", Gpt2ConfigJson(model)}};
    return workload;
  }
};

// Flags that not every optimizer reads, and those that do.
const std::map<std::string, std::vector<std::string>>& OptimizersOfFlags() {
  static const auto* const readers = new std::map<std::string, std::vector<std::string>>{
      {"matrix_lr", {"muon", "rmnp", "sign_momentum"}},
      {"matrix_weight_decay", {"muon", "rmnp", "sign_momentum"}},
      {"matrix_params", {"muon", "rmnp", "sign_momentum"}},
      {"momentum", {"muon", "rmnp", "sign_momentum"}},
      {"nesterov", {"muon", "rmnp"}},
      {"rmnp_power", {"rmnp"}},
      {"rmnp_eps", {"rmnp"}},
      {"muon_schedule", {"muon"}},
      {"muon_wire", {"muon"}},
      {"muon_split", {"muon"}},
      {"muon_scale", {"muon"}},
      {"ns_coefficients", {"muon"}},
      {"ns_algorithm", {"muon"}}};
  return *readers;
}

void WarnOfFlagsWithoutEffect(const std::string& optimizer) {
  for (const auto& [name, optimizers] : OptimizersOfFlags()) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    DIM0_CHECK(flag != nullptr);
    if (std::find(optimizers.begin(), optimizers.end(), optimizer) != optimizers.end()) continue;
    if (flag->CurrentValue() == flag->DefaultValue()) continue;
    spdlog::warn("warning: --{} has no effect with --optimizer={}; it is {}'s", name, optimizer,
                 absl::StrJoin(optimizers, "'s and "));
  }
}

// --device. What auto chose, and why, goes to the log.
absl::StatusOr<Backend> BackendFromFlag(const std::optional<Launch>& launch) {
  const std::string name = absl::GetFlag(FLAGS_device);
  if (name == "cpu") return Backend::kCpu;
  if (name != "cuda" && name != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device=", name, " is unknown; choose cpu, cuda or auto"));
  }
  const absl::Status usable = CheckBackend(Backend::kCuda, DeviceOrdinal(0, launch));
  if (name == "auto") {
    spdlog::info("device: {}",
                 usable.ok() ? "cuda" : absl::StrCat("cpu, because ", usable.message()));
    return usable.ok() ? Backend::kCuda : Backend::kCpu;
  }
  if (usable.ok()) return Backend::kCuda;
  return absl::Status(usable.code(), absl::StrCat("--device=cuda: ", usable.message(),
                                                  "; --device=cpu needs none of it"));
}

// --trace and --trace_steps.
absl::StatusOr<TraceOptions> TraceFromFlags() {
  TraceOptions trace = {.dir = absl::GetFlag(FLAGS_trace)};
  const std::string steps = absl::GetFlag(FLAGS_trace_steps);
  if (steps.empty()) return trace;
  const std::vector<absl::string_view> ends = absl::StrSplit(steps, ':');
  if (ends.size() != 2 || !absl::SimpleAtoi(ends[0], &trace.first_step) ||
      !absl::SimpleAtoi(ends[1], &trace.last_step) || trace.first_step < 1 ||
      trace.last_step < trace.first_step || trace.last_step > absl::GetFlag(FLAGS_steps)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--trace_steps=", steps,
        " is no range of steps; give first:last within 1:", absl::GetFlag(FLAGS_steps)));
  }
  if (trace.dir.empty()) {
    return absl::InvalidArgumentError("--trace_steps needs --trace=DIR, the folder of the trace");
  }
  return trace;
}

// --param_dtype and its like; `automatic` is what "auto" stands for, if it may stand there.
absl::StatusOr<DType> DTypeFromFlag(absl::string_view flag, absl::string_view value,
                                    std::optional<DType> automatic = std::nullopt) {
  if (value == "auto" && automatic) return *automatic;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (value == Name(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", value, " is unknown; choose ",
                                                 automatic ? "auto, " : "", "float32 or bfloat16"));
}

absl::Status AtLeast(absl::string_view flag, double value, double least) {
  if (value >= least && std::isfinite(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", value,
                                                 " is out of range; it must be ", least, " or more",
                                                 std::isinf(value) ? " and finite" : ""));
}

// What one process can start and schedule; beyond it the system's limits end the run half-way.
constexpr int64_t kMostThreads = 1024;

absl::StatusOr<Setup> SetupFromFlags() {
  Setup setup;
  for (const auto& [flag, value, least] : std::vector<std::tuple<const char*, double, double>>{
           {"ranks", absl::GetFlag(FLAGS_ranks), 1},
           {"threads_per_rank", absl::GetFlag(FLAGS_threads_per_rank), 0},
           {"seq_len", absl::GetFlag(FLAGS_seq_len), 1},
           {"batch", absl::GetFlag(FLAGS_batch), 1},
           {"grad_accum", absl::GetFlag(FLAGS_grad_accum), 1},
           {"steps", absl::GetFlag(FLAGS_steps), 1},
           {"lr", absl::GetFlag(FLAGS_lr), 0},
           {"matrix_lr", absl::GetFlag(FLAGS_matrix_lr), 0},
           {"weight_decay", absl::GetFlag(FLAGS_weight_decay), 0},
           {"matrix_weight_decay", absl::GetFlag(FLAGS_matrix_weight_decay), 0},
           {"rmnp_eps", absl::GetFlag(FLAGS_rmnp_eps), 0},
           {"warmup_steps", absl::GetFlag(FLAGS_warmup_steps), 0},
           {"val_every", absl::GetFlag(FLAGS_val_every), 0},
           {"val_sequences", absl::GetFlag(FLAGS_val_sequences), 0},
           {"log_every", absl::GetFlag(FLAGS_log_every), 1},
           {"diagnostics_every", absl::GetFlag(FLAGS_diagnostics_every), 0},
           {"prefetch", absl::GetFlag(FLAGS_prefetch), 0},
           {"val_fraction", absl::GetFlag(FLAGS_val_fraction), 0},
           {"init_std", absl::GetFlag(FLAGS_init_std), 0}}) {
    DIM0_RETURN_IF_ERROR(AtLeast(flag, value, least));
  }
  if (const double clip = absl::GetFlag(FLAGS_clip); !(clip >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--clip=", clip, " is out of range; it must be 0 or more, or inf"));
  }
  // Far beyond any run, and small enough that no count of bytes or tokens overflows.
  for (const auto& [flag, value, most] : std::vector<std::tuple<const char*, int64_t, int64_t>>{
           {"ranks", absl::GetFlag(FLAGS_ranks), kMostThreads},
           {"threads_per_rank", absl::GetFlag(FLAGS_threads_per_rank), kMostThreads},
           {"seq_len", absl::GetFlag(FLAGS_seq_len), 100'000'000},
           {"batch", absl::GetFlag(FLAGS_batch), 1'000'000},
           {"grad_accum", absl::GetFlag(FLAGS_grad_accum), 1'000'000}}) {
    if (value <= most) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, "=", value, " is out of range; it must be ", most, " or less"));
  }
  for (const auto& [flag, value] : std::vector<std::pair<const char*, double>>{
           {"beta1", absl::GetFlag(FLAGS_beta1)},
           {"beta2", absl::GetFlag(FLAGS_beta2)},
           {"momentum", absl::GetFlag(FLAGS_momentum)},
           {"rmnp_power", absl::GetFlag(FLAGS_rmnp_power)},
           {"val_fraction", absl::GetFlag(FLAGS_val_fraction)}}) {
    if (value >= 0 && value < 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, "=", value, " is out of range; it must be in [0, 1)"));
  }
  if (absl::GetFlag(FLAGS_collective_timeout) <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--collective_timeout must be more than 0");
  }
  if (absl::GetFlag(FLAGS_data).empty()) {
    return absl::InvalidArgumentError(
        "--data is missing; name a text file or a glob of .bin token files");
  }

  DIM0_ASSIGN_OR_RETURN(setup.model, Gpt2Preset(absl::GetFlag(FLAGS_model)));
  const auto replace = [](int64_t& target, int64_t value) {
    if (value != 0) target = value;
  };
  const int64_t seq_len = absl::GetFlag(FLAGS_seq_len);
  replace(setup.model.layers, absl::GetFlag(FLAGS_layers));
  replace(setup.model.width, absl::GetFlag(FLAGS_width));
  replace(setup.model.heads, absl::GetFlag(FLAGS_heads));
  replace(setup.model.vocab, absl::GetFlag(FLAGS_vocab));
  setup.model.positions = std::max(setup.model.positions, seq_len);
  replace(setup.model.positions, absl::GetFlag(FLAGS_positions));
  setup.model.init_stddev = absl::GetFlag(FLAGS_init_std);
  DIM0_RETURN_IF_ERROR(setup.model.Validate());
  if (seq_len > setup.model.positions) {
    return absl::InvalidArgumentError(
        absl::StrCat("--seq_len=", seq_len, " is beyond --positions=", setup.model.positions));
  }
  setup.recompute = absl::GetFlag(FLAGS_recompute);

  OptimizerConfig& optimizer = setup.optimizer;
  optimizer.name = absl::GetFlag(FLAGS_optimizer);
  DIM0_RETURN_IF_ERROR(CheckOptimizerName(optimizer.name));
  const auto chosen = [](double flag, double otherwise) { return flag > 0 ? flag : otherwise; };
  optimizer.adamw = {.lr = chosen(absl::GetFlag(FLAGS_lr), optimizer.name == "adamw" ? 6e-4 : 3e-3),
                     .beta1 = absl::GetFlag(FLAGS_beta1),
                     .beta2 = absl::GetFlag(FLAGS_beta2),
                     .weight_decay = absl::GetFlag(FLAGS_weight_decay)};
  DIM0_ASSIGN_OR_RETURN(optimizer.matrix_params,
                        ParseMatrixParams(absl::GetFlag(FLAGS_matrix_params)));
  optimizer.rmnp.momentum = absl::GetFlag(FLAGS_momentum);
  optimizer.rmnp.nesterov = absl::GetFlag(FLAGS_nesterov);
  optimizer.rmnp.power = absl::GetFlag(FLAGS_rmnp_power);
  optimizer.rmnp.eps = absl::GetFlag(FLAGS_rmnp_eps);
  optimizer.muon.momentum = absl::GetFlag(FLAGS_momentum);
  optimizer.muon.nesterov = absl::GetFlag(FLAGS_nesterov);
  DIM0_ASSIGN_OR_RETURN(optimizer.muon.schedule,
                        ParseMuonSchedule(absl::GetFlag(FLAGS_muon_schedule)));
  DIM0_ASSIGN_OR_RETURN(optimizer.muon.wire, ParseMuonWire(absl::GetFlag(FLAGS_muon_wire)));
  DIM0_ASSIGN_OR_RETURN(optimizer.muon.split, ParseMatrixSplit(absl::GetFlag(FLAGS_muon_split)));
  DIM0_ASSIGN_OR_RETURN(optimizer.muon.newton_schulz.coefficients,
                        ParseNewtonSchulzCoefficients(absl::GetFlag(FLAGS_ns_coefficients)));
  DIM0_ASSIGN_OR_RETURN(optimizer.muon.newton_schulz.algorithm,
                        ParseNewtonSchulzAlgorithm(absl::GetFlag(FLAGS_ns_algorithm)));
  optimizer.rmnp.lr = chosen(absl::GetFlag(FLAGS_matrix_lr), 4e-3);
  optimizer.rmnp.weight_decay = absl::GetFlag(FLAGS_matrix_weight_decay);
  optimizer.sign_momentum.lr = chosen(absl::GetFlag(FLAGS_matrix_lr), optimizer.sign_momentum.lr);
  optimizer.sign_momentum.momentum = absl::GetFlag(FLAGS_momentum);
  optimizer.sign_momentum.weight_decay = absl::GetFlag(FLAGS_matrix_weight_decay);
  optimizer.muon.lr = chosen(absl::GetFlag(FLAGS_matrix_lr), 2e-2);
  optimizer.muon.weight_decay = absl::GetFlag(FLAGS_matrix_weight_decay);
  DIM0_ASSIGN_OR_RETURN(optimizer.muon.scale, ParseUpdateScale(absl::GetFlag(FLAGS_muon_scale)));

  DIM0_ASSIGN_OR_RETURN(setup.schedule.kind, ParseSchedule(absl::GetFlag(FLAGS_schedule)));
  setup.schedule.warmup_steps = absl::GetFlag(FLAGS_warmup_steps);
  setup.schedule.total_steps = absl::GetFlag(FLAGS_steps);

  TrainerOptions& trainer = setup.trainer;
  DIM0_ASSIGN_OR_RETURN(trainer.launch, ReadLaunchEnvironment());
  // One rank alone is a rank of this process: a batch system says so of every job.
  if (trainer.launch && trainer.launch->world_size == 1) trainer.launch.reset();
  if (!setup.leads()) spdlog::set_level(spdlog::level::warn);
  // One is what it is without the flag.
  if (const int ranks = absl::GetFlag(FLAGS_ranks);
      trainer.launch && ranks != 1 && ranks != trainer.launch->world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--ranks=", ranks, ", but a launcher has started ", trainer.launch->world_size,
        " processes, one for each rank; start ", ranks, " of them or leave --ranks out"));
  }
  DIM0_ASSIGN_OR_RETURN(trainer.backend, BackendFromFlag(trainer.launch));
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  trainer.ranks = trainer.launch ? trainer.launch->world_size : absl::GetFlag(FLAGS_ranks);
  trainer.threads_per_rank = absl::GetFlag(FLAGS_threads_per_rank);
  if (trainer.threads_per_rank == 0) {
    const int sharing = trainer.launch ? trainer.launch->local_size : trainer.ranks;
    trainer.threads_per_rank = std::max(1, cores / sharing);
  }
  const int64_t threads = int64_t{trainer.launch ? 1 : trainer.ranks} * trainer.threads_per_rank;
  if (threads > kMostThreads) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--ranks=", trainer.ranks, " with --threads_per_rank=", trainer.threads_per_rank, " are ",
        threads, " threads; choose at most ", kMostThreads, " together"));
  }
  if (threads > cores && trainer.backend == Backend::kCpu) {
    spdlog::warn("warning: {} ranks x {} threads share {} cores; steps will be slow", trainer.ranks,
                 trainer.threads_per_rank, cores);
  }
  trainer.collective_timeout = absl::GetFlag(FLAGS_collective_timeout);
  if (const std::string link = absl::GetFlag(FLAGS_link); !link.empty()) {
    const absl::StatusOr<LinkSpeed> speed = ParseLink(link);
    if (!speed.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--link: ", speed.status().message()));
    }
    if (trainer.backend != Backend::kCpu) {
      return absl::InvalidArgumentError(
          "--link: GPUs have the links that they have; the ranks of --device=cpu can pretend");
    }
    trainer.link = *speed;
  }
  trainer.engine = {.reshard_after_forward = absl::GetFlag(FLAGS_reshard_after_forward),
                    .prefetch = absl::GetFlag(FLAGS_prefetch),
                    .sync_every_micro_batch = absl::GetFlag(FLAGS_accum_sync),
                    .clip = absl::GetFlag(FLAGS_clip)};
  DIM0_ASSIGN_OR_RETURN(trainer.engine.master_dtype,
                        DTypeFromFlag("master_dtype", absl::GetFlag(FLAGS_master_dtype)));
  // What is stored in fewer bytes is not sent in more.
  const bool short_masters = trainer.engine.master_dtype == DType::kBFloat16;
  DIM0_ASSIGN_OR_RETURN(
      trainer.engine.param_dtype,
      DTypeFromFlag("param_dtype", absl::GetFlag(FLAGS_param_dtype),
                    short_masters ? DType::kBFloat16 : DefaultParameterDType(trainer.backend)));
  DIM0_ASSIGN_OR_RETURN(
      trainer.engine.reduce_dtype,
      DTypeFromFlag("reduce_dtype", absl::GetFlag(FLAGS_reduce_dtype), DType::kFloat32));
  DIM0_RETURN_IF_ERROR(trainer.engine.Validate());
  trainer.batch = absl::GetFlag(FLAGS_batch);
  trainer.grad_accum = absl::GetFlag(FLAGS_grad_accum);
  trainer.seq_len = seq_len;
  trainer.steps = absl::GetFlag(FLAGS_steps);
  trainer.seed = absl::GetFlag(FLAGS_seed);
  trainer.val_every = absl::GetFlag(FLAGS_val_every);
  trainer.val_sequences = absl::GetFlag(FLAGS_val_sequences);
  trainer.log_every = absl::GetFlag(FLAGS_log_every);
  trainer.diagnostics_every = absl::GetFlag(FLAGS_diagnostics_every);
  trainer.run_dir = absl::GetFlag(FLAGS_run_dir);
  if (trainer.run_dir.empty()) {
    trainer.run_dir =
        absl::StrCat("runs/", absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::LocalTimeZone()),
                     "-", optimizer.name);
  }
  DIM0_ASSIGN_OR_RETURN(trainer.trace, TraceFromFlags());
  trainer.stop = &stop_requested;

  setup.data = {.path = absl::GetFlag(FLAGS_data),
                .vocabulary = setup.model.vocab,
                .seq_len = seq_len,
                .global_batch = trainer.sequences_per_step(),
                .seed = trainer.seed,
                .val_fraction = absl::GetFlag(FLAGS_val_fraction)};
  const bool on_cpu = trainer.backend == Backend::kCpu;
  setup.resolved = {{"device", on_cpu ? "cpu" : "cuda"},
                    {"ranks", absl::StrCat(trainer.ranks)},
                    {"threads_per_rank", absl::StrCat(trainer.threads_per_rank)},
                    {"layers", absl::StrCat(setup.model.layers)},
                    {"width", absl::StrCat(setup.model.width)},
                    {"heads", absl::StrCat(setup.model.heads)},
                    {"vocab", absl::StrCat(setup.model.vocab)},
                    {"positions", absl::StrCat(setup.model.positions)},
                    {"param_dtype", std::string(Name(trainer.engine.param_dtype))},
                    {"reduce_dtype", std::string(Name(trainer.engine.reduce_dtype))},
                    {"run_dir", trainer.run_dir}};
  for (const auto& [name, rate] : optimizer.LearningRates()) {
    setup.resolved[name] = absl::StrCat(rate);
  }
  // Only when nothing is wrong: an error is one line.
  WarnOfFlagsWithoutEffect(optimizer.name);
  return setup;
}

// What must fit into `memory`: the fullest rank's bytes, or those of all ranks together.
int64_t NeededBytes(const std::vector<MemoryUse>& plan, const AvailableMemory& memory,
                    bool launched) {
  int64_t all = 0, most = 0;
  for (const MemoryUse& rank : plan) {
    all += rank.total();
    most = std::max(most, rank.total());
  }
  return memory.of_each_rank || launched ? most : all;
}

absl::StatusOr<int64_t> PlannedBytes(const Setup& setup, const AvailableMemory& memory) {
  DIM0_ASSIGN_OR_RETURN(const std::vector<MemoryUse> plan,
                        PlanMemory(setup.trainer, setup.MakeWorkload()));
  return NeededBytes(plan, memory, setup.trainer.launch.has_value());
}

// Prints the predicted memory; refuses a run that does not fit, with changes of flags that would
// make it.
absl::Status CheckMemory(const Setup& setup) {
  DIM0_ASSIGN_OR_RETURN(const std::vector<MemoryUse> plan,
                        PlanMemory(setup.trainer, setup.MakeWorkload()));
  spdlog::info("predicted memory of the fullest rank:\n{}", MemoryTable(plan));
  const std::optional<Launch>& launch = setup.trainer.launch;
  DIM0_ASSIGN_OR_RETURN(
      const std::unique_ptr<Device> device,
      CreateDevice(setup.trainer.backend, 1, Residency::kAtOnce, DeviceOrdinal(0, launch)));
  const int ranks_here = launch ? 1 : setup.trainer.ranks;
  DIM0_ASSIGN_OR_RETURN(
      const AvailableMemory memory,
      device->Available(setup.trainer.ranks, ranks_here * setup.trainer.threads_per_rank,
                        launch ? launch->local_size : 1));
  const int64_t available = memory.bytes;
  const int64_t needed = NeededBytes(plan, memory, launch.has_value());
  if (needed <= available) return absl::OkStatus();

  // Each change alone; else as many together, the cheapest for speed first, as it takes.
  using Change = std::pair<const char*, void (*)(Setup&)>;
  const std::vector<Change> changes = {
      {"--diagnostics_every=0", [](Setup& s) { s.trainer.diagnostics_every = 0; }},
      {"--recompute", [](Setup& s) { s.recompute = true; }},
      {"--batch=1", [](Setup& s) { s.trainer.batch = 1; }},
      {"--prefetch=0", [](Setup& s) { s.trainer.engine.prefetch = 0; }},
      {"--accum_sync", [](Setup& s) { s.trainer.engine.sync_every_micro_batch = true; }},
      {"--reshard_after_forward", [](Setup& s) { s.trainer.engine.reshard_after_forward = true; }},
      {"--optimizer=rmnp", [](Setup& s) { s.optimizer.name = "rmnp"; }}};
  std::vector<std::string> fitting;
  Setup together = setup;
  int64_t together_bytes = needed;
  std::vector<std::string> together_flags;
  for (const auto& [flag, change] : changes) {
    Setup alone = setup;
    change(alone);
    DIM0_ASSIGN_OR_RETURN(const int64_t alone_bytes, PlannedBytes(alone, memory));
    if (alone_bytes <= available) fitting.push_back(flag);
    if (together_bytes <= available) continue;
    Setup added = together;
    change(added);
    DIM0_ASSIGN_OR_RETURN(const int64_t added_bytes, PlannedBytes(added, memory));
    if (added_bytes >= together_bytes) continue;
    together = added;
    together_bytes = added_bytes;
    together_flags.push_back(flag);
  }
  std::string advice;
  if (!fitting.empty()) {
    advice = absl::StrCat("it would fit with ", absl::StrJoin(fitting, " or with "));
  } else if (together_bytes <= available) {
    advice = absl::StrCat("it would fit with ", absl::StrJoin(together_flags, " "), " together");
  } else {
    advice = "choose a smaller model (--layers, --width, --vocab)";
  }
  std::string kept;
  if (memory.kept > 0) {
    kept = absl::StrCat(" beside the ", FormatBytes(memory.kept), " left to NCCL and cuBLAS");
  }
  const absl::string_view where = memory.of_each_rank ? "on a rank's device"
                                  : launch            ? "a rank"
                                                      : "in all";
  return absl::ResourceExhaustedError(absl::StrCat("the run needs ", FormatBytes(needed), " ",
                                                   where, " and ", FormatBytes(available),
                                                   " are available", kept, "; ", advice));
}

absl::StatusOr<TrainingSummary> Run(const Setup& setup) {
  const Workload workload = setup.MakeWorkload();
  const absl::StatusOr<Dataset> dataset = Dataset::Open(setup.data);
  if (!dataset.ok()) {
    return absl::Status(dataset.status().code(),
                        absl::StrCat("--data: ", dataset.status().message()));
  }
  const ParameterTable table(Gpt2Units(setup.model));
  spdlog::info("{} parameters, {} layers, width {}, {} heads, vocabulary {}", table.elements(),
               setup.model.layers, setup.model.width, setup.model.heads, setup.model.vocab);
  spdlog::info("{} tokens of data; {} sequences of {} tokens a step; {} ranks x {} threads; {}",
               dataset->tokens(), setup.trainer.sequences_per_step(), setup.trainer.seq_len,
               setup.trainer.ranks, setup.trainer.threads_per_rank, setup.optimizer.name);
  const EngineOptions& engine = setup.trainer.engine;
  spdlog::info(absl::StrCat("shards ", Name(engine.master_dtype), ", gathered as ",
                            Name(engine.param_dtype), ", reduced as ", Name(engine.reduce_dtype)));
  if (dataset->is_text() && setup.model.vocab > 256) {
    spdlog::info("the data are bytes: --vocab=256 would do, instead of {}", setup.model.vocab);
  }
  DIM0_RETURN_IF_ERROR(CheckMemory(setup));
  return Train(setup.trainer, workload, *dataset);
}

void PrintSummary(const Setup& setup, const TrainingSummary& summary) {
  if (std::isfinite(summary.val_loss)) {
    spdlog::info("validation loss {:.4f}", summary.val_loss);
  }
  spdlog::info("peak memory of the fullest rank:\n{}", MemoryTable({summary.peak_memory}));
  spdlog::info("bytes sent by each rank and step:");
  for (const char* purpose : {"parameter", "gradient", "optimizer"}) {
    spdlog::info("  {:<14} {:10.1f} MiB", purpose, summary.bytes_per_step.at(purpose) / 1048576.0);
  }
  if (summary.newton_schulz_calls > 0) {
    spdlog::info(
        "Newton-Schulz: {:.0f} runs a step at {:.2f} of {}; the busiest rank has {:.3f} of the "
        "mean "
        "work as predicted, {:.3f} as measured",
        static_cast<double>(summary.newton_schulz_calls) / std::max<int64_t>(1, summary.steps),
        summary.newton_schulz_flops_fraction, summary.matmul_name,
        summary.newton_schulz_imbalance_predicted, summary.newton_schulz_imbalance_measured);
  }
  if (!summary.trace_report.empty()) spdlog::info("\n{}", summary.trace_report);
  spdlog::info("run folder: {}", Printable(setup.trainer.run_dir));
  if (!summary.trace_report.empty()) {
    const std::string& dir = setup.trainer.trace.dir;
    spdlog::info("trace: {} (to look at it: trace_report --html=FILE {})", Printable(dir),
                 ShellWord(dir));
  }
}

int Main(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stdout_logger_mt("train"));
  spdlog::set_pattern("%v");
  spdlog::flush_on(spdlog::level::info);
  if (const auto status = HandleCommandLine(
          argc, argv,
          "Trains a GPT-2 whose parameters, gradients and optimizer state are sharded by rows.\n"
          "  train --model=gpt2 --ranks=2 --optimizer=rmnp --data=TEXT --run_dir=runs/first")) {
    return *status;
  }
  absl::StatusOr<Setup> setup = SetupFromFlags();
  if (!setup.ok()) {
    PrintError("train", setup.status().message());
    // A machine without the GPU that --device asks for is no wrong command line.
    const bool usage = absl::IsInvalidArgument(setup.status()) || absl::IsNotFound(setup.status());
    return usage ? kExitUsage : kExitFailure;
  }
  setup->trainer.ranks_met = [] {
    for (const int either : {SIGINT, SIGTERM}) std::signal(either, HandleSignal);
  };
  const absl::StatusOr<TrainingSummary> summary = Run(*setup);
  if (!summary.ok()) {
    PrintError("train", summary.status().message());
    return kExitFailure;
  }
  if (setup->leads()) PrintSummary(*setup, *summary);
  if (!summary->stopped) return kExitOk;
  spdlog::info("stopped by a signal after step {}; weights and summary are those of that step",
               summary->steps);
  return kExitInterrupted;
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) { dim0::EndProcess(dim0::Main(argc, argv)); }
