// The emulated devices: streams as queues of operations, which one thread carries out, one at a
// time. Shared by the stand-ins for the CUDA runtime, cuBLASLt and NCCL.
#ifndef DIM0_TESTS_SIMT_RUNTIME_H_
#define DIM0_TESTS_SIMT_RUNTIME_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/simt/control.h"

namespace dim0::simt {

struct StreamState {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  bool is_default = false;  // the null stream
  bool destroyed = false;   // forgotten when its queue is empty
  int unlaunched = 0;       // calls of NCCL's that it has yet to enqueue
  int64_t enqueued = 0;     // operations so far
  int64_t completed = 0;

  struct Operation {
    std::string name;
    // May it run? Under the runtime's lock; empty: yes.
    std::function<bool()> ready;
    // Without the lock. Returns the error by which the device fails.
    std::function<cudaError_t()> run;
    // Runs even after the device has failed, and outside of the handling of bad accesses.
    bool always = false;
    // Points of other streams that it waits for.
    std::vector<std::pair<std::shared_ptr<StreamState>, int64_t>> after;
  };
  std::deque<Operation> queue;
};

// A call's first step: counts it and fails it if its turn has come. failure: what injected faults
// return. A failure that is a launch failure fails the current device for good, as it does where an
// earlier kernel's error is told by a later call. check: also returns the current device's error.
// Returns cudaSuccess if the call may go on.
cudaError_t EnterCall(const char* name, cudaError_t failure, bool check);

// Of the calling host thread.
int CurrentDevice();
// Keeps `error` for cudaGetLastError, and returns it.
cudaError_t SetLastError(cudaError_t error);

// A handle's stream; null is the current device's default stream. Empty where there is none.
std::shared_ptr<StreamState> FindStream(cudaStream_t stream);
void Enqueue(const std::shared_ptr<StreamState>& stream, StreamState::Operation operation);

// Makes a thread of the host wait until `condition`, called under the lock, holds. It is looked at
// again after each operation and each Notify.
void WaitUntil(const std::function<bool()>& condition);
// Runs `change` under the lock; then conditions and operations are looked at again.
void Change(const std::function<void()>& change);
// The host has asked whether something is done and it was not: a lazy device does one operation.
void Poll();

// From an operation's `ready`: something has changed on which other operations' may depend.
void LookAgain();
// Waits until the operation that runs now, if any, has ended.
void WaitForRunningOperation();

cudaError_t DeviceError(int device);
// Under the lock.
bool DeviceFailed(int device);
bool NcclInOrder();
void FailDevice(int device, cudaError_t error);

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_RUNTIME_H_
