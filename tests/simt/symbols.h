// What the running program's symbol table says: names for addresses of functions, and where the
// shared arrays of kernels lie.
#ifndef DIM0_TESTS_SIMT_SYMBOLS_H_
#define DIM0_TESTS_SIMT_SYMBOLS_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace dim0::simt {

// Demangled, without parameters; an address in hexadecimal where the table has none (stripped).
std::string FunctionName(const void* address);

// The calling thread's instances of the __shared__ arrays of this project's functions. Empty where
// the program is stripped.
std::vector<std::span<unsigned char>> StaticSharedMemory();

}  // namespace dim0::simt

#endif  // DIM0_TESTS_SIMT_SYMBOLS_H_
