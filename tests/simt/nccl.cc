#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/simt/block.h"
#include "tests/simt/memory.h"
#include "tests/simt/runtime.h"

namespace dim0::simt {
namespace {

struct Comm;
struct Batch;

enum class Kind { kAllGather, kReduceScatter, kAllReduce, kReduce, kBroadcast, kSend, kReceive };

const char* Name(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "ncclAllGather";
    case Kind::kReduceScatter:
      return "ncclReduceScatter";
    case Kind::kAllReduce:
      return "ncclAllReduce";
    case Kind::kReduce:
      return "ncclReduce";
    case Kind::kBroadcast:
      return "ncclBroadcast";
    case Kind::kSend:
      return "ncclSend";
    case Kind::kReceive:
      return "ncclRecv";
  }
  return "?";
}

// One call of one rank.
struct Call {
  Kind kind;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t op = ncclSum;
  int root = 0;  // or the peer
  int rank = 0;
  bool done = false;

  bool is_pair() const { return kind == Kind::kSend || kind == Kind::kReceive; }
  std::string Text() const {
    std::string text = Name(kind);
    text += " of " + std::to_string(count) + " of type " + std::to_string(type);
    if (!is_pair()) text += ", op " + std::to_string(op) + ", root " + std::to_string(root);
    return text;
  }
};

// What the ranks of one call have put together: (kind of meeting, sender, receiver, number).
// Collective calls meet as {-1, -1, number}.
using Meeting = std::tuple<int, int, int64_t>;

// The communicators of one unique id. All under the runtime's lock.
struct World {
  int ranks = 0;
  std::vector<std::shared_ptr<Comm>> comms;  // by rank; null until it comes
  int arrived = 0;
  ncclResult_t error = ncclSuccess;                                // of setting up
  std::map<Meeting, std::vector<std::shared_ptr<Call>>> meetings;  // of calls that may run
  bool mismatch_told = false;

  bool ready() const { return arrived == ranks || error != ncclSuccess; }
};

struct Comm {
  std::shared_ptr<World> world;
  int rank = 0;
  int device = 0;
  bool blocking = true;
  bool aborted = false;
  bool finalized = false;
  int64_t collectives = 0;                       // called so far
  std::map<std::pair<int, int>, int64_t> pairs;  // sends and receives called, by sender, receiver
  int64_t enqueued = 0, completed = 0;           // batches
  // A batch that has returned ncclInProgress, and how often it still does.
  std::shared_ptr<Batch> pending;
  int pending_polls = 0;
  std::set<void*> registered;

  bool in_progress() const { return !world->ready() || pending_polls > 0 || pending != nullptr; }
  bool drained() const { return completed >= enqueued || aborted || DeviceFailed(device); }
};

// What one group call enqueues for one communicator.
struct Batch {
  std::shared_ptr<Comm> comm;
  std::shared_ptr<StreamState> stream;
  std::vector<std::pair<Meeting, std::shared_ptr<Call>>> calls;
  bool started = false;
};

struct State {
  std::map<std::string, std::shared_ptr<World>> worlds;  // by unique id
  // A handle is a number, never used again.
  std::map<ncclComm_t, std::shared_ptr<Comm>> handles;
  uintptr_t next_handle = 0;
  int64_t ids = 0;
  // By device: batches that have not ended, in the order in which the host enqueued them.
  std::map<int, std::list<std::weak_ptr<Batch>>> in_order;
  std::mt19937_64 random{1};
  std::string last_error;

  static State& Get() {
    static State& state = *new State;
    return state;
  }
};

// Calls between ncclGroupStart and ncclGroupEnd.
struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<std::shared_ptr<Batch>> batches;
};
thread_local Group group;

ncclResult_t Error(ncclResult_t result, const std::string& why) {
  Change([&] { State::Get().last_error = why; });
  std::fprintf(stderr, "simt: NCCL: %s\n", why.c_str());
  return result;
}

// check: a device that has failed fails the call.
bool Enter(const char* name, bool check = true) {
  if (EnterCall(name, cudaErrorUnknown, check) == cudaSuccess) return true;
  Change([&] { State::Get().last_error = std::string(name) + ": a CUDA call failed"; });
  return false;
}

