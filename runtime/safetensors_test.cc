#include "runtime/safetensors.h"

#include <stdlib.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;

std::string LittleEndian(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
  return out;
}

// A file out of its three parts, as the format has them.
std::string File(const std::string& header, const std::string& data) {
  return LittleEndian(header.size(), 8) + header + data;
}

// 1.0, -2.0, 0.5 and 65536.0 as float32, written by hand from IEEE 754.
const std::string kFourFloats = {
    '\x00', '\x00', '\x80', '\x3f', '\x00', '\x00', '\x00', '\xc0',
    '\x00', '\x00', '\x00', '\x3f', '\x00', '\x00', '\x80', '\x47',
};

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "safetensors_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ + "/model.safetensors";
  }
  void TearDown() override { fs::remove_all(folder_); }

  void Put(const std::string& contents) const {
    fs::remove(path_);  // some file systems flush a file that is truncated and written anew
    std::ofstream(path_, std::ios::binary) << contents;
  }
  std::string Slurp() const {
    std::ifstream in(path_, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  size_t FilesInFolder() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }
  SafetensorsFile OpenOrDie() const {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  // The message of the error that opening `contents` gives, without the path before it.
  std::string ErrorOf(const std::string& contents) const {
    Put(contents);
    const absl::Status status = SafetensorsFile::Open(path_).status();
    EXPECT_FALSE(status.ok());
    const std::string message(status.message());
    const std::string prefix = path_ + ": ";
    EXPECT_EQ(message.substr(0, prefix.size()), prefix);
    EXPECT_FALSE(absl::StrContains(message, "\n"));
    return message.substr(std::min(message.size(), prefix.size()));
  }
  // The same for a header that describes four bytes of data.
  std::string HeaderError(const std::string& header) const { return ErrorOf(File(header, "abcd")); }
  std::string Message(const absl::Status& status) const {
    return std::string(absl::StripPrefix(status.message(), path_ + ": "));
  }

  std::string folder_;
  std::string path_;
};

TEST_F(SafetensorsTest, ReadsAFileMadeByHand) {
  const std::string header = R"({"__metadata__":{"format":"pt"},)"
                             R"("b":{"shape":[],"data_offsets":[12,16],"dtype":"F32"},)"
                             R"("a":{"dtype":"F32","shape":[3,1],"data_offsets":[0,12]}})"
                             "   ";
  Put(File(header, kFourFloats));
  const SafetensorsFile file = OpenOrDie();
  EXPECT_EQ(file.path(), path_);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors()[0].name, "a");  // in the order of the data
  EXPECT_EQ(file.tensors()[1].name, "b");
  const SafetensorsFile::Tensor* a = file.Find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->type, StoredType::kF32);
  EXPECT_EQ(a->shape, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(a->elements, 3);
  EXPECT_EQ(a->data, kFourFloats.substr(0, 12));
  std::vector<float> values(2);
  ASSERT_TRUE(file.ReadFloats(*a, 1, absl::MakeSpan(values)).ok());
  EXPECT_EQ(values, (std::vector<float>{-2.0f, 0.5f}));
  const SafetensorsFile::Tensor* b = file.Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->elements, 1);
  ASSERT_TRUE(file.ReadFloats(*b, 0, absl::MakeSpan(values).first(1)).ok());
  EXPECT_EQ(values[0], 65536.0f);
  EXPECT_EQ(file.Find("c"), nullptr);
}

