#include "vllm/slot_books.hpp"

#include <algorithm>

namespace forebay {

namespace {

Slot checked_state(std::int64_t state) {
  if (state >= 0 && state < kSlotStates) return static_cast<Slot>(state);
  throw ProtocolError("a slot has no state " + std::to_string(state));
}

}  // namespace

// Keeps the counts right while blocks change.
class SlotBooks::Changing {
 public:
  Changing(SlotBooks& books, BlockIds blocks) : books_(books), blocks_(blocks) {
    books_.count(blocks_, -1);
  }
  ~Changing() { books_.count(blocks_, 1); }
  Changing(const Changing&) = delete;
  Changing& operator=(const Changing&) = delete;

 private:
  SlotBooks& books_;
  BlockIds blocks_;
};

SlotBooks::SlotBooks(std::int64_t max_blocks, std::int64_t slots)
    : max_blocks_(checked_max_blocks(max_blocks)),
      slot_(max_blocks, -1),
      block_in_(checked_max_blocks(slots), -1),
      state_(max_blocks, Slot::kFree),
      leases_(max_blocks, "a lease"),
      prefetch_(max_blocks, "a prefetch lease"),
      wanted_(max_blocks, "protection"),
      asked_(max_blocks, "protection"),
      order_(max_blocks, "a lease") {}

void SlotBooks::settle_in(BlockIds blocks, BlockIds slots, std::int64_t state) {
  const Slot now = checked_state(state);
  check_blocks(blocks, max_blocks_);
  check_blocks(slots, this->slots());
  if (blocks.size() != slots.size()) {
    throw ProtocolError(std::to_string(blocks.size()) + " blocks need as many slots, not " +
                        std::to_string(slots.size()));
  }
  const Changing changing(*this, blocks);
  for (std::size_t at = 0; at < blocks.size(); ++at) {
    slot_[blocks[at]] = slots[at];
    block_in_[slots[at]] = blocks[at];
    set_state(blocks[at], now);
  }
}

void SlotBooks::leave(BlockIds blocks) {
  check_blocks(blocks, max_blocks_);
  const Changing changing(*this, blocks);
  for (const std::int32_t block : blocks) {
    const std::int32_t slot = slot_[block];
    if (slot >= 0 && block_in_[slot] == block) block_in_[slot] = -1;
    slot_[block] = -1;
    set_state(block, Slot::kFree);
  }
}

std::vector<std::int32_t> SlotBooks::move(BlockIds blocks, std::int64_t state) {
  const Slot now = checked_state(state);
  check_blocks(blocks, max_blocks_);
  std::vector<std::int32_t> loaded;
  const Changing changing(*this, blocks);
  for (const std::int32_t block : blocks) {
    if (state_[block] == Slot::kLoading) loaded.push_back(block);
    set_state(block, now);
  }
  return loaded;
}

bool SlotBooks::relocate(std::int64_t block, std::int64_t slot) {
  const std::int32_t moved = checked_block(block, max_blocks_);
  const std::int32_t to = checked_block(slot, slots());
  if (block_in_[to] >= 0 && block_in_[to] != moved) return false;
  const std::int32_t from = slot_[moved];
  if (from >= 0 && block_in_[from] == moved) block_in_[from] = -1;
  const BlockIds one(&moved, 1);
  const Changing changing(*this, one);
  slot_[moved] = to;
  block_in_[to] = moved;
  return true;
}

void SlotBooks::lease(BlockIds blocks, bool prefetch) {
  check_blocks(blocks, max_blocks_);
  version_ += prefetch && !blocks.empty();
  const Changing changing(*this, blocks);
  leases_.add(blocks);
  if (prefetch) prefetch_.add(blocks);
}

std::vector<std::int32_t> SlotBooks::release(BlockIds blocks, bool prefetch) {
  check_blocks(blocks, max_blocks_);
  if (prefetch) prefetch_.take_away(blocks);
  version_ += prefetch && !blocks.empty();
  const Changing changing(*this, blocks);
  return leases_.take_away(blocks);
}

void SlotBooks::want(BlockIds blocks, bool asked) {
  check_blocks(blocks, max_blocks_);
  if (asked) asked_.add(blocks);
  version_ += !blocks.empty();
  const Changing changing(*this, blocks);
  std::vector<std::int32_t> fresh = wanted_.add(blocks);
  std::reverse(fresh.begin(), fresh.end());
  order_.prepend(fresh, 0);
}

void SlotBooks::unwant(BlockIds blocks, bool asked) {
  check_blocks(blocks, max_blocks_);
  if (asked) asked_.take_away(blocks);
  version_ += !blocks.empty();
  const Changing changing(*this, blocks);
  order_.discard(wanted_.take_away(blocks));
}

void SlotBooks::count(BlockIds blocks, std::int64_t sign) {
  for (const std::int32_t block : blocks) {
    if (slot_[block] < 0 || busy(block)) continue;
    if (leases_.of(block) > 0) {
      leased_here_ += sign;
    } else if (wanted_.of(block) > 0) {
      wanted_here_ += sign;
    }
  }
}

void SlotBooks::set_state(std::int32_t block, Slot state) {
  // What is free is in nobody's count.
  if (state_[block] != Slot::kFree) --in_state_[index(state_[block])];
  if (state != Slot::kFree) ++in_state_[index(state)];
  state_[block] = state;
}

}  // namespace forebay
