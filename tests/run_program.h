// Runs the programs as users do, for tests of what they print, write and return. Bazel starts tests
// at the root of the runfiles, where a program's path is its label's: tools/train.
#ifndef DIM0_TESTS_RUN_PROGRAM_H_
#define DIM0_TESTS_RUN_PROGRAM_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace dim0 {

// The contents of a file; "" if there is none.
std::string Slurp(const std::string& path);

// What a program that ended left behind.
struct Outcome {
  int exit_status = 0;  // of exit(); 0 if a signal ended it
  int signal = 0;       // that ended it, or 0
  std::string out;      // all of stdout
  std::string err;      // all of stderr
};

// A program that was started and may still run. The destructor kills it.
class RunningProgram {
 public:
  // Both streams go to files in `streams`, an existing folder that this object may fill and that
  // outlives it. A program that cannot be started fails the test.
  RunningProgram(const std::string& program, const std::vector<std::string>& arguments,
                 const std::string& streams);
  ~RunningProgram();
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;

  void Send(int signal) const;
  bool HasEnded();
  // Waits for the end. Call it once.
  Outcome Wait();

 private:
  const std::string out_, err_;
  pid_t pid_ = -1;
  bool ended_ = false;
  int status_ = 0;  // of waitpid
};

// A test with a folder of its own, which the programs it runs may fill. It goes with the test.
class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  // A path in the test's folder.
  std::string Path(absl::string_view name) const;
  // All paths under the folder, relative to it, sorted.
  std::vector<std::string> Names() const;
  void Write(absl::string_view name, absl::string_view contents) const;

  const std::string& folder() const { return folder_; }
  // A folder beside it, so that what programs print is not found among what they write.
  const std::string& streams() const { return streams_; }

  Outcome Run(const std::string& program, const std::vector<std::string>& arguments) const;
  // Runs what must fail with this status and one line on stderr, leaving the names in the folder as
  // they are. Returns the line, without its end; stdout goes to *out if that is given, and must be
  // empty otherwise.
  std::string ErrorOf(const std::string& program, const std::vector<std::string>& arguments,
                      int exit_status, std::string* out = nullptr) const;

 private:
  std::string folder_, streams_;
};

}  // namespace dim0

#endif  // DIM0_TESTS_RUN_PROGRAM_H_
