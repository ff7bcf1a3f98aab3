// vLLM's queue of free blocks: Python objects, each linked to the one before and the one behind.
//
// Walked and relinked here because it is long, and looked at in every step. It is vLLM's: what is
// used of it is listed by `forebay.vllm.adapter`.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "vllm/slot_books.hpp"

namespace forebay {

// An attribute of objects of one class: read at its place in the object where the class has it as a
// slot, by its name elsewhere.
class Attribute {
 public:
  Attribute(nanobind::handle owner_class, const char* name);

  nanobind::object get(nanobind::handle owner) const;
  // The same where somebody else holds on to what it is: no reference is taken.
  nanobind::handle peek(nanobind::handle owner) const {
    if (offset_ && place(owner)) return place(owner);
    return get(owner);
  }
  void set(nanobind::handle owner, nanobind::handle value) const;

 private:
  PyObject*& place(nanobind::handle owner) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner.ptr()) + offset_);
  }

  nanobind::object name_;
  Py_ssize_t offset_ = 0;
};

class FreeQueue {
 public:
  // `queue` is vLLM's, `blocks` all blocks of its pool by their ids.
  FreeQueue(nanobind::handle queue, nanobind::handle blocks);

  // The ids of the first `count` free blocks, in the order in which they are handed out.
  std::vector<std::int32_t> first(std::int64_t count) const;

  // Moves spared blocks to the tail until `count` others stand in front, looking at `most` blocks
  // at most. Returns how many others stand in front now, `count` at most.
  std::int64_t spare(const SlotBooks& books, std::int64_t count, std::int64_t most,
                     bool wanted_too);

  // Sees to it that `count` blocks that are not leased stand in front, unwanted ones first, then
  // those that were wanted last, looking at `most` blocks of the queue at most. Where none is wanted
  // there is nothing else to take: then it looks at as many as it needs. Returns how many of those
  // stand in front now, `count` at most.
  std::int64_t make_way(const SlotBooks& books, std::int64_t count, std::int64_t most);

  // The same for `count` that may be taken at any time, and some more; not where it was done before
  // for as many, nothing changed but that a few were taken, and so enough stand there still.
  void guard(const SlotBooks& books, std::int64_t count);

  // The ids of a list of blocks.
  nanobind::object ids(nanobind::handle blocks) const;

  // The list of the blocks of these ids, any of which may be in use.
  nanobind::list with_ids(BlockIds ids) const;

 private:
  std::int32_t id_of(nanobind::handle block) const;
  // Blocks are held by the pool's list: no reference is taken.
  nanobind::handle next(nanobind::handle block) const;
  // Puts the blocks from `first` to `last` behind all others.
  void to_tail(nanobind::handle first, nanobind::handle last);
  // Puts the blocks from `first` to `last` behind `place`, which is none of them.
  void put(nanobind::handle first, nanobind::handle last, nanobind::handle place);

  nanobind::object queue_;
  nanobind::object blocks_;
  nanobind::object head_;
  nanobind::object tail_;
  Attribute id_;
  Attribute before_;
  Attribute behind_;
  std::int64_t guarded_count_ = 0;
  nanobind::object guarded_end_;
  std::int64_t guarded_version_ = -1;
  std::int64_t guarded_free_ = 0;
};

}  // namespace forebay
