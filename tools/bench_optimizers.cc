// bench_optimizers: what each optimizer's step costs in time and in bytes, on the hidden matrices
// of a GPT-2, sharded over ranks.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "model/gpt2.h"
#include "runtime/bandwidth.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/file.h"
#include "runtime/printable.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"
#include "tools/flags.h"
#include "tools/optimizer_bench.h"
#include "tools/process.h"

using StringList = std::vector<std::string>;

ABSL_FLAG(std::string, model, "gpt2-large", "shape: gpt2, gpt2-medium, gpt2-large or gpt2-xl");
ABSL_FLAG(int64_t, layers, 0, "number of blocks; 0: as --model says");
ABSL_FLAG(int64_t, width, 0, "width of the residual stream; 0: as --model says");
ABSL_FLAG(int64_t, heads, 0, "attention heads; 0: as --model says");
ABSL_FLAG(std::string, device, "cpu", "what computes: cpu, or cuda (an NVIDIA GPU for each rank)");
ABSL_FLAG(int, ranks, 1, "ranks, as threads of this process");
ABSL_FLAG(int, threads_per_rank, 0, "threads of each rank; 0: the cores divided by --ranks");
ABSL_FLAG(StringList, schemes, StringList({"rmnp_rows", "muon_redundant", "muon_owner", "adamw"}),
          "what to measure, separated by commas: rmnp_rows, rmnp_row_blocks, rmnp_columns, "
          "rmnp_flat, muon_redundant, muon_broadcast, muon_owner, adamw");
ABSL_FLAG(StringList, sweep, {},
          "sizes, separated by commas, of single square matrices on which rmnp_rows and "
          "muon_redundant are compared too; empty: none");
ABSL_FLAG(int, warmup, 2, "steps of each scheme before those that count");
ABSL_FLAG(int, repeats, 5, "steps of each scheme that count");
ABSL_FLAG(std::string, out, "", "folder for dist_opt.csv, sweep.csv and exactness.txt");
ABSL_FLAG(std::string, link, "",
          "what the ranks pretend to be connected by: GB/s and microseconds a hop (12.5,10), or "
          "pcie4, pcie5, nvlink4, 10gbe, 100gbe, 400gbe; empty: as fast as memory");
ABSL_FLAG(bool, ledger_only, false,
          "count bytes only: one step of the real schedule and the real collectives on the real "
          "sizes, without the arithmetic; nothing is timed, swept or checked");

namespace dim0 {
namespace {

constexpr int64_t kMostThreads = 1024;

// All that the flags say.
struct Setup {
  OptimizerBenchOptions options;
  std::vector<Scheme> schemes;
  std::vector<int64_t> sweep;
  std::string out;

  std::string Path(absl::string_view name) const { return absl::StrCat(out, "/", name); }
};

// What was measured elsewhere: 8 GPUs connected by PCIe, all matrices of GPT-2 Large.
struct Published {
  Scheme scheme;
  double ms, mib;
};
constexpr Published kPublished[] = {{Scheme::kRmnpRows, 5.3, 0},
                                    {Scheme::kRmnpColumns, 5.3, 2.8},
                                    {Scheme::kMuonRedundant, 359.5, 1181},
                                    {Scheme::kMuonBroadcast, 457.4, 2531}};

double Mib(int64_t bytes) { return bytes / 1048576.0; }

absl::Status InRange(absl::string_view flag, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, "=", value, " is out of range; it must be from ", least, " to ", most));
}

// The model's matrices; units without any are left out.
std::vector<UnitSpec> MatrixUnits(const Gpt2Config& model) {
  std::vector<UnitSpec> units;
  for (UnitSpec& unit : Gpt2Units(model)) {
    std::erase_if(unit.parameters, [](const ParameterSpec& parameter) {
      return parameter.role != ParameterRole::kMatrix;
    });
    if (!unit.parameters.empty()) units.push_back(std::move(unit));
  }
  return units;
}

std::string Names(absl::Span<const Scheme> schemes, absl::string_view separator) {
  return absl::StrJoin(schemes, separator,
                       [](std::string* out, Scheme scheme) { absl::StrAppend(out, Name(scheme)); });
}

