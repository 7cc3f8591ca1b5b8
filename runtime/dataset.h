// Training and validation sequences out of a text or of token files.
//
// What a run reads is a function of the data, the seed and the sequence's number in the run, and of
// nothing else: not of how many ranks share the work, nor of where a resumed run took over.
#ifndef DIM0_RUNTIME_DATASET_H_
#define DIM0_RUNTIME_DATASET_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "runtime/file.h"
#include "runtime/token_file.h"

namespace dim0 {

// The place of `index` in the pseudo-random order of 0..size-1 that `seed` and `epoch` select.
// For fixed seed, epoch and size it is a permutation: every index has its own place. It is computed
// without a table, by a Feistel network over the smallest power of two that holds `size`, applied
// again while the result lies outside (on average fewer than two times). 0 <= index < size.
// The order of a given seed is part of what makes a run repeatable: it never changes.
int64_t PermutedIndex(int64_t index, int64_t size, uint64_t seed, int64_t epoch);

struct DatasetOptions {
  // A file, or a glob. Names that end in .bin are token files (runtime/token_file.h); any other is
  // text, whose tokens are its bytes. Files are read in name order as one stream, so a sequence may
  // begin in one and end in the next: no token is lost where the shards happen to be cut.
  std::string path;
  // Every token must be below it, text's bytes too: 256 is enough for any text.
  int64_t vocabulary = 0;
  // Tokens to a sequence.
  int64_t seq_len = 0;
  // Sequences to an optimizer step, over all ranks and accumulated micro-batches.
  int64_t global_batch = 0;
  uint64_t seed = 0;
  // The part of the stream, at its end, that is held out for validation; in [0, 1). If it is more
  // than 0, at least one sequence is held out.
  double val_fraction = 0.05;
};

// The stream is cut in two, for training and for validation. In each part, sequence i is made of
// tokens [i * seq_len, (i + 1) * seq_len], both ends included: seq_len inputs, and as targets the
// same shifted by one. So neighbours share one token, the two parts share none, and a rest too
// short for a sequence is not used.
//
// Movable. All const methods may be called from any number of threads.
class Dataset {
 public:
  // Opens and checks everything that can be wrong: files missing, empty, damaged or of mixed kinds;
  // a token beyond the vocabulary (this reads all of the data once); too few tokens for one global
  // batch. Each error is one line that says what to change.
  static absl::StatusOr<Dataset> Open(const DatasetOptions& options);

  // Sequence number `global_index` >= 0 of the whole run. The optimizer step s consumes numbers
  // [s * global_batch, (s + 1) * global_batch), whichever rank reads which. Every epoch, that is
  // every train_sequences() numbers, goes through all sequences once in an order of its own; a step
  // may straddle two epochs. `inputs` and `targets` have seq_len elements each.
  void TrainSequence(int64_t global_index, absl::Span<int32_t> inputs,
                     absl::Span<int32_t> targets) const;

  // Sequence `index` of the validation part, 0 <= index < val_sequences(), in stream order.
  void ValSequence(int64_t index, absl::Span<int32_t> inputs, absl::Span<int32_t> targets) const;

  // Sequences in an epoch, at least global_batch.
  int64_t train_sequences() const { return train_sequences_; }
  // Whether the tokens are a text's bytes.
  bool is_text() const { return std::holds_alternative<MappedFile>(sources_.front()); }
  // 0 if val_fraction is 0.
  int64_t val_sequences() const { return val_sequences_; }
  // Tokens in the stream, over both parts.
  int64_t tokens() const { return begins_.back(); }
  // The files of the stream, in order.
  std::vector<std::string> paths() const;

 private:
  using Source = std::variant<MappedFile, TokenFile>;

  Dataset() = default;
  absl::Status OpenSources(const std::string& pattern);
  absl::Status CheckVocabulary(int64_t vocabulary) const;
  absl::Status Split(const DatasetOptions& options);
  // Copies tokens [begin, begin + out.size()) of the stream.
  void Read(int64_t begin, absl::Span<int32_t> out) const;
  // Copies the sequence that begins at token `begin` of the stream.
  void ReadSequence(int64_t begin, absl::Span<int32_t> inputs, absl::Span<int32_t> targets) const;

  std::vector<Source> sources_;
  std::vector<int64_t> begins_ = {0};  // the first token of each source, then the total
  uint64_t seed_ = 0;
  int64_t seq_len_ = 0;
  int64_t train_sequences_ = 0;
  int64_t val_sequences_ = 0;
  int64_t val_begin_ = 0;  // the first token of the validation part
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_DATASET_H_
