#include "tests/simt/block.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "simt/collective.h"
#include "tests/simt/memory.h"
#include "tests/simt/races.h"
#include "tests/simt/symbols.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/lsan_interface.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace dim0::cuda {
// Behind what a launch asks for, some room to notice that it wrote too far.
alignas(64) thread_local unsigned char dynamic_shared_memory[dim0::simt::kMaxSharedBytes + 4096];
}  // namespace dim0::cuda

// GCC 12 calls a variable's thread-local initialisation, which this one does not need, before its
// use in an inlined function without looking whether there is one.
extern "C" void NoInitialisation() __asm__("_ZTHN4dim04cuda21dynamic_shared_memoryE");
void NoInitialisation() {}

namespace dim0::simt {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr unsigned char kAround = 0xc5;
constexpr unsigned char kUndefined = 0xff;
constexpr size_t kAroundBytes = 1024;

// Unwinds a thread of a grid that has failed.
struct Aborted {};

// Remembers where the stack lies: the address sanitizer wants to be told.
struct StackAllocator {
  void** bottom;

  boost::context::stack_context allocate() const {
    const size_t guard = 4096;
    void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    mprotect(memory, guard, PROT_NONE);
    *bottom = static_cast<char*>(memory) + guard;
#if defined(__SANITIZE_ADDRESS__)
    // What a thread that faulted has allocated stays reachable from its stack.
    __lsan_register_root_region(*bottom, kStackBytes);
#endif
    boost::context::stack_context context;
    context.size = kStackBytes;
    context.sp = static_cast<char*>(*bottom) + kStackBytes;
    return context;
  }
  // Fibers are kept for the next grid.
  static void deallocate(boost::context::stack_context&) {}
};

// Runs threads of the current block, one after another, until one of them has to wait.
struct Fiber {
  boost::context::fiber inside;   // when it is not running
  boost::context::fiber outside;  // the scheduler, when it is
  void* stack = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
  void* tsan_scheduler = nullptr;
#endif
};

enum class State : uint8_t { kNotStarted, kRunning, kReady, kAtBarrier, kAtWarp, kEnded };

struct Thread {
  State state = State::kNotStarted;
  Fiber* fiber = nullptr;
  unsigned mask = 0;
  void* lane_data = nullptr;
  Location where;
  bool predicate = false;
};

class Scheduler {
 public:
  static Scheduler& Get() {
    static Scheduler& scheduler = *new Scheduler;
    return scheduler;
  }

  cudaError_t Run(const GridRun& run) {
    run_ = &run;
    error_ = cudaSuccess;
    random_.seed(run.seed * 0x9e3779b97f4a7c15u + 1);
    gridDim = run.grid;
    blockDim = run.block;
    threads_.resize(static_cast<size_t>(run.block.x) * run.block.y * run.block.z);
    warps_.resize((threads_.size() + 31) / 32);
    if (shared_.empty()) shared_ = StaticSharedMemory();
    WatchForRaces(run.find_races ? AllSharedMemory() : std::span<unsigned char>());
    const uint64_t blocks = static_cast<uint64_t>(run.grid.x) * run.grid.y * run.grid.z;
    // A step that has no divisor in common with the number of blocks visits each of them once.
    uint64_t at = 0, step = 1;
    if (run.order == ThreadOrder::kReverse) {
      at = blocks - 1;
      step = blocks - 1;
    } else if (run.order == ThreadOrder::kShuffled) {
      at = random_() % blocks;
      do {
        step = random_() % blocks + 1;
      } while (std::gcd(step, blocks) != 1);
    }
    for (uint64_t i = 0; i < blocks && error_ == cudaSuccess; ++i) {
      blockIdx = {static_cast<unsigned>(at % run.grid.x),
                  static_cast<unsigned>(at / run.grid.x % run.grid.y),
                  static_cast<unsigned>(at / run.grid.x / run.grid.y)};
      RunBlock();
      at = (at + step) % blocks;
    }
    run_ = nullptr;
    return error_;
  }

  bool running() const { return running_ >= 0; }
  int running_thread() const { return static_cast<int>(running_); }
  int lane() const { return running_ & 31; }

