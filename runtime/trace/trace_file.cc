#include "runtime/trace/trace_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/run_files.h"

namespace dim0 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kFormat = 1;
constexpr int kHostRow = 1;
// Larger integers are not exact in every JSON reader.
constexpr int64_t kMaxInteger = int64_t{1} << 53;
// Of ranks and stream numbers.
constexpr int64_t kMaxSmall = int64_t{1} << 24;

constexpr absl::string_view kTraceAgain = "trace the run again with `train --trace=DIR`";
constexpr absl::string_view kGiveOurs = "give a folder that `train --trace=DIR` wrote";

constexpr OpKind kOpKinds[] = {OpKind::kCompute, OpKind::kCollective, OpKind::kOptimizer,
                               OpKind::kCopy};
constexpr absl::string_view KindName(OpKind kind) {
  switch (kind) {
    case OpKind::kCompute:
      return "compute";
    case OpKind::kCollective:
      return "collective";
    case OpKind::kOptimizer:
      return "optimizer";
    case OpKind::kCopy:
      return "copy";
  }
  return "?";
}

// Those that travel.
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt32, DType::kInt64,
                             DType::kByte};
// PyTorch's name.
constexpr absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "Float";
    case DType::kBFloat16:
      return "BFloat16";
    case DType::kInt32:
      return "Int";
    case DType::kInt64:
      return "Long";
    case DType::kByte:
      return "Byte";
    case DType::kFloat16:
      return "Half";
  }
  return "?";
}

// Writing

std::string Quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