std::shared_ptr<Comm> Find(ncclComm_t handle) {
  std::shared_ptr<Comm> comm;
  Change([&] {
    const auto found = State::Get().handles.find(handle);
    if (found != State::Get().handles.end()) comm = found->second;
  });
  return comm;
}

size_t SizeOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclNumTypes:
      break;
  }
  return 0;
}

// ---- What calls do

template <typename T>
struct SumOf {
  using Type = T;
};
template <>
struct SumOf<__half> {
  using Type = float;
};
template <>
struct SumOf<__nv_bfloat16> {
  using Type = float;
};

template <typename Sum>
Sum Combine(ncclRedOp_t op, Sum a, Sum b) {
  if constexpr (std::is_signed_v<Sum> && std::is_integral_v<Sum>) {
    // Integers wrap around.
    using Unsigned = std::make_unsigned_t<Sum>;
    if (op != ncclMax && op != ncclMin) {
      return static_cast<Sum>(
          Combine<Unsigned>(op, static_cast<Unsigned>(a), static_cast<Unsigned>(b)));
    }
  }
  switch (op) {
    case ncclProd:
      return a * b;
    case ncclMax:
      return a < b ? b : a;
    case ncclMin:
      return b < a ? b : a;
    default:
      return a + b;
  }
}

// sources: one for each rank. To may be one of them: each element is read before it is written.
template <typename T>
void ReduceInto(void* to, const std::vector<const void*>& sources, size_t count, ncclRedOp_t op) {
  using Sum = typename SumOf<T>::Type;
  for (size_t i = 0; i < count; ++i) {
    Sum sum = static_cast<Sum>(static_cast<const T*>(sources[0])[i]);
    for (size_t rank = 1; rank < sources.size(); ++rank) {
      sum = Combine(op, sum, static_cast<Sum>(static_cast<const T*>(sources[rank])[i]));
    }
    if (op == ncclAvg) sum = sum / static_cast<Sum>(sources.size());
    static_cast<T*>(to)[i] = T(sum);
  }
}

void ReduceInto(void* to, const std::vector<const void*>& sources, size_t count,
                ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8:
      return ReduceInto<int8_t>(to, sources, count, op);
    case ncclUint8:
      return ReduceInto<uint8_t>(to, sources, count, op);
    case ncclInt32:
      return ReduceInto<int32_t>(to, sources, count, op);
    case ncclUint32:
      return ReduceInto<uint32_t>(to, sources, count, op);
    case ncclInt64:
      return ReduceInto<int64_t>(to, sources, count, op);
    case ncclUint64:
      return ReduceInto<uint64_t>(to, sources, count, op);
    case ncclFloat16:
      return ReduceInto<__half>(to, sources, count, op);
    case ncclFloat32:
      return ReduceInto<float>(to, sources, count, op);
    case ncclFloat64:
      return ReduceInto<double>(to, sources, count, op);
    case ncclBfloat16:
      return ReduceInto<__nv_bfloat16>(to, sources, count, op);
    case ncclNumTypes:
      break;
  }
}

// calls: of all ranks in order, or of the sender and the receiver.
void Perform(const std::vector<std::shared_ptr<Call>>& calls) {
  const Call& first = *calls[0];
  const size_t bytes = first.count * SizeOf(first.type);
  const auto at = [](const void* start, size_t offset) {
    return static_cast<const char*>(start) + offset;
  };
  switch (first.kind) {
    case Kind::kSend:
    case Kind::kReceive:
      if (bytes > 0) std::memmove(calls[1]->receive, calls[0]->send, bytes);
      return;
    case Kind::kBroadcast: {
      const void* from = calls[first.root]->send;
      for (const auto& call : calls) {
        if (call->receive != from) std::memmove(call->receive, from, bytes);
      }
      return;
    }
    case Kind::kAllGather:
      for (const auto& to : calls) {
        for (size_t rank = 0; rank < calls.size(); ++rank) {
          char* place = static_cast<char*>(to->receive) + rank * bytes;
          if (place != calls[rank]->send) std::memmove(place, calls[rank]->send, bytes);
        }
      }
      return;
    case Kind::kReduce:
    case Kind::kAllReduce:
    case Kind::kReduceScatter: {
      // All sums are made before one is stored: in place, sources are destinations.
      const bool scatter = first.kind == Kind::kReduceScatter;
      std::vector<std::pair<void*, std::vector<char>>> results;
      for (const auto& to : calls) {
        if (first.kind == Kind::kReduce && to->rank != first.root) continue;
        std::vector<const void*> sources;
        for (const auto& from : calls) {
          sources.push_back(at(from->send, scatter ? to->rank * bytes : 0));
        }
        std::vector<char> result(bytes);
        ReduceInto(result.data(), sources, first.count, first.type, first.op);
        results.emplace_back(to->receive, std::move(result));
      }
      for (const auto& [to, result] : results) std::memcpy(to, result.data(), bytes);
      return;
    }
  }
}

