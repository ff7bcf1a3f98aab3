#include "directory/order.hpp"

#include <algorithm>
#include <string>

namespace forebay {

EvictionOrder::EvictionOrder(std::int64_t max_blocks)
    : max_blocks_(checked_max_blocks(max_blocks)),
      ranks_(max_blocks, kNone),
      places_(max_blocks + kRanks) {
  for (int rank = 0; rank < kRanks; ++rank) places_[end_of(rank)] = {end_of(rank), end_of(rank)};
}

void EvictionOrder::append(BlockIds blocks, int rank) {
  checked(rank);
  check_blocks(blocks, max_blocks_);
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    leave(*block);
    enter(*block, places_[end_of(rank)].before, rank);
  }
}

void EvictionOrder::prepend(BlockIds blocks, int rank) {
  checked(rank);
  check_blocks(blocks, max_blocks_);
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    leave(*block);
    enter(*block, end_of(rank), rank);
  }
}

void EvictionOrder::discard(BlockIds blocks) {
  check_blocks(blocks, max_blocks_);
  for (const std::int32_t block : blocks) leave(block);
}

std::vector<std::int32_t> EvictionOrder::pop(std::int64_t count, int rank,
                                             std::span<const std::uint8_t> busy) {
  std::vector<std::int32_t> taken;
  if (!busy.empty() && static_cast<std::int64_t>(busy.size()) < max_blocks_) {
    throw ProtocolError("busy has " + std::to_string(busy.size()) + " flags for " +
                        std::to_string(max_blocks_) + " blocks: give one for each");
  }
  taken.reserve(std::clamp<std::int64_t>(count, 0, this->count(rank)));
  for (std::int32_t at = places_[end_of(rank)].after;
       at != end_of(rank) && static_cast<std::int64_t>(taken.size()) < count;) {
    const std::int32_t block = at;
    at = places_[at].after;
    if (!busy.empty() && busy[block]) continue;
    leave(block);
    taken.push_back(block);
  }
  return taken;
}

std::vector<std::int32_t> EvictionOrder::pop_newest(std::int64_t count, int rank) {
  std::vector<std::int32_t> taken(std::clamp<std::int64_t>(count, 0, this->count(rank)));
  for (std::int32_t& block : taken) {
    block = places_[end_of(rank)].before;
    leave(block);
  }
  return taken;
}

std::vector<std::int32_t> EvictionOrder::peek(std::int64_t count, int rank) const {
  std::vector<std::int32_t> first(std::clamp<std::int64_t>(count, 0, this->count(rank)));
  std::int32_t at = end_of(rank);
  for (std::int32_t& block : first) block = at = places_[at].after;
  return first;
}

int EvictionOrder::checked(int rank) const {
  if (rank >= 0 && rank < kRanks) return rank;
  throw ProtocolError("rank " + std::to_string(rank) + ": an order has the ranks 0 and 1");
}

void EvictionOrder::leave(std::int32_t block) {
  if (ranks_[block] == kNone) return;
  const Place place = places_[block];
  places_[place.before].after = place.after;
  places_[place.after].before = place.before;
  --counts_[ranks_[block]];
  ranks_[block] = kNone;
}

// Puts a block that stands nowhere right behind `before`.
void EvictionOrder::enter(std::int32_t block, std::int32_t before, int rank) {
  const std::int32_t after = places_[before].after;
  places_[block] = {before, after};
  places_[before].after = block;
  places_[after].before = block;
  ranks_[block] = static_cast<std::uint8_t>(rank);
  ++counts_[rank];
}

}  // namespace forebay
