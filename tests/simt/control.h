// The emulator's settings and its fault injection, for tests. A program that is not a test of the
// emulator is set by environment variables, read at the first call of the CUDA runtime:
//   DIM0_SIMT_DEVICES    how many devices there are, 0 to 16 (4)
//   DIM0_SIMT_MEMORY     bytes of memory of each (2 GiB)
//   DIM0_SIMT_SHARED     bytes of shared memory a block may opt into (232448, as capability 9.0)
//   DIM0_SIMT_ORDER      in which order a block's threads run: shuffled, forward or reverse
//   (shuffled) DIM0_SIMT_SEED       of the shuffle and of the choice among streams (1)
//   DIM0_SIMT_RACES      1: kernels that race on shared memory fail, in whatever order; slower (0)
//   DIM0_SIMT_LAZY       1: no stream advances until a host thread blocks or polls (0)
//   DIM0_SIMT_NCCL_IN_ORDER
//                        1: a device runs one NCCL operation at a time, in the order in which the
//                        host enqueued them, whatever the communicators and streams, as a GPU may
//                        that has no room for two: ranks with different orders then hang (0)
//   DIM0_SIMT_LOADS      1: the first launch of a kernel on a device waits for what is enqueued
//                        there, and no other thread gets into CUDA meanwhile, as it may be where
//                        the driver loads a kernel when it is first launched (0)
//   DIM0_SIMT_NO_CODE    1: there is no machine code of any kernel for the devices (0)
//   DIM0_SIMT_ABORT_HANGS
//                        1: ncclCommAbort never returns, as where a GPU hangs (0)
//   DIM0_SIMT_FAIL_CALL  the how many-th call is to fail (0: none)
//   DIM0_SIMT_HANG_CALL  the how many-th call does not return, and keeps all other threads out of
//                        CUDA (0: none)
#ifndef DIM0_TESTS_SIMT_CONTROL_H_
#define DIM0_TESTS_SIMT_CONTROL_H_

#include <cstdint>
#include <string>

namespace dim0::simt {

enum class ThreadOrder { kShuffled, kForward, kReverse };

struct Settings {
  int devices = 4;
  int64_t memory_bytes = int64_t{2} << 30;
  int shared_bytes = 232448;
  ThreadOrder order = ThreadOrder::kShuffled;
  uint64_t seed = 1;
  bool races = false;  // on shared memory are found, and fail the kernel
  bool lazy = false;
  bool nccl_in_order = false;
  bool loads = false;
  bool no_code = false;
  bool abort_hangs = false;
};

Settings GetSettings();
// Takes effect for what is enqueued from now on; the number of devices, with Reset.
void SetSettings(const Settings& settings);

// False where the kernels have not been compiled for it, as under a sanitizer: no race is found.
bool FindsRaces();

// Calls of the CUDA runtime, cuBLASLt and NCCL so far.
int64_t CallCount();
// Of these, allocations of device and of pinned memory.
int64_t AllocationCount();

// The n-th call from now, 1 the next one, fails as its kind of call can: allocations with out of
// memory, those that wait or enqueue with a launch failure that stays with the device, and so on.
// 0: none. The emulator's line on standard error says which call it was.
void FailCall(int64_t n);

// The name of the call that FailCall has made to fail; empty if it is yet to come.
std::string FailedCall();

// As a new process would find the devices: waits for what runs, drops what is enqueued, forgets
// errors, attributes and memory. No other thread may be using the runtime. Handles and device
// pointers are void.
void Reset();

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_CONTROL_H_
