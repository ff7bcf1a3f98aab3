#include "cuda/even_rows.hpp"

namespace forebay::cuda {

namespace {

constexpr std::size_t kMostHeight = 64;

// Of rows of `bytes`, `apart` bytes apart; a pitch of 0 where there is none.
Spacing spacing(std::size_t apart, std::size_t bytes, std::size_t longest) {
  for (std::size_t height = (apart - 1) / longest + 1; height <= kMostHeight; ++height) {
    const std::size_t pitch = apart / height;
    if (pitch < bytes) break;
    if (apart % height == 0) return {pitch, height};
  }
  return {0};
}

// From `before` to `next`; a pitch of 0 where they cannot be rows of one copy.
Spacing spacing(const std::byte* before, const std::byte* next, std::size_t bytes,
                std::size_t longest) {
  if (next <= before) return {0};
  const auto apart = reinterpret_cast<std::uintptr_t>(next) - reinterpret_cast<std::uintptr_t>(before);
  return spacing(apart, bytes, longest);
}

// Whether `next` is one more row behind `last`.
bool joins(Rows& rows, const Piece& last, const Piece& next, std::size_t longest,
           const Together& together) {
  if (!next.same_block || next.bytes != last.bytes) return false;
  const Spacing to = spacing(last.destination, next.destination, next.bytes, longest);
  const Spacing from = spacing(last.source, next.source, next.bytes, longest);
  if (to.pitch == 0 || from.pitch == 0) return false;
  const bool even = rows.count == 1 || (to.bytes() == rows.destination.bytes() &&
                                        from.bytes() == rows.source.bytes());
  if (!even || !together(rows.first, next)) return false;
  rows.destination = to;
  rows.source = from;
  return true;
}

}  // namespace

void even_rows(std::span<const Piece> pieces, std::size_t longest_pitch, const Together& together,
               std::vector<Rows>& rows) {
  rows.clear();
  const Piece* last = nullptr;
  for (const Piece& piece : pieces) {
    if (last != nullptr && joins(rows.back(), *last, piece, longest_pitch, together)) {
      ++rows.back().count;
    } else {
      rows.push_back({piece, 1, {piece.bytes}, {piece.bytes}});
    }
    last = &piece;
  }
}

}  // namespace forebay::cuda
