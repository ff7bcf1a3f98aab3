// The ordering rules, each as one predicate, so that a test can take one away and watch it matter.
//
// Everything else in the core may be wrong and cost time; these may not, they cost bytes.
#pragma once

#include <cstdint>

namespace forebay {

enum class StepState : std::uint8_t {
  scheduled,  // numbered, nothing recorded yet
  launched,   // its event is recorded on the compute stream
  completed,  // the host saw that event complete
  abandoned,  // will never be launched
};

class OrderingRules {
 public:
  virtual ~OrderingRules() = default;

  // Whether completed_step may move over a step. Never over one whose event is not recorded: such
  // an event counts as complete.
  virtual bool step_passed(StepState state) const {
    return state == StepState::completed || state == StepState::abandoned;
  }
  // Whether a copy may begin that comes after the given step.
  virtual bool step_reached(std::int64_t completed_step, std::int64_t after_step) const {
    return completed_step >= after_step;
  }
  // Whether a stream may wait for a transfer. Before the last event is recorded there is nothing
  // to wait for, so the wait would pass at once.
  virtual bool may_wait(bool issued) const { return issued; }
  // Whether a stream may wait for a band of a transfer, and those before it. The others of its bands
  // need not be issued: a start by layer computes the first layers while they flow.
  virtual bool may_wait_band(std::int64_t band, std::int64_t bands_issued) const {
    return band < bands_issued;
  }
  // Whether a wait includes a window in flight; `newest` tells the one handed over last. Lanes
  // finish in any order, so every lane used counts.
  virtual bool wait_covers(bool newest) const {
    static_cast<void>(newest);
    return true;
  }
  // Whether an event may be recorded again.
  virtual bool event_reusable(bool host_saw_completion, int waits_in_progress) const {
    return host_saw_completion && waits_in_progress == 0;
  }
  // Whether a copy may read a slot, or write it, given earlier un-ended accesses to that slot.
  virtual bool read_may_begin(bool behind_write) const { return !behind_write; }
  virtual bool write_may_begin(bool behind_write, bool behind_read) const {
    return !behind_write && !behind_read;
  }
  // Whether a cancelled or failed transfer may end, and with it its hold on its slots.
  virtual bool may_end(std::size_t windows_in_flight) const { return windows_in_flight == 0; }
};

}  // namespace forebay