absl::StatusOr<std::vector<Scheme>> SchemesFromFlag() {
  std::vector<Scheme> schemes;
  for (const std::string& name : absl::GetFlag(FLAGS_schemes)) {
    const absl::StatusOr<Scheme> scheme = ParseScheme(name);
    if (!scheme.ok()) {
      return absl::NotFoundError(absl::StrCat("--schemes: ", scheme.status().message()));
    }
    if (std::find(schemes.begin(), schemes.end(), *scheme) != schemes.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--schemes names ", name, " twice; name each scheme once"));
    }
    schemes.push_back(*scheme);
  }
  if (!schemes.empty()) return schemes;
  return absl::InvalidArgumentError(
      absl::StrCat("--schemes is empty; choose from ", Names(kAllSchemes, ", ")));
}

absl::StatusOr<std::vector<int64_t>> SweepFromFlag() {
  std::vector<int64_t> sizes;
  for (const std::string& text : absl::GetFlag(FLAGS_sweep)) {
    int64_t size;
    if (!absl::SimpleAtoi(text, &size) || size < 1 || size > 65536) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--sweep: '", text, "' is no size from 1 to 65536; say for example 1024,2048"));
    }
    sizes.push_back(size);
  }
  return sizes;
}

// Makes the folder and finds out now, not after the measurement, whether files can be made there.
absl::Status CheckWritable(const Setup& setup) {
  absl::Status status = MakeDirectories(setup.out);
  for (const char* name : {"dist_opt.csv", "sweep.csv", "exactness.txt"}) {
    if (status.ok()) status = AtomicFileWriter::Create(setup.Path(name)).status();
  }
  if (status.ok()) return status;
  return absl::InvalidArgumentError(
      absl::StrCat("--out: ", status.message(), "; name a folder that can be written"));
}

absl::StatusOr<Setup> SetupFromFlags() {
  Setup setup;
  OptimizerBenchOptions& options = setup.options;
  for (const auto& [flag, value, least, most] :
       std::vector<std::tuple<const char*, int64_t, int64_t, int64_t>>{
           {"layers", absl::GetFlag(FLAGS_layers), 0, 10'000},
           {"width", absl::GetFlag(FLAGS_width), 0, 100'000},
           {"heads", absl::GetFlag(FLAGS_heads), 0, 100'000},
           {"ranks", absl::GetFlag(FLAGS_ranks), 1, kMostThreads},
           {"threads_per_rank", absl::GetFlag(FLAGS_threads_per_rank), 0, kMostThreads},
           {"warmup", absl::GetFlag(FLAGS_warmup), 0, 1'000'000},
           {"repeats", absl::GetFlag(FLAGS_repeats), 1, 1'000'000}}) {
    DIM0_RETURN_IF_ERROR(InRange(flag, value, least, most));
  }
  DIM0_ASSIGN_OR_RETURN(Gpt2Config model, Gpt2Preset(absl::GetFlag(FLAGS_model)));
  const auto replace = [](int64_t& target, int64_t value) {
    if (value != 0) target = value;
  };
  replace(model.layers, absl::GetFlag(FLAGS_layers));
  replace(model.width, absl::GetFlag(FLAGS_width));
  replace(model.heads, absl::GetFlag(FLAGS_heads));
  DIM0_RETURN_IF_ERROR(model.Validate());
  options.units = MatrixUnits(model);
  DIM0_ASSIGN_OR_RETURN(setup.schemes, SchemesFromFlag());
  DIM0_ASSIGN_OR_RETURN(setup.sweep, SweepFromFlag());

  DIM0_ASSIGN_OR_RETURN(options.backend, UsableBackend(absl::GetFlag(FLAGS_device)));
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  options.ranks = absl::GetFlag(FLAGS_ranks);
  options.threads_per_rank = absl::GetFlag(FLAGS_threads_per_rank);
  if (options.threads_per_rank == 0) options.threads_per_rank = std::max(1, cores / options.ranks);
  const int64_t threads = int64_t{options.ranks} * options.threads_per_rank;
  if (threads > kMostThreads) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--ranks=", options.ranks, " with --threads_per_rank=", options.threads_per_rank, " are ",
        threads, " threads; choose at most ", kMostThreads, " together"));
  }
  options.warmup = absl::GetFlag(FLAGS_warmup);
  options.repeats = absl::GetFlag(FLAGS_repeats);
  options.ledger_only = absl::GetFlag(FLAGS_ledger_only);
  if (const std::string link = absl::GetFlag(FLAGS_link); !link.empty()) {
    const absl::StatusOr<LinkSpeed> speed = ParseLink(link);
    if (!speed.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--link: ", speed.status().message()));
    }
    options.link = *speed;
  }
  if (options.backend != Backend::kCpu && (options.link.has_value() || options.ledger_only)) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.link.has_value() ? "--link" : "--ledger_only",
                     " is for the CPU: leave it out, or --device=cuda"));
  }
  setup.out = absl::GetFlag(FLAGS_out);
  if (setup.out.empty()) {
    return absl::InvalidArgumentError("--out is missing; name a folder for the results");
  }
  DIM0_RETURN_IF_ERROR(CheckWritable(setup));
  if (threads > cores && !options.ledger_only && options.backend == Backend::kCpu) {
    spdlog::warn("warning: {} ranks x {} threads share {} cores; times and ratios mean little",
                 options.ranks, options.threads_per_rank, cores);
  }
  return setup;
}

