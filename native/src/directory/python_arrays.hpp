// Numpy arrays of block ids and flags, as they come from Python and go there.
//
// Through the buffer protocol and `numpy.frombuffer`: a call with a few short arrays then costs a
// fraction of a microsecond, and needs nothing of numpy's at build time.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <vector>

namespace forebay {

// A one-dimensional array that a caller passed, valid as long as this object lives. Anything but an
// array of exactly that type raises ProtocolError; one that is not contiguous is copied.
template <typename Value>
class ArrayArgument {
 public:
  ArrayArgument(nanobind::handle array, const char* name);
  ~ArrayArgument() { PyBuffer_Release(&view_); }
  ArrayArgument(const ArrayArgument&) = delete;
  ArrayArgument& operator=(const ArrayArgument&) = delete;

  std::span<const Value> values() const { return values_; }

 private:
  Py_buffer view_;
  std::vector<Value> copy_;
  std::span<const Value> values_;
};

using IdsArgument = ArrayArgument<std::int32_t>;
using FlagsArgument = ArrayArgument<std::uint8_t>;  // of numpy's bool

// An integer; one too large for any block is none of the blocks there are.
std::int64_t integer_argument(nanobind::handle value);

// Room for a result of `count` values that Python will see as a read-only array.
template <typename Value>
class ArrayResult {
 public:
  explicit ArrayResult(std::size_t count);
  explicit ArrayResult(std::span<const Value> values);

  Value* data() { return reinterpret_cast<Value*>(PyBytes_AS_STRING(bytes_.ptr())); }
  nanobind::object array();

 private:
  nanobind::object bytes_;
};

using IdsResult = ArrayResult<std::int32_t>;
using FlagsResult = ArrayResult<std::uint8_t>;
using StatesResult = ArrayResult<std::int8_t>;

inline nanobind::object ids_of(const std::vector<std::int32_t>& ids) {
  return IdsResult(std::span(ids)).array();
}

}  // namespace forebay
