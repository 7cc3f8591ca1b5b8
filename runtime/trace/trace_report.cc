#include "runtime/trace/trace_report.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "runtime/trace/report_words.h"

namespace dim0 {
namespace {

constexpr int kAll = kNumPurposes;  // index of what concerns all purposes together
constexpr size_t kMostExposed = 5;

int Index(Purpose purpose) { return static_cast<int>(purpose); }

double Milliseconds(int64_t microseconds, int64_t steps) {
  return static_cast<double>(microseconds) / 1000 / static_cast<double>(steps);
}

std::string LabelOf(const TraceOp& op) { return Label(op.name, op.unit); }

// Sums of counts from a file may exceed their type.
int64_t Rounded(double value) {
  constexpr double kLimit = 9e18;
  return std::llround(std::clamp(value, -kLimit, kLimit));
}

// One rank's time with its steps laid end to end: what lies between them has no length.
class StepClock {
 public:
  explicit StepClock(const std::vector<TraceStep>& steps) {
    for (const TraceStep& step : steps) {
      windows_.push_back({Clamped(step.begin), Clamped(step.end), 0});
    }
    std::sort(windows_.begin(), windows_.end(),
              [](const Window& a, const Window& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (Window& window : windows_) {
      window.begin = std::max(window.begin, end);
      window.end = std::max(window.end, window.begin);
      window.before = length_;
      length_ += window.end - window.begin;
      end = window.end;
    }
  }

  int64_t length() const { return length_; }

  // How much of the steps had passed by `time`.
  int64_t At(int64_t time) const {
    const Window* window = Find(time);
    if (window == nullptr) return 0;
    return window->before + (std::min(time, window->end) - window->begin);
  }

  bool Covers(int64_t time) const {
    const Window* window = Find(time);
    return window != nullptr && time <= window->end;
  }

  // The end of the step that `time` is in, or of the last one before it.
  int64_t StepEnd(int64_t time) const {
    const Window* window = Find(time);
    return window == nullptr ? 0 : window->end;
  }

 private:
  struct Window {
    int64_t begin, end;
    int64_t before;  // the length of all earlier ones
  };

  // Differences of such times do not overflow.
  static int64_t Clamped(int64_t time) { return std::clamp(time, int64_t{0}, int64_t{1} << 62); }

  const Window* Find(int64_t time) const {
    const auto after =
        std::upper_bound(windows_.begin(), windows_.end(), time,
                         [](int64_t t, const Window& window) { return t < window.begin; });
    return after == windows_.begin() ? nullptr : &*std::prev(after);
  }

  std::vector<Window> windows_;
  int64_t length_ = 0;
};

// Merged intervals, and how much of them lies before a time.
class IntervalUnion {
 public:
  explicit IntervalUnion(std::vector<std::pair<int64_t, int64_t>> intervals) {
    std::sort(intervals.begin(), intervals.end());
    for (const auto& [begin, end] : intervals) {
      if (begin >= end) continue;
      if (!merged_.empty() && begin <= merged_.back().end) {
        merged_.back().end = std::max(merged_.back().end, end);
      } else {
        const int64_t before =
            merged_.empty() ? 0
                            : merged_.back().before + (merged_.back().end - merged_.back().begin);
        merged_.push_back({begin, end, before});
      }
    }
  }

  int64_t Before(int64_t time) const {
    const auto after = std::upper_bound(merged_.begin(), merged_.end(), time,
                                        [](int64_t t, const Part& part) { return t < part.begin; });
    if (after == merged_.begin()) return 0;
    const Part& part = *std::prev(after);
    return part.before + (std::min(time, part.end) - part.begin);
  }

  int64_t length() const {
    return merged_.empty() ? 0 : merged_.back().before + merged_.back().end - merged_.back().begin;
  }

  // The part of [begin, end) that is outside.
  int64_t Outside(int64_t begin, int64_t end) const {
    return begin < end ? end - begin - (Before(end) - Before(begin)) : 0;
  }

 private:
  struct Part {
    int64_t begin, end;
    int64_t before;
  };
  std::vector<Part> merged_;
};

// Where in a RankTrace an op is.
struct OpPlace {
  int stream = 0;
  int index = 0;
  bool operator==(const OpPlace&) const = default;
};

// An op that communicates, in its rank's step time.
struct Communication {
  OpPlace place;
  Purpose purpose = Purpose::kControl;
  int64_t begin = 0, met = 0, end = 0;
  int64_t exposed = 0;
  int last_rank = -1;  // index of the rank that arrived last, if that is known
};

struct RankSums {
  int64_t compute = 0, optimizer_compute = 0, idle = 0;  // microseconds
  std::array<int64_t, kNumPurposes> exposed{};
  // By purpose, and of all.
  std::array<int64_t, kNumPurposes + 1> communication{}, hidden{}, waiting{}, moving{};
  std::array<double, kNumPurposes + 1> bytes{}, calls{};
  std::array<double, kNumPurposes + 1> moved{};  // the bytes that moved within `moving`
};

// What let an op begin no earlier than it did.
struct Binding {
  enum class Kind { kUnknown, kEnqueued, kQueued, kWaited };
  Kind kind = Kind::kUnknown;
  std::optional<OpPlace> op;  // that it queued behind or waited for, if traced
  absl::string_view stream;   // kWaited: of what it waited for
};

// Weights by text: which of several explanations covers the most time.
class Votes {
 public:
  void Add(const std::string& text, int64_t weight) {
    if (weight > 0) weights_[text] += static_cast<double>(weight);
  }
  // The heaviest; "" if there is none.
  std::pair<std::string, double> Winner() const {
    std::pair<std::string, double> winner;
    for (const auto& [text, weight] : weights_) {
      if (weight > winner.second) winner = {text, weight};
    }
    return winner;
  }

 private:
  std::map<std::string, double> weights_;
};

// One rank's trace with the orders and sums that questions about it need.
class RankAnalysis {
 public:
  explicit RankAnalysis(const RankTrace& trace)
      : trace_(trace), clock_(trace.steps), computation_(Computation()) {
    for (int s = 0; s < static_cast<int>(trace_.streams.size()); ++s) {
      const TraceStream& stream = trace_.streams[s];
      Orders& orders = orders_.emplace_back();
      for (int i = 0; i < static_cast<int>(stream.ops.size()); ++i) {
        const TraceOp& op = stream.ops[i];
        by_id_.try_emplace(op.id, OpPlace{s, i});
        orders.ops.push_back(i);
        if (op.kind == OpKind::kCompute) orders.busy += Length(op);
        if (op.communicates()) AddCommunication({s, i});
      }
      std::stable_sort(orders.ops.begin(), orders.ops.end(),
                       [&](int a, int b) { return stream.ops[a].begin < stream.ops[b].begin; });
      orders.position.resize(orders.ops.size());
      for (size_t i = 0; i < orders.ops.size(); ++i) orders.position[orders.ops[i]] = i;
      orders.waits = Disjoint(stream.waits);
    }
    // The reduce_scatter stream has small compute ops too.
    for (int s = 0; s < static_cast<int>(orders_.size()); ++s) {
      if (orders_[s].busy > 0 &&
          (compute_stream_ < 0 || orders_[s].busy > orders_[compute_stream_].busy)) {
        compute_stream_ = s;
      }
    }
    Sweep();
  }

  const RankTrace& trace() const { return trace_; }
  const StepClock& clock() const { return clock_; }
  const RankSums& sums() const { return sums_; }
  std::vector<Communication>& communications() { return communications_; }
  const TraceOp& op(OpPlace place) const { return trace_.streams[place.stream].ops[place.index]; }

  // ExposedOp::reason of a group of this rank's communications, the longest exposed first.
  std::string Reason(absl::Span<const Communication* const> group,
                     absl::Span<const RankAnalysis> ranks) const;

 private:
  struct Wait {
    int64_t begin, end;
    const TraceWait* wait;
  };

  // Of one stream.
  struct Orders {
    std::vector<int> ops;       // by begin
    std::vector<int> position;  // of each op in `ops`
    std::vector<Wait> waits;    // those that took time, ascending, disjoint
    double busy = 0;            // microseconds of kCompute
  };

  static std::vector<Wait> Disjoint(const std::vector<TraceWait>& waits) {
    std::vector<Wait> sorted;
    for (const TraceWait& wait : waits) sorted.push_back({wait.begin, wait.end, &wait});
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const Wait& a, const Wait& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (Wait& wait : sorted) {
      wait.begin = std::max(wait.begin, end);
      end = std::max(end, wait.end);
    }
    std::erase_if(sorted, [](const Wait& wait) { return wait.begin >= wait.end; });
    return sorted;
  }

  // The first wait on the stream that ends after `time`.
  static std::vector<Wait>::const_iterator WaitAfter(const Orders& orders, int64_t time) {
    return std::upper_bound(orders.waits.begin(), orders.waits.end(), time,
                            [](int64_t t, const Wait& wait) { return t < wait.end; });
  }

  // Null if it was not traced.
  const OpPlace* Find(int64_t id) const {
    const auto found = by_id_.find(id);
    return id == 0 || found == by_id_.end() ? nullptr : &found->second;
  }

  double Length(const TraceOp& op) const {
    return static_cast<double>(std::max<int64_t>(0, clock_.At(op.end) - clock_.At(op.begin)));
  }

  std::vector<std::pair<int64_t, int64_t>> Computation() const {
    std::vector<std::pair<int64_t, int64_t>> intervals;
    for (const TraceStream& stream : trace_.streams) {
      for (const TraceOp& op : stream.ops) {
        if (!op.communicates()) intervals.emplace_back(clock_.At(op.begin), clock_.At(op.end));
      }
    }
    return intervals;
  }

  void AddCommunication(OpPlace place) {
    const TraceOp& op = this->op(place);
    Communication& added = communications_.emplace_back();
    added.place = place;
    added.begin = clock_.At(op.begin);
    added.end = std::max(added.begin, clock_.At(op.end));
    added.met = added.begin;
    if (op.collective) {
      added.purpose = op.collective->purpose;
      added.met = std::clamp(clock_.At(op.collective->met), added.begin, added.end);
    }
    added.exposed = computation_.Outside(added.begin, added.end);
  }

  void Sweep();
  Binding BindingOf(OpPlace place) const;
  bool WaitedThrough(OpPlace from, OpPlace target) const;
  std::string WhatComputeDid(absl::Span<const Communication* const> group) const;
  std::string WhatMadeItLate(absl::Span<const Communication* const> group) const;

  const RankTrace& trace_;
  const StepClock clock_;
  const IntervalUnion computation_;
  std::vector<Communication> communications_;
  std::vector<Orders> orders_;  // by stream
  absl::flat_hash_map<int64_t, OpPlace> by_id_;
  int compute_stream_ = -1;  // that ran the model longest
  RankSums sums_;
};

// From edge to edge of the ops' intervals, with the number of ops that are in each state.
void RankAnalysis::Sweep() {
  enum Lane : int {
    kCompute,
    kOptimizer,
    kRunning,  // by purpose, as the next two
    kWaiting = kRunning + kNumPurposes,
    kMoving = kWaiting + kNumPurposes,
    kLanes = kMoving + kNumPurposes,
  };
  struct Edge {
    int64_t time;
    int lane, change;
  };
  std::vector<Edge> edges;
  const auto add = [&](int lane, int64_t begin, int64_t end) {
    if (begin >= end) return;
    edges.push_back({begin, lane, 1});
    edges.push_back({end, lane, -1});
  };
  for (const TraceStream& stream : trace_.streams) {
    for (const TraceOp& op : stream.ops) {
      if (op.communicates()) continue;
      add(op.kind == OpKind::kOptimizer ? kOptimizer : kCompute, clock_.At(op.begin),
          clock_.At(op.end));
    }
  }
  for (const Communication& communication : communications_) {
    const int purpose = Index(communication.purpose);
    add(kRunning + purpose, communication.begin, communication.end);
    const TraceOp& op = this->op(communication.place);
    if (!op.collective) continue;
    add(kWaiting + purpose, communication.begin, communication.met);
    add(kMoving + purpose, communication.met, communication.end);
    const auto bytes = static_cast<double>(op.collective->bytes_sent);
    const bool counts = clock_.Covers(op.enqueued);
    const int64_t moving = communication.end - communication.met;
    // Of an op that the steps cut, as many bytes as time.
    const double whole =
        std::max(static_cast<double>(op.end) - std::max<double>(op.begin, op.collective->met), 1.0);
    const double moved = bytes * std::min(1.0, static_cast<double>(moving) / whole);
    for (const int i : {purpose, kAll}) {
      sums_.bytes[i] += counts ? bytes : 0;
      sums_.calls[i] += counts ? 1 : 0;
      sums_.moved[i] += moving > 0 ? moved : 0;
    }
  }
  std::sort(edges.begin(), edges.end(),
            [](const Edge& a, const Edge& b) { return a.time < b.time; });

  std::array<int, kLanes> active{};
  int64_t now = 0;
  const auto pass = [&](int64_t until) {
    const int64_t length = until - now;
    now = until;
    if (length == 0) return;
    const bool computes = active[kCompute] > 0 || active[kOptimizer] > 0;
    bool running = false, waiting = false, moving = false;
    int first = -1;
    const auto count = [&](int i, bool runs, bool waits, bool moves) {
      if (runs) sums_.communication[i] += length;
      if (runs && computes) sums_.hidden[i] += length;
      if (waits && !moves) sums_.waiting[i] += length;
      if (moves) sums_.moving[i] += length;
    };
    for (int p = 0; p < kNumPurposes; ++p) {
      const bool runs = active[kRunning + p] > 0;
      const bool waits = active[kWaiting + p] > 0;
      const bool moves = active[kMoving + p] > 0;
      count(p, runs, waits, moves);
      running |= runs;
      waiting |= waits;
      moving |= moves;
      if (runs && first < 0) first = p;
    }
    count(kAll, running, waiting, moving);
    if (active[kCompute] > 0) {
      sums_.compute += length;
    } else if (active[kOptimizer] > 0) {
      sums_.optimizer_compute += length;
    } else if (first >= 0) {
      sums_.exposed[first] += length;
    } else {
      sums_.idle += length;
    }
  };
  for (const Edge& edge : edges) {
    pass(edge.time);
    active[edge.lane] += edge.change;
  }
  pass(clock_.length());
}

Binding RankAnalysis::BindingOf(OpPlace place) const {
  const Orders& orders = orders_[place.stream];
  const TraceOp& op = this->op(place);
  // An op begins when the last of these has happened, give or take a thread's waking up.
  int64_t at = op.enqueued;
  Binding binding = {.kind = Binding::Kind::kEnqueued};
  if (const int position = orders.position[place.index]; position > 0) {
    const OpPlace previous = {place.stream, orders.ops[position - 1]};
    if (this->op(previous).end >= at) {
      at = this->op(previous).end;
      binding = {.kind = Binding::Kind::kQueued, .op = previous};
    }
  }
  const auto after = WaitAfter(orders, op.begin);
  if (after != orders.waits.begin() && std::prev(after)->end >= at) {
    const TraceWait& wait = *std::prev(after)->wait;
    at = wait.end;
    binding = {.kind = Binding::Kind::kWaited, .stream = wait.stream};
    if (const OpPlace* cause = Find(wait.cause)) binding.op = *cause;
  }
  constexpr double kWakeUp = 100;
  const double late = static_cast<double>(op.begin) - static_cast<double>(at);
  const double length = static_cast<double>(op.end) - static_cast<double>(op.begin);
  return late <= std::max(kWakeUp, 0.1 * length) ? binding : Binding();
}

// Whether `from` could not have begun, directly or through others, before `target` ended.
bool RankAnalysis::WaitedThrough(OpPlace from, OpPlace target) const {
  constexpr int kFarthest = 64;
  for (int i = 0; i < kFarthest; ++i) {
    const Binding binding = BindingOf(from);
    if (!binding.op || op(*binding.op).end < op(target).end) return false;
    if (*binding.op == target) return true;
    from = *binding.op;
  }
  return false;
}

std::string RankAnalysis::WhatComputeDid(absl::Span<const Communication* const> group) const {
  if (compute_stream_ < 0) return "";
  const Orders& compute = orders_[compute_stream_];
  const std::vector<TraceOp>& compute_ops = trace_.streams[compute_stream_].ops;
  constexpr absl::string_view kFinished = "nothing was left to compute in the step";
  constexpr absl::string_view kNoWork = "nothing was queued to compute";
  // A group has some waits a step. Far more are no schedule to explain but must not take forever.
  int budget = 1 << 16;
  Votes votes;
  for (const Communication* communication : group) {
    const TraceOp& op = this->op(communication->place);
    int64_t rest = communication->exposed;
    for (auto wait = WaitAfter(compute, op.begin); wait != compute.waits.end() && budget > 0;
         ++wait, --budget) {
      const int64_t begin = std::max(clock_.At(wait->begin), communication->begin);
      const int64_t end = std::min(clock_.At(wait->end), communication->end);
      if (begin >= communication->end) break;
      const int64_t waited = computation_.Outside(begin, end);
      rest -= waited;
      const OpPlace* const cause = Find(wait->wait->cause);
      if (cause == nullptr) {
        votes.Add(absl::StrCat("compute waited $ ms for stream ", wait->wait->stream), waited);
      } else if (*cause == communication->place) {
        votes.Add("compute waited for it $ ms", waited);
      } else if (WaitedThrough(*cause, communication->place)) {
        votes.Add(absl::StrCat("compute waited for it $ ms through ", LabelOf(this->op(*cause))),
                  waited);
      } else {
        votes.Add(absl::StrCat("compute waited $ ms for ", LabelOf(this->op(*cause))), waited);
      }
    }
    // What compute does after the op decides whether it had run out of work for the step.
    const auto next =
        std::lower_bound(compute.ops.begin(), compute.ops.end(), op.end,
                         [&](int index, int64_t time) { return compute_ops[index].begin < time; });
    const bool finished =
        next == compute.ops.end() ||
        compute_ops[*next].begin >= clock_.StepEnd(std::max<int64_t>(op.end, 1) - 1);
    votes.Add(std::string(finished ? kFinished : kNoWork), rest);
  }
  auto [text, weight] = votes.Winner();
  if (const size_t place = text.find('$'); place != std::string::npos) {
    text.replace(place, 1, Figure(Milliseconds(Rounded(weight), trace_.steps.size())));
  }
  return text;
}

std::string RankAnalysis::WhatMadeItLate(absl::Span<const Communication* const> group) const {
  Votes votes;
  for (const Communication* communication : group) {
    const Binding binding = BindingOf(communication->place);
    std::string text;
    switch (binding.kind) {
      case Binding::Kind::kUnknown:
        break;
      case Binding::Kind::kEnqueued:
        text = "it began as soon as it was enqueued";
        break;
      case Binding::Kind::kQueued:
        text = absl::StrCat("it queued behind ", LabelOf(op(*binding.op)));
        break;
      case Binding::Kind::kWaited:
        text = binding.op ? absl::StrCat("it had to wait for ", LabelOf(op(*binding.op)))
               : binding.stream.empty()
                   ? "it had to wait for an op that was not traced"
                   : absl::StrCat("it had to wait for stream ", binding.stream);
        break;
    }
    votes.Add(text, communication->exposed);
  }
  return votes.Winner().first;
}

std::string RankAnalysis::Reason(absl::Span<const Communication* const> group,
                                 absl::Span<const RankAnalysis> ranks) const {
  const auto steps = static_cast<int64_t>(trace_.steps.size());
  int64_t exposed = 0, waiting = 0, moving = 0;
  double bytes = 0;
  Votes last_ranks;
  for (const Communication* communication : group) {
    const TraceOp& op = this->op(communication->place);
    exposed += communication->exposed;
    if (!op.collective) continue;
    const int64_t waited = computation_.Outside(communication->begin, communication->met);
    waiting += waited;
    moving += communication->end - communication->met;
    bytes += static_cast<double>(op.collective->bytes_sent);
    last_ranks.Add(communication->last_rank < 0
                       ? "another rank"
                       : absl::StrCat("rank ", ranks[communication->last_rank].trace().rank),
                   waited);
  }
  std::vector<std::string> parts = {WhatComputeDid(group)};
  if (waiting >= exposed - waiting) {
    parts.push_back(absl::StrCat("it waited ", Figure(Milliseconds(waiting, steps)), " ms for ",
                                 last_ranks.Winner().first, " to arrive"));
  } else {
    parts.push_back(WhatMadeItLate(group));
    if (moving > 0 && bytes > 0) {
      // Bytes a microsecond are MB/s.
      parts.push_back(absl::StrFormat("its data moved at %.3g GB/s",
                                      bytes / static_cast<double>(moving) / 1000));
    }
  }
  std::erase(parts, "");
  return absl::StrJoin(parts, "; ");
}

// What AnalyzeTraces refuses.
absl::Status CheckSteps(absl::Span<const RankTrace> ranks) {
  if (ranks.empty()) return absl::InvalidArgumentError("there is no rank's trace to report on");
  for (const RankTrace& trace : ranks) {
    if (trace.steps.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", trace.rank,
          "'s trace holds no whole step: the run ended or failed before its first traced step was "
          "done, or that step has more entries than the recorder holds; see what there is at "
          "ui.perfetto.dev, or trace another step of a run that goes on"));
    }
    const bool same = std::equal(
        trace.steps.begin(), trace.steps.end(), ranks[0].steps.begin(), ranks[0].steps.end(),
        [](const TraceStep& a, const TraceStep& b) { return a.step == b.step; });
    if (!same) {
      const auto steps = [](const RankTrace& t) {
        return absl::StrCat(t.steps.size(), " steps from ", t.steps.front().step, " to ",
                            t.steps.back().step);
      };
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", trace.rank, "'s trace holds ", steps(trace), ", rank ", ranks[0].rank, "'s ",
          steps(ranks[0]), "; trace a run in which all ranks reach the last traced step"));
    }
  }
  return absl::OkStatus();
}

