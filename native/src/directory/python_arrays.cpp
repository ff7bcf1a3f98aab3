#include "directory/python_arrays.hpp"

#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "errors.hpp"

namespace nb = nanobind;

namespace forebay {

namespace {

template <typename Value>
constexpr const char* kTypeName = std::is_same_v<Value, std::uint8_t>   ? "bool_"
                                  : std::is_same_v<Value, std::int8_t>  ? "int8"
                                  : std::is_same_v<Value, std::int32_t> ? "int32"
                                                                        : "int64";

// In the buffer protocol's words; the second is what C calls it on some machines.
template <typename Value>
constexpr std::string_view kFormats = std::is_same_v<Value, std::uint8_t> ? "?" : "il";

template <typename Value>
bool fits(const Py_buffer& view) {
  return view.ndim == 1 && view.itemsize == sizeof(Value) && view.format != nullptr &&
         view.format[0] != '\0' && view.format[1] == '\0' &&
         kFormats<Value>.find(view.format[0]) != std::string_view::npos;
}

// Kept for the life of the process: at its end there is no interpreter to give them back to.
nb::handle kept(nb::object object) { return object.release(); }

template <typename Value>
nb::object from_buffer(nb::handle bytes) {
  static const nb::handle make = kept(nb::module_::import_("numpy").attr("frombuffer"));
  static const nb::handle type =
      kept(nb::module_::import_("numpy").attr("dtype")(kTypeName<Value>));
  return make(bytes, type);
}

}  // namespace

template <typename Value>
ArrayArgument<Value>::ArrayArgument(nb::handle array, const char* name) {
  const bool is_buffer = PyObject_GetBuffer(array.ptr(), &view_, PyBUF_RECORDS_RO) == 0;
  if (!is_buffer) PyErr_Clear();
  if (!is_buffer || !fits<Value>(view_)) {
    if (is_buffer) PyBuffer_Release(&view_);
    throw ProtocolError(std::string(name) + " must be a one-dimensional numpy array of " +
                        kTypeName<Value> + ", not " + Py_TYPE(array.ptr())->tp_name +
                        (is_buffer ? " of another type or shape" : ""));
  }
  const auto count = static_cast<std::size_t>(view_.shape[0]);
  const auto* at = static_cast<const std::byte*>(view_.buf);
  if (view_.strides[0] == sizeof(Value) || count < 2) {
    values_ = {reinterpret_cast<const Value*>(at), count};
    return;
  }
  copy_.resize(count);
  for (Value& value : copy_) {
    std::memcpy(&value, at, sizeof(Value));
    at += view_.strides[0];
  }
  values_ = copy_;
}

std::int64_t integer_argument(nb::handle value) {
  const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
  if (!integer.is_valid()) throw nb::python_error();
  int overflow = 0;
  const long long found = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
  if (overflow) return overflow < 0 ? -1 : std::numeric_limits<std::int64_t>::max();
  return found;
}

template <typename Value>
ArrayResult<Value>::ArrayResult(std::size_t count)
    : bytes_(nb::steal(PyBytes_FromStringAndSize(
          nullptr, static_cast<Py_ssize_t>(count * sizeof(Value))))) {
  if (!bytes_.is_valid()) throw nb::python_error();
}

template <typename Value>
ArrayResult<Value>::ArrayResult(std::span<const Value> values) : ArrayResult(values.size()) {
  if (!values.empty()) std::memcpy(data(), values.data(), values.size_bytes());
}

template <typename Value>
nb::object ArrayResult<Value>::array() {
  return from_buffer<Value>(bytes_);
}

template class ArrayArgument<std::int32_t>;
template class ArrayArgument<std::uint8_t>;
template class ArrayResult<std::int32_t>;
template class ArrayResult<std::uint8_t>;
template class ArrayResult<std::int8_t>;
template class ArrayResult<std::int64_t>;

}  // namespace forebay
