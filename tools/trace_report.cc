// trace_report: where the time of traced runs went, as text or as a page to look at.
#include "runtime/trace/trace_report.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/printable.h"
#include "runtime/trace/trace_file.h"
#include "tools/flags.h"
#include "tools/page/trace_page.h"
#include "tools/process.h"
#include "tools/traced_run.h"

ABSL_FLAG(std::string, html, "",
          "write a page with timeline, memory and losses of the runs, side by side, to this file "
          "instead of printing reports");

namespace dim0 {
namespace {

// The traces of the run in `dir` and what they add up to.
absl::StatusOr<TracedRun> ReadRun(const std::string& dir, const std::string& label) {
  TracedRun run;
  run.label = label;
  DIM0_ASSIGN_OR_RETURN(run.ranks, ReadTraces(dir));
  absl::StatusOr<TraceReport> report = AnalyzeTraces(run.ranks);
  if (!report.ok()) {
    return absl::Status(report.status().code(), absl::StrCat(dir, ": ", report.status().message()));
  }
  run.report = *std::move(report);
  return run;
}

// A run whose losses cannot be read has none; its trace is worth showing all the same.
void AddLosses(const std::string& dir, TracedRun* run) {
  const std::string& metrics = run->ranks[0].metrics;
  if (metrics.empty()) return;
  const std::string path = (std::filesystem::path(TraceDirOf(dir)) / metrics).string();
  absl::StatusOr<LossCurve> curve = ReadLossCurve(path, run->ranks[0].steps);
  if (!curve.ok()) {
    PrintError("trace_report", absl::StrCat("warning: no loss curve for ", run->label, ": ",
                                            curve.status().message()));
    return;
  }
  run->losses = std::move(curve->losses);
  run->validation_losses = std::move(curve->validation_losses);
}

// Runs of different models have no ops in common that could be compared.
absl::Status CheckSameModel(const std::vector<std::string>& dirs,
                            const std::vector<TracedRun>& runs) {
  for (size_t i = 1; i < runs.size(); ++i) {
    const RankTrace& first = runs[0].ranks[0];
    const RankTrace& other = runs[i].ranks[0];
    if (first.model == other.model) continue;
    const std::string how =
        first.parameters == other.parameters
            ? "of the same size"
            : absl::StrCat(first.parameters, " and ", other.parameters, " parameters");
    return absl::InvalidArgumentError(absl::StrCat(dirs[0], " and ", dirs[i],
                                                   " trained different models (", how,
                                                   "); give runs of one model"));
  }
  return absl::OkStatus();
}

// Whatever else a user has there by that name must not be lost to a slip of the keyboard.
absl::Status CheckOverwrites(const std::string& html) {
  const absl::StatusOr<MappedFile> file = MappedFile::Open(html);
  if (file.ok() && !IsTracePage(file->contents())) {
    return absl::AlreadyExistsError(absl::StrCat(
        "--html: ", html, " is there already and is no page of trace_report; choose another name"));
  }
  // What cannot be read may be anything. Other troubles are those of writing.
  return absl::IsPermissionDenied(file.status()) ? file.status() : absl::OkStatus();
}

int Fail(const absl::Status& status, int exit_status) {
  PrintError("trace_report", status.message());
  return exit_status;
}

int Main(int argc, char** argv) {
  std::vector<std::string> dirs;
  if (const auto status =
          HandleCommandLine(argc, argv,
                            "Says where the time of traced runs went (train --trace=DIR).\n"
                            "  trace_report runs/first\n"
                            "  trace_report --html=compared.html runs/adamw runs/rmnp runs/muon",
                            &dirs)) {
    return *status;
  }
  if (dirs.empty() || std::count(dirs.begin(), dirs.end(), "") > 0) {
    return Fail(absl::InvalidArgumentError(
                    "no folder given; name one that train --trace=DIR wrote: trace_report DIR..."),
                kExitUsage);
  }
  const std::string html = absl::GetFlag(FLAGS_html);
  if (!html.empty()) {
    if (const absl::Status status = CheckOverwrites(html); !status.ok()) {
      return Fail(status, kExitFailure);
    }
  }
  const std::vector<std::string> labels = RunLabels(dirs);
  std::vector<TracedRun> runs;
  for (size_t i = 0; i < dirs.size(); ++i) {
    absl::StatusOr<TracedRun> run = ReadRun(dirs[i], labels[i]);
    if (!run.ok()) return Fail(run.status(), kExitFailure);
    runs.push_back(*std::move(run));
  }
  if (absl::Status status = CheckSameModel(dirs, runs); !status.ok()) {
    return Fail(status, kExitUsage);
  }

  if (!html.empty()) {
    for (size_t i = 0; i < runs.size(); ++i) AddLosses(dirs[i], &runs[i]);
    const absl::Status status = WriteFileAtomically(html, TracePage(runs));
    if (!status.ok()) return Fail(status, kExitFailure);
    std::printf("wrote %s; open it in a browser\n", Printable(html).c_str());
  } else {
    for (size_t i = 0; i < runs.size(); ++i) {
      if (runs.size() > 1) {
        std::printf("%s== %s ==\n", i > 0 ? "\n" : "", Printable(runs[i].label).c_str());
      }
      std::fputs(FormatReport(runs[i].report).c_str(), stdout);
    }
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return Fail(absl::DataLossError("standard output did not take all of the text; is the disk it "
                                    "goes to full?"),
                kExitFailure);
  }
  return kExitOk;
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) { dim0::EndProcess(dim0::Main(argc, argv)); }
