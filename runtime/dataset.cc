#include "runtime/dataset.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "runtime/check.h"

namespace dim0 {
namespace {

// The finalizer of SplitMix64: a bijection of 64 bits in which every input bit moves about half of
// the output bits.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Even, so that the two halves end with the widths they began with; and enough that orders of a
// handful of sequences are as good as uniform.
constexpr int kRounds = 8;

// Bytes >= limit in a text, by blocks of a fixed size that the compiler vectorizes. -1 if none.
int64_t FirstByteAtLeast(absl::string_view text, int64_t limit) {
  constexpr size_t kBlock = 4096;
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  size_t i = 0;
  for (; i + kBlock <= text.size(); i += kBlock) {
    uint8_t largest = 0;
    for (size_t j = 0; j < kBlock; ++j) largest = std::max(largest, bytes[i + j]);
    if (largest >= limit) break;
  }
  for (; i < text.size(); ++i) {
    if (bytes[i] >= limit) return static_cast<int64_t>(i);
  }
  return -1;
}

bool IsTokenFileName(absl::string_view path) { return absl::EndsWith(path, ".bin"); }

// Tokens to hold out of a stream of `tokens`.
int64_t ValTokens(int64_t tokens, int64_t seq_len, double fraction) {
  if (fraction == 0) return 0;
  return std::max(seq_len + 1,
                  static_cast<int64_t>(std::floor(static_cast<double>(tokens) * fraction)));
}

}  // namespace

int64_t PermutedIndex(int64_t index, int64_t size, uint64_t seed, int64_t epoch) {
  DIM0_CHECK(index >= 0 && index < size && epoch >= 0);
  const int bits = std::bit_width(static_cast<uint64_t>(size - 1));
  // Two halves, of unequal width if `bits` is odd; a half may even have no bits.
  const std::array<int, 2> widths = {bits / 2, bits - bits / 2};
  const std::array<uint64_t, 2> masks = {(uint64_t{1} << widths[0]) - 1,
                                         (uint64_t{1} << widths[1]) - 1};
  // Mixed one after the other: seed 1 of epoch 0 and seed 0 of epoch 1 must not meet.
  const uint64_t key = Mix(Mix(seed) ^ static_cast<uint64_t>(epoch));

  uint64_t value = static_cast<uint64_t>(index);
  do {
    std::array<uint64_t, 2> halves = {value >> widths[1], value & masks[1]};
    for (int round = 0; round < kRounds; ++round) {
      // Alternately one half is changed by a function of the other: undone by doing it again, so a
      // bijection whatever the function.
      const int changed = round % 2;
      const uint64_t other = halves[1 - changed];
      halves[changed] ^= Mix(Mix(key + static_cast<uint64_t>(round)) ^ other) & masks[changed];
    }
    value = halves[0] << widths[1] | halves[1];
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

absl::StatusOr<Dataset> Dataset::Open(const DatasetOptions& options) {
  if (options.path.empty()) {
    return absl::InvalidArgumentError(
        "no data: give a text file or a glob of .bin token files in --data");
  }
  if (options.seq_len < 1 || options.global_batch < 1 || options.vocabulary < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence length, batch and vocabulary must be at least 1, not ",
                     options.seq_len, ", ", options.global_batch, " and ", options.vocabulary));
  }
  if (!(options.val_fraction >= 0 && options.val_fraction < 1)) {  // NaN is neither
    return absl::InvalidArgumentError(absl::StrCat(
        "the validation part must be at least 0 and less than 1, not ", options.val_fraction));
  }
  Dataset dataset;
  dataset.seed_ = options.seed;
  dataset.seq_len_ = options.seq_len;
  DIM0_RETURN_IF_ERROR(dataset.OpenSources(options.path));
  DIM0_RETURN_IF_ERROR(dataset.Split(options));
  DIM0_RETURN_IF_ERROR(dataset.CheckVocabulary(options.vocabulary));
  return dataset;
}

absl::Status Dataset::OpenSources(const std::string& pattern) {
  DIM0_ASSIGN_OR_RETURN(const std::vector<std::string> paths, ExpandGlob(pattern));
  for (const std::string& path : paths) {
    if (IsTokenFileName(path) != IsTokenFileName(paths.front())) {
      return absl::InvalidArgumentError(
          absl::StrCat(pattern, " matches both text and token files: ", paths.front(), " and ",
                       path, "; give a narrower pattern"));
    }
    int64_t size;
    if (IsTokenFileName(path)) {
      DIM0_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Open(path));
      if (!sources_.empty()) {
        const TokenFile& first = std::get<TokenFile>(sources_.front());
        if (file.type() != first.type()) {
          return absl::InvalidArgumentError(
              absl::StrCat(pattern, " matches shards of different data: ", first.path(), " has ",
                           Name(first.type()), " tokens and ", path, " has ", Name(file.type())));
        }
      }
      size = file.size();
      sources_.emplace_back(std::move(file));
    } else {
      DIM0_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
      if (file.contents().empty()) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": the file is empty"));
      }
      if (LooksLikeTokenFile(file.contents())) {
        return absl::InvalidArgumentError(absl::StrCat(
            path, ": this is a token file, but its name would make it text; rename it to ", path,
            ".bin"));
      }
      size = static_cast<int64_t>(file.contents().size());
      sources_.emplace_back(std::move(file));
    }
    begins_.push_back(begins_.back() + size);
  }
  return absl::OkStatus();
}

