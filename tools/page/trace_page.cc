#include "tools/page/trace_page.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "tools/page/page_files.h"

namespace dim0 {
namespace {

using Json = nlohmann::json;

// Ops, waits and changes of memory that a page holds, of all runs together: at about 20 bytes each,
// what a browser still opens at once.
constexpr int64_t kMaxItems = 500'000;
// Points of one loss curve: several for every pixel of a wide screen.
constexpr size_t kMaxPoints = 20'000;

// A table in which equal values are stored once and named by their position.
template <typename Key>
class Table {
 public:
  template <typename MakeJson>
  int Index(const Key& key, MakeJson make_json) {
    const auto [it, is_new] = index_.try_emplace(key, static_cast<int>(values_.size()));
    if (is_new) values_.push_back(make_json());
    return it->second;
  }
  Json Take() { return std::move(values_); }

 private:
  std::map<Key, int> index_;
  Json values_ = Json::array();
};

// Strings, and what ops of different steps have in common.
class Tables {
 public:
  int String(const std::string& text) {
    return strings_.Index(text, [&] { return Json(text); });
  }

  // [name, kind, unit, phase, flops, bytes, failed] and of a collective also [operation, channel,
  // purpose, dtype, in elements, out elements, bytes sent].
  int Op(const TraceOp& op) {
    const int name = String(op.name), unit = String(op.unit), phase = String(op.phase);
    Collective collective{};
    if (op.collective) {
      const TraceCollective& c = *op.collective;
      collective = {String(c.operation),
                    String(c.channel),
                    static_cast<int>(c.purpose),
                    String(std::string(Name(c.dtype))),
                    c.in_elements,
                    c.out_elements,
                    c.bytes_sent};
    }
    const OpKey key{name,      static_cast<int>(op.kind), unit,      phase, op.flops, op.bytes,
                    op.failed, op.collective.has_value(), collective};
    return ops_.Index(key, [&] {
      Json json = {name, static_cast<int>(op.kind), unit, phase, op.flops, op.bytes, op.failed};
      if (op.collective) {
        std::apply([&](auto... value) { (json.push_back(value), ...); }, collective);
      }
      return json;
    });
  }

  Json TakeStrings() { return strings_.Take(); }
  Json TakeOps() { return ops_.Take(); }

