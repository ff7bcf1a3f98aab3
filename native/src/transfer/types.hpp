// The words of the core as plain values. Nothing here has behaviour beyond comparison.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "errors.hpp"

namespace forebay {

// A stream of the backend: a lane, or a compute stream of the caller. 0 is the caller's own.
using StreamHandle = std::uint64_t;

enum class Direction : std::uint8_t { load = 0, save = 1 };  // host -> device, device -> host
enum class TransferClass : std::uint8_t { demand = 0, prefetch = 1, save = 2 };
enum class Outcome : std::uint8_t { done = 0, cancelled = 1, failed = 2 };

inline constexpr int kDirections = 2;
inline constexpr int index_of(Direction direction) { return static_cast<int>(direction); }

// One contiguous copy of a window.
struct Piece {
  std::byte* destination;
  const std::byte* source;
  std::size_t bytes;
  bool same_block = false;  // as the piece before it in its window
};

// The order in which transfers of one direction get the next window: class, deadline, id.
struct Urgency {
  TransferClass transfer_class;
  double deadline_s;
  std::int64_t id;

  friend bool operator<(const Urgency& a, const Urgency& b) {
    return std::tie(a.transfer_class, a.deadline_s, a.id) <
           std::tie(b.transfer_class, b.deadline_s, b.id);
  }
};

struct Completion {
  std::int64_t id;
  Outcome outcome;
  std::int64_t blocks_done;     // leading blocks whose bytes are all in place
  std::int64_t blocks_touched;  // leading blocks a copy may still be writing or reading
  std::int64_t torn_from;       // behind those done: the first such block
  std::int64_t bytes;           // that landed, whole blocks or not
  double started_s;
  double finished_s;
  std::string error;
};

// Of a transfer that goes band by band, the leading `bands` are issued.
struct BandsIssued {
  std::int64_t id;
  std::int64_t bands;
};

struct Report {
  std::vector<std::int64_t> issued;
  std::vector<BandsIssued> bands;
  std::vector<Completion> completions;
  std::int64_t completed_step;
};

// One window as the timeline shows it. Its memory layout is read by forebay/transfer/native.py.
struct WindowRecord {
  std::int64_t transfer;
  std::int64_t bytes;
  double start_s;
  double end_s;
  std::uint8_t direction;
  std::uint8_t transfer_class;
  std::uint8_t lane;
  std::uint8_t padding[5];
};
static_assert(sizeof(WindowRecord) == 40);

// A call of the backend that failed; never leaves a thread of the core.
class BackendError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: the clock of Python's time.monotonic

inline double seconds(Clock::time_point at) {
  return std::chrono::duration<double>(at.time_since_epoch()).count();
}
inline double now_s() { return seconds(Clock::now()); }

// `timeout_s` as a duration that a wait can take: negative is zero, a day is the longest.
inline Clock::duration bounded(double timeout_s) {
  constexpr double kLongest = 86400.0;
  const double clamped = timeout_s > 0 ? (timeout_s < kLongest ? timeout_s : kLongest) : 0.0;
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(clamped));
}

}  // namespace forebay
