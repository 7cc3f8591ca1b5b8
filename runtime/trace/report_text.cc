// The report as text for a terminal.
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "runtime/printable.h"
#include "runtime/trace/report_words.h"
#include "runtime/trace/trace_report.h"

namespace dim0 {

std::string Label(absl::string_view name, absl::string_view unit) {
  constexpr size_t kLongest = 44;
  std::string label(name);
  if (!unit.empty() && !absl::StrContains(name, unit)) absl::StrAppend(&label, " ", unit);
  if (label.size() <= kLongest) return label;
  size_t end = kLongest - 3;
  while (end > 0 && (label[end] & 0xc0) == 0x80) --end;  // not within a UTF-8 character
  return absl::StrCat(label.substr(0, end), "...");
}

std::string Figure(double value) {
  if (value >= 1e5) return absl::StrFormat("%.0e", value);
  return absl::StrFormat("%.*f", value < 100 ? 2 : value < 1000 ? 1 : 0, value);
}

namespace {

constexpr size_t kColumns = 100;

// In lines of at most kColumns, each after `indent` spaces. A longer word is cut.
std::string Wrapped(absl::string_view text, size_t indent) {
  const size_t width = kColumns - indent;
  std::string lines, line;
  const auto end_line = [&] {
    if (!line.empty()) absl::StrAppend(&lines, std::string(indent, ' '), line, "\n");
    line.clear();
  };
  for (absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    if (!line.empty() && line.size() + 1 + word.size() > width) end_line();
    if (!line.empty()) line += ' ';
    while (word.size() > width) {
      size_t cut = width;
      while (cut > 0 && (word[cut] & 0xc0) == 0x80) --cut;  // not within a UTF-8 character
      if (cut == 0) cut = width;
      line = std::string(word.substr(0, cut));
      end_line();
      word.remove_prefix(cut);
    }
    absl::StrAppend(&line, word);
  }
  end_line();
  return lines;
}

double Percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

// "all_gather h.0 in forward"
std::string Title(const ExposedOp& op) {
  std::string title = Printable(Label(op.name, op.unit));
  if (!op.phase.empty())
    absl::StrAppend(&title, " in ", Printable(absl::string_view(op.phase).substr(0, 8)));
  return title;
}

// The first thing to know.
std::string Summary(const TraceReport& report) {
  const RankReport& mean = report.mean;
  double exposed = 0;
  for (const double part : mean.split.exposed) exposed += part;
  std::string text = absl::StrFormat(
      "A step takes %s ms: %.1f%% compute, %.1f%% optimizer compute, %.1f%% exposed "
      "communication, %.1f%% idle.",
      Figure(mean.step), Percent(mean.split.compute, mean.step),
      Percent(mean.split.optimizer_compute, mean.step), Percent(exposed, mean.step),
      Percent(mean.split.idle, mean.step));
  if (mean.all.communication <= 0) {
    absl::StrAppend(&text, "\nNothing was communicated.");
  } else if (report.most_exposed.empty()) {
    absl::StrAppend(&text, "\nAll communication was hidden.");
  } else {
    const ExposedOp& first = report.most_exposed[0];
    absl::StrAppend(
        &text,
        absl::StrFormat("\n%.1f%% of communication was hidden; ", 100 * mean.all.fraction_hidden()),
        "most exposed was ", Title(first), ", ", Figure(first.exposed), " ms.");
  }
  std::string lines;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) lines += Wrapped(line, 0);
  return lines;
}

// One line of the split: a label, the parts as ms and per cent, the step.
void AppendSplit(const std::string& label, const RankReport& rank, std::string* text) {
  std::vector<double> parts = {rank.split.compute, rank.split.optimizer_compute};
  parts.insert(parts.end(), rank.split.exposed.begin(), rank.split.exposed.end());
  parts.push_back(rank.split.idle);
  absl::StrAppendFormat(text, "%-9s", label);
  for (const double part : parts) {
    absl::StrAppendFormat(text, "%7s%4.0f%%", Figure(part), Percent(part, rank.step));
  }
  absl::StrAppendFormat(text, "%7s\n", Figure(rank.step));
}

void AppendOverlap(absl::string_view name, const Overlap& overlap, std::string* text) {
  const std::string hidden =
      overlap.communication > 0 ? absl::StrFormat("%.1f%%", 100 * overlap.fraction_hidden()) : "-";
  const std::string bandwidth =
      overlap.bandwidth > 0 ? absl::StrFormat("%.3g", overlap.bandwidth) : "-";
  absl::StrAppendFormat(
      text, "%-12s%12s%12s%12s%12s%12.1f%12s%12s\n", name, Figure(overlap.communication), hidden,
      Figure(overlap.communication - overlap.hidden), Figure(overlap.waiting), overlap.calls,
      Figure(static_cast<double>(overlap.bytes) / (1 << 20)), bandwidth);
}

}  // namespace

std::string FormatReport(const TraceReport& report) {
  std::string text = Summary(report);
  const bool several_ranks = report.ranks.size() > 1;
  const RankReport& mean = report.mean;

  absl::StrAppend(
      &text, "\n",
      report.steps == 1 ? absl::StrCat("Step ", report.first_step)
                        : absl::StrCat("Mean of ", report.steps, " steps (", report.first_step,
                                       " to ", report.last_step, ")"),
      " on ", report.ranks.size(), several_ranks ? " ranks." : " rank.",
      report.cut_short ? " The trace was cut short: later steps are missing." : "", "\n\n");
  absl::StrAppendFormat(&text, "%-33s%48s\n", "ms a step",
                        "------------ exposed communication ------------");
  absl::StrAppendFormat(&text, "%-9s%12s%12s%12s%12s%12s%12s%12s%7s\n", "", "compute", "optimizer",
                        "parameter", "gradient", "optimizer", "control", "idle", "step");
  for (const RankReport& rank : report.ranks) {
    AppendSplit(absl::StrCat("rank ", rank.rank), rank, &text);
  }
  if (several_ranks) AppendSplit("mean", mean, &text);

  absl::StrAppendFormat(&text, "\n%-12s%12s%12s%12s%12s%12s%12s%12s\n", "per rank", "ms a step",
                        "hidden", "exposed ms", "waiting ms", "calls", "MiB sent", "GB/s");
  for (int p = 0; p < kNumPurposes; ++p) {
    AppendOverlap(Name(static_cast<Purpose>(p)), mean.overlap[p], &text);
  }
  AppendOverlap("all", mean.all, &text);
  text +=
      "Where several purposes are exposed at once, the split gives the time to the first of them, "
      "and\nthis table to each.\n";

  if (!report.most_exposed.empty())
    text += "\nMost exposed: ms a step in which nothing hid it, of the ms it ran\n";
  for (const ExposedOp& op : report.most_exposed) {
    absl::StrAppendFormat(&text, "%8s of %-8s%s", Figure(op.exposed), Figure(op.duration),
                          Title(op));
    absl::StrAppend(&text, " (", Name(op.purpose),
                    several_ranks ? absl::StrCat(", rank ", op.rank) : "", ")\n",
                    Wrapped(Printable(op.reason), 20));
  }

  if (several_ranks) {
    if (report.slowest_by < kLeastExposed) {
      text += "\nNo rank made the others wait.\n";
    } else {
      absl::StrAppendFormat(&text,
                            "\nRank %d was the slowest: the others waited %s ms a step for it at "
                            "collectives, hidden or not,\nand %s ms for the next slowest.\n",
                            report.slowest_rank, Figure(report.slowest_by),
                            Figure(report.next_slowest_by));
    }
  }
  return text;
}

}  // namespace dim0
