// The last windows, for the timeline; what nobody drained in time is dropped and counted.
#pragma once

#include <vector>

#include "transfer/types.hpp"

namespace forebay {

class WindowRing {
 public:
  explicit WindowRing(std::int64_t capacity) : records_(static_cast<std::size_t>(capacity)) {}

  void push(const WindowRecord& record) {
    if (records_.empty() || count_ == records_.size()) ++dropped_;
    if (records_.empty()) return;
    records_[(first_ + count_) % records_.size()] = record;
    if (count_ == records_.size()) {
      first_ = (first_ + 1) % records_.size();
    } else {
      ++count_;
    }
  }

  std::vector<WindowRecord> drain() {
    std::vector<WindowRecord> out;
    out.reserve(count_);
    for (std::size_t i = 0; i < count_; ++i) out.push_back(records_[(first_ + i) % records_.size()]);
    first_ = count_ = 0;
    return out;
  }

  std::int64_t dropped() const { return dropped_; }

 private:
  std::vector<WindowRecord> records_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::int64_t dropped_ = 0;
};

}  // namespace forebay
