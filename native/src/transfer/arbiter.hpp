// One thread per direction that chooses what the link carries next.
//
// Each lane has at most one window in flight, so whatever is most urgent waits for no more than the
// windows already on the link. The choice is made anew for every window.
#pragma once

#include <thread>
#include <vector>

#include "transfer/board.hpp"

namespace forebay {

class Arbiter {
 public:
  Arbiter(Direction direction, const Settings& settings, const PoolLayout& device,
          const PoolLayout& host, Board& board, EventPool& events, Backend& backend);
  ~Arbiter();
  Arbiter(const Arbiter&) = delete;
  Arbiter& operator=(const Arbiter&) = delete;

  void start();
  // Once the board is closing: joins the thread, which waits for windows in flight until `until`
  // and then counts them as lost.
  void join(Clock::time_point until);

 private:
  struct Lane {
    StreamHandle stream = 0;
    Window window;
    std::uint64_t sequence = 0;  // of the window in flight; 0 when there is none
    bool lost = false;           // the window outlived its bound and its transfer forgot it

    bool busy() const { return sequence != 0; }
  };
  enum class Next : std::uint8_t { issue, await, stop };

  void run();
  Next decide(Lane*& lane);
  void issue(Lane& lane);
  std::string hand_over(Lane& lane, PooledEvent*& event);
  void await_older();
  void settle(Lane& lane, Signal signal, const std::string& error, double end_s);
  void declare_lost(Lane& lane, const std::string& error);
  Lane* idle_lane();
  Lane* older_lane();
  bool awaits_any() const;
  bool wait_for_work(std::unique_lock<std::mutex>& lock);
  bool all_lost() const;
  double patience_s(const Lane& lane) const;

  const Direction direction_;
  const Settings settings_;
  const PoolLayout& device_;
  const PoolLayout& host_;
  Board& board_;
  EventPool& events_;
  Backend& backend_;
  std::vector<Lane> lanes_;
  std::vector<Piece> pieces_;  // scratch
  std::uint64_t next_sequence_ = 1;
  Clock::time_point until_ = Clock::time_point::max();  // guarded by the board's lock
  std::thread thread_;
};

}  // namespace forebay
