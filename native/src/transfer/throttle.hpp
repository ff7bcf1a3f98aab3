// A link of a given rate, shared by the lanes of one direction.
#pragma once

#include <mutex>

#include "transfer/types.hpp"

namespace forebay {

class Throttle {
 public:
  // 0 bytes per second is no throttle.
  explicit Throttle(double bytes_per_s);

  bool active() const { return bytes_per_s_ > 0; }
  // What to move between two waits: about a millisecond of the link.
  std::size_t slice_bytes() const { return slice_bytes_; }
  // Books `bytes` on the link; the time at which they have crossed it. The link keeps its average:
  // a lane that woke late does not cost the next one its share, up to a few milliseconds of debt.
  Clock::time_point book(std::size_t bytes);

 private:
  const double bytes_per_s_;
  const std::size_t slice_bytes_;
  std::mutex mutex_;
  Clock::time_point free_at_;
};

}  // namespace forebay
