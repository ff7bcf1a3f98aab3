// What holds of the trees between any two calls, checked from scratch; and all of it, told.
#include <map>
#include <set>

#include "directory/directory.hpp"

namespace forebay {

namespace {

void require(bool holds, const char* otherwise, std::int64_t what) {
  if (holds) return;
  throw ProtocolError("the directory contradicts itself: " + std::string(otherwise) + " (" +
                      std::to_string(what) + ")");
}

void check_run(const Nodes& nodes, NodeId id) {
  const Node& node = nodes[id];
  for (std::int32_t i = 0; i < node.length; ++i) {
    const std::int32_t block = node.ids()[i];
    const BlockRow* row = nodes.blocks().find(block);
    require(row != nullptr && row->node == id, "a block says that it is elsewhere", block);
    require(row->depth == node.start + i, "a block is at another depth than it says", block);
  }
}

// Returns the children, having gone through them in order.
std::vector<NodeId> check_children(const Nodes& nodes, NodeId id) {
  const Node& node = nodes[id];
  std::vector<NodeId> children;
  NodeId before = kNoNode;
  for (NodeId each = node.first_child; each != kNoNode; each = nodes[each].after) {
    const Node& child = nodes[each];
    require(child.parent == id, "a node has another parent than lists it", each);
    require(child.before == before, "a node has another sibling before it", each);
    require(child.start == node.end(), "a node starts at a wrong depth", each);
    require(child.length > 0, "a node is empty", each);
    require(nodes.child(id, child.keys()) == each, "a node is not found by its key", each);
    children.push_back(each);
    before = each;
  }
  require(static_cast<std::int32_t>(children.size()) == node.children, "a wrong count of children",
          id);
  return children;
}

template <typename Value>
void tell(std::string& out, const Value& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

void Directory::check() const {
  std::set<NodeId> reached;
  std::int64_t blocks = 0;
  std::vector<NodeId> pending;
  require(roots_.size() == names_.size(), "a namespace has no name", nodes_.count());
  for (const auto& [name, root] : roots_) {
    const auto known = names_.find(root);
    require(known != names_.end() && known->second == name, "a root of two names", root);
    require(nodes_[root].is_root() && nodes_[root].end() == 0, "a root that is none", root);
    require(nodes_[root].children > 0, "a namespace without blocks", root);
    pending.push_back(root);
  }
  while (!pending.empty()) {
    const NodeId id = pending.back();
    pending.pop_back();
    require(reached.insert(id).second, "a node is reachable twice", id);
    const Node& node = nodes_[id];
    require(node.length <= node.capacity && node.length <= nodes_.run_blocks(), "a long node", id);
    check_run(nodes_, id);
    for (const NodeId child : check_children(nodes_, id)) pending.push_back(child);
    blocks += node.length;
  }
  require(blocks == published_, "the count of blocks is wrong", published_);
  require(static_cast<std::int64_t>(reached.size()) == nodes_.count(),
          "a node is neither used nor free", nodes_.count());
}

std::string Directory::dump() const {
  std::string out;
  tell(out, published_);
  tell(out, inserts_);
  const std::map<std::string, NodeId> by_name(roots_.begin(), roots_.end());
  std::vector<NodeId> pending;
  for (const auto& [name, root] : by_name) {
    tell(out, name.size());
    out += name;
    pending.push_back(root);
    while (!pending.empty()) {
      const NodeId id = pending.back();
      pending.pop_back();
      const Node& node = nodes_[id];
      for (const std::int32_t value : {id, node.parent, node.before, node.start, node.length}) {
        tell(out, value);
      }
      for (std::int32_t i = 0; i < node.length; ++i) {
        tell(out, node.ids()[i]);
        tell(out, nodes_.blocks()[node.ids()[i]].insert);
        out.append(reinterpret_cast<const char*>(nodes_.key(id, i)), key_bytes_);
      }
      for (NodeId each = node.first_child; each != kNoNode; each = nodes_[each].after) {
        pending.push_back(each);
      }
    }
  }
  return out;
}

}  // namespace forebay