// ---- Who waits for whom; under the lock

bool Agree(const Call& a, const Call& b) {
  if (a.is_pair()) return a.count == b.count && a.type == b.type;
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op &&
         a.root == b.root;
}

// Have all that take part in the meeting come, and do they want the same?
bool Complete(World& world, const std::vector<std::shared_ptr<Call>>& calls) {
  for (const auto& call : calls) {
    if (!call || world.comms[call->rank]->aborted) return false;
  }
  for (const auto& call : calls) {
    if (Agree(*calls[0], *call)) continue;
    if (!world.mismatch_told) {
      std::fprintf(stderr, "simt: NCCL: rank %d calls %s and rank %d %s: they wait forever\n",
                   calls[0]->rank, calls[0]->Text().c_str(), call->rank, call->Text().c_str());
    }
    world.mismatch_told = true;
    return false;
  }
  return true;
}

// Asked of the batch at the head of a stream.
bool MayRun(Batch& batch) {
  if (batch.comm->aborted) return true;
  World& world = *batch.comm->world;
  if (!batch.started) {
    auto& in_order = State::Get().in_order[batch.comm->device];
    while (in_order.front().expired()) in_order.pop_front();
    if (NcclInOrder() && in_order.front().lock().get() != &batch) return false;
    batch.started = true;
    for (const auto& [meeting, call] : batch.calls) {
      auto& calls = world.meetings[meeting];
      const int sender = std::get<0>(meeting);
      calls.resize(sender < 0 ? world.ranks : 2);
      calls[sender < 0 ? call->rank : (call->kind == Kind::kSend ? 0 : 1)] = call;
    }
    LookAgain();
  }
  for (const auto& [meeting, call] : batch.calls) {
    if (!call->done && !Complete(world, world.meetings[meeting])) return false;
  }
  return true;
}

cudaError_t Run(Batch& batch) {
  World& world = *batch.comm->world;
  cudaError_t error = cudaSuccess;
  for (const auto& [meeting, call] : batch.calls) {
    std::vector<std::shared_ptr<Call>> calls;
    Change([&, &meeting = meeting, &call = call] {
      if (!batch.comm->aborted && !call->done) calls = world.meetings[meeting];
    });
    if (calls.empty()) continue;
    error = RunOperation(
        std::string("NCCL, rank ") + std::to_string(call->rank) + ", " + call->Text(), [&] {
          Perform(calls);
          return cudaSuccess;
        });
    Change([&, &meeting = meeting] {
      for (const auto& each : calls) each->done = true;
      world.meetings.erase(meeting);
    });
    if (error != cudaSuccess) break;
  }
  Change([&] {
    ++batch.comm->completed;
    State::Get().in_order[batch.comm->device].remove_if(
        [&](const std::weak_ptr<Batch>& other) { return other.lock().get() == &batch; });
  });
  return error;
}

void EnqueueBatch(const std::shared_ptr<Batch>& batch) {
  Change([&] { State::Get().in_order[batch->comm->device].push_back(batch); });
  StreamState::Operation operation;
  operation.name = std::string("NCCL, ") + Name(batch->calls[0].second->kind);
  operation.ready = [batch] { return MayRun(*batch); };
  operation.run = [batch] { return Run(*batch); };
  Enqueue(batch->stream, std::move(operation));
  Change([&] { --batch->stream->unlaunched; });
}

