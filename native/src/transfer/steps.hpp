// Which steps have run: the numbers that copies wait for.
#pragma once

#include <map>

#include "transfer/rules.hpp"

namespace forebay {

// Not thread-safe: the board's lock guards it.
class StepLedger {
 public:
  explicit StepLedger(const OrderingRules& rules) : rules_(rules) {}

  // The largest m such that every step 1..m completed or was abandoned.
  std::int64_t completed_step() const { return completed_step_; }
  // Throws ProtocolError for a step that is past or already known.
  void launched(std::int64_t step);
  void abandoned(std::int64_t step);
  void completed(std::int64_t step);
  // The launch failed before anything was recorded.
  void withdrawn(std::int64_t step);

 private:
  void introduce(std::int64_t step, StepState state);
  void advance();

  const OrderingRules& rules_;
  std::map<std::int64_t, StepState> pending_;
  std::int64_t completed_step_ = 0;
};

}  // namespace forebay