// Matches collectives over ranks: who arrived last, and how long others waited for each rank.
// Returns the waits by rank, in microseconds: the sum over those that waited, for each of which
// what it waited on several streams at once counts once.
std::vector<double> MatchCollectives(absl::Span<RankAnalysis> ranks) {
  struct Arrival {
    int channel;
    int64_t sequence;
    int rank;
    int64_t begin;
    Communication* communication;
  };
  absl::flat_hash_map<absl::string_view, int> channels;
  std::vector<Arrival> arrivals;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    for (Communication& communication : ranks[rank].communications()) {
      const TraceOp& op = ranks[rank].op(communication.place);
      if (!op.collective || op.collective->sequence <= 0) continue;
      const int channel =
          channels.try_emplace(op.collective->channel, static_cast<int>(channels.size()))
              .first->second;
      arrivals.push_back({channel, op.collective->sequence, rank, op.begin, &communication});
    }
  }
  const auto key = [](const Arrival& arrival) {
    return std::tie(arrival.channel, arrival.sequence);
  };
  std::sort(arrivals.begin(), arrivals.end(), [&](const Arrival& a, const Arrival& b) {
    return std::tie(a.channel, a.sequence, a.begin, a.rank) <
           std::tie(b.channel, b.sequence, b.begin, b.rank);
  });
  // By the rank that was waited for and the one that waited.
  std::map<std::pair<int, int>, std::vector<std::pair<int64_t, int64_t>>> intervals;
  for (size_t first = 0, end; first < arrivals.size(); first = end) {
    for (end = first + 1; end < arrivals.size() && key(arrivals[end]) == key(arrivals[first]);) {
      ++end;
    }
    const int last_rank = arrivals[end - 1].rank;
    for (size_t i = first; i < end; ++i) {
      if (arrivals[i].rank == last_rank) continue;
      Communication& communication = *arrivals[i].communication;
      communication.last_rank = last_rank;
      intervals[{last_rank, arrivals[i].rank}].emplace_back(communication.begin, communication.met);
    }
  }
  std::vector<double> waits(ranks.size());
  for (auto& [pair, waited] : intervals) {
    waits[pair.first] += static_cast<double>(IntervalUnion(std::move(waited)).length());
  }
  return waits;
}

