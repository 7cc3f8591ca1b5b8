#include "runtime/trainer.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/steady_clock.h"
#include "nlohmann/json.hpp"
#include "runtime/check.h"
#include "runtime/diagnostics.h"
#include "runtime/printable.h"
#include "runtime/run_files.h"
#include "runtime/safetensors.h"
#include "runtime/trace/trace_file.h"
#include "runtime/trace/trace_report.h"
#include "spdlog/spdlog.h"

namespace dim0 {
namespace {

using Json = nlohmann::ordered_json;

// What ranks tell each other: plain structs, exchanged as bytes.
template <typename T>
absl::StatusOr<std::vector<T>> ExchangeStruct(Engine& engine, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  DIM0_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      engine.Exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof(T))));
  std::vector<T> structs(all.size());
  for (size_t i = 0; i < all.size(); ++i) std::memcpy(&structs[i], all[i].data(), sizeof(T));
  return structs;
}

struct BytesSent {
  int64_t parameter = 0, gradient = 0, optimizer = 0;
};

BytesSent Sent(const ByteLedger& ledger) {
  return {ledger.bytes(Purpose::kParameter), ledger.bytes(Purpose::kGradient),
          ledger.bytes(Purpose::kOptimizer)};
}

// Names and flags need not be UTF-8.
std::string Text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

// What is not a finite number becomes null.
Json ToJson(const Dominance& dominance) {
  return {{"r_avg", dominance.average},
          {"r_min", dominance.smallest},
          {"r_max", dominance.largest},
          {"rows", dominance.rows}};
}

// Token buffers of micro-batches; they stay while the work that reads them is in flight.
class BatchBuffers {
 public:
  BatchBuffers(int64_t count, int64_t sequences, int64_t seq_len)
      : sequences_(sequences), seq_len_(seq_len) {
    tokens_.resize(count, std::vector<int32_t>(sequences * seq_len));
    targets_ = tokens_;
    for (int64_t i = 0; i < count; ++i) {
      batches_.push_back({sequences, seq_len, tokens_[i].data(), targets_[i].data()});
    }
  }
  absl::Span<int32_t> tokens(int64_t batch, int64_t sequence) {
    return absl::MakeSpan(tokens_[batch]).subspan(sequence * seq_len_, seq_len_);
  }
  absl::Span<int32_t> targets(int64_t batch, int64_t sequence) {
    return absl::MakeSpan(targets_[batch]).subspan(sequence * seq_len_, seq_len_);
  }
  absl::Span<const Batch> batches() const { return batches_; }

 private:
  const int64_t sequences_, seq_len_;
  std::vector<std::vector<int32_t>> tokens_, targets_;
  std::vector<Batch> batches_;
};

// What the ranks' traces share.
struct TraceState {
  std::atomic<bool> failed = false;  // the first rank to raise it says why
  std::mutex room;                   // of the disk: held from finding that a trace fits to its end
};

// One rank's run. Rank 0 also writes the logs and the files.
class RankRun {
 public:
  // `trace_state` is all ranks'.
  RankRun(const TrainerOptions& options, const Workload& workload, const Dataset& dataset,
          ProcessGroup& group, TraceState& trace_state)
      : options_(options),
        workload_(workload),
        dataset_(dataset),
        group_(group),
        trace_state_(trace_state),
        val_sequences_(std::min(dataset.val_sequences(), options.val_sequences)),
        train_batches_(options.grad_accum, options.batch, options.seq_len),
        val_batches_(ValidationRounds(), options.batch, options.seq_len) {
    FillValidation();
  }

  // The summary is rank 0's affair; the other ranks return an empty one.
  absl::StatusOr<TrainingSummary> Run() {
    DIM0_RETURN_IF_ERROR(SetUp());
    if (leads()) {
      DIM0_RETURN_IF_ERROR(CheckFreeSpace(options_.run_dir, weight_bytes()));
      DIM0_ASSIGN_OR_RETURN(JsonLinesFile file,
                            JsonLinesFile::Create(options_.run_dir + "/metrics.jsonl"));
      metrics_.emplace(std::move(file));
    }
    clock_ = SteadyNow();
    for (int64_t step = 1; step <= options_.steps && !stopped_; ++step) {
      DIM0_RETURN_IF_ERROR(Step(step));
      const bool due = options_.val_every > 0 && step % options_.val_every == 0;
      if ((due || step == options_.steps) && !stopped_) DIM0_RETURN_IF_ERROR(Validate(step));
    }
    return Finish();
  }

