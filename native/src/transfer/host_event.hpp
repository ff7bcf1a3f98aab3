// Events of the backends whose streams are threads of this process.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "transfer/backend.hpp"

namespace forebay {

// One recording of an event. Waits hold the recording, so that a later one does not change what
// they wait for.
class Recording {
 public:
  void settle(Signal signal, std::string error);
  Signal state() const;
  Signal wait(Clock::duration timeout) const;
  std::string error() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable settled_;
  Signal signal_ = Signal::pending;
  std::string error_;
};

class HostEvent {
 public:
  // Starts a new recording and returns it.
  std::shared_ptr<Recording> record();
  // The latest recording; null when the event was never recorded, which counts as complete.
  std::shared_ptr<Recording> latest() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Recording> latest_;
};

}  // namespace forebay
