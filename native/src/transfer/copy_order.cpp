#include "transfer/copy_order.hpp"

#include <algorithm>
#include <utility>

namespace forebay {

CopyOrder::CopyOrder(std::int64_t blocks, std::int64_t block_bytes)
    : blocks_(blocks), block_bytes_(block_bytes), whole_(blocks) {}

void CopyOrder::use_bands(std::int64_t first, std::vector<std::int64_t> ends) {
  whole_ = first;
  ends_ = std::move(ends);
}

std::int64_t CopyOrder::band_end(std::int64_t band) const {
  if (band >= bands()) return total_bytes();
  return whole_ * block_bytes_ + (blocks_ - whole_) * ends_[static_cast<std::size_t>(band)];
}

Run CopyOrder::run_at(std::int64_t position) const {
  const std::int64_t whole_end = whole_ * block_bytes_;
  if (position < whole_end) return Run{0, whole_end, 0, 0, block_bytes_};
  const std::int64_t within = (position - whole_end) / (blocks_ - whole_);
  const auto end = std::upper_bound(ends_.begin(), ends_.end(), within);
  const std::int64_t offset = end == ends_.begin() ? 0 : *(end - 1);
  return Run{whole_end + (blocks_ - whole_) * offset, whole_end + (blocks_ - whole_) * *end, whole_,
             offset, *end - offset};
}

std::int64_t CopyOrder::blocks_below(std::int64_t position) const {
  if (position >= total_bytes()) return blocks_;
  const Run run = run_at(position);
  const bool ends_blocks = run.offset + run.part_bytes == block_bytes_;
  return ends_blocks ? run.block_at(position) : run.first_block;
}

}  // namespace forebay
