// Runs grids: blocks one after another, a block's threads as fibers that take turns where they
// wait for each other. All on the calling thread, which is always the same one.
#ifndef DIM0_TESTS_SIMT_BLOCK_H_
#define DIM0_TESTS_SIMT_BLOCK_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "tests/simt/control.h"

namespace dim0::simt {

// What can be had of shared memory on any device.
inline constexpr size_t kMaxSharedBytes = size_t{228} << 10;

struct GridRun {
  std::string name;       // for messages
  bool is_kernel = true;  // false: messages name no block and thread
  dim3 grid, block;
  size_t shared_bytes = 0;
  std::function<void()> thread;
  ThreadOrder order = ThreadOrder::kShuffled;
  uint64_t seed = 0;
  bool find_races = false;
};

// Returns the error by which the grid has failed, having said on standard error what and where.
cudaError_t RunGrid(const GridRun& run);

// Runs an operation that is not a kernel so that a bad access in it is reported likewise.
cudaError_t RunOperation(const std::string& name, const std::function<cudaError_t()>& operation);

// Bad accesses on other threads are put in words before the process ends by them.
void InstallFaultHandler();

// Where the calling thread's dynamic shared memory starts.
unsigned char* DynamicSharedMemoryStart();

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_BLOCK_H_