TEST_F(SafetensorsTest, WritesTheBytesOfTheFormat) {
  absl::StatusOr<SafetensorsWriter> writer = SafetensorsWriter::Create(
      path_, {{"b", StoredType::kF32, {3}}, {"a", StoredType::kF32, {}}}, {{"k", "v\n"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE(writer->Append("b", kFourFloats.substr(0, 5)).ok());
  ASSERT_TRUE(writer->Append("b", kFourFloats.substr(5, 7)).ok());
  ASSERT_TRUE(writer->AppendFloats("a", {65536.0f}).ok());
  ASSERT_TRUE(writer->Commit().ok());
  std::string header = R"({"__metadata__":{"k":"v\n"},)"
                       R"("b":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},)"
                       R"("a":{"dtype":"F32","shape":[],"data_offsets":[12,16]}})";
  header.resize(136, ' ');  // 134 bytes, padded
  EXPECT_EQ(Slurp(), File(header, kFourFloats));
  EXPECT_EQ(FilesInFolder(), 1u);
}

TEST_F(SafetensorsTest, ReadsBackWhatItWrote) {
  const std::vector<TensorDescription> tensors = {
      {"empty.first", StoredType::kF32, {0, 5}},
      {"transformer.wte.weight", StoredType::kF32, {100, 70}},
      {"odd \"name\"\\\t\xc3\xa9", StoredType::kU8, {3}},
      {"empty.middle", StoredType::kI64, {0}},
      {"half", StoredType::kBF16, {2, 3}},
      {"empty.last", StoredType::kBF16, {2, 0, 9}},
  };
  std::vector<float> weights(7000);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.25f * static_cast<float>(i);
  absl::StatusOr<SafetensorsWriter> writer =
      SafetensorsWriter::Create(path_, tensors, {{"seed", "1"}, {"\xc3\xa4", "\"\\"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (size_t at = 0; at < weights.size(); at += 700) {
    ASSERT_TRUE(writer->AppendFloats("transformer.wte.weight", {weights.data() + at, 700}).ok());
  }
  ASSERT_TRUE(writer->Append(tensors[2].name, "xyz").ok());
  ASSERT_TRUE(writer->AppendFloats("half", {1, 2, 3, -4, 5, 6}).ok());
  ASSERT_TRUE(writer->Append("empty.last", "").ok());
  ASSERT_TRUE(writer->Commit().ok());

  const SafetensorsFile file = OpenOrDie();
  EXPECT_EQ(file.metadata(),
            (std::map<std::string, std::string>{{"seed", "1"}, {"\xc3\xa4", "\"\\"}}));
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const TensorDescription& tensor : tensors) {
    const SafetensorsFile::Tensor* read = file.Find(tensor.name);
    ASSERT_NE(read, nullptr) << tensor.name;
    EXPECT_EQ(read->type, tensor.type);
    EXPECT_EQ(read->shape, tensor.shape);
  }
  std::vector<float> read(7000);
  ASSERT_TRUE(file.ReadFloats(*file.Find("transformer.wte.weight"), 0, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, weights);
  read.resize(6);
  ASSERT_TRUE(file.ReadFloats(*file.Find("half"), 0, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, (std::vector<float>{1, 2, 3, -4, 5, 6}));
  EXPECT_EQ(file.Find(tensors[2].name)->data, "xyz");
  EXPECT_TRUE(file.ReadFloats(*file.Find("empty.first"), 0, {}).ok());
}

TEST_F(SafetensorsTest, BeginsTheDataAtAMultipleOfEight) {
  for (int length = 1; length <= 16; ++length) {
    absl::StatusOr<SafetensorsWriter> writer =
        SafetensorsWriter::Create(path_, {{std::string(length, 'n'), StoredType::kU8, {1}}});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Append(std::string(length, 'n'), "x").ok());
    ASSERT_TRUE(writer->Commit().ok());
    EXPECT_EQ(Slurp().size() % 8, 1u);
    EXPECT_EQ(OpenOrDie().tensors()[0].data, "x");
  }
}

TEST_F(SafetensorsTest, ReadsAndWritesAFileWithoutTensors) {
  absl::StatusOr<SafetensorsWriter> writer = SafetensorsWriter::Create(path_, {});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Commit().ok());
  EXPECT_EQ(Slurp(), File("{}      ", ""));
  EXPECT_TRUE(OpenOrDie().tensors().empty());
}

TEST_F(SafetensorsTest, RoundsToBFloat16ToNearestTiesToEven) {
  // 1 + 2^-8 lies halfway between 1 and 1 + 2^-7; 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6.
  const std::vector<float> values = {1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 1 + 0x1.8p-8f, -0.0f};
  const std::vector<float> expected = {1.0f, 1 + 0x1p-6f, 1 + 0x1p-7f, -0.0f};
  absl::StatusOr<SafetensorsWriter> writer =
      SafetensorsWriter::Create(path_, {{"x", StoredType::kBF16, {4}}});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->AppendFloats("x", values).ok());
  ASSERT_TRUE(writer->Commit().ok());
  const SafetensorsFile file = OpenOrDie();
  std::vector<float> read(4);
  ASSERT_TRUE(file.ReadFloats(*file.Find("x"), 0, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, expected);
  EXPECT_TRUE(std::signbit(read[3]));
}

TEST_F(SafetensorsTest, ReadsEveryKindOfHalfPrecisionNumber) {
  // From IEEE 754's binary16: 1, -2, largest, smallest normal, smallest and largest subnormal,
  // zeros, infinities, NaN.
  const std::vector<uint16_t> bits = {0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001, 0x83ff,
                                      0x0000, 0x8000, 0x7c00, 0xfc00, 0x7e00};
  std::string data;
  for (const uint16_t b : bits) data += LittleEndian(b, 2);
  Put(File(R"({"h":{"dtype":"F16","shape":[11],"data_offsets":[0,22]}})", data));
  const SafetensorsFile file = OpenOrDie();
  std::vector<float> read(11);
  ASSERT_TRUE(file.ReadFloats(*file.Find("h"), 0, absl::MakeSpan(read)).ok());
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> expected = {1,    -2,    65504,    0x1p-14f, 0x1p-24f, -1023 * 0x1p-24f,
                                       0.0f, -0.0f, infinity, -infinity};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(read[i], expected[i]) << i;
  EXPECT_TRUE(std::signbit(read[7]));
  EXPECT_TRUE(std::isnan(read[10]));
}

// A header of any length is legal, so the data of a foreign file may begin at an odd byte.
TEST_F(SafetensorsTest, ReadsDataThatAreNotAligned) {
  std::string header = R"({"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})";
  for (int shift = 0; shift < 8; ++shift, header += ' ') {
    Put(File(header, kFourFloats));
    const SafetensorsFile file = OpenOrDie();
    std::vector<float> read(4);
    ASSERT_TRUE(file.ReadFloats(*file.Find("x"), 0, absl::MakeSpan(read)).ok());
    EXPECT_EQ(read, (std::vector<float>{1.0f, -2.0f, 0.5f, 65536.0f}));
  }
}

TEST_F(SafetensorsTest, RefusesToReadWhatIsNotThere) {
  Put(File(R"({"i":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},)"
           R"("x":{"dtype":"F32","shape":[3],"data_offsets":[4,16]}})",
           kFourFloats));
  const SafetensorsFile file = OpenOrDie();
  std::vector<float> out(2);
  EXPECT_EQ(Message(file.ReadFloats(*file.Find("x"), 2, absl::MakeSpan(out))),
            "tensor \"x\" has 3 elements, not 2 from 2");
  EXPECT_FALSE(file.ReadFloats(*file.Find("x"), -1, absl::MakeSpan(out)).ok());
  EXPECT_EQ(Message(file.ReadFloats(*file.Find("i"), 0, absl::MakeSpan(out).first(1))),
            "tensor \"i\" is I32, not F32, F16 or BF16");
}

TEST_F(SafetensorsTest, KnowsTheSizeOfEveryType) {
  const std::vector<std::pair<std::string, int>> types = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
      {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};
  for (const auto& [name, size] : types) {
    Put(File(absl::StrCat(R"({"x":{"dtype":")", name, R"(","shape":[3],"data_offsets":[0,)",
                          3 * size, "]}}"),
             std::string(3 * size, 'x')));
    const SafetensorsFile file = OpenOrDie();
    EXPECT_EQ(Name(file.tensors()[0].type), name);
    EXPECT_EQ(SizeOf(file.tensors()[0].type), size);
  }
}

// ---- Errors of the writer ----

TEST_F(SafetensorsTest, RefusesDataOutOfOrder) {
  absl::StatusOr<SafetensorsWriter> writer =
      SafetensorsWriter::Create(path_, {{"a", StoredType::kU8, {3}}, {"b", StoredType::kI32, {1}}});
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(Message(writer->Append("b", "x")), "data for tensor \"b\" where \"a\" is due");
  EXPECT_EQ(Message(writer->Append("a", "1234")), "4 more bytes for tensor \"a\", which lacks 3");
  ASSERT_TRUE(writer->Append("a", "12").ok());
  EXPECT_EQ(Message(writer->Commit()), "tensor \"a\" has 2 of its 3 bytes");
  ASSERT_TRUE(writer->Append("a", "3").ok());
  EXPECT_EQ(Message(writer->Append("a", "4")), "data for tensor \"a\" where \"b\" is due");
  EXPECT_EQ(Message(writer->AppendFloats("b", {1.0f})), "tensor \"b\" is I32, not F32 or BF16");
  ASSERT_TRUE(writer->Append("b", "1234").ok());
  EXPECT_EQ(Message(writer->Append("b", "5")),
            "data for tensor \"b\" after all tensors were complete");
  EXPECT_FALSE(fs::exists(path_));
  ASSERT_TRUE(writer->Commit().ok());
  EXPECT_TRUE(OpenOrDie().Find("b") != nullptr);
}

TEST_F(SafetensorsTest, LeavesNothingOfAFileThatWasNotCommitted) {
  {
    absl::StatusOr<SafetensorsWriter> writer =
        SafetensorsWriter::Create(path_, {{"a", StoredType::kU8, {3}}});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Append("a", "123").ok());
  }
  EXPECT_EQ(FilesInFolder(), 0u);
}

TEST_F(SafetensorsTest, RefusesTensorsThatAFileCannotHold) {
  const auto error = [&](std::vector<TensorDescription> tensors) {
    return Message(SafetensorsWriter::Create(path_, std::move(tensors)).status());
  };
  EXPECT_EQ(error({{"a", StoredType::kU8, {1}}, {"a", StoredType::kU8, {1}}}),
            "tensor \"a\": the name comes twice");
  EXPECT_EQ(error({{"", StoredType::kU8, {1}}}), "tensor \"\": not a possible name");
  EXPECT_EQ(error({{"__metadata__", StoredType::kU8, {1}}}),
            "tensor \"__metadata__\": not a possible name");
  EXPECT_EQ(error({{"\xff", StoredType::kU8, {1}}}), "tensor \"\\ufffd\": not a possible name");
  EXPECT_EQ(error({{"a", StoredType::kU8, {2, -1}}}),
            "tensor \"a\": a shape of [2, -1] is not possible");
  constexpr int64_t kHuge = int64_t{1} << 61;
  EXPECT_EQ(error({{"a", StoredType::kF32, {kHuge}}}),
            "tensor \"a\": a shape of [2305843009213693952] is not possible");
  EXPECT_EQ(error({{"a", StoredType::kU16, {kHuge}}, {"b", StoredType::kU16, {kHuge}}}),
            "tensor \"b\": a shape of [2305843009213693952] is not possible");
  EXPECT_EQ(Message(SafetensorsWriter::Create(path_, {}, {{"k", "\xc3"}}).status()),
            "metadata \"k\" is not UTF-8");
  EXPECT_EQ(FilesInFolder(), 0u);
}

TEST_F(SafetensorsTest, NamesAFolderThatIsMissing) {
  const std::string path = folder_ + "/no/model.safetensors";
  EXPECT_EQ(SafetensorsWriter::Create(path, {}).status().message(),
            absl::StrCat("cannot write ", path, ": No such file or directory"));
}

// ---- Errors of the reader ----

TEST_F(SafetensorsTest, SaysWhereATruncatedFileEnds) {
  EXPECT_EQ(ErrorOf(""),
            "the file ends at byte 0, inside the header's length; it is truncated or not a "
            "safetensors file");
  EXPECT_EQ(ErrorOf("1234567"),
            "the file ends at byte 7, inside the header's length; it is truncated or not a "
            "safetensors file");
  EXPECT_EQ(ErrorOf(LittleEndian(100, 8) + "{}"),
            "the file is truncated at byte 10; its header ends at 108");
  EXPECT_EQ(ErrorOf(File(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}})", "abcd")),
            "tensor \"a\": its data end at 5, but the file holds 4 bytes of data; it is truncated");
}

TEST_F(SafetensorsTest, RefusesAHeaderLengthThatNoModelHas) {
  EXPECT_EQ(ErrorOf("Once upon a time, there was"),
            "a header of 8030046917602012751 bytes is not possible; the file is damaged or not a "
            "safetensors file");
  EXPECT_FALSE(ErrorOf(std::string(8, '\xff') + "{}").empty());
}

TEST_F(SafetensorsTest, RefusesAHeaderThatIsNotAJsonObject) {
  for (const std::string header :
       {"", "{", "[]", "1", "null", "\"x\"", "{}x", " {}", "{\"a\":}", "{\"\xff\":{}}",
        "\xef\xbb\xbf{}", "{'a':1}", "{\"a\":1,}", "// {}"}) {
    EXPECT_EQ(HeaderError(header), absl::StrCat("the header (", header.size(),
                                                " bytes from byte 8) is not a JSON object"))
        << header;
  }
}

TEST_F(SafetensorsTest, RefusesAKeyThatComesTwice) {
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                        R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})"),
            "the header (105 bytes from byte 8) has the key \"a\" twice");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}})"),
            "the header (66 bytes from byte 8) has the key \"dtype\" twice");
  EXPECT_EQ(HeaderError(R"({"__metadata__":{"k":"1","k":"2"}})"),
            "the header (34 bytes from byte 8) has the key \"k\" twice");
}

