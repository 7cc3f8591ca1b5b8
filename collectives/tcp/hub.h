// Where the ranks of different processes meet: a thread of rank 0's process, to which every rank is
// connected, rank 0 through a pair of sockets. It compares the ranks' calls, hands each what the
// others have for it, and knows who is late and who is gone. A star is slow for large data, which
// it is not for: a job's hosts exchange little.
#ifndef DIM0_COLLECTIVES_TCP_HUB_H_
#define DIM0_COLLECTIVES_TCP_HUB_H_

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "collectives/call_errors.h"
#include "collectives/process_group.h"
#include "collectives/tcp/socket.h"
#include "collectives/tcp/wire.h"

namespace dim0 {

class Hub {
 public:
  // `listener` takes the other ranks' connections; `own` leads to rank 0. `place` is the listener's
  // address, for errors.
  Hub(int world_size, const ProcessGroupOptions& options, std::string place, Socket listener,
      Socket own);

  // Rank 0 has closed its connection before, which ends the thread once the others have been told
  // what there is to tell.
  ~Hub();

 private:
  struct Connection {
    Socket socket;
    bool is_own = false;  // from this process
    int rank = -1;        // -1: has not said
    absl::Time accepted;  // when it came
    FrameReader in;
    std::string out;       // to be sent
    bool closing = false;  // once all is sent
    bool gone = false;
  };
  struct Channel {
    std::vector<Connection*> waiting;  // by rank; null: has no offer
    std::vector<Offer> offers;         // by rank
    int arrived = 0;
    int first = 0;     // the first to arrive
    absl::Time since;  // when it did
    std::vector<int> left;
    absl::Status failure;
  };

  void Run();
  // When something is due even if no byte comes.
  absl::Time NextDeadline() const;
  void CheckDeadlines(absl::Time now);

  void Accept();
  void Receive(Connection& connection);
  void Transmit(Connection& connection);
  void Drop(Connection& connection);
  void Send(Connection& connection, FrameKind kind, absl::string_view body);

  void Handle(Connection& connection, const Frame& frame);
  void Introduce(Connection& connection, const Frame& frame);
  void Meet(Connection& connection, Offer offer);
  void Deliver(const std::string& name, Channel& channel);
  // Why the channel's ranks cannot meet any more; OK if they can.
  absl::Status WhyBroken(const CallName& call, const Channel& channel) const;
  absl::Status Compare(int rank, const std::string& name, const Channel& channel) const;
  absl::Status CheckLengths(const std::string& name, const Channel& channel) const;
  // The ranks that wait get `why`, and so do all later calls.
  void Fail(const std::string& name, Channel& channel, const absl::Status& why);
  void Leave(int rank, const std::string& name);
  void LeaveAll(int rank);
  void Abort(const absl::Status& why);
  // Nobody will be welcomed.
  void RefuseAll(const absl::Status& why);

  Channel& Find(const std::string& name);
  static CallName NameOf(const std::string& name, const Offer& offer) {
    return {offer.text, offer.sequence, name};
  }

  const int world_size_;
  const absl::Duration timeout_, start_timeout_;
  const std::string place_;
  const absl::Time started_;
  const Socket listener_;

  // The thread's.
  std::list<Connection> connections_;
  std::vector<Connection*> ranks_;  // by rank; null: not here
  int joined_ = 0;
  bool complete_ = false;  // all ranks have been welcomed
  bool ending_ = false;    // rank 0 is gone
  absl::Status refused_, aborted_;
  std::vector<int> left_;  // from all channels, the first to leave first
  std::map<std::string, Channel> channels_;

  std::thread thread_;
};

}  // namespace dim0

#endif  // DIM0_COLLECTIVES_TCP_HUB_H_
