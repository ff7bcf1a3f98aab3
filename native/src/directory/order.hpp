// Eviction order: who holds each block, and which of those that nobody holds to give up first.
//
// A path is released at once and stands leaf first, so that, every lease covering a path from its
// root, no block stands before its descendants. Each of the two ranks is a ring of its own, linked
// by block id: a block is in one of them at most, leaves it at once, and nothing is looked for.
// A block that is held stands nowhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "directory/block_ids.hpp"

namespace forebay {

class EvictionOrder {
 public:
  static constexpr int kRanks = 2;

  // Blocks are ids below `max_blocks`; any other makes a call throw with nothing changed. `hold`:
  // what holds a block, in words for errors: "a lease".
  EvictionOrder(std::int64_t max_blocks, std::string hold);

  std::int64_t count(int rank) const { return counts_[checked(rank)]; }
  bool contains(std::int64_t block) const {
    return rows_[checked_block(block, max_blocks_)].rank != kNone;
  }
  std::int32_t holds(std::int64_t block) const {
    return rows_[checked_block(block, max_blocks_)].holds;
  }

  // One hold more on each block, none of which stands any longer.
  void hold(BlockIds blocks);

  // One hold less on each block. Returns those that nobody holds now, in order; they do not stand
  // yet. Throws, with nothing changed, where nobody holds one.
  std::vector<std::int32_t> release(BlockIds blocks);

  // At the end of `rank`, root first given. Moves those that stand already; throws, with nothing
  // changed, where one is held.
  void append(BlockIds blocks, int rank);

  // The same at the very front of `rank`, leaf first given.
  void prepend(BlockIds blocks, int rank);

  void discard(BlockIds blocks);

  // Takes up to `count` of the first blocks that are not busy, leaf first; the others keep their
  // places. `busy`: a flag for each block, or empty: none is.
  std::vector<std::int32_t> pop(std::int64_t count, int rank, std::span<const std::uint8_t> busy);

  // Takes up to `count` from the end: the most recently released, root first.
  std::vector<std::int32_t> pop_newest(std::int64_t count, int rank);

  // The first `count`, leaf first.
  std::vector<std::int32_t> peek(std::int64_t count, int rank) const;

  // Calls `see` with each block of `rank`, leaf first, until it returns false. It must not change
  // the order.
  template <typename See>
  void walk(int rank, See see) const {
    for (std::int32_t at = rows_[end_of(rank)].after; at != end_of(rank); at = rows_[at].after) {
      if (!see(at)) return;
    }
  }

 private:
  static constexpr std::int32_t kNone = kRanks;

  // A block's neighbours in its ring, and the rest of what is known of it: all in one piece of
  // memory, since every call needs most of it. The two ends of a rank meet in a row of its own,
  // behind those of blocks.
  struct alignas(16) Row {
    std::int32_t before;
    std::int32_t after;
    std::int32_t rank;
    std::int32_t holds;
  };

  std::int32_t end_of(int rank) const { return max_blocks_ + rank; }
  int checked(int rank) const;
  void check_idle(BlockIds blocks) const;
  void leave(BlockIds blocks);
  void link(std::int32_t before, std::int32_t after);
  void stand(BlockIds blocks, std::int32_t before, int rank);

  std::int32_t max_blocks_;
  std::string hold_;
  std::int64_t counts_[kRanks] = {};
  std::vector<Row> rows_;
};

}  // namespace forebay