TEST_F(SafetensorsTest, RefusesNestingWithoutFollowingIt) {
  const std::string deep(1'000'000, '[');
  EXPECT_EQ(HeaderError("{\"a\":" + deep),
            "the header (1000005 bytes from byte 8) is not a JSON "
            "object");
  EXPECT_EQ(HeaderError("{\"a\":" + deep + std::string(deep.size(), ']') + "}"),
            "the header (2000006 bytes from byte 8) is nested too deeply");
  EXPECT_EQ(HeaderError(R"({"a":{"b":{"c":{"d":{"e":1},"f":1},"f":1},"f":1},"f":1})"),
            "the header (55 bytes from byte 8) is nested too deeply");
}

TEST_F(SafetensorsTest, NamesTheTensorWhoseDescriptionIsWrong) {
  EXPECT_EQ(HeaderError(R"({"a":1})"), "tensor \"a\": not described by a JSON object");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[4]}})"), "tensor \"a\": no data_offsets");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","data_offsets":[0,4]}})"), "tensor \"a\": no shape");
  EXPECT_EQ(HeaderError(R"({"a":{"shape":[4],"data_offsets":[0,4]}})"), "tensor \"a\": no dtype");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}})"),
            "tensor \"a\": dtype is not a string");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"float32","shape":[1],"data_offsets":[0,4]}})"),
            "tensor \"a\": unknown dtype \"float32\"");
  for (const char* shape : {"4", "[-4]", "[4.0]", "[\"4\"]", "[null]", "{}",
                            "[9223372036854775808]", "[18446744073709551616]"}) {
    EXPECT_EQ(HeaderError(absl::StrCat(R"({"a":{"dtype":"U8","shape":)", shape,
                                       R"(,"data_offsets":[0,4]}})")),
              "tensor \"a\": shape is not a list of counts")
        << shape;
  }
  for (const char* offsets : {"4", "[4]", "[0,4,4]", "[-1,4]", "[0,4.5]", "[0,\"4\"]"}) {
    EXPECT_EQ(HeaderError(
                  absl::StrCat(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)", offsets, "}}")),
              "tensor \"a\": data_offsets are not two counts")
        << offsets;
  }
  EXPECT_EQ(HeaderError(R"({"line\nbreak":1})"),
            "tensor \"line\\nbreak\": not described by a JSON object");
}

