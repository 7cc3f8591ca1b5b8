#include "collectives/communicator.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dim0 {
namespace {

int64_t Sum(absl::Span<const int64_t> counts) {
  int64_t sum = 0;
  for (int64_t count : counts) sum += count;
  return sum;
}

// "[98304 x3, 98302]": equal neighbours are folded, since a sharded tensor has long runs of them.
std::string CountsText(absl::Span<const int64_t> counts) {
  std::string text = "[";
  for (size_t begin = 0, end; begin < counts.size(); begin = end) {
    for (end = begin + 1; end < counts.size() && counts[end] == counts[begin];) ++end;
    absl::StrAppend(&text, begin == 0 ? "" : ", ", counts[begin]);
    if (end - begin > 1) absl::StrAppend(&text, " x", end - begin);
  }
  text += "]";
  return text;
}

// "all_gather(unit 'h.3', parameter, float32": what every call's text begins with.
std::string CallText(absl::string_view op, const CallInfo& call, DType dtype) {
  return absl::StrCat(op, "(unit '", call.unit, "', ", Name(call.purpose), ", ", Name(dtype));
}

// Says what is wrong with one rank's arguments to one call. The first complaint is kept, so that a
// call lists its checks without a branch after each.
class Arguments {
 public:
  Arguments(absl::string_view op, const CallInfo& call, const Communicator& communicator,
            DType dtype)
      : op_(op), call_(call), communicator_(communicator), dtype_(dtype) {}

  // Later complaints are about this tensor of the call.
  void SetPart(size_t part) { part_ = absl::StrCat(" part ", part); }

  void Reducible() {
    if (dtype_ == DType::kByte) {
      Complain("byte is opaque and cannot be reduced; use int32, int64, float32 or bfloat16");
    }
  }

  void Root(int root) {
    if (root < 0 || root >= communicator_.world_size()) {
      Complain("root ", root, " is not a rank; ranks are 0 to ", communicator_.world_size() - 1);
    }
  }

  void OnePerRank(absl::string_view what, size_t size) {
    if (size != static_cast<size_t>(communicator_.world_size())) {
      Complain(what, " has ", size, " entries but must have one per rank, ",
               communicator_.world_size());
    }
  }

  void Counts(absl::Span<const int64_t> counts) {
    OnePerRank("counts", counts.size());
    int64_t sum = 0;
    for (size_t r = 0; r < counts.size(); ++r) {
      Count(absl::StrCat("counts[", r, "]"), counts[r]);
      if (__builtin_add_overflow(sum, counts[r], &sum) || sum > kMaxBytes / SizeOf(dtype_)) {
        Complain("counts ", CountsText(counts), " add up to more than 2^63 bytes");
        return;
      }
    }
  }

  void Count(absl::string_view what, int64_t count) {
    if (count < 0) Complain(what, " is ", count, "; counts must not be negative");
    if (count > kMaxBytes / SizeOf(dtype_)) {
      Complain(what, " is ", count, ", which is more than 2^63 bytes");
    }
  }

  void Buffer(absl::string_view what, const void* data, int64_t count) {
    if (count <= 0) return;
    if (data == nullptr) Complain(what, " is null but should hold ", count, " elements");
    if (Address(data) % static_cast<uintptr_t>(SizeOf(dtype_)) != 0) {
      Complain(what, " is not aligned to ", Name(dtype_), ", ", SizeOf(dtype_), " bytes");
    }
  }

  // `small` may only be the stretch of `large` that starts at element `own_offset`, or lie outside.
  // A negative offset forbids every overlap.
  void NoOverlap(const void* small, int64_t small_count, const void* large, int64_t large_count,
                 int64_t own_offset) {
    if (!status_.ok() || small_count == 0 || large_count == 0) return;
    const uintptr_t size = static_cast<uintptr_t>(SizeOf(dtype_));
    const uintptr_t a = Address(small), b = Address(large);
    if (own_offset >= 0 && a == b + static_cast<uintptr_t>(own_offset) * size) return;
    if (a < b + static_cast<uintptr_t>(large_count) * size &&
        b < a + static_cast<uintptr_t>(small_count) * size) {
      Complain("send and recv overlap",
               own_offset >= 0 ? "; in place means that send is this rank's own part of recv" : "");
    }
  }

