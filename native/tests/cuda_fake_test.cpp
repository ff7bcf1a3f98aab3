// Threads of the CUDA parts, over the fake driver: what the sanitizers can look at without a GPU.
#include <cstring>

#include "check.hpp"
#include "cuda/cuda_backend.hpp"
#include "cuda/pinned.hpp"
#include "transfer/core.hpp"

using namespace forebay;

namespace {

constexpr std::size_t kPart = std::size_t{2} << 20;
constexpr std::int64_t kSlots = 64;
constexpr std::int64_t kBlock = 4096;

cuda::PinSettings pin_settings(double share) {
  cuda::PinSettings settings;
  settings.grain_bytes = kPart;
  settings.slice_bytes = 2 * kPart;
  settings.share = share;
  settings.threads = 4;
  return settings;
}

PoolLayout layout(std::vector<std::byte>& pool) {
  return PoolLayout(reinterpret_cast<std::uint64_t>(pool.data()), kSlots, {{0, kBlock, kBlock}});
}

}  // namespace

TEST(pinning_ends_whenever_it_is_closed) {
  for (int i = 0; i < 8; ++i) {
    cuda::PinnedMemory memory(32 * kPart, pin_settings(i % 2 == 0 ? 1 : 0.3));
    CHECK(memory.ready_bytes() >= 2 * kPart);
    if (i % 3 == 0) CHECK(memory.wait_ready(32 * kPart, 30));
    auto* bytes = reinterpret_cast<std::byte*>(memory.address());
    std::memset(bytes, 1, memory.ready_bytes());
  }
}

TEST(copies_both_ways_with_their_times) {
  std::vector<std::byte> device(kSlots * kBlock, std::byte{1});
  std::vector<std::byte> host(kSlots * kBlock, std::byte{2});
  cuda::BackendSettings settings;
  settings.timing = true;
  Core core(Settings{kBlock, 2, 60.0, 1 << 16, 1 << 14}, layout(device), layout(host),
            std::make_unique<cuda::CudaBackend>(settings));
  std::vector<std::int32_t> slots(kSlots);
  for (std::int32_t i = 0; i < kSlots; ++i) slots[static_cast<std::size_t>(i)] = i;
  const std::vector<std::int64_t> after(kSlots, 0);
  std::int64_t id = 0;
  for (std::int64_t step = 1; step < 20; ++step) {
    core.submit({Core::make_transfer(++id, Direction::load, TransferClass::demand, 0, slots, slots,
                                     after)});
    core.submit({Core::make_transfer(++id, Direction::save, TransferClass::save, 0, slots, slots,
                                     after)});
    core.step_launched(step, 0);
    core.poll();
  }
  while (core.live_transfers() > 0) {
    core.wait_news(0.1);
    core.poll();
  }
  CHECK(device == host && device[0] == std::byte{2});
  std::int64_t dropped = 0;
  for (const WindowRecord& window : core.windows(&dropped)) CHECK(window.end_s >= window.start_s);
  core.close(1);
  CHECK(core.events_in_use() == 0);
}