TEST_F(SafetensorsTest, RefusesMetadataThatAreNotStrings) {
  EXPECT_EQ(HeaderError(R"({"__metadata__":[]})"), "__metadata__ is not a JSON object");
  EXPECT_EQ(HeaderError(R"({"__metadata__":{"step":1}})"),
            "__metadata__: \"step\" is not a string");
}

TEST_F(SafetensorsTest, RefusesSizesThatDoNotFitTheShape) {
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})"),
            "tensor \"a\": [2] of F32 take 8 bytes, but 4 are given to it");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}})"),
            "tensor \"a\": its data begin at 4 and end before, at 0");
  // 2^32 * 2^32 is 0 in 64 bits; 2^62 elements of 4 bytes are too.
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],)"
                        R"("data_offsets":[0,0]}})"),
            "tensor \"a\": a shape of [4294967296, 4294967296] is not possible");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"F32","shape":[4611686018427387904],)"
                        R"("data_offsets":[0,0]}})"),
            "tensor \"a\": a shape of [4611686018427387904] is not possible");
}

TEST_F(SafetensorsTest, RefusesHolesOverlapsAndBytesOfNoTensor) {
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                        R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})"),
            "tensor \"b\": its data begin at 2, leaving a hole after 1");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                        R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})"),
            "tensor \"b\": its data begin at 2, overlapping those up to 3");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                        R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})"),
            "tensor \"b\": its data begin at 0, overlapping those up to 4");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})"),
            "tensor \"a\": its data begin at 1, leaving a hole after 0");
  EXPECT_EQ(HeaderError(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})"),
            "1 bytes at the end belong to no tensor");
  EXPECT_EQ(HeaderError("{}"), "4 bytes at the end belong to no tensor");
}

