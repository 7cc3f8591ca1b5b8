// generate: text from a run's final weights.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "model/gpt2_decoder.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/random.h"
#include "tools/flags.h"
#include "tools/process.h"

ABSL_FLAG(std::string, run_dir, "", "folder with model.safetensors and config.json");
ABSL_FLAG(std::string, prompt, "\n", "text to go on from; its bytes are the tokens");
ABSL_FLAG(std::string, prompt_tokens, "",
          "token numbers to go on from, comma-separated, instead of --prompt");
ABSL_FLAG(int64_t, tokens, 200, "how many tokens to generate");
ABSL_FLAG(double, temperature, 0.8, "0: always the likeliest token");
ABSL_FLAG(int64_t, top_k, 0, "draw from the likeliest so many tokens; 0: from all");
ABSL_FLAG(uint64_t, seed, 0, "seed of the draws");
ABSL_FLAG(int, threads, 0, "threads; 0: all cores");

namespace dim0 {
namespace {

constexpr int64_t kByteVocabulary = 256;

struct Sampling {
  double temperature;
  int64_t top_k;
  uint64_t seed;
};

// One draw from softmax(logits / temperature), restricted to the top_k likeliest if top_k > 0.
int32_t Sample(absl::Span<const float> logits, const Sampling& sampling, int64_t draw) {
  const int32_t likeliest = std::max_element(logits.begin(), logits.end()) - logits.begin();
  if (sampling.temperature == 0) return likeliest;
  std::vector<int32_t> candidates(logits.size());
  std::iota(candidates.begin(), candidates.end(), 0);
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(candidates.size())) {
    std::nth_element(candidates.begin(), candidates.begin() + sampling.top_k, candidates.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    candidates.resize(sampling.top_k);
  }
  std::vector<double> cumulative;
  double sum = 0;
  for (const int32_t token : candidates) {
    sum += std::exp((logits[token] - logits[likeliest]) / sampling.temperature);
    cumulative.push_back(sum);
  }
  const double point = Uniform(sampling.seed, /*stream=*/0, draw) * sum;
  const auto place = std::upper_bound(cumulative.begin(), cumulative.end(), point);
  return candidates[std::min<size_t>(place - cumulative.begin(), candidates.size() - 1)];
}

absl::StatusOr<std::vector<int32_t>> Prompt() {
  std::vector<int32_t> tokens;
  if (const std::string list = absl::GetFlag(FLAGS_prompt_tokens); !list.empty()) {
    for (const absl::string_view word : absl::StrSplit(list, ',')) {
      int32_t token;
      if (!absl::SimpleAtoi(word, &token)) {
        return absl::InvalidArgumentError(
            absl::StrCat("--prompt_tokens holds \"", word, "\", which is no token number"));
      }
      tokens.push_back(token);
    }
  } else {
    for (const unsigned char byte : absl::GetFlag(FLAGS_prompt)) tokens.push_back(byte);
  }
  if (tokens.empty())
    return absl::InvalidArgumentError("--prompt is empty; give at least one byte");
  return tokens;
}

absl::Status CheckFlags() {
  if (absl::GetFlag(FLAGS_run_dir).empty()) {
    return absl::InvalidArgumentError("--run_dir is missing; name the folder of a finished run");
  }
  if (absl::GetFlag(FLAGS_tokens) < 0 || absl::GetFlag(FLAGS_top_k) < 0 ||
      absl::GetFlag(FLAGS_threads) < 0 || !(absl::GetFlag(FLAGS_temperature) >= 0)) {
    return absl::InvalidArgumentError(
        "--tokens, --top_k, --threads and --temperature must be 0 or more");
  }
  return absl::OkStatus();
}

absl::Status Generate(const std::vector<int32_t>& prompt) {
  int threads = absl::GetFlag(FLAGS_threads);
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  DIM0_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(Backend::kCpu, threads));
  absl::StatusOr<std::unique_ptr<Gpt2Decoder>> loaded =
      Gpt2Decoder::Load(absl::GetFlag(FLAGS_run_dir), *device);
  if (!loaded.ok()) {
    return absl::Status(loaded.status().code(),
                        absl::StrCat("--run_dir: ", loaded.status().message(),
                                     absl::IsNotFound(loaded.status())
                                         ? "; a run's weights are there when it has ended"
                                         : ""));
  }
  const std::unique_ptr<Gpt2Decoder> decoder = *std::move(loaded);
  const bool bytes =
      decoder->config().vocab <= kByteVocabulary || absl::GetFlag(FLAGS_prompt_tokens).empty();
  // Bytes as text; other vocabularies, whose text we do not know, as numbers.
  const auto print = [&](int32_t token) {
    if (bytes && token < kByteVocabulary) {
      std::putchar(token);
    } else {
      std::printf(" %d", token);
    }
    std::fflush(stdout);
  };
  const Sampling sampling = {absl::GetFlag(FLAGS_temperature), absl::GetFlag(FLAGS_top_k),
                             absl::GetFlag(FLAGS_seed)};
  absl::Span<const float> logits;
  for (const int32_t token : prompt) {
    DIM0_ASSIGN_OR_RETURN(logits, decoder->Next(token));
    print(token);
  }
  const int64_t count = absl::GetFlag(FLAGS_tokens);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t token = Sample(logits, sampling, i);
    print(token);
    if (i + 1 == count) break;
    DIM0_ASSIGN_OR_RETURN(logits, decoder->Next(token));
  }
  std::putchar('\n');
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return absl::DataLossError(
        "standard output did not take all of the text; is the disk it goes to full?");
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  if (const auto status = HandleCommandLine(
          argc, argv,
          "Generates text from a run's final weights.\n"
          "  generate --run_dir=runs/first --prompt='The ' --tokens=300 --temperature=0.8")) {
    return *status;
  }
  absl::Status status = CheckFlags();
  const absl::StatusOr<std::vector<int32_t>> prompt = Prompt();
  if (status.ok()) status = prompt.status();
  if (!status.ok()) {
    PrintError("generate", status.message());
    return kExitUsage;
  }
  status = Generate(*prompt);
  if (!status.ok()) {
    PrintError("generate", status.message());
    return kExitFailure;
  }
  return kExitOk;
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) { dim0::EndProcess(dim0::Main(argc, argv)); }
