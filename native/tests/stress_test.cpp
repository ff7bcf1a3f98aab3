// Random work from several threads. What the pools hold afterwards must be what the same transfers
// leave when they run one after the other, in order of submission.
#include <atomic>
#include <random>

#include "rig.hpp"

using namespace forebay;

namespace {

constexpr int kThreads = 3;
constexpr int kUnknown = -1;

struct Submitted {
  std::int64_t id;
  Direction direction;
  std::vector<std::int32_t> from, to;
};

// One mover under stress: odd block sizes, windows that cut blocks, scattered device blocks.
class Stress {
 public:
  static constexpr std::int32_t kSlots = 12;
  static constexpr std::int64_t kBlock = 1031;

  Stress(bool sim, std::uint64_t seed) : seed_(seed), device_(kSlots * 2048), host_(kSlots * 1100) {
    const Settings settings{700 + static_cast<std::int64_t>(seed % 2500), 2, 60.0, 1 << 16, 64};
    std::unique_ptr<HostBackend> backend;
    if (sim) {
      auto made = std::make_unique<SimBackend>(seed, 40e-6);
      sim_ = made.get();
      backend = std::move(made);
    } else {
      backend = std::make_unique<CpuBackend>(0);
    }
    hooks_ = backend.get();
    const auto device = reinterpret_cast<std::uint64_t>(device_.data());
    core = std::make_unique<Core>(
        settings,
        PoolLayout(device, kSlots, {{0, 500, 500}, {kSlots * 500, 31, 31}, {kSlots * 531, 500, 500}}),
        PoolLayout(reinterpret_cast<std::uint64_t>(host_.data()), kSlots, {{0, 1100, kBlock}}),
        std::move(backend));
    if (sim) compute_ = sim_->open_compute_stream();
  }

  // Random calls from several threads, then quiet, then a look at every byte.
  void round(int calls_per_thread, bool faults) {
    fill_all();
    log_.clear();
    completions_.clear();
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([this, thread, calls_per_thread, faults] {
        std::mt19937_64 random(seed_ * 977 + next_round_ * 31 + static_cast<std::uint64_t>(thread));
        for (int call = 0; call < calls_per_thread; ++call) random_call(random, faults);
      });
    }
    for (auto& thread : threads) thread.join();
    ++next_round_;
    quiesce();
    verify();
  }

  std::unique_ptr<Core> core;

 private:
  void random_call(std::mt19937_64& random, bool faults) {
    switch (random() % 13) {
      case 0:
        core->cancel(some_id(random));
        break;
      case 1:
        core->expedite(some_id(random), TransferClass::demand, static_cast<double>(random() % 9));
        break;
      case 2:
        launch_step(random);
        break;
      case 3:
        wait_for_one(random);
        break;
      case 4:
        collect();
        break;
      case 5: {
        std::int64_t dropped = 0;
        core->windows(&dropped);
        break;
      }
      case 6:
        if (faults && random() % 8 == 0) {
          hooks_->fail_window(static_cast<Direction>(random() % 2), static_cast<int>(random() % 5));
        }
        break;
      case 7:
        go_by_bands(random);
        break;
      default:
        submit(random);
    }
  }

  void go_by_bands(std::mt19937_64& random) {
    std::vector<std::int64_t> id = some_id(random);
    {
      const std::lock_guard lock(mutex_);
      const auto load = std::find_if(log_.rbegin(), log_.rend(), [](const Submitted& each) {
        return each.direction == Direction::load;
      });
      if (load == log_.rend()) return;
      id[0] = load->id;
    }
    const auto cut = static_cast<std::int64_t>(1 + random() % (kBlock - 2));
    core->use_bands(id, {cut, cut + 1, kBlock});
    core->wait(id, random() % 2 == 0 ? 0 : compute_, 2e-3, static_cast<std::int64_t>(random() % 3));
  }