// Whatever a damaged file holds, opening it ends in an error or in tensors that can be read. Run
// with the address sanitizer this also proves that nothing outside the file is touched.
TEST_F(SafetensorsTest, SurvivesDamageOfAnyByte) {
  const std::string whole =
      File(R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,2],)"
           R"("data_offsets":[8,16]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  )",
           kFourFloats);
  const auto try_to_read = [&](const std::string& contents) {
    Put(contents);
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path_);
    if (!file.ok()) {
      EXPECT_FALSE(absl::StrContains(file.status().message(), "\n"));
      return false;
    }
    int64_t bytes = 0;
    for (const SafetensorsFile::Tensor& tensor : file->tensors()) {
      bytes += static_cast<int64_t>(tensor.data.size());
      EXPECT_EQ(static_cast<int64_t>(tensor.data.size()), tensor.elements * SizeOf(tensor.type));
      if (tensor.type == StoredType::kF32 || tensor.type == StoredType::kBF16) {
        std::vector<float> values(tensor.elements);
        EXPECT_TRUE(file->ReadFloats(tensor, 0, absl::MakeSpan(values)).ok());
      }
    }
    EXPECT_EQ(bytes, 16);  // every byte belongs to one tensor
    return true;
  };
  ASSERT_TRUE(try_to_read(whole));
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(try_to_read(whole.substr(0, size))) << size;
  }
  EXPECT_FALSE(try_to_read(whole + "x"));
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      const bool readable = try_to_read(damaged);
      EXPECT_TRUE(at >= 8 || !readable) << "a wrong header length was accepted, byte " << at;
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = whole;
    for (int j = 0; j < 3; ++j) {
      damaged[random() % damaged.size()] = "\"{}[],:0129-.eE\\ \0\xff"[random() % 19];
    }
    try_to_read(damaged);
  }
}

}  // namespace
}  // namespace dim0