RankReport ReportOf(const RankAnalysis& rank) {
  const RankSums& sums = rank.sums();
  const auto steps = static_cast<int64_t>(rank.trace().steps.size());
  RankReport report;
  report.rank = rank.trace().rank;
  report.split.compute = Milliseconds(sums.compute, steps);
  report.split.optimizer_compute = Milliseconds(sums.optimizer_compute, steps);
  report.split.idle = Milliseconds(sums.idle, steps);
  report.step = Milliseconds(rank.clock().length(), steps);
  for (int i = 0; i <= kAll; ++i) {
    Overlap& overlap = i == kAll ? report.all : report.overlap[i];
    if (i != kAll) report.split.exposed[i] = Milliseconds(sums.exposed[i], steps);
    overlap.communication = Milliseconds(sums.communication[i], steps);
    overlap.hidden = Milliseconds(sums.hidden[i], steps);
    overlap.waiting = Milliseconds(sums.waiting[i], steps);
    overlap.bytes = Rounded(sums.bytes[i] / static_cast<double>(steps));
    overlap.calls = sums.calls[i] / static_cast<double>(steps);
    // Bytes a microsecond are MB/s.
    if (sums.moving[i] > 0) {
      overlap.bandwidth = sums.moved[i] / static_cast<double>(sums.moving[i]) / 1000;
    }
  }
  return report;
}

