// The arithmetic of reductions in CPU memory, shared by the backends that sum there. It is one
// function so that every backend rounds alike: the result depends on the sources and their order
// only, not on who sums, in what pieces, or when.
#ifndef DIM0_COLLECTIVES_REDUCE_H_
#define DIM0_COLLECTIVES_REDUCE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/dtype.h"

namespace dim0 {

// out[i] = ((sources[0][i] op sources[1][i]) op sources[2][i]) op ..., for `count` elements. With
// `accumulate`, out[i] = out[i] op that. float32 is reduced in float32; bfloat16 in float32 and
// rounded once at the end; integers in their own type, wrapping around. The maximum with a NaN is
// NaN. `out` may be one of the sources but must not overlap them otherwise. There is at least one
// source; kByte is not allowed.
void ReduceInOrder(DType dtype, ReduceOp op, absl::Span<const void* const> sources, void* out,
                   int64_t count, bool accumulate);

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_REDUCE_H_
