#include "cuda/touch.hpp"

#include <algorithm>
#include <system_error>

namespace forebay::cuda {

namespace {

constexpr std::size_t kTouchedPage = 4096;
// What one thread takes at a time: whole huge pages, and small against a registration, so that all
// threads work on the one that is waited for.
constexpr std::size_t kChunk = std::size_t{8} << 20;

}  // namespace

PageToucher::PageToucher(std::byte* begin, std::size_t bytes, int threads)
    : begin_(begin), bytes_(bytes), touched_((bytes + kChunk - 1) / kChunk) {
  const auto most = std::min<std::size_t>(static_cast<std::size_t>(std::clamp(threads, 1, 64)),
                                          touched_.size());
  for (std::size_t i = 0; i < most; ++i) {
    try {
      threads_.emplace_back([this] { run(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      return;
    }
  }
}

void PageToucher::run() {
  for (;;) {
    const std::size_t chunk = next_++;
    if (chunk * kChunk >= bytes_) return;
    const std::size_t end = std::min(bytes_, (chunk + 1) * kChunk);
    for (std::size_t at = chunk * kChunk; at < end; at += kTouchedPage) {
      if (stop_) return;
      *static_cast<volatile std::byte*>(begin_ + at) = std::byte{0};
    }
    const std::lock_guard lock(mutex_);
    touched_[chunk] = true;
    while (whole_ < touched_.size() && touched_[whole_]) ++whole_;
    changed_.notify_all();
  }
}

bool PageToucher::wait(std::size_t bytes) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return stop_ || std::min(bytes_, whole_ * kChunk) >= std::min(bytes_, bytes);
  });
  return !stop_;
}

void PageToucher::stop() {
  const std::lock_guard lock(mutex_);
  stop_ = true;
  changed_.notify_all();
}

PageToucher::~PageToucher() {
  stop();
  for (std::thread& each : threads_) each.join();
}

}  // namespace forebay::cuda
