// Eviction order: which blocks to give up first.
//
// A path is released at once and stands leaf first, so that, every lease covering a path from its
// root, no block stands before its descendants. Each of the two ranks is a ring of its own, linked
// by block id: a block is in one of them at most, leaves it at once, and nothing is looked for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "directory/block_ids.hpp"

namespace forebay {

class EvictionOrder {
 public:
  static constexpr int kRanks = 2;

  // Blocks are ids below `max_blocks`; any other makes a call throw with nothing changed.
  explicit EvictionOrder(std::int64_t max_blocks);

  std::int64_t count(int rank) const { return counts_[checked(rank)]; }
  bool contains(std::int64_t block) const {
    return ranks_[checked_block(block, max_blocks_)] != kNone;
  }
  std::int64_t max_blocks() const { return max_blocks_; }

  // At the end of `rank`, root first given. Moves those that stand already.
  void append(BlockIds blocks, int rank);

  // At the very front of `rank`, leaf first given. Moves those that stand already.
  void prepend(BlockIds blocks, int rank);

  void discard(BlockIds blocks);

  // Takes up to `count` of the first blocks that are not busy, leaf first; the others keep their
  // places. `busy`: a flag for each block, or empty: none is.
  std::vector<std::int32_t> pop(std::int64_t count, int rank, std::span<const std::uint8_t> busy);

  // Takes up to `count` from the end: the most recently released, root first.
  std::vector<std::int32_t> pop_newest(std::int64_t count, int rank);

  // The first `count`, leaf first.
  std::vector<std::int32_t> peek(std::int64_t count, int rank) const;

 private:
  static constexpr std::uint8_t kNone = kRanks;

  // Neighbours in the ring. A rank's two ends meet in a place of its own, behind those of blocks.
  struct Place {
    std::int32_t before;
    std::int32_t after;
  };

  std::int32_t end_of(int rank) const { return max_blocks_ + rank; }
  int checked(int rank) const;
  void leave(std::int32_t block);
  void enter(std::int32_t block, std::int32_t before, int rank);

  std::int32_t max_blocks_;
  std::int64_t counts_[kRanks] = {};
  std::vector<std::uint8_t> ranks_;
  std::vector<Place> places_;
};

}  // namespace forebay
