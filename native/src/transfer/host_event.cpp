#include "transfer/host_event.hpp"

#include <utility>

namespace forebay {

void Recording::settle(Signal signal, std::string error) {
  {
    const std::lock_guard lock(mutex_);
    if (signal_ != Signal::pending) return;
    signal_ = signal;
    error_ = std::move(error);
  }
  settled_.notify_all();
}

Signal Recording::state() const {
  const std::lock_guard lock(mutex_);
  return signal_;
}

Signal Recording::wait(Clock::duration timeout) const {
  std::unique_lock lock(mutex_);
  settled_.wait_for(lock, timeout, [this] { return signal_ != Signal::pending; });
  return signal_;
}

std::string Recording::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::shared_ptr<Recording> HostEvent::record() {
  auto recording = std::make_shared<Recording>();
  const std::lock_guard lock(mutex_);
  latest_ = recording;
  return recording;
}

std::shared_ptr<Recording> HostEvent::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

}  // namespace forebay
