// What Python sees of a CUDA device beside its lanes.
#pragma once

#include <nanobind/nanobind.h>

namespace forebay::cuda {

void bind(nanobind::module_& module);

}  // namespace forebay::cuda
