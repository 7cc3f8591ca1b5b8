// Ranks with a GPU each. A call enqueues NCCL's kernels on the caller's stream and returns, before
// they have run. What goes wrong later has no caller to return to, so it fails the group: the
// streams are freed, later calls and Health() return the error.
//
// Threads. A driver may hold a lock of the whole process while one thread waits in it for its GPU:
// for room in a queue of launches, or to load a kernel that is launched for the first time. If a
// kernel of NCCL's that waits for another rank's were in that GPU's queue, and the other rank's
// thread not yet past the lock to launch it, neither would go on. So a call returns when all ranks
// of the process have enqueued it.
//
// Channels. Each has an ncclComm of its own, which Connect or the first call makes: the ranks'
// hosts meet over a host channel of the same name, on which rank 0 hands out NCCL's unique id.
// NCCL's kernels hold a GPU's multiprocessors until their peers have come. Two communicators whose
// kernels start in one order on one GPU and in the other order on another may therefore wait for
// each other forever. It cannot happen here because all ranks enqueue the calls of all channels in
// one order (one host thread enqueues for a rank, and what it enqueues follows from what the ranks
// agreed on), and NCCL_LAUNCH_ORDER_IMPLICIT makes NCCL keep the kernels of one GPU in the order in
// which the host enqueued them, from CUDA 12.3 on without giving up that they overlap. Ranks that
// make only one channel's calls at a time may order channels as they like.
//
// Hangs. Communicators are non-blocking: NCCL's calls return at once and are polled, since
// one that connects to the peers waits for them. Each call lies between two events. A watchdog
// thread looks whether a call has begun and not ended within the timeout, counted from when its
// stream got to it, and asks NCCL for errors. If there is one, it says what the board knows of the
// missing ranks, and aborts all communicators. If NCCL does not even abort, or CUDA keeps the
// watchdog itself, the process ends.
//
// Ranks of other processes. In each round of news every rank brings what it has posted since the
// last one, over a host channel; so boards agree up to a fraction of a second. A process that ends
// or aborts is noticed as fast as the host group notices it.
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "collectives/call_errors.h"
#include "collectives/communicator.h"
#include "collectives/cuda_status.h"
#include "collectives/dtype.h"
#include "collectives/ledger.h"
#include "collectives/nccl/arithmetic.h"
#include "collectives/nccl/board.h"
#include "collectives/nccl/news.h"
#include "collectives/process_group.h"
#include "collectives/steady_clock.h"

namespace dim0 {
namespace {

// How often the watchdog looks, and how often ranks of several processes exchange news.
constexpr absl::Duration kWatch = absl::Milliseconds(5);
constexpr absl::Duration kNews = absl::Milliseconds(200);
// How long a communicator whose calls are done may take to say goodbye to its peers.
constexpr absl::Duration kFarewell = absl::Seconds(10);
// How long NCCL may take to abort, and CUDA to say what runs, unless ranks wait for one another for
// less.
constexpr absl::Duration kAbort = absl::Minutes(1);
// Elements whose maximum is taken at a time: the channel's scratch holds so many keys.
constexpr int64_t kKeys = int64_t{1} << 16;

// The order of launches, see above.
static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 26, 0), "NCCL 2.26 or later");

#define RETURN_IF_ERROR(expression)                                         \
  do {                                                                      \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

// `comm` may be null.
absl::Status NcclStatus(ncclResult_t result, ncclComm_t comm, absl::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  std::string text = absl::StrCat(what, ": NCCL: ", ncclGetErrorString(result));
  const char* const last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') {
    absl::StrAppend(&text, ": ", absl::StrReplaceAll(last, {{"\n", " "}}));
  }
  return result == ncclRemoteError ? absl::UnavailableError(text) : absl::InternalError(text);
}

ncclDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt64:
      return ncclInt64;
    case DType::kByte:
    case DType::kFloat16:  // does not travel
      break;
  }
  return ncclUint8;
}

char* At(void* data, DType dtype, int64_t element) {
  return static_cast<char*>(data) + element * SizeOf(dtype);
}
const char* At(const void* data, DType dtype, int64_t element) {
  return static_cast<const char*>(data) + element * SizeOf(dtype);
}

bool AllEqual(absl::Span<const int64_t> counts) {
  return std::all_of(counts.begin(), counts.end(), [&](int64_t c) { return c == counts[0]; });
}

// One call that a stream has not passed as far as is known.
struct Enqueued {
  int64_t sequence = 0;
  std::string text;
  cudaEvent_t begin = nullptr, end = nullptr;  // the End's
  absl::Time begun = absl::InfiniteFuture();   // when it was seen that the stream had got there
};

// One rank's end of one channel.
struct End {
  End(int rank, int device, absl::string_view channel)
      : rank(rank), device(device), channel(channel) {}
  ~End() {
    (void)cudaSetDevice(device);
    for (cudaEvent_t event : events) (void)cudaEventDestroy(event);
    if (keys_free != nullptr) (void)cudaEventDestroy(keys_free);
    if (keys != nullptr) (void)cudaFree(keys);
  }

  const int rank;
  const int device;
  const std::string channel;

  // NCCL allows one thread at a time in a communicator.
  std::timed_mutex nccl;
  ncclComm_t comm = nullptr;  // guarded by `nccl`

  // Of the thread that makes the calls.
  int32_t* keys = nullptr;          // device memory; behind kKeys of them a zero for barriers
  cudaEvent_t keys_free = nullptr;  // passed when the last call that used them has run
  std::vector<cudaEvent_t> events;  // all that are in `enqueued` and `idle`

