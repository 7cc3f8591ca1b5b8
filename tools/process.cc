#include "tools/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <system_error>

#include "tools/flags.h"

namespace dim0 {
namespace {

// Where memory is short or a signal has arrived, nothing may be allocated: the name is stored here.
char program_name[64];

// Several threads may fail at once. The first speaks; the others wait for the end.
std::atomic<bool> ending = false;

[[noreturn]] void End(const char* message, const char* detail = "") {
  if (ending.exchange(true)) {
    while (true) pause();
  }
  char line[512];
  const int size = std::snprintf(line, sizeof(line), "%s: %s%s\n", program_name, message, detail);
  const size_t printed = std::clamp<int>(size, 0, sizeof(line) - 1);
  // Nobody is left to tell if stderr does not take it. _exit: destructors would wait for threads
  // that are still at work.
  [[maybe_unused]] const ssize_t ignored = write(STDERR_FILENO, line, printed);
  _exit(kExitFailure);
}

void HandleTerminate() {
  if (const std::exception_ptr exception = std::current_exception()) {
    try {
      std::rethrow_exception(exception);
    } catch (const std::bad_alloc&) {
      End("out of memory; choose a smaller model or batch, or raise the limit (ulimit -v)");
    } catch (const std::system_error& error) {
      if (error.code() == std::errc::resource_unavailable_try_again) {
        End("cannot start another thread; lower --ranks or --threads_per_rank, or raise the limits "
            "(ulimit -u, ulimit -v)");
      }
      End("unexpected error: ", error.what());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: broken invariant: exception: %s\n", program_name, error.what());
    } catch (...) {
    }
  }
  std::abort();
}

void HandleBusError(int /*signal*/) {
  End("a file was cut short, or its disk failed, while it was read; do not change --data and other "
      "inputs during a run");
}

}  // namespace

void PrepareProcess(absl::string_view program) {
  const size_t size = std::min(program.size(), sizeof(program_name) - 1);
  std::memcpy(program_name, program.data(), size);
  program_name[size] = '\0';
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // The lowest free number is the one given.
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) _exit(kExitFailure);
  }
  std::set_terminate(HandleTerminate);
  std::signal(SIGBUS, HandleBusError);
  // A file-size limit is then an error of write() like a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
}

void EndProcess(int status) {
  if (status == kExitOk) std::exit(status);
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace dim0
