#include "cuda/device_clock.hpp"

namespace forebay::cuda {

namespace {
// The driver tells differences in 32-bit milliseconds: of 10 s, to a microsecond. And clocks drift.
constexpr double kOldest_s = 10;
}  // namespace

DeviceClock::DeviceClock(const DeviceContext& device) : driver_(Driver::get()), device_(device) {
  const DeviceContext::Scope scope(device_);
  driver_.check("opening a stream", driver_.create_stream(&stream_, kStreamNonBlocking, 0));
  driver_.check("making an event", driver_.create_event(&base_, kEventDefault));
  driver_.check("setting the device's clock", set());
}

DeviceClock::~DeviceClock() {
  const DeviceContext::Scope scope(device_);
  driver_.destroy_event(base_);
  driver_.destroy_stream(stream_);
}

// The stream carries nothing else, so the event completes between the two readings.
Result DeviceClock::set() {
  const double before_s = now_s();
  Result result = driver_.record_event(base_, stream_);
  if (result == kSuccess) result = driver_.synchronize_event(base_);
  base_s_ = (before_s + now_s()) / 2;
  return result;
}

bool DeviceClock::when(EventHandle event, double& at_s) {
  const DeviceContext::Scope scope(device_);
  const std::lock_guard lock(mutex_);
  if (now_s() - base_s_ > kOldest_s && set() != kSuccess) return false;
  float after_ms = 0;
  if (driver_.elapsed_ms(&after_ms, base_, event) != kSuccess) return false;
  at_s = base_s_ + 1e-3 * static_cast<double>(after_ms);
  return true;
}

}  // namespace forebay::cuda