// What is at fault with a buffer; empty if nothing is.
std::string BufferProblem(const char* what, const void* buffer, size_t bytes, int device) {
  if (bytes == 0) return "";
  const auto allocation = FindAllocation(buffer);
  std::string problem;
  if (!allocation || allocation->kind != MemoryKind::kDevice) {
    problem = "is not device memory";
  } else if (allocation->device != device) {
    problem = "is memory of device " + std::to_string(allocation->device) + ", not of " +
              std::to_string(device);
  } else if (bytes >
             allocation->bytes - (reinterpret_cast<uintptr_t>(buffer) - allocation->start)) {
    problem = "is too small for " + std::to_string(bytes) + " bytes: " + DescribeAddress(buffer);
  }
  return problem.empty() ? "" : std::string(what) + " " + problem;
}

bool Overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return x < y + b_bytes && y < x + a_bytes;
}

// Numbers the calls and enqueues them, or keeps them for later. Returns ncclInProgress then.
ncclResult_t Submit(const std::shared_ptr<Batch>& batch) {
  bool later = false;
  Change([&] {
    Comm& comm = *batch->comm;
    for (auto& [meeting, call] : batch->calls) {
      if (call->is_pair()) {
        const std::pair<int, int> pair = call->kind == Kind::kSend
                                             ? std::pair(call->rank, call->root)
                                             : std::pair(call->root, call->rank);
        // Both ends may be this rank: they count apart.
        const std::pair<int, int> counter =
            call->kind == Kind::kSend ? pair : std::pair(-1 - pair.first, pair.second);
        meeting = {pair.first, pair.second, comm.pairs[counter]++};
      } else {
        meeting = {-1, -1, comm.collectives++};
      }
    }
    ++comm.enqueued;
    ++batch->stream->unlaunched;
    later = !comm.blocking && State::Get().random() % 3 == 0;
    if (later) {
      comm.pending = batch;
      comm.pending_polls = 1 + static_cast<int>(State::Get().random() % 2);
    }
  });
  if (later) return ncclInProgress;
  EnqueueBatch(batch);
  return ncclSuccess;
}

// Enqueues what the calling thread's group has gathered.
ncclResult_t EndGroup() {
  const Group ended = std::exchange(group, Group());
  if (ended.error != ncclSuccess) return ended.error;
  ncclResult_t result = ncclSuccess;
  for (const auto& batch : ended.batches) {
    if (Submit(batch) == ncclInProgress) result = ncclInProgress;
  }
  return result;
}

