// Which blocks are published, under which namespace and key: one radix tree per namespace over
// whole blocks.
//
// Keys are opaque bytes of one width, compared whole: equal means the same block. Finding a path
// costs time per node, and the speed of memory per block. One thread owns a directory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "directory/block_ids.hpp"
#include "directory/nodes.hpp"
#include "directory/outline.hpp"

namespace forebay {

using KeyBytes = std::span<const std::byte>;

inline constexpr std::int64_t kNoBlock = -1;

// Where an earlier match ended: its last block, as the insert that published it left it. `keys` are
// those that were matched, or nothing, in which case the tree is compared with; `same_keys` spares
// any comparison.
struct Resume {
  std::string_view name;
  std::int64_t block = kNoBlock;
  std::int64_t insert = 0;
  std::int64_t known = 0;  // blocks up to and with that block
  const KeyBytes* keys = nullptr;
  bool same_keys = false;
};

class Directory {
 public:
  // What of a path is published: its first `blocks` blocks, of which the last `taken` are the front
  // of `node`; the first `resumed` of them were known from a `Resume` that still held.
  struct Found {
    NodeId node = kNoNode;
    std::int32_t taken = 0;
    std::int64_t blocks = 0;
    std::int64_t resumed = 0;
  };

  // `run_bytes`: the most key bytes in one piece, which bounds what one insert or removal copies.
  Directory(std::int64_t key_bytes, std::int64_t run_bytes);
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  std::size_t key_bytes() const { return key_bytes_; }
  std::int64_t size() const { return published_; }
  std::int64_t node_count() const { return nodes_.count(); }
  std::int64_t nodes_made() const { return nodes_.made(); }
  bool contains(std::int64_t block) const { return row_of(block) != nullptr; }

  // The longest published prefix of a path; `keys` is a whole number of keys. Changes nothing.
  Found match(std::string_view name, KeyBytes keys, const Resume* resume) const;

  // Blocks `from` up to the last of what a match found just now, root first.
  void read(const Found& found, std::int64_t from, std::int32_t* out) const;

  // The insert that published the last block of what was found.
  std::int64_t insert_of(std::int64_t block) const { return nodes_.blocks()[block].insert; }

  // Publishes `ids` as blocks `first`, ... of the path `keys`, which may go on behind the last of
  // them. Returns the blocks that are published at the first places already; the ids of all other
  // places were added. When this throws, nothing has changed.
  std::vector<std::int32_t> insert(std::string_view name, KeyBytes keys, std::int64_t first,
                                   BlockIds ids, const Resume* resume);

  bool is_leaf(std::int64_t block) const;
  std::int64_t parent(std::int64_t block) const;  // kNoBlock for the first of a path

  void remove_leaf(std::int64_t block);

  // Unpublishes each block that has no published child when its turn comes; returns which. When
  // this throws, those before the block that is not published are removed.
  std::vector<std::uint8_t> remove_leaves(BlockIds blocks);

  // Unpublishes a block and all its descendants; returns them, children before parents.
  std::vector<std::int32_t> remove_subtree(std::int64_t block);

  const Nodes& nodes() const { return nodes_; }

  // A drawing of the trees of `names`, or of all, with at most `most` parts; ids are below
  // `max_blocks`.
  Outline outline(const std::vector<std::string>* names, std::int64_t max_blocks,
                  std::size_t most) const;

  // Slow, for tests: throws where the directory contradicts itself; tells all that it remembers.
  void check() const;
  std::string dump() const;

 private:
  struct NameHash {
    KeyHash hash;
    std::size_t operator()(const std::string& name) const { return hash(name.data(), name.size()); }
  };

  const BlockRow* row_of(std::int64_t block) const;
  const BlockRow& published(std::int64_t block) const;
  bool ends_its_path(const BlockRow& row) const;
  std::int64_t whole_blocks(KeyBytes keys) const;
  Found find(std::string_view name, KeyBytes keys, const Resume* resume) const;
  NodeId anchor(NodeId root, std::string_view name, KeyBytes keys, const Resume& resume) const;
  void claim(BlockIds added);
  void unclaim(BlockIds added) noexcept;
  NodeId opened(std::string_view name, const Found& found);
  void shorten(NodeId node, std::int32_t length) noexcept;
  void close_empty(NodeId root) noexcept;

  std::size_t key_bytes_;
  Nodes nodes_;
  std::unordered_map<std::string, NodeId, NameHash> roots_;
  std::unordered_map<NodeId, std::string> names_;
  std::int64_t published_ = 0;
  std::int64_t inserts_ = 0;
};

}  // namespace forebay
