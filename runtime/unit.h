// One rank's share of a unit: what the optimizer sees and updates.
#ifndef DIM0_RUNTIME_UNIT_H_
#define DIM0_RUNTIME_UNIT_H_

#include <vector>

#include "runtime/parameter.h"
#include "runtime/sharding.h"
#include "runtime/tensor.h"

namespace dim0 {

// The rows of one parameter that this rank stores. `value` and `gradient` are [rows.size(), cols]
// in device memory owned by the engine; they may be empty.
struct ParameterShard {
  int id = 0;  // in the ParameterTable
  RowRange rows;
  Tensor value;
  Tensor gradient;
};

struct Unit {
  int index = 0;
  std::vector<ParameterShard> parameters;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_UNIT_H_
