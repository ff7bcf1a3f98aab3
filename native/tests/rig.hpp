// A core over two small pools of this process, on the sim or the cpu backend.
#pragma once

#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "transfer/backend_sim.hpp"
#include "check.hpp"
#include "transfer/core.hpp"

namespace forebay {

// Transfers of a core, with shorthand for what tests do all the time.
class CoreRig {
 public:
  using Slots = std::vector<std::int32_t>;
  std::int64_t load(const Slots& from, const Slots& to, std::vector<std::int64_t> after = {},
                    TransferClass transfer_class = TransferClass::demand, double deadline_s = 0) {
    return submit(Direction::load, from, to, std::move(after), transfer_class, deadline_s);
  }
  std::int64_t save(const Slots& from, const Slots& to, std::vector<std::int64_t> after = {},
                    double deadline_s = 0) {
    return submit(Direction::save, from, to, std::move(after), TransferClass::save, deadline_s);
  }

  void hold(Direction direction) {
    for (int lane = 0; lane < 2; ++lane) hooks->hold_lane(direction, lane);
  }
  void release(Direction direction) {
    for (int lane = 0; lane < 2; ++lane) hooks->release_lane(direction, lane);
  }

  // Each waits for at most `within_s` and says whether it came.
  bool ended(std::int64_t id, double within_s = 10) {
    return await(within_s, [&] { return completions.count(id) != 0; });
  }
  bool issued(std::int64_t id, double within_s = 10) {
    return await(within_s, [&] { return issued_.count(id) != 0; });
  }
  bool step_completed(std::int64_t step, double within_s = 10) {
    return await(within_s, [&] { return completed_step >= step; });
  }
  bool band_issued(std::int64_t id, std::int64_t band, double within_s = 10) {
    return await(within_s, [&] { return bands_[id] > band; });
  }
  WaitVerdict wait(std::int64_t id, StreamHandle stream, double timeout_s = 10,
                   std::int64_t band = -1) {
    return core->wait(std::span(&id, 1), stream, timeout_s, band).verdict;
  }
  void use_bands(std::int64_t id, const std::vector<std::int64_t>& ends) {
    core->use_bands(std::span(&id, 1), ends);
  }
  void cancel(std::int64_t id) { core->cancel(std::span(&id, 1)); }

  std::map<std::int64_t, Completion> completions;
  std::int64_t completed_step = 0;
  TestHooks* hooks = nullptr;
  StreamHandle compute = 0;
  std::unique_ptr<Core> core;

 private:
  std::int64_t submit(Direction direction, const Slots& from, const Slots& to,
                      std::vector<std::int64_t> after, TransferClass transfer_class,
                      double deadline_s) {
    after.resize(from.size(), 0);
    core->submit({Core::make_transfer(next_id_, direction, transfer_class, deadline_s, from, to,
                                      after)});
    return next_id_++;
  }

  template <typename Condition>
  bool await(double within_s, Condition condition) {
    const auto until = Clock::now() + bounded(within_s);
    for (;;) {
      const Report report = core->poll();
      for (const std::int64_t id : report.issued) issued_.emplace(id, true);
      for (const BandsIssued& each : report.bands) bands_[each.id] = each.bands;
      for (const Completion& each : report.completions) completions.emplace(each.id, each);
      completed_step = report.completed_step;
      if (condition()) return true;
      const double left_s = std::chrono::duration<double>(until - Clock::now()).count();
      if (left_s <= 0) return false;
      core->wait_news(left_s);
    }
  }

  std::map<std::int64_t, bool> issued_;
  std::map<std::int64_t, std::int64_t> bands_;
  std::int64_t next_id_ = 1;
};

// Two small pools and a core over them.
class Rig : public CoreRig {
 public:
  static constexpr std::int64_t kSlots = 8;
  static constexpr std::int64_t kBlock = 4096;

  struct Options {
    Settings settings{kBlock, 2, 60.0, 1 << 16, 1 << 14};
    bool sim = true;
    std::uint64_t seed = 1;
    double longest_delay_s = 100e-6;
    double link_bytes_per_s = 0;
    std::unique_ptr<OrderingRules> rules = std::make_unique<OrderingRules>();
  };

  Rig() : Rig(Options()) {}
  explicit Rig(Options options)
      : device_(kSlots * kBlock), host_(kSlots * kBlock) {
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      fill(device(slot), static_cast<int>(0x10 + slot));
      fill(host(slot), static_cast<int>(0x80 + slot));
    }
    std::unique_ptr<HostBackend> backend;
    if (options.sim) {
      auto sim_backend = std::make_unique<SimBackend>(options.seed, options.longest_delay_s);
      sim = sim_backend.get();
      backend = std::move(sim_backend);
    } else {
      backend = std::make_unique<CpuBackend>(options.link_bytes_per_s);
    }
    hooks = backend.get();
    core = std::make_unique<Core>(options.settings, layout(device_), layout(host_),
                                  std::move(backend), std::move(options.rules));
    if (options.sim) compute = sim->open_compute_stream();
  }
  ~Rig() { core.reset(); }  // before the pools go
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  std::byte* device(std::int64_t slot) { return device_.data() + slot * kBlock; }
  std::byte* host(std::int64_t slot) { return host_.data() + slot * kBlock; }
  static void fill(std::byte* block, int value) {
    std::memset(block, value, static_cast<std::size_t>(kBlock));
  }
  static bool holds(const std::byte* block, int value, std::int64_t bytes = kBlock) {
    for (std::int64_t i = 0; i < bytes; ++i) {
      if (block[i] != static_cast<std::byte>(value)) return false;
    }
    return true;
  }

  // A kernel that fills a block, queued on the compute stream.
  void launch_fill(std::int64_t slot, int value) {
    sim->launch(compute, [this, slot, value] { fill(device(slot), value); });
  }
  void hold_compute() { sim->hold(compute); }
  void release_compute() { sim->release(compute); }
  bool device_holds(std::int64_t slot, int value) { return holds(device(slot), value); }
  bool host_holds(std::int64_t slot, int value) { return holds(host(slot), value); }

  SimBackend* sim = nullptr;

 private:
  std::vector<std::byte> device_;
  std::vector<std::byte> host_;

  static PoolLayout layout(std::vector<std::byte>& pool) {
    return PoolLayout(reinterpret_cast<std::uint64_t>(pool.data()), kSlots, {{0, kBlock, kBlock}});
  }
};

// What a kernel on a compute stream read of some device slots.
class Snapshot {
 public:
  void take(Rig& rig, const Rig::Slots& slots, std::int64_t bytes = Rig::kBlock) {
    rig.sim->launch(rig.compute, [state = state_, &rig, slots, bytes] {
      const std::lock_guard lock(state->mutex);
      for (const std::int32_t slot : slots) {
        state->seen.emplace_back(rig.device(slot), rig.device(slot) + bytes);
      }
      state->taken = true;
      state->changed.notify_all();
    });
  }
  bool taken(double within_s = 10) {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, bounded(within_s), [this] { return state_->taken; });
  }
  bool saw(std::size_t i, int value, std::int64_t bytes = Rig::kBlock) {
    const std::lock_guard lock(state_->mutex);
    return Rig::holds(state_->seen[i].data(), value, bytes);
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool taken = false;
    std::vector<std::vector<std::byte>> seen;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace forebay