  // Guarded by World's mutex.
  std::deque<Enqueued> enqueued;
  int64_t launched = 0;           // calls that have been enqueued so far
  std::vector<cudaEvent_t> idle;  // events to use again
  bool closed = false;
};

// Ends the process, with `why`, if it lives for `limit` and nobody says meanwhile that things go
// on; `limit` is finite. For calls into CUDA and NCCL after which nothing can be waited for: where
// they do not return, a GPU or the driver hangs, and so would every orderly end.
class LastResort {
 public:
  LastResort(std::string why, absl::Duration limit)
      : thread_([this, why = std::move(why), limit] { Wait(why, limit); }) {}
  ~LastResort() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
      passed_.notify_all();
    }
    thread_.join();
  }
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

  void GoesOn() { looks_ = 0; }

 private:
  // In many short waits: a process that was stopped for a while has not waited that long.
  static constexpr int kLooks = 20;

  void Wait(const std::string& why, absl::Duration limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (
        !passed_.wait_for(lock, absl::ToChronoNanoseconds(limit / kLooks), [&] { return over_; })) {
      if (++looks_ < kLooks) continue;
      std::fprintf(stderr, "%s within %s: ending the process\n", why.c_str(),
                   absl::FormatDuration(limit).c_str());
      std::_Exit(EXIT_FAILURE);
    }
  }

  std::mutex mutex_;
  std::condition_variable passed_;
  bool over_ = false;
  std::atomic<int> looks_{0};
  std::thread thread_;
};

// What the ranks of this process share. Kept alive by their groups and communicators.
class World {
 public:
  World(int size, absl::Duration timeout)
      : size(size),
        timeout(timeout),
        board_(size),
        watched_("CUDA or its driver hangs: a look at what runs has not ended",
                 std::min(timeout, absl::Hours(1)) + std::min(timeout, kAbort)) {
    watchdog_ = std::thread([this] { Watch(); });
  }

