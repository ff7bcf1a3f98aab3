#include "transfer/board.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

namespace forebay {

namespace {

constexpr std::size_t kRemembered = 1 << 16;

bool within(const std::vector<std::int32_t>& slots, std::int64_t limit) {
  return std::all_of(slots.begin(), slots.end(),
                     [limit](std::int32_t slot) { return slot >= 0 && slot < limit; });
}

}  // namespace

Board::Board(const Settings& settings, const PoolLayout& device, const PoolLayout& host,
             const OrderingRules& rules)
    : settings_(settings),
      device_(device),
      host_(host),
      rules_(rules),
      block_bytes_(device.block_bytes()),
      hazards_(device.slots(), host.slots(), rules),
      steps_(rules),
      windows_(settings.window_records) {}

void Board::check(const Transfer& transfer) const {
  const std::string name = "transfer " + std::to_string(transfer.id);
  if (transfer.destinations.size() != transfer.sources.size() ||
      transfer.after_steps.size() != transfer.sources.size()) {
    throw ProtocolError(name + " needs one source, destination and step for each block");
  }
  if (std::isnan(transfer.urgency.deadline_s)) throw ProtocolError(name + " has no deadline");
  const bool load = transfer.direction == Direction::load;
  if (!within(transfer.sources, (load ? host_ : device_).slots()) ||
      !within(transfer.destinations, (load ? device_ : host_).slots())) {
    throw ProtocolError(name + " names a slot that its pool does not have");
  }
}

void Board::admit(std::vector<std::shared_ptr<Transfer>> transfers) {
  if (closing_) throw ProtocolError("the mover is closed: open a new one");
  std::int64_t newest = newest_id_;
  for (const auto& transfer : transfers) {
    check(*transfer);
    if (transfer->id <= newest) {
      throw ProtocolError("transfer ids must increase: " + std::to_string(transfer->id) +
                          " came after " + std::to_string(newest));
    }
    newest = transfer->id;
  }
  if (transfers_.size() + completions_.size() + transfers.size() >
      static_cast<std::size_t>(settings_.most_transfers)) {
    throw ProtocolError("more than " + std::to_string(settings_.most_transfers) +
                        " transfers not ended or not polled: poll, or submit fewer");
  }
  newest_id_ = newest;
  for (auto& transfer : transfers) add(std::move(transfer));
}

void Board::add(std::shared_ptr<Transfer> transfer) {
  Transfer& added = *transfer;
  added.order = CopyOrder(added.blocks(), block_bytes_);
  transfers_.emplace(added.id, std::move(transfer));
  if (added.all_handed()) {
    added.issued = true;
    issued_.push_back(added.id);
    finish(added, Outcome::done);
    return;
  }
  hazards_.join(added);
  queues_[index_of(added.direction)].emplace(added.urgency, &added);
  wake(added.direction);
}

void Board::cancel(std::int64_t id) {
  const auto at = transfers_.find(id);
  if (at == transfers_.end() || at->second->all_handed()) return;
  Transfer& transfer = *at->second;
  transfer.cancelled = true;
  leave_queue(transfer);
  settle(transfer);
}

void Board::expedite(std::int64_t id, TransferClass transfer_class, double deadline_s) {
  const auto at = transfers_.find(id);
  if (at != transfers_.end()) raise(*at->second, transfer_class, deadline_s);
}

void Board::raise(Transfer& transfer, TransferClass transfer_class, double deadline_s) {
  const Urgency wanted{transfer_class, deadline_s, transfer.id};
  if (!(wanted < transfer.urgency)) return;
  Queue& queue = queues_[index_of(transfer.direction)];
  auto node = queue.extract(transfer.urgency);
  transfer.urgency = wanted;
  if (node.empty()) return;
  node.key() = wanted;
  queue.insert(std::move(node));
  wake(transfer.direction);
}

void Board::leave_queue(Transfer& transfer) {
  queues_[index_of(transfer.direction)].erase(transfer.urgency);
}

void Board::use_bands(std::int64_t id, const std::vector<std::int64_t>& ends) {
  const bool rising = std::adjacent_find(ends.begin(), ends.end(), std::greater_equal<>()) ==
                      ends.end();
  if (ends.empty() || !rising || ends.front() <= 0 || ends.back() != block_bytes_) {
    throw ProtocolError("bands need ends that rise up to the bytes of a block, " +
                        std::to_string(block_bytes_));
  }
  const auto at = transfers_.find(id);
  if (at == transfers_.end()) return;
  Transfer& transfer = *at->second;
  if (transfer.direction != Direction::load) {
    throw ProtocolError("transfer " + std::to_string(id) + " is a save: only loads go by bands");
  }
  const std::int64_t begun = (transfer.handed_bytes + block_bytes_ - 1) / block_bytes_;
  if (transfer.order.bands() > 0 || begun == transfer.blocks()) return;
  if (hazards_.writes_twice(transfer)) return;
  transfer.order.use_bands(begun, ends);
}

WaitVerdict Board::begin_wait(std::int64_t id, std::int64_t band, EventPool& events,
                              std::vector<PooledEvent*>& covered) {
  const auto at = transfers_.find(id);
  if (at == transfers_.end()) {
    if (id > newest_id_) return WaitVerdict::not_issued;
    const auto ended = not_done_.find(id);
    if (ended == not_done_.end()) return WaitVerdict::ready;
    return ended->second == Outcome::failed ? WaitVerdict::failed : WaitVerdict::not_issued;
  }
  const Transfer& transfer = *at->second;
  if (transfer.failed()) return WaitVerdict::failed;
  const bool whole = band < 0 || transfer.issued;
  if (whole ? !rules_.may_wait(transfer.issued)
            : !rules_.may_wait_band(band, transfer.bands_issued)) {
    return WaitVerdict::not_issued;
  }
  const std::int64_t end = band < 0 ? transfer.order.total_bytes() : transfer.order.band_end(band);
  const auto behind = std::find_if(transfer.windows.begin(), transfer.windows.end(),
                                   [end](const Window* window) { return window->begin >= end; });
  for (auto each = transfer.windows.begin(); each != behind; ++each) {
    const Window* window = *each;
    if (window->event == nullptr || !rules_.wait_covers(each + 1 == behind)) continue;
    events.begin_wait(*window->event);
    covered.push_back(window->event);
  }
  return WaitVerdict::ready;
}

// Where the next window of `transfer`, in `run`, may end at most.
std::int64_t Board::eligible_end(const Transfer& transfer, const Run& run) const {
  const std::int64_t limit = std::min(run.stop, transfer.handed_bytes + settings_.window_bytes);
  std::int64_t at = transfer.handed_bytes;
  while (at < limit) {
    const std::int64_t block = run.block_at(at);
    // Once it has begun nothing comes before it any more, in later bands neither.
    const bool begun = run.byte_at(at) > 0;
    if (!begun && !(rules_.step_reached(steps_.completed_step(),
                                        transfer.after_steps[static_cast<std::size_t>(block)]) &&
                    hazards_.clear(transfer, block))) {
      break;
    }
    at = std::min(limit, run.part_end(at));
  }
  return at;
}

bool Board::raise_blockers(const Transfer& transfer) {
  const Run run = transfer.order.run_at(transfer.handed_bytes);
  if (run.byte_at(transfer.handed_bytes) > 0) return false;
  blockers_.clear();
  hazards_.blockers(transfer, run.block_at(transfer.handed_bytes), blockers_);
  bool own_direction = false;
  for (Transfer* blocker : blockers_) {
    const Urgency before = blocker->urgency;
    raise(*blocker, transfer.urgency.transfer_class, transfer.urgency.deadline_s);
    const bool raised = blocker->urgency < before;
    own_direction = own_direction || (raised && blocker->direction == transfer.direction);
  }
  return own_direction;
}

bool Board::choose(Direction direction, Window& window) {
  Queue& queue = queues_[index_of(direction)];
  for (auto at = queue.begin(); at != queue.end();) {
    Transfer& transfer = *at->second;
    const Run run = transfer.order.run_at(transfer.handed_bytes);
    const std::int64_t end = eligible_end(transfer, run);
    if (end == transfer.handed_bytes) {
      // What this one waits for inherits its urgency; one raised in this queue may now be before it.
      if (raise_blockers(transfer)) {
        at = queue.begin();
      } else {
        ++at;
      }
      continue;
    }
    window = Window{transfers_.at(transfer.id), run,     transfer.handed_bytes, end,
                    transfer.urgency.transfer_class, now_s(), nullptr};
    if (transfer.handed_bytes == 0) transfer.started_s = window.start_s;
    transfer.handed_bytes = end;
    transfer.windows.push_back(&window);
    if (transfer.all_handed()) leave_queue(transfer);
    return true;
  }
  return false;
}

void Board::recorded(Window& window, PooledEvent& event) {
  window.event = &event;
  Transfer& transfer = *window.transfer;
  transfer.recorded_bytes = window.end;
  if (transfer.failed()) return;
  note_bands(transfer);
  if (!transfer.all_handed() || transfer.issued) return;
  transfer.issued = true;
  issued_.push_back(transfer.id);
  news_to_tell_ = true;
}

void Board::note_bands(Transfer& transfer) {
  const std::int64_t before = transfer.bands_issued;
  while (transfer.bands_issued < transfer.order.bands() &&
         transfer.order.band_end(transfer.bands_issued) <= transfer.recorded_bytes) {
    ++transfer.bands_issued;
  }
  if (transfer.bands_issued == before) return;
  bands_.push_back(BandsIssued{transfer.id, transfer.bands_issued});
  news_to_tell_ = true;
}

void Board::forget(Window& window) {
  auto& windows = window.transfer->windows;
  windows.erase(std::remove(windows.begin(), windows.end(), &window), windows.end());
}

void Board::landed(Window& window, int lane, double end_s) {
  Transfer& transfer = *window.transfer;
  forget(window);
  windows_.push(WindowRecord{transfer.id, window.end - window.begin, window.start_s, end_s,
                             static_cast<std::uint8_t>(transfer.direction),
                             static_cast<std::uint8_t>(window.transfer_class),
                             static_cast<std::uint8_t>(lane), {}});
  if (transfers_.count(transfer.id) == 0) return;
  transfer.landed_bytes += window.end - window.begin;
  advance_done(transfer);
  settle(transfer);
}

void Board::failed(Window& window, const std::string& error) {
  Transfer& transfer = *window.transfer;
  forget(window);
  if (transfers_.count(transfer.id) == 0) return;
  transfer.failed_begin = std::min(transfer.failed_begin, window.begin);
  transfer.torn_begin = std::min(transfer.torn_begin, window.run.block_at(window.begin));
  transfer.torn_end = std::max(transfer.torn_end, window.run.block_at(window.end - 1) + 1);
  if (transfer.error.empty()) transfer.error = error;
  leave_queue(transfer);
  advance_done(transfer);
  settle(transfer);
}

void Board::fail_queued(Direction direction, const std::string& error) {
  Queue& queue = queues_[index_of(direction)];
  while (!queue.empty()) {
    Transfer& transfer = *queue.begin()->second;
    transfer.error = error;
    leave_queue(transfer);
    settle(transfer);
  }
}

void Board::advance_done(Transfer& transfer) {
  std::int64_t frontier = std::min(transfer.handed_bytes, transfer.failed_begin);
  for (const Window* window : transfer.windows) frontier = std::min(frontier, window->begin);
  const std::int64_t done = transfer.order.blocks_below(frontier);
  if (done <= transfer.blocks_done) return;
  leave_slots(transfer, transfer.blocks_done, done);
  transfer.blocks_done = done;
}

void Board::leave_slots(Transfer& transfer, std::int64_t first, std::int64_t last) {
  bool followed = false;
  for (std::int64_t block = first; block < last; ++block) {
    followed = hazards_.leave(transfer, block) || followed;
  }
  if (followed) wake_all();
}

void Board::settle(Transfer& transfer) {
  const bool whole = transfer.all_handed() && !transfer.failed();
  if (whole ? !transfer.windows.empty() : !rules_.may_end(transfer.windows.size())) return;
  if (whole) {
    finish(transfer, Outcome::done);
  } else if (transfer.failed()) {
    finish(transfer, Outcome::failed);
  } else if (transfer.cancelled) {
    finish(transfer, Outcome::cancelled);
  }
}

void Board::finish(Transfer& transfer, Outcome outcome) {
  const double now = now_s();
  const std::int64_t done = transfer.blocks_done;
  const std::int64_t touched = std::max(done, transfer.torn_end);
  const std::int64_t torn_from = touched > done ? std::max(done, transfer.torn_begin) : done;
  completions_.push_back(Completion{transfer.id, outcome, done, touched, torn_from,
                                    transfer.landed_bytes,
                                    transfer.started_s > 0 ? transfer.started_s : now, now,
                                    transfer.error});
  leave_slots(transfer, transfer.blocks_done, transfer.blocks());
  leave_queue(transfer);
  if (outcome != Outcome::done) remember(transfer.id, outcome);
  news_to_tell_ = true;
  transfers_.erase(transfer.id);  // the last use: this may destroy the transfer
}

void Board::remember(std::int64_t id, Outcome outcome) {
  not_done_.emplace(id, outcome);
  not_done_order_.push_back(id);
  if (not_done_order_.size() <= kRemembered) return;
  not_done_.erase(not_done_order_.front());
  not_done_order_.pop_front();
}

bool Board::has_news() const {
  return !issued_.empty() || !bands_.empty() || !completions_.empty() ||
          steps_.completed_step() != polled_step_;
}

Report Board::take_news() {
  polled_step_ = steps_.completed_step();
  return Report{std::exchange(issued_, {}), std::exchange(bands_, {}),
                std::exchange(completions_, {}), polled_step_};
}

void Board::step_moved() {
  wake_all();
  news_to_tell_ = true;
}

void Board::close() {
  closing_ = true;
  std::vector<std::int64_t> ids;
  for (const auto& each : transfers_) ids.push_back(each.first);
  std::sort(ids.begin(), ids.end());
  for (const std::int64_t id : ids) cancel(id);
  wake_all();
  news_to_tell_ = true;
}

void Board::wake(Direction direction) {
  ++changes_[index_of(direction)];
  to_wake_[static_cast<std::size_t>(index_of(direction))] = true;
}

void Board::tell(std::array<bool, kDirections> directions, bool with_news) {
  for (std::size_t i = 0; i < directions.size(); ++i) {
    if (directions[i]) work[i].notify_all();
  }
  if (with_news) news.notify_all();
}

std::unique_lock<std::mutex>& Board::Guard::for_waiting() {
  board_.tell(std::exchange(board_.to_wake_, {}), std::exchange(board_.news_to_tell_, false));
  return lock_;
}

Board::Guard::~Guard() {
  const auto directions = std::exchange(board_.to_wake_, {});
  const bool with_news = std::exchange(board_.news_to_tell_, false);
  lock_.unlock();
  board_.tell(directions, with_news);
}

void Board::wake_all() {
  wake(Direction::load);
  wake(Direction::save);
}

}  // namespace forebay
