// Columns' part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace forebay {

// Adds `NumberColumn`, `SlotColumn`, `FlagColumn`, `StateColumn` and `count_true`.
void bind_columns(nanobind::module_& module);

}  // namespace forebay