  // After the run, failed or not: with what all ranks wrote before, so that a disk that is full
  // costs the trace and not the weights.
  void SaveTrace() {
    if (!tracer_ || engine_ == nullptr) return;
    // A failed run's streams may still be busy. Their errors are known.
    (void)engine_->Synchronize();
    // Without --trace_steps a run that is stopped has the trace that was asked for.
    const bool enough = stopped_ && options_.trace.last_step > options_.steps;
    const int64_t last = std::min(options_.trace.last_step, options_.steps);
    if (tracer_->last_ended() < last && !enough) tracer_->CutShort();
    WriteTrace();
  }

 private:
  bool leads() const { return group_.rank() == 0; }
  const char* DivergenceAdvice() const {
    return options_.engine.clip > 0 ? "; lower --lr, --matrix_lr or --clip"
                                    : "; lower --lr or --matrix_lr, or set --clip";
  }

  absl::Status SetUp() {
    DIM0_ASSIGN_OR_RETURN(
        device_, CreateDevice(options_.backend, options_.threads_per_rank, Residency::kAtOnce,
                              DeviceOrdinal(group_.rank(), options_.launch)));
    if (leads()) spdlog::info("rank 0's device: {}", device_->name());
    allocator_.emplace(device_.get());
    DIM0_ASSIGN_OR_RETURN(model_, workload_.make_model(*device_));
    StartTracer();
    DIM0_ASSIGN_OR_RETURN(optimizer_, workload_.make_optimizer(*device_, group_));
    DIM0_RETURN_IF_ERROR(
        model_->Allocate(*allocator_, options_.batch, options_.seq_len, /*training=*/true));
    DIM0_ASSIGN_OR_RETURN(engine_, Engine::Create(options_.engine, *model_, group_, *device_,
                                                  *allocator_, optimizer_.get()));
    if (options_.diagnostics_every > 0) {
      DIM0_ASSIGN_OR_RETURN(
          diagnostics_, Diagnostics::Create(*engine_, *optimizer_, group_, *device_, *allocator_));
    }
    DIM0_RETURN_IF_ERROR(CompareFlags());
    DIM0_RETURN_IF_ERROR(engine_->Start(options_.seed));
    // All ranks measure at once: they will compute at once.
    DIM0_ASSIGN_OR_RETURN(
        const std::vector<double> rates,
        ExchangeStruct(*engine_, device_->MeasureMatMulRate(model_->parameter_dtype(),
                                                            options_.matmul_measurement)));
    // Without one rank's there is no yardstick.
    const bool measured = *std::min_element(rates.begin(), rates.end()) > 0;
    matmul_rate_ = measured ? std::accumulate(rates.begin(), rates.end(), 0.0)
                            : std::numeric_limits<double>::quiet_NaN();
    if (leads() && measured) {
      spdlog::info("{} rate {:.1f} GFLOP/s over all ranks", matmul_name(), matmul_rate_ * 1e-9);
    } else if (leads()) {
      spdlog::warn("warning: the {} rate could not be measured; fractions of it are left out",
                   matmul_name());
    }
    return absl::OkStatus();
  }

  // Ranks that are processes may have been started with different flags.
  absl::Status CompareFlags() {
    std::vector<std::string> names;
    std::vector<uint64_t> hashes;
    for (const auto& [name, value] : workload_.flags) {
      // What may differ, or stands for something else that is compared.
      static const std::set<absl::string_view> kOwn = {"collective_timeout",
                                                       "data",
                                                       "device",
                                                       "log_every",
                                                       "ranks",
                                                       "run_dir",
                                                       "trace",
                                                       "trace_steps",
                                                       "threads_per_rank"};
      if (kOwn.contains(name)) continue;
      names.push_back(name);
      hashes.push_back(HashBytes(value));
    }
    // The first tokens that the run trains on stand for all of them; the seed decides which these
    // are.
    std::vector<int32_t> sequence(options_.seq_len), targets(options_.seq_len);
    dataset_.TrainSequence(0, absl::MakeSpan(sequence), absl::MakeSpan(targets));
    names.push_back("data");
    hashes.push_back(HashBytes(absl::MakeConstSpan(reinterpret_cast<const char*>(sequence.data()),
                                                   sequence.size() * sizeof(int32_t))));
    DIM0_ASSIGN_OR_RETURN(
        const std::vector<std::string> all,
        engine_->Exchange(std::string(reinterpret_cast<const char*>(hashes.data()),
                                      hashes.size() * sizeof(uint64_t))));
    for (size_t i = 0; i < names.size(); ++i) {
      for (int rank = 1; rank < group_.world_size(); ++rank) {
        const size_t at = i * sizeof(uint64_t);
        if (all[rank].compare(at, sizeof(uint64_t), all[0], at, sizeof(uint64_t)) == 0) continue;
        return absl::FailedPreconditionError(absl::StrCat("ranks 0 and ", rank,
                                                          " have different --", names[i],
                                                          "; start all ranks with the same flags"));
      }
    }
    return absl::OkStatus();
  }

