// Text for people and their terminals.
#ifndef DIM0_RUNTIME_PRINTABLE_H_
#define DIM0_RUNTIME_PRINTABLE_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace dim0 {

// Names of folders and what stands in files can hold anything, also what moves the cursor, changes
// colours or turns lines around: `text` with a "?" for each control character (C0, DEL, C1), each
// character that overrides the direction of writing, and each byte that is not UTF-8.
std::string Printable(absl::string_view text);

// `word` as a shell reads it back as one word: quoted where need be. Printable; what is not stands
// as an escape, which bash and zsh read.
std::string ShellWord(absl::string_view word);

// A number of bytes in the largest of GiB, MiB and KiB of which it has one: "1.50 GiB", "96.00
// MiB".
std::string FormatBytes(int64_t bytes);

}  // namespace dim0

#endif  // DIM0_RUNTIME_PRINTABLE_H_
