#include "runtime/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "collectives/dtype.h"
#include "nlohmann/json.hpp"
#include "runtime/check.h"

namespace dim0 {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "safetensors are little-endian and are copied as they are");

constexpr absl::string_view kMetadata = "__metadata__";
constexpr int64_t kLengthBytes = 8;
// The reference implementation's limit; a longer header is damage, not a model.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct TypeEntry {
  StoredType type;
  absl::string_view name;
  int64_t bytes;
};
constexpr std::array<TypeEntry, 15> kTypes = {{
    {StoredType::kBool, "BOOL", 1},
    {StoredType::kU8, "U8", 1},
    {StoredType::kI8, "I8", 1},
    {StoredType::kF8E5M2, "F8_E5M2", 1},
    {StoredType::kF8E4M3, "F8_E4M3", 1},
    {StoredType::kI16, "I16", 2},
    {StoredType::kU16, "U16", 2},
    {StoredType::kF16, "F16", 2},
    {StoredType::kBF16, "BF16", 2},
    {StoredType::kI32, "I32", 4},
    {StoredType::kU32, "U32", 4},
    {StoredType::kF32, "F32", 4},
    {StoredType::kI64, "I64", 8},
    {StoredType::kU64, "U64", 8},
    {StoredType::kF64, "F64", 8},
}};

const TypeEntry& Entry(StoredType type) {
  const TypeEntry& entry = kTypes[static_cast<size_t>(type)];
  DIM0_CHECK(entry.type == type);
  return entry;
}

std::optional<StoredType> TypeNamed(absl::string_view name) {
  for (const TypeEntry& entry : kTypes) {
    if (entry.name == name) return entry.type;
  }
  return std::nullopt;
}

// The product of `shape`, or nothing if a dimension is negative or the product too large.
std::optional<int64_t> ElementsOf(absl::Span<const int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(elements, dimension, &elements)) {
      return std::nullopt;
    }
  }
  return elements;
}

std::optional<int64_t> BytesOf(StoredType type, absl::Span<const int64_t> shape) {
  const std::optional<int64_t> elements = ElementsOf(shape);
  int64_t bytes;
  if (!elements || __builtin_mul_overflow(*elements, SizeOf(type), &bytes)) return std::nullopt;
  return bytes;
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// `text` as a JSON string with its quotes; nothing if it is not UTF-8.
std::optional<std::string> Quoted(absl::string_view text) {
  const Json json = std::string(text);
  // The default error handler throws on invalid UTF-8; this one drops it, which shows.
  std::string quoted = json.dump(-1, ' ', false, Json::error_handler_t::ignore);
  const Json back = Json::parse(quoted, nullptr, /*allow_exceptions=*/false);
  if (back != json) return std::nullopt;
  return quoted;
}

// For messages: a name out of a damaged header may hold anything, also line breaks.
std::string Printable(absl::string_view name) {
  constexpr size_t kLongest = 200;
  return Json(std::string(name.substr(0, kLongest)))
             .dump(-1, ' ', true, Json::error_handler_t::replace) +
         (name.size() > kLongest ? "..." : "");
}

// IEEE binary16 to binary32, exact.
float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 0x1f ? 0xffu : exponent + (127 - 15);
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

absl::string_view AsBytes(const void* data, size_t size) {
  return absl::string_view(static_cast<const char*>(data), size);
}

// Parses a header, refusing also what the finished DOM would not show: a key that comes twice in
// one object, and nesting beyond {name: {"shape": [numbers]}}, which a damaged or hostile file
// could drive to any depth. Returns the root object, or an error's text in `*problem`.
Json ParseStrictly(absl::string_view text, std::string* problem) {
  constexpr int kDeepest = 3;               // of a number in a shape
  std::vector<std::set<std::string>> keys;  // of the objects that enclose the place of parsing
  const auto callback = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kDeepest) {
      if (problem->empty()) *problem = "is nested too deeply";
      return false;  // is not stored
    }
    if (event == Json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second && problem->empty()) {
        *problem = absl::StrCat("has the key ", Printable(key), " twice");
      }
    }
    return true;
  };
  Json root = Json::parse(text.begin(), text.end(), callback, /*allow_exceptions=*/false);
  // The format wants '{' as the first byte, with no white space before it.
  if (root.is_discarded() || !root.is_object() || text[0] != '{') *problem = "is not a JSON object";
  return root;
}