// The shortest decimal that reads back as the same double.
std::string Decimal(double value) {
  if (!std::isfinite(value)) return "0";
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

// A negative one, which readers refuse, would cost the whole file.
int64_t Duration(int64_t begin, int64_t end) { return std::max<int64_t>(0, end - begin); }

class TraceWriter {
 public:
  TraceWriter(const RankTrace& trace, AtomicFileWriter* file) : trace_(trace), file_(*file) {}

  absl::Status Write() {
    DIM0_RETURN_IF_ERROR(file_.Append(Header()));
    DIM0_RETURN_IF_ERROR(Names());
    DIM0_RETURN_IF_ERROR(Steps());
    DIM0_RETURN_IF_ERROR(Memory());
    std::vector<std::string> ranks;
    for (int rank = 0; rank < trace_.world_size; ++rank) {
      // A long list in every event would be most of the file.
      if (trace_.world_size > 32 && rank == 31) {
        ranks.push_back("...");
        rank = trace_.world_size - 1;
      }
      ranks.push_back(absl::StrCat(rank));
    }
    group_ = absl::StrCat("\"[", absl::StrJoin(ranks, ", "), "]\"");
    for (const TraceStream& stream : trace_.streams) {
      for (const TraceWait& wait : stream.waits) DIM0_RETURN_IF_ERROR(Wait(stream, wait));
      for (const TraceOp& op : stream.ops) DIM0_RETURN_IF_ERROR(Op(stream, op));
    }
    return file_.Append("\n  ]\n}\n");
  }

 private:
  std::string Header() const {
    std::vector<std::string> flags, streams;
    for (const auto& [name, value] : trace_.flags) {
      flags.push_back(absl::StrCat(Quoted(name), ": ", Quoted(value)));
    }
    for (const TraceStream& stream : trace_.streams) {
      streams.push_back(
          absl::StrCat("{\"name\": ", Quoted(stream.name), ", \"number\": ", stream.number, "}"));
    }
    // One line each: HTA looks for the rank line by line.
    return absl::StrCat(
        "{\n  \"schemaVersion\": 1,\n  \"distributedInfo\": {\"backend\": ", Quoted(trace_.backend),
        ", \"rank\": ", trace_.rank, ", \"world_size\": ", trace_.world_size,
        "},\n  \"displayTimeUnit\": \"ms\",\n  \"baseTimeNanoseconds\": 0,\n  \"traceName\": ",
        Quoted(TraceFileName(trace_.rank)), ",\n  \"dim0\": {\"format\": ", kFormat,
        ", \"model\": ", Quoted(trace_.model), ", \"parameters\": ", trace_.parameters,
        ", \"metrics\": ", Quoted(trace_.metrics),
        ", \"cut_short\": ", trace_.cut_short ? "true" : "false", ",\n    \"flags\": {",
        absl::StrJoin(flags, ", "), "},\n    \"streams\": [", absl::StrJoin(streams, ", "),
        "]},\n  \"traceEvents\": [");
  }

  // Writes an event: `rest` is what follows its ph, pid, tid and ts.
  template <typename... Rest>
  absl::Status Event(char phase, int row, int64_t time, const Rest&... rest) {
    line_.clear();
    absl::StrAppend(&line_, first_ ? "" : ",", "\n    {\"ph\": \"", absl::string_view(&phase, 1),
                    "\", \"pid\": ", trace_.rank);
    absl::StrAppend(&line_, ", \"tid\": ", row, ", \"ts\": ", time, ", ");
    (absl::StrAppend(&line_, rest), ...);
    line_ += "}";
    first_ = false;
    return file_.Append(line_);
  }

  absl::Status Name(int row, absl::string_view of, const std::string& name, int order) {
    // Viewers ignore these events' times, but HTA rounds all times if one event has none.
    const int64_t time = trace_.steps.empty() ? 0 : trace_.steps.front().begin;
    DIM0_RETURN_IF_ERROR(Event('M', row, time, "\"name\": \"", of,
                               "_name\", \"args\": {\"name\": ", Quoted(name), "}"));
    return Event('M', row, time, "\"name\": \"", of,
                 "_sort_index\", \"args\": {\"sort_index\": ", order, "}");
  }

  absl::Status Names() {
    DIM0_RETURN_IF_ERROR(
        Name(kHostRow, "process", absl::StrCat("rank ", trace_.rank), trace_.rank));
    DIM0_RETURN_IF_ERROR(Name(kHostRow, "thread", "host", 0));
    for (const TraceStream& stream : trace_.streams) {
      DIM0_RETURN_IF_ERROR(Name(stream.number, "thread", stream.name, stream.number));
    }
    return absl::OkStatus();
  }

  absl::Status Steps() {
    for (const TraceStep& step : trace_.steps) {
      const bool has_loss = step.loss && std::isfinite(*step.loss);
      const std::string loss = has_loss ? absl::StrCat(", \"loss\": ", Decimal(*step.loss)) : "";
      DIM0_RETURN_IF_ERROR(Event('X', kHostRow, step.begin,
                                 "\"dur\": ", Duration(step.begin, step.end),
                                 ", \"cat\": \"user_annotation\", \"name\": \"ProfilerStep#",
                                 step.step, "\", \"args\": {\"step\": ", step.step, loss, "}"));
    }
    if (trace_.steps.empty()) return absl::OkStatus();
    int64_t after = trace_.steps.back().end;
    for (const TraceStream& stream : trace_.streams) {
      for (const TraceOp& op : stream.ops) after = std::max(after, op.enqueued + 1);
    }
    return Event('X', kHostRow, after,
                 "\"dur\": 0, \"cat\": \"user_annotation\", \"name\": \"ProfilerStep#",
                 trace_.steps.back().step + 1, "\"");
  }

  absl::Status Memory() {
    for (const TraceMemory& memory : trace_.memory) {
      std::string bytes;
      for (int i = 0; i < kNumMemoryPurposes; ++i) {
        absl::StrAppend(&bytes, i == 0 ? "\"" : ", \"", dim0::Name(static_cast<MemoryPurpose>(i)),
                        "\": ", memory.bytes[i]);
      }
      DIM0_RETURN_IF_ERROR(Event('C', kHostRow, memory.time,
                                 "\"cat\": \"memory\", \"name\": \"memory\", \"args\": {", bytes,
                                 "}"));
    }
    return absl::OkStatus();
  }

  absl::Status Wait(const TraceStream& stream, const TraceWait& wait) {
    return Event('X', stream.number, wait.begin, "\"dur\": ", Duration(wait.begin, wait.end),
                 ", \"cat\": \"wait\", \"name\": \"wait\", \"args\": {\"cause\": ", wait.cause,
                 ", \"cause stream\": ", Quoted(wait.stream), "}");
  }

  // A viewer ties an arrow's end to the event of that row and time which the file has last before
  // it, so each end directly follows its own.
  absl::Status Op(const TraceStream& stream, const TraceOp& op) {
    DIM0_RETURN_IF_ERROR(Event('X', kHostRow, op.enqueued,
                               "\"dur\": 0, \"cat\": \"cuda_runtime\", \"name\": "
                               "\"cudaLaunchKernel\", \"args\": {\"correlation\": ",
                               op.id, "}"));
    DIM0_RETURN_IF_ERROR(Event('s', kHostRow, op.enqueued, "\"id\": ", op.id,
                               ", \"cat\": \"ac2g\", \"name\": \"ac2g\""));
    std::string name = Quoted(op.name), more;
    if (op.communicates()) {
      absl::StrAppend(&more, ", \"op\": ", name);
      name =
          Quoted(absl::StrCat("ncclKernel_", op.collective ? op.collective->operation : "no_call"));
    }
    if (op.failed) more += ", \"failed\": true";
    if (op.collective) {
      const TraceCollective& call = *op.collective;
      absl::StrAppend(&more, ", \"Collective name\": ", Quoted(call.operation),
                      ", \"Process Group Name\": ", Quoted(call.channel),
                      ", \"Process Group Ranks\": ", group_,
                      ", \"Group size\": ", trace_.world_size, ", \"dtype\": \"",
                      DTypeName(call.dtype), "\", \"Seq\": ", call.sequence);
      absl::StrAppend(&more, ", \"In msg nelems\": ", call.in_elements,
                      ", \"Out msg nelems\": ", call.out_elements, ", \"purpose\": \"",
                      dim0::Name(call.purpose), "\", \"bytes sent\": ", call.bytes_sent,
                      ", \"met\": ", call.met);
    }
    DIM0_RETURN_IF_ERROR(
        Event('X', stream.number, op.begin, "\"dur\": ", Duration(op.begin, op.end),
              ", \"cat\": \"kernel\", \"name\": ", name, ", \"args\": {\"stream\": ", stream.number,
              ", \"correlation\": ", op.id, ", \"kind\": \"", KindName(op.kind),
              "\", \"unit\": ", Quoted(op.unit), ", \"phase\": ", Quoted(op.phase),
              ", \"step\": ", op.step, ", \"enqueued\": ", op.enqueued,
              ", \"flops\": ", Decimal(op.flops), ", \"bytes\": ", Decimal(op.bytes), more, "}"));
    return Event('f', stream.number, op.begin, "\"id\": ", op.id,
                 ", \"bp\": \"e\", \"cat\": \"ac2g\", \"name\": \"ac2g\"");
  }

  const RankTrace& trace_;
  AtomicFileWriter& file_;
  std::string group_;  // "Process Group Ranks", quoted
  std::string line_;
  bool first_ = true;
};

// Reading

// The members of one JSON object. The first that is missing or wrong is described in *problem, and
// stands for the whole object.
class Members {
 public:
  Members(const Json& object, std::string* problem) : object_(object), problem_(*problem) {}

  bool Has(const char* key) const { return object_.is_object() && object_.contains(key); }

  int64_t Integer(const char* key, int64_t min = 0, int64_t max = kMaxInteger) {
    const Json* value = Find(key);
    if (value != nullptr && value->is_number_unsigned()) {
      const uint64_t number = value->get<uint64_t>();
      if (number >= static_cast<uint64_t>(min) && number <= static_cast<uint64_t>(max)) {
        return static_cast<int64_t>(number);
      }
    }
    return Wrong<int64_t>(key, absl::StrCat("is not a whole number from ", min, " to ", max));
  }

  double Number(const char* key) {
    const Json* value = Find(key);
    if (value != nullptr && value->is_number() && value->get<double>() >= 0) {
      return value->get<double>();
    }
    return Wrong<double>(key, "is not a number from 0 on");
  }

  // As Number, of either sign.
  double Real(const char* key) {
    const Json* value = Find(key);
    if (value != nullptr && value->is_number()) return value->get<double>();
    return Wrong<double>(key, "is not a number");
  }

  bool Bool(const char* key) {
    const Json* value = Find(key);
    if (value != nullptr && value->is_boolean()) return value->get<bool>();
    return Wrong<bool>(key, "is neither true nor false");
  }

  std::string Text(const char* key) {
    const Json* value = Find(key);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    return Wrong<std::string>(key, "is not a string");
  }

  // The one of `values` that `name` gives this name.
  template <typename T, size_t n>
  T OneOf(const char* key, const T (&values)[n], absl::string_view (*name)(T)) {
    const std::string text = Text(key);
    for (const T value : values) {
      if (name(value) == text) return value;
    }
    return Wrong<T>(key, "has an unknown value");
  }

  // An object or array; an empty one if it is wrong.
  const Json& Nested(const char* key, Json::value_t type) {
    static const Json& none = *new Json();
    const Json* value = Find(key);
    if (value != nullptr && value->type() == type) return *value;
    Wrong<int>(key, type == Json::value_t::object ? "is not an object" : "is not an array");
    return none;
  }

 private:
  const Json* Find(const char* key) const {
    if (!object_.is_object()) return nullptr;
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  template <typename T>
  T Wrong(const char* key, absl::string_view what) {
    if (problem_.empty()) {
      problem_ = absl::StrCat("\"", key, "\" ", Find(key) == nullptr ? "is missing" : what);
    }
    return T();
  }

  const Json& object_;
  std::string& problem_;
};

constexpr Purpose kPurposes[] = {Purpose::kParameter, Purpose::kGradient, Purpose::kOptimizer,
                                 Purpose::kControl};

// Takes a file's parts as the parser comes by them, and keeps of each event only what RankTrace
// holds: a file's tree would take many times the memory of its trace.
class TraceReader : public nlohmann::json_sax<Json> {
 public:
  static absl::StatusOr<RankTrace> Read(const std::string& path) {
    absl::StatusOr<MappedFile> file = MappedFile::Open(path);
    if (!file.ok()) return file.status();
    const absl::string_view text = file->contents();
    TraceReader reader(path, text.size());
    if (text.find_first_not_of(" \t\r\n") == absl::string_view::npos) {
      return reader.Invalid("is empty", kTraceAgain);
    }
    if (absl::StartsWith(text, "\x1f\x8b")) {
      return reader.Invalid("is compressed",
                            absl::StrCat("give it the name ", path, ".gz and gunzip it"));
    }
    const bool parsed = Json::sax_parse(text.begin(), text.end(), &reader);
    if (parsed && reader.error_.ok() && !reader.saw_events_) reader.Foreign();
    if (!reader.error_.ok()) return reader.error_;
    return std::move(reader.trace_);
  }

  bool null() override { return Scalar(nullptr); }
  bool boolean(bool value) override { return Scalar(value); }
  bool number_integer(number_integer_t value) override { return Scalar(value); }
  bool number_unsigned(number_unsigned_t value) override { return Scalar(value); }
  bool number_float(number_float_t value, const string_t&) override { return Scalar(value); }
  bool string(string_t& value) override { return Scalar(std::move(value)); }
  bool binary(binary_t&) override { return Foreign(); }  // JSON has none
  bool start_object(std::size_t) override { return Open(Json::value_t::object); }
  bool start_array(std::size_t) override { return Open(Json::value_t::array); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    if (depth_ > 1) {
      key_ = std::move(name);
      return true;
    }
    top_ = name == "dim0"              ? Top::kDim0
           : name == "distributedInfo" ? Top::kDistributedInfo
           : name == "traceEvents"     ? Top::kEvents
                                       : Top::kOther;
    if (name == "schemaVersion") saw_schema_ = true;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    constexpr int kNumberOutOfRange = 406;
    if (error.id == kNumberOutOfRange) {
      return Fail(absl::StrCat("is damaged: a number before byte ", position, " is out of range"),
                  kTraceAgain);
    }
    if (position > size_) return Fail("ends too early", kTraceAgain);
    return Fail(absl::StrCat("is not JSON at byte ", position), kGiveOurs);
  }

 private:
  enum class Top { kOther, kDim0, kDistributedInfo, kEvents };

  TraceReader(const std::string& path, size_t size) : path_(path), size_(size) {}

  absl::Status Invalid(absl::string_view what, absl::string_view advice) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, " ", what, "; ", advice));
  }
  // Both end the parsing.
  bool Fail(absl::string_view what, absl::string_view advice) {
    error_ = Invalid(what, advice);
    return false;
  }
  bool Foreign() {
    if (top_ != Top::kEvents) return Fail("is not a trace of this program", kGiveOurs);
    return Fail(saw_schema_ ? "was written by PyTorch's profiler and not by this program"
                            : "is another program's trace",
                kGiveOurs);
  }
  bool Damaged(absl::string_view where, absl::string_view problem) {
    return Fail(absl::StrCat("is damaged: ", where, ": ", problem), kTraceAgain);
  }

  // Whether a value here is part of one that is looked at.
  bool keeps() const { return top_ == Top::kEvents ? depth_ >= 2 : top_ != Top::kOther; }

  bool Scalar(Json value) {
    if (depth_ == 0 || (depth_ == 1 && top_ == Top::kEvents)) return Foreign();
    if (!keeps()) return true;
    if (open_.empty()) return Whole(value);
    Place(std::move(value));
    return true;
  }

  bool Open(Json::value_t type) {
    if (depth_ == 0) {
      if (type != Json::value_t::object) return Foreign();
    } else if (depth_ == 1 && top_ == Top::kEvents) {
      if (dim0_.is_null()) return Foreign();
      if (type != Json::value_t::array) return Damaged("traceEvents", "it is not an array");
      if (saw_events_) return Damaged("traceEvents", "there are two of it");
      if (!Dim0() || !DistributedInfo()) return false;
      saw_events_ = true;
    } else if (keeps()) {
      // What traces hold is a few deep; what nests without end is not to fill the memory.
      if (open_.size() == 16) return Fail("is too deeply nested for a trace", kGiveOurs);
      open_.push_back(open_.empty() ? &(value_ = Json(type)) : Place(Json(type)));
    }
    ++depth_;
    return true;
  }

  bool Close() {
    --depth_;
    if (open_.empty()) return true;
    open_.pop_back();
    return !open_.empty() || Whole(value_);
  }

  // Adds to the innermost open value. What that holds never moves while a part of it is open.
  Json* Place(Json value) {
    Json& parent = *open_.back();
    if (parent.is_object()) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }

  bool Whole(const Json& value) {
    if (top_ == Top::kEvents) return Event(value);
    (top_ == Top::kDim0 ? dim0_ : distributed_info_) = value;
    return true;
  }

  bool DistributedInfo() {
    std::string problem;
    Members info(distributed_info_, &problem);
    trace_.backend = info.Text("backend");
    trace_.world_size = static_cast<int>(info.Integer("world_size", 1, kMaxSmall));
    trace_.rank = static_cast<int>(info.Integer("rank", 0, std::max(trace_.world_size - 1, 0)));
    return problem.empty() || Damaged("distributedInfo", problem);
  }

  bool Dim0() {
    std::string problem;
    Members info(dim0_, &problem);
    const int64_t format = info.Integer("format");
    if (problem.empty() && format != kFormat) {
      return Fail(absl::StrCat("has trace format ", format, " and this program reads ", kFormat),
                  "read it with the version of the program that wrote it");
    }
    trace_.model = info.Text("model");
    trace_.parameters = info.Integer("parameters");
    trace_.metrics = info.Text("metrics");
    trace_.cut_short = info.Bool("cut_short");
    for (const auto& [flag, value] : info.Nested("flags", Json::value_t::object).items()) {
      if (!value.is_string()) return Damaged("dim0", "a flag is not a string");
      trace_.flags[flag] = value.get<std::string>();
    }
    for (const Json& listed : info.Nested("streams", Json::value_t::array)) {
      Members stream(listed, &problem);
      TraceStream& added = trace_.streams.emplace_back();
      added.name = stream.Text("name");
      added.number = static_cast<int>(stream.Integer("number", kHostRow + 1, kMaxSmall));
      if (!stream_.emplace(added.number, trace_.streams.size() - 1).second && problem.empty()) {
        problem = absl::StrCat("two streams have number ", added.number);
      }
    }
    return problem.empty() || Damaged("dim0", problem);
  }

  bool Event(const Json& value) {
    ++events_;
    std::string problem;
    Members event(value, &problem);
    const std::string phase = event.Text("ph");
    const bool spans = phase == "X";
    const std::string category = spans ? event.Text("cat") : "";
    if (phase == "C") {
      Memory(event, &problem);
    } else if (category == "kernel") {
      Op(event, &problem);
    } else if (category == "wait") {
      Wait(event, &problem);
    } else if (category == "user_annotation" && event.Has("args")) {
      Step(event, &problem);
    }
    return problem.empty() || Damaged(absl::StrCat("event ", events_), problem);
  }

  static void Span(Members& event, int64_t* begin, int64_t* end) {
    *begin = event.Integer("ts");
    *end = *begin + event.Integer("dur");
  }

  static void CheckOrder(int64_t end, int64_t next, std::string* problem) {
    if (next < end && problem->empty()) *problem = "it begins before the one ahead of it ends";
  }

  // Null, with *problem set, if the file names no such stream.
  TraceStream* StreamOf(int64_t number, std::string* problem) {
    const auto found = stream_.find(number);
    if (found != stream_.end()) return &trace_.streams[found->second];
    if (problem->empty()) *problem = absl::StrCat("there is no stream ", number);
    return nullptr;
  }

  void Memory(Members& event, std::string* problem) {
    Members args(event.Nested("args", Json::value_t::object), problem);
    TraceMemory memory;
    memory.time = event.Integer("ts");
    for (int i = 0; i < kNumMemoryPurposes; ++i) {
      memory.bytes[i] = args.Integer(std::string(Name(static_cast<MemoryPurpose>(i))).c_str());
    }
    if (!trace_.memory.empty()) CheckOrder(trace_.memory.back().time, memory.time, problem);
    trace_.memory.push_back(memory);
  }

  void Step(Members& event, std::string* problem) {
    TraceStep step;
    Members args(event.Nested("args", Json::value_t::object), problem);
    step.step = args.Integer("step");
    if (args.Has("loss")) step.loss = args.Real("loss");
    Span(event, &step.begin, &step.end);
    if (!trace_.steps.empty()) {
      CheckOrder(trace_.steps.back().end, step.begin, problem);
      if (step.step <= trace_.steps.back().step && problem->empty()) {
        *problem = "steps do not ascend";
      }
    }
    trace_.steps.push_back(step);
  }

  void Wait(Members& event, std::string* problem) {
    Members args(event.Nested("args", Json::value_t::object), problem);
    TraceWait wait;
    Span(event, &wait.begin, &wait.end);
    wait.cause = args.Integer("cause");
    wait.stream = args.Text("cause stream");
    TraceStream* stream = StreamOf(event.Integer("tid"), problem);
    if (stream == nullptr) return;
    if (!stream->waits.empty()) CheckOrder(stream->waits.back().end, wait.begin, problem);
    stream->waits.push_back(std::move(wait));
  }

  void Op(Members& event, std::string* problem) {
    Members args(event.Nested("args", Json::value_t::object), problem);
    TraceOp op;
    op.kind = args.OneOf("kind", kOpKinds, KindName);
    op.name = op.communicates() ? args.Text("op") : event.Text("name");
    op.unit = args.Text("unit");
    op.phase = args.Text("phase");
    op.id = args.Integer("correlation", 1);
    op.step = args.Integer("step");
    op.enqueued = args.Integer("enqueued");
    Span(event, &op.begin, &op.end);
    op.flops = args.Number("flops");
    op.bytes = args.Number("bytes");
    if (args.Has("failed")) op.failed = args.Bool("failed");
    if (args.Has("Collective name")) {
      TraceCollective& call = op.collective.emplace();
      call.operation = args.Text("Collective name");
      call.channel = args.Text("Process Group Name");
      call.purpose = args.OneOf<Purpose>("purpose", kPurposes, Name);
      call.dtype = args.OneOf("dtype", kDTypes, DTypeName);
      call.sequence = args.Integer("Seq");
      call.in_elements = args.Integer("In msg nelems");
      call.out_elements = args.Integer("Out msg nelems");
      call.bytes_sent = args.Integer("bytes sent");
      call.met = args.Integer("met");
    }
    TraceStream* stream = StreamOf(args.Integer("stream"), problem);
    if (stream == nullptr) return;
    if (!stream->ops.empty()) CheckOrder(stream->ops.back().end, op.begin, problem);
    stream->ops.push_back(std::move(op));
  }

  const std::string& path_;
  const size_t size_;
  RankTrace trace_;
  std::map<int64_t, size_t> stream_;  // by number: index in trace_.streams
  absl::Status error_;
  int64_t events_ = 0;

  int depth_ = 0;          // of open objects and arrays
  Top top_ = Top::kOther;  // the outermost object's key
  bool saw_schema_ = false, saw_events_ = false;
  Json dim0_, distributed_info_;
  Json value_;               // the event or the like that is being read
  std::vector<Json*> open_;  // its open objects and arrays, outermost first
  std::string key_;          // the innermost object's
};