  // Before the first stream is made.
  void StartTracer() {
    if (options_.trace.dir.empty()) return;
    namespace fs = std::filesystem;
    const ParameterTable table(model_->units());
    std::error_code error;
    const fs::path metrics =
        fs::relative(fs::path(options_.run_dir) / "metrics.jsonl", options_.trace.dir, error);
    tracer_.emplace(options_.trace, RankTrace{.rank = group_.rank(),
                                              .world_size = group_.world_size(),
                                              .backend = std::string(group_.trace_backend()),
                                              .model = absl::StrCat(absl::Hex(table.Hash())),
                                              .parameters = table.elements(),
                                              .flags = workload_.flags,
                                              .metrics = error ? "" : metrics.string()});
    device_->SetRecorder(tracer_->recorder());
  }

  // While the weights have yet to be written.
  void SaveTraceAheadOfWeights() {
    std::lock_guard<std::mutex> lock(trace_state_.room);
    const absl::Status room = CheckFreeSpaceForTrace(options_.trace.dir, tracer_->FileBytes(),
                                                     options_.run_dir, weight_bytes());
    if (room.ok()) {
      WriteTrace();
    } else {
      tracer_->GiveUp();
      WarnOfNoTrace(room);
    }
  }

  void WriteTrace() {
    const absl::Status status = tracer_->Write(engine_->LiveBetweenSteps());
    if (!status.ok()) WarnOfNoTrace(status);
  }

  void WarnOfNoTrace(const absl::Status& why) {
    if (trace_state_.failed.exchange(true)) return;
    spdlog::warn("warning: rank {} has no trace: {}; training goes on without", group_.rank(),
                 Printable(why.message()));
  }

  std::string matmul_name() const {
    return std::string(device_->matmul_name(model_->parameter_dtype()));
  }
  int64_t weight_bytes() const { return engine_->table().elements() * sizeof(float); }
  int64_t tokens_per_step() const { return options_.sequences_per_step() * options_.seq_len; }
  double FlopsFraction(double seconds) const {
    return tokens_per_step() * model_->FlopsPerToken(options_.seq_len) / seconds / matmul_rate_;
  }

  absl::Status Step(int64_t step) {
    int64_t index = (step - 1) * options_.sequences_per_step() + group_.rank() * options_.batch;
    for (int64_t micro = 0; micro < options_.grad_accum; ++micro) {
      for (int64_t b = 0; b < options_.batch; ++b) {
        dataset_.TrainSequence(index + b, train_batches_.tokens(micro, b),
                               train_batches_.targets(micro, b));
      }
      index += options_.ranks * options_.batch;
    }
    const bool measured = diagnostics_ != nullptr && step % options_.diagnostics_every == 0;
    if (measured) {
      // The last step's update belongs to its step's time, the copy to none's.
      DIM0_RETURN_IF_ERROR(engine_->Synchronize());
      const absl::Time start = SteadyNow();
      DIM0_RETURN_IF_ERROR(diagnostics_->BeforeStep());
      clock_ += SteadyNow() - start;
    }
    const double factor = workload_.lr_factor(step);
    if (tracer_) tracer_->BeginStep(step);
    absl::StatusOr<StepResult> result =
        engine_->TrainStep(train_batches_.batches(), tokens_per_step(),
                           {.step = step, .lr_scale = factor}, options_.stop);
    if (!result.ok()) {
      const absl::Status& status = result.status();
      return absl::Status(status.code(),
                          absl::StrCat("step ", step, ": ", status.message(),
                                       absl::IsOutOfRange(status) ? DivergenceAdvice() : ""));
    }
    stopped_ = result->stop;
    steps_done_ = step;
    final_loss_ = result->loss;
    ++steps_since_diagnostics_;
    if (result->clipped) ++clipped_since_diagnostics_;
    // The last step's update has no next step to be counted in.
    if (measured || stopped_ || step == options_.steps) {
      DIM0_RETURN_IF_ERROR(engine_->Synchronize());
    }

    const absl::Time now = SteadyNow();
    const absl::Time begin = std::exchange(clock_, now);
    const double seconds = absl::ToDoubleSeconds(now - begin);
    step_seconds_.push_back(seconds);
    forward_backward_seconds_.push_back(absl::ToDoubleSeconds(result->forward_backward));
    // A step of the trace is one of the log too.
    if (leads()) DIM0_RETURN_IF_ERROR(Log(step, *result, seconds, factor));
    if (tracer_) tracer_->EndStep(step, begin, now, result->loss);
    if (tracer_ && tracer_->last(step) && step < options_.steps && !stopped_) {
      DIM0_RETURN_IF_ERROR(engine_->Synchronize());
      SaveTraceAheadOfWeights();
      clock_ = SteadyNow();
    }
    return measured ? Diagnose(step) : absl::OkStatus();
  }

