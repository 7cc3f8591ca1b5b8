// One parallel loop over the elements of many tensors: a model has hundreds of vectors that are too
// small to wake a thread for.
#ifndef DIM0_OPTIM_CPU_TENSOR_RANGES_H_
#define DIM0_OPTIM_CPU_TENSOR_RANGES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/cpu/thread_pool.h"

namespace dim0::cpu {

// Calls body(tensor, begin, end) on the pool's threads, for ranges of elements that make up every
// tensor's `value`; blocks until done. A thread has `grain` elements at least before another one is
// woken.
template <typename TensorSet, typename Body>
void ForEachTensorRange(ThreadPool& pool, const std::vector<TensorSet>& tensors, int64_t grain,
                        const Body& body) {
  int64_t elements = 0;
  for (const TensorSet& tensor : tensors) elements += tensor.value.size();
  pool.ParallelFor(elements, grain, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const TensorSet& tensor : tensors) {
      const int64_t size = tensor.value.size();
      const int64_t from = std::max<int64_t>(begin - first, 0), to = std::min(end - first, size);
      if (from < to) body(tensor, from, to);
      first += size;
    }
  });
}

}  // namespace dim0::cpu

#endif  // DIM0_OPTIM_CPU_TENSOR_RANGES_H_