  ~World() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    watchdog_.join();
  }

  const int size;
  const absl::Duration timeout;

  absl::Status Health() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

  // The first reason counts. The watchdog frees the streams.
  void Fail(const absl::Status& why) {
    std::vector<std::shared_ptr<ProcessGroup>> hosts;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_.ok()) return;
      failure_ = why;
      for (auto& [rank, local] : locals_) hosts.push_back(local.host);
      changed_.notify_all();
      launched_.notify_all();
    }
    for (const auto& host : hosts) host->Abort(why);
  }

  // Joins a rank of this process. `news` is null when all ranks are in it.
  void Join(int rank, std::shared_ptr<ProcessGroup> host, std::unique_ptr<Communicator> news) {
    std::lock_guard<std::mutex> lock(mutex_);
    Local& local = locals_[rank];
    local.host = std::move(host);
    if (news == nullptr) return;
    const bool applies = !has_reader_;  // one of the process is enough
    has_reader_ = true;
    local.messenger = std::thread([this, rank, applies, news = std::move(news)]() mutable {
      Exchange(rank, applies, std::move(news));
    });
  }

  // The rank's group goes.
  void Part(int rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    Local& local = locals_.at(rank);
    const absl::Status waited_for = board_.LeaveAll(rank);
    local.outbox.left_all = true;
    changed_.notify_all();
    std::thread messenger = std::move(local.messenger);
    lock.unlock();
    if (!waited_for.ok()) Fail(waited_for);
    if (messenger.joinable()) messenger.join();
    lock.lock();
    const std::shared_ptr<ProcessGroup> host = std::move(local.host);
    locals_.erase(rank);
    launched_.notify_all();
    lock.unlock();
  }

  std::shared_ptr<End> Open(int rank, int device, absl::string_view channel) {
    auto end = std::make_shared<End>(rank, device, channel);
    std::lock_guard<std::mutex> lock(mutex_);
    ends_[end->channel].push_back(end);
    return end;
  }

  // See Board. An error has failed the group.
  absl::Status Post(int rank, const CallName& call, const Lengths& lengths) {
    absl::Status status;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_.ok()) return failure_;
      status = board_.Post(rank, call, lengths);
      if (const auto local = locals_.find(rank); local != locals_.end() && has_reader_) {
        local->second.outbox.posted.push_back(
            {std::string(call.channel), call.sequence, std::string(call.text), lengths});
      }
    }
    if (status.ok()) return status;
    Fail(status);
    return Health();
  }

  // What to say when a call is late.
  absl::Status Late(int rank, const CallName& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::vector<int> missing = board_.Missing(call);
    if (!missing.empty()) return MissingError(call, missing, rank, timeout);
    return absl::DeadlineExceededError(absl::StrCat(
        call.text, " as call ", call.sequence, " on channel '", call.channel,
        "': every rank has enqueued it, but it had not ended on rank ", rank, " after ",
        absl::FormatDuration(timeout),
        "; a GPU or what connects it hangs (NCCL_DEBUG=INFO says more), or allow a longer "
        "timeout"));
  }

  // An event of the end's device, to be handed back in an Enqueued.
  absl::StatusOr<cudaEvent_t> NewEvent(End& end) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!end.idle.empty()) {
        const cudaEvent_t event = end.idle.back();
        end.idle.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    RETURN_IF_ERROR(cuda::ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                   "an event for NCCL's calls"));
    end.events.push_back(event);
    return event;
  }

  void Add(End& end, Enqueued call) {
    std::lock_guard<std::mutex> lock(mutex_);
    end.enqueued.push_back(std::move(call));
  }

  // The end has enqueued one more call. Waits until all ranks of this process have enqueued as many
  // on its channel, or the group has failed; see above.
  void AwaitLocalRanks(End& end) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++end.launched;
    const auto over = [&] {
      if (!failure_.ok()) return true;
      const auto& ends = ends_.at(end.channel);
      const auto so_far = std::count_if(ends.begin(), ends.end(), [&](const auto& other) {
        return other->launched >= end.launched;
      });
      return so_far >= static_cast<int64_t>(locals_.size());
    };
    if (over()) {
      launched_.notify_all();
    } else {
      launched_.wait(lock, over);
    }
  }

  // Of a group that has failed the watchdog aborts all communicators together: returns an error
  // when the end has none any more.
  absl::Status HealthAfterAbort(End& end) {
    for (;; absl::SleepFor(absl::Milliseconds(1))) {
      absl::Status health = Health();
      if (health.ok() || !HasCommunicator(end)) return health;
    }
  }

  // The rank's communicator goes: once its calls are done, unless the group has failed. The last of
  // the process to go takes NCCL's communicators along, since NCCL would have a rank that goes
  // first wait for those on its machine.
  void Close(const std::shared_ptr<End>& end) {
    absl::Status waited_for;
    cudaEvent_t last = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waited_for = board_.Leave(end->rank, end->channel);
      if (const auto local = locals_.find(end->rank); local != locals_.end()) {
        local->second.outbox.left.push_back(end->channel);
      }
      if (!end->enqueued.empty()) last = end->enqueued.back().end;
    }
    if (!waited_for.ok()) Fail(waited_for);
    if (last != nullptr) {
      (void)cudaSetDevice(end->device);
      (void)cudaEventSynchronize(last);
    }
    (void)HealthAfterAbort(*end);
    std::vector<std::shared_ptr<End>> ends;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      end->closed = true;
      const auto channel = ends_.find(end->channel);
      const bool all = std::all_of(channel->second.begin(), channel->second.end(),
                                   [](const auto& other) { return other->closed; });
      if (all) {
        ends = std::move(channel->second);
        ends_.erase(channel);
      }
    }
    Destroy(ends);
  }

 private:
  // A rank of this process.
  struct Local {
    std::shared_ptr<ProcessGroup> host;
    News outbox;
    std::thread messenger;
  };

  // ---- The watchdog ----

  void Watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      changed_.wait_for(lock, absl::ToChronoMilliseconds(kWatch));
      std::vector<std::shared_ptr<End>> ends;
      for (const auto& [name, of_channel] : ends_) {
        ends.insert(ends.end(), of_channel.begin(), of_channel.end());
      }
      const bool failed = !failure_.ok();
      lock.unlock();
      watched_.GoesOn();
      if (failed) {
        Abort(ends);
      } else {
        for (const auto& end : ends) {
          if (absl::Status status = Look(*end); !status.ok()) {
            Fail(status);
            break;
          }
        }
      }
      ends.clear();
      lock.lock();
    }
  }

  // Takes off the calls that have ended. Returns what is wrong with the others.
  absl::Status Look(End& end) {
    // A thread that has not said which device it means would make a context on the first.
    (void)cudaSetDevice(end.device);
    if (std::unique_lock<std::timed_mutex> nccl(end.nccl, std::try_to_lock);
        nccl.owns_lock() && end.comm != nullptr) {
      ncclResult_t state = ncclSuccess;
      ncclResult_t result = ncclCommGetAsyncError(end.comm, &state);
      if (result == ncclSuccess) result = state;
      RETURN_IF_ERROR(NcclStatus(result, end.comm,
                                 absl::StrCat("channel '", end.channel, "' on rank ", end.rank)));
    }
    for (;;) {
      Enqueued first;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (end.enqueued.empty()) return absl::OkStatus();
        first = end.enqueued.front();
      }
      const CallName call{first.text, first.sequence, end.channel};
      const auto passed = [&](cudaEvent_t event) -> absl::StatusOr<bool> {
        const cudaError_t error = cudaEventQuery(event);
        if (error == cudaErrorNotReady) return false;
        RETURN_IF_ERROR(cuda::ToStatus(
            error, absl::StrCat(call.text, " as call ", call.sequence, " on channel '", end.channel,
                                "' on rank ", end.rank)));
        return true;
      };
      const absl::StatusOr<bool> ended = passed(first.end);
      if (!ended.ok()) return ended.status();
      if (*ended) {
        std::lock_guard<std::mutex> lock(mutex_);
        end.idle.push_back(first.begin);
        end.idle.push_back(first.end);
        end.enqueued.pop_front();
        continue;
      }
      const absl::Time now = SteadyNow();
      if (first.begun == absl::InfiniteFuture()) {
        const absl::StatusOr<bool> begun = passed(first.begin);
        if (!begun.ok()) return begun.status();
        if (!*begun) return absl::OkStatus();
        std::lock_guard<std::mutex> lock(mutex_);
        end.enqueued.front().begun = now;
        return absl::OkStatus();
      }
      return now - first.begun > timeout ? Late(end.rank, call) : absl::OkStatus();
    }
  }

  // As one group: NCCL waits, in an abort, for the streams that the communicator has used, and
  // these may wait for a call of another one. In a group all are told before any is waited for.
  void Abort(absl::Span<const std::shared_ptr<End>> ends) {
    // A call of NCCL's that does not return must not keep the others waiting: NCCL lets go of it.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    std::vector<std::unique_lock<std::timed_mutex>> locks;
    std::vector<std::pair<int, ncclComm_t>> communicators;  // with their devices
    for (const auto& end : ends) {
      locks.emplace_back(end->nccl, deadline);
      if (end->comm == nullptr) continue;
      communicators.emplace_back(end->device, std::exchange(end->comm, nullptr));
    }
    if (communicators.empty()) return;
    const absl::Status why = Health();
    const LastResort last_resort(
        absl::StrCat(why.ok() ? "channels are closed" : why.message(), "; NCCL has not aborted"),
        std::min(timeout, kAbort));
    (void)ncclGroupStart();
    for (const auto& [device, comm] : communicators) {
      (void)cudaSetDevice(device);
      (void)ncclCommAbort(comm);
    }
    (void)ncclGroupEnd();
  }

  static bool HasCommunicator(End& end) {
    std::lock_guard<std::timed_mutex> nccl(end.nccl);
    return end.comm != nullptr;
  }

  // Ends communicators whose calls have run; all at once, since each waits for its peers.
  void Destroy(absl::Span<const std::shared_ptr<End>> ends) {
    const bool failed = !Health().ok();
    for (const auto& end : ends) {
      // NCCL must not be asked to finish what will never end.
      ncclResult_t result = ncclSuccess;
      if (std::lock_guard<std::timed_mutex> nccl(end->nccl); end->comm != nullptr && !failed) {
        (void)cudaSetDevice(end->device);
        result = ncclCommFinalize(end->comm);
      }
      if (failed || (result != ncclSuccess && result != ncclInProgress)) Abort({&end, 1});
    }
    const absl::Time deadline = SteadyNow() + kFarewell;
    for (const auto& end : ends) {
      ncclResult_t state = ncclInProgress;
      while (state == ncclInProgress && SteadyNow() < deadline && Health().ok()) {
        {
          std::lock_guard<std::timed_mutex> nccl(end->nccl);
          if (end->comm == nullptr) break;
          if (ncclCommGetAsyncError(end->comm, &state) != ncclSuccess) break;
        }
        if (state == ncclInProgress) absl::SleepFor(absl::Milliseconds(1));
      }
      if (state != ncclSuccess) {
        Abort({&end, 1});
        continue;
      }
      std::lock_guard<std::timed_mutex> nccl(end->nccl);
      if (end->comm == nullptr) continue;
      (void)cudaSetDevice(end->device);
      (void)ncclCommDestroy(std::exchange(end->comm, nullptr));
    }
  }

  // ---- News from other processes ----

  void Exchange(int rank, bool applies, std::unique_ptr<Communicator> channel) {
    for (bool last = false; !last;) {
      std::string mine;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        News& outbox = locals_.at(rank).outbox;
        changed_.wait_for(lock, absl::ToChronoMilliseconds(kNews),
                          [&] { return outbox.left_all || !failure_.ok(); });
        if (!failure_.ok()) return;
        mine = Pack(outbox);
        const bool left_all = outbox.left_all;
        outbox = {};
        outbox.left_all = left_all;
      }
      absl::StatusOr<std::vector<News>> all = AllNews(*channel, mine);
      if (!all.ok()) return Fail(all.status());
      for (int r = 0; r < size; ++r) {
        if ((*all)[r].left_all) last = true;
        if (!applies) continue;
        if (absl::Status status = Apply(r, (*all)[r]); !status.ok()) return Fail(status);
      }
    }
  }

  absl::StatusOr<std::vector<News>> AllNews(Communicator& channel, const std::string& mine) {
    CallInfo call;
    call.unit = "news";
    std::vector<int64_t> sizes(size);
    const int64_t own_size = static_cast<int64_t>(mine.size());
    const std::vector<int64_t> ones(size, 1);
    const AllGatherPart lengths{&own_size, sizes.data(), ones};
    RETURN_IF_ERROR(channel.AllGather(call, DType::kInt64, {&lengths, 1}));
    std::string packed;
    for (int64_t length : sizes) packed.resize(packed.size() + length);
    const AllGatherPart bytes{mine.data(), packed.data(), sizes};
    RETURN_IF_ERROR(channel.AllGather(call, DType::kByte, {&bytes, 1}));
    std::vector<News> all;
    absl::string_view rest = packed;
    for (int64_t length : sizes) {
      absl::StatusOr<News> news = Unpack(rest.substr(0, length));
      if (!news.ok()) return news.status();
      all.push_back(*std::move(news));
      rest.remove_prefix(length);
    }
    return all;
  }

  // Enters what a rank of another process says.
  absl::Status Apply(int rank, const News& news) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (locals_.contains(rank)) return absl::OkStatus();
    for (const News::Posted& call : news.posted) {
      RETURN_IF_ERROR(board_.Post(rank, {call.text, call.sequence, call.channel}, call.lengths));
    }
    for (const std::string& channel : news.left) RETURN_IF_ERROR(board_.Leave(rank, channel));
    return news.left_all ? board_.LeaveAll(rank) : absl::OkStatus();
  }

  std::mutex mutex_;
  std::condition_variable changed_;   // a failure, a rank that leaves, the end
  std::condition_variable launched_;  // a call has been enqueued, a failure, a rank that leaves
  absl::Status failure_;
  Board board_;
  std::map<int, Local> locals_;  // by rank
  bool has_reader_ = false;      // some rank is in another process
  std::map<std::string, std::vector<std::shared_ptr<End>>> ends_;  // by channel
  bool stopping_ = false;
  LastResort watched_;
  std::thread watchdog_;
};