// Schemes that are measured together: owner and redundant, whose times are compared; else each
// alone, so that only one state is in memory.
std::vector<std::vector<Scheme>> Together(const std::vector<Scheme>& schemes) {
  std::vector<std::vector<Scheme>> groups;
  std::vector<Scheme> compared;
  for (const Scheme scheme : schemes) {
    if (scheme == Scheme::kMuonOwner || scheme == Scheme::kMuonRedundant) {
      compared.push_back(scheme);
    } else {
      groups.push_back({scheme});
    }
  }
  if (!compared.empty()) groups.push_back(compared);
  return groups;
}

bool RunsNewtonSchulz(const Setup& setup) {
  return std::any_of(setup.schemes.begin(), setup.schemes.end(), [](Scheme scheme) {
    return scheme == Scheme::kMuonRedundant || scheme == Scheme::kMuonBroadcast ||
           scheme == Scheme::kMuonOwner;
  });
}

// One square matrix in place of the model.
OptimizerBenchOptions SweepOptions(const Setup& setup, int64_t size) {
  OptimizerBenchOptions options = setup.options;
  options.units = {
      {"sweep", {{.name = "matrix", .rows = size, .cols = size, .role = ParameterRole::kMatrix}}}};
  return options;
}
constexpr Scheme kSweepSchemes[] = {Scheme::kRmnpRows, Scheme::kMuonRedundant};

// Refuses what does not fit.
absl::Status CheckMemory(const Setup& setup) {
  const OptimizerBenchOptions& options = setup.options;
  // GPUs may be fewer than ranks.
  DIM0_RETURN_IF_ERROR(CreateLocalRanks(options.backend, options.ranks, {}).status());
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(options.backend, 1));
  DIM0_ASSIGN_OR_RETURN(
      const AvailableMemory memory,
      device->Available(options.ranks, options.ranks * options.threads_per_rank, 1));
  // `of_rank`: what each rank needs.
  const auto fits = [&](absl::string_view what, const std::vector<int64_t>& of_rank,
                        absl::string_view advice) -> absl::Status {
    const int64_t needed = memory.of_each_rank
                               ? *std::max_element(of_rank.begin(), of_rank.end())
                               : std::accumulate(of_rank.begin(), of_rank.end(), int64_t{0});
    if (needed <= memory.bytes) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        what, " needs ", FormatBytes(needed), memory.of_each_rank ? " on a GPU" : " in all",
        " and ", FormatBytes(memory.bytes), " are available; ", advice));
  };
  constexpr char kSmallerModel[] = "choose fewer --layers or a smaller --width";
  for (const std::vector<Scheme>& group : Together(setup.schemes)) {
    DIM0_ASSIGN_OR_RETURN(const std::vector<int64_t> needed, PlanSchemes(options, group));
    DIM0_RETURN_IF_ERROR(fits(Names(group, " beside "), needed, kSmallerModel));
  }
  if (options.ledger_only) return absl::OkStatus();
  DIM0_RETURN_IF_ERROR(
      fits("comparing RMNP's updates", PlanRmnpDifference(options), kSmallerModel));
  if (RunsNewtonSchulz(setup)) {
    DIM0_ASSIGN_OR_RETURN(const std::vector<int64_t> needed, PlanNewtonSchulz(options));
    DIM0_RETURN_IF_ERROR(fits("Newton-Schulz", needed, kSmallerModel));
  }
  for (const int64_t size : setup.sweep) {
    DIM0_ASSIGN_OR_RETURN(const std::vector<int64_t> needed,
                          PlanSchemes(SweepOptions(setup, size), kSweepSchemes));
    DIM0_RETURN_IF_ERROR(fits(absl::StrCat("--sweep at ", size), needed, "leave this size out"));
  }
  return absl::OkStatus();
}

