// The shared state of the core: transfers, their order, hazards, steps and news, under one lock.
//
// Every method but the constructor expects `mutex` to be held, and none calls the backend.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transfer/hazards.hpp"
#include "transfer/pool.hpp"
#include "transfer/steps.hpp"
#include "transfer/window_ring.hpp"

namespace forebay {

struct Settings {
  std::int64_t window_bytes = 8 << 20;
  int lanes = 2;
  double window_timeout_s = 60.0;        // then the copy counts as lost
  std::int64_t most_transfers = 1 << 16;  // not ended, or ended and not polled
  std::int64_t window_records = 1 << 14;
};

enum class WaitVerdict : std::uint8_t { ready, not_issued, failed, timeout };

class Board {
 public:
  Board(const Settings& settings, const PoolLayout& device, const PoolLayout& host,
        const OrderingRules& rules);

  std::mutex mutex;
  std::array<std::condition_variable, kDirections> work;  // something may have become eligible
  std::condition_variable news;

  // Holds the lock. Who is to be woken is told when it is released: told before, they would wake
  // only to wait for it, and whoever holds it would pay for waking them twice.
  class Guard {
   public:
    explicit Guard(Board& board) : board_(board), lock_(board.mutex) {}
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

    // For a wait on one of the conditions above; whoever is to be woken is told first.
    std::unique_lock<std::mutex>& for_waiting();

   private:
    Board& board_;
    std::unique_lock<std::mutex> lock_;
  };

  // What callers ask.
  void admit(std::vector<std::shared_ptr<Transfer>> transfers);  // all or none
  void cancel(std::int64_t id);
  void expedite(std::int64_t id, TransferClass transfer_class, double deadline_s);
  // What is left of the load goes band by band, see CopyOrder. Leaves alone one of which nothing is
  // left, one that goes by bands already, one that fills a slot twice, and one that ended.
  void use_bands(std::int64_t id, const std::vector<std::int64_t>& ends);
  // Whether a wait on the transfer is allowed, or (`band` >= 0) on its bands up to that one; appends
  // and marks the events it covers.
  WaitVerdict begin_wait(std::int64_t id, std::int64_t band, EventPool& events,
                         std::vector<PooledEvent*>& covered);
  bool has_news() const;
  Report take_news();
  StepLedger& steps() { return steps_; }
  void step_moved();  // after a change of steps()
  void close();
  bool closing() const { return closing_; }
  std::size_t live() const { return transfers_.size(); }
  WindowRing& windows() { return windows_; }

  // What an arbiter asks.
  std::uint64_t changes(Direction direction) const { return changes_[index_of(direction)]; }
  // Takes the next window of the most urgent transfer that has one; the board keeps its address.
  bool choose(Direction direction, Window& window);
  void recorded(Window& window, PooledEvent& event);
  void landed(Window& window, int lane, double end_s);
  // `window` failed, or never ended: its transfer fails and forgets it.
  void failed(Window& window, const std::string& error);
  // No lane is left: every transfer of the direction fails.
  void fail_queued(Direction direction, const std::string& error);

 private:
  using Queue = std::map<Urgency, Transfer*>;  // what still has bytes to hand over

  void check(const Transfer& transfer) const;
  void add(std::shared_ptr<Transfer> transfer);
  std::int64_t eligible_end(const Transfer& transfer, const Run& run) const;
  bool raise_blockers(const Transfer& transfer);
  void raise(Transfer& transfer, TransferClass transfer_class, double deadline_s);
  void leave_queue(Transfer& transfer);
  void forget(Window& window);
  void note_bands(Transfer& transfer);
  void advance_done(Transfer& transfer);
  void leave_slots(Transfer& transfer, std::int64_t first, std::int64_t last);
  void settle(Transfer& transfer);
  void finish(Transfer& transfer, Outcome outcome);
  void remember(std::int64_t id, Outcome outcome);
  void wake(Direction direction);
  void tell(std::array<bool, kDirections> directions, bool with_news);
  void wake_all();

  const Settings settings_;
  const PoolLayout& device_;
  const PoolLayout& host_;
  const OrderingRules& rules_;
  const std::int64_t block_bytes_;
  Hazards hazards_;
  StepLedger steps_;
  WindowRing windows_;
  std::unordered_map<std::int64_t, std::shared_ptr<Transfer>> transfers_;
  std::array<Queue, kDirections> queues_;
  std::array<std::uint64_t, kDirections> changes_{};
  std::vector<Transfer*> blockers_;  // scratch
  std::vector<std::int64_t> issued_;
  std::vector<BandsIssued> bands_;
  std::vector<Completion> completions_;
  std::unordered_map<std::int64_t, Outcome> not_done_;  // ended lately without being done
  std::deque<std::int64_t> not_done_order_;
  std::int64_t newest_id_ = 0;
  std::int64_t polled_step_ = 0;
  bool closing_ = false;
  std::array<bool, kDirections> to_wake_{};  // once the lock is released
  bool news_to_tell_ = false;
};

}  // namespace forebay