class NcclCommunicator final : public Communicator {
 public:
  // `host` is the host channel of the same name.
  NcclCommunicator(std::shared_ptr<World> world, std::shared_ptr<End> end,
                   std::unique_ptr<Communicator> host, std::shared_ptr<ByteLedger> ledger)
      : Communicator(end->channel, end->rank, world->size, std::move(ledger)),
        world_(std::move(world)),
        end_(std::move(end)),
        host_(std::move(host)) {}

  ~NcclCommunicator() override { world_->Close(end_); }

 private:
  using Body = std::function<absl::Status(cudaStream_t)>;

  // Even counts are NCCL's own all-gather. Others are one broadcast from each rank that has
  // something, which NCCL runs as one kernel.
  absl::Status DoAllGather(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                           absl::Span<const AllGatherPart> parts) override {
    return Run(call, fingerprint, {}, [&](cudaStream_t stream) {
      return Group([&] {
        for (const AllGatherPart& part : parts) {
          if (AllEqual(part.counts)) {
            if (part.counts[0] == 0) continue;
            RETURN_IF_ERROR(Check(ncclAllGather(part.send, part.recv, part.counts[0], TypeOf(dtype),
                                                end_->comm, stream)));
            continue;
          }
          int64_t offset = 0;
          for (int r = 0; r < world_size(); ++r) {
            if (part.counts[r] > 0) {
              char* const to = At(part.recv, dtype, offset);
              RETURN_IF_ERROR(Check(ncclBroadcast(r == rank() ? part.send : to, to, part.counts[r],
                                                  TypeOf(dtype), r, end_->comm, stream)));
            }
            offset += part.counts[r];
          }
        }
        return absl::OkStatus();
      });
    });
  }

