// How fast the collectives move data, against what this machine's memory can do.
//
//   bazel run //collectives:bench_collectives -- --megabytes=79 --ranks=2,4
//
// All-gather is held against memcpy and reduce-scatter against a triad (a = b + c), run in turns
// with it by as many threads of the same process, so that a ratio of 1 means that the collective
// costs what its memory traffic costs. Moved bytes are the bytes read and the bytes written; what
// the caches add (reading a line before overwriting it) is left out on both sides. The best of the
// repeats counts: other programs can only make a run slower.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "collectives/communicator.h"
#include "collectives/dtype.h"
#include "collectives/process_group.h"

ABSL_FLAG(double, megabytes, 79, "size of the whole (gathered) buffer, in 10^6 bytes");
ABSL_FLAG(std::vector<std::string>, ranks, std::vector<std::string>({"2", "4"}),
          "world sizes to measure, separated by commas");
ABSL_FLAG(int, repeats, 15, "measured runs of each; the best is printed");

namespace dim0 {
namespace {

using Clock = std::chrono::steady_clock;

struct Case {
  std::string name;
  double bytes_moved;  // by all ranks together
  int reference;       // the case to compare with, or -1
  std::function<absl::Status(Communicator& communicator)> body;
};

// When one rank was at work on one run of one case.
struct Interval {
  Clock::time_point begin, end;
};

// Runs all cases in turn, 1 + `repeats` times, together with the other ranks, and appends an
// interval per run to `intervals`. The first round brings the memory's pages in.
absl::Status RunRank(ProcessGroup& group, const std::vector<Case>& cases, int repeats,
                     std::vector<Interval>& intervals) {
  absl::StatusOr<std::unique_ptr<Communicator>> communicator = group.Open("bench");
  if (!communicator.ok()) return communicator.status();
  CallInfo call;
  call.unit = "bench";
  for (int round = 0; round <= repeats; ++round) {
    for (const Case& one : cases) {
      if (absl::Status ready = (*communicator)->Barrier(call); !ready.ok()) return ready;
      Interval interval;
      interval.begin = Clock::now();
      if (absl::Status done = one.body(**communicator); !done.ok()) return done;
      interval.end = Clock::now();
      intervals.push_back(interval);
    }
  }
  return absl::OkStatus();
}

// The shortest time that any counted run of case `i` took, from the first rank's begin to the last
// rank's end.
double BestSeconds(const std::vector<std::vector<Interval>>& by_rank, size_t num_cases, size_t i) {
  double best = std::numeric_limits<double>::infinity();
  for (size_t run = num_cases + i; run < by_rank[0].size(); run += num_cases) {
    Interval all = by_rank[0][run];
    for (const std::vector<Interval>& intervals : by_rank) {
      all.begin = std::min(all.begin, intervals[run].begin);
      all.end = std::max(all.end, intervals[run].end);
    }
    best = std::min(best, std::chrono::duration<double>(all.end - all.begin).count());
  }
  return best;
}

absl::Status Bench(int world_size, int64_t elements, int repeats) {
  absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> groups =
      CreateThreadRanks(world_size, {});
  if (!groups.ok()) return groups.status();

  const int64_t chunk = (elements + world_size - 1) / world_size;
  const int64_t whole = chunk * world_size;
  const std::vector<int64_t> counts(world_size, chunk);
  std::vector<std::vector<float>> wholes(world_size), shards(world_size);
  for (int r = 0; r < world_size; ++r) {
    wholes[r].assign(whole, 1.0f);
    shards[r].assign(chunk, 2.0f);
  }

  CallInfo call;
  call.unit = "bench";
  const double n = world_size;
  const double whole_bytes = 4.0 * whole, chunk_bytes = 4.0 * chunk;
  const auto reduce_scatter = [&](bool accumulate) {
    return [&, accumulate](Communicator& communicator) {
      const int r = communicator.rank();
      const ReduceScatterPart part{wholes[r].data(), shards[r].data(), counts, accumulate};
      return communicator.ReduceScatter(call, DType::kFloat32, {&part, 1});
    };
  };
  constexpr int kNone = -1, kMemcpy = 0, kTriad = 1;
  const std::vector<Case> cases = {
      // Both within the whole buffer, so that the caches are of no more help than below.
      {"memcpy", n * 2 * 4.0 * (whole / 2), kNone,
       [&](Communicator& communicator) {
         float* data = wholes[communicator.rank()].data();
         std::memcpy(data, data + whole / 2, whole / 2 * sizeof(float));
         return absl::OkStatus();
       }},
      {"triad", n * 3 * 4.0 * (whole / 3), kNone,
       [&](Communicator& communicator) {
         float* a = wholes[communicator.rank()].data();
         const float *b = a + whole / 3, *c = b + whole / 3;
#pragma omp simd
         for (int64_t i = 0; i < whole / 3; ++i) a[i] = b[i] + c[i];
         return absl::OkStatus();
       }},
      // Each rank reads and writes the whole; in place, all but its own chunk.
      {"all_gather", n * 2 * whole_bytes, kMemcpy,
       [&](Communicator& communicator) {
         const int r = communicator.rank();
         const AllGatherPart part{shards[r].data(), wholes[r].data(), counts};
         return communicator.AllGather(call, DType::kFloat32, {&part, 1});
       }},
      {"all_gather, in place", n * 2 * (whole_bytes - chunk_bytes), kMemcpy,
       [&](Communicator& communicator) {
         const int r = communicator.rank();
         const AllGatherPart part{wholes[r].data() + r * chunk, wholes[r].data(), counts};
         return communicator.AllGather(call, DType::kFloat32, {&part, 1});
       }},
      // Each rank reads its chunk of every rank's buffer and writes one; to accumulate it reads
      // that.
      {"reduce_scatter", n * (n + 1) * chunk_bytes, kTriad, reduce_scatter(false)},
      {"reduce_scatter, accumulate", n * (n + 2) * chunk_bytes, kTriad, reduce_scatter(true)},
  };

  std::vector<std::vector<Interval>> intervals(world_size);
  std::vector<absl::Status> statuses(world_size);
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) {
    threads.emplace_back(
        [&, r] { statuses[r] = RunRank(*(*groups)[r], cases, repeats, intervals[r]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }

  std::printf("%d ranks, %.1f MB\n", world_size, whole_bytes / 1e6);
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto seconds = [&](size_t j) { return BestSeconds(intervals, cases.size(), j); };
    const auto rate = [&](size_t j) { return cases[j].bytes_moved / seconds(j); };
    std::printf("  %-27s %8.2f ms  %6.2f GB moved/s", cases[i].name.c_str(), seconds(i) * 1e3,
                rate(i) / 1e9);
    if (cases[i].reference != kNone) {
      const size_t reference = cases[i].reference;
      std::printf("  %5.2f of %s", rate(i) / rate(reference), cases[reference].name.c_str());
    }
    std::printf("\n");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dim0

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Measures the collectives between threads of this process.");
  absl::ParseCommandLine(argc, argv);
  const double megabytes = absl::GetFlag(FLAGS_megabytes);
  const int repeats = absl::GetFlag(FLAGS_repeats);
  if (!(megabytes > 0 && megabytes < 1e6) || repeats < 1) {
    std::fprintf(stderr, "--megabytes must be in (0, 10^6) and --repeats at least 1\n");
    return 2;
  }
  for (const std::string& text : absl::GetFlag(FLAGS_ranks)) {
    int ranks;
    if (!absl::SimpleAtoi(text, &ranks) || ranks < 2) {
      std::fprintf(stderr,
                   "--ranks: '%s' is not a number of ranks from 2 on; say for example 2,4\n",
                   text.c_str());
      return 2;
    }
    const absl::Status status =
        dim0::Bench(ranks, static_cast<int64_t>(megabytes * 1e6 / 4), repeats);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      return 1;
    }
  }
  return 0;
}
