// The order in which the bytes of a transfer go: block by block or, where a start by layer wants its
// first layers first, band by band. A position counts bytes in that order.
#pragma once

#include <cstdint>
#include <vector>

namespace forebay {

// Positions in which each block has a part of one length, one block behind the other.
struct Run {
  std::int64_t start = 0;
  std::int64_t stop = 0;
  std::int64_t first_block = 0;
  std::int64_t offset = 0;  // of the parts, within their blocks
  std::int64_t part_bytes = 1;

  std::int64_t block_at(std::int64_t position) const {
    return first_block + (position - start) / part_bytes;
  }
  // The byte of its block.
  std::int64_t byte_at(std::int64_t position) const {
    return offset + (position - start) % part_bytes;
  }
  // The position behind the last byte of the same part.
  std::int64_t part_end(std::int64_t position) const {
    return position + part_bytes - (position - start) % part_bytes;
  }
};

class CopyOrder {
 public:
  CopyOrder() = default;
  CopyOrder(std::int64_t blocks, std::int64_t block_bytes);

  // Blocks from `first` on go band by band, of which each ends at one of `ends` in every block; the
  // last of `ends` is the block's. To be called once.
  void use_bands(std::int64_t first, std::vector<std::int64_t> ends);

  std::int64_t total_bytes() const { return blocks_ * block_bytes_; }
  std::int64_t bands() const { return static_cast<std::int64_t>(ends_.size()); }  // 0: none
  // The position behind the last byte of bands 0 to `band`.
  std::int64_t band_end(std::int64_t band) const;
  // The run that holds `position`, which is below total_bytes().
  Run run_at(std::int64_t position) const;
  // Leading blocks all of whose bytes lie below `position`.
  std::int64_t blocks_below(std::int64_t position) const;

 private:
  std::int64_t blocks_ = 0;
  std::int64_t block_bytes_ = 1;
  std::int64_t whole_ = 0;  // leading blocks that go block by block
  std::vector<std::int64_t> ends_;
};

}  // namespace forebay
