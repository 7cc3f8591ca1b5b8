#include "collectives/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "collectives/steady_clock.h"

namespace dim0 {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// The longest pause between two tries, and the longest try.
constexpr absl::Duration kLongestPause = absl::Seconds(1);
constexpr absl::Duration kLongestTry = absl::Seconds(20);

absl::StatusOr<Addresses> Resolve(const char* address, int port, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address, absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot find the address '", address == nullptr ? "" : address,
                     "': ", error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error),
                     "; MASTER_ADDR must be the name or address of rank 0's machine"));
  }
  return Addresses(found, &freeaddrinfo);
}

bool IsLoopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto& in = *reinterpret_cast<const sockaddr_in*>(address.ai_addr);
    return ntohl(in.sin_addr.s_addr) == INADDR_LOOPBACK;
  }
  const auto& in6 = *reinterpret_cast<const sockaddr_in6*>(address.ai_addr);
  return address.ai_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr);
}

void SetOption(const Socket& socket, int level, int option, int value) {
  (void)setsockopt(socket.fd(), level, option, &value, sizeof(value));
}

// One try at one address; an errno, or 0.
int TryConnect(const addrinfo& address, absl::Time deadline, Socket* connected) {
  Socket socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.fd() < 0) return errno;
  if (connect(socket.fd(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    pollfd ready = {socket.fd(), POLLOUT, 0};
    const absl::Duration left =
        std::clamp(deadline - SteadyNow(), absl::ZeroDuration(), kLongestTry);
    const int polled = poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(left)));
    if (polled < 0) return errno;
    if (polled == 0) return ETIMEDOUT;
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
    if (error != 0) return error;
  }
  // A port that nobody listens at may be given to the very socket that asks for it, which then
  // talks to itself.
  sockaddr_storage mine = {}, peer = {};
  socklen_t mine_size = sizeof(mine), peer_size = sizeof(peer);
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&mine), &mine_size) != 0 ||
      getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) {
    return errno;
  }
  if (mine_size == peer_size && std::memcmp(&mine, &peer, mine_size) == 0) return ECONNREFUSED;
  (void)fcntl(socket.fd(), F_SETFL, fcntl(socket.fd(), F_GETFL) & ~O_NONBLOCK);
  *connected = std::move(socket);
  return 0;
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) (void)close(fd_);
}

absl::StatusOr<Socket> Listen(const std::string& address, int port) {
  absl::StatusOr<Addresses> named = Resolve(address.c_str(), port, 0);
  if (!named.ok()) return named.status();
  absl::StatusOr<Addresses> places =
      IsLoopback(**named) ? std::move(named) : Resolve(nullptr, port, AI_PASSIVE);
  if (!places.ok()) return places.status();
  int error = 0;
  // IPv6 first: such a socket takes IPv4's connections, too.
  for (int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* place = places->get(); place != nullptr; place = place->ai_next) {
      if (place->ai_family != family) continue;
      Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (socket.fd() >= 0) {
        SetOption(socket, SOL_SOCKET, SO_REUSEADDR, 1);
        if (family == AF_INET6) SetOption(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
        if (bind(socket.fd(), place->ai_addr, place->ai_addrlen) == 0 &&
            listen(socket.fd(), SOMAXCONN) == 0) {
          return socket;
        }
      }
      if (error != EADDRINUSE) error = errno;
    }
  }
  return absl::UnavailableError(
      absl::StrCat("rank 0 cannot listen at port ", port, ": ", std::strerror(error),
                   "; choose another MASTER_PORT, and start one process with RANK=0"));
}

absl::StatusOr<Socket> Connect(const std::string& address, int port, absl::Time deadline) {
  absl::StatusOr<Addresses> addresses = Resolve(address.c_str(), port, 0);
  if (!addresses.ok()) return addresses.status();
  absl::Duration pause = absl::Milliseconds(10);
  for (;;) {
    int error = 0;
    for (const addrinfo* to = addresses->get(); to != nullptr; to = to->ai_next) {
      Socket socket;
      error = TryConnect(*to, deadline, &socket);
      if (error == 0) return socket;
    }
    if (SteadyNow() + pause >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("cannot reach rank 0 at ", address, ":", port, ": ", std::strerror(error),
                       "; see that rank 0 runs there, and that MASTER_ADDR and MASTER_PORT are "
                       "the same for every rank"));
    }
    absl::SleepFor(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

absl::StatusOr<std::pair<Socket, Socket>> SocketPair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot make a pair of sockets: ", std::strerror(errno)));
  }
  return std::pair<Socket, Socket>(Socket(fds[0]), Socket(fds[1]));
}

void Tune(const Socket& socket) {
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPIDLE, 20);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
  SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 60'000);
}

void SetNonBlocking(const Socket& socket) {
  (void)fcntl(socket.fd(), F_SETFL, fcntl(socket.fd(), F_GETFL) | O_NONBLOCK);
}

absl::Status SendAll(const Socket& socket, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return absl::UnavailableError(
          absl::StrCat("the connection to rank 0 is lost: ", std::strerror(errno)));
    }
    bytes.remove_prefix(sent);
  }
  return absl::OkStatus();
}

}  // namespace dim0
