// How many hold each block: leases, waiting requests, copies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "directory/block_ids.hpp"

namespace forebay {

class BlockCounts {
 public:
  // Blocks are ids below `max_blocks`; any other makes a call throw with nothing changed. `what` is
  // counted, in words for errors: "a lease".
  BlockCounts(std::int64_t max_blocks, std::string what);

  // One more for each block. Returns those that had none, in order.
  std::vector<std::int32_t> add(BlockIds blocks);

  // One less for each block. Returns those that have none now, in order. Throws, with nothing
  // changed, where there is none to take away.
  std::vector<std::int32_t> take_away(BlockIds blocks);

  std::int32_t of(std::int64_t block) const { return counts_[checked_block(block, max_blocks_)]; }
  std::int64_t held() const { return held_; }  // blocks with at least one

 private:
  std::int32_t max_blocks_;
  std::string what_;
  std::vector<std::int32_t> counts_;
  std::int64_t held_ = 0;
};

}  // namespace forebay