  int Barrier(bool predicate, Location where) {
    Thread& self = threads_[running_];
    self.predicate = predicate;
    self.where = where;
    self.state = State::kAtBarrier;
    if (++at_barrier_ == threads_.size()) {
      count_ = 0;
      for (const Thread& thread : threads_) {
        if (!Same(thread.where, where)) {
          Throw(cudaErrorLaunchFailure, "waits at a barrier, " + Place(where) + ", while thread " +
                                            ThreadName(&thread - threads_.data()) +
                                            " waits at another, " + Place(thread.where));
        }
        count_ += thread.predicate;
      }
      at_barrier_ = 0;
      OrderBlock();
      for (size_t i = 0; i < threads_.size(); ++i) Release(i);
    } else {
      Suspend();
    }
    return count_;
  }

  void Meet(unsigned mask, bool orders_memory, void* lane_data, WarpComplete complete,
            Location where) {
    Thread& self = threads_[running_];
    if (!(mask >> lane() & 1)) {
      Throw(cudaErrorLaunchFailure, "is not in its own mask at " + Place(where));
    }
    self.mask = mask;
    self.lane_data = lane_data;
    self.where = where;
    self.state = State::kAtWarp;
    unsigned& arrived = warps_[running_ / 32];
    arrived |= 1u << lane();
    if ((arrived & mask) != mask) {
      Suspend();
      return;
    }
    const size_t first = running_ / 32 * 32;
    void* lanes[32] = {};
    for (int i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      const Thread& thread = threads_[first + i];
      if (thread.mask != mask || !Same(thread.where, where)) {
        Throw(cudaErrorLaunchFailure, "waits for lanes of its warp at " + Place(where) +
                                          " while thread " + ThreadName(first + i) +
                                          " waits at another place or with another mask, at " +
                                          Place(thread.where));
      }
      lanes[i] = thread.lane_data;
    }
    if (complete) complete(lanes);
    if (orders_memory) OrderWarp(first / 32);
    arrived &= ~mask;
    for (int i = 0; i < 32; ++i) {
      if (mask >> i & 1) Release(first + i);
    }
  }

  [[noreturn]] void Throw(cudaError_t error, const std::string& what) {
    Report(error, what);
    throw Aborted();
  }

  // The running thread goes on: it is in the middle of an access, from where nothing can be thrown.
  void ReportRace(const Race& race) {
    const Thread& self = threads_[running_];
    const auto since = [](const Thread& thread) {
      return thread.where.line() == 0 ? "since the start" : "since " + Place(thread.where);
    };
    std::string what = std::string(race.writes ? "writes " : "reads ") +
                       std::to_string(race.bytes) + " bytes of shared memory (in " +
                       FunctionName(race.code) + ", " + since(self) + ") that ";
    if (race.other_thread < 0) {
      what += "other warps have read";
    } else {
      const Thread& other = threads_[race.other_thread];
      what += "thread " + ThreadName(race.other_thread) +
              (race.other_wrote ? " has written (" : " has read (") + since(other) + ")";
    }
    Report(cudaErrorLaunchFailure, what + ", and no barrier orders the two");
  }

  // Instead of the thread that has faulted, which never goes on.
  [[noreturn]] void LeaveForGood(cudaError_t error, const std::string& what) {
    Report(error, what);
    auto* fiber = threads_[running_].fiber;
    threads_[running_].state = State::kEnded;
    lost_ = true;
    SwitchOut(*fiber);
    std::abort();
  }

