// The lanes of a backend, by stream and by number, and the windows that a test wants to fail.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "transfer/types.hpp"

namespace forebay {

// Thread-safe. `Lane` is what a backend keeps of a lane; it stays where it is once added.
template <typename Lane>
class LaneTable {
 public:
  struct Entry {
    Direction direction;
    StreamHandle stream;
    Lane lane;
  };

  void add(Direction direction, StreamHandle stream, Lane lane) {
    const std::lock_guard lock(mutex_);
    entries_.push_back(Entry{direction, stream, std::move(lane)});
  }
  // Throws ProtocolError for a stream that is no lane.
  Entry& of(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    for (Entry& each : entries_) {
      if (each.stream == stream) return each;
    }
    throw ProtocolError("stream " + std::to_string(stream) + " is no lane");
  }
  // The lane opened as number `number` of its direction. Throws ProtocolError where there is none.
  Entry& at(Direction direction, int number) {
    const std::lock_guard lock(mutex_);
    for (Entry& each : entries_) {
      if (each.direction == direction && number-- == 0) return each;
    }
    throw ProtocolError("this direction does not have so many lanes");
  }
  template <typename Visit>
  void visit(Visit visit) {
    const std::lock_guard lock(mutex_);
    for (Entry& each : entries_) visit(each.lane);
  }

  // After `skip` more windows of a direction one fails.
  void fail_window(Direction direction, int skip) {
    const std::lock_guard lock(mutex_);
    windows_to_fault_[slot_of(direction)] = std::max(skip, 0);
  }
  // Counts a window of a direction; whether it is the one.
  bool take_fault(Direction direction) {
    const std::lock_guard lock(mutex_);
    int& left = windows_to_fault_[slot_of(direction)];
    return left >= 0 && left-- == 0;
  }

 private:
  static std::size_t slot_of(Direction direction) {
    return static_cast<std::size_t>(index_of(direction));
  }

  std::mutex mutex_;
  std::deque<Entry> entries_;
  std::array<int, kDirections> windows_to_fault_{-1, -1};
};

}  // namespace forebay
