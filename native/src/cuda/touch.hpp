// Pages of fresh memory, taken from the system by many threads ahead of whoever needs them.
//
// The first write to a page is where the system finds and clears it. That needs no driver, so it
// goes at full speed, front first, while the driver registers what is behind.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace forebay::cuda {

class PageToucher {
 public:
  // Writes a zero to every page of [begin, begin + bytes) on `threads` threads (1 to 64), or on as
  // many of them as can be had.
  PageToucher(std::byte* begin, std::size_t bytes, int threads);
  ~PageToucher();
  PageToucher(const PageToucher&) = delete;
  PageToucher& operator=(const PageToucher&) = delete;

  // Blocks until the first `bytes` are touched; false once it was stopped instead.
  bool wait(std::size_t bytes);
  // Has the threads end, and every wait; does not wait for them. Idempotent.
  void stop();

 private:
  void run();

  std::byte* const begin_;
  const std::size_t bytes_;
  std::atomic<std::size_t> next_{0};  // chunk that nobody took yet
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> touched_;  // by chunk; guarded
  std::size_t whole_ = 0;      // leading chunks that are touched; guarded
  std::vector<std::thread> threads_;
};

}  // namespace forebay::cuda