 private:
  static bool Same(const Location& a, const Location& b) {
    return a.line() == b.line() && a.column() == b.column() &&
           std::strcmp(a.file_name(), b.file_name()) == 0;
  }
  static std::string Place(const Location& where) {
    return std::string(where.file_name()) + ":" + std::to_string(where.line());
  }
  static std::string Name(uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
           std::to_string(index.z) + ")";
  }
  static uint3 Index(size_t thread) {
    const unsigned i = static_cast<unsigned>(thread);
    return {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  }
  static std::string ThreadName(size_t thread) { return Name(Index(thread)); }

  void Report(cudaError_t error, const std::string& what) {
    if (error_ != cudaSuccess) return;  // only the first
    error_ = error;
    std::string where;
    if (run_->is_kernel) {
      where = ", block " + Name(blockIdx);
      if (running_ >= 0) where += ", thread " + ThreadName(static_cast<size_t>(running_));
    }
    std::fprintf(stderr, "simt: %s%s: %s\n", run_->name.c_str(), where.c_str(), what.c_str());
  }

  // From the first to the last byte of it, and from a multiple of 64 on.
  std::span<unsigned char> AllSharedMemory() const {
    unsigned char* first = cuda::dynamic_shared_memory;
    unsigned char* last = first + kMaxSharedBytes;
    for (const std::span<unsigned char> memory : shared_) {
      first = std::min(first, memory.data());
      last = std::max(last, memory.data() + memory.size());
    }
    first -= reinterpret_cast<uintptr_t>(first) % 64;
    return {first, last};
  }

  void Release(size_t thread) {
    threads_[thread].state = State::kReady;
    if (static_cast<int64_t>(thread) == running_) {
      threads_[thread].state = State::kRunning;
    } else {
      ready_.push_back(static_cast<int>(thread));
    }
  }

  void RunBlock() {
    for (Thread& thread : threads_) thread = Thread();
    for (unsigned& arrived : warps_) arrived = 0;
    at_barrier_ = 0;
    OrderBlock();
    ready_.clear();
    next_ready_ = 0;
    order_.resize(threads_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
    if (run_->order == ThreadOrder::kReverse) std::reverse(order_.begin(), order_.end());
    if (run_->order == ThreadOrder::kShuffled) std::shuffle(order_.begin(), order_.end(), random_);
    next_start_ = 0;
    unsigned char* dynamic = cuda::dynamic_shared_memory;
    std::memset(dynamic, kUndefined, run_->shared_bytes);
    std::memset(dynamic + run_->shared_bytes, kAround, kAroundBytes);
    for (const std::span<unsigned char> memory : shared_) {
      std::memset(memory.data(), kUndefined, memory.size());
    }

    while (error_ == cudaSuccess) {
      const size_t ready = ready_.size() - next_ready_, to_start = order_.size() - next_start_;
      if (ready + to_start == 0) break;
      const bool start = ready == 0 || (to_start > 0 && run_->order == ThreadOrder::kShuffled &&
                                        random_() % (ready + to_start) < to_start);
      if (start) {
        Fiber& fiber = IdleFiber();
        SwitchIn(fiber);
      } else {
        if (run_->order == ThreadOrder::kShuffled) {
          std::swap(ready_[next_ready_], ready_[next_ready_ + random_() % ready]);
        }
        running_ = ready_[next_ready_++];
        if (next_ready_ == ready_.size()) {
          ready_.clear();
          next_ready_ = 0;
        }
        threads_[running_].state = State::kRunning;
        threadIdx = Index(running_);
        SwitchIn(*threads_[running_].fiber);
      }
      running_ = -1;
    }
    if (error_ == cudaSuccess) ReportDeadlock();
    if (error_ == cudaSuccess) {
      for (size_t i = 0; i < kAroundBytes; ++i) {
        if (dynamic[run_->shared_bytes + i] == kAround) continue;
        Report(cudaErrorIllegalAddress, "shared memory has been written " + std::to_string(i) +
                                            " bytes past the end of the " +
                                            std::to_string(run_->shared_bytes) +
                                            " bytes of the launch");
        break;
      }
    }
    if (error_ != cudaSuccess) {
      // Each thread that waits finds that the grid has failed and unwinds.
      for (size_t i = 0; i < threads_.size(); ++i) {
        const State state = threads_[i].state;
        if (state == State::kNotStarted || state == State::kEnded) continue;
        running_ = static_cast<int>(i);
        SwitchIn(*threads_[i].fiber);
      }
      running_ = -1;
    }
  }

  void ReportDeadlock() {
    const Thread* waiting = nullptr;
    for (const Thread& thread : threads_) {
      if (thread.state != State::kEnded && (!waiting || waiting->state == State::kAtBarrier)) {
        waiting = &thread;
        if (thread.state == State::kAtWarp) break;
      }
    }
    if (!waiting) return;
    running_ = static_cast<int>(waiting - threads_.data());
    // Whom it waits for.
    size_t first = 0, last = threads_.size();
    unsigned mask = ~0u;
    if (waiting->state == State::kAtWarp) {
      first = running_ / 32 * 32;
      last = first + 32;
      mask = waiting->mask;
    }
    std::string other;
    for (size_t i = first; i < last && other.empty(); ++i) {
      if (waiting->state == State::kAtWarp && !(mask >> (i - first) & 1)) continue;
      if (i >= threads_.size()) {
        other = "lane " + std::to_string(i - first) + ", which the block has no thread for";
      } else if (threads_[i].state == State::kEnded) {
        other = "thread " + ThreadName(i) + ", which has ended";
      } else if (threads_[i].state != waiting->state) {
        other = "thread " + ThreadName(i) + ", which waits at " + Place(threads_[i].where);
      }
    }
    if (other.empty()) other = "lanes that wait elsewhere";
    Report(cudaErrorLaunchFailure,
           std::string("waits forever at ") +
               (waiting->state == State::kAtWarp ? "an exchange within its warp" : "a barrier") +
               ", " + Place(waiting->where) + ", for " + other);
    running_ = -1;
  }

  // The running thread waits until it is released.
  void Suspend() {
    const int self = running_;
    SwitchOut(*threads_[self].fiber);
    if (error_ != cudaSuccess) throw Aborted();
  }

  // A fiber's whole life.
  void Loop(Fiber& fiber) {
    while (true) {
      do {
        const int self = order_[next_start_++];
        running_ = self;
        Thread& thread = threads_[self];
        thread.state = State::kRunning;
        thread.fiber = &fiber;
        threadIdx = Index(self);
        try {
          run_->thread();
        } catch (const Aborted&) {
        }
        threads_[self].state = State::kEnded;
        // Sometimes the threads that wait come first.
      } while (error_ == cudaSuccess && next_start_ < order_.size() &&
               (next_ready_ == ready_.size() || run_->order != ThreadOrder::kShuffled ||
                random_() % 8 != 0));
      idle_.push_back(&fiber);
      SwitchOut(fiber);
    }
  }

  Fiber& IdleFiber() {
    if (idle_.empty()) {
      auto* fiber = new Fiber;  // kept for good
      fiber->inside = boost::context::fiber(std::allocator_arg, StackAllocator{&fiber->stack},
                                            [this, fiber](boost::context::fiber&& outside) {
                                              fiber->outside = std::move(outside);
                                              FinishSwitchIn(*fiber);
                                              Loop(*fiber);
                                              return std::move(fiber->outside);
                                            });
#if defined(__SANITIZE_THREAD__)
      fiber->tsan = __tsan_create_fiber(0);
#endif
      all_.push_back(fiber);
      return *fiber;
    }
    Fiber& fiber = *idle_.back();
    idle_.pop_back();
    return fiber;
  }

  void SwitchIn(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack, kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
    fiber.tsan_scheduler = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber.tsan, 0);
#endif
    // What comes back is the same fiber, or nothing if it is lost.
    boost::context::fiber inside = std::move(fiber.inside).resume();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    if (lost_) {
      // It ends where it faulted: unwinding it would not work.
      auto* lost = new boost::context::fiber(std::move(inside));
      lost_fibers_.push_back(lost);
      lost_ = false;
      return;
    }
    fiber.inside = std::move(inside);
  }

  static void FinishSwitchIn([[maybe_unused]] Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &fiber.scheduler_stack, &fiber.scheduler_stack_bytes);
#endif
  }