ncclResult_t Add(ncclComm_t handle, cudaStream_t stream, Call call) {
  const bool alone = group.depth == 0;
  const auto fail = [&](ncclResult_t result, const std::string& why) {
    if (!alone && group.error == ncclSuccess) group.error = result;
    return Error(result, std::string(Name(call.kind)) + ": " + why);
  };
  if (!Enter(Name(call.kind))) {
    if (!alone && group.error == ncclSuccess) group.error = ncclUnhandledCudaError;
    return ncclUnhandledCudaError;
  }
  const auto comm = Find(handle);
  if (!comm) return fail(ncclInvalidArgument, "no such communicator");
  const auto state = FindStream(stream);
  if (!state || state->device != comm->device) {
    return fail(ncclInvalidUsage, "the stream is not of the communicator's device");
  }
  bool in_progress = false, over = false;
  ncclResult_t world_error = ncclSuccess;
  Change([&] {
    in_progress = comm->in_progress();
    world_error = comm->world->error;
    over = comm->aborted || comm->finalized;
  });
  if (over) return fail(ncclInvalidUsage, "the communicator is finalized or aborted");
  if (world_error != ncclSuccess) return fail(world_error, "the communicator could not be set up");
  if (in_progress) {
    return fail(ncclInvalidArgument, "the communicator's last call is still in progress");
  }
  const int ranks = comm->world->ranks;
  const size_t size = SizeOf(call.type);
  if (size == 0) return fail(ncclInvalidArgument, "no such type");
  if (call.op < ncclSum || call.op > ncclAvg) return fail(ncclInvalidArgument, "no such reduction");
  if (call.root < 0 || call.root >= ranks) {
    return fail(ncclInvalidArgument, "no rank " + std::to_string(call.root));
  }
  if (call.is_pair() && call.root == comm->rank && alone) {
    return fail(ncclInvalidUsage, "a send to itself, or a receive, needs a group");
  }
  call.rank = comm->rank;
  // Empty collectives are dropped; empty sends and receives meet.
  if (call.count == 0 && !call.is_pair()) return ncclSuccess;

  const bool is_root = call.root == comm->rank;
  size_t send_bytes = call.count * size, receive_bytes = send_bytes;
  const void* in_place = call.send;  // where `receive` may be
  switch (call.kind) {
    case Kind::kAllGather:
      receive_bytes *= ranks;
      in_place = static_cast<const char*>(call.send) - comm->rank * send_bytes;
      break;
    case Kind::kReduceScatter:
      in_place = static_cast<const char*>(call.send) + comm->rank * receive_bytes;
      send_bytes *= ranks;
      break;
    case Kind::kReduce:
      if (!is_root) receive_bytes = 0;
      break;
    case Kind::kBroadcast:
      if (!is_root) send_bytes = 0;
      break;
    case Kind::kSend:
      receive_bytes = 0;
      break;
    case Kind::kReceive:
      send_bytes = 0;
      break;
    case Kind::kAllReduce:
      break;
  }
  std::string problem = BufferProblem("the buffer to send", call.send, send_bytes, comm->device);
  if (problem.empty()) {
    problem = BufferProblem("the buffer to receive in", call.receive, receive_bytes, comm->device);
  }
  if (problem.empty() && call.receive != in_place &&
      Overlap(call.send, send_bytes, call.receive, receive_bytes)) {
    problem = "the buffers overlap and are not in place";
  }
  if (!problem.empty()) return fail(ncclInvalidArgument, problem);

  std::shared_ptr<Batch> batch;
  for (const auto& each : group.batches) {
    if (each->comm == comm) batch = each;
  }
  if (!batch) {
    batch = std::make_shared<Batch>();
    batch->comm = comm;
    batch->stream = state;
    group.batches.push_back(batch);
  } else if (batch->stream != state) {
    return fail(ncclInvalidUsage, "a group with a communicator's calls on two streams");
  }
  batch->calls.emplace_back(Meeting(), std::make_shared<Call>(call));
  return alone ? EndGroup() : ncclSuccess;
}

}  // namespace
}  // namespace dim0::simt

using namespace dim0::simt;

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclNumResults:
      break;
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t /*comm*/) {
  // Good until the calling thread asks again.
  thread_local std::string text;
  Change([&] { text = State::Get().last_error; });
  return text.c_str();
}

