#include "directory/directory.hpp"

#include <algorithm>
#include <cstring>

namespace forebay {

namespace {

constexpr NodeId kClaimed = -2;  // of a block that the insert under way is about to publish

std::size_t checked_width(std::int64_t key_bytes) {
  if (key_bytes >= 1) return static_cast<std::size_t>(key_bytes);
  throw SettingsError("key_bytes=" + std::to_string(key_bytes) +
                      ": a block's key has at least one byte");
}

std::int32_t blocks_of(std::int64_t run_bytes, std::int64_t key_bytes) {
  constexpr std::int64_t kMost = 1 << 20;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(run_bytes / key_bytes, 1, kMost));
}

// How many of the first `blocks` keys agree.
std::int64_t equal_blocks(const std::byte* a, const std::byte* b, std::int64_t blocks,
                          std::size_t width) {
  if (!blocks || std::memcmp(a, b, blocks * width) == 0) return blocks;
  std::int64_t low = 0;
  std::int64_t high = blocks - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    const std::size_t at = low * width;
    if (std::memcmp(a + at, b + at, middle * width - at) == 0) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace

Directory::Directory(std::int64_t key_bytes, std::int64_t run_bytes)
    : key_bytes_(checked_width(key_bytes)), nodes_(key_bytes_, blocks_of(run_bytes, key_bytes)) {}

Directory::Found Directory::match(std::string_view name, KeyBytes keys,
                                  const Resume* resume) const {
  whole_blocks(keys);
  return find(name, keys, resume);
}

void Directory::read(const Found& found, std::int64_t from, std::int32_t* out) const {
  std::int64_t end = found.blocks;
  for (NodeId at = found.node; end > from; at = nodes_[at].parent) {
    const Node& node = nodes_[at];
    const std::int64_t begin = std::max<std::int64_t>(from, node.start);
    std::copy(node.ids() + (begin - node.start), node.ids() + (end - node.start),
              out + (begin - from));
    end = begin;
  }
}

std::vector<std::int32_t> Directory::insert(std::string_view name, KeyBytes keys,
                                            std::int64_t first, BlockIds ids,
                                            const Resume* resume) {
  const std::int64_t blocks = whole_blocks(keys);
  const auto size = static_cast<std::int64_t>(ids.size());
  if (first < 0 || first > blocks || size > blocks - first) {
    throw ProtocolError(std::to_string(size) + " ids from block " + std::to_string(first) +
                        " on do not fit " + std::to_string(keys.size()) +
                        " bytes of keys: give one id per block, and the keys of the whole path up "
                        "to the last");
  }
  const Found found = find(name, keys.first((first + size) * key_bytes_), resume);
  if (found.blocks < first) {
    throw ParentMissingError("block " + std::to_string(first) +
                             " of a path needs its ancestors published first, of which only " +
                             std::to_string(found.blocks) + " are");
  }
  std::vector<std::int32_t> present(found.blocks - first);
  read(found, first, present.data());
  const BlockIds added = ids.subspan(present.size());
  if (added.empty()) return present;
  claim(added);
  NodeId node = kNoNode;
  try {
    node = opened(name, found);
    nodes_.append(node, keys.data() + found.blocks * key_bytes_, added, inserts_ + 1);
  } catch (...) {
    unclaim(added);
    if (found.node == kNoNode && node != kNoNode) close_empty(node);
    throw;
  }
  ++inserts_;
  published_ += static_cast<std::int64_t>(added.size());
  return present;
}

bool Directory::is_leaf(std::int64_t block) const { return ends_its_path(published(block)); }

std::int64_t Directory::parent(std::int64_t block) const {
  const BlockRow& row = published(block);
  const Node* node = &nodes_[row.node];
  if (row.depth == node->start) node = &nodes_[node->parent];
  return node->length ? node->ids()[row.depth - 1 - node->start] : kNoBlock;
}

void Directory::remove_leaf(std::int64_t block) {
  const NodeId node = published(block).node;
  if (!is_leaf(block)) {
    throw NotLeafError("block " + std::to_string(block) +
                       " has a published child: remove that first");
  }
  shorten(node, nodes_[node].length - 1);
}

std::vector<std::uint8_t> Directory::remove_leaves(BlockIds blocks) {
  std::vector<std::uint8_t> removed(blocks.size());
  std::size_t at = 0;
  while (at < blocks.size()) {
    const BlockRow& row = published(blocks[at]);
    if (!ends_its_path(row)) {
      ++at;
      continue;
    }
    const NodeId node = row.node;
    const std::int32_t* ids = nodes_[node].ids();
    std::int32_t left = nodes_[node].length;
    for (; left && at < blocks.size() && blocks[at] == ids[left - 1]; --left) removed[at++] = 1;
    shorten(node, left);
  }
  return removed;
}

Outline Directory::outline(const std::vector<std::string>* names, std::int64_t max_blocks,
                           std::size_t most) const {
  // A millisecond or two of memory that no cache of the processor holds.
  constexpr std::int64_t kMostNodes = 1 << 13;
  constexpr std::int64_t kMostBlocks = 1 << 11;
  std::vector<NodeId> roots;
  Outline made;
  if (names != nullptr) {
    for (const std::string& name : *names) {
      const auto root = roots_.find(name);
      if (root != roots_.end()) roots.push_back(root->second);
    }
    made = walked_outline(nodes_, roots, kMostNodes);
  } else if (node_count() <= kMostNodes) {
    for (const auto& [name, root] : roots_) roots.push_back(root);
    std::sort(roots.begin(), roots.end());
    made = walked_outline(nodes_, roots, kMostNodes);
  } else {
    made = sampled_outline(nodes_, max_blocks, published_, kMostBlocks, kMostNodes);
  }
  made.prune(most);
  return made;
}

std::vector<std::int32_t> Directory::remove_subtree(std::int64_t block) {
  const NodeId top = published(block).node;
  const std::int32_t keep = published(block).depth - nodes_[top].start;
  std::vector<std::int32_t> removed(nodes_[top].ids() + keep,
                                    nodes_[top].ids() + nodes_[top].length);
  std::vector<NodeId> below;
  for (std::size_t at = 0;; ++at) {
    const Node& node = nodes_[at ? below[at - 1] : top];
    for (NodeId child = node.first_child; child != kNoNode; child = nodes_[child].after) {
      const Node& run = nodes_[child];
      below.push_back(child);
      removed.insert(removed.end(), run.ids(), run.ids() + run.length);
    }
    if (at == below.size()) break;
  }
  std::reverse(removed.begin(), removed.end());

  nodes_.bare(top);
  for (const NodeId node : below) {
    const Node& run = nodes_[node];
    for (std::int32_t i = 0; i < run.length; ++i) nodes_.blocks()[run.ids()[i]].node = kNoNode;
    published_ -= run.length;
    nodes_.drop(node);
  }
  shorten(top, keep);
  return removed;
}

const BlockRow* Directory::row_of(std::int64_t block) const {
  const BlockRow* row = nodes_.blocks().find(block);
  return row != nullptr && row->node != kNoNode ? row : nullptr;
}

const BlockRow& Directory::published(std::int64_t block) const {
  const BlockRow* row = row_of(block);
  if (row == nullptr) {
    throw ProtocolError("block " + std::to_string(block) + " is not published");
  }
  return *row;
}

bool Directory::ends_its_path(const BlockRow& row) const {
  const Node& node = nodes_[row.node];
  return !node.children && row.depth + 1 == node.end();
}

std::int64_t Directory::whole_blocks(KeyBytes keys) const {
  if (keys.size() % key_bytes_) {
    throw ProtocolError("keys must be a whole number of " + std::to_string(key_bytes_) +
                        "-byte block keys; got " + std::to_string(keys.size()) + " bytes");
  }
  return static_cast<std::int64_t>(keys.size() / key_bytes_);
}

// Follows `keys` as far as they are published.
Directory::Found Directory::find(std::string_view name, KeyBytes keys, const Resume* resume) const {
  const auto root = roots_.find(std::string(name));
  if (root == roots_.end()) return {};
  Found found{root->second};
  if (resume != nullptr) {
    found.node = anchor(root->second, name, keys, *resume);
    if (found.node != root->second) found.blocks = found.resumed = resume->known;
  }
  std::int64_t left = static_cast<std::int64_t>(keys.size() / key_bytes_) - found.blocks;
  const std::byte* at = keys.data() + found.blocks * key_bytes_;
  found.taken = static_cast<std::int32_t>(found.blocks) - nodes_[found.node].start;
  for (;;) {
    const Node& node = nodes_[found.node];
    const std::int64_t here = std::min<std::int64_t>(node.length - found.taken, left);
    const std::int64_t same =
        equal_blocks(nodes_.key(found.node, found.taken), at, here, key_bytes_);
    found.taken += static_cast<std::int32_t>(same);
    found.blocks += same;
    at += same * key_bytes_;
    left -= same;
    if (!left || found.taken < node.length) return found;
    const NodeId child = nodes_.child(found.node, at);
    if (child == kNoNode) return found;
    found.node = child;
    found.taken = 0;
  }
}

// The node of the block where an earlier match ended if `keys` lead there, else the root.
NodeId Directory::anchor(NodeId root, std::string_view name, KeyBytes keys,
                         const Resume& resume) const {
  const BlockRow* row = row_of(resume.block);
  if (row == nullptr || row->insert != resume.insert || row->depth + 1 != resume.known ||
      resume.name != name) {
    return root;
  }
  const std::size_t bytes = resume.known * key_bytes_;
  if (bytes > keys.size()) return root;
  if (resume.keys != nullptr) {
    const bool same =
        resume.same_keys || (bytes <= resume.keys->size() &&
                             std::memcmp(keys.data(), resume.keys->data(), bytes) == 0);
    return same ? row->node : root;
  }
  std::int64_t end = resume.known;
  for (NodeId at = row->node; end; at = nodes_[at].parent) {
    const std::int32_t start = nodes_[at].start;
    const std::byte* theirs = keys.data() + start * key_bytes_;
    if (std::memcmp(nodes_[at].keys(), theirs, (end - start) * key_bytes_) != 0) return root;
    end = start;
  }
  return row->node;
}

// Takes ids into use, or throws with nothing changed.
void Directory::claim(BlockIds added) {
  Rows<BlockRow>& rows = nodes_.blocks();
  std::size_t claimed = 0;
  try {
    for (const std::int32_t block : added) {
      if (block < 0) throw ProtocolError("a block id is negative: ids count from 0");
      rows.reach(block);
      BlockRow& row = rows[block];
      if (row.node == kClaimed) {
        throw ProtocolError("a block id was given twice: each place of a path has its own");
      }
      if (row.node != kNoNode) {
        throw ProtocolError("block " + std::to_string(block) +
                            " is published already, at another place");
      }
      row.node = kClaimed;
      ++claimed;
    }
  } catch (...) {
    unclaim(added.first(claimed));
    throw;
  }
}

// Undoes an insert that stopped half way.
void Directory::unclaim(BlockIds added) noexcept {
  for (auto block = added.rbegin(); block != added.rend(); ++block) {
    BlockRow& row = nodes_.blocks()[*block];
    const NodeId node = row.node;
    row.node = kNoNode;
    if (node != kClaimed) nodes_.cut(node, nodes_[node].length - 1);
  }
}

// The node that ends where the found path ends, made if need be.
NodeId Directory::opened(std::string_view name, const Found& found) {
  if (found.node != kNoNode) {
    const bool within = found.taken < nodes_[found.node].length;
    return within ? nodes_.split(found.node, found.taken) : found.node;
  }
  const NodeId root = nodes_.add_root();
  try {
    names_.emplace(root, name);
    roots_.emplace(name, root);
  } catch (...) {
    names_.erase(root);
    nodes_.drop(root);
    throw;
  }
  return root;
}

// Cuts a leaf node to `length` blocks, and drops a namespace that is left without any.
void Directory::shorten(NodeId node, std::int32_t length) noexcept {
  const Node& cut = nodes_[node];
  for (std::int32_t i = length; i < cut.length; ++i) {
    nodes_.blocks()[cut.ids()[i]].node = kNoNode;
  }
  published_ -= cut.length - length;
  const NodeId above = cut.parent;
  const bool is_first = nodes_[above].is_root();
  nodes_.cut(node, length);
  if (is_first) close_empty(above);
}

void Directory::close_empty(NodeId root) noexcept {
  if (nodes_[root].children) return;
  const auto name = names_.find(root);
  roots_.erase(name->second);
  names_.erase(name);
  nodes_.drop(root);
}

}  // namespace forebay
