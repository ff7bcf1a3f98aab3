#include "cuda/cuda_bindings.hpp"

#include <nanobind/stl/string.h>

#include "cuda/pinned.hpp"

namespace nb = nanobind;

namespace forebay::cuda {

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

nb::list devices() {
  nb::list found;
  const int count = device_count();
  for (int index = 0; index < count; ++index) {
    const DeviceFacts facts = facts_of(index);
    found.append(nb::make_tuple(facts.name, facts.memory_bytes, facts.copy_engines,
                                facts.numa_node));
  }
  return found;
}

}  // namespace

void bind(nb::module_& module) {
  module.def("cuda_devices", &devices);
  nb::class_<PinnedMemory>(module, "PinnedMemory")
      .def(
          "__init__",
          [](PinnedMemory* self, std::size_t size_bytes, std::uint64_t address, int device_index,
             std::size_t grain_bytes, std::size_t slice_bytes, double share, int threads,
             int numa_node, bool in_place) {
            const PinSettings settings{device_index, grain_bytes, slice_bytes, share,
                                       threads,      numa_node,   in_place};
            if (address == 0) {
              new (self) PinnedMemory(size_bytes, settings);
            } else {
              new (self) PinnedMemory(address, size_bytes, settings);
            }
          },
          Released(), nb::arg("size_bytes"), nb::kw_only(), nb::arg("address"),
          nb::arg("device_index"), nb::arg("grain_bytes"), nb::arg("slice_bytes"),
          nb::arg("share"), nb::arg("threads"), nb::arg("numa_node"), nb::arg("in_place"))
      .def_prop_ro("address", &PinnedMemory::address)
      .def_prop_ro("size_bytes", &PinnedMemory::size_bytes)
      .def_prop_ro("slice_bytes", &PinnedMemory::slice_bytes)
      .def_prop_ro("ready_bytes", &PinnedMemory::ready_bytes)
      .def_prop_ro("how", &PinnedMemory::how)
      .def_prop_ro("error", &PinnedMemory::error)
      .def("wait_ready", &PinnedMemory::wait_ready, Released())
      .def("close", &PinnedMemory::close, Released());
}

}  // namespace forebay::cuda