absl::Status Dataset::Split(const DatasetOptions& options) {
  const int64_t sequence = options.seq_len;
  const double fraction = options.val_fraction;
  // Beyond any data, and small enough that the sums below do not overflow.
  constexpr int64_t kMost = int64_t{1} << 52;
  int64_t batch_tokens;
  if (__builtin_mul_overflow(options.global_batch, sequence, &batch_tokens) ||
      batch_tokens > kMost) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", options.global_batch,
                                                   " sequences of ", sequence,
                                                   " tokens is larger than any data"));
  }

  const int64_t val_tokens = ValTokens(tokens(), sequence, fraction);
  const int64_t train_tokens = tokens() - val_tokens;
  if (train_tokens < batch_tokens + 1) {
    // The fewest tokens that would do, by bisection: what is left for training grows with them.
    const auto enough = [&](int64_t n) {
      return n - ValTokens(n, sequence, fraction) >= batch_tokens + 1;
    };
    int64_t too_few = tokens();
    int64_t needed = std::max<int64_t>(2 * tokens(), 2);
    while (!enough(needed) && needed < kMost) needed *= 2;
    while (needed - too_few > 1) {
      const int64_t middle = too_few + (needed - too_few) / 2;
      (enough(middle) ? needed : too_few) = middle;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        options.path, ": ", tokens(), " tokens are too few: one batch of ", options.global_batch,
        " sequences of ", sequence, " tokens",
        fraction > 0 ? absl::StrCat(" and ", fraction * 100, "% held out for validation") : "",
        " need ", needed,
        "; lower --batch, --grad_accum or --seq_len, or give more text in --data"));
  }
  train_sequences_ = (train_tokens - 1) / sequence;
  val_begin_ = train_tokens;
  val_sequences_ = val_tokens > 0 ? (val_tokens - 1) / sequence : 0;
  return absl::OkStatus();
}

absl::Status Dataset::CheckVocabulary(int64_t vocabulary) const {
  for (const Source& source : sources_) {
    if (const auto* file = std::get_if<TokenFile>(&source)) {
      DIM0_RETURN_IF_ERROR(file->CheckVocabulary(vocabulary));
      continue;
    }
    const auto& text = std::get<MappedFile>(source);
    const int64_t at = FirstByteAtLeast(text.contents(), vocabulary);
    if (at >= 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          text.path(), ": byte ", at, " is ",
          static_cast<uint8_t>(text.contents()[static_cast<size_t>(at)]),
          ", beyond the vocabulary of ", vocabulary, "; text needs --vocab of at least 256"));
    }
  }
  return absl::OkStatus();
}

void Dataset::Read(int64_t begin, absl::Span<int32_t> out) const {
  // The source that holds `begin`: the last one that begins at or before it.
  size_t index = static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), begin) -
                                     begins_.begin() - 1);
  while (!out.empty()) {
    const int64_t offset = begin - begins_[index];
    const int64_t count = std::min(static_cast<int64_t>(out.size()), begins_[index + 1] - begin);
    if (const auto* file = std::get_if<TokenFile>(&sources_[index])) {
      file->Read(offset, out.first(static_cast<size_t>(count)));
    } else {
      const absl::string_view text = std::get<MappedFile>(sources_[index]).contents();
      const auto* bytes = reinterpret_cast<const uint8_t*>(text.data()) + offset;
      std::copy(bytes, bytes + count, out.begin());
    }
    out.remove_prefix(static_cast<size_t>(count));
    begin += count;
    ++index;
  }
}

void Dataset::ReadSequence(int64_t begin, absl::Span<int32_t> inputs,
                           absl::Span<int32_t> targets) const {
  DIM0_CHECK(static_cast<int64_t>(inputs.size()) == seq_len_);
  DIM0_CHECK(static_cast<int64_t>(targets.size()) == seq_len_);
  Read(begin, inputs);
  std::copy(inputs.begin() + 1, inputs.end(), targets.begin());
  Read(begin + seq_len_, targets.last(1));
}

void Dataset::TrainSequence(int64_t global_index, absl::Span<int32_t> inputs,
                            absl::Span<int32_t> targets) const {
  DIM0_CHECK(global_index >= 0);
  const int64_t epoch = global_index / train_sequences_;
  const int64_t sequence =
      PermutedIndex(global_index % train_sequences_, train_sequences_, seed_, epoch);
  ReadSequence(sequence * seq_len_, inputs, targets);
}

void Dataset::ValSequence(int64_t index, absl::Span<int32_t> inputs,
                          absl::Span<int32_t> targets) const {
  DIM0_CHECK(index >= 0 && index < val_sequences_);
  ReadSequence(val_begin_ + index * seq_len_, inputs, targets);
}

std::vector<std::string> Dataset::paths() const {
  std::vector<std::string> paths;
  for (const Source& source : sources_) {
    paths.push_back(std::visit([](const auto& file) { return file.path(); }, source));
  }
  return paths;
}

}  // namespace dim0
