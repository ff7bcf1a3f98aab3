// Where the bytes of a slot lie, and the pieces that copy a range of a block between two pools.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/types.hpp"

namespace forebay {

// Fragment f of slot s lies at base + offset + s * stride and holds `bytes` bytes.
struct Fragment {
  std::int64_t offset;
  std::int64_t stride;
  std::int64_t bytes;
};

class PoolLayout {
 public:
  // No copy may cross a multiple of `seam_bytes` from the base: there one registration of pinned
  // memory ends and another begins. 0: none. Throws SettingsError when a fragment is empty, two
  // slots of a fragment would overlap, or a block would lie on a seam.
  PoolLayout(std::uint64_t base_address, std::int64_t slots, std::vector<Fragment> fragments,
             std::int64_t seam_bytes = 0);

  std::int64_t slots() const { return slots_; }
  std::int64_t block_bytes() const { return starts_.back(); }
  const std::vector<Fragment>& fragments() const { return fragments_; }

  // The fragment that holds byte `at` of a block.
  std::size_t fragment_at(std::int64_t at) const;
  // Address of byte `at` of `slot`, and how many bytes follow contiguously in that fragment.
  std::byte* address(std::int64_t slot, std::size_t fragment, std::int64_t at) const;
  std::int64_t fragment_end(std::size_t fragment) const { return starts_[fragment + 1]; }
  bool seam_at(const std::byte* address) const {
    return seam_ != 0 && (reinterpret_cast<std::uint64_t>(address) - base_) % seam_ == 0;
  }

 private:
  std::uint64_t base_;
  std::int64_t slots_;
  std::uint64_t seam_;
  std::vector<Fragment> fragments_;
  std::vector<std::int64_t> starts_;  // byte of the block at which each fragment starts, and the end
};

// Appends the pieces of bytes [begin, end) of one block; a piece whose source and destination both
// continue the last one is merged with it.
void append_pieces(std::vector<Piece>& pieces, const PoolLayout& destination,
                   std::int64_t destination_slot, const PoolLayout& source,
                   std::int64_t source_slot, std::int64_t begin, std::int64_t end);

}  // namespace forebay
