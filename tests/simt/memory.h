// Device and pinned host memory. Each allocation has pages of its own and ends, up to an alignment
// of 64 bytes, where an inaccessible page begins; around it lie bytes of a known pattern. What has
// been freed is inaccessible and is not used again for long. So a stray access faults where it
// happens, or at the latest shows in the pattern, and the fault can be put in words.
#ifndef DIM0_TESTS_SIMT_MEMORY_H_
#define DIM0_TESTS_SIMT_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace dim0::simt {

enum class MemoryKind { kDevice, kPinned };

struct Allocation {
  uintptr_t start = 0;
  size_t bytes = 0;
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  int64_t number = 0;  // counts from 1
  bool stream_ordered = false;
  bool accessible = false;   // false: its stream has not got to the allocation yet
  bool being_freed = false;  // an enqueued operation will free it
};

// bytes > 0. Not yet accessible. Null: the address space reserved for this is used up.
void* Allocate(MemoryKind kind, int device, size_t bytes, bool stream_ordered);
// Makes it accessible, filled with 0xff: NaN as float or bfloat16, -1 as integer.
void MakeAccessible(void* start);
// Inaccessible from now on. Returns a sentence if something had written around it; empty if not.
std::string Free(void* start);

// The live allocation in which `address` lies, its end included where bytes is 0.
std::optional<Allocation> FindAllocation(const void* address);
// True: was, and is no longer, within an allocation.
bool IsFreed(const void* address);
// Marks the allocation that starts here. False if none does, or if it is marked.
bool MarkBeingFreed(void* start);
// Bytes of live device allocations not marked as being freed.
int64_t DeviceBytesInUse(int device);

// A sentence about the first allocation whose surroundings have been written, and marks it as told;
// empty if there is none. thorough: also far from the allocation, on the pages it shares.
std::string FindDamage(int device, bool thorough);

// What lies at an address that an access has faulted at, in words; empty if it is nowhere near
// emulated memory.
std::string DescribeAddress(const void* address);

// Frees everything.
void ForgetMemory();

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_MEMORY_H_
