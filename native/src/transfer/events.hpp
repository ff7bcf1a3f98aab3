// Events, made once and recorded again only when the rules allow it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "transfer/backend.hpp"
#include "transfer/rules.hpp"

namespace forebay {

struct PooledEvent {
  Backend::Event handle = nullptr;
  bool host_saw_completion = true;
  int waits_in_progress = 0;
};

// Thread-safe. Its lock is innermost and never held over a call of the backend.
class EventPool {
 public:
  EventPool(Backend& backend, const OrderingRules& rules) : backend_(backend), rules_(rules) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event that may be recorded. It is the caller's until host_saw().
  PooledEvent* acquire();
  void host_saw(PooledEvent& event);
  // A wait on the event is being enqueued, and has been.
  void begin_wait(PooledEvent& event);
  void end_wait(PooledEvent& event);
  std::size_t size() const;
  // Events that may not be recorded again yet.
  std::size_t in_use() const;

 private:
  PooledEvent* take_reusable();

  Backend& backend_;
  const OrderingRules& rules_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<PooledEvent>> events_;
};

}  // namespace forebay