  // Even counts are NCCL's own reduce-scatter. Others are one reduction to each rank that gets
  // something, as one kernel. So is adding to what recv holds, for which NCCL has no mode: the rank
  // adds its own contribution to recv first and then brings recv as its contribution.
  absl::Status DoReduceScatter(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                               absl::Span<const ReduceScatterPart> parts) override {
    const auto offset_of = [](const ReduceScatterPart& part, int rank) {
      int64_t offset = 0;
      for (int64_t count : part.counts.first(rank)) offset += count;
      return offset;
    };
    return Run(call, fingerprint, {}, [&](cudaStream_t stream) -> absl::Status {
      for (const ReduceScatterPart& part : parts) {
        if (!part.accumulate) continue;
        RETURN_IF_ERROR(cuda::ToStatus(
            cuda::LaunchAddTo(dtype, part.recv, At(part.send, dtype, offset_of(part, rank())),
                              part.counts[rank()], stream),
            "adding to a reduce-scatter"));
      }
      return Group([&] {
        for (const ReduceScatterPart& part : parts) {
          if (AllEqual(part.counts) && !part.accumulate) {
            if (part.counts[0] == 0) continue;
            RETURN_IF_ERROR(Check(ncclReduceScatter(part.send, part.recv, part.counts[0],
                                                    TypeOf(dtype), ncclSum, end_->comm, stream)));
            continue;
          }
          for (int r = 0; r < world_size(); ++r) {
            if (part.counts[r] == 0) continue;
            const bool own = r == rank();
            const void* const from =
                own && part.accumulate ? part.recv : At(part.send, dtype, offset_of(part, r));
            RETURN_IF_ERROR(Check(ncclReduce(from, own ? part.recv : nullptr, part.counts[r],
                                             TypeOf(dtype), ncclSum, r, end_->comm, stream)));
          }
        }
        return absl::OkStatus();
      });
    });
  }

  absl::Status DoAllReduce(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                           ReduceOp op, void* data, int64_t count) override {
    const bool by_keys =
        op == ReduceOp::kMax && (dtype == DType::kFloat32 || dtype == DType::kBFloat16);
    return Run(call, fingerprint, {}, [&](cudaStream_t stream) -> absl::Status {
      if (count == 0) return absl::OkStatus();
      if (!by_keys) {
        return Group([&] {
          return Check(ncclAllReduce(data, data, count, TypeOf(dtype),
                                     op == ReduceOp::kSum ? ncclSum : ncclMax, end_->comm, stream));
        });
      }
      RETURN_IF_ERROR(
          cuda::ToStatus(cudaStreamWaitEvent(stream, end_->keys_free, 0), "the keys of a maximum"));
      for (int64_t done = 0; done < count; done += kKeys) {
        const int64_t n = std::min(kKeys, count - done);
        void* const values = At(data, dtype, done);
        RETURN_IF_ERROR(cuda::ToStatus(cuda::LaunchToKeys(dtype, values, end_->keys, n, stream),
                                       "the keys of a maximum"));
        RETURN_IF_ERROR(Group([&] {
          return Check(
              ncclAllReduce(end_->keys, end_->keys, n, ncclInt32, ncclMax, end_->comm, stream));
        }));
        RETURN_IF_ERROR(cuda::ToStatus(cuda::LaunchFromKeys(dtype, end_->keys, values, n, stream),
                                       "the values of a maximum"));
      }
      return cuda::ToStatus(cudaEventRecord(end_->keys_free, stream), "the keys of a maximum");
    });
  }

  absl::Status DoBroadcast(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                           void* data, int64_t count, int root) override {
    return Run(call, fingerprint, {}, [&](cudaStream_t stream) -> absl::Status {
      if (count == 0) return absl::OkStatus();
      return Group([&] {
        return Check(ncclBroadcast(data, data, count, TypeOf(dtype), root, end_->comm, stream));
      });
    });
  }

