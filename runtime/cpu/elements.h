// Loops over elements of either floating type, written so that the compiler vectorises them.
#ifndef DIM0_RUNTIME_CPU_ELEMENTS_H_
#define DIM0_RUNTIME_CPU_ELEMENTS_H_

#include "collectives/dtype.h"

namespace dim0::cpu {

// to = value, rounded to nearest, ties to even, if `to` is shorter. Member by member, because a
// struct's copy keeps a loop from becoming vector code.
inline void Set(float value, float& to) { to = value; }
inline void Set(float value, BFloat16& to) { to.bits = BFloat16(value).bits; }

}  // namespace dim0::cpu

#endif  // DIM0_RUNTIME_CPU_ELEMENTS_H_
