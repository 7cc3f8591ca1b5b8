// Sockets with errors as Status, for the rendezvous of ranks in different processes.
#ifndef DIM0_COLLECTIVES_TCP_SOCKET_H_
#define DIM0_COLLECTIVES_TCP_SOCKET_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dim0 {

// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();

  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

// Listens at `port`: on the loopback interface alone if `address` is it, on all otherwise, since a
// machine's name often means another address on the machine itself. Does not block.
// Errors: InvalidArgument for an address that cannot be resolved, Unavailable for a port that
// cannot be had.
absl::StatusOr<Socket> Listen(const std::string& address, int port);

// Connects, trying again while nobody listens there, until the deadline. Errors: InvalidArgument
// for an address that cannot be resolved, DeadlineExceeded with the last reason.
absl::StatusOr<Socket> Connect(const std::string& address, int port, absl::Time deadline);

// Two connected sockets within the process. Error: ResourceExhausted.
absl::StatusOr<std::pair<Socket, Socket>> SocketPair();

// For a connection: no delay for small messages; a peer whose machine is gone is noticed within
// about a minute. Errors are ignored, since it works without.
void Tune(const Socket& socket);

void SetNonBlocking(const Socket& socket);

// Sends all bytes on a blocking socket. Error: Unavailable.
absl::Status SendAll(const Socket& socket, absl::string_view bytes);

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_TCP_SOCKET_H_