  absl::Status Diagnose(int64_t step) {
    DIM0_ASSIGN_OR_RETURN(const DiagnosticsReport report, diagnostics_->AfterStep());
    const double clip_rate =
        static_cast<double>(clipped_since_diagnostics_) / steps_since_diagnostics_;
    steps_since_diagnostics_ = 0;
    clipped_since_diagnostics_ = 0;
    clock_ = SteadyNow();
    if (!leads()) return absl::OkStatus();
    Json json = ToJson(report.all);
    json["clip_rate"] = clip_rate;
    json["update_rms"] = {
        {"matrices", report.update_rms[static_cast<int>(ParameterRole::kMatrix)]},
        {"embeddings", report.update_rms[static_cast<int>(ParameterRole::kEmbedding)]},
        {"vectors", report.update_rms[static_cast<int>(ParameterRole::kVector)]}};
    json["matrices"] = Json::object();
    for (const auto& [name, dominance] : report.matrices) {
      json["matrices"][name] = ToJson(dominance);
    }
    spdlog::info("step {:>{}}/{}  r_avg {:.3f}  r_min {:.3f}  r_max {:.3f}  clip rate {:.2f}", step,
                 absl::StrCat(options_.steps).size(), options_.steps, report.all.average,
                 report.all.smallest, report.all.largest, clip_rate);
    return metrics_->Append(Text(Json{{"step", step}, {"diagnostics", json}}));
  }

  absl::Status Log(int64_t step, const StepResult& result, double seconds, double lr_factor) {
    const double tokens_per_second = tokens_per_step() / seconds;
    const double fraction = FlopsFraction(seconds);
    Json json = {{"step", step}, {"loss", result.loss}, {"grad_norm", result.gradient_norm}};
    std::string rates;
    for (const auto& [name, rate] : workload_.learning_rates) {
      json[name] = rate * lr_factor;
      absl::StrAppendFormat(&rates, "%s %.2e  ", name, rate * lr_factor);
    }
    json["step_ms"] = seconds * 1e3;
    json["tokens_per_s"] = tokens_per_second;
    json["flops_fraction"] = fraction;
    DIM0_RETURN_IF_ERROR(metrics_->Append(Text(json)));
    if (step % options_.log_every == 0 || step == 1 || step == options_.steps || result.stop) {
      spdlog::info(
          "step {:>{}}/{}  loss {:.7f}  grad norm {:.4f}  {}{:.0f} ms  {:.0f} tokens/s{}", step,
          absl::StrCat(options_.steps).size(), options_.steps, result.loss, result.gradient_norm,
          rates, seconds * 1e3, tokens_per_second,
          std::isfinite(fraction) ? absl::StrFormat("  %.2f of %s", fraction, matmul_name()) : "");
    }
    return absl::OkStatus();
  }

