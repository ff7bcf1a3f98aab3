#include "cuda/even_rows.hpp"

namespace forebay::cuda {

namespace {

// Bytes from `before` to `next`; 0 where they cannot be rows of one copy.
std::size_t pitch(const std::byte* before, const std::byte* next, std::size_t bytes,
                  std::size_t longest) {
  const auto apart = reinterpret_cast<std::uintptr_t>(next) - reinterpret_cast<std::uintptr_t>(before);
  return next > before && apart >= bytes && apart <= longest ? apart : 0;
}

// Whether `next` is one more row behind `last`.
bool joins(Rows& rows, const Piece& last, const Piece& next, std::size_t longest) {
  if (!next.same_block || next.bytes != last.bytes) return false;
  const std::size_t to = pitch(last.destination, next.destination, next.bytes, longest);
  const std::size_t from = pitch(last.source, next.source, next.bytes, longest);
  if (to == 0 || from == 0) return false;
  if (rows.count == 1) {
    rows.destination_pitch = to;
    rows.source_pitch = from;
  }
  return to == rows.destination_pitch && from == rows.source_pitch;
}

}  // namespace

void even_rows(std::span<const Piece> pieces, std::size_t longest_pitch, std::vector<Rows>& rows) {
  rows.clear();
  const Piece* last = nullptr;
  for (const Piece& piece : pieces) {
    if (last != nullptr && joins(rows.back(), *last, piece, longest_pitch)) {
      ++rows.back().count;
    } else {
      rows.push_back({piece, 1, piece.bytes, piece.bytes});
    }
    last = &piece;
  }
}

}  // namespace forebay::cuda
