// Finds races on shared memory: two threads of a block access a byte, at least one of them writes
// it, and neither a barrier of the block nor, within a warp, a __syncwarp lies between. Kernels are
// compiled with -fsanitize=thread, whose calls at every access come here instead of to the
// compiler's library, so that a missing barrier is found in whatever order the threads run, and
// where the results come out right by chance.
//
// As CUDA has it, shuffles, votes and matrix products wait for lanes but order no memory. Atomics
// are not looked at, and a __syncwarp of some lanes counts as one of the whole warp.
#ifndef DIM0_TESTS_SIMT_RACES_H_
#define DIM0_TESTS_SIMT_RACES_H_

#include <cstddef>
#include <span>

namespace dim0::simt {

// The memory to look at from now on: that of the calling thread's blocks. Empty: none.
void WatchForRaces(std::span<unsigned char> shared);

// All accesses so far, of the block or of the warp, come before all later ones.
void OrderBlock();
void OrderWarp(size_t warp);

// Defined by who runs threads: the one that runs now, or -1.
int RunningThread();

struct Race {
  const void* code;  // of the access, by the running thread, that completes it
  bool writes;
  int bytes;
  bool other_wrote;
  int other_thread;  // -1: threads of several warps have read
};
// Defined by who runs threads.
void ReportRace(const Race& race);

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_RACES_H_
