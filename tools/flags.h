// The command line of every program here, with the exit codes that scripts rely on: 0 after --help,
// 2 for a wrong command line, and an error that says which flag and why. Abseil's own parser exits
// with 1 and prints more than a line; its flags (ABSL_FLAG, absl::GetFlag) are used as they are.
#ifndef DIM0_TOOLS_FLAGS_H_
#define DIM0_TOOLS_FLAGS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dim0 {

// Exit statuses of main().
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;        // a file, the data, the run
inline constexpr int kExitUsage = 2;          // the command line
inline constexpr int kExitInterrupted = 130;  // ended by a signal, cleanly

enum class CommandLine { kRun, kHelp };

// Sets the program's flags from `arguments`, which do not include the program's name. Understands
// --flag=value, --flag value, --flag and --noflag for booleans, and -flag for --flag; the last
// value of a flag given twice counts. kHelp if --help or -h is among them. Arguments that belong to
// no flag are appended to `positional`. Anything else, without `positional` also an argument that
// belongs to no flag, is an InvalidArgument error of one line; flags before it may have been set by
// then.
absl::StatusOr<CommandLine> ParseFlags(absl::Span<const char* const> arguments,
                                       std::vector<std::string>* positional = nullptr);

// The text of --help: `usage`, then every flag of the program with its default and description, by
// name.
std::string HelpText(absl::string_view program, absl::string_view usage);

// What main() begins with. Sees to how the process ends (tools/process.h). Parses the command line;
// if the program is to end here, prints the help to stdout or the error to stderr and returns the
// exit status:
//
//   int main(int argc, char** argv) {
//     if (const auto status = dim0::HandleCommandLine(argc, argv, "Does this and that.")) {
//       return *status;
//     }
//     ...
//   }
//
// `usage` says in a few lines what the program does and shows a command that works.
std::optional<int> HandleCommandLine(int argc, const char* const* argv, absl::string_view usage,
                                     std::vector<std::string>* positional = nullptr);

// Prints "PROGRAM: MESSAGE" to stderr, on one line.
void PrintError(absl::string_view program, absl::string_view message);

}  // namespace dim0

#endif  // DIM0_TOOLS_FLAGS_H_