// What differs between the ranks of one run shows that they are not.
absl::string_view Difference(const RankTrace& a, const RankTrace& b) {
  if (a.world_size != b.world_size) return "numbers of ranks";
  if (a.model != b.model || a.parameters != b.parameters) return "models";
  if (a.flags != b.flags) return "flags";
  if (a.cut_short || b.cut_short) return "";
  const auto same_step = [](const TraceStep& x, const TraceStep& y) { return x.step == y.step; };
  if (!std::equal(a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(), same_step)) {
    return "steps";
  }
  return "";
}

// Leaves the steps that all ranks have whole.
void KeepCommonSteps(std::vector<RankTrace>& traces) {
  std::map<int64_t, size_t> ranks_with;
  for (const RankTrace& trace : traces) {
    for (const TraceStep& step : trace.steps) ++ranks_with[step.step];
  }
  for (RankTrace& trace : traces) {
    std::erase_if(trace.steps,
                  [&](const TraceStep& step) { return ranks_with[step.step] < traces.size(); });
  }
}

// What runs that were killed while they wrote a trace left in `dir`: AtomicFileWriter's
// temporaries.
void RemoveTemporaries(const std::string& dir) {
  std::vector<fs::path> found;
  std::error_code error;
  fs::directory_iterator entry(dir, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
    int64_t process, count;
    if (parts.size() == 6 && parts[0].empty() &&
        RankOfTraceFile(absl::StrCat(parts[1], ".", parts[2])) && parts[3] == "tmp" &&
        absl::SimpleAtoi(parts[4], &process) && absl::SimpleAtoi(parts[5], &count)) {
      found.push_back(entry->path());
    }
  }
  // One that cannot be removed does no harm.
  for (const fs::path& path : found) fs::remove(path, error);
}