 private:
  using Collective = std::tuple<int, int, int, int, int64_t, int64_t, int64_t>;
  using OpKey = std::tuple<int, int, int, int, double, double, bool, bool, Collective>;
  Table<std::string> strings_;
  Table<OpKey> ops_;
};

// How many items `trace` has up to the end of its first `steps` steps.
int64_t CountItems(const RankTrace& trace, size_t steps) {
  const TraceStep& last = trace.steps[steps - 1];
  int64_t items = 0;
  for (const TraceStream& stream : trace.streams) {
    items += std::count_if(stream.ops.begin(), stream.ops.end(),
                           [&](const TraceOp& op) { return op.step <= last.step; });
    items += std::count_if(stream.waits.begin(), stream.waits.end(),
                           [&](const TraceWait& wait) { return wait.begin < last.end; });
  }
  items += std::count_if(trace.memory.begin(), trace.memory.end(),
                         [&](const TraceMemory& memory) { return memory.time < last.end; });
  return items;
}

// How many steps of every run are shown: all, or the first that fit, but at least one.
size_t ShownSteps(absl::Span<const TracedRun> runs) {
  const auto fits = [&](size_t steps) {
    int64_t items = 0;
    for (const TracedRun& run : runs) {
      for (const RankTrace& trace : run.ranks) {
        items += CountItems(trace, std::min(steps, trace.steps.size()));
      }
    }
    return items <= kMaxItems;
  };
  size_t most = 1;
  for (const TracedRun& run : runs) {
    for (const RankTrace& trace : run.ranks) most = std::max(most, trace.steps.size());
  }
  // The greatest number in [1, most] that fits; 1 if none does.
  size_t low = 1, high = most;
  while (low < high) {
    const size_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Times in arrays are microseconds, each relative to the one before it: small numbers are short.
class Clock {
 public:
  explicit Clock(int64_t origin) : last_(origin) {}
  int64_t Since(int64_t time) { return time - std::exchange(last_, time); }

 private:
  int64_t last_;
};

Json StreamJson(const TraceStream& stream, const TraceStep& last, int64_t origin,
                const std::unordered_map<int64_t, int64_t>& position_of_id, Tables& tables) {
  // Four numbers an op: [what it is, begin since the previous end, duration, step since the
  // previous op's]; of each op with a collective, in order: [met since begin, sequence].
  Json ops = Json::array(), collectives = Json::array();
  Clock clock(origin);
  int64_t step = 0;
  for (const TraceOp& op : stream.ops) {
    if (op.step > last.step) continue;
    ops.push_back(tables.Op(op));
    ops.push_back(clock.Since(op.begin));
    ops.push_back(clock.Since(op.end));
    ops.push_back(op.step - std::exchange(step, op.step));
    if (op.collective) {
      collectives.push_back(op.collective->met - op.begin);
      collectives.push_back(op.collective->sequence);
    }
  }
  // Three numbers a wait: [begin since the previous end, duration, cause]: the cause's position
  // among the rank's ops, or -1 - (its stream's name) if it is not on the page.
  Json waits = Json::array();
  Clock wait_clock(origin);
  for (const TraceWait& wait : stream.waits) {
    if (wait.begin >= last.end) continue;
    waits.push_back(wait_clock.Since(wait.begin));
    waits.push_back(wait_clock.Since(wait.end));
    const auto cause = position_of_id.find(wait.cause);
    waits.push_back(cause != position_of_id.end() ? cause->second
                                                  : -1 - tables.String(wait.stream));
  }
  return {{"name", tables.String(stream.name)},
          {"number", stream.number},
          {"ops", std::move(ops)},
          {"collectives", std::move(collectives)},
          {"waits", std::move(waits)}};
}

Json RankJson(const RankTrace& trace, size_t shown_steps, int64_t origin, Tables& tables) {
  const size_t num_steps = std::min(shown_steps, trace.steps.size());
  const TraceStep& last = trace.steps[num_steps - 1];

  std::unordered_map<int64_t, int64_t> position_of_id;
  for (const TraceStream& stream : trace.streams) {
    for (const TraceOp& op : stream.ops) {
      if (op.step <= last.step) position_of_id.emplace(op.id, position_of_id.size());
    }
  }
  Json streams = Json::array();
  for (const TraceStream& stream : trace.streams) {
    streams.push_back(StreamJson(stream, last, origin, position_of_id, tables));
  }

  // Three numbers a step: [number, begin since the previous end, duration].
  Json steps = Json::array();
  Clock step_clock(origin);
  for (size_t i = 0; i < num_steps; ++i) {
    steps.push_back(trace.steps[i].step);
    steps.push_back(step_clock.Since(trace.steps[i].begin));
    steps.push_back(step_clock.Since(trace.steps[i].end));
  }

  // Three numbers a change: [time since the previous change, purpose, bytes more].
  Json memory = Json::array();
  Clock memory_clock(origin);
  std::array<int64_t, kNumMemoryPurposes> bytes{};
  for (const TraceMemory& sample : trace.memory) {
    if (sample.time >= last.end) break;
    for (int purpose = 0; purpose < kNumMemoryPurposes; ++purpose) {
      const int64_t change =
          sample.bytes[purpose] - std::exchange(bytes[purpose], sample.bytes[purpose]);
      if (change == 0) continue;
      memory.push_back(memory_clock.Since(sample.time));
      memory.push_back(purpose);
      memory.push_back(change);
    }
  }
  return {{"rank", trace.rank},
          {"streams", std::move(streams)},
          {"steps", std::move(steps)},
          {"memory", std::move(memory)}};
}

Json OverlapJson(const Overlap& overlap) {
  return {{"communication", overlap.communication},
          {"hidden", overlap.hidden},
          {"waiting", overlap.waiting},
          {"bytes", overlap.bytes},
          {"calls", overlap.calls},
          {"bandwidth", overlap.bandwidth}};
}

Json RankReportJson(const RankReport& report) {
  Json overlap = Json::array();
  for (const Overlap& purpose : report.overlap) overlap.push_back(OverlapJson(purpose));
  return {{"rank", report.rank},
          {"step", report.step},
          {"compute", report.split.compute},
          {"optimizerCompute", report.split.optimizer_compute},
          {"exposed", report.split.exposed},
          {"idle", report.split.idle},
          {"overlap", std::move(overlap)},
          {"all", OverlapJson(report.all)}};
}

Json ReportJson(const TraceReport& report) {
  Json ranks = Json::array(), exposed = Json::array();
  for (const RankReport& rank : report.ranks) ranks.push_back(RankReportJson(rank));
  for (const ExposedOp& op : report.most_exposed) {
    exposed.push_back({{"name", op.name},
                       {"unit", op.unit},
                       {"phase", op.phase},
                       {"purpose", static_cast<int>(op.purpose)},
                       {"rank", op.rank},
                       {"exposed", op.exposed},
                       {"duration", op.duration},
                       {"reason", op.reason}});
  }
  return {{"firstStep", report.first_step},
          {"lastStep", report.last_step},
          {"steps", report.steps},
          {"ranks", std::move(ranks)},
          {"mean", RankReportJson(report.mean)},
          {"mostExposed", std::move(exposed)},
          {"slowestRank", report.slowest_rank},
          {"slowestBy", report.slowest_by},
          {"nextSlowestBy", report.next_slowest_by}};
}

// Two arrays, steps and values. Of a long run every k-th point, and the last.
Json CurveJson(absl::Span<const std::pair<int64_t, double>> points) {
  const size_t stride = points.size() / kMaxPoints + 1;
  Json steps = Json::array(), values = Json::array();
  for (size_t i = 0; i < points.size(); ++i) {
    if (i % stride != 0 && i + 1 != points.size()) continue;
    steps.push_back(points[i].first);
    values.push_back(points[i].second);
  }
  return {{"steps", std::move(steps)}, {"values", std::move(values)}, {"every", stride}};
}

Json RunJson(const TracedRun& run, size_t shown_steps, Tables& tables) {
  int64_t origin = run.ranks[0].steps[0].begin;
  bool cut_short = false;
  for (const RankTrace& trace : run.ranks) {
    origin = std::min(origin, trace.steps[0].begin);
    cut_short = cut_short || trace.cut_short;
  }
  Json ranks = Json::array();
  for (const RankTrace& trace : run.ranks) {
    ranks.push_back(RankJson(trace, shown_steps, origin, tables));
  }
  const RankTrace& first = run.ranks[0];
  return {{"label", run.label},
          {"flags", first.flags},
          {"parameters", first.parameters},
          {"worldSize", first.world_size},
          {"cutShort", cut_short},
          {"shownSteps", std::min(shown_steps, first.steps.size())},
          {"report", ReportJson(run.report)},
          {"ranks", std::move(ranks)},
          {"losses", CurveJson(run.losses)},
          {"validationLosses", CurveJson(run.validation_losses)}};
}

}  // namespace

std::string TracePage(absl::Span<const TracedRun> runs) {
  const size_t shown_steps = ShownSteps(runs);
  Tables tables;
  Json json_runs = Json::array();
  for (const TracedRun& run : runs) json_runs.push_back(RunJson(run, shown_steps, tables));
  Json memory_purposes = Json::array();
  for (int purpose = 0; purpose < kNumMemoryPurposes; ++purpose) {
    memory_purposes.push_back(std::string(Name(static_cast<MemoryPurpose>(purpose))));
  }
  const Json data = {{"strings", tables.TakeStrings()},
                     {"ops", tables.TakeOps()},
                     {"memoryPurposes", std::move(memory_purposes)},
                     {"runs", std::move(json_runs)}};
  // Nothing in the data may end the script element that it stands in, or change how HTML reads it.
  // In JSON "<" stands only within strings, where it may be written so.
  const std::string text =
      absl::StrReplaceAll(data.dump(/*indent=*/-1, /*indent_char=*/' ', /*ensure_ascii=*/false,
                                    Json::error_handler_t::replace),
                          {{"<", "\\u003c"}});
  return absl::StrReplaceAll(
      page_files::kHtml,
      {{"@STYLE@", page_files::kCss}, {"@DATA@", text}, {"@SCRIPT@", page_files::kScript}});
}

bool IsTracePage(absl::string_view contents) {
  // The part of the page that names this program.
  const absl::string_view page = page_files::kHtml;
  return absl::StartsWith(contents, page.substr(0, page.find("<meta name=\"viewport\"")));
}

}  // namespace dim0
