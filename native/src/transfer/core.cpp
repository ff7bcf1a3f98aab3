#include "transfer/core.hpp"

#include <algorithm>

namespace forebay {

namespace {

constexpr double kJoinShare_s = 0.05;  // of close()'s bound, kept for joining threads

const Settings& checked(const Settings& settings, const PoolLayout& device,
                        const PoolLayout& host) {
  if (settings.window_bytes <= 0) throw SettingsError("window_bytes must be positive");
  if (settings.lanes < 1 || settings.lanes > 8) throw SettingsError("lanes must be 1 to 8");
  if (!(settings.window_timeout_s > 0)) throw SettingsError("window_timeout_s must be positive");
  if (settings.most_transfers < 1) throw SettingsError("most_transfers must be positive");
  if (settings.window_records < 0) throw SettingsError("window_records must not be negative");
  if (device.block_bytes() != host.block_bytes()) {
    throw SettingsError("a block has " + std::to_string(device.block_bytes()) +
                        " bytes on the device and " + std::to_string(host.block_bytes()) +
                        " on the host: lay both pools out for the same block");
  }
  if (host.fragments().size() != 1) {
    throw SettingsError("a block must be contiguous in the host pool");
  }
  return settings;
}

}  // namespace

Core::Core(const Settings& settings, PoolLayout device, PoolLayout host,
           std::unique_ptr<Backend> backend, std::unique_ptr<OrderingRules> rules)
    : device_(std::move(device)),
      host_(std::move(host)),
      rules_(std::move(rules)),
      backend_(std::move(backend)),
      events_(*backend_, *rules_),
      board_(checked(settings, device_, host_), device_, host_, *rules_),
      watchers_(board_, events_, *backend_) {
  for (const Direction direction : {Direction::load, Direction::save}) {
    arbiters_.push_back(std::make_unique<Arbiter>(direction, settings, device_, host_, board_,
                                                  events_, *backend_));
  }
  for (const auto& arbiter : arbiters_) arbiter->start();
}

Core::~Core() { close(0); }

std::shared_ptr<Transfer> Core::make_transfer(std::int64_t id, Direction direction,
                                              TransferClass transfer_class, double deadline_s,
                                              std::span<const std::int32_t> sources,
                                              std::span<const std::int32_t> destinations,
                                              std::span<const std::int64_t> after_steps) {
  auto transfer = std::make_shared<Transfer>();
  transfer->id = id;
  transfer->direction = direction;
  transfer->urgency = Urgency{transfer_class, deadline_s, id};
  transfer->sources.assign(sources.begin(), sources.end());
  transfer->destinations.assign(destinations.begin(), destinations.end());
  transfer->after_steps.assign(after_steps.begin(), after_steps.end());
  transfer->accesses = std::make_unique_for_overwrite<Access[]>(2 * sources.size());
  return transfer;
}

void Core::submit(std::vector<std::shared_ptr<Transfer>> transfers) {
  const Board::Guard guard(board_);
  board_.admit(std::move(transfers));
}

void Core::cancel(std::span<const std::int64_t> ids) {
  const Board::Guard guard(board_);
  for (const std::int64_t id : ids) board_.cancel(id);
}

void Core::expedite(std::span<const std::int64_t> ids, TransferClass transfer_class,
                    double deadline_s) {
  if (deadline_s != deadline_s) throw ProtocolError("a deadline must be a number");
  const Board::Guard guard(board_);
  for (const std::int64_t id : ids) board_.expedite(id, transfer_class, deadline_s);
}

void Core::use_bands(std::span<const std::int64_t> ids, const std::vector<std::int64_t>& ends) {
  const Board::Guard guard(board_);
  for (const std::int64_t id : ids) board_.use_bands(id, ends);
}

void Core::step_launched(std::int64_t step, StreamHandle stream) {
  {
    const Board::Guard guard(board_);
    if (board_.closing()) throw ProtocolError("the mover is closed: open a new one");
    board_.steps().launched(step);
  }
  PooledEvent* event = nullptr;
  try {
    event = events_.acquire();
    backend_->record(event->handle, stream);
    const Signal signal = backend_->query(event->handle);
    if (signal == Signal::pending) return watchers_.watch(stream, step, *event);
    if (signal == Signal::failed) {
      throw BackendError("step " + std::to_string(step) + " would never count as run: " +
                         backend_->error_text(event->handle) +
                         "; of a graph tell where it is launched, not where it is captured");
    }
  } catch (...) {
    if (event != nullptr) events_.host_saw(*event);
    const Board::Guard guard(board_);
    board_.steps().withdrawn(step);
    throw;
  }
  events_.host_saw(*event);
  const Board::Guard guard(board_);
  board_.steps().completed(step);
  board_.step_moved();
}

void Core::step_abandoned(std::int64_t step) {
  const Board::Guard guard(board_);
  board_.steps().abandoned(step);
  board_.step_moved();
}

Report Core::poll() {
  const Board::Guard guard(board_);
  return board_.take_news();
}

WaitResult Core::begin_waits(std::span<const std::int64_t> ids, std::int64_t band, Waits& waits) {
  const Board::Guard guard(board_);
  for (const std::int64_t id : ids) {
    const WaitVerdict verdict = board_.begin_wait(id, band, events_, waits.covered);
    waits.owners.resize(waits.covered.size(), id);
    if (verdict != WaitVerdict::ready) return {verdict, id};
  }
  return {WaitVerdict::ready, 0};
}

WaitResult Core::wait(std::span<const std::int64_t> ids, StreamHandle stream, double timeout_s,
                      std::int64_t band) {
  const auto until = Clock::now() + bounded(timeout_s);
  Waits waits(events_);
  const WaitResult refused = begin_waits(ids, band, waits);
  if (refused.verdict != WaitVerdict::ready) return refused;
  for (std::size_t i = 0; i < waits.covered.size(); ++i) {
    const double left_s = std::chrono::duration<double>(until - Clock::now()).count();
    const Signal signal = backend_->stream_wait(stream, waits.covered[i]->handle, left_s);
    if (signal == Signal::pending) return {WaitVerdict::timeout, waits.owners[i]};
    if (signal == Signal::failed) return {WaitVerdict::failed, waits.owners[i]};
  }
  return {WaitVerdict::ready, 0};
}

bool Core::wait_news(double timeout_s) {
  Board::Guard guard(board_);
  return board_.news.wait_for(guard.for_waiting(), bounded(timeout_s),
                              [this] { return board_.has_news() || board_.closing(); });
}

std::vector<WindowRecord> Core::windows(std::int64_t* dropped) {
  const Board::Guard guard(board_);
  *dropped = board_.windows().dropped();
  return board_.windows().drain();
}

std::size_t Core::live_transfers() {
  const Board::Guard guard(board_);
  return board_.live();
}

void Core::close(double timeout_s) {
  const auto until = Clock::now() + bounded(timeout_s - std::min(kJoinShare_s, timeout_s / 2));
  const std::lock_guard closing(close_mutex_);
  {
    const Board::Guard guard(board_);
    board_.close();
  }
  for (const auto& arbiter : arbiters_) arbiter->join(until);
  watchers_.stop();
  backend_->close();
}

}  // namespace forebay
