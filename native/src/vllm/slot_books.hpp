// What lies in the slots of a pool that somebody else owns: where each block is, in what state, and
// who wants it kept.
//
// A block that has a slot and is not being copied is *here*. How many of those are leased, and how
// many are wanted and not leased, is kept as it changes.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "directory/block_ids.hpp"
#include "directory/counts.hpp"
#include "directory/order.hpp"

namespace forebay {

// The states of `forebay.core.slots.SlotState`, by the same numbers.
enum class Slot : std::int8_t { kFree, kLoading, kDirty, kSaving, kClean, kQuarantined };
inline constexpr std::int64_t kSlotStates = 6;

class SlotBooks {
 public:
  // Blocks are ids below `max_blocks`, slots numbers below `slots`; any other makes a call throw
  // with nothing changed.
  SlotBooks(std::int64_t max_blocks, std::int64_t slots);

  // `blocks` are in `slots` from now on, in `state`. Whatever was there is not any more.
  void settle_in(BlockIds blocks, BlockIds slots, std::int64_t state);
  // `blocks` have no slot any more.
  void leave(BlockIds blocks);
  // Returns those that were being loaded, in order.
  std::vector<std::int32_t> move(BlockIds blocks, std::int64_t state);
  // `block` is in `slot` now; false, with nothing changed, where another block is.
  bool relocate(std::int64_t block, std::int64_t slot);
  // So many slots are out of use for good.
  void quarantine(std::int64_t slots) { in_state_[index(Slot::kQuarantined)] += slots; }

  void lease(BlockIds blocks, bool prefetch);
  // Returns those that nobody leases now, in order.
  std::vector<std::int32_t> release(BlockIds blocks, bool prefetch);
  // A prefetch lease on each becomes one of the other kind.
  void promote(BlockIds blocks) { prefetch_.take_away(blocks); }
  // Somebody waits for each block, or, if not `asked`, will perhaps: it is wanted.
  void want(BlockIds blocks, bool asked);
  void unwant(BlockIds blocks, bool asked);

  // For blocks that were checked.
  std::int32_t slot_of(std::int32_t block) const { return slot_[block]; }
  Slot state_of(std::int32_t block) const { return state_[block]; }
  bool busy(std::int32_t block) const {
    return state_[block] == Slot::kLoading || state_[block] == Slot::kSaving;
  }
  std::int32_t leases(std::int32_t block) const { return leases_.of(block); }
  bool asked(std::int32_t block) const { return asked_.of(block) > 0; }
  // The block in a slot that was checked, or -1.
  std::int32_t block_in(std::int32_t slot) const { return block_in_[slot]; }
  // Whether a load does not take this free slot: what is there is leased, or, if `wanted_too`,
  // wanted.
  bool spared(std::int32_t slot, bool wanted_too) const {
    const std::int32_t block = block_in_[slot];
    return block >= 0 && (leases_.of(block) > 0 || (wanted_too && wanted_.of(block) > 0));
  }

  // Calls `see` with each wanted block that is here and not leased, until it returns false: those
  // that were wanted last come first, leaf first.
  template <typename See>
  void walk_wanted(See see) const {
    order_.walk(0, [&](std::int32_t block) {
      const bool only_wanted = slot_[block] >= 0 && !busy(block) && leases_.of(block) == 0;
      return !only_wanted || see(block);
    });
  }

  std::int32_t max_blocks() const { return max_blocks_; }
  std::int32_t slots() const { return static_cast<std::int32_t>(block_in_.size()); }
  // Another one after each change of prefetch leases and of who is wanted.
  std::int64_t version() const { return version_; }
  std::int64_t leased_here() const { return leased_here_; }
  std::int64_t wanted_here() const { return wanted_here_; }
  std::int64_t prefetch_leased() const { return prefetch_.held(); }
  std::int64_t in_state(std::int64_t state) const { return in_state_.at(state); }
  // Slots in which something lies, or that are out of use.
  std::int64_t known() const { return std::accumulate(in_state_.begin(), in_state_.end(), 0LL); }

 private:
  class Changing;
  static constexpr std::size_t index(Slot state) { return static_cast<std::size_t>(state); }
  void count(BlockIds blocks, std::int64_t sign);
  void set_state(std::int32_t block, Slot state);

  std::int32_t max_blocks_;
  std::vector<std::int32_t> slot_;
  std::vector<std::int32_t> block_in_;
  std::vector<Slot> state_;
  BlockCounts leases_;
  BlockCounts prefetch_;
  BlockCounts wanted_;
  BlockCounts asked_;
  EvictionOrder order_;  // of the wanted
  std::int64_t version_ = 0;
  std::int64_t leased_here_ = 0;
  std::int64_t wanted_here_ = 0;
  std::array<std::int64_t, kSlotStates> in_state_{};
};

}  // namespace forebay
