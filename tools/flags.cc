#include "tools/flags.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "runtime/check.h"
#include "runtime/printable.h"
#include "tools/process.h"

namespace dim0 {
namespace {

// Levenshtein's: the fewest characters to insert, delete or replace.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);  // distances from a's prefix to every prefix of b
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::vector<const absl::CommandLineFlag*> FlagsByName() {
  std::vector<const absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (!flag->IsRetired()) flags.push_back(flag);
  }
  std::sort(flags.begin(), flags.end(),
            [](const auto* a, const auto* b) { return a->Name() < b->Name(); });
  return flags;
}

absl::Status UnknownFlag(absl::string_view name) {
  const absl::CommandLineFlag* nearest = nullptr;
  // A slip changes a character or two, or a third of a long name, but not all of it.
  size_t distance = std::min(std::max<size_t>(2, name.size() / 3) + 1, name.size());
  for (const absl::CommandLineFlag* flag : FlagsByName()) {
    if (const size_t d = EditDistance(name, flag->Name()); d < distance) {
      nearest = flag;
      distance = d;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown flag --", name, "; ",
                   nearest != nullptr ? absl::StrCat("did you mean --", nearest->Name(), "? ") : "",
                   "--help lists all flags"));
}

// What a value of the flag looks like, as far as its type is a plain one.
absl::string_view Expected(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<bool>()) return "expected true or false";
  if (flag.IsOfType<int32_t>()) return "expected a whole number below 2^31";
  if (flag.IsOfType<int64_t>()) return "expected a whole number";
  if (flag.IsOfType<uint32_t>()) return "expected a whole number from 0, below 2^32";
  if (flag.IsOfType<uint64_t>()) return "expected a whole number from 0";
  if (flag.IsOfType<float>() || flag.IsOfType<double>()) return "expected a number";
  return "";
}

absl::Status SetFlag(absl::CommandLineFlag& flag, absl::string_view value) {
  std::string error;
  if (flag.ParseFrom(value, &error)) return absl::OkStatus();
  const absl::string_view expected = Expected(flag);
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag.Name(), "=", value, ": ", expected.empty() ? error : expected));
}

}  // namespace

absl::StatusOr<CommandLine> ParseFlags(absl::Span<const char* const> arguments,
                                       std::vector<std::string>* positional) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    absl::string_view name = argument;
    if (positional != nullptr && !absl::StartsWith(argument, "-")) {
      positional->emplace_back(argument);
      continue;
    }
    if (!absl::ConsumePrefix(&name, "-") || name.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument \"", argument, "\"; flags are given as --flag=value"));
    }
    absl::ConsumePrefix(&name, "-");
    const size_t equals = name.find('=');
    std::optional<absl::string_view> value;
    if (equals != absl::string_view::npos) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    }
    if (!value && (name == "help" || name == "h")) return CommandLine::kHelp;

    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    if (flag == nullptr && absl::StartsWith(name, "no")) {
      absl::CommandLineFlag* negated = absl::FindCommandLineFlag(name.substr(2));
      if (negated != nullptr && negated->IsOfType<bool>()) {
        if (value) {
          return absl::InvalidArgumentError(absl::StrCat("--", name, " takes no value"));
        }
        flag = negated;
        value = "false";
      }
    }
    if (flag == nullptr || flag->IsRetired()) return UnknownFlag(name);
    if (!value && flag->IsOfType<bool>()) {
      value = "true";
    } else if (!value) {
      // A following flag is not the value but shows that the value was forgotten. A negative number
      // may follow.
      if (i + 1 == arguments.size() || absl::StartsWith(arguments[i + 1], "--")) {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
      }
      value = arguments[++i];
    }
    DIM0_RETURN_IF_ERROR(SetFlag(*flag, *value));
  }
  return CommandLine::kRun;
}

std::string HelpText(absl::string_view program, absl::string_view usage) {
  std::string text = absl::StrCat(program, ": ", usage, "\n\nFlags:\n");
  for (const absl::CommandLineFlag* flag : FlagsByName()) {
    absl::StrAppend(&text, "  --", flag->Name(), "=", flag->DefaultValue(), "\n      ",
                    absl::StrReplaceAll(flag->Help(), {{"\n", "\n      "}}), "\n");
  }
  return text;
}

std::optional<int> HandleCommandLine(int argc, const char* const* argv, absl::string_view usage,
                                     std::vector<std::string>* positional) {
  absl::string_view program = argc > 0 ? argv[0] : "";
  program = program.substr(program.rfind('/') + 1);  // npos + 1 is 0
  PrepareProcess(program);
  const absl::StatusOr<CommandLine> parsed = ParseFlags(
      {argv + std::min(argc, 1), static_cast<size_t>(std::max(argc - 1, 0))}, positional);
  if (!parsed.ok()) {
    PrintError(program, parsed.status().message());
    return kExitUsage;
  }
  if (*parsed == CommandLine::kHelp) {
    std::fputs(HelpText(program, usage).c_str(), stdout);
    return kExitOk;
  }
  return std::nullopt;
}

void PrintError(absl::string_view program, absl::string_view message) {
  const std::string line =
      absl::StrCat(program, ": ", Printable(absl::StrReplaceAll(message, {{"\n", " "}})), "\n");
  std::fputs(line.c_str(), stderr);
}

}  // namespace dim0
