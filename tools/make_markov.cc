// make_markov: token files of a second-order Markov language, a task small enough for a laptop on
// which optimizers differ clearly. The next token's probabilities are softmax(3 z), with z a
// standard normal for every pair of previous tokens and next token.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/printable.h"
#include "runtime/random.h"
#include "runtime/token_file.h"
#include "tools/flags.h"

ABSL_FLAG(std::string, output_dir, "", "folder of the token file; made if it is missing");
ABSL_FLAG(int64_t, vocab, 64, "tokens of the language");
ABSL_FLAG(int64_t, tokens, 524'288, "tokens to write");
ABSL_FLAG(double, spread, 3, "what the normals are multiplied by; more makes the language surer");
ABSL_FLAG(uint64_t, seed, 0, "seed of the language and of the text");

namespace dim0 {
namespace {

// Streams of the random generator.
constexpr uint32_t kLanguage = 0;
constexpr uint32_t kText = 1;

// Cumulative next-token probabilities by pair of previous tokens: [vocab * vocab, vocab].
struct Language {
  std::vector<double> cumulative;
  double entropy = 0;  // nats per token, mean over pairs: the least loss that can be reached
};

Language MakeLanguage(int64_t vocab, double spread, uint64_t seed) {
  Language language;
  std::vector<float> normals(vocab);
  for (int64_t pair = 0; pair < vocab * vocab; ++pair) {
    FillNormal(seed, kLanguage, pair * vocab, 1, absl::MakeSpan(normals));
    double sum = 0;
    for (const float z : normals) sum += std::exp(spread * z);
    double below = 0;
    for (const float z : normals) {
      const double p = std::exp(spread * z) / sum;
      language.entropy -= p * std::log(p) / static_cast<double>(vocab * vocab);
      below += p;
      language.cumulative.push_back(below);
    }
  }
  return language;
}

absl::Status MakeMarkov() {
  const std::string folder = absl::GetFlag(FLAGS_output_dir);
  const int64_t vocab = absl::GetFlag(FLAGS_vocab);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  const Language language = MakeLanguage(vocab, absl::GetFlag(FLAGS_spread), seed);
  std::vector<uint32_t> tokens;
  int64_t pair = 0;  // previous * vocab + last
  for (int64_t i = 0; i < absl::GetFlag(FLAGS_tokens); ++i) {
    const double point = Uniform(seed, kText, i);
    const auto row = language.cumulative.begin() + pair * vocab;
    const int64_t token =
        std::min<int64_t>(std::upper_bound(row, row + vocab, point) - row, vocab - 1);
    tokens.push_back(token);
    pair = (pair * vocab + token) % (vocab * vocab);
  }
  DIM0_RETURN_IF_ERROR(MakeDirectories(folder));
  const std::string path = absl::StrCat(folder, "/markov.bin");
  DIM0_RETURN_IF_ERROR(WriteTokenFile(path, TokenType::kUint16, tokens));
  std::printf("%s: %zu tokens, vocabulary %d; no model can do better than %.4f nat a token\n",
              Printable(path).c_str(), tokens.size(), static_cast<int>(vocab), language.entropy);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  if (const auto status = HandleCommandLine(
          argc, argv,
          "Writes a text in a random second-order Markov language as a token file.\n"
          "  make_markov --output_dir=runs/markov     writes runs/markov/markov.bin")) {
    return *status;
  }
  if (absl::GetFlag(FLAGS_output_dir).empty()) {
    PrintError("make_markov", "--output_dir is missing; name the folder for markov.bin");
    return kExitUsage;
  }
  if (absl::GetFlag(FLAGS_vocab) < 2 || absl::GetFlag(FLAGS_vocab) > 256 ||
      absl::GetFlag(FLAGS_tokens) < 1) {
    PrintError("make_markov", "--vocab must be 2 to 256 and --tokens 1 or more");
    return kExitUsage;
  }
  if (const absl::Status status = MakeMarkov(); !status.ok()) {
    PrintError("make_markov", status.message());
    return kExitFailure;
  }
  return kExitOk;
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) { return dim0::Main(argc, argv); }
