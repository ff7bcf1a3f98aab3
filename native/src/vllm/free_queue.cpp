#include "vllm/free_queue.hpp"

#include <structmember.h>

#include "directory/python_arrays.hpp"

namespace nb = nanobind;

namespace forebay {

namespace {

// A guard makes way for a part more than it is asked for, to last for some steps, and looks at so
// many times as many blocks.
constexpr std::int64_t kSparePart = 4;
constexpr std::int64_t kLooked = 2;

nb::handle class_of(nb::handle blocks) {
  if (!PyList_Check(blocks.ptr()) || PyList_GET_SIZE(blocks.ptr()) == 0) {
    throw ProtocolError("the blocks of a pool are a list that is not empty");
  }
  return reinterpret_cast<PyObject*>(Py_TYPE(PyList_GET_ITEM(blocks.ptr(), 0)));
}

}  // namespace

Attribute::Attribute(nb::handle owner_class, const char* name)
    : name_(nb::steal(PyUnicode_InternFromString(name))) {
  const nb::object found = nb::steal(PyObject_GetAttr(owner_class.ptr(), name_.ptr()));
  if (!found.is_valid()) {
    PyErr_Clear();
    return;
  }
  if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) return;
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member;
  if (member->type == T_OBJECT_EX) offset_ = member->offset;
}

nb::object Attribute::get(nb::handle owner) const {
  if (offset_) {
    PyObject* value = place(owner);
    if (value) return nb::borrow(value);
  }
  nb::object value = nb::steal(PyObject_GetAttr(owner.ptr(), name_.ptr()));
  if (!value.is_valid()) throw nb::python_error();
  return value;
}

void Attribute::set(nb::handle owner, nb::handle value) const {
  if (!offset_) {
    if (PyObject_SetAttr(owner.ptr(), name_.ptr(), value.ptr()) != 0) throw nb::python_error();
    return;
  }
  PyObject* old = place(owner);
  place(owner) = value.inc_ref().ptr();
  Py_XDECREF(old);
}

FreeQueue::FreeQueue(nb::handle queue, nb::handle blocks)
    : queue_(nb::borrow(queue)),
      blocks_(nb::borrow(blocks)),
      head_(queue.attr("fake_free_list_head")),
      tail_(queue.attr("fake_free_list_tail")),
      id_(class_of(blocks), "block_id"),
      before_(class_of(blocks), "prev_free_block"),
      behind_(class_of(blocks), "next_free_block") {
  if (Py_TYPE(head_.ptr()) != Py_TYPE(PyList_GET_ITEM(blocks.ptr(), 0)) ||
      Py_TYPE(tail_.ptr()) != Py_TYPE(head_.ptr())) {
    throw SettingsError("vLLM's free queue has other ends than blocks: it is not supported");
  }
}

std::vector<std::int32_t> FreeQueue::first(std::int64_t count) const {
  std::vector<std::int32_t> found;
  for (nb::handle at = next(head_); !at.is(tail_); at = next(at)) {
    if (static_cast<std::int64_t>(found.size()) >= count) break;
    found.push_back(id_of(at));
  }
  return found;
}

std::int64_t FreeQueue::spare(const SlotBooks& books, std::int64_t count, std::int64_t most,
                              bool wanted_too) {
  std::int64_t passed = 0;
  nb::handle moved, first, last;
  nb::handle at = next(head_);
  // Those that were moved stand behind all that is looked at.
  for (; !at.is(tail_) && !at.is(moved) && passed < count && most > 0; --most) {
    const nb::handle behind = next(at);
    if (books.spared(checked_block(id_of(at), books.slots()), wanted_too)) {
      if (!first.is_valid()) first = at;
      last = at;
    } else {
      if (first.is_valid()) {
        to_tail(first, last);
        if (!moved.is_valid()) moved = first;
        first = nb::handle();
      }
      ++passed;
    }
    at = behind;
  }
  // With others behind it, these are for the tail too.
  if (first.is_valid() && !at.is(tail_) && !at.is(moved)) to_tail(first, last);
  return passed;
}

std::int64_t FreeQueue::make_way(const SlotBooks& books, std::int64_t count, std::int64_t most) {
  // Of so many, enough are not leased. `most` is no bound here: fewer would be found, and no wanted
  // ones could make up for them.
  if (!books.wanted_here()) return spare(books, count, books.leased_here() + count, false);
  const std::int64_t unwanted = spare(books, count, most, true);
  if (unwanted >= count) return unwanted;
  nb::handle place = head_;
  for (std::int64_t passed = 0; passed < unwanted; ++passed) place = next(place);
  std::int64_t given = 0;
  books.walk_wanted([&](std::int32_t block) {
    const nb::handle found = PyList_GET_ITEM(blocks_.ptr(), books.slot_of(block));
    // What somebody uses is in no queue.
    if (before_.peek(found).is_none()) return true;
    if (!found.is(next(place))) put(found, found, place);
    place = found;
    return ++given < count - unwanted;
  });
  return unwanted + given;
}

void FreeQueue::guard(const SlotBooks& books, std::int64_t count) {
  const auto free = nb::cast<std::int64_t>(queue_.attr("num_free_blocks"));
  const bool as_before = count <= guarded_count_ && guarded_version_ == books.version() &&
                         before_.get(tail_).is(guarded_end_) &&
                         guarded_free_ - free <= count / kSparePart;
  if (as_before) return;
  make_way(books, count + count / kSparePart, kLooked * count);
  guarded_count_ = count;
  guarded_end_ = before_.get(tail_);
  guarded_version_ = books.version();
  guarded_free_ = free;
}

nb::object FreeQueue::ids(nb::handle blocks) const {
  if (!PyList_Check(blocks.ptr())) throw ProtocolError("blocks come as a list");
  IdsResult result(static_cast<std::size_t>(PyList_GET_SIZE(blocks.ptr())));
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(blocks.ptr()); ++at) {
    result.data()[at] = id_of(PyList_GET_ITEM(blocks.ptr(), at));
  }
  return result.array();
}

nb::list FreeQueue::with_ids(BlockIds ids) const {
  check_blocks(ids, static_cast<std::int32_t>(PyList_GET_SIZE(blocks_.ptr())));
  nb::list found;
  for (const std::int32_t id : ids) found.append(nb::handle(PyList_GET_ITEM(blocks_.ptr(), id)));
  return found;
}

std::int32_t FreeQueue::id_of(nb::handle block) const {
  const long id = PyLong_AsLong(id_.peek(block).ptr());
  if (id == -1 && PyErr_Occurred()) throw nb::python_error();
  return static_cast<std::int32_t>(id);
}

nb::handle FreeQueue::next(nb::handle block) const {
  const nb::handle found = behind_.peek(block);
  if (found.is_none()) throw ProtocolError("a block of vLLM's free queue has none behind it");
  return found;
}

void FreeQueue::to_tail(nb::handle first, nb::handle last) {
  const nb::object end = before_.get(tail_);
  if (!end.is(last)) put(first, last, end);
}

void FreeQueue::put(nb::handle first, nb::handle last, nb::handle place) {
  const nb::object before = before_.get(first);
  const nb::object behind = behind_.get(last);
  behind_.set(before, behind);
  before_.set(behind, before);
  const nb::object after = behind_.get(place);
  behind_.set(place, first);
  before_.set(first, place);
  behind_.set(last, after);
  before_.set(after, last);
}

}  // namespace forebay
