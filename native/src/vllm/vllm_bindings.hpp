// What Python sees of the books over vLLM's block pool.
#pragma once

#include <nanobind/nanobind.h>

namespace forebay {

// Adds `SlotBooks` and `FreeQueue`.
void bind_vllm(nanobind::module_& module);

}  // namespace forebay
