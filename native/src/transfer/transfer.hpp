// A transfer in the core, and the windows of it that are in flight.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "transfer/copy_order.hpp"
#include "transfer/events.hpp"
#include "transfer/types.hpp"

namespace forebay {

struct Transfer;

// One transfer's use of one slot: a link in that slot's queue, in order of submission.
struct Access {
  Access* previous;
  Access* next;
  Transfer* owner;
};

// Positions of a transfer, of one run, that one lane has been handed.
struct Window {
  std::shared_ptr<Transfer> transfer;
  Run run;  // a copy: the transfer's order may change behind it
  std::int64_t begin = 0;
  std::int64_t end = 0;
  TransferClass transfer_class = TransferClass::demand;
  double start_s = 0;
  PooledEvent* event = nullptr;  // null until recorded
};

struct Transfer {
  std::int64_t id = 0;
  Direction direction = Direction::load;
  Urgency urgency{};
  std::vector<std::int32_t> sources;
  std::vector<std::int32_t> destinations;
  std::vector<std::int64_t> after_steps;

  // Kept by the board.
  std::unique_ptr<Access[]> accesses;  // source of block i at 2 i, destination at 2 i + 1
  std::vector<Window*> windows;        // in flight, in the order they were handed over
  CopyOrder order;
  std::int64_t handed_bytes = 0;
  std::int64_t recorded_bytes = 0;  // handed over, and the event behind them recorded
  std::int64_t bands_issued = 0;
  std::int64_t landed_bytes = 0;
  std::int64_t blocks_done = 0;
  std::int64_t failed_begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t torn_begin = std::numeric_limits<std::int64_t>::max();  // blocks
  std::int64_t torn_end = 0;
  bool issued = false;
  bool cancelled = false;
  double started_s = 0;
  std::string error;

  std::int64_t blocks() const { return static_cast<std::int64_t>(sources.size()); }
  bool failed() const { return torn_end > 0 || !error.empty(); }
  bool all_handed() const { return handed_bytes == order.total_bytes(); }
};

}  // namespace forebay
