#include "transfer/watchers.hpp"

namespace forebay {

namespace {
constexpr std::size_t kMostStreams = 64;
constexpr double kStopCheck_s = 20e-3;
}  // namespace

void StepWatchers::watch(StreamHandle stream, std::int64_t step, PooledEvent& event) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  auto at = watchers_.find(stream);
  if (at == watchers_.end()) {
    if (watchers_.size() >= kMostStreams) {
      throw ProtocolError("steps were launched on more than " + std::to_string(kMostStreams) +
                          " streams: reuse compute streams");
    }
    at = watchers_.emplace(stream, std::make_unique<Watcher>()).first;
    Watcher& made = *at->second;
    made.thread = std::thread([this, &made] { run(made); });
  }
  at->second->entries.push_back(Entry{step, &event});
  at->second->changed.notify_all();
}

void StepWatchers::run(Watcher& watcher) {
  backend_.enter_thread();
  for (;;) {
    Entry entry{};
    {
      std::unique_lock lock(mutex_);
      watcher.changed.wait(lock, [&] { return stopping_ || !watcher.entries.empty(); });
      if (stopping_) return;
      entry = watcher.entries.front();
      watcher.entries.pop_front();
    }
    if (!await(entry)) continue;
    const Board::Guard guard(board_);
    board_.steps().completed(entry.step);
    board_.step_moved();
  }
}

// Whether the step ran: false when its event failed or the watcher is stopping.
bool StepWatchers::await(const Entry& entry) {
  for (;;) {
    const Signal signal = backend_.wait(entry.event->handle, kStopCheck_s);
    if (signal == Signal::pending) {
      if (stopping()) return false;
      continue;
    }
    events_.host_saw(*entry.event);
    return signal == Signal::done;
  }
}

bool StepWatchers::stopping() {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

void StepWatchers::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (auto& each : watchers_) each.second->changed.notify_all();
  }
  for (auto& each : watchers_) {
    if (each.second->thread.joinable()) each.second->thread.join();
  }
}

}  // namespace forebay
