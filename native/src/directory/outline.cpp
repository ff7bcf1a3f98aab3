#include "directory/outline.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace forebay {

namespace {

// Each part's weight is its own so far: add what stands below it.
void add_up(std::vector<OutlinePart>& parts) {
  for (std::size_t at = parts.size(); at-- > 0;) {
    const OutlinePart& part = parts[at];
    if (part.parent >= 0) parts[part.parent].weight += part.weight;
  }
}

void extend(OutlinePart& part, const Node& node) {
  part.blocks += node.length;
  ++part.nodes;
}

}  // namespace

void Outline::prune(std::size_t most) {
  if (parts.size() <= most) return;
  std::vector<std::int32_t> order(parts.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t one, std::int32_t other) {
    return parts[one].weight > parts[other].weight;
  });
  order.resize(most);
  std::sort(order.begin(), order.end());
  std::vector<std::int32_t> now(parts.size(), -1);
  std::vector<OutlinePart> kept;
  kept.reserve(most);
  for (const std::int32_t at : order) {
    now[at] = static_cast<std::int32_t>(kept.size());
    kept.push_back(parts[at]);
    if (kept.back().parent >= 0) kept.back().parent = now[kept.back().parent];
  }
  parts = std::move(kept);
}

std::vector<std::int32_t> Outline::blocks_of(const Nodes& nodes, std::size_t part,
                                             std::int64_t most) const {
  const std::int64_t count = std::min(most, parts[part].blocks);
  std::vector<std::int32_t> blocks;
  blocks.reserve(count);
  NodeId node = parts[part].first;
  std::int64_t before = 0;  // blocks of the part above `node`
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = (2 * i + 1) * parts[part].blocks / (2 * count);
    while (at - before >= nodes[node].length) {
      before += nodes[node].length;
      node = nodes[node].first_child;
    }
    blocks.push_back(nodes[node].ids()[at - before]);
  }
  return blocks;
}

Outline walked_outline(const Nodes& nodes, const std::vector<NodeId>& roots,
                       std::int64_t most_nodes) {
  Outline outline;
  std::vector<std::pair<NodeId, std::int32_t>> pending;
  std::int64_t room = most_nodes;
  const auto push_children = [&](NodeId node, std::int32_t part) {
    for (NodeId each = nodes[node].first_child; each != kNoNode; each = nodes[each].after) {
      if (room == 0) {
        outline.exact = false;
        return;
      }
      --room;
      pending.emplace_back(each, part);
    }
  };
  for (const NodeId root : roots) push_children(root, -1);
  for (std::size_t at = 0; at < pending.size(); ++at) {
    auto [node, parent] = pending[at];
    OutlinePart part{.parent = parent, .first = node};
    extend(part, nodes[node]);
    while (nodes[node].children == 1 && room > 0) {
      --room;
      node = nodes[node].first_child;
      extend(part, nodes[node]);
    }
    part.weight = static_cast<double>(part.blocks);
    outline.total += part.blocks;
    outline.parts.push_back(part);
    push_children(node, static_cast<std::int32_t>(outline.parts.size()) - 1);
  }
  add_up(outline.parts);
  return outline;
}

Outline sampled_outline(const Nodes& nodes, std::int64_t max_blocks, std::int64_t published,
                        std::int64_t most_blocks, std::int64_t most_nodes) {
  // Steps of the golden section: spread evenly, however many there are.
  constexpr double kStep = 0.6180339887498949;
  constexpr std::int64_t kTries = 2;  // for each block of the sample, as not all are published
  Outline outline{.parts = {}, .total = published, .exact = false};
  std::unordered_map<NodeId, std::int32_t> part_of;
  part_of.reserve(2 * most_blocks);
  std::vector<NodeId> path;
  std::int64_t drawn = 0;
  for (std::int64_t i = 0; i < kTries * most_blocks && drawn < most_blocks; ++i) {
    const double share = std::fmod(static_cast<double>(i) * kStep, 1.0);
    const BlockRow* row =
        nodes.blocks().find(static_cast<std::int64_t>(share * static_cast<double>(max_blocks)));
    if (row == nullptr || row->node == kNoNode) continue;
    path.clear();
    NodeId node = row->node;
    for (; !nodes[node].is_root() && !part_of.contains(node); node = nodes[node].parent) {
      path.push_back(node);
      if (static_cast<std::int64_t>(part_of.size() + path.size()) > most_nodes) break;
    }
    if (static_cast<std::int64_t>(part_of.size() + path.size()) > most_nodes) break;
    for (std::size_t at = path.size(); at-- > 0;) {
      const Node& added = nodes[path[at]];
      const Node& above = nodes[added.parent];
      const std::int32_t parent = above.is_root() ? -1 : part_of.at(added.parent);
      std::int32_t part = parent;
      if (parent < 0 || above.children > 1) {
        part = static_cast<std::int32_t>(outline.parts.size());
        outline.parts.push_back({.parent = parent, .first = path[at]});
      }
      extend(outline.parts[part], added);
      part_of.emplace(path[at], part);
    }
    outline.parts[part_of.at(row->node)].weight += 1;
    ++drawn;
  }
  const double each = drawn ? static_cast<double>(published) / static_cast<double>(drawn) : 0;
  for (OutlinePart& part : outline.parts) part.weight *= each;
  add_up(outline.parts);
  return outline;
}

}  // namespace forebay