  // The same sequences for any number of ranks; batches are filled up with targets that do not
  // count.
  void FillValidation() {
    const int64_t per_round = options_.ranks * options_.batch;
    for (int64_t round = 0; round < ValidationRounds(); ++round) {
      for (int64_t b = 0; b < options_.batch; ++b) {
        const int64_t index = round * per_round + group_.rank() * options_.batch + b;
        const absl::Span<int32_t> targets = val_batches_.targets(round, b);
        if (index < val_sequences_) {
          dataset_.ValSequence(index, val_batches_.tokens(round, b), targets);
        } else {
          std::fill(targets.begin(), targets.end(), -1);
        }
      }
    }
  }
  int64_t ValidationRounds() const {
    const int64_t per_round = options_.ranks * options_.batch;
    return (val_sequences_ + per_round - 1) / per_round;
  }

  absl::Status Validate(int64_t step) {
    if (val_sequences_ == 0) return absl::OkStatus();
    // Validation's gathers are not a training step's bytes, nor its time a step's.
    DIM0_RETURN_IF_ERROR(engine_->Synchronize());
    const BytesSent before = Sent(group_.ledger());
    DIM0_ASSIGN_OR_RETURN(const double sum, engine_->Evaluate(val_batches_.batches()));
    const BytesSent after = Sent(group_.ledger());
    validation_bytes_.parameter += after.parameter - before.parameter;
    val_loss_ = sum / (val_sequences_ * options_.seq_len);
    // The same on every rank. An update that spoils the weights shows here first.
    if (!std::isfinite(val_loss_)) {
      return absl::OutOfRangeError(
          absl::StrCat("step ", step, ": the validation loss is ", val_loss_, DivergenceAdvice()));
    }
    // A wish to stop that came meanwhile must not cost another step; the ranks have to agree on it.
    const int32_t wish = options_.stop != nullptr && options_.stop->load();
    DIM0_ASSIGN_OR_RETURN(const std::vector<int32_t> wishes, ExchangeStruct(*engine_, wish));
    stopped_ = std::any_of(wishes.begin(), wishes.end(), [](int32_t w) { return w != 0; });
    clock_ = SteadyNow();
    if (!leads()) return absl::OkStatus();
    spdlog::info("step {:>{}}/{}  validation loss {:.7f}", step,
                 absl::StrCat(options_.steps).size(), options_.steps, val_loss_);
    return metrics_->Append(Text(Json{{"step", step}, {"val_loss", val_loss_}}));
  }

  absl::StatusOr<TrainingSummary> Finish() {
    DIM0_RETURN_IF_ERROR(engine_->Synchronize());
    struct Figures {
      MemoryUse peak;
      BytesSent sent;
      NewtonSchulzWork newton_schulz;
    };
    const BytesSent sent = Sent(group_.ledger());
    DIM0_ASSIGN_OR_RETURN(
        const std::vector<Figures> figures,
        ExchangeStruct(*engine_, Figures{allocator_->peak(),
                                         {sent.parameter - validation_bytes_.parameter,
                                          sent.gradient, sent.optimizer},
                                         optimizer_->newton_schulz_work()}));
    TrainingSummary summary;
    summary.matmul_name = matmul_name();
    summary.steps = steps_done_;
    summary.stopped = stopped_;
    summary.final_loss = final_loss_;
    summary.val_loss = val_loss_;
    BytesSent total;
    NewtonSchulzWork work, most;
    for (const Figures& rank : figures) {
      if (rank.peak.total() > summary.peak_memory.total()) summary.peak_memory = rank.peak;
      total.parameter += rank.sent.parameter;
      total.gradient += rank.sent.gradient;
      total.optimizer += rank.sent.optimizer;
      work += rank.newton_schulz;
      most.flops = std::max(most.flops, rank.newton_schulz.flops);
      most.seconds = std::max(most.seconds, rank.newton_schulz.seconds);
    }
    summary.newton_schulz_calls = work.calls;
    if (work.seconds > 0) {
      summary.newton_schulz_imbalance_predicted = most.flops * options_.ranks / work.flops;
      summary.newton_schulz_imbalance_measured = most.seconds * options_.ranks / work.seconds;
      summary.newton_schulz_flops_fraction =
          work.flops / (work.seconds / options_.ranks) / matmul_rate_;
    }
    const int64_t shares = std::max<int64_t>(1, steps_done_) * options_.ranks;
    const auto mean = [&](int64_t bytes) { return (bytes + shares / 2) / shares; };
    summary.bytes_per_step = {{"parameter", mean(total.parameter)},
                              {"gradient", mean(total.gradient)},
                              {"optimizer", mean(total.optimizer)}};

    // The weights first: a summary says that the run is complete.
    DIM0_RETURN_IF_ERROR(SaveWeights());
    if (leads()) {
      DIM0_RETURN_IF_ERROR(WriteSummary(summary));
    }
    return summary;
  }

