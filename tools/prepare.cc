// Turns a text into token shards, or says what token files hold.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/token_file.h"
#include "tools/flags.h"

ABSL_FLAG(std::string, input, "",
          "A text file to cut into shards; or a .bin token file, or a glob of them, to look into.");
ABSL_FLAG(std::string, output_dir, "",
          "The folder the shards are written to; made if it is missing. For text only.");
ABSL_FLAG(std::string, name, "",
          "The shards are named NAME_000000.bin, NAME_000001.bin, ... By default the input's name\n"
          "without its extension.");
ABSL_FLAG(int64_t, shard_tokens, 100'000'000, "Tokens to a shard.");

namespace dim0 {
namespace {

constexpr absl::string_view kUsage =
    "turns a text into token shards for training, one token to a byte (vocabulary 256).\n"
    "  prepare --input=corpus.txt --output_dir=data     writes data/corpus_000000.bin, ...\n"
    "  prepare --input='data/corpus_*.bin'              checks token files and says what they hold";

constexpr int kByteVocabulary = 256;

// Set by Ctrl-C. The writer's destructor then removes what has been written, which the signal's
// default action would not.
volatile std::sig_atomic_t interrupted = 0;

std::string DefaultName(absl::string_view input) {
  input = input.substr(input.rfind('/') + 1);  // npos + 1 is 0
  const size_t dot = input.rfind('.');
  return std::string(dot == 0 ? input : input.substr(0, dot));
}

absl::Status WriteShards(const std::string& input, const std::string& output_dir,
                         const std::string& name, int64_t shard_tokens) {
  DIM0_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(input));
  absl::string_view text = file.contents();
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(input, ": the file is empty"));
  if (LooksLikeTokenFile(text)) {
    return absl::InvalidArgumentError(absl::StrCat(
        input, ": this is a token file already; rename it to ", input, ".bin to use it"));
  }
  DIM0_RETURN_IF_ERROR(MakeDirectories(output_dir));
  DIM0_ASSIGN_OR_RETURN(
      TokenShardWriter writer,
      TokenShardWriter::Create(output_dir, name, TokenType::kUint16, shard_tokens));

  constexpr size_t kPiece = size_t{1} << 20;
  std::vector<uint32_t> tokens;
  while (!text.empty()) {
    if (interrupted != 0) return absl::CancelledError("interrupted; nothing was written");
    const absl::string_view piece = text.substr(0, kPiece);
    tokens.clear();
    for (const char c : piece) tokens.push_back(static_cast<uint8_t>(c));
    DIM0_RETURN_IF_ERROR(writer.Append(tokens));
    text.remove_prefix(piece.size());
  }
  const int64_t total = writer.size();
  DIM0_ASSIGN_OR_RETURN(const std::vector<std::string> paths, writer.Commit());

  absl::PrintF("tokens      %d\n", total);
  absl::PrintF("vocabulary  %d (bytes)\n", kByteVocabulary);
  absl::PrintF("files       %d\n", paths.size());
  for (const std::string& path : paths) absl::PrintF("  %s\n", path);
  return absl::OkStatus();
}

absl::Status DescribeTokenFiles(const std::string& pattern) {
  DIM0_ASSIGN_OR_RETURN(const std::vector<std::string> paths, ExpandGlob(pattern));
  // All files are checked before anything is printed: either an answer or an error.
  std::string lines;
  int64_t tokens = 0;
  uint32_t largest = 0;
  for (const std::string& path : paths) {
    DIM0_ASSIGN_OR_RETURN(const TokenFile file, TokenFile::Open(path));
    const uint32_t max_token = file.MaxToken();
    absl::StrAppendFormat(&lines, "  %s  %d %s tokens, largest %d\n", path, file.size(),
                          Name(file.type()), max_token);
    tokens += file.size();
    largest = std::max(largest, max_token);
  }
  absl::PrintF("tokens         %d\n", tokens);
  absl::PrintF("largest token  %d (a vocabulary of at least %d)\n", largest, int64_t{largest} + 1);
  absl::PrintF("files          %d\n%s", paths.size(), lines);
  return absl::OkStatus();
}

// What is wrong with the flags taken together.
absl::Status CheckFlags(const std::string& input, bool describe) {
  if (input.empty()) {
    return absl::InvalidArgumentError("--input is needed: a text file or .bin token files");
  }
  const bool has_output = !absl::GetFlag(FLAGS_output_dir).empty();
  if (describe && has_output) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--input=", input, " names token files, which are only read; leave out --output_dir"));
  }
  if (!describe && !has_output) {
    return absl::InvalidArgumentError("--output_dir is needed: a folder for the shards");
  }
  if (const int64_t tokens = absl::GetFlag(FLAGS_shard_tokens);
      tokens < 1 || tokens > kMaxTokensPerFile) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--shard_tokens=", tokens, ": expected a number from 1 to ", kMaxTokensPerFile));
  }
  if (const std::string name = absl::GetFlag(FLAGS_name); absl::StrContains(name, '/')) {
    return absl::InvalidArgumentError(
        absl::StrCat("--name=", name, ": expected a name without a folder; see --output_dir"));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) {
  using namespace dim0;  // NOLINT: main() is the program's
  if (const auto status = HandleCommandLine(argc, argv, kUsage)) return *status;
  const std::string input = absl::GetFlag(FLAGS_input);
  const bool describe = absl::EndsWith(input, ".bin");
  if (const absl::Status status = CheckFlags(input, describe); !status.ok()) {
    PrintError("prepare", status.message());
    return kExitUsage;
  }

  for (const int signal : {SIGINT, SIGTERM}) {
    std::signal(signal, [](int) { interrupted = 1; });
  }
  const std::string name = absl::GetFlag(FLAGS_name);
  const absl::Status status = describe ? DescribeTokenFiles(input)
                                       : WriteShards(input, absl::GetFlag(FLAGS_output_dir),
                                                     name.empty() ? DefaultName(input) : name,
                                                     absl::GetFlag(FLAGS_shard_tokens));
  if (!status.ok()) {
    PrintError("prepare", status.message());
    return absl::IsCancelled(status) ? kExitInterrupted : kExitFailure;
  }
  return kExitOk;
}