absl::Status CheckExactness(const Setup& setup) {
  DIM0_ASSIGN_OR_RETURN(const double difference, MeasureRmnpDifference(setup.options));
  spdlog::info("RMNP's updates on {} ranks and on one differ by {}", setup.options.ranks,
               difference);
  DIM0_RETURN_IF_ERROR(WriteFileAtomically(
      setup.Path("exactness.txt"),
      absl::StrFormat("ranks %d\nmax_abs_difference %.9g\n", setup.options.ranks, difference)));
  if (difference == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrFormat("RMNP's sharded update differs from the unsharded one by %.9g; it must not "
                      "differ: this is a fault of the program",
                      difference));
}

// In the order of setup.schemes.
absl::StatusOr<std::vector<SchemeResult>> Measure(const Setup& setup) {
  std::vector<SchemeResult> results(setup.schemes.size());
  for (const std::vector<Scheme>& group : Together(setup.schemes)) {
    if (!setup.options.ledger_only) spdlog::info("measuring {}", Names(group, " and "));
    DIM0_ASSIGN_OR_RETURN(const std::vector<SchemeResult> measured,
                          MeasureSchemes(setup.options, group));
    for (const SchemeResult& result : measured) {
      const auto place = std::find(setup.schemes.begin(), setup.schemes.end(), result.scheme);
      results[place - setup.schemes.begin()] = result;
    }
  }
  return results;
}

std::string DistOptCsv(const Setup& setup, const std::vector<SchemeResult>& results) {
  std::string csv =
      "scheme,ms_per_step,bytes_per_step,mib_per_step,comm_ms,compute_ms,exposed_comm_ms,gflops,"
      "gb_per_s\n";
  for (const SchemeResult& r : results) {
    if (setup.options.ledger_only) {  // what was not measured stays empty
      absl::StrAppendFormat(&csv, "%s,,%d,%.4f,,,,,\n", Name(r.scheme), r.bytes_per_step,
                            Mib(r.bytes_per_step));
      continue;
    }
    absl::StrAppendFormat(&csv, "%s,%.4f,%d,%.4f,%.4f,%.4f,%.4f,%.3f,%.3f\n", Name(r.scheme),
                          r.ms_per_step, r.bytes_per_step, Mib(r.bytes_per_step), r.comm_ms,
                          r.compute_ms, r.exposed_comm_ms, r.gflops, r.gb_per_s);
  }
  return csv;
}

// The table, beside what was published. MiB are a rank's on average, and the fullest rank's.
void PrintTable(const Setup& setup, const std::vector<SchemeResult>& results) {
  const bool timed = !setup.options.ledger_only;
  std::string heading = absl::StrFormat("%-16s%10s%10s", "", "MiB/step", "fullest");
  if (timed) {
    absl::StrAppendFormat(&heading, "%10s%10s%12s%12s%10s%8s", "ms/step", "comm ms", "compute ms",
                          "exposed ms", "GFLOP/s", "GB/s");
  }
  spdlog::info(heading + "    published: 36 blocks, 8 GPUs over PCIe");
  for (const SchemeResult& r : results) {
    std::string line = absl::StrFormat("%-16s%10.1f%10.1f", Name(r.scheme), Mib(r.bytes_per_step),
                                       Mib(r.most_bytes_per_step));
    if (timed) {
      absl::StrAppendFormat(&line, "%10.2f%10.2f%12.2f%12.2f%10.1f%8.2f", r.ms_per_step, r.comm_ms,
                            r.compute_ms, r.exposed_comm_ms, r.gflops, r.gb_per_s);
    }
    for (const Published& p : kPublished) {
      if (p.scheme == r.scheme) absl::StrAppendFormat(&line, "%10g MiB%8.1f ms", p.mib, p.ms);
    }
    spdlog::info(line);
  }
}

const SchemeResult* Find(const std::vector<SchemeResult>& results, Scheme scheme) {
  for (const SchemeResult& result : results) {
    if (result.scheme == scheme) return &result;
  }
  return nullptr;
}