// A JSON number that is an integer in [0, 2^63).
std::optional<int64_t> Count(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(count);
}

std::optional<std::vector<int64_t>> Counts(const Json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<int64_t> counts;
  for (const Json& element : value) {
    const std::optional<int64_t> count = Count(element);
    if (!count) return std::nullopt;
    counts.push_back(*count);
  }
  return counts;
}

}  // namespace

int64_t SizeOf(StoredType type) { return Entry(type).bytes; }

absl::string_view Name(StoredType type) { return Entry(type).name; }

// ---- Writing ----

SafetensorsWriter::SafetensorsWriter(AtomicFileWriter file, std::vector<TensorDescription> tensors)
    : file_(std::move(file)), tensors_(std::move(tensors)) {
  SkipComplete();
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    absl::string_view path, std::vector<TensorDescription> tensors,
    const std::map<std::string, std::string>& metadata) {
  const auto error = [&](absl::string_view name, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", Printable(name), ": ", what));
  };
  // Written by hand rather than from a DOM, which would sort the tensors by name: the header lists
  // them in the order of their data.
  std::vector<std::string> members;
  if (!metadata.empty()) {
    std::vector<std::string> entries;
    for (const auto& [key, value] : metadata) {
      const std::optional<std::string> quoted_key = Quoted(key);
      const std::optional<std::string> quoted_value = Quoted(value);
      if (!quoted_key || !quoted_value) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": metadata ", Printable(key), " is not UTF-8"));
      }
      entries.push_back(absl::StrCat(*quoted_key, ":", *quoted_value));
    }
    members.push_back(absl::StrCat("\"", kMetadata, "\":{", absl::StrJoin(entries, ","), "}"));
  }
  int64_t offset = 0;
  std::set<absl::string_view> names;
  for (const TensorDescription& tensor : tensors) {
    const std::optional<std::string> quoted = Quoted(tensor.name);
    if (tensor.name.empty() || tensor.name == kMetadata || !quoted) {
      return error(tensor.name, "not a possible name");
    }
    if (!names.insert(tensor.name).second) return error(tensor.name, "the name comes twice");
    const std::optional<int64_t> bytes = BytesOf(tensor.type, tensor.shape);
    int64_t end;
    if (!bytes || __builtin_add_overflow(offset, *bytes, &end)) {
      return error(tensor.name,
                   absl::StrCat("a shape of ", ShapeText(tensor.shape), " is not possible"));
    }
    members.push_back(absl::StrCat(*quoted, ":{\"dtype\":\"", Name(tensor.type), "\",\"shape\":[",
                                   absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", offset,
                                   ",", end, "]}"));
    offset = end;
  }
  std::string header = absl::StrCat("{", absl::StrJoin(members, ","), "}");
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the data begin at a multiple of 8
  const uint64_t length = header.size();
  if (length > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a header of ", length,
                                                   " bytes is longer than readers accept (",
                                                   kMaxHeaderBytes, ")"));
  }

  DIM0_ASSIGN_OR_RETURN(AtomicFileWriter file, AtomicFileWriter::Create(path));
  DIM0_RETURN_IF_ERROR(file.Append(AsBytes(&length, sizeof(length))));
  DIM0_RETURN_IF_ERROR(file.Append(header));
  return SafetensorsWriter(std::move(file), std::move(tensors));
}

void SafetensorsWriter::SkipComplete() {
  while (current_ < tensors_.size() &&
         current_bytes_ == BytesOf(tensors_[current_].type, tensors_[current_].shape)) {
    ++current_;
    current_bytes_ = 0;
  }
}