RankReport MeanOf(absl::Span<const RankAnalysis> ranks, absl::Span<const RankReport> reports) {
  const auto count = static_cast<double>(reports.size());
  RankReport mean;
  for (const RankReport& report : reports) {
    mean.step += report.step / count;
    mean.split.compute += report.split.compute / count;
    mean.split.optimizer_compute += report.split.optimizer_compute / count;
    mean.split.idle += report.split.idle / count;
    for (int p = 0; p < kNumPurposes; ++p) {
      mean.split.exposed[p] += report.split.exposed[p] / count;
    }
  }
  for (int i = 0; i <= kAll; ++i) {
    Overlap& overlap = i == kAll ? mean.all : mean.overlap[i];
    double bytes = 0, moved = 0, moving = 0;
    for (size_t r = 0; r < reports.size(); ++r) {
      const Overlap& of_rank = i == kAll ? reports[r].all : reports[r].overlap[i];
      overlap.communication += of_rank.communication / count;
      overlap.hidden += of_rank.hidden / count;
      overlap.waiting += of_rank.waiting / count;
      overlap.calls += of_rank.calls / count;
      bytes += static_cast<double>(of_rank.bytes) / count;
      moved += ranks[r].sums().moved[i];
      moving += static_cast<double>(ranks[r].sums().moving[i]);
    }
    overlap.bytes = Rounded(bytes);
    if (moving > 0) overlap.bandwidth = moved / moving / 1000;
  }
  return mean;
}

