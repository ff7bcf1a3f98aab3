// Pieces that lie evenly apart on both sides are the rows of one copy: a block that a pool scatters by
// layer is one order for a copy engine, and not one for each layer.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "transfer/types.hpp"

namespace forebay::cuda {

// How far rows lie apart. Where that is longer than a pitch may be, each is the only row of a slice of
// `height` rows that are not copied.
struct Spacing {
  std::size_t pitch;
  std::size_t height = 1;

  std::size_t bytes() const { return pitch * height; }
};

// `count` pieces of the length of `first`, each so many bytes behind the one before it.
struct Rows {
  Piece first;
  std::size_t count;
  Spacing destination;
  Spacing source;

  bool in_slices() const { return destination.height > 1 || source.height > 1; }
};

// Whether two pieces lie in one allocation.
using Together = std::function<bool(const Piece&, const Piece&)>;

// Cuts `pieces`, in their order, into `rows`, as few as can be. None spans two blocks, whose host memory
// may have been registered apart, nor two allocations, and no pitch exceeds `longest_pitch`.
void even_rows(std::span<const Piece> pieces, std::size_t longest_pitch, const Together& together,
               std::vector<Rows>& rows);

}  // namespace forebay::cuda
