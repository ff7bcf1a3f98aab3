#include "directory/order.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace forebay {

EvictionOrder::EvictionOrder(std::int64_t max_blocks, std::string hold)
    : max_blocks_(checked_max_blocks(max_blocks)),
      hold_(std::move(hold)),
      rows_(max_blocks + kRanks, Row{0, 0, kNone, 0}) {
  for (int rank = 0; rank < kRanks; ++rank) link(end_of(rank), end_of(rank));
}

void EvictionOrder::hold(BlockIds blocks) {
  check_blocks(blocks, max_blocks_);
  for (const std::int32_t block : blocks) {
    if (rows_[block].holds > std::numeric_limits<std::int32_t>::max() / 2) {
      throw ProtocolError(hold_ + " was taken without end and never given back");
    }
  }
  leave(blocks);
  for (const std::int32_t block : blocks) ++rows_[block].holds;
}

std::vector<std::int32_t> EvictionOrder::release(BlockIds blocks) {
  check_blocks(blocks, max_blocks_);
  std::vector<std::int32_t> idle;
  idle.reserve(blocks.size());
  for (std::size_t at = 0; at < blocks.size(); ++at) {
    std::int32_t& holds = rows_[blocks[at]].holds;
    if (holds == 0) {
      while (at > 0) ++rows_[blocks[--at]].holds;
      throw ProtocolError(hold_ + " was given back twice");
    }
    if (--holds == 0) idle.push_back(blocks[at]);
  }
  return idle;
}

void EvictionOrder::append(BlockIds blocks, int rank) {
  checked(rank);
  check_idle(blocks);
  leave(blocks);
  std::int32_t before = rows_[end_of(rank)].before;
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    if (rows_[*block].rank != kNone) continue;
    // Its neighbour behind it is written when that is known.
    rows_[*block].before = before;
    rows_[*block].rank = rank;
    rows_[before].after = *block;
    before = *block;
    ++counts_[rank];
  }
  link(before, end_of(rank));
}

void EvictionOrder::prepend(BlockIds blocks, int rank) {
  checked(rank);
  check_idle(blocks);
  leave(blocks);
  std::int32_t after = rows_[end_of(rank)].after;
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    if (rows_[*block].rank != kNone) continue;
    rows_[*block].after = after;
    rows_[*block].rank = rank;
    rows_[after].before = *block;
    after = *block;
    ++counts_[rank];
  }
  link(end_of(rank), after);
}

void EvictionOrder::discard(BlockIds blocks) {
  check_blocks(blocks, max_blocks_);
  leave(blocks);
}

std::vector<std::int32_t> EvictionOrder::pop(std::int64_t count, int rank,
                                             std::span<const std::uint8_t> busy) {
  if (!busy.empty() && static_cast<std::int64_t>(busy.size()) < max_blocks_) {
    throw ProtocolError("busy has " + std::to_string(busy.size()) + " flags for " +
                        std::to_string(max_blocks_) + " blocks: give one for each");
  }
  std::vector<std::int32_t> taken;
  taken.reserve(std::clamp<std::int64_t>(count, 0, this->count(rank)));
  for (std::int32_t at = rows_[end_of(rank)].after;
       at != end_of(rank) && static_cast<std::int64_t>(taken.size()) < count;
       at = rows_[at].after) {
    if (busy.empty() || !busy[at]) taken.push_back(at);
  }
  leave(taken);
  return taken;
}

std::vector<std::int32_t> EvictionOrder::pop_newest(std::int64_t count, int rank) {
  std::vector<std::int32_t> taken(std::clamp<std::int64_t>(count, 0, this->count(rank)));
  std::int32_t at = end_of(rank);
  for (std::int32_t& block : taken) block = at = rows_[at].before;
  leave(taken);
  return taken;
}

std::vector<std::int32_t> EvictionOrder::peek(std::int64_t count, int rank) const {
  std::vector<std::int32_t> first(std::clamp<std::int64_t>(count, 0, this->count(rank)));
  std::int32_t at = end_of(rank);
  for (std::int32_t& block : first) block = at = rows_[at].after;
  return first;
}

int EvictionOrder::checked(int rank) const {
  if (rank >= 0 && rank < kRanks) return rank;
  throw ProtocolError("rank " + std::to_string(rank) + ": an order has the ranks 0 and 1");
}

void EvictionOrder::check_idle(BlockIds blocks) const {
  check_blocks(blocks, max_blocks_);
  for (const std::int32_t block : blocks) {
    if (rows_[block].holds) {
      throw ProtocolError("block " + std::to_string(block) + " is under " + hold_ +
                          ": it cannot be given up");
    }
  }
}

void EvictionOrder::link(std::int32_t before, std::int32_t after) {
  rows_[before].after = after;
  rows_[after].before = before;
}

// Takes blocks out of their rings; those that stand nowhere are left alone. What is given is mostly
// a path, forwards or backwards, and its blocks stand side by side: a stretch leaves in one go.
void EvictionOrder::leave(BlockIds blocks) {
  for (std::size_t at = 0; at < blocks.size();) {
    Row* row = &rows_[blocks[at++]];
    if (row->rank == kNone) continue;
    std::int64_t& standing = counts_[row->rank];
    std::int32_t before = row->before;
    std::int32_t after = row->after;
    for (;;) {
      row->rank = kNone;
      --standing;
      if (at == blocks.size() || (blocks[at] != before && blocks[at] != after)) break;
      const std::int32_t next = blocks[at++];
      row = &rows_[next];
      if (next == before) {
        before = row->before;
      } else {
        after = row->after;
      }
    }
    link(before, after);
  }
}

}  // namespace forebay
