// Columns as Python sees them. `forebay/_native.pyi` says what each call does.
#include "directory/column_bindings.hpp"

#include <array>

#include "directory/column.hpp"
#include "directory/python_arrays.hpp"

namespace nb = nanobind;

namespace forebay {

namespace {

template <typename Value>
nb::object take(const Column<Value>& self, nb::handle ids) {
  const IdsArgument given(ids, "ids");
  ArrayResult<Value> result(given.values().size());
  self.read(given.values(), result.data());
  return result.array();
}

// Of slots, of which -1 is none.
nb::object states_of(const Column<std::int8_t>& self, nb::handle slots) {
  const IdsArgument given(slots, "slots");
  StatesResult result(given.values().size());
  auto* out = result.data();
  for (const std::int32_t slot : given.values()) *out++ = slot == -1 ? 0 : self.of(slot);
  return result.array();
}

constexpr std::size_t kStates = 6;

nb::list counts(const Column<std::int8_t>& self, nb::handle slots) {
  const IdsArgument given(slots, "slots");
  std::array<std::int64_t, kStates> found{};
  for (const std::int32_t slot : given.values()) ++found.at(slot == -1 ? 0 : self.of(slot));
  nb::list told;
  for (const std::int64_t count : found) told.append(count);
  return told;
}

nb::list as_list(const std::vector<std::pair<std::int64_t, std::int64_t>>& runs) {
  nb::list told;
  for (const auto& [value, count] : runs) told.append(nb::make_tuple(value, count));
  return told;
}

nb::object marked(const Column<std::int64_t>& self, nb::handle ids) {
  const IdsArgument given(ids, "ids");
  check_blocks(given.values(), self.size());
  FlagsResult result(given.values().size());
  auto* out = result.data();
  for (const std::int32_t id : given.values()) *out++ = self.of(id) != 0;
  return result.array();
}

nb::list clear_runs(Column<std::int64_t>& self, nb::handle ids) {
  const IdsArgument given(ids, "ids");
  const auto found = self.runs(given.values());
  if (!found.empty()) self.put(given.values(), 0);
  return as_list(found);
}

nb::object numbers(const Column<std::uint8_t>& self) {
  std::vector<std::int32_t> found;
  for (std::int32_t id = 0; id < self.size(); ++id) {
    if (self.of(id)) found.push_back(id);
  }
  return ids_of(found);
}

template <typename Value>
nb::class_<Column<Value>> bind(nb::module_& module, const char* name, Value fill) {
  nb::class_<Column<Value>> column(module, name);
  column
      .def("__init__",
           [fill](Column<Value>* self, std::int64_t count) { new (self) Column<Value>(count, fill); },
           nb::arg("count"))
      .def("put", [](Column<Value>& self, nb::handle ids, std::int64_t value) {
        self.put(IdsArgument(ids, "ids").values(), static_cast<Value>(value));
      });
  return column;
}

}  // namespace

void bind_columns(nb::module_& module) {
  bind<std::int64_t>(module, "NumberColumn", 0)
      .def("take", &take<std::int64_t>)
      .def("put_up",
           [](Column<std::int64_t>& self, nb::handle ids, std::int64_t first) {
             self.put_up(IdsArgument(ids, "ids").values(), first);
           })
      .def("raise_to",
           [](Column<std::int64_t>& self, nb::handle ids, std::int64_t number) {
             self.raise_to(IdsArgument(ids, "ids").values(), number);
           })
      .def("marked", &marked)
      .def("runs",
           [](const Column<std::int64_t>& self, nb::handle ids) {
             return as_list(self.runs(IdsArgument(ids, "ids").values()));
           })
      .def("clear_runs", &clear_runs);
  bind<std::int32_t>(module, "SlotColumn", -1)
      .def("take", &take<std::int32_t>)
      .def("put_each", [](Column<std::int32_t>& self, nb::handle ids, nb::handle slots) {
        self.put_each(IdsArgument(ids, "ids").values(), IdsArgument(slots, "slots").values());
      });
  bind<std::uint8_t>(module, "FlagColumn", 0)
      .def("take", &take<std::uint8_t>)
      .def("of", [](const Column<std::uint8_t>& self, std::int64_t id) { return self.of(id) != 0; })
      .def("numbers", &numbers);
  bind<std::int8_t>(module, "StateColumn", 0).def("take", &states_of).def("counts", &counts);
  module.def("count_true", [](nb::handle flags) {
    const FlagsArgument given(flags, "flags");
    return std::count(given.values().begin(), given.values().end(), std::uint8_t{1});
  });
}

}  // namespace forebay
