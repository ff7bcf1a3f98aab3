#include "cuda/pinned.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace forebay::cuda {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kPreferred = 1;  // MPOL_PREFERRED
// However long a slice took: pinning goes on.
constexpr std::chrono::seconds kLongestPause{1};

std::size_t slice_of(const PinSettings& settings, std::size_t size) {
  const std::size_t grain = std::lcm(std::max<std::size_t>(settings.grain_bytes, 1), kPage);
  return std::min(size, std::max(grain, settings.slice_bytes / grain * grain));
}

}  // namespace

PinnedMemory::PinnedMemory(std::size_t size_bytes, const PinSettings& settings)
    : driver_(Driver::get()),
      device_(settings.device_index),
      settings_(settings),
      size_(size_bytes),
      slice_(slice_of(settings, size_bytes)),
      owns_(true) {
  if (size_bytes == 0) throw SettingsError("pinned memory needs a positive size");
  reserve();
  try {
    pin_first();
  } catch (...) {
    close();
    throw;
  }
}

PinnedMemory::PinnedMemory(std::uint64_t address, std::size_t size_bytes,
                           const PinSettings& settings)
    : driver_(Driver::get()),
      device_(settings.device_index),
      settings_(settings),
      size_(size_bytes),
      slice_(slice_of(settings, size_bytes)),
      begin_(reinterpret_cast<std::byte*>(address)) {
  if (size_bytes == 0 || address % kPage != 0) {
    throw SettingsError("memory to pin must begin at a page and have a positive size");
  }
  try {
    pin_first();
  } catch (...) {
    close();
    throw;
  }
}

PinnedMemory::~PinnedMemory() { close(); }

// Address space only: pages come when they are touched.
void PinnedMemory::reserve() {
  mapped_ = size_ + kHugePage;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw SettingsError(std::to_string(size_) + " bytes of host memory cannot be had: " +
                        std::strerror(errno) + "; use a smaller pool");
  }
  const auto at = reinterpret_cast<std::uint64_t>(mapping_);
  begin_ = reinterpret_cast<std::byte*>((at + kHugePage - 1) / kHugePage * kHugePage);
  // Both are wishes: without huge pages or a choice of node the memory serves as well.
  madvise(begin_, size_, MADV_HUGEPAGE);
  if (settings_.numa_node >= 0 && settings_.numa_node < 64) {
    const unsigned long nodes = 1UL << settings_.numa_node;
    syscall(SYS_mbind, begin_, size_, kPreferred, &nodes, 64UL + 1, 0U);
  }
}

std::size_t PinnedMemory::slice_at(std::size_t from) const { return std::min(slice_, size_ - from); }

Result PinnedMemory::pin(std::size_t from) {
  const Result result = driver_.register_host(begin_ + from, slice_at(from), kHostPortable);
  if (result == kSuccess) registered_.push_back(begin_ + from);
  return result;
}

void PinnedMemory::pin_first() {
  const DeviceContext::Scope scope(device_);
  if (!settings_.in_place && owns_) return allocate("registering was not asked for");
  if (owns_) toucher_ = std::make_unique<PageToucher>(begin_, size_, settings_.threads);
  touched(slice_at(0));
  const Result refused = pin(0);
  if (refused == kSuccess) {
    publish(slice_at(0));
    thread_ = std::thread([this] { pin_rest(); });
    return;
  }
  const std::string why = driver_.describe("pinning host memory", refused);
  if (!owns_) throw BackendError(why);
  allocate(why);
}

// All at once, by the driver, instead of our own memory.
void PinnedMemory::allocate(const std::string& why) {
  give_back();
  void* memory = nullptr;
  const Result result = driver_.allocate_host(&memory, size_, kHostPortable);
  if (result != kSuccess) {
    throw BackendError(why + "; " + driver_.describe("and allocating it pinned", result) +
                       ": use a smaller pool");
  }
  begin_ = static_cast<std::byte*>(memory);
  allocated_ = true;
  const std::lock_guard lock(mutex_);
  ready_ = size_;
  ended_ = true;
}

void PinnedMemory::pin_rest() {
  std::string error;
  try {
    driver_.check("entering the device's context", device_.enter());
    for (std::size_t at = slice_; at < size_ && touched(at + slice_at(at)) && !stop_;) {
      const auto began = Clock::now();
      driver_.check("pinning host memory", pin(at));
      at += slice_at(at);
      publish(at);
      pause(Clock::now() - began);
    }
  } catch (const std::exception& fault) {
    error = fault.what();
  }
  if (toucher_ != nullptr) toucher_->stop();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

void PinnedMemory::pause(Clock::duration after) {
  if (!(settings_.share > 0 && settings_.share < 1)) return;
  const std::chrono::duration<double> wanted = after;
  const auto length = std::min<Clock::duration>(
      kLongestPause, bounded(wanted.count() * (1 / settings_.share - 1)));
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, length, [this] { return stop_ || waiting_ > 0; });
}

void PinnedMemory::publish(std::size_t ready) {
  const std::lock_guard lock(mutex_);
  ready_ = ready;
  changed_.notify_all();
}

std::string PinnedMemory::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool PinnedMemory::wait_ready(std::size_t bytes, double timeout_s) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  changed_.notify_all();
  changed_.wait_for(lock, bounded(timeout_s), [&] { return ended_ || ready_ >= bytes; });
  --waiting_;
  return ready_ >= bytes;
}

void PinnedMemory::close() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (toucher_ != nullptr) toucher_->stop();
  if (thread_.joinable()) thread_.join();
  const DeviceContext::Scope scope(device_);
  for (std::byte* slice : registered_) driver_.unregister_host(slice);
  registered_.clear();
  if (allocated_ && begin_ != nullptr) driver_.free_host(begin_);
  give_back();
  begin_ = nullptr;
  ready_ = 0;
}

// What was taken from the system; nothing of it is registered.
void PinnedMemory::give_back() {
  toucher_.reset();
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
  mapping_ = nullptr;
}

}  // namespace forebay::cuda