  static void SwitchOut(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.scheduler_stack, fiber.scheduler_stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(fiber.tsan_scheduler, 0);
#endif
    fiber.outside = std::move(fiber.outside).resume();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &fiber.scheduler_stack, &fiber.scheduler_stack_bytes);
#endif
  }

  const GridRun* run_ = nullptr;
  cudaError_t error_ = cudaSuccess;
  std::mt19937_64 random_;
  std::vector<Thread> threads_;
  std::vector<unsigned> warps_;  // which lanes wait for others of their warp
  std::vector<std::span<unsigned char>> shared_;
  std::vector<int> order_;  // in which threads start
  size_t next_start_ = 0;
  std::vector<int> ready_;  // from next_ready_ on
  size_t next_ready_ = 0;
  int64_t running_ = -1;
  size_t at_barrier_ = 0;
  int count_ = 0;  // of the barrier passed last
  bool lost_ = false;
  std::vector<Fiber*> idle_;
  std::vector<Fiber*> all_;
  std::vector<boost::context::fiber*> lost_fibers_;
};

// The thread that runs grids.
thread_local bool runs_grids = false;

struct sigaction previous[NSIG];

// The last fault of a thread of a grid.
struct FaultInfo {
  int signal = 0;
  bool has_address = false;
  const void* address = nullptr;
};
FaultInfo last_fault;

constexpr size_t kEscapeStackBytes = size_t{64} << 10;
// Where LeaveFaultedThread runs: the thread's own stack may be what has overflowed.
alignas(64) unsigned char escape_stack[kEscapeStackBytes];

