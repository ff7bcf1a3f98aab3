#include "directory/nodes.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace forebay {

NodeId Nodes::child(NodeId node, const std::byte* key) const {
  const Node& of = nodes_[node];
  if (!of.children) return kNoNode;
  const std::uint32_t hash = hash_(key, key_bytes_);
  const auto is_it = [&](NodeId child) {
    return std::memcmp(nodes_[child].keys(), key, key_bytes_) == 0;
  };
  if (of.fan) return of.fan->find(hash, is_it);
  for (NodeId child = of.first_child; child != kNoNode; child = nodes_[child].after) {
    if (nodes_[child].first_hash == hash && is_it(child)) return child;
  }
  return kNoNode;
}

void Nodes::append(NodeId node, const std::byte* keys, std::span<const std::int32_t> ids,
                   std::int64_t insert) {
  std::int32_t depth = nodes_[node].end();
  for (bool first = true; !ids.empty(); first = false) {
    const Node& last = nodes_[node];
    const bool has_room = first && !last.is_root() && !last.children && last.length < run_blocks_;
    const std::int32_t room = has_room ? run_blocks_ - last.length : run_blocks_;
    const auto run = ids.first(std::min(ids.size(), static_cast<std::size_t>(room)));
    if (has_room) {
      const auto length = last.length + static_cast<std::int32_t>(run.size());
      // Room for more than asked, since what grows block by block goes on to.
      if (length > last.capacity) {
        hold(node, std::min(run_blocks_, std::max(length, last.capacity + last.capacity / 8)));
      }
      fill(node, last.length, keys, run);
    } else {
      node = add_child(node, keys, run);
    }
    for (const std::int32_t block : run) blocks_[block] = {node, depth++, insert};
    keys += run.size() * key_bytes_;
    ids = ids.subspan(run.size());
  }
}

NodeId Nodes::split(NodeId node, std::int32_t length) {
  const NodeId upper = take();
  Node& above = nodes_[upper];
  Node& below = nodes_[node];
  try {
    hold(upper, length);
  } catch (...) {
    drop(upper);
    throw;
  }
  fill(upper, 0, below.keys(), {below.ids(), static_cast<std::size_t>(length)});
  above.parent = below.parent;
  above.start = below.start;
  replace(node, upper);

  const std::int32_t rest = below.length - length;
  std::memmove(below.ids(), below.ids() + length, rest * sizeof(std::int32_t));
  std::memmove(below.keys(), below.keys() + length * key_bytes_, rest * key_bytes_);
  below.length = rest;
  below.start += length;
  below.parent = upper;
  below.before = below.after = kNoNode;
  below.first_hash = hash_(below.keys(), key_bytes_);
  shrink(below);
  above.first_child = node;
  above.children = 1;
  say(upper, {above.ids(), static_cast<std::size_t>(length)});
  return upper;
}

void Nodes::cut(NodeId node, std::int32_t length) noexcept {
  if (length) {
    nodes_[node].length = length;
    shrink(nodes_[node]);
    return;
  }
  const NodeId parent = nodes_[node].parent;
  unlink(node);
  drop(node);
  const Node& above = nodes_[parent];
  if (above.is_root() || above.children != 1) return;
  if (above.length + nodes_[above.first_child].length <= run_blocks_) {
    join(parent, above.first_child);
  }
}

void Nodes::bare(NodeId node) noexcept {
  nodes_[node].first_child = kNoNode;
  nodes_[node].children = 0;
  nodes_[node].fan.reset();
}

void Nodes::drop(NodeId node) noexcept {
  nodes_[node] = Node{};
  nodes_[node].after = unused_;
  unused_ = node;
  ++unused_count_;
}

NodeId Nodes::take() {
  if (unused_ == kNoNode) {
    nodes_.reach(made_);
    return made_++;
  }
  const NodeId node = std::exchange(unused_, nodes_[unused_].after);
  nodes_[node].after = kNoNode;
  --unused_count_;
  return node;
}

NodeId Nodes::add_child(NodeId parent, const std::byte* keys, std::span<const std::int32_t> ids) {
  const NodeId node = take();
  try {
    hold(node, static_cast<std::int32_t>(ids.size()));
    fill(node, 0, keys, ids);
    nodes_[node].start = nodes_[parent].end();
    nodes_[node].first_hash = hash_(keys, key_bytes_);
    link(parent, node);
  } catch (...) {
    drop(node);
    throw;
  }
  return node;
}

// Gives a node room for `capacity` blocks, of which those it has stay.
void Nodes::hold(NodeId node, std::int32_t capacity) {
  std::unique_ptr<std::byte[]> run(new std::byte[bytes_of(capacity)]);
  move_run(nodes_[node], std::move(run), capacity);
}

