// How fast each kernel is at a model's shapes, and what share of a training step it takes. Rates
// are set against what the machine does at the same moment: products and attention against the
// device's own matrix-product rate, everything else against its bandwidth: that of a triad
// a = b + s c on a CPU, that of a copy on a GPU.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/dtype.h"
#include "collectives/steady_clock.h"
#include "model/kernels.h"
#include "runtime/allocator.h"
#include "runtime/bandwidth.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/host_copy.h"
#include "runtime/median.h"

ABSL_FLAG(std::string, device, "cpu", "what computes: cpu, or cuda (the first NVIDIA GPU)");
ABSL_FLAG(std::string, dtype, "",
          "float32 or bfloat16: what parameters are gathered and gradients reduced in; empty: what "
          "the device computes in fastest");
ABSL_FLAG(int, threads, 1, "threads of the rank, on a CPU");
ABSL_FLAG(int64_t, batch, 1, "sequences per step");
ABSL_FLAG(int64_t, seq_len, 256, "tokens per sequence");
ABSL_FLAG(int64_t, layers, 36, "transformer blocks");
ABSL_FLAG(int64_t, width, 1280, "width of the model");
ABSL_FLAG(int64_t, heads, 20, "attention heads");
ABSL_FLAG(int64_t, vocab, 50257, "vocabulary size");
ABSL_FLAG(int, repeats, 7, "measurements per kernel; the median counts");

namespace dim0 {
namespace {

// Passes everything on, and adds up the ops' own accounts of their work.
class MeteredStream : public Stream {
 public:
  explicit MeteredStream(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
  void Enqueue(OpInfo info, Op op) override {
    flops += info.flops;
    bytes += info.bytes;
    stream_->Enqueue(std::move(info), std::move(op));
  }
  void Wait(const Event& event) override { stream_->Wait(event); }
  Event Record() override { return stream_->Record(); }
  absl::Status Synchronize() override { return stream_->Synchronize(); }
  const std::string& name() const override { return stream_->name(); }

  double flops = 0, bytes = 0;

 private:
  std::unique_ptr<Stream> stream_;
};

class Bench {
 public:
  Bench(Device& device, DType parameters, MeteredStream& stream, int repeats)
      : device_(device), parameters_(parameters), stream_(stream), repeats_(repeats) {}

  struct Measured {
    double seconds, flops, bytes;
  };

  // Of `op`, the median time over rounds of at least 20 ms, and its work.
  Measured Measure(const std::function<void()>& op) {
    auto run = [&](int64_t count) {
      const absl::Time start = SteadyNow();
      for (int64_t i = 0; i < count; ++i) op();
      DIM0_CHECK(stream_.Synchronize().ok());
      return absl::ToDoubleSeconds(SteadyNow() - start) / count;
    };
    stream_.flops = stream_.bytes = 0;
    run(1);  // brings code and caches up
    const double flops = stream_.flops, bytes = stream_.bytes;
    const int64_t count = std::clamp<int64_t>(0.02 / run(1), 1, 1000);
    std::vector<double> times;
    for (int i = 0; i < repeats_; ++i) times.push_back(run(count));
    return {Median(std::move(times)), flops, bytes};
  }

  // Prints one line for a kernel that runs `calls` times a step. `gemm`: bound by matrix products.
  void Report(const std::string& what, int64_t calls, bool gemm, const std::function<void()>& op) {
    constexpr absl::Duration kDuration = absl::Milliseconds(200);
    double yardstick;
    if (gemm) {
      yardstick = device_.MeasureMatMulRate(parameters_, kDuration);
      rates_.push_back(yardstick);
    } else {
      const absl::StatusOr<double> bandwidth = MeasureBandwidth(device_, kDuration);
      DIM0_CHECK(bandwidth.ok());
      yardstick = *bandwidth;
    }
    const auto [seconds, flops, bytes] = Measure(op);
    const double work = gemm ? flops : bytes;
    lines_.push_back({what, seconds, calls});
    std::printf("%-36s %9.3f ms  %8.1f %s  %6.3f of %8.1f\n", what.c_str(), 1e3 * seconds,
                work / seconds / 1e9, gemm ? "GFLOP/s" : "GB/s   ", work / seconds / yardstick,
                yardstick / 1e9);
    std::fflush(stdout);
  }