bool HasAddress(int signal, const siginfo_t& info) {
  return (signal == SIGSEGV || signal == SIGBUS) && info.si_code != SI_KERNEL && info.si_code > 0;
}

// Execution goes on here, out of the signal handler, after a thread of a grid has faulted.
[[noreturn]] void LeaveFaultedThread() {
  cudaError_t error = cudaErrorIllegalAddress;
  std::string what;
  if (last_fault.has_address) {
    char address[32];
    std::snprintf(address, sizeof(address), "%p", last_fault.address);
    const std::string place = DescribeAddress(last_fault.address);
    what = "bad access to " + std::string(address) + ": " +
           (place.empty() ? "not device memory" : place);
  } else if (last_fault.signal == SIGFPE) {
    error = cudaErrorLaunchFailure;
    what = "integer division by zero";
  } else {
    error = cudaErrorMisalignedAddress;
    what = "misaligned access, or one beyond an array's bounds";
  }
  Scheduler::Get().LeaveForGood(error, what);
}

void OnFault(int signal, siginfo_t* info, void* context) {
  const bool has_address = HasAddress(signal, *info);
  if (runs_grids && Scheduler::Get().running()) {
    last_fault = {signal, has_address, info->si_addr};
    const auto code = reinterpret_cast<uintptr_t>(&LeaveFaultedThread);
    // Aligned as a function finds its stack once it has been called.
    const uintptr_t stack = reinterpret_cast<uintptr_t>(escape_stack) + kEscapeStackBytes - 64;
    auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    machine.gregs[REG_RIP] = static_cast<greg_t>(code);
    machine.gregs[REG_RSP] = static_cast<greg_t>(stack - 8);
#elif defined(__aarch64__)
    machine.pc = code;
    machine.sp = stack;
#else
#error "the emulator does not know this processor's registers"
#endif
    return;
  }
  const std::string place = has_address ? DescribeAddress(info->si_addr) : "";
  if (!place.empty()) {
    std::fprintf(stderr, "simt: bad access by the host to %p: %s\n", info->si_addr, place.c_str());
  }
  // Met again without this handler, it ends the process.
  sigaction(signal, &previous[signal], nullptr);
}

}  // namespace

cudaError_t RunGrid(const GridRun& run) {
  if (!runs_grids) {
    runs_grids = true;
    // Handlers need a stack that is there even where a thread's own has overflowed.
    static unsigned char* const handler_stack = new unsigned char[64 << 10];
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = 64 << 10;
    sigaltstack(&stack, nullptr);
  }
  return Scheduler::Get().Run(run);
}

cudaError_t RunOperation(const std::string& name, const std::function<cudaError_t()>& operation) {
  cudaError_t result = cudaSuccess;
  const cudaError_t fault =
      RunGrid({.name = name, .is_kernel = false, .thread = [&] { result = operation(); }});
  return fault != cudaSuccess ? fault : result;
}

void InstallFaultHandler() {
  static const bool installed = [] {
    for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP}) {
      struct sigaction action = {};
      action.sa_sigaction = OnFault;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      sigaction(signal, &action, &previous[signal]);
    }
    return true;
  }();
  (void)installed;
}

unsigned char* DynamicSharedMemoryStart() { return cuda::dynamic_shared_memory; }

void BlockBarrier(Location where) { Scheduler::Get().Barrier(false, where); }
int BlockCount(bool predicate, Location where) {
  return Scheduler::Get().Barrier(predicate, where);
}
void WarpBarrier(unsigned mask, Location where) {
  Scheduler::Get().Meet(mask, /*orders_memory=*/true, nullptr, nullptr, where);
}
void MeetWarp(unsigned mask, void* lane_data, WarpComplete complete, Location where) {
  Scheduler::Get().Meet(mask, /*orders_memory=*/false, lane_data, complete, where);
}
int Lane() { return Scheduler::Get().lane(); }

int RunningThread() { return Scheduler::Get().running_thread(); }
void ReportRace(const Race& race) { Scheduler::Get().ReportRace(race); }

void Fail(Fault fault, const std::string& what, Location where) {
  const cudaError_t error = fault == Fault::kMisalignedAddress ? cudaErrorMisalignedAddress
                            : fault == Fault::kIllegalAddress  ? cudaErrorIllegalAddress
                                                               : cudaErrorLaunchFailure;
  Scheduler::Get().Throw(error,
                         what + ", at " + where.file_name() + ":" + std::to_string(where.line()));
}

}  // namespace dim0::simt