  template <typename... Pieces>
  void Complain(const Pieces&... pieces) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat(op_, "(unit '", call_.unit, "')", part_, " on rank ", communicator_.rank(),
                     " of channel '", communicator_.name(), "': ", pieces...));
  }

  const absl::Status& status() const { return status_; }

 private:
  static constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max();

  static uintptr_t Address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

  const absl::string_view op_;
  const CallInfo& call_;
  const Communicator& communicator_;
  const DType dtype_;
  std::string part_;
  absl::Status status_;
};

}  // namespace

absl::Status Communicator::AllGather(const CallInfo& call, DType dtype,
                                     absl::Span<const AllGatherPart> parts) {
  if (!failure_.ok()) return failure_;
  Arguments arguments("all_gather", call, *this, dtype);
  std::string text = CallText("all_gather", call, dtype);
  Moved moved = {.hops = world_size_ - 1};
  for (size_t p = 0; p < parts.size() && arguments.status().ok(); ++p) {
    const AllGatherPart& part = parts[p];
    arguments.SetPart(p);
    arguments.Counts(part.counts);
    if (!arguments.status().ok()) break;
    const int64_t total = Sum(part.counts);
    arguments.Buffer("send", part.send, part.counts[rank_]);
    arguments.Buffer("recv", part.recv, total);
    arguments.NoOverlap(part.send, part.counts[rank_], part.recv, total,
                        Sum(part.counts.first(rank_)));
    absl::StrAppend(&text, ", ", CountsText(part.counts));
    moved.in += part.counts[rank_];
    moved.out += total;
    moved.sent += total - part.counts[(rank_ + 1) % world_size_];
  }
  if (!arguments.status().ok()) return Refuse(arguments.status());
  return Finish("all_gather", call, dtype, moved,
                DoAllGather(call, Identify(text + ")", moved.sent * SizeOf(dtype)), dtype, parts));
}

absl::Status Communicator::ReduceScatter(const CallInfo& call, DType dtype,
                                         absl::Span<const ReduceScatterPart> parts) {
  if (!failure_.ok()) return failure_;
  Arguments arguments("reduce_scatter", call, *this, dtype);
  arguments.Reducible();
  std::string text = CallText("reduce_scatter", call, dtype);
  Moved moved = {.hops = world_size_ - 1};
  for (size_t p = 0; p < parts.size() && arguments.status().ok(); ++p) {
    const ReduceScatterPart& part = parts[p];
    arguments.SetPart(p);
    arguments.Counts(part.counts);
    if (!arguments.status().ok()) break;
    const int64_t total = Sum(part.counts);
    arguments.Buffer("send", part.send, total);
    arguments.Buffer("recv", part.recv, part.counts[rank_]);
    arguments.NoOverlap(part.recv, part.counts[rank_], part.send, total, /*own_offset=*/-1);
    absl::StrAppend(&text, ", ", CountsText(part.counts), part.accumulate ? " added" : "");
    moved.in += total;
    moved.out += part.counts[rank_];
    moved.sent += total - part.counts[rank_];
  }
  if (!arguments.status().ok()) return Refuse(arguments.status());
  return Finish(
      "reduce_scatter", call, dtype, moved,
      DoReduceScatter(call, Identify(text + ")", moved.sent * SizeOf(dtype)), dtype, parts));
}

