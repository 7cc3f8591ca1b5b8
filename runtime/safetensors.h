// Weights in the safetensors format: named tensors that any framework can read without running
// anything.
//
// A file is, byte by byte:
//
//   offset    size  what
//        0       8  length h of the header, uint64, little-endian
//        8       h  the header: a JSON object, padded with spaces at its end
//      8+h          the data, to the end of the file
//
// The header maps each tensor's name to {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
// the offsets counted from the start of the data, begin included and end excluded. Data are
// row-major and little-endian. Every byte of the data belongs to exactly one tensor. A tensor may
// be empty (a 0 in its shape) or a scalar (shape []). The optional key "__metadata__" maps strings
// to strings.
#ifndef DIM0_RUNTIME_SAFETENSORS_H_
#define DIM0_RUNTIME_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/file.h"

namespace dim0 {

// The element types that files hold; more than the runtime computes with.
enum class StoredType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
};

// Bytes per element.
int64_t SizeOf(StoredType type);
// The format's own name: "F32", "BF16", ...
absl::string_view Name(StoredType type);

struct TensorDescription {
  std::string name;
  StoredType type = StoredType::kF32;
  std::vector<int64_t> shape;
};

// Writes tensors one after the other, in pieces of any size, so that no more than a piece need be
// in memory. The file appears under its name at Commit(); destroying the writer before leaves
// nothing. Movable, not copyable.
class SafetensorsWriter {
 public:
  // `tensors` are all that the file will hold, in the order in which their data will come. Names
  // must be distinct, not empty, valid UTF-8 and not "__metadata__"; metadata must be valid UTF-8.
  static absl::StatusOr<SafetensorsWriter> Create(
      absl::string_view path, std::vector<TensorDescription> tensors,
      const std::map<std::string, std::string>& metadata = {});

  // Adds bytes of the tensor `name`, which must be the first that is not complete; empty tensors
  // are complete from the start. `data` need not end at an element.
  absl::Status Append(absl::string_view name, absl::string_view data);

  // Adds elements of the tensor `name`, which must be F32 or BF16; to BF16 they are rounded, to
  // nearest, ties to even.
  absl::Status AppendFloats(absl::string_view name, absl::Span<const float> values);

  // Refused, and nothing published, unless every tensor is complete.
  absl::Status Commit();

 private:
  SafetensorsWriter(AtomicFileWriter file, std::vector<TensorDescription> tensors);
  // Goes on to the next tensor that needs data.
  void SkipComplete();
  absl::Status CheckCurrent(absl::string_view name) const;

  AtomicFileWriter file_;
  std::vector<TensorDescription> tensors_;
  size_t current_ = 0;         // index of the tensor being filled
  int64_t current_bytes_ = 0;  // of it that have come
};

// A safetensors file, mapped, its header checked in full before anything is read. Movable; any
// number of threads may read.
class SafetensorsFile {
 public:
  struct Tensor {
    std::string name;
    StoredType type;
    std::vector<int64_t> shape;
    int64_t elements;        // the product of the shape; 1 for a scalar
    absl::string_view data;  // elements * SizeOf(type) bytes of the mapping; maybe not aligned
  };

  // Errors are one line that names the file and, where one is at fault, the tensor.
  static absl::StatusOr<SafetensorsFile> Open(absl::string_view path);

  const std::string& path() const { return file_.path(); }
  // In the order of their data.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // The tensor of that name, or nullptr. Valid until this object is moved or destroyed.
  const Tensor* Find(absl::string_view name) const;

  // Copies elements [begin, begin + out.size()) of `tensor`, in row-major order, converted to
  // float32. `tensor` must be F32, F16 or BF16, all of which float32 holds exactly, and the range
  // must lie in it.
  absl::Status ReadFloats(const Tensor& tensor, int64_t begin, absl::Span<float> out) const;

 private:
  explicit SafetensorsFile(MappedFile file) : file_(std::move(file)) {}
  absl::Status ParseHeader();

  MappedFile file_;
  std::vector<Tensor> tensors_;
  absl::flat_hash_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// The transpose of the [rows, cols] matrix `in`: for weights that a file holds the other way round.
std::vector<float> TransposedCopy(absl::Span<const float> in, int64_t rows, int64_t cols);

}  // namespace dim0

#endif  // DIM0_RUNTIME_SAFETENSORS_H_
