// Storage of the directory's trees: nodes and blocks, and the changes of shape that keep the two
// consistent.
//
// A node is a run of blocks without a branch: their ids, and behind them their keys, in one
// allocation. Its children are a list, and a table besides where there are many. A run is bounded,
// and so is what one change of shape copies. Removing a branch joins the two nodes that it leaves
// in line if they fit in one: what branched once is not slower for ever.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "directory/fan.hpp"
#include "directory/key_hash.hpp"
#include "directory/rows.hpp"

namespace forebay {

// What is known of a block. `depth` counts from the root of its namespace, `insert` is a number
// that no other insert has; both mean nothing while the block lies in no node.
struct BlockRow {
  NodeId node = kNoNode;
  std::int32_t depth = 0;
  std::int64_t insert = 0;
};

// A root has no parent and no blocks, any other node has at least one.
struct Node {
  std::unique_ptr<std::byte[]> run;
  std::unique_ptr<Fan> fan;
  NodeId parent = kNoNode;
  NodeId first_child = kNoNode;  // the newest
  NodeId before = kNoNode;       // siblings
  NodeId after = kNoNode;
  std::int32_t children = 0;
  std::int32_t start = 0;  // depth of the first block
  std::int32_t length = 0;
  std::int32_t capacity = 0;
  std::uint32_t first_hash = 0;  // of the first key; of a root nothing

  bool is_root() const { return parent == kNoNode; }
  std::int32_t end() const { return start + length; }
  std::int32_t* ids() const { return reinterpret_cast<std::int32_t*>(run.get()); }
  std::byte* keys() const { return run.get() + sizeof(std::int32_t) * capacity; }
};

class Nodes {
 public:
  // `run_blocks`: the most blocks in a node.
  Nodes(std::size_t key_bytes, std::int32_t run_blocks)
      : key_bytes_(key_bytes), run_blocks_(run_blocks) {}

  Rows<BlockRow>& blocks() { return blocks_; }
  const Rows<BlockRow>& blocks() const { return blocks_; }
  const Node& operator[](NodeId node) const { return nodes_[node]; }
  std::size_t key_bytes() const { return key_bytes_; }
  std::int32_t run_blocks() const { return run_blocks_; }
  std::int64_t count() const { return made_ - unused_count_; }
  std::int32_t made() const { return made_; }
  const std::byte* key(NodeId node, std::int32_t block) const {
    return nodes_[node].keys() + block * key_bytes_;
  }

  // The child that begins with that key, or kNoNode.
  NodeId child(NodeId node, const std::byte* key) const;

  NodeId add_root() { return take(); }

  // Puts blocks `ids` behind the last block of `node`: into the node itself while it is a leaf with
  // room, then into new ones below. When this throws, the front of them may have been put.
  void append(NodeId node, const std::byte* keys, std::span<const std::int32_t> ids,
              std::int64_t insert);

  // Cuts the first `length` blocks of `node` off into a new node above it, and returns that. `node`
  // keeps the rest and its children. When this throws, nothing has changed.
  NodeId split(NodeId node, std::int32_t length);

  // Shortens `node`, a leaf and no root, to its first `length` blocks. With none left it goes.
  void cut(NodeId node, std::int32_t length) noexcept;

  // Makes a leaf of `node`, whose children are dropped.
  void bare(NodeId node) noexcept;

  // Gives the number of a node back to which nothing refers.
  void drop(NodeId node) noexcept;

 private:
  // With this many children a search of the list touches no more memory than one of a table.
  static constexpr std::int32_t kListed = 4;

  std::size_t bytes_of(std::int32_t blocks) const {
    return blocks * (sizeof(std::int32_t) + key_bytes_);
  }
  NodeId take();
  NodeId add_child(NodeId parent, const std::byte* keys, std::span<const std::int32_t> ids);
  void hold(NodeId node, std::int32_t capacity);
  void move_run(Node& node, std::unique_ptr<std::byte[]> run, std::int32_t capacity) noexcept;
  void fill(NodeId node, std::int32_t at, const std::byte* keys, std::span<const std::int32_t> ids);
  void shrink(Node& node) noexcept;
  void link(NodeId parent, NodeId child);
  void unlink(NodeId child) noexcept;
  void replace(NodeId child, NodeId other) noexcept;
  void join(NodeId node, NodeId child) noexcept;
  void say(NodeId node, std::span<const std::int32_t> ids) noexcept;

  std::size_t key_bytes_;
  std::int32_t run_blocks_;
  KeyHash hash_;
  Rows<BlockRow> blocks_;
  Rows<Node> nodes_;
  NodeId unused_ = kNoNode;  // a list, by `after`
  std::int32_t unused_count_ = 0;
  std::int32_t made_ = 0;
};

}  // namespace forebay
