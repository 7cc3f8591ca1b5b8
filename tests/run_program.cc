#include "tests/run_program.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dim0 {

namespace fs = std::filesystem;

std::string Slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

RunningProgram::RunningProgram(const std::string& program,
                               const std::vector<std::string>& arguments,
                               const std::string& streams)
    : out_(streams + "/out"), err_(streams + "/err") {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFresh = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out_.c_str(), kFresh, 0666);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err_.c_str(), kFresh, 0666);
  const int error = posix_spawn(&pid_, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error == 0) return;
  ADD_FAILURE() << "cannot start " << program << ": " << std::strerror(error);
  ended_ = true;
}

RunningProgram::~RunningProgram() {
  if (ended_) return;
  Send(SIGKILL);
  waitpid(pid_, &status_, 0);
}

void RunningProgram::Send(int signal) const {
  if (!ended_) ::kill(pid_, signal);
}

bool RunningProgram::HasEnded() {
  if (!ended_) ended_ = waitpid(pid_, &status_, WNOHANG) == pid_;
  return ended_;
}

Outcome RunningProgram::Wait() {
  if (!ended_) waitpid(pid_, &status_, 0);
  ended_ = true;
  Outcome outcome;
  if (WIFEXITED(status_)) outcome.exit_status = WEXITSTATUS(status_);
  if (WIFSIGNALED(status_)) outcome.signal = WTERMSIG(status_);
  outcome.out = Slurp(out_);
  outcome.err = Slurp(err_);
  return outcome;
}

void ProgramTest::SetUp() {
  std::string pattern = ::testing::TempDir() + "program_test_XXXXXX";
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  folder_ = pattern;
  streams_ = pattern + ".streams";
  fs::create_directory(streams_);
}

void ProgramTest::TearDown() {
  fs::remove_all(folder_);
  fs::remove_all(streams_);
}

std::string ProgramTest::Path(absl::string_view name) const {
  return absl::StrCat(folder_, "/", name);
}

std::vector<std::string> ProgramTest::Names() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    names.push_back(entry.path().lexically_relative(folder_).string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void ProgramTest::Write(absl::string_view name, absl::string_view contents) const {
  std::ofstream(Path(name), std::ios::binary) << contents;
}

Outcome ProgramTest::Run(const std::string& program,
                         const std::vector<std::string>& arguments) const {
  return RunningProgram(program, arguments, streams_).Wait();
}

std::string ProgramTest::ErrorOf(const std::string& program,
                                 const std::vector<std::string>& arguments, int exit_status,
                                 std::string* out) const {
  const std::vector<std::string> before = Names();
  Outcome outcome = Run(program, arguments);
  SCOPED_TRACE(absl::StrCat(program, " ", absl::StrJoin(arguments, " ")));
  EXPECT_EQ(outcome.signal, 0);
  EXPECT_EQ(outcome.exit_status, exit_status);
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_EQ(Names(), before);
  if (out != nullptr) {
    *out = std::move(outcome.out);
  } else {
    EXPECT_EQ(outcome.out, "");
  }
  return outcome.err.substr(0, outcome.err.find('\n'));
}

}  // namespace dim0