ncclResult_t ncclGetVersion(int* version) {
  if (!Enter("ncclGetVersion", false)) return ncclInternalError;
  if (!version) return Error(ncclInvalidArgument, "ncclGetVersion: no place for the version");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!Enter("ncclGetUniqueId", false)) return ncclSystemError;
  if (!id) return Error(ncclInvalidArgument, "ncclGetUniqueId: no place for the id");
  *id = {};
  Change([&] {
    std::snprintf(id->internal, sizeof(id->internal), "simt %ld %lld", static_cast<long>(getpid()),
                  static_cast<long long>(++State::Get().ids));
  });
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const std::string name = "ncclCommInitRankConfig: ";
  if (!handle) return Error(ncclInvalidArgument, name + "no place for the communicator");
  *handle = nullptr;
  if (!Enter("ncclCommInitRankConfig")) return ncclUnhandledCudaError;
  if (group.depth > 0) return Error(ncclInvalidUsage, name + "not within a group, here");
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return Error(ncclInvalidArgument,
                 name + "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  }
  bool blocking = true;
  if (config) {
    if (config->size != sizeof(ncclConfig_t) || config->magic != 0xcafebeef) {
      return Error(ncclInvalidArgument, name + "the config is not initialized");
    }
    if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 &&
        config->blocking != 1) {
      return Error(ncclInvalidArgument, name + "blocking is neither 0 nor 1");
    }
    blocking = config->blocking != 0;
  }
  const std::string key(id.internal, strnlen(id.internal, sizeof(id.internal)));
  const std::string mine = "simt " + std::to_string(getpid()) + " ";
  if (!key.starts_with(mine)) {
    return Error(ncclSystemError,
                 name + "the unique id is not of this process: emulated ranks are threads of one");
  }

  auto comm = std::make_shared<Comm>();
  comm->rank = rank;
  comm->device = CurrentDevice();
  comm->blocking = blocking;
  std::string problem;
  Change([&] {
    auto& world = State::Get().worlds[key];
    if (!world) {
      world = std::make_shared<World>();
      world->ranks = ranks;
      world->comms.resize(ranks);
    }
    comm->world = world;
    if (world->ranks != ranks) {
      problem = "one rank says " + std::to_string(world->ranks) + " ranks and another " +
                std::to_string(ranks);
    } else if (world->comms[rank]) {
      problem = "two ranks " + std::to_string(rank);
    } else {
      for (const auto& other : world->comms) {
        if (other && other->device == comm->device) {
          problem = "Duplicate GPU detected : rank " + std::to_string(other->rank) + " and rank " +
                    std::to_string(rank) + " both on CUDA device " + std::to_string(comm->device);
        }
      }
      world->comms[rank] = comm;
      ++world->arrived;
    }
    if (!problem.empty()) {
      world->error = ncclInvalidUsage;
      State::Get().last_error = name + problem;
    }
    *handle = reinterpret_cast<ncclComm_t>(++State::Get().next_handle << 4);
    State::Get().handles[*handle] = comm;
  });
  if (!problem.empty()) Error(ncclInvalidUsage, name + problem);
  if (!blocking) {
    // Even where all have come, as setting up takes its time.
    Change([&] { comm->pending_polls = 1; });
    return ncclInProgress;
  }
  WaitUntil([&] { return comm->world->ready(); });
  ncclResult_t result = ncclSuccess;
  Change([&] {
    result = comm->world->error;
    if (result != ncclSuccess) {
      State::Get().handles.erase(*handle);
      *handle = nullptr;
    }
  });
  return result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  if (!Enter("ncclCommGetAsyncError", false)) return ncclInternalError;
  const auto comm = Find(handle);
  if (!comm || !result) {
    return Error(ncclInvalidArgument, "ncclCommGetAsyncError: no such communicator");
  }
  std::shared_ptr<Batch> batch;
  Change([&] {
    if (!comm->world->ready()) {
      *result = ncclInProgress;
    } else if (comm->world->error != ncclSuccess) {
      *result = comm->world->error;
    } else if (comm->pending_polls > 0) {
      --comm->pending_polls;
      *result = ncclInProgress;
    } else if (comm->finalized && !comm->drained()) {
      *result = ncclInProgress;
    } else {
      *result = ncclSuccess;
      batch = std::move(comm->pending);
    }
  });
  if (batch) EnqueueBatch(batch);
  if (*result == ncclInProgress) Poll();
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  if (!Enter("ncclCommFinalize", false)) return ncclUnhandledCudaError;
  const auto comm = Find(handle);
  if (!comm) return Error(ncclInvalidArgument, "ncclCommFinalize: no such communicator");
  bool in_progress = false, again = false, unfinished = false;
  Change([&] {
    in_progress = comm->in_progress();
    again = comm->finalized;
    if (!in_progress) comm->finalized = true;
    unfinished = !comm->drained();
  });
  if (in_progress) {
    return Error(ncclInvalidArgument,
                 "ncclCommFinalize: the communicator's last call is still in progress");
  }
  if (again) return Error(ncclInvalidArgument, "ncclCommFinalize: called twice");
  if (!comm->blocking) return unfinished ? ncclInProgress : ncclSuccess;
  WaitUntil([&] { return comm->drained(); });
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!Enter("ncclCommDestroy", false)) return ncclUnhandledCudaError;
  const auto comm = Find(handle);
  if (!comm) return Error(ncclInvalidArgument, "ncclCommDestroy: no such communicator");
  std::shared_ptr<Batch> pending;
  bool ready = false;
  Change([&] {
    ready = comm->world->ready();
    pending = std::move(comm->pending);
  });
  if (!ready) {
    return Error(ncclInvalidArgument, "ncclCommDestroy: the communicator is still being set up");
  }
  if (pending) EnqueueBatch(pending);
  WaitUntil([&] { return comm->drained(); });
  Change([&] {
    State::Get().handles.erase(handle);
    comm->finalized = true;
  });
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!Enter("ncclCommAbort", false)) return ncclUnhandledCudaError;
  const auto comm = Find(handle);
  if (!comm) return Error(ncclInvalidArgument, "ncclCommAbort: no such communicator");
  while (GetSettings().abort_hangs) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  Change([&] {
    comm->aborted = true;
    if (comm->pending != nullptr) --comm->pending->stream->unlaunched;
    comm->pending = nullptr;
    State::Get().handles.erase(handle);
  });
  // Afterwards nothing touches this rank's buffers.
  WaitForRunningOperation();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t handle, int* ranks) {
  if (!Enter("ncclCommCount", false)) return ncclInternalError;
  const auto comm = Find(handle);
  if (!comm || !ranks) return Error(ncclInvalidArgument, "ncclCommCount: no such communicator");
  *ranks = comm->world->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  if (!Enter("ncclCommUserRank", false)) return ncclInternalError;
  const auto comm = Find(handle);
  if (!comm || !rank) return Error(ncclInvalidArgument, "ncclCommUserRank: no such communicator");
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t handle, int* device) {
  if (!Enter("ncclCommCuDevice", false)) return ncclInternalError;
  const auto comm = Find(handle);
  if (!comm || !device) return Error(ncclInvalidArgument, "ncclCommCuDevice: no such communicator");
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t handle, void* buffer, size_t bytes, void** registration) {
  if (!Enter("ncclCommRegister")) return ncclUnhandledCudaError;
  const auto comm = Find(handle);
  if (!comm || !registration) {
    return Error(ncclInvalidArgument, "ncclCommRegister: no such communicator");
  }
  const std::string problem = BufferProblem("the buffer", buffer, bytes, comm->device);
  if (!problem.empty()) return Error(ncclInvalidArgument, "ncclCommRegister: " + problem);
  *registration = new char;
  Change([&] { comm->registered.insert(*registration); });
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t handle, void* registration) {
  if (!Enter("ncclCommDeregister", false)) return ncclUnhandledCudaError;
  const auto comm = Find(handle);
  if (!comm) return Error(ncclInvalidArgument, "ncclCommDeregister: no such communicator");
  bool known = false;
  Change([&] { known = comm->registered.erase(registration) > 0; });
  if (!known) return Error(ncclInvalidArgument, "ncclCommDeregister: no such registration");
  delete static_cast<char*>(registration);
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclGroupStart() {
  if (!Enter("ncclGroupStart", false)) return ncclInternalError;
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return Error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (group.depth > 1) {
    --group.depth;
    return ncclSuccess;
  }
  if (!Enter("ncclGroupEnd")) {
    group = Group();
    return ncclUnhandledCudaError;
  }
  return EndGroup();
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Add(comm, stream,
             {.kind = Kind::kAllGather,
              .send = send,
              .receive = receive,
              .count = send_count,
              .type = type});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return Add(comm, stream,
             {.kind = Kind::kReduceScatter,
              .send = send,
              .receive = receive,
              .count = receive_count,
              .type = type,
              .op = op});
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return Add(comm, stream,
             {.kind = Kind::kAllReduce,
              .send = send,
              .receive = receive,
              .count = count,
              .type = type,
              .op = op});
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return Add(comm, stream,
             {.kind = Kind::kReduce,
              .send = send,
              .receive = receive,
              .count = count,
              .type = type,
              .op = op,
              .root = root});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return Add(comm, stream,
             {.kind = Kind::kBroadcast,
              .send = send,
              .receive = receive,
              .count = count,
              .type = type,
              .root = root});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return Add(comm, stream,
             {.kind = Kind::kSend, .send = send, .count = count, .type = type, .root = peer});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Add(
      comm, stream,
      {.kind = Kind::kReceive, .receive = receive, .count = count, .type = type, .root = peer});
}
