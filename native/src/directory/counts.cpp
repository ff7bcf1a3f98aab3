#include "directory/counts.hpp"

#include <limits>
#include <utility>

namespace forebay {

BlockCounts::BlockCounts(std::int64_t max_blocks, std::string what)
    : max_blocks_(checked_max_blocks(max_blocks)), what_(std::move(what)), counts_(max_blocks) {}

std::vector<std::int32_t> BlockCounts::add(BlockIds blocks) {
  check_blocks(blocks, max_blocks_);
  for (const std::int32_t block : blocks) {
    if (counts_[block] > std::numeric_limits<std::int32_t>::max() / 2) {
      throw ProtocolError(what_ + " was taken without end and never given back");
    }
  }
  std::vector<std::int32_t> first;
  first.reserve(blocks.size());
  for (const std::int32_t block : blocks) {
    if (counts_[block]++ == 0) first.push_back(block);
  }
  held_ += static_cast<std::int64_t>(first.size());
  return first;
}

std::vector<std::int32_t> BlockCounts::take_away(BlockIds blocks) {
  check_blocks(blocks, max_blocks_);
  std::vector<std::int32_t> last;
  last.reserve(blocks.size());
  for (std::size_t at = 0; at < blocks.size(); ++at) {
    std::int32_t& count = counts_[blocks[at]];
    if (count == 0) {
      while (at > 0) ++counts_[blocks[--at]];
      throw ProtocolError(what_ + " was given back twice");
    }
    if (--count == 0) last.push_back(blocks[at]);
  }
  held_ -= static_cast<std::int64_t>(last.size());
  return last;
}

}  // namespace forebay