// Whether `dir` has the trace of a rank, compressed.
bool HasCompressed(const std::string& dir, int rank) {
  std::error_code error;
  return fs::is_regular_file(fs::path(dir) / absl::StrCat(TraceFileName(rank), ".gz"), error);
}

}  // namespace

absl::Status PrepareTraceDir(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  if (fs::is_directory(dir, error)) {
    DIM0_ASSIGN_OR_RETURN(const std::vector<int> ranks, TracedRanksIn(dir));
    for (const int rank : ranks) names.push_back(TraceFileName(rank));
    RemoveTemporaries(dir);
  }
  return MoveAside(dir, names, "--trace").status();
}

absl::Status WriteTrace(const std::string& dir, const RankTrace& trace) {
  DIM0_ASSIGN_OR_RETURN(
      AtomicFileWriter file,
      AtomicFileWriter::Create((fs::path(dir) / TraceFileName(trace.rank)).string()));
  DIM0_RETURN_IF_ERROR(TraceWriter(trace, &file).Write());
  return file.Commit();
}

std::string TraceDirOf(const std::string& dir) {
  std::error_code error;
  const fs::path inner = fs::path(dir) / "trace";
  if (!fs::is_directory(inner, error)) return dir;
  const auto ranks = TracedRanksIn(dir);
  return ranks.ok() && ranks->empty() ? inner.string() : dir;
}