  absl::Status DoGather(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                        const void* send, void* recv, absl::Span<const int64_t> counts,
                        int root) override {
    std::vector<ConstSegment> out(world_size());
    std::vector<Segment> in(world_size());
    out[root] = {send, counts[rank()]};
    if (rank() == root) {
      int64_t offset = 0;
      for (int r = 0; r < world_size(); ++r) {
        in[r] = {At(recv, dtype, offset), counts[r]};
        offset += counts[r];
      }
    }
    return Run(call, fingerprint, {},
               [&](cudaStream_t stream) { return Exchange(dtype, out, in, stream); });
  }

  absl::Status DoScatter(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                         const void* send, void* recv, absl::Span<const int64_t> counts,
                         int root) override {
    std::vector<ConstSegment> out(world_size());
    std::vector<Segment> in(world_size());
    in[root] = {recv, counts[rank()]};
    if (rank() == root) {
      int64_t offset = 0;
      for (int r = 0; r < world_size(); ++r) {
        out[r] = {At(send, dtype, offset), counts[r]};
        offset += counts[r];
      }
    }
    return Run(call, fingerprint, {},
               [&](cudaStream_t stream) { return Exchange(dtype, out, in, stream); });
  }

  absl::Status DoAllToAll(const CallInfo& call, const Fingerprint& fingerprint, DType dtype,
                          absl::Span<const ConstSegment> send,
                          absl::Span<const Segment> recv) override {
    Lengths lengths;
    for (const ConstSegment& segment : send) lengths.send.push_back(segment.count);
    for (const Segment& segment : recv) lengths.recv.push_back(segment.count);
    return Run(call, fingerprint, lengths,
               [&](cudaStream_t stream) { return Exchange(dtype, send, recv, stream); });
  }

  // The stream passes it when every rank has enqueued it.
  absl::Status DoBarrier(const CallInfo& call, const Fingerprint& fingerprint) override {
    return Run(call, fingerprint, {}, [&](cudaStream_t stream) {
      int32_t* const zero = end_->keys + kKeys;
      return Group([&] {
        return Check(ncclAllReduce(zero, zero, 1, ncclInt32, ncclMax, end_->comm, stream));
      });
    });
  }

  // NCCL makes a connection between two ranks when one first sends to the other, so each sends to
  // each. For all other calls connections are made with the communicator: see CreateNcclRanks.
  absl::Status DoConnect(const CallInfo& call) override {
    call_ = {"connect", 0, name()};
    const auto greet = [&](cudaStream_t stream) {
      return Group([&] {
        for (int r = 0; r < world_size(); ++r) {
          if (r == rank()) continue;
          int32_t* const zero = end_->keys + kKeys;
          RETURN_IF_ERROR(Check(ncclSend(zero, 1, ncclInt32, r, end_->comm, stream)));
          RETURN_IF_ERROR(
              Check(ncclRecv(end_->keys + r % kKeys, 1, ncclInt32, r, end_->comm, stream)));
        }
        return absl::OkStatus();
      });
    };
    return Settled(Enqueue(static_cast<cudaStream_t>(call.native_stream), greet));
  }

  // The ranks' segments to one another, as one kernel.
  absl::Status Exchange(DType dtype, absl::Span<const ConstSegment> send,
                        absl::Span<const Segment> recv, cudaStream_t stream) {
    const ConstSegment& kept = send[rank()];
    if (kept.count > 0 && kept.data != recv[rank()].data) {
      RETURN_IF_ERROR(
          cuda::ToStatus(cudaMemcpyAsync(recv[rank()].data, kept.data, kept.count * SizeOf(dtype),
                                         cudaMemcpyDeviceToDevice, stream),
                         "a rank's copy to itself"));
    }
    return Group([&] {
      for (int r = 0; r < world_size(); ++r) {
        if (r == rank()) continue;
        if (send[r].count > 0) {
          RETURN_IF_ERROR(
              Check(ncclSend(send[r].data, send[r].count, TypeOf(dtype), r, end_->comm, stream)));
        }
        if (recv[r].count > 0) {
          RETURN_IF_ERROR(
              Check(ncclRecv(recv[r].data, recv[r].count, TypeOf(dtype), r, end_->comm, stream)));
        }
      }
      return absl::OkStatus();
    });
  }

  // ---- What every call does ----

  // Compares the call with the other ranks', and has `body` enqueue it. An error fails the group.
  absl::Status Run(const CallInfo& call, const Fingerprint& fingerprint, const Lengths& lengths,
                   const Body& body) {
    const CallName name{fingerprint.text, fingerprint.sequence, this->name()};
    RETURN_IF_ERROR(world_->Post(rank(), name, lengths));
    call_ = name;
    return Settled(Enqueue(static_cast<cudaStream_t>(call.native_stream), body));
  }

  // After a call has been enqueued, or not: an error fails the group, and what has failed that is
  // the error. NCCL may not have launched yet what it was called for; the caller, who is told that
  // the call has failed, may give up the stream and the buffers, so it returns when NCCL has let go
  // of them.
  absl::Status Settled(const absl::Status& status) {
    if (status.ok()) {
      world_->AwaitLocalRanks(*end_);
    } else {
      world_->Fail(status);
    }
    return world_->HealthAfterAbort(*end_);
  }

