// Pieces that lie evenly apart on both sides are the rows of one copy: a block that a pool scatters by
// layer is one order for a copy engine, and not one for each layer.
#pragma once

#include <span>
#include <vector>

#include "transfer/types.hpp"

namespace forebay::cuda {

// `count` pieces of the length of `first`, each so many bytes behind the one before it.
struct Rows {
  Piece first;
  std::size_t count;
  std::size_t destination_pitch;
  std::size_t source_pitch;
};

// Cuts `pieces`, in their order, into `rows`, as few as can be. None spans two blocks, whose memory may
// have been registered apart, and no pitch exceeds `longest_pitch`.
void even_rows(std::span<const Piece> pieces, std::size_t longest_pitch, std::vector<Rows>& rows);

}  // namespace forebay::cuda
