#include "runtime/printable.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace dim0 {
namespace {

struct Character {
  size_t bytes = 1;
  bool printable = false;
};

// The first of a text that is not empty. What is not UTF-8 is one byte of it.
Character First(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, lead >= 0x20 && lead != 0x7f};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t code = lead & (0x7f >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  // Longer than need be, half a pair of UTF-16, or beyond Unicode.
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[bytes] || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff) return {};
  const bool control = code < 0xa0;
  const bool overrides = (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  return {bytes, !control && !overrides};
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string printable;
  while (!text.empty()) {
    const Character first = First(text);
    absl::StrAppend(&printable, first.printable ? text.substr(0, first.bytes) : "?");
    text.remove_prefix(first.bytes);
  }
  return printable;
}

std::string ShellWord(absl::string_view word) {
  bool plain = !word.empty(), printable = true;
  for (absl::string_view rest = word; !rest.empty();) {
    const Character first = First(rest);
    plain = plain && (absl::ascii_isalnum(static_cast<unsigned char>(rest[0])) ||
                      absl::string_view("/._-+,:=@%").find(rest[0]) != absl::string_view::npos);
    printable = printable && first.printable;
    rest.remove_prefix(first.bytes);
  }
  if (plain) return std::string(word);
  if (printable) return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
  std::string escaped = "$'";
  while (!word.empty()) {
    const Character first = First(word);
    for (const char c : word.substr(0, first.bytes)) {
      if (!first.printable) {
        // Always three digits, so that a digit after them is not taken for a fourth.
        absl::StrAppendFormat(&escaped, "\\%03o", static_cast<unsigned char>(c));
      } else if (c == '\'' || c == '\\') {
        absl::StrAppend(&escaped, "\\", absl::string_view(&c, 1));
      } else {
        escaped += c;
      }
    }
    word.remove_prefix(first.bytes);
  }
  return escaped + "'";
}

std::string FormatBytes(int64_t bytes) {
  double amount = static_cast<double>(bytes) / 1024;
  const char* unit = "KiB";
  for (const char* const larger : {"MiB", "GiB"}) {
    if (amount < 1024) break;
    amount /= 1024;
    unit = larger;
  }
  return absl::StrFormat("%.2f %s", amount, unit);
}

}  // namespace dim0
