// The children of a node that has many, by the hash of their first key.
#pragma once

#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace forebay {

using NodeId = std::int32_t;
inline constexpr NodeId kNoNode = -1;

// Open addressing. An entry that goes is filled from behind it, so that nothing is left over from
// what was; between a quarter and three quarters of the slots are used.
class Fan {
 public:
  Fan() : slots_(kFewest) {}

  // The child of that hash of which `is_it(child)` holds.
  template <typename IsIt>
  NodeId find(std::uint32_t hash, IsIt is_it) const {
    for (std::size_t at = hash & mask();; at = (at + 1) & mask()) {
      const Slot& slot = slots_[at];
      if (slot.child == kNoNode || (slot.hash == hash && is_it(slot.child))) return slot.child;
    }
  }

  void put(std::uint32_t hash, NodeId child) {
    if (4 * (used_ + 1) > 3 * slots_.size()) resize(2 * slots_.size());
    place(hash, child);
    ++used_;
  }

  void replace(std::uint32_t hash, NodeId child, NodeId other) noexcept {
    slots_[at_of(hash, child)].child = other;
  }

  void erase(std::uint32_t hash, NodeId child) noexcept {
    std::size_t hole = at_of(hash, child);
    for (std::size_t at = hole;;) {
      at = (at + 1) & mask();
      if (slots_[at].child == kNoNode) break;
      const std::size_t home = slots_[at].hash & mask();
      if (((at - home) & mask()) < ((at - hole) & mask())) continue;
      slots_[hole] = slots_[at];
      hole = at;
    }
    slots_[hole] = {};
    --used_;
    if (slots_.size() > kFewest && 4 * used_ < slots_.size()) {
      try {
        resize(slots_.size() / 2);
      } catch (const std::bad_alloc&) {
        // It stays larger than it need be.
      }
    }
  }

 private:
  static constexpr std::size_t kFewest = 8;

  struct Slot {
    std::uint32_t hash = 0;
    NodeId child = kNoNode;
  };

  std::size_t mask() const { return slots_.size() - 1; }

  std::size_t at_of(std::uint32_t hash, NodeId child) const {
    std::size_t at = hash & mask();
    while (slots_[at].child != child) at = (at + 1) & mask();
    return at;
  }

  void place(std::uint32_t hash, NodeId child) {
    std::size_t at = hash & mask();
    while (slots_[at].child != kNoNode) at = (at + 1) & mask();
    slots_[at] = {hash, child};
  }

  void resize(std::size_t size) {
    std::vector<Slot> old(size);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.child != kNoNode) place(slot.hash, slot.child);
    }
  }

  std::vector<Slot> slots_;
  std::size_t used_ = 0;
};

}  // namespace forebay
