// In a file of its own, where the compiler cannot look through it from the callers.
#include "scarce_memory.hpp"

#include <cstdlib>
#include <new>

namespace {

int left = -1;

void* allocated(std::size_t bytes) {
  if (left == 0) {
    left = -1;
    return nullptr;
  }
  if (left > 0) --left;
  return std::malloc(bytes ? bytes : 1);
}

}  // namespace

void check::run_out_after(int allocations) { left = allocations; }

void* operator new(std::size_t bytes) {
  if (void* memory = allocated(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocated(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocated(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
