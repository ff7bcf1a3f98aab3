#include "vllm/free_queue.hpp"

#include <structmember.h>

#include "directory/python_arrays.hpp"

namespace nb = nanobind;

namespace forebay {

namespace {

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
    : head_(queue.attr("fake_free_list_head")),
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
  for (nb::object at = next(head_); !at.is(tail_); at = next(at)) {
    if (static_cast<std::int64_t>(found.size()) >= count) break;
    found.push_back(id_of(at));
  }
  return found;
}

std::int64_t FreeQueue::spare(const SlotBooks& books, std::int64_t count, std::int64_t most,
                              bool wanted_too) {
  std::int64_t passed = 0;
  nb::object moved, first, last;
  nb::object at = next(head_);
  // Those that were moved stand behind all that is looked at.
  for (; !at.is(tail_) && !at.is(moved) && passed < count && most > 0; --most) {
    nb::object behind = next(at);
    if (books.spared(checked_block(id_of(at), books.slots()), wanted_too)) {
      if (!first.is_valid()) first = at;
      last = at;
    } else {
      if (first.is_valid()) {
        to_tail(first, last);
        if (!moved.is_valid()) moved = first;
        first.reset();
      }
      ++passed;
    }
    at = std::move(behind);
  }
  // With others behind it, these are for the tail too.
  if (first.is_valid() && !at.is(tail_) && !at.is(moved)) to_tail(first, last);
  return passed;
}

nb::object FreeQueue::ids(nb::handle blocks) const {
  if (!PyList_Check(blocks.ptr())) throw ProtocolError("blocks come as a list");
  IdsResult result(static_cast<std::size_t>(PyList_GET_SIZE(blocks.ptr())));
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(blocks.ptr()); ++at) {
    result.data()[at] = id_of(PyList_GET_ITEM(blocks.ptr(), at));
  }
  return result.array();
}

std::int32_t FreeQueue::id_of(nb::handle block) const {
  const long id = PyLong_AsLong(id_.get(block).ptr());
  if (id == -1 && PyErr_Occurred()) throw nb::python_error();
  return static_cast<std::int32_t>(id);
}

nb::object FreeQueue::next(nb::handle block) const {
  nb::object found = behind_.get(block);
  if (found.is_none()) throw ProtocolError("a block of vLLM's free queue has none behind it");
  return found;
}

void FreeQueue::to_tail(nb::handle first, nb::handle last) {
  const nb::object before = before_.get(first);
  const nb::object behind = behind_.get(last);
  behind_.set(before, behind);
  before_.set(behind, before);
  const nb::object end = before_.get(tail_);
  behind_.set(end, first);
  before_.set(first, end);
  behind_.set(last, tail_);
  before_.set(tail_, last);
}

}  // namespace forebay
