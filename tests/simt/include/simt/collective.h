// What the emulated device functions ask of the running block: the meeting points of its threads.
#ifndef DIM0_TESTS_SIMT_INCLUDE_SIMT_COLLECTIVE_H_
#define DIM0_TESTS_SIMT_INCLUDE_SIMT_COLLECTIVE_H_

#include <source_location>
#include <string>

namespace dim0::simt {

using Location = std::source_location;

// Blocks until every thread of the block waits at `where`. One that ends, or waits elsewhere,
// fails the launch.
void BlockBarrier(Location where);

// The same, for __syncthreads_count and its like: returns for how many threads `predicate` holds.
int BlockCount(bool predicate, Location where);

// What the lanes of a warp hand in at a meeting point: the pointer of each lane in the mask, null
// for the others. Runs once, on the thread that came last; writes each lane's result through its
// pointer.
using WarpComplete = void (*)(void* const (&lanes)[32]);

// __syncwarp: as MeetWarp, and what the lanes have read and written comes before what they do next.
void WarpBarrier(unsigned mask, Location where);

// Blocks until every lane in `mask`, the caller's among them, waits at `where` with this mask, and
// `complete` (null: nothing to do) has run. A lane that ends, does not exist or waits elsewhere
// fails the launch.
void MeetWarp(unsigned mask, void* lane_data, WarpComplete complete, Location where);

// 0 to 31.
int Lane();

enum class Fault { kLaunchFailure, kMisalignedAddress, kIllegalAddress };
// Ends the launch: says `what` on standard error, with the thread and `where`.
[[noreturn]] void Fail(Fault fault, const std::string& what, Location where);

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_INCLUDE_SIMT_COLLECTIVE_H_
