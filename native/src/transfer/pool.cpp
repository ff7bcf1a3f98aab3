#include "transfer/pool.hpp"

#include <algorithm>
#include <limits>

namespace forebay {

PoolLayout::PoolLayout(std::uint64_t base_address, std::int64_t slots,
                       std::vector<Fragment> fragments, std::int64_t seam_bytes)
    : base_(base_address),
      slots_(slots),
      seam_(static_cast<std::uint64_t>(seam_bytes)),
      fragments_(std::move(fragments)),
      starts_{0} {
  if (slots_ <= 0 || slots_ > std::numeric_limits<std::int32_t>::max()) {
    throw SettingsError("a pool needs between 1 and 2**31 - 1 slots");
  }
  if (fragments_.empty()) throw SettingsError("a pool needs at least one fragment per block");
  for (const Fragment& fragment : fragments_) {
    if (fragment.bytes <= 0 || fragment.stride < fragment.bytes) {
      throw SettingsError("a fragment needs bytes > 0 and a stride of at least its bytes");
    }
    starts_.push_back(starts_.back() + fragment.bytes);
    const bool between_slots = fragment.offset == 0 && fragment.stride == fragment.bytes &&
                               seam_bytes > 0 && seam_bytes % fragment.stride == 0;
    if (seam_bytes != 0 && !between_slots) {
      throw SettingsError("a seam must lie between the blocks of a contiguous pool");
    }
  }
}

std::size_t PoolLayout::fragment_at(std::int64_t at) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), at);
  return static_cast<std::size_t>(after - starts_.begin()) - 1;
}

std::byte* PoolLayout::address(std::int64_t slot, std::size_t fragment, std::int64_t at) const {
  const Fragment& part = fragments_[fragment];
  const std::int64_t within = part.offset + slot * part.stride + (at - starts_[fragment]);
  return reinterpret_cast<std::byte*>(base_ + static_cast<std::uint64_t>(within));
}

namespace {

void append_merged(std::vector<Piece>& pieces, const Piece& piece, bool at_seam) {
  if (!pieces.empty() && !at_seam) {
    Piece& last = pieces.back();
    if (last.destination + last.bytes == piece.destination &&
        last.source + last.bytes == piece.source) {
      last.bytes += piece.bytes;
      return;
    }
  }
  pieces.push_back(piece);
}

}  // namespace

void append_pieces(std::vector<Piece>& pieces, const PoolLayout& destination,
                   std::int64_t destination_slot, const PoolLayout& source,
                   std::int64_t source_slot, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  std::size_t to = destination.fragment_at(begin);
  std::size_t from = source.fragment_at(begin);
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t stop =
        std::min({end, destination.fragment_end(to), source.fragment_end(from)});
    const Piece piece{destination.address(destination_slot, to, at),
                      source.address(source_slot, from, at), static_cast<std::size_t>(stop - at),
                      at > begin};
    append_merged(pieces, piece,
                  destination.seam_at(piece.destination) || source.seam_at(piece.source));
    if (stop == destination.fragment_end(to)) ++to;
    if (stop == source.fragment_end(from)) ++from;
    at = stop;
  }
}

}  // namespace forebay
