// What multi-tensor kernels are told about their tensors: a table in the kernel's parameters, which
// hold 4 KiB, so that a launch needs no copy to the device before it.
#ifndef DIM0_OPTIM_CUDA_ITEM_TABLE_H_
#define DIM0_OPTIM_CUDA_ITEM_TABLE_H_

#include <cstdint>

#include "runtime/cuda/kernel.h"

namespace dim0::cuda {

// Items and the blocks that work on them: item i has blocks [first_block[i], first_block[i + 1]).
template <typename Item, int kMost>
struct ItemTable {
  static constexpr int kMostItems = kMost;
  int count = 0;
  int first_block[kMost + 1] = {};
  Item items[kMost];

  bool full() const { return count == kMost; }
  int blocks() const { return first_block[count]; }
  void Add(const Item& item, int64_t blocks) {
    items[count] = item;
    first_block[count + 1] = first_block[count] + static_cast<int>(blocks);
    ++count;
  }

  // The item that block `block` works on.
  __device__ int ItemOf(int block) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_block[middle] <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Launches `launch(table)` for tables that hold all items among them, blocks_of(item) blocks each;
// items of no blocks are left out.
template <typename Table, typename Items, typename BlocksOf, typename LaunchTable>
cudaError_t LaunchTables(const Items& items, BlocksOf blocks_of, LaunchTable launch) {
  Table table;
  for (const auto& item : items) {
    const int64_t blocks = blocks_of(item);
    if (blocks == 0) continue;
    table.Add(item, blocks);
    if (!table.full()) continue;
    if (const cudaError_t error = launch(table); error != cudaSuccess) return error;
    table = Table();
  }
  return table.count == 0 ? cudaSuccess : launch(table);
}

}  // namespace dim0::cuda

#endif  // DIM0_OPTIM_CUDA_ITEM_TABLE_H_