absl::Status PrintRatios(const Setup& setup, const std::vector<SchemeResult>& results) {
  for (const auto& [scheme, bytes] : {std::pair(Scheme::kRmnpRows, 20), {Scheme::kAdamW, 28}}) {
    if (const SchemeResult* result = Find(results, scheme)) {
      spdlog::info(absl::StrFormat("%s: %.3g of a %s's bandwidth, counting %d bytes a parameter",
                                   Name(scheme), result->of_bandwidth,
                                   BandwidthName(setup.options.backend), bytes));
    }
  }
  const SchemeResult* owner = Find(results, Scheme::kMuonOwner);
  const SchemeResult* redundant = Find(results, Scheme::kMuonRedundant);
  if (owner != nullptr && redundant != nullptr) {
    std::vector<double> ratios;
    for (size_t k = 0; k < owner->step_ms.size(); ++k) {
      ratios.push_back(redundant->step_ms[k] / owner->step_ms[k]);
    }
    spdlog::info("muon_owner: {:.3g} times as fast as muon_redundant", Median(ratios));
  }
  if (!RunsNewtonSchulz(setup)) return absl::OkStatus();
  DIM0_ASSIGN_OR_RETURN(const NewtonSchulzResult newton_schulz, MeasureNewtonSchulz(setup.options));
  spdlog::info(
      "Newton-Schulz: {:.3g} of the matrix-product rate, counting the FLOPs that it executes",
      newton_schulz.of_matmul_rate);
  spdlog::info("Newton-Schulz at {} x {}: {:.3g} times as fast as the standard algorithm",
               newton_schulz.rows, newton_schulz.cols, newton_schulz.speedup_over_standard);
  return absl::OkStatus();
}

absl::Status Sweep(const Setup& setup) {
  std::string csv = "size,rmnp_ms,muon_ms,gather_bytes\n";
  spdlog::info("{:>8}{:>12}{:>12}{:>12}{:>14}", "size", "rmnp ms", "muon ms", "muon/rmnp",
               "gather bytes");
  for (const int64_t size : setup.sweep) {
    DIM0_ASSIGN_OR_RETURN(const std::vector<SchemeResult> results,
                          MeasureSchemes(SweepOptions(setup, size), kSweepSchemes));
    const SchemeResult &rmnp = results[0], &muon = results[1];
    absl::StrAppendFormat(&csv, "%d,%.4f,%.4f,%d\n", size, rmnp.ms_per_step, muon.ms_per_step,
                          muon.bytes_per_step);
    spdlog::info("{:>8}{:>12.3f}{:>12.3f}{:>12.1f}{:>14}", size, rmnp.ms_per_step, muon.ms_per_step,
                 muon.ms_per_step / rmnp.ms_per_step, muon.bytes_per_step);
  }
  return WriteFileAtomically(setup.Path("sweep.csv"), csv);
}

absl::Status Run(const Setup& setup) {
  const OptimizerBenchOptions& options = setup.options;
  DIM0_RETURN_IF_ERROR(CheckMemory(setup));
  const ParameterTable table(options.units);
  spdlog::info("{} matrices of {} blocks, {} parameters; {} ranks x {} threads", table.size(),
               table.num_units(), table.elements(), options.ranks, options.threads_per_rank);
  if (!options.ledger_only) DIM0_RETURN_IF_ERROR(CheckExactness(setup));
  DIM0_ASSIGN_OR_RETURN(const std::vector<SchemeResult> results, Measure(setup));
  DIM0_RETURN_IF_ERROR(WriteFileAtomically(setup.Path("dist_opt.csv"), DistOptCsv(setup, results)));
  PrintTable(setup, results);
  if (options.ledger_only) return absl::OkStatus();
  DIM0_RETURN_IF_ERROR(PrintRatios(setup, results));
  return setup.sweep.empty() ? absl::OkStatus() : Sweep(setup);
}

int Main(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stdout_logger_mt("bench_optimizers"));
  spdlog::set_pattern("%v");
  spdlog::flush_on(spdlog::level::info);
  if (const auto status = HandleCommandLine(
          argc, argv,
          "Measures one step of each optimizer on all hidden matrices of a GPT-2, sharded over "
          "ranks, and\ncounts the bytes that it sends.\n"
          "  bench_optimizers --model=gpt2-large --layers=2 --ranks=2 --sweep=1024,2048 "
          "--out=bench")) {
    return *status;
  }
  const absl::StatusOr<Setup> setup = SetupFromFlags();
  if (!setup.ok()) {
    PrintError("bench_optimizers", setup.status().message());
    return kExitUsage;
  }
  if (const absl::Status status = Run(*setup); !status.ok()) {
    PrintError("bench_optimizers", status.message());
    return kExitFailure;
  }
  return kExitOk;
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) { dim0::EndProcess(dim0::Main(argc, argv)); }
