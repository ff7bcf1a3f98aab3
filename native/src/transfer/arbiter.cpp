#include "transfer/arbiter.hpp"

#include <algorithm>

namespace forebay {

namespace {

// A wait for a window cannot be interrupted by new work, so it goes in slices: short while a lane
// stands idle, longer while all are busy and nothing could be handed over anyway.
constexpr double kIdleLaneSlice_s = 0.5e-3;
constexpr double kBusySlice_s = 5e-3;
constexpr std::chrono::milliseconds kLostLaneCheck{5};

}  // namespace

Arbiter::Arbiter(Direction direction, const Settings& settings, const PoolLayout& device,
                 const PoolLayout& host, Board& board, EventPool& events, Backend& backend)
    : direction_(direction),
      settings_(settings),
      device_(device),
      host_(host),
      board_(board),
      events_(events),
      backend_(backend),
      lanes_(static_cast<std::size_t>(settings.lanes)) {
  for (int lane = 0; lane < settings.lanes; ++lane) {
    lanes_[static_cast<std::size_t>(lane)].stream = backend.open_lane(direction, lane);
  }
}

Arbiter::~Arbiter() { join(Clock::now()); }

void Arbiter::start() {
  thread_ = std::thread([this] { run(); });
}

void Arbiter::join(Clock::time_point until) {
  {
    const Board::Guard guard(board_);
    until_ = until;
  }
  if (thread_.joinable()) thread_.join();
}

void Arbiter::run() {
  backend_.enter_thread();
  for (;;) {
    Lane* lane = nullptr;
    switch (decide(lane)) {
      case Next::issue:
        issue(*lane);
        break;
      case Next::await:
        await_older();
        break;
      case Next::stop:
        return;
    }
  }
}

Arbiter::Next Arbiter::decide(Lane*& lane) {
  Board::Guard guard(board_);
  for (;;) {
    if (board_.closing()) {
      if (awaits_any() && Clock::now() < until_) return Next::await;
      for (Lane& each : lanes_) {
        if (each.busy()) declare_lost(each, "the link did not end this copy before it was closed");
      }
      return Next::stop;
    }
    if (all_lost()) board_.fail_queued(direction_, "every lane of this direction is lost");
    lane = idle_lane();
    if (lane != nullptr && board_.choose(direction_, lane->window)) {
      lane->sequence = next_sequence_++;
      return Next::issue;
    }
    if (awaits_any()) return Next::await;
    if (wait_for_work(guard.for_waiting())) return Next::await;
  }
}

// Blocks until something may have become eligible. True when lost lanes should be looked at.
bool Arbiter::wait_for_work(std::unique_lock<std::mutex>& lock) {
  auto& work = board_.work[index_of(direction_)];
  const auto changed = [this, seen = board_.changes(direction_)] {
    return board_.changes(direction_) != seen || board_.closing();
  };
  const bool any_lost =
      std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.lost; });
  if (any_lost) return !work.wait_for(lock, kLostLaneCheck, changed);
  work.wait(lock, changed);
  return false;
}

// Returns why the window could not be handed over; empty when it was.
std::string Arbiter::hand_over(Lane& lane, PooledEvent*& event) {
  const Transfer& transfer = *lane.window.transfer;
  const bool load = direction_ == Direction::load;
  const PoolLayout& to = load ? device_ : host_;
  const PoolLayout& from = load ? host_ : device_;
  const Run& run = lane.window.run;
  pieces_.clear();
  for (std::int64_t at = lane.window.begin; at < lane.window.end;) {
    const auto i = static_cast<std::size_t>(run.block_at(at));
    const std::int64_t begin = run.byte_at(at);
    const std::int64_t stop = std::min(lane.window.end, run.part_end(at));
    append_pieces(pieces_, to, transfer.destinations[i], from, transfer.sources[i], begin,
                  begin + stop - at);
    at = stop;
  }
  try {
    event = events_.acquire();
    backend_.copy(lane.stream, pieces_);
    backend_.record(event->handle, lane.stream);
    return {};
  } catch (const std::exception& fault) {
    return std::string("handing over failed: ") + fault.what();
  }
}

void Arbiter::issue(Lane& lane) {
  PooledEvent* event = nullptr;
  const std::string error = hand_over(lane, event);
  const Board::Guard guard(board_);
  if (error.empty()) {
    board_.recorded(lane.window, *event);
    return;
  }
  board_.failed(lane.window, error);
  if (event != nullptr) events_.host_saw(*event);
  lane = Lane{lane.stream, {}, 0, false};
}

void Arbiter::await_older() {
  Lane& older = *older_lane();
  backend_.wait(older.window.event->handle, patience_s(older));
  for (Lane& lane : lanes_) {
    if (!lane.busy()) continue;
    const Signal signal = backend_.query(lane.window.event->handle);
    std::string error;
    double end_s = now_s();
    if (signal == Signal::failed) error = backend_.error_text(lane.window.event->handle);
    if (signal == Signal::done) {
      backend_.span(lane.stream, lane.window.event->handle, lane.window.start_s, end_s);
    }
    const Board::Guard guard(board_);
    settle(lane, signal, error, end_s);
  }
}

void Arbiter::settle(Lane& lane, Signal signal, const std::string& error, double end_s) {
  if (signal == Signal::pending) {
    if (!lane.lost && now_s() - lane.window.start_s > settings_.window_timeout_s) {
      declare_lost(lane, "the link did not end this copy within its bound");
    }
    return;
  }
  if (!lane.lost) {
    if (signal == Signal::done) {
      board_.landed(lane.window, static_cast<int>(&lane - lanes_.data()), end_s);
    } else {
      board_.failed(lane.window, error);
    }
  }
  events_.host_saw(*lane.window.event);
  lane = Lane{lane.stream, {}, 0, false};
}

// The lane stays busy: if its window ends after all, it serves again.
void Arbiter::declare_lost(Lane& lane, const std::string& error) {
  if (lane.lost) return;
  board_.failed(lane.window, error);
  lane.lost = true;
}

Arbiter::Lane* Arbiter::idle_lane() {
  for (Lane& lane : lanes_) {
    if (!lane.busy()) return &lane;
  }
  return nullptr;
}

// Of the windows in flight the oldest, but a lost one only when there is no other.
Arbiter::Lane* Arbiter::older_lane() {
  Lane* older = nullptr;
  for (Lane& lane : lanes_) {
    if (!lane.busy()) continue;
    if (older == nullptr || std::tie(lane.lost, lane.sequence) <
                                std::tie(older->lost, older->sequence)) {
      older = &lane;
    }
  }
  return older;
}

bool Arbiter::awaits_any() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.busy() && !lane.lost; });
}

bool Arbiter::all_lost() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.lost; });
}

double Arbiter::patience_s(const Lane& lane) const {
  if (lane.lost) return 0;
  const bool all_busy = std::all_of(lanes_.begin(), lanes_.end(),
                                    [](const Lane& each) { return each.busy(); });
  return all_busy ? kBusySlice_s : kIdleLaneSlice_s;
}

}  // namespace forebay
