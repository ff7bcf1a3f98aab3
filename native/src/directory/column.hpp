// A value for each of the numbers below a bound: block ids, or slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "directory/block_ids.hpp"

namespace forebay {

template <typename Value>
class Column {
 public:
  // Any id that is not below `count` makes a call throw, with nothing changed.
  Column(std::int64_t count, Value fill)
      : count_(checked_max_blocks(count)), values_(static_cast<std::size_t>(count_), fill) {}

  std::int32_t size() const { return count_; }
  Value of(std::int64_t id) const { return values_[checked_block(id, count_)]; }

  // The value of each, to `out`.
  void read(BlockIds ids, Value* out) const {
    check_blocks(ids, count_);
    for (const std::int32_t id : ids) *out++ = values_[id];
  }

  void put(BlockIds ids, Value value) {
    check_blocks(ids, count_);
    for (const std::int32_t id : ids) values_[id] = value;
  }

  void put_each(BlockIds ids, std::span<const Value> values) {
    check_blocks(ids, count_);
    if (ids.size() != values.size()) {
      throw ProtocolError(std::to_string(ids.size()) + " ids need as many values, " +
                          std::to_string(values.size()) + " are given");
    }
    for (std::size_t at = 0; at < ids.size(); ++at) values_[ids[at]] = values[at];
  }

  // `first` for the first of them, and one more for each.
  void put_up(BlockIds ids, Value first) {
    check_blocks(ids, count_);
    for (const std::int32_t id : ids) values_[id] = first++;
  }

  // None of them has less than `value` from now on.
  void raise_to(BlockIds ids, Value value) {
    check_blocks(ids, count_);
    for (const std::int32_t id : ids) values_[id] = std::max(values_[id], value);
  }

  // The runs of one value, other than 0, along `ids`: which, and of how many. What is 0 ends none.
  std::vector<std::pair<Value, std::int64_t>> runs(BlockIds ids) const {
    check_blocks(ids, count_);
    std::vector<std::pair<Value, std::int64_t>> found;
    for (const std::int32_t id : ids) {
      const Value value = values_[id];
      if (value == 0) continue;
      if (found.empty() || found.back().first != value) found.emplace_back(value, 0);
      ++found.back().second;
    }
    return found;
  }

 private:
  std::int32_t count_;
  std::vector<Value> values_;
};

}  // namespace forebay
