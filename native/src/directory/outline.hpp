// A drawing of the trees: of a bounded size and made in bounded time, however large they are.
//
// Trees of few nodes are walked whole. Of larger ones a sample of the blocks is drawn, and the nodes
// on the paths of those: how many of the sample stand below a node says how much of the tree does,
// and what is large is never missed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "directory/nodes.hpp"

namespace forebay {

// A run of blocks without a branch, over one node or several in line.
struct OutlinePart {
  std::int32_t parent = -1;  // an index, or -1 for the first of a path
  std::int64_t blocks = 0;
  double weight = 0;  // its own blocks and all below it
  NodeId first = kNoNode;
  std::int32_t nodes = 0;
};

struct Outline {
  std::vector<OutlinePart> parts;  // parents before children
  std::int64_t total = 0;          // blocks of the whole
  bool exact = true;               // or weights are estimates

  // Keeps the `most` heaviest parts. No part weighs more than the one above it.
  void prune(std::size_t most);

  // Up to `most` blocks of a part, spread evenly over it.
  std::vector<std::int32_t> blocks_of(const Nodes& nodes, std::size_t part,
                                      std::int64_t most) const;
};

// All below `roots`, or as much of it as `most_nodes` nodes are, top down.
Outline walked_outline(const Nodes& nodes, const std::vector<NodeId>& roots,
                       std::int64_t most_nodes);

// By a sample of at most `most_blocks` of the `published` blocks, whose ids are below `max_blocks`.
// The same blocks are drawn each time, as long as they are published.
Outline sampled_outline(const Nodes& nodes, std::int64_t max_blocks, std::int64_t published,
                        std::int64_t most_blocks, std::int64_t most_nodes);

}  // namespace forebay