  absl::Status WriteSummary(const TrainingSummary& summary) {
    Json peak;
    for (int i = 0; i < kNumMemoryPurposes; ++i) {
      peak[std::string(Name(static_cast<MemoryPurpose>(i)))] = summary.peak_memory.bytes[i];
    }
    // The first step pays for page faults and cold caches.
    const auto mean_after_first = [](const std::vector<double>& values) {
      const size_t skip = values.size() > 1 ? 1 : 0;
      return std::accumulate(values.begin() + skip, values.end(), 0.0) /
             std::max<size_t>(1, values.size() - skip);
    };
    const double step_seconds = mean_after_first(step_seconds_);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    Json json = {{"world_size", options_.ranks},
                 {"parameters", engine_->table().elements()},
                 {"steps", summary.steps},
                 {"final_loss", summary.final_loss},
                 {"val_loss", std::isfinite(summary.val_loss) ? Json(summary.val_loss) : Json()},
                 {"tokens_per_s", tokens_per_step() / step_seconds},
                 {"device", device_->name()},
                 {"matmul", matmul_name()},
                 {"matmul_gflops", matmul_rate_ * 1e-9},
                 {"flops_fraction", FlopsFraction(step_seconds)},
                 {"forward_backward_flops_fraction",
                  FlopsFraction(mean_after_first(forward_backward_seconds_))},
                 {"peak_memory_bytes", peak},
                 {"process_peak_bytes", usage.ru_maxrss * int64_t{1024}},
                 {"bytes_per_step",
                  {{"parameter", summary.bytes_per_step.at("parameter")},
                   {"gradient", summary.bytes_per_step.at("gradient")},
                   {"optimizer", summary.bytes_per_step.at("optimizer")}}},
                 {"ns_calls_per_step", static_cast<double>(summary.newton_schulz_calls) /
                                           std::max<int64_t>(1, summary.steps)},
                 {"flags", workload_.flags}};
    if (summary.newton_schulz_calls > 0) {
      json["newton_schulz"] = {{"imbalance_predicted", summary.newton_schulz_imbalance_predicted},
                               {"imbalance_measured", summary.newton_schulz_imbalance_measured},
                               {"flops_fraction", summary.newton_schulz_flops_fraction}};
    }
    return WriteFileAtomically(options_.run_dir + "/summary.json", Text(json, /*indent=*/2) + "\n");
  }

  // Parameter by parameter through rank 0, so that no rank holds the whole model.
  absl::Status SaveWeights() {
    const ParameterTable& table = engine_->table();
    std::optional<SafetensorsWriter> writer;
    if (leads()) {
      std::vector<TensorDescription> tensors;
      for (int id = 0; id < table.size(); ++id) {
        const ParameterSpec& spec = table[id].spec;
        TensorDescription tensor{spec.name, StoredType::kF32, {spec.rows, spec.cols}};
        if (spec.role == ParameterRole::kVector) tensor.shape = {spec.rows};
        if (Transposed(spec)) tensor.shape = {spec.cols, spec.rows};
        tensors.push_back(std::move(tensor));
      }
      absl::StatusOr<SafetensorsWriter> created = SafetensorsWriter::Create(
          options_.run_dir + "/model.safetensors", std::move(tensors), {{"format", "pt"}});
      DIM0_RETURN_IF_ERROR(Lead(created.status()));
      writer.emplace(*std::move(created));
    }
    std::vector<float> whole;
    for (int id = 0; id < table.size(); ++id) {
      const ParameterSpec& spec = table[id].spec;
      if (leads()) whole.resize(spec.size());
      DIM0_RETURN_IF_ERROR(engine_->GatherToRankZero(id, absl::MakeSpan(whole)));
      if (!leads()) continue;
      // The last update has no step after it whose loss would show that it spoiled the weights.
      if (!std::all_of(whole.begin(), whole.end(), [](float w) { return std::isfinite(w); })) {
        return Lead(absl::OutOfRangeError(absl::StrCat("step ", steps_done_, ": ", spec.name,
                                                       " is not finite after the update",
                                                       DivergenceAdvice())));
      }
      if (Transposed(spec)) whole = TransposedCopy(whole, spec.rows, spec.cols);
      DIM0_RETURN_IF_ERROR(Lead(writer->AppendFloats(spec.name, whole)));
    }
    if (!leads()) return absl::OkStatus();
    // Last what takes longest to write again: weights without the other files are of little use.
    for (const auto& [name, contents] : workload_.extra_files) {
      DIM0_RETURN_IF_ERROR(WriteFileAtomically(options_.run_dir + "/" + name, contents));
    }
    return writer->Commit();
  }