  void submit(std::mt19937_64& random) {
    Submitted made;
    made.direction = static_cast<Direction>(random() % 2);
    const std::size_t blocks = 1 + random() % 6;
    std::vector<std::int64_t> after;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < blocks; ++i) {
      made.from.push_back(static_cast<std::int32_t>(random() % kSlots));
      made.to.push_back(static_cast<std::int32_t>(random() % kSlots));
      after.push_back(static_cast<std::int64_t>(random() % 2) * (next_step_ + 1));
    }
    made.id = next_id_++;
    core->submit({Core::make_transfer(made.id, made.direction,
                                      static_cast<TransferClass>(random() % 3),
                                      static_cast<double>(random() % 100), made.from, made.to,
                                      after)});
    log_.push_back(std::move(made));
  }

  void launch_step(std::mt19937_64& random) {
    const std::lock_guard lock(mutex_);
    const std::int64_t step = ++next_step_;
    if (random() % 3 == 0) {
      core->step_abandoned(step);
    } else {
      core->step_launched(step, random() % 2 == 0 ? 0 : compute_);
    }
  }

  void wait_for_one(std::mt19937_64& random) {
    const std::vector<std::int64_t> id = some_id(random);
    core->wait(id, random() % 2 == 0 ? 0 : compute_, 2e-3);
  }

  std::vector<std::int64_t> some_id(std::mt19937_64& random) {
    const std::lock_guard lock(mutex_);
    const std::int64_t back = static_cast<std::int64_t>(random() % 8);
    return {std::max<std::int64_t>(1, next_id_ - 1 - back)};
  }

  void collect() {
    const Report report = core->poll();
    const std::lock_guard lock(mutex_);
    for (const Completion& each : report.completions) {
      CHECK(completions_.emplace(each.id, each).second);
    }
  }

  void quiesce() {
    const auto until = Clock::now() + std::chrono::seconds(60);
    core->step_abandoned(++next_step_);
    while (completions_.size() < log_.size()) {
      CHECK(Clock::now() < until);
      core->wait_news(0.1);
      collect();
    }
    CHECK(core->live_transfers() == 0);
  }

  std::byte* fragment(std::int32_t slot, int part) {
    static constexpr std::int64_t kOffsets[] = {0, kSlots * 500, kSlots * 531};
    static constexpr std::int64_t kStrides[] = {500, 31, 500};
    return device_.data() + kOffsets[part] + slot * kStrides[part];
  }

  // Every byte of a slot depends on the slot it came from and on its place in the block.
  static std::byte expected(int origin, std::int64_t at) {
    return static_cast<std::byte>(origin * 37 + at % 251);
  }

  template <typename Visit>
  void each_device_byte(std::int32_t slot, Visit visit) {
    static constexpr std::int64_t kBytes[] = {500, 31, 500};
    std::int64_t at = 0;
    for (int part = 0; part < 3; ++part) {
      for (std::int64_t i = 0; i < kBytes[part]; ++i) visit(fragment(slot, part)[i], at++);
    }
  }

  void fill_all() {
    for (std::int32_t slot = 0; slot < kSlots; ++slot) {
      each_device_byte(slot, [&](std::byte& byte, std::int64_t at) { byte = expected(slot, at); });
      for (std::int64_t at = 0; at < kBlock; ++at) {
        host_[static_cast<std::size_t>(slot * 1100 + at)] = expected(kSlots + slot, at);
      }
    }
  }

  void verify() {
    std::vector<int> device(kSlots), host(kSlots);
    for (int slot = 0; slot < kSlots; ++slot) {
      device[static_cast<std::size_t>(slot)] = slot;
      host[static_cast<std::size_t>(slot)] = kSlots + slot;
    }
    for (const Submitted& each : log_) replay(each, device, host);
    int wrong = 0;
    for (std::int32_t slot = 0; slot < kSlots; ++slot) {
      const auto s = static_cast<std::size_t>(slot);
      each_device_byte(slot, [&](std::byte& byte, std::int64_t at) {
        if (device[s] != kUnknown && byte != expected(device[s], at)) ++wrong;
      });
      for (std::int64_t at = 0; at < kBlock && host[s] != kUnknown; ++at) {
        if (host_[s * 1100 + static_cast<std::size_t>(at)] != expected(host[s], at)) ++wrong;
      }
    }
    CHECK(wrong == 0);
  }

  void replay(const Submitted& each, std::vector<int>& device, std::vector<int>& host) {
    const Completion& end = completions_.at(each.id);
    const bool load = each.direction == Direction::load;
    const auto blocks = static_cast<std::int64_t>(each.from.size());
    CHECK(end.blocks_done <= end.blocks_touched && end.blocks_touched <= blocks);
    CHECK(end.outcome != Outcome::done || end.blocks_done == blocks);
    CHECK(end.outcome == Outcome::failed || end.blocks_touched == end.blocks_done);
    CHECK(end.torn_from >= end.blocks_done && end.torn_from <= end.blocks_touched);
    for (std::size_t i = 0; i < each.from.size(); ++i) {
      const auto from = static_cast<std::size_t>(each.from[i]);
      int& to = (load ? device : host)[static_cast<std::size_t>(each.to[i])];
      const int origin = (load ? host : device)[from];
      to = static_cast<std::int64_t>(i) < end.blocks_done ? origin : kUnknown;
    }
  }

  const std::uint64_t seed_;
  std::vector<std::byte> device_, host_;
  SimBackend* sim_ = nullptr;
  HostBackend* hooks_ = nullptr;
  StreamHandle compute_ = 0;
  std::mutex mutex_;
  std::vector<Submitted> log_;
  std::map<std::int64_t, Completion> completions_;
  std::int64_t next_id_ = 1;
  std::int64_t next_step_ = 0;
  std::uint64_t next_round_ = 0;
};

void stress(bool sim, bool faults) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    Stress one(sim, seed * 1299709);
    for (int round = 0; round < 6; ++round) one.round(120, faults);
  }
}

}  // namespace

TEST(stress_on_cpu) { stress(false, false); }
TEST(stress_on_cpu_with_faults) { stress(false, true); }
TEST(stress_on_sim) { stress(true, false); }
TEST(stress_on_sim_with_faults) { stress(true, true); }

TEST(close_under_load) {
  for (int run = 0; run < 20; ++run) {
    Rig::Options options;
    options.seed = static_cast<std::uint64_t>(run);
    options.sim = run % 2 == 0;
    Rig rig(std::move(options));
    std::atomic<bool> go{true};
    std::thread worker([&] {
      std::int64_t id = 0;
      try {
        while (go) {
          id = rig.load({0, 1, 2, 3}, {0, 1, 2, 3});
          rig.core->wait(std::span(&id, 1), 0, 1e-3);
          rig.save({0, 1}, {4, 5});
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
      } catch (const ProtocolError&) {
        // closed, or too many not polled
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    const double start = now_s();
    rig.core->close(2);
    CHECK(now_s() - start < 2.1);
    go = false;
    worker.join();
    CHECK(rig.core->live_transfers() == 0);
  }
}
