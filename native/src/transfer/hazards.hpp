// Who still reads or writes a slot: one queue of accesses per slot, in order of submission.
//
// An access leaves when its block's bytes are in place or its transfer ended. A transfer only ever
// waits for earlier ones, so there is no cycle.
#pragma once

#include <vector>

#include "transfer/rules.hpp"
#include "transfer/transfer.hpp"

namespace forebay {

class Hazards {
 public:
  Hazards(std::int64_t device_slots, std::int64_t host_slots, const OrderingRules& rules);

  void join(Transfer& transfer);
  // Takes out block `block`; true when another access was queued behind it.
  bool leave(Transfer& transfer, std::int64_t block);
  // Whether the copy of a block may begin.
  bool clear(const Transfer& transfer, std::int64_t block) const;
  // Whether some block is written behind another of the same transfer: block by block it must go.
  bool writes_twice(const Transfer& transfer) const;
  // Appends the transfers that block `block` waits for.
  void blockers(const Transfer& transfer, std::int64_t block, std::vector<Transfer*>& out) const;

 private:
  using Tails = std::vector<Access*>;  // by slot: the newest access
  Tails& tails_read(const Transfer& transfer);
  Tails& tails_written(const Transfer& transfer);

  Tails device_;
  Tails host_;
  const OrderingRules& rules_;
};

}  // namespace forebay
