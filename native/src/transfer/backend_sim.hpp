// Streams with CUDA's rules and seeded delays, for tests of the ordering rules.
//
// Copies move bytes only when their stream executes them, so an order that is wrong shows as bytes
// that are wrong. Compute streams take host closures as kernels.
#pragma once

#include <functional>

#include "transfer/backend_host.hpp"

namespace forebay {

class SimBackend final : public HostBackend {
 public:
  SimBackend(std::uint64_t seed, double longest_delay_s)
      : HostBackend(0, seed, bounded(longest_delay_s)) {}

  StreamHandle open_compute_stream() { return open_stream(); }
  // Enqueues a kernel; it runs on the stream's thread.
  void launch(StreamHandle handle, std::function<void()> kernel) {
    stream(handle).push([kernel = std::move(kernel)](WorkStream&) { kernel(); });
  }
  void hold(StreamHandle handle) { stream(handle).hold(); }
  void release(StreamHandle handle) { stream(handle).release(); }
};

}  // namespace forebay
