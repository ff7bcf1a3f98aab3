#include "transfer/throttle.hpp"

#include <algorithm>

namespace forebay {

namespace {
constexpr double kSliceSeconds = 1e-3;
constexpr double kSmallestSlice = 4096;
constexpr double kLargestSlice = 1 << 20;
constexpr std::chrono::milliseconds kDebt{4};
}  // namespace

Throttle::Throttle(double bytes_per_s)
    : bytes_per_s_(bytes_per_s),
      slice_bytes_(static_cast<std::size_t>(
          std::clamp(bytes_per_s * kSliceSeconds, kSmallestSlice, kLargestSlice))) {}

Clock::time_point Throttle::book(std::size_t bytes) {
  const auto cost = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_s_));
  const std::lock_guard lock(mutex_);
  free_at_ = std::max(free_at_, Clock::now() - kDebt) + cost;
  return free_at_;
}

}  // namespace forebay
