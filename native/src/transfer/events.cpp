#include "transfer/events.hpp"

#include <algorithm>
#include <utility>

namespace forebay {

EventPool::~EventPool() {
  for (const auto& event : events_) backend_.destroy_event(event->handle);
}

PooledEvent* EventPool::take_reusable() {
  const std::lock_guard lock(mutex_);
  for (const auto& event : events_) {
    if (rules_.event_reusable(event->host_saw_completion, event->waits_in_progress)) {
      event->host_saw_completion = false;
      return event.get();
    }
  }
  return nullptr;
}

PooledEvent* EventPool::acquire() {
  if (PooledEvent* reused = take_reusable()) return reused;
  auto made = std::make_unique<PooledEvent>();
  made->handle = backend_.create_event();
  made->host_saw_completion = false;
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(made));
  return events_.back().get();
}

void EventPool::host_saw(PooledEvent& event) {
  const std::lock_guard lock(mutex_);
  event.host_saw_completion = true;
}

void EventPool::begin_wait(PooledEvent& event) {
  const std::lock_guard lock(mutex_);
  ++event.waits_in_progress;
}

void EventPool::end_wait(PooledEvent& event) {
  const std::lock_guard lock(mutex_);
  --event.waits_in_progress;
}

std::size_t EventPool::in_use() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(events_.begin(), events_.end(), [this](const auto& event) {
        return !rules_.event_reusable(event->host_saw_completion, event->waits_in_progress);
      }));
}

std::size_t EventPool::size() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

}  // namespace forebay
