// How a program here ends when something fails that no absl::Status carries.
#ifndef DIM0_TOOLS_PROCESS_H_
#define DIM0_TOOLS_PROCESS_H_

#include "absl/strings/string_view.h"

namespace dim0 {

// Makes these end the process with one line on stderr and kExitFailure: no memory for an ordinary
// allocation, a thread that the system does not start, and a mapped file that shrinks while it is
// read. Opens /dev/null for each standard stream that the caller closed, so that no file of the
// program gets its number and the terminal's lines with it. Call once, first in main().
void PrepareProcess(absl::string_view program);

// Ends the process with main()'s status. After a failure without exit handlers: OpenBLAS's waits
// for its own threads, also for those that the system refused to start.
[[noreturn]] void EndProcess(int status);

}  // namespace dim0

#endif  // DIM0_TOOLS_PROCESS_H_
