// The directory's part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace forebay {

// Adds `Directory`, `EvictionOrder` and `BlockCounts`.
void bind_directory(nanobind::module_& module);

}  // namespace forebay