void Nodes::move_run(Node& node, std::unique_ptr<std::byte[]> run, std::int32_t capacity) noexcept {
  std::byte* keys = run.get() + sizeof(std::int32_t) * capacity;
  if (node.length) {
    std::memcpy(run.get(), node.ids(), sizeof(std::int32_t) * node.length);
    std::memcpy(keys, node.keys(), key_bytes_ * node.length);
  }
  node.run = std::move(run);
  node.capacity = capacity;
}

// Writes blocks from block `at` on, behind which the node has none.
void Nodes::fill(NodeId node, std::int32_t at, const std::byte* keys,
                 std::span<const std::int32_t> ids) {
  Node& to = nodes_[node];
  std::memcpy(to.ids() + at, ids.data(), ids.size_bytes());
  std::memcpy(to.keys() + at * key_bytes_, keys, ids.size() * key_bytes_);
  to.length = at + static_cast<std::int32_t>(ids.size());
}

// Gives back what a node holds in vain, once that is more than half.
void Nodes::shrink(Node& node) noexcept {
  if (2 * node.length >= node.capacity) return;
  std::unique_ptr<std::byte[]> run(new (std::nothrow) std::byte[bytes_of(node.length)]);
  if (run) move_run(node, std::move(run), node.length);
}

// When this throws, nothing has changed.
void Nodes::link(NodeId parent, NodeId child) {
  Node& above = nodes_[parent];
  if (above.fan) {
    above.fan->put(nodes_[child].first_hash, child);
  } else if (above.children == kListed) {
    auto fan = std::make_unique<Fan>();
    fan->put(nodes_[child].first_hash, child);
    for (NodeId each = above.first_child; each != kNoNode; each = nodes_[each].after) {
      fan->put(nodes_[each].first_hash, each);
    }
    above.fan = std::move(fan);
  }
  nodes_[child].parent = parent;
  nodes_[child].after = above.first_child;
  if (above.first_child != kNoNode) nodes_[above.first_child].before = child;
  above.first_child = child;
  ++above.children;
}

void Nodes::unlink(NodeId child) noexcept {
  const Node& node = nodes_[child];
  Node& above = nodes_[node.parent];
  (node.before == kNoNode ? above.first_child : nodes_[node.before].after) = node.after;
  if (node.after != kNoNode) nodes_[node.after].before = node.before;
  --above.children;
  if (!above.fan) return;
  above.fan->erase(node.first_hash, child);
  if (above.children <= kListed / 2) above.fan.reset();
}

// `other`, which begins with the same key, takes the place of `child` among its siblings.
void Nodes::replace(NodeId child, NodeId other) noexcept {
  const Node& node = nodes_[child];
  Node& above = nodes_[node.parent];
  Node& with = nodes_[other];
  with.before = node.before;
  with.after = node.after;
  with.first_hash = node.first_hash;
  (with.before == kNoNode ? above.first_child : nodes_[with.before].after) = other;
  if (with.after != kNoNode) nodes_[with.after].before = other;
  if (above.fan) above.fan->replace(node.first_hash, child, other);
}

// Puts the blocks of `node` in front of those of its only child, and drops `node`. Without memory
// the two stay as they are, which is as right.
void Nodes::join(NodeId node, NodeId child) noexcept {
  Node& above = nodes_[node];
  Node& below = nodes_[child];
  const std::int32_t length = above.length + below.length;
  std::unique_ptr<std::byte[]> run(new (std::nothrow) std::byte[bytes_of(length)]);
  if (!run) return;
  auto* ids = reinterpret_cast<std::int32_t*>(run.get());
  std::byte* keys = run.get() + sizeof(std::int32_t) * length;
  std::memcpy(ids, above.ids(), sizeof(std::int32_t) * above.length);
  std::memcpy(ids + above.length, below.ids(), sizeof(std::int32_t) * below.length);
  std::memcpy(keys, above.keys(), key_bytes_ * above.length);
  std::memcpy(keys + key_bytes_ * above.length, below.keys(), key_bytes_ * below.length);
  replace(node, child);
  below.run = std::move(run);
  below.length = below.capacity = length;
  below.start = above.start;
  below.parent = above.parent;
  say(child, {below.ids(), static_cast<std::size_t>(above.length)});
  drop(node);
}

// Lets blocks know that they lie in `node` now.
void Nodes::say(NodeId node, std::span<const std::int32_t> ids) noexcept {
  for (const std::int32_t block : ids) blocks_[block].node = node;
}

}  // namespace forebay
