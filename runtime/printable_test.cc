#include "runtime/printable.h"

#include <gtest/gtest.h>

namespace dim0 {
namespace {

TEST(Printable, LeavesTextOfAnyLanguageAsItIs) {
  EXPECT_EQ(Printable(""), "");
  EXPECT_EQ(Printable("runs/a b~"), "runs/a b~");
  EXPECT_EQ(Printable("é 日本 😀 \u00a0\u2029"), "é 日本 😀 \u00a0\u2029");
}

TEST(Printable, ReplacesWhatControlsATerminal) {
  EXPECT_EQ(Printable("a\x1b[31mb\x07\n\t\x7f"), "a?[31mb????");
  EXPECT_EQ(Printable(absl::string_view("a\0b", 3)), "a?b");
  EXPECT_EQ(Printable("\xc2\x80\xc2\x9b\xc2\x9f|"), "???|");  // C1, of which U+009B is CSI
  EXPECT_EQ(Printable("a\u202a\u202eb\u2066\u2069c"), "a??b??c");
}

TEST(Printable, ReplacesBytesThatAreNotUtf8) {
  EXPECT_EQ(Printable("\x9b"
                      "31m"),
            "?31m");  // CSI to a terminal of 8 bits
  EXPECT_EQ(Printable("\xff\xfe"), "??");
  EXPECT_EQ(Printable("\xc0\xaf"), "??");            // a slash, longer than need be
  EXPECT_EQ(Printable("\xe0\x82\x9b"), "???");       // CSI, longer than need be
  EXPECT_EQ(Printable("\xed\xa0\x80"), "???");       // a surrogate
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "????");  // beyond U+10FFFF
  EXPECT_EQ(Printable("\xe6\x97"), "??");            // cut short
  EXPECT_EQ(Printable("\xe6z"), "?z");
}

TEST(ShellWord, QuotesWhatAShellWouldTakeApart) {
  EXPECT_EQ(ShellWord("runs/a-1_b.c"), "runs/a-1_b.c");
  EXPECT_EQ(ShellWord(""), "''");
  EXPECT_EQ(ShellWord("a b"), "'a b'");
  EXPECT_EQ(ShellWord("$(x);*~"), "'$(x);*~'");
  EXPECT_EQ(ShellWord("it's"), "'it'\\''s'");
  EXPECT_EQ(ShellWord("ü"), "'ü'");
  EXPECT_EQ(ShellWord("a\nb'\\\x1b"
                      "1"),
            "$'a\\012b\\'\\\\\\0331'");
  EXPECT_EQ(ShellWord("\xff"), "$'\\377'");
}

TEST(FormatBytes, TakesTheLargestUnitOfWhichThereIsOne) {
  EXPECT_EQ(FormatBytes(0), "0.00 KiB");
  EXPECT_EQ(FormatBytes(100), "0.10 KiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1024), "1023.00 KiB");
  EXPECT_EQ(FormatBytes(1 << 20), "1.00 MiB");
  EXPECT_EQ(FormatBytes(int64_t{3} << 29), "1.50 GiB");
  EXPECT_EQ(FormatBytes(int64_t{5} << 40), "5120.00 GiB");
}

}  // namespace
}  // namespace dim0
