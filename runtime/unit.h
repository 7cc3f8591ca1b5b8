// One rank's share of a unit: what the optimizer sees and updates.
#ifndef DIM0_RUNTIME_UNIT_H_
#define DIM0_RUNTIME_UNIT_H_

#include <vector>

#include "runtime/parameter.h"
#include "runtime/sharding.h"
#include "runtime/tensor.h"

namespace dim0 {

// The rows of one parameter that this rank stores, [rows.size(), cols] in device memory owned by
// the engine; they may be none.
struct ParameterShard {
  int id = 0;  // in the ParameterTable
  RowRange rows;
  Tensor value;     // what the optimizer updates, float32 or bfloat16
  Tensor gradient;  // float32 or bfloat16
  // `value` in the type in which parameters are gathered, if that is another one; else no rows.
  // Whoever changes `value` writes it in the same pass.
  Tensor copy = {};

  // What is sent to the ranks that compute with the parameter.
  const Tensor& gathered() const { return copy.rows > 0 ? copy : value; }
};

struct Unit {
  int index = 0;
  std::vector<ParameterShard> parameters;
};

}  // namespace dim0

#endif  // DIM0_RUNTIME_UNIT_H_