  // Shares of a step; `model_flops` is the step's count by the usual formula.
  void Summarise(double model_flops) const {
    double total = 0;
    for (const Line& line : lines_) total += line.seconds * line.calls;
    std::printf("\n%-36s %6s  %9s  %6s\n", "share of forward + backward", "calls", "ms", "share");
    for (const Line& line : lines_) {
      std::printf("%-36s %6ld  %9.1f  %5.1f%%\n", line.what.c_str(), static_cast<long>(line.calls),
                  1e3 * line.seconds * line.calls, 100 * line.seconds * line.calls / total);
    }
    const double rate = Median(rates_);
    std::printf("%-36s %6s  %9.1f\n", "total", "", 1e3 * total);
    std::printf("\n%.1f GFLOP/s of %.1f: flops_fraction %.3f\n", model_flops / total / 1e9,
                rate / 1e9, model_flops / total / rate);
  }

 private:
  struct Line {
    std::string what;
    double seconds;
    int64_t calls;
  };
  Device& device_;
  const DType parameters_;
  MeteredStream& stream_;
  const int repeats_;
  std::vector<Line> lines_;
  std::vector<double> rates_;
};

absl::StatusOr<DType> DTypeFromFlag(Backend backend) {
  const std::string name = absl::GetFlag(FLAGS_dtype);
  if (name.empty()) return DefaultParameterDType(backend);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (name == Name(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--dtype=", name, " is unknown; choose float32 or bfloat16"));
}

absl::Status Run() {
  const int64_t batch = absl::GetFlag(FLAGS_batch), seq_len = absl::GetFlag(FLAGS_seq_len);
  const int64_t layers = absl::GetFlag(FLAGS_layers), width = absl::GetFlag(FLAGS_width);
  const int64_t heads = absl::GetFlag(FLAGS_heads), vocab = absl::GetFlag(FLAGS_vocab);
  const int repeats = absl::GetFlag(FLAGS_repeats);
  if (std::min({batch, seq_len, layers, width, heads, vocab, int64_t{repeats}}) < 1) {
    return absl::InvalidArgumentError("every size must be at least 1");
  }
  if (width % heads != 0) {
    return absl::InvalidArgumentError("--width must be a multiple of --heads");
  }
  const int64_t tokens = batch * seq_len;

  DIM0_ASSIGN_OR_RETURN(const Backend backend, UsableBackend(absl::GetFlag(FLAGS_device)));
  DIM0_ASSIGN_OR_RETURN(const DType dtype, DTypeFromFlag(backend));
  DIM0_ASSIGN_OR_RETURN(std::unique_ptr<Device> device,
                        CreateDevice(backend, absl::GetFlag(FLAGS_threads)));
  std::unique_ptr<Kernels> kernels = CreateKernels(*device);
  const ModelTypes types = kernels->TypesFor(dtype, dtype);
  MeteredStream stream(device->NewStream("compute"));
  Allocator allocator(device.get());
  std::vector<Buffer> buffers;
  absl::Status failed;
  const auto allocate = [&](int64_t bytes) -> void* {
    absl::StatusOr<Buffer> buffer = allocator.Allocate(MemoryPurpose::kActivations, bytes);
    failed.Update(buffer.status());
    if (!failed.ok()) return nullptr;
    buffers.push_back(*std::move(buffer));
    return buffers.back().data();
  };
  // Values that vary, none of them subnormal, in pieces of whole periods.
  constexpr int64_t kPeriod = 201;
  std::vector<float> values(kPeriod * 10'000);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = 0.01f * static_cast<float>(i * 7919 % kPeriod) - 0.997f;
  }
  const auto make = [&](DType type, int64_t rows, int64_t cols) {
    const Tensor tensor = {allocate(rows * cols * SizeOf(type)), type, rows, cols};
    const int64_t most = values.size();
    for (int64_t done = 0; done < tensor.size() && failed.ok(); done += most) {
      const int64_t count = std::min(most, tensor.size() - done);
      failed.Update(CopyFloatsFromHost(*device, stream, absl::MakeSpan(values).first(count),
                                       {tensor.at(done), type, count}));
    }
    return tensor;
  };
  const auto activation = [&](int64_t rows, int64_t cols) {
    return make(types.activations, rows, cols);
  };
  const auto parameter = [&](int64_t rows, int64_t cols) {
    return make(types.parameters, rows, cols);
  };
  const auto gradient = [&](int64_t rows, int64_t cols) {
    return make(types.gradients, rows, cols);
  };
  const auto statistic = [&](int64_t rows, int64_t cols) {
    return make(DType::kFloat32, rows, cols);
  };
  const auto make_ids = [&](const std::vector<int32_t>& ids) {
    const int64_t bytes = ids.size() * sizeof(int32_t);
    auto* const copy = static_cast<int32_t*>(allocate(bytes));
    if (!failed.ok()) return copy;
    device->CopyFromHost(stream, copy, ids.data(), bytes);
    failed.Update(stream.Synchronize());
    return copy;
  };
  const Tensor x = activation(tokens, width), y = activation(tokens, width);
  const Tensor z = activation(tokens, width);
  const Tensor gain = parameter(width, 1), bias = parameter(4 * width, 1);
  const Tensor dgain = gradient(width, 1), dbias = gradient(4 * width, 1);
  const Tensor mean = statistic(tokens, 1), rstd = statistic(tokens, 1);
  const Tensor qkv = activation(tokens, 3 * width), dqkv = activation(tokens, 3 * width);
  const Tensor hidden = activation(tokens, 4 * width), dhidden = activation(tokens, 4 * width);
  const Tensor logsumexp = statistic(batch * heads, seq_len);
  const Tensor weight = parameter(4 * width, width), dweight = gradient(4 * width, width);
  const Tensor wte = parameter(vocab, width), dwte = gradient(std::max(vocab, tokens), width);
  const Tensor wpe = parameter(seq_len, width), dwpe = gradient(seq_len, width);
  const Tensor logits = activation(tokens, LogitColumns(vocab));
  std::vector<int32_t> token_ids(tokens);
  for (int64_t n = 0; n < tokens; ++n) token_ids[n] = (n * 7919) % vocab;
  const int32_t* const ids = make_ids(token_ids);
  // The table has the rows in use only; in this one every token has its own.
  std::iota(token_ids.begin(), token_ids.end(), 0);
  const int32_t* const own_rows = make_ids(token_ids);
  auto* const loss = static_cast<double*>(allocate(sizeof(double)));
  if (const int64_t bytes = kernels->WorkspaceBytes(tokens, width, heads); bytes > 0) {
    kernels->SetWorkspace(allocate(bytes));
  }
  if (!failed.ok()) return failed;
  const Tensor bias_width = Rows(bias, 0, width), dbias_width = Rows(dbias, 0, width);

  std::printf("B %ld  T %ld  layers %ld  C %ld  heads %ld  V %ld  ", static_cast<long>(batch),
              static_cast<long>(seq_len), static_cast<long>(layers), static_cast<long>(width),
              static_cast<long>(heads), static_cast<long>(vocab));
  if (backend == Backend::kCpu) std::printf("threads %d  ", absl::GetFlag(FLAGS_threads));
  std::printf("activations %s\nrates are of a %s's bandwidth, or of the %s rate\n\n",
              std::string(Name(types.activations)).c_str(),
              std::string(BandwidthName(backend)).c_str(),
              std::string(device->matmul_name(types.parameters)).c_str());
  Bench bench(*device, types.parameters, stream, repeats);
  constexpr Write kWrite = Write::kOverwrite;

  bench.Report("embedding forward", 1, false,
               [&] { kernels->EmbeddingForward(stream, ids, seq_len, wte, wpe, x); });
  bench.Report("embedding backward", 1, false, [&] {
    kernels->EmbeddingBackward(stream, own_rows, seq_len, x, Rows(dwte, 0, tokens), dwpe);
  });
  bench.Report("layer norm forward", 1, false,
               [&] { kernels->LayerNormForward(stream, x, gain, bias_width, y, mean, rstd); });
  bench.Report("add + layer norm forward", 2 * layers, false, [&] {
    kernels->AddLayerNormForward(stream, x, y, gain, bias_width, z, y, mean, rstd);
  });
  bench.Report("layer norm backward", 2 * layers + 1, false, [&] {
    kernels->LayerNormBackward(stream, y, x, gain, mean, rstd, z, Write::kAccumulate, dgain,
                               dbias_width, kWrite);
  });

  struct Layer {
    const char* name;
    Tensor in, out;
  };
  const auto weights = [](const Tensor& memory, const Tensor& in, const Tensor& out) {
    return Tensor{memory.data, memory.dtype, out.cols, in.cols};
  };
  for (const auto& [name, in, out] :
       {Layer{"qkv", x, qkv}, Layer{"attention projection", x, y}, Layer{"mlp in", x, hidden}}) {
    const Tensor w = weights(weight, in, out), dw = weights(dweight, in, out);
    const Tensor b = Rows(bias, 0, out.cols), db = Rows(dbias, 0, out.cols);
    const std::string linear = std::string("linear ") + name;
    if (out.data == hidden.data) {
      bench.Report(linear + " + GELU forward", layers, true,
                   [&] { kernels->LinearGeluForward(stream, in, w, b, out, dhidden); });
    } else {
      bench.Report(linear + " forward", layers, true,
                   [&] { kernels->LinearForward(stream, in, w, b, out); });
    }
    bench.Report(linear + " backward", layers, true,
                 [&] { kernels->LinearBackward(stream, out, in, w, z, dw, db, kWrite); });
  }
  const Tensor down = weights(weight, hidden, x), ddown = weights(dweight, hidden, x);
  bench.Report("linear mlp out + add forward", layers, true,
               [&] { kernels->LinearAddForward(stream, hidden, down, bias_width, x, y); });
  bench.Report("GELU + linear mlp out backward", layers, true, [&] {
    kernels->GeluLinearBackward(stream, x, hidden, hidden, down, dhidden, ddown, dbias_width,
                                kWrite);
  });
  bench.Report("head forward", 1, true,
               [&] { kernels->LinearForward(stream, x, wte, Tensor{}, logits); });
  bench.Report("head backward", 1, true, [&] {
    kernels->LinearBackward(stream, logits, x, wte, z, Rows(dwte, 0, vocab), Tensor{}, kWrite);
  });

  const AttentionShape shape{batch, seq_len, heads};
  bench.Report("attention forward", layers, true,
               [&] { kernels->AttentionForward(stream, shape, qkv, y, logsumexp); });
  bench.Report("attention backward", layers, true,
               [&] { kernels->AttentionBackward(stream, shape, x, qkv, y, logsumexp, dqkv); });
  bench.Report("cross-entropy forward, backward", 1, false, [&] {
    kernels->CrossEntropyForwardBackward(stream, logits, vocab, ids, 1.0f / tokens, loss);
  });

  // Parameters: embeddings, and per block four matrices of 12 C^2 in all, biases and norms.
  const double parameters = 1.0 * (vocab + seq_len) * width + 2.0 * width +
                            layers * (12.0 * width * width + 13.0 * width);
  bench.Summarise((6 * parameters + 6.0 * layers * width * seq_len) * tokens);
  return absl::OkStatus();
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "Times every kernel at the shapes of a model (default: gpt2-large).");
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = dim0::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "bench_kernels: %s\n", std::string(status.message()).c_str());
  return 1;
}
