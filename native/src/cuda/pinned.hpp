// Host memory that copy engines reach at full rate: anonymous, on huge pages where there are any,
// touched by many threads ahead of time, and registered with the driver slice by slice, from the
// front, while what is ready is used already.
//
// A registration holds a lock of the driver that every other thread's calls may need, so between
// slices there is a pause in proportion to what the last one took. Nobody pauses while somebody
// waits for the memory itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver.hpp"
#include "cuda/touch.hpp"

namespace forebay::cuda {

struct PinSettings {
  int device_index = 0;
  // No copy may cross two registrations, so a slice is a whole number of grains: give the block.
  std::size_t grain_bytes = 1;
  // Large registrations fail or hold the driver's lock for long; small ones cost a call each.
  std::size_t slice_bytes = std::size_t{32} << 20;
  double share = 1;      // of the time that registering may take while nobody waits for it; 1: all
  int threads = 2;       // that touch
  int numa_node = -1;    // preferred for the memory; -1 leaves it to the kernel
  bool in_place = true;  // false: the driver allocates, as where registering is not allowed
};

class PinnedMemory {
 public:
  // Takes memory, pins its first slice, and goes on in the background. Throws SettingsError without
  // a driver or memory, BackendError when nothing can be pinned either way.
  PinnedMemory(std::size_t size_bytes, const PinSettings& settings);
  // Pins memory that stays the caller's, of at least this size, in the same way.
  PinnedMemory(std::uint64_t address, std::size_t size_bytes, const PinSettings& settings);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(begin_); }
  std::size_t size_bytes() const { return size_; }
  std::size_t slice_bytes() const { return slice_; }
  // From the front; grows until it is all, or until an error stops it.
  std::size_t ready_bytes() const { return ready_.load(); }
  // "registered", or "allocated" where registering was refused.
  const char* how() const { return allocated_ ? "allocated" : "registered"; }
  // Why it stopped early; empty when it did not.
  std::string error() const;
  // Waits until so much is ready, or nothing more will be; whether it is. Meanwhile registering
  // does not pause.
  bool wait_ready(std::size_t bytes, double timeout_s);
  // Ends the pinning, unpins and gives back. No copy may be under way. Idempotent.
  void close();

 private:
  void reserve();
  void pin_first();
  void pin_rest();
  void allocate(const std::string& why);
  Result pin(std::size_t from);
  bool touched(std::size_t bytes) { return toucher_ == nullptr || toucher_->wait(bytes); }
  std::size_t slice_at(std::size_t from) const;
  void publish(std::size_t ready);
  void pause(Clock::duration after);
  void give_back();

  const Driver& driver_;
  const DeviceContext device_;
  const PinSettings settings_;
  const std::size_t size_;
  std::size_t slice_ = 0;
  std::byte* begin_ = nullptr;
  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  bool owns_ = false;
  bool allocated_ = false;
  std::vector<std::byte*> registered_;
  std::atomic<std::size_t> ready_{0};
  std::atomic<bool> stop_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;   // guarded, as is what follows
  int waiting_ = 0;      // calls of wait_ready()
  std::string error_;
  std::unique_ptr<PageToucher> toucher_;  // null where the memory is not ours
  std::thread thread_;
};

}  // namespace forebay::cuda
