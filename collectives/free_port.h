// For tests that listen.
#ifndef DIM0_COLLECTIVES_FREE_PORT_H_
#define DIM0_COLLECTIVES_FREE_PORT_H_

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

namespace dim0 {

// A port of the loopback interface at which nobody listened a moment ago; 0 if there is none.
inline int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  int port = 0;
  if (fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    port = ntohs(address.sin_port);
  }
  if (fd >= 0) (void)close(fd);
  return port;
}

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_FREE_PORT_H_
