// Times of the device's events on the clock of now_s().
#pragma once

#include <mutex>

#include "cuda/driver.hpp"

namespace forebay::cuda {

// Thread-safe.
class DeviceClock {
 public:
  // Throws BackendError.
  explicit DeviceClock(const DeviceContext& device);
  ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // When an event made with timing completed; false where it has not, or knows no time, or where
  // the device is broken.
  bool when(EventHandle event, double& at_s);

 private:
  Result set();

  const Driver& driver_;
  const DeviceContext& device_;
  std::mutex mutex_;
  Stream stream_ = nullptr;
  EventHandle base_ = nullptr;  // was recorded at base_s_
  double base_s_ = 0;
};

}  // namespace forebay::cuda
