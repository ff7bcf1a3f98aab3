// Which device memory was allocated in one piece: a copy of rows may not leave it, however evenly its rows
// lie, and layers of a KV cache may well have been allocated one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace forebay::cuda {

// Remembers what the driver told: memory that is copied to or from outlives who copies. One thread.
class Allocations {
 public:
  // Whether `first` and the `bytes` from `last` on are device memory of one allocation.
  bool hold(const std::byte* first, const std::byte* last, std::size_t bytes);

 private:
  // Where the allocation around `at` ends; `at` itself where the driver knows of none.
  std::uintptr_t end_of(std::uintptr_t at);

  std::map<std::uintptr_t, std::uintptr_t> ends_;  // by where they begin
};

}  // namespace forebay::cuda