  // An error on rank 0 alone must not leave the others waiting.
  absl::Status Lead(absl::Status status) {
    if (!status.ok()) group_.Abort(status);
    return status;
  }

  bool Transposed(const ParameterSpec& spec) const {
    return workload_.store_transposed && workload_.store_transposed(spec);
  }

  const TrainerOptions& options_;
  const Workload& workload_;
  const Dataset& dataset_;
  ProcessGroup& group_;
  TraceState& trace_state_;
  const int64_t val_sequences_;  // all ranks together
  BatchBuffers train_batches_;
  BatchBuffers val_batches_;

  // In this order: the engine goes first, the device and what records its streams last.
  std::optional<Tracer> tracer_;  // none without a trace
  std::unique_ptr<Device> device_;
  std::optional<Allocator> allocator_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Diagnostics> diagnostics_;  // null when off

  std::optional<JsonLinesFile> metrics_;
  double matmul_rate_ = 0;  // FLOP/s, all ranks
  absl::Time clock_;        // when the last step or validation ended
  int64_t steps_done_ = 0;
  bool stopped_ = false;
  int64_t steps_since_diagnostics_ = 0;
  int64_t clipped_since_diagnostics_ = 0;
  double final_loss_ = 0;
  double val_loss_ = std::numeric_limits<double>::quiet_NaN();
  BytesSent validation_bytes_;
  std::vector<double> step_seconds_;
  std::vector<double> forward_backward_seconds_;
};

// Keeps other runs out of the trace folder too, which it makes if need be.
absl::Status ClaimTraceDir(const std::string& run_dir, const std::string& trace_dir,
                           std::optional<RunDirLock>* lock) {
  DIM0_RETURN_IF_ERROR(CheckTraceDir(run_dir, trace_dir));
  if (PlaceInRunDir(run_dir, trace_dir) == ".") return absl::OkStatus();
  DIM0_ASSIGN_OR_RETURN(RunDirLock acquired, RunDirLock::Acquire(trace_dir, "--trace"));
  lock->emplace(std::move(acquired));
  return absl::OkStatus();
}

// Calls `work` for each rank of this process on a thread of its own, and waits for all.
template <typename Work>
void ForEach(size_t ranks, const Work& work) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

// What the traces of all ranks say, for the terminal.
absl::StatusOr<std::string> ReportOfTraces(const std::string& dir) {
  DIM0_ASSIGN_OR_RETURN(const std::vector<RankTrace> traces, ReadTraces(dir));
  DIM0_ASSIGN_OR_RETURN(const TraceReport report, AnalyzeTraces(traces));
  return FormatReport(report);
}

}  // namespace

absl::StatusOr<std::vector<MemoryUse>> PlanMemory(const TrainerOptions& options,
                                                  const Workload& workload) {
  DIM0_ASSIGN_OR_RETURN(const auto groups, CreateThreadRanks(options.ranks, {}));
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                        CreateDevice(options.backend, options.threads_per_rank, Residency::kAtOnce,
                                     DeviceOrdinal(0, options.launch)));
  std::vector<MemoryUse> plan;
  for (const std::unique_ptr<ProcessGroup>& group : groups) {
    Allocator allocator = Allocator::ForPlan();
    DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, workload.make_model(*device));
    DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Optimizer> optimizer,
                          workload.make_optimizer(*device, *group));
    DIM0_RETURN_IF_ERROR(
        model->Allocate(allocator, options.batch, options.seq_len, /*training=*/true));
    DIM0_ASSIGN_OR_RETURN(
        const std::unique_ptr<Engine> engine,
        Engine::Create(options.engine, *model, *group, *device, allocator, optimizer.get()));
    if (options.diagnostics_every > 0) {
      DIM0_RETURN_IF_ERROR(
          Diagnostics::Create(*engine, *optimizer, *group, *device, allocator).status());
    }
    plan.push_back(allocator.peak());
  }
  return plan;
}