absl::Status SafetensorsWriter::CheckCurrent(absl::string_view name) const {
  if (current_ == tensors_.size()) {
    return absl::FailedPreconditionError(absl::StrCat(
        file_.path(), ": data for tensor ", Printable(name), " after all tensors were complete"));
  }
  if (tensors_[current_].name != name) {
    return absl::FailedPreconditionError(
        absl::StrCat(file_.path(), ": data for tensor ", Printable(name), " where ",
                     Printable(tensors_[current_].name), " is due"));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Append(absl::string_view name, absl::string_view data) {
  if (data.empty()) return absl::OkStatus();
  DIM0_RETURN_IF_ERROR(CheckCurrent(name));
  const TensorDescription& tensor = tensors_[current_];
  const int64_t room = *BytesOf(tensor.type, tensor.shape) - current_bytes_;
  if (static_cast<int64_t>(data.size()) > room) {
    return absl::FailedPreconditionError(absl::StrCat(file_.path(), ": ", data.size(),
                                                      " more bytes for tensor ", Printable(name),
                                                      ", which lacks ", room));
  }
  DIM0_RETURN_IF_ERROR(file_.Append(data));
  current_bytes_ += static_cast<int64_t>(data.size());
  SkipComplete();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::AppendFloats(absl::string_view name,
                                             absl::Span<const float> values) {
  if (values.empty()) return absl::OkStatus();
  DIM0_RETURN_IF_ERROR(CheckCurrent(name));
  const StoredType type = tensors_[current_].type;
  if (type == StoredType::kF32) {
    return Append(name, AsBytes(values.data(), values.size() * sizeof(float)));
  }
  if (type != StoredType::kBF16) {
    return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": tensor ", Printable(name),
                                                   " is ", Name(type), ", not F32 or BF16"));
  }
  constexpr size_t kPiece = 4096;
  std::array<BFloat16, kPiece> piece;
  while (!values.empty()) {
    const size_t count = std::min(kPiece, values.size());
    for (size_t i = 0; i < count; ++i) piece[i] = BFloat16(values[i]);
    DIM0_RETURN_IF_ERROR(Append(name, AsBytes(piece.data(), count * sizeof(BFloat16))));
    values.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Commit() {
  if (current_ < tensors_.size()) {
    const TensorDescription& tensor = tensors_[current_];
    return absl::FailedPreconditionError(
        absl::StrCat(file_.path(), ": tensor ", Printable(tensor.name), " has ", current_bytes_,
                     " of its ", *BytesOf(tensor.type, tensor.shape), " bytes"));
  }
  return file_.Commit();
}

// ---- Reading ----

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(absl::string_view path) {
  DIM0_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(path));
  SafetensorsFile file(std::move(mapped));
  DIM0_RETURN_IF_ERROR(file.ParseHeader());
  return file;
}

absl::Status SafetensorsFile::ParseHeader() {
  const auto file_error = [&](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat(path(), ": ", what...));
  };
  const absl::string_view contents = file_.contents();
  if (contents.size() < kLengthBytes) {
    return file_error("the file ends at byte ", contents.size(),
                      ", inside the header's length; it is truncated or not a safetensors file");
  }
  uint64_t length;
  std::memcpy(&length, contents.data(), sizeof(length));
  if (length > kMaxHeaderBytes) {
    return file_error("a header of ", length,
                      " bytes is not possible; the file is damaged or not a safetensors file");
  }
  if (length > contents.size() - kLengthBytes) {
    return file_error("the file is truncated at byte ", contents.size(), "; its header ends at ",
                      kLengthBytes + length);
  }
  const absl::string_view header = contents.substr(kLengthBytes, length);
  const absl::string_view data = contents.substr(kLengthBytes + length);
  const int64_t data_bytes = static_cast<int64_t>(data.size());

  std::string problem;
  const Json root = ParseStrictly(header, &problem);
  if (!problem.empty()) {
    return file_error("the header (", length, " bytes from byte 8) ", problem);
  }

  struct Entry {
    Tensor tensor;
    int64_t begin;
    int64_t end;
  };
  std::vector<Entry> entries;
  for (const auto& [name, value] : root.items()) {
    if (name == kMetadata) {
      if (!value.is_object()) return file_error(kMetadata, " is not a JSON object");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) {
          return file_error(kMetadata, ": ", Printable(key), " is not a string");
        }
        metadata_.emplace(key, text.template get<std::string>());
      }
      continue;
    }
    const auto error = [&, &name = name](auto... what) {
      return file_error("tensor ", Printable(name), ": ", what...);
    };
    if (!value.is_object()) return error("not described by a JSON object");
    for (const char* key : {"dtype", "shape", "data_offsets"}) {
      if (!value.contains(key)) return error("no ", key);
    }
    const Json& dtype = value["dtype"];
    if (!dtype.is_string()) return error("dtype is not a string");
    const std::string& dtype_name = dtype.get_ref<const std::string&>();
    const std::optional<StoredType> type = TypeNamed(dtype_name);
    if (!type) return error("unknown dtype ", Printable(dtype_name));
    const std::optional<std::vector<int64_t>> shape = Counts(value["shape"]);
    if (!shape) return error("shape is not a list of counts");
    const std::optional<std::vector<int64_t>> offsets = Counts(value["data_offsets"]);
    if (!offsets || offsets->size() != 2) return error("data_offsets are not two counts");

    const int64_t begin = (*offsets)[0];
    const int64_t end = (*offsets)[1];
    if (begin > end) return error("its data begin at ", begin, " and end before, at ", end);
    const std::optional<int64_t> bytes = BytesOf(*type, *shape);
    if (!bytes) return error("a shape of ", ShapeText(*shape), " is not possible");
    if (*bytes != end - begin) {
      return error(ShapeText(*shape), " of ", dtype_name, " take ", *bytes, " bytes, but ",
                   end - begin, " are given to it");
    }
    if (end > data_bytes) {
      return error("its data end at ", end, ", but the file holds ", data_bytes,
                   " bytes of data; it is truncated");
    }
    entries.push_back({{name, *type, *shape, *ElementsOf(*shape),
                        data.substr(static_cast<size_t>(begin), static_cast<size_t>(*bytes))},
                       begin,
                       end});
  }

  // An empty tensor sorts before the one whose data begin where it stands.
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t covered = 0;
  for (Entry& entry : entries) {
    if (entry.begin != covered) {
      return file_error(
          "tensor ", Printable(entry.tensor.name), ": its data begin at ", entry.begin, ", ",
          entry.begin > covered ? "leaving a hole after " : "overlapping those up to ", covered);
    }
    covered = entry.end;
    index_.emplace(entry.tensor.name, tensors_.size());
    tensors_.push_back(std::move(entry.tensor));
  }
  if (covered != data_bytes) {
    return file_error(data_bytes - covered, " bytes at the end belong to no tensor");
  }
  return absl::OkStatus();
}