absl::Status Communicator::AllReduce(const CallInfo& call, DType dtype, ReduceOp op, void* data,
                                     int64_t count) {
  if (!failure_.ok()) return failure_;
  Arguments arguments("all_reduce", call, *this, dtype);
  arguments.Reducible();
  arguments.Count("count", count);
  arguments.Buffer("data", data, count);
  if (!arguments.status().ok()) return Refuse(arguments.status());
  const auto chunk = [&](int r) { return ChunkBegin(count, r + 1) - ChunkBegin(count, r); };
  const int64_t reduce_scatter = count - chunk(rank_);
  const int64_t all_gather = count - chunk((rank_ + 1) % world_size_);
  std::string text =
      absl::StrCat(CallText("all_reduce", call, dtype), ", ", Name(op), ", ", count, ")");
  const Moved moved = {.in = count,
                       .out = count,
                       .sent = reduce_scatter + all_gather,
                       .hops = 2 * (world_size_ - 1)};
  return Finish("all_reduce", call, dtype, moved,
                DoAllReduce(call, Identify(std::move(text), moved.sent * SizeOf(dtype)), dtype, op,
                            data, count));
}

absl::Status Communicator::Broadcast(const CallInfo& call, DType dtype, void* data, int64_t count,
                                     int root) {
  if (!failure_.ok()) return failure_;
  Arguments arguments("broadcast", call, *this, dtype);
  arguments.Root(root);
  arguments.Count("count", count);
  arguments.Buffer("data", data, count);
  if (!arguments.status().ok()) return Refuse(arguments.status());
  std::string text =
      absl::StrCat(CallText("broadcast", call, dtype), ", root ", root, ", ", count, ")");
  const Moved moved = {.in = rank_ == root ? count : 0,
                       .out = count,
                       .sent = world_size_ == 1 ? 0 : count,
                       .hops = world_size_ - 1};
  return Finish("broadcast", call, dtype, moved,
                DoBroadcast(call, Identify(std::move(text), moved.sent * SizeOf(dtype)), dtype,
                            data, count, root));
}

absl::Status Communicator::Gather(const CallInfo& call, DType dtype, const void* send, void* recv,
                                  absl::Span<const int64_t> counts, int root) {
  if (!failure_.ok()) return failure_;
  Arguments arguments("gather", call, *this, dtype);
  arguments.Root(root);
  arguments.Counts(counts);
  if (!arguments.status().ok()) return Refuse(arguments.status());
  const bool is_root = rank_ == root;
  arguments.Buffer("send", send, counts[rank_]);
  if (is_root) {
    arguments.Buffer("recv", recv, Sum(counts));
    arguments.NoOverlap(send, counts[rank_], recv, Sum(counts), Sum(counts.first(rank_)));
  }
  if (!arguments.status().ok()) return Refuse(arguments.status());
  std::string text =
      absl::StrCat(CallText("gather", call, dtype), ", root ", root, ", ", CountsText(counts), ")");
  const Moved moved = {.in = counts[rank_],
                       .out = is_root ? Sum(counts) : 0,
                       .sent = is_root ? 0 : counts[rank_],
                       .hops = world_size_ - 1};
  return Finish("gather", call, dtype, moved,
                DoGather(call, Identify(std::move(text), moved.sent * SizeOf(dtype)), dtype, send,
                         recv, counts, root));
}

absl::Status Communicator::Scatter(const CallInfo& call, DType dtype, const void* send, void* recv,
                                   absl::Span<const int64_t> counts, int root) {
  if (!failure_.ok()) return failure_;
  Arguments arguments("scatter", call, *this, dtype);
  arguments.Root(root);
  arguments.Counts(counts);
  if (!arguments.status().ok()) return Refuse(arguments.status());
  const bool is_root = rank_ == root;
  arguments.Buffer("recv", recv, counts[rank_]);
  if (is_root) {
    arguments.Buffer("send", send, Sum(counts));
    arguments.NoOverlap(recv, counts[rank_], send, Sum(counts), Sum(counts.first(rank_)));
  }
  if (!arguments.status().ok()) return Refuse(arguments.status());
  std::string text = absl::StrCat(CallText("scatter", call, dtype), ", root ", root, ", ",
                                  CountsText(counts), ")");
  const Moved moved = {.in = is_root ? Sum(counts) : 0,
                       .out = counts[rank_],
                       .sent = is_root ? Sum(counts) - counts[rank_] : 0,
                       .hops = world_size_ - 1};
  return Finish("scatter", call, dtype, moved,
                DoScatter(call, Identify(std::move(text), moved.sent * SizeOf(dtype)), dtype, send,
                          recv, counts, root));
}