  absl::Status Enqueue(cudaStream_t stream, const Body& body) {
    RETURN_IF_ERROR(cuda::ToStatus(cudaSetDevice(end_->device), "the rank's GPU"));
    if (!connected_) RETURN_IF_ERROR(Connect(stream));
    Enqueued enqueued = {call_.sequence, std::string(call_.text)};
    absl::StatusOr<cudaEvent_t> begin = world_->NewEvent(*end_);
    if (!begin.ok()) return begin.status();
    absl::StatusOr<cudaEvent_t> end = world_->NewEvent(*end_);
    if (!end.ok()) return end.status();
    enqueued.begin = *begin;
    enqueued.end = *end;
    RETURN_IF_ERROR(
        cuda::ToStatus(cudaEventRecord(enqueued.begin, stream), "an event before a call"));
    RETURN_IF_ERROR(body(stream));
    RETURN_IF_ERROR(cuda::ToStatus(cudaEventRecord(enqueued.end, stream), "an event after a call"));
    world_->Add(*end_, std::move(enqueued));
    return absl::OkStatus();
  }

  // Makes the channel's NCCL communicator, together with the other ranks.
  absl::Status Connect(cudaStream_t stream) {
    struct Greeting {
      ncclUniqueId id;  // rank 0's counts
      std::array<char, 16> gpu;
    };
    Greeting mine = {};
    if (rank() == 0) RETURN_IF_ERROR(NcclStatus(ncclGetUniqueId(&mine.id), nullptr, "unique id"));
    cudaDeviceProp properties;
    RETURN_IF_ERROR(
        cuda::ToStatus(cudaGetDeviceProperties(&properties, end_->device), "the rank's GPU"));
    static_assert(sizeof(mine.gpu) == sizeof(properties.uuid));
    std::memcpy(mine.gpu.data(), &properties.uuid, sizeof(properties.uuid));

    // Of a call that has been posted the board knows who is missing.
    const auto meet = [&](absl::Status met) {
      return absl::IsDeadlineExceeded(met) && call_.sequence > 0 ? world_->Late(rank(), call_)
                                                                 : met;
    };
    std::vector<Greeting> all(world_size());
    const std::vector<int64_t> counts(world_size(), sizeof(Greeting));
    const AllGatherPart part{&mine, all.data(), counts};
    CallInfo meeting;
    meeting.unit = "connect";
    RETURN_IF_ERROR(meet(host_->AllGather(meeting, DType::kByte, {&part, 1})));
    for (int r = 0; r < world_size(); ++r) {
      for (int s = 0; s < r; ++s) {
        if (all[r].gpu != all[s].gpu) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("ranks ", s, " and ", r,
                         " have the same GPU; NCCL needs one for each rank, so start fewer ranks "
                         "or choose other devices"));
      }
    }

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    {
      std::lock_guard<std::timed_mutex> nccl(end_->nccl);
      // The communicator is there at once, so that it can be aborted while it comes about.
      RETURN_IF_ERROR(
          Check(ncclCommInitRankConfig(&end_->comm, world_size(), all[0].id, rank(), &config)));
    }
    RETURN_IF_ERROR(Await());
    const std::string memory = absl::StrCat("memory for channel '", name(), "'");
    constexpr size_t kBytes = (kKeys + 1) * sizeof(int32_t);
    void* keys = nullptr;
    RETURN_IF_ERROR(cuda::ToStatus(cudaMalloc(&keys, kBytes), memory));
    end_->keys = static_cast<int32_t*>(keys);
    RETURN_IF_ERROR(cuda::ToStatus(cudaMemsetAsync(keys, 0, kBytes, stream), memory));
    RETURN_IF_ERROR(
        cuda::ToStatus(cudaEventCreateWithFlags(&end_->keys_free, cudaEventDisableTiming), memory));
    RETURN_IF_ERROR(cuda::ToStatus(cudaEventRecord(end_->keys_free, stream), memory));
    // A rank that has gone ahead must not keep its GPU busy waiting for one that still allocates:
    // in one process the driver may have the one wait for the other.
    RETURN_IF_ERROR(meet(host_->Barrier(meeting)));
    connected_ = true;
    return absl::OkStatus();
  }

  // NCCL calls that make one operation. `calls` runs with end_->comm valid.
  absl::Status Group(const std::function<absl::Status()>& calls) {
    {
      std::lock_guard<std::timed_mutex> nccl(end_->nccl);
      if (end_->comm == nullptr) return world_->Health();  // aborted
      RETURN_IF_ERROR(Check(ncclGroupStart()));
      absl::Status status = calls();
      absl::Status ended = Check(ncclGroupEnd());
      RETURN_IF_ERROR(status);
      RETURN_IF_ERROR(ended);
    }
    return Await();
  }

  // Waits until NCCL has done on the host what it was called for.
  absl::Status Await() {
    const absl::Time deadline = SteadyNow() + world_->timeout;
    for (int looks = 0;; ++looks) {
      {
        std::lock_guard<std::timed_mutex> nccl(end_->nccl);
        if (end_->comm == nullptr) return world_->Health();
        ncclResult_t state = ncclSuccess;
        RETURN_IF_ERROR(Check(ncclCommGetAsyncError(end_->comm, &state)));
        RETURN_IF_ERROR(Check(state));
        if (state == ncclSuccess) return absl::OkStatus();
      }
      RETURN_IF_ERROR(world_->Health());
      if (SteadyNow() > deadline) return world_->Late(rank(), call_);
      if (looks < 1000) {
        std::this_thread::yield();
      } else {
        absl::SleepFor(absl::Microseconds(100));
      }
    }
  }

  absl::Status Check(ncclResult_t result) const {
    if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
    return NcclStatus(result, end_->comm,
                      absl::StrCat(call_.text, " as call ", call_.sequence, " on channel '", name(),
                                   "' on rank ", rank()));
  }

  const std::shared_ptr<World> world_;
  const std::shared_ptr<End> end_;
  const std::unique_ptr<Communicator> host_;
  bool connected_ = false;
  CallName call_;  // under way
};

