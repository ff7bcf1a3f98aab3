#include "cuda/allocations.hpp"

#include <iterator>

#include "cuda/driver.hpp"

namespace forebay::cuda {

bool Allocations::hold(const std::byte* first, const std::byte* last, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(last) + bytes <= end_of(reinterpret_cast<std::uintptr_t>(first));
}

std::uintptr_t Allocations::end_of(std::uintptr_t at) {
  const auto behind = ends_.upper_bound(at);
  if (behind != ends_.begin()) {
    const std::uintptr_t end = std::prev(behind)->second;
    if (at < end) return end;
  }
  Address begin = 0;
  std::size_t size = 0;
  if (Driver::get().address_range(&begin, &size, static_cast<Address>(at)) != kSuccess) return at;
  ends_[static_cast<std::uintptr_t>(begin)] = static_cast<std::uintptr_t>(begin) + size;
  return static_cast<std::uintptr_t>(begin) + size;
}

}  // namespace forebay::cuda