std::vector<ExposedOp> MostExposed(absl::Span<RankAnalysis> ranks) {
  using Key = std::tuple<absl::string_view, absl::string_view, absl::string_view, int>;
  struct Group {
    int rank = 0;
    int64_t exposed = 0;
    double duration = 0;
    std::vector<const Communication*> members;
  };
  std::map<Key, Group> worst;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    std::map<Key, Group> groups;
    for (const Communication& communication : ranks[r].communications()) {
      const TraceOp& op = ranks[r].op(communication.place);
      Group& group = groups[{op.name, op.unit, op.phase, Index(communication.purpose)}];
      group.rank = r;
      group.exposed += communication.exposed;
      group.duration += static_cast<double>(communication.end - communication.begin);
      if (communication.exposed > 0) group.members.push_back(&communication);
    }
    for (auto& [key, group] : groups) {
      Group& known = worst[key];
      if (group.exposed > known.exposed) known = std::move(group);
    }
  }

  std::vector<std::pair<Key, Group>> sorted(worst.begin(), worst.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.exposed > b.second.exposed;
  });
  std::vector<ExposedOp> most;
  for (auto& [key, group] : sorted) {
    const RankAnalysis& rank = ranks[group.rank];
    const auto steps = static_cast<int64_t>(rank.trace().steps.size());
    const double exposed = Milliseconds(group.exposed, steps);
    if (exposed < kLeastExposed || most.size() == kMostExposed) break;
    ExposedOp& op = most.emplace_back();
    op.name = std::string(std::get<0>(key));
    op.unit = std::string(std::get<1>(key));
    op.phase = std::string(std::get<2>(key));
    op.purpose = static_cast<Purpose>(std::get<3>(key));
    op.rank = rank.trace().rank;
    op.exposed = exposed;
    op.duration = group.duration / 1000 / static_cast<double>(steps);
    std::stable_sort(group.members.begin(), group.members.end(),
                     [](const auto* a, const auto* b) { return a->exposed > b->exposed; });
    op.reason = rank.Reason(group.members, ranks);
  }
  return most;
}

}  // namespace

