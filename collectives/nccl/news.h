// What a rank tells the ranks of other processes about itself, as bytes: the entries of its board
// since it last did.
#ifndef DIM0_COLLECTIVES_NCCL_NEWS_H_
#define DIM0_COLLECTIVES_NCCL_NEWS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "collectives/nccl/board.h"

namespace dim0 {

struct News {
  struct Posted {
    std::string channel;
    int64_t sequence = 0;
    std::string text;
    Lengths lengths;
  };
  std::vector<Posted> posted;     // in the order of the calls
  std::vector<std::string> left;  // channels
  bool left_all = false;
};

std::string Pack(const News& news);
// Error: Internal, if the bytes are not what Pack makes.
absl::StatusOr<News> Unpack(absl::string_view bytes);

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_NCCL_NEWS_H_