class NcclProcessGroup final : public ProcessGroup {
 public:
  NcclProcessGroup(std::shared_ptr<World> world, std::shared_ptr<ProcessGroup> host, int device)
      : world_(std::move(world)),
        host_(std::move(host)),
        rank_(host_->rank()),
        device_(device),
        ledger_(std::make_shared<ByteLedger>()),
        own_traffic_(std::make_shared<ByteLedger>()) {}

  ~NcclProcessGroup() override { world_->Part(rank_); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_->size; }
  absl::string_view trace_backend() const override { return "nccl"; }
  const ByteLedger& ledger() const override { return *ledger_; }

  absl::StatusOr<std::unique_ptr<Communicator>> Open(absl::string_view name) override {
    absl::StatusOr<std::unique_ptr<Communicator>> host = host_->OpenHost(name, own_traffic_);
    if (!host.ok()) return host.status();
    return std::make_unique<NcclCommunicator>(world_, world_->Open(rank_, device_, name),
                                              *std::move(host), ledger_);
  }

  absl::StatusOr<std::unique_ptr<Communicator>> OpenHost(
      absl::string_view name, std::shared_ptr<ByteLedger> ledger) override {
    return host_->OpenHost(name, ledger != nullptr ? std::move(ledger) : ledger_);
  }

  void Abort(const absl::Status& why) override { world_->Fail(AbortReason(rank_, why)); }
  absl::Status Health() override { return world_->Health(); }

 private:
  const std::shared_ptr<World> world_;
  const std::shared_ptr<ProcessGroup> host_;
  const int rank_;
  const int device_;
  const std::shared_ptr<ByteLedger> ledger_;
  const std::shared_ptr<ByteLedger> own_traffic_;  // what the backend itself exchanges
};

std::string VersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

absl::Status CheckLibrary() {
  int version = 0;
  RETURN_IF_ERROR(NcclStatus(ncclGetVersion(&version), nullptr, "NCCL's version"));
  if (version / 10000 == NCCL_MAJOR && version >= NCCL_VERSION_CODE) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("this program was built for NCCL ", VersionText(NCCL_VERSION_CODE),
                   " and finds NCCL ", VersionText(version), "; install that version or a later ",
                   NCCL_MAJOR, ".x, or build against the one that is there"));
}

absl::Status CheckDevices(absl::Span<const std::unique_ptr<ProcessGroup>> hosts,
                          absl::Span<const int> devices) {
  if (hosts.empty() || hosts.size() != devices.size()) {
    return absl::InvalidArgumentError(absl::StrCat(hosts.size(), " ranks with ", devices.size(),
                                                   " CUDA devices; each rank needs one"));
  }
  int available = 0;
  RETURN_IF_ERROR(cuda::ToStatus(cudaGetDeviceCount(&available), "counting the GPUs"));
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] < 0 || devices[i] >= available) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", hosts[i]->rank(), " is given CUDA device ", devices[i],
                       ", but this machine has ", available,
                       " GPUs, from 0 on; start fewer ranks or choose other devices"));
    }
    for (size_t j = 0; j < i; ++j) {
      if (devices[i] != devices[j]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "ranks ", hosts[j]->rank(), " and ", hosts[i]->rank(), " are both given CUDA device ",
          devices[i],
          "; NCCL needs a GPU for each rank, so start fewer ranks or choose other devices"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<ProcessGroup>>> CreateNcclRanks(
    std::vector<std::unique_ptr<ProcessGroup>> hosts, absl::Span<const int> devices,
    const ProcessGroupOptions& options) {
  RETURN_IF_ERROR(CheckTimeout(options.timeout));
  if (options.link.has_value()) {
    return absl::InvalidArgumentError(
        "a link is simulated between CPU ranks only; GPUs have the links that they have");
  }
  RETURN_IF_ERROR(CheckDevices(hosts, devices));
  RETURN_IF_ERROR(CheckLibrary());
  // Read by NCCL when it is first used. A user's own settings stay. The second makes it connect all
  // that collectives may use when a communicator is made and not when each is first called.
  (void)setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
  (void)setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);

  const int size = hosts[0]->world_size();
  // Each peer that is sent to is reported to take half a GB with 32 channels, for each
  // communicator. With several peers, 8 channels to each are 24 and more at work.
  if (size > 3) (void)setenv("NCCL_MAX_P2P_NCHANNELS", "8", /*overwrite=*/0);
  auto world = std::make_shared<World>(size, options.timeout);
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  std::vector<std::unique_ptr<Communicator>> news(hosts.size());
  if (hosts.size() < static_cast<size_t>(size)) {
    for (size_t i = 0; i < hosts.size(); ++i) {
      auto channel = hosts[i]->OpenHost("nccl news", std::make_shared<ByteLedger>());
      if (!channel.ok()) return channel.status();
      news[i] = *std::move(channel);
    }
  }
  for (size_t i = 0; i < hosts.size(); ++i) {
    std::shared_ptr<ProcessGroup> host = std::move(hosts[i]);
    world->Join(host->rank(), host, std::move(news[i]));
    groups.push_back(std::make_unique<NcclProcessGroup>(world, std::move(host), devices[i]));
  }
  return groups;
}

}  // namespace dim0