std::string MemoryTable(const std::vector<MemoryUse>& ranks) {
  const MemoryUse& fullest = *std::max_element(
      ranks.begin(), ranks.end(),
      [](const MemoryUse& a, const MemoryUse& b) { return a.total() < b.total(); });
  int64_t all = 0;
  for (const MemoryUse& use : ranks) all += use.total();
  std::string table;
  const auto line = [&](absl::string_view name, int64_t bytes) {
    if (bytes == 0) return;
    absl::StrAppendFormat(&table, "  %-14s %10.1f MiB\n", name, bytes / 1048576.0);
  };
  for (int i = 0; i < kNumMemoryPurposes; ++i) {
    line(Name(static_cast<MemoryPurpose>(i)), fullest.bytes[i]);
  }
  line("in all", fullest.total());
  if (ranks.size() > 1) line(absl::StrCat(ranks.size(), " ranks"), all);
  return table;
}

absl::StatusOr<TrainingSummary> Train(const TrainerOptions& given, const Workload& workload,
                                      const Dataset& dataset) {
  TrainerOptions options = given;
  // Before a file is touched: the ranks may be more than the machine can have.
  DIM0_ASSIGN_OR_RETURN(const auto groups,
                        CreateLocalRanks(options.backend, options.ranks,
                                         {.timeout = options.collective_timeout,
                                          .start_timeout = options.collective_timeout,
                                          .link = options.link},
                                         options.launch));
  if (options.ranks_met) options.ranks_met();
  // The folders are rank 0's affair. No other rank writes before they have met in SetUp.
  const bool has_leader = groups.front()->rank() == 0;
  std::optional<RunDirLock> run_lock, trace_lock;
  const auto check_trace = [&](const absl::Status& status) {
    if (status.ok()) return;
    spdlog::warn("warning: no trace: {}; training goes on without", Printable(status.message()));
    options.trace.dir.clear();
    trace_lock.reset();
  };
  if (has_leader) {
    DIM0_ASSIGN_OR_RETURN(RunDirLock acquired, RunDirLock::Acquire(options.run_dir));
    run_lock.emplace(std::move(acquired));
    if (!options.trace.dir.empty()) {
      check_trace(ClaimTraceDir(options.run_dir, options.trace.dir, &trace_lock));
    }
    DIM0_ASSIGN_OR_RETURN(const std::string previous,
                          PrepareRunDir(options.run_dir, options.trace.dir));
    if (!previous.empty()) {
      spdlog::info("an earlier run's files were moved to {}", Printable(previous));
    }
    if (!options.trace.dir.empty()) check_trace(PrepareTraceDir(options.trace.dir));
  }

  std::mutex mutex;
  absl::Status first_error;  // by time: the others' errors follow from it
  TrainingSummary summary;
  TraceState trace_state;
  std::vector<std::unique_ptr<RankRun>> runs(groups.size());
  ForEach(groups.size(), [&](size_t i) {
    ProcessGroup& group = *groups[i];
    runs[i] = std::make_unique<RankRun>(options, workload, dataset, group, trace_state);
    absl::StatusOr<TrainingSummary> result = runs[i]->Run();
    std::lock_guard<std::mutex> lock(mutex);
    if (!result.ok()) {
      if (first_error.ok()) first_error = result.status();
      group.Abort(result.status());
    } else if (i == 0) {
      summary = *std::move(result);
    }
  });
  ForEach(groups.size(), [&](size_t i) {
    runs[i]->SaveTrace();
    runs[i].reset();
    // The report is of all ranks' files. Whether one is missing shows when they are read.
    if (!options.trace.dir.empty() && first_error.ok()) {
      auto channel = groups[i]->OpenHost("traces");
      if (channel.ok()) (void)(*channel)->Barrier({Purpose::kControl, "traces"});
    }
  });
  if (!first_error.ok()) return first_error;
  if (has_leader && !options.trace.dir.empty() && !trace_state.failed) {
    absl::StatusOr<std::string> report = ReportOfTraces(options.trace.dir);
    if (report.ok()) {
      summary.trace_report = *std::move(report);
    } else {
      spdlog::warn("warning: nothing to report of the trace: {}",
                   Printable(report.status().message()));
    }
  }
  return summary;
}

}  // namespace dim0