absl::StatusOr<std::vector<RankTrace>> ReadTraces(const std::string& dir) {
  std::error_code error;
  if (!fs::exists(dir, error)) {
    if (error) {
      return absl::UnavailableError(absl::StrCat("cannot read ", dir, ": ", error.message()));
    }
    return absl::NotFoundError(absl::StrCat("there is no folder ", dir, "; ", kGiveOurs));
  }
  if (!fs::is_directory(dir, error)) {
    return absl::InvalidArgumentError(absl::StrCat(dir, " is not a folder; ", kGiveOurs));
  }
  const std::string folder = TraceDirOf(dir);
  DIM0_ASSIGN_OR_RETURN(const std::vector<int> ranks, TracedRanksIn(folder));
  if (ranks.empty()) {
    if (HasCompressed(folder, 0)) {
      return absl::NotFoundError(absl::StrCat("the traces in ", folder,
                                              " (rank0.json.gz, ...) are compressed; gunzip them"));
    }
    return absl::NotFoundError(
        absl::StrCat("there is no trace (rank0.json, ...) in ", folder, "; ", kGiveOurs));
  }
  std::vector<RankTrace> traces;
  std::string first;
  for (const int rank : ranks) {
    const std::string path = (fs::path(folder) / TraceFileName(rank)).string();
    DIM0_ASSIGN_OR_RETURN(RankTrace trace, TraceReader::Read(path));
    if (trace.rank != rank) {
      return absl::InvalidArgumentError(absl::StrCat(path, " is the trace of rank ", trace.rank,
                                                     "; give it its name back, ",
                                                     TraceFileName(trace.rank)));
    }
    if (traces.empty()) {
      first = path;
    } else if (const auto difference = Difference(traces.front(), trace); !difference.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(first, " and ", path,
                                                     " are of different runs: their ", difference,
                                                     " differ; keep each run's files in a folder "
                                                     "of its own"));
    }
    traces.push_back(std::move(trace));
  }
  for (int rank = 0; rank < traces.front().world_size; ++rank) {
    if (static_cast<size_t>(rank) < ranks.size() && ranks[rank] == rank) continue;
    const std::string path = (fs::path(folder) / TraceFileName(rank)).string();
    return absl::NotFoundError(absl::StrCat(
        path, " is missing: the run had ", traces.front().world_size, " ranks; ",
        HasCompressed(folder, rank) ? absl::StrCat("gunzip ", path, ".gz") : "copy it there"));
  }
  KeepCommonSteps(traces);
  return traces;
}

}  // namespace dim0