double StepSplit::total() const {
  double sum = compute + optimizer_compute + idle;
  for (const double part : exposed) sum += part;
  return sum;
}

absl::StatusOr<TraceReport> AnalyzeTraces(absl::Span<const RankTrace> traces) {
  if (absl::Status status = CheckSteps(traces); !status.ok()) return status;
  std::vector<RankAnalysis> ranks;
  ranks.reserve(traces.size());
  for (const RankTrace& trace : traces) ranks.emplace_back(trace);
  const std::vector<double> waits = MatchCollectives(absl::MakeSpan(ranks));

  TraceReport report;
  report.first_step = traces[0].steps.front().step;
  report.last_step = traces[0].steps.back().step;
  report.steps = static_cast<int64_t>(traces[0].steps.size());
  for (const RankAnalysis& rank : ranks) report.ranks.push_back(ReportOf(rank));
  report.mean = MeanOf(ranks, report.ranks);
  report.most_exposed = MostExposed(absl::MakeSpan(ranks));
  const size_t slowest = std::max_element(waits.begin(), waits.end()) - waits.begin();
  report.slowest_rank = traces[slowest].rank;
  for (size_t r = 0; r < waits.size() && traces.size() > 1; ++r) {
    const double by = waits[r] / 1000 / static_cast<double>(report.steps) /
                      static_cast<double>(traces.size() - 1);
    double& place = r == slowest ? report.slowest_by : report.next_slowest_by;
    place = std::max(place, by);
  }
  for (const RankTrace& trace : traces) report.cut_short |= trace.cut_short;
  return report;
}

}  // namespace dim0