absl::Status Communicator::AllToAll(const CallInfo& call, DType dtype,
                                    absl::Span<const ConstSegment> send,
                                    absl::Span<const Segment> recv) {
  if (!failure_.ok()) return failure_;
  Arguments arguments("all_to_all", call, *this, dtype);
  arguments.OnePerRank("send", send.size());
  arguments.OnePerRank("recv", recv.size());
  if (!arguments.status().ok()) return Refuse(arguments.status());
  Moved moved = {.hops = world_size_ - 1};
  for (int r = 0; r < world_size_ && arguments.status().ok(); ++r) {
    const std::string sent = absl::StrCat("send[", r, "]");
    const std::string received = absl::StrCat("recv[", r, "]");
    arguments.Count(sent, send[r].count);
    arguments.Buffer(sent, send[r].data, send[r].count);
    arguments.Count(received, recv[r].count);
    arguments.Buffer(received, recv[r].data, recv[r].count);
    if (!arguments.status().ok()) break;
    int64_t bytes;
    if (__builtin_add_overflow(moved.in, send[r].count, &moved.in) ||
        __builtin_mul_overflow(moved.in, SizeOf(dtype), &bytes)) {
      arguments.Complain("send adds up to more than 2^63 bytes");
    }
    if (__builtin_add_overflow(moved.out, recv[r].count, &moved.out) ||
        __builtin_mul_overflow(moved.out, SizeOf(dtype), &bytes)) {
      arguments.Complain("recv adds up to more than 2^63 bytes");
    }
    if (r != rank_) moved.sent += send[r].count;
  }
  if (!arguments.status().ok()) return Refuse(arguments.status());
  return Finish(
      "all_to_all", call, dtype, moved,
      DoAllToAll(call,
                 Identify(CallText("all_to_all", call, dtype) + ")", moved.sent * SizeOf(dtype)),
                 dtype, send, recv));
}

absl::Status Communicator::Barrier(const CallInfo& call) {
  if (!failure_.ok()) return failure_;
  std::string text = absl::StrCat("barrier(unit '", call.unit, "', ", Name(call.purpose), ")");
  return Finish("barrier", call, DType::kByte, {.hops = world_size_ - 1},
                DoBarrier(call, Identify(std::move(text), /*bytes=*/0)));
}

Communicator::Fingerprint Communicator::Identify(std::string text, int64_t bytes) {
  sending_ = bytes;
  Fingerprint fingerprint;
  fingerprint.sequence = ++sequence_;
  fingerprint.text = std::move(text);
  // FNV-1a; absl::Hash is seeded differently in every process.
  fingerprint.hash = 0xcbf29ce484222325u;
  for (unsigned char byte : absl::StrCat(name_, "\n", sequence_, "\n", fingerprint.text)) {
    fingerprint.hash = (fingerprint.hash ^ byte) * 0x100000001b3u;
  }
  return fingerprint;
}

absl::Status Communicator::Finish(absl::string_view operation, const CallInfo& call, DType dtype,
                                  const Moved& moved, absl::Status status) {
  if (transfer_ != 0) link_->WaitFor(std::exchange(transfer_, 0), moved.hops);
  if (status.ok()) {
    ledger_->Add(call.purpose, sending_);
  } else {
    failure_ = status;
  }
  if (CallRecord* const record = call.record; record != nullptr) {
    if (record->calls++ == 0) {
      record->operation = std::string(operation);
      record->channel = name_;
      record->purpose = call.purpose;
      record->dtype = dtype;
      record->sequence = sequence_;
      record->met = met_;
    }
    record->in_elements += moved.in;
    record->out_elements += moved.out;
    if (status.ok()) record->bytes_sent += sending_;
  }
  met_ = absl::InfinitePast();
  return status;
}

absl::Status Communicator::Refuse(absl::Status status) {
  failure_ = status;
  return status;
}

}  // namespace dim0