const SafetensorsFile::Tensor* SafetensorsFile::Find(absl::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

absl::Status SafetensorsFile::ReadFloats(const Tensor& tensor, int64_t begin,
                                         absl::Span<float> out) const {
  const int64_t count = static_cast<int64_t>(out.size());
  if (begin < 0 || begin > tensor.elements || count > tensor.elements - begin) {
    return absl::OutOfRangeError(absl::StrCat(path(), ": tensor ", Printable(tensor.name), " has ",
                                              tensor.elements, " elements, not ", count, " from ",
                                              begin));
  }
  const char* from = tensor.data.data() + begin * SizeOf(tensor.type);
  switch (tensor.type) {
    case StoredType::kF32:
      if (count > 0) std::memcpy(out.data(), from, out.size() * sizeof(float));
      return absl::OkStatus();
    case StoredType::kF16:
    case StoredType::kBF16:
      for (float& value : out) {
        uint16_t bits;
        std::memcpy(&bits, from, sizeof(bits));
        from += sizeof(bits);
        value = tensor.type == StoredType::kF16
                    ? HalfToFloat(bits)
                    : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
      }
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(path(), ": tensor ", Printable(tensor.name),
                                                     " is ", Name(tensor.type),
                                                     ", not F32, F16 or BF16"));
  }
}

std::vector<float> TransposedCopy(absl::Span<const float> in, int64_t rows, int64_t cols) {
  std::vector<float> out(in.size());
  constexpr int64_t kBlock = 64;  // blocks that stay in cache both ways
  for (int64_t r0 = 0; r0 < rows; r0 += kBlock) {
    for (int64_t c0 = 0; c0 < cols; c0 += kBlock) {
      for (int64_t r = r0; r < std::min(rows, r0 + kBlock); ++r) {
        for (int64_t c = c0; c < std::min(cols, c0 + kBlock); ++c) {
          out[c * rows + r] = in[r * cols + c];
        }
      }
    }
  }
  return out;
}

}  // namespace dim0
