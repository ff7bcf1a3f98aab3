// Each ordering rule, and what happens without it, on any rig `R` with streams.
//
// A scenario holds a copy or a step back until the missing rule would have shown, then lets go and
// looks at the bytes. With the rules it must hold in 10 runs of 10, with a mutant in none.
#pragma once

#include <functional>

#include "check.hpp"
#include "transfer/core.hpp"

namespace forebay::ordering {

inline constexpr int kRuns = 10;

struct Try {
  std::unique_ptr<OrderingRules> rules;
  std::uint64_t seed;
  double patience_s;  // how long something is held back
};

// 4.1: a save comes after the step that wrote its block.
template <typename R>
bool save_takes_what_the_step_wrote(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hold_compute();
  rig.launch_fill(0, 7);
  rig.core->step_launched(1, rig.compute);
  const auto id = rig.save({0}, {0}, {1});
  rig.ended(id, attempt.patience_s);
  rig.release_compute();
  return rig.ended(id) && rig.host_holds(0, 7);
}

// 4.1: a step that is numbered and not recorded yet holds back all later ones.
template <typename R>
bool later_step_waits_for_an_unrecorded_one(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.core->step_launched(2, rig.compute);
  const auto id = rig.load({0}, {0}, {2});
  rig.ended(id, attempt.patience_s);
  typename R::Snapshot step_one;
  rig.launch_fill(0, 7);
  step_one.take(rig, {0});
  try {
    rig.core->step_launched(1, rig.compute);
  } catch (const ProtocolError&) {
    // Without the rule the step counts as past already; its kernel runs all the same.
  }
  return rig.ended(id) && step_one.taken() && rig.device_holds(0, 0x80);
}

// 4.1: an abandoned step counts once all lower ones do.
template <typename R>
bool abandoned_step_waits_for_lower_ones(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hold_compute();
  rig.launch_fill(0, 7);
  typename R::Snapshot step_one;
  step_one.take(rig, {0});
  rig.core->step_launched(1, rig.compute);
  rig.core->step_abandoned(2);
  const auto id = rig.load({0}, {0}, {2});
  rig.ended(id, attempt.patience_s);
  rig.release_compute();
  return rig.ended(id) && rig.step_completed(2) && step_one.taken() && rig.device_holds(0, 0x80);
}

// 4.2: no stream waits for work that is not issued. The launcher believes an accepted wait.
template <typename R>
bool launch_only_after_issue(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  const auto id = rig.load({0}, {0}, {1});
  typename R::Snapshot kernel;
  const bool accepted = rig.wait(id, rig.compute) == WaitVerdict::ready;
  if (accepted) {
    kernel.take(rig, {0});
    kernel.taken(attempt.patience_s);
  }
  rig.core->step_abandoned(1);
  if (!rig.issued(id)) return false;
  if (!accepted) {
    if (rig.wait(id, rig.compute) != WaitVerdict::ready) return false;
    kernel.take(rig, {0});
  }
  return kernel.taken() && kernel.saw(0, 0x80);
}

// 4.2 by layer: no layer is launched before the band that it reads is issued. Block 1 waits for a
// step, so the front half of both blocks is not.
template <typename R>
bool layer_only_after_its_band(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  const auto id = rig.load({0, 1}, {0, 1}, {1, 2});
  rig.use_bands(id, {R::kBlock / 2, R::kBlock});
  rig.core->step_abandoned(1);
  typename R::Snapshot kernel;
  const bool accepted = rig.wait(id, rig.compute, 10, 0) == WaitVerdict::ready;
  if (accepted) {
    kernel.take(rig, {0, 1}, R::kBlock / 2);
    kernel.taken(attempt.patience_s);
  }
  rig.core->step_abandoned(2);
  if (!rig.band_issued(id, 0)) return false;
  if (!accepted) {
    if (rig.wait(id, rig.compute, 10, 0) != WaitVerdict::ready) return false;
    kernel.take(rig, {0, 1}, R::kBlock / 2);
  }
  return kernel.taken() && kernel.saw(0, 0x80, R::kBlock / 2) && kernel.saw(1, 0x81, R::kBlock / 2);
}

// 4.3 by layer: a wait for a band covers every lane that the band used.
template <typename R>
bool band_wait_covers_lane(Try attempt, int held) {
  R rig(std::move(attempt.rules), attempt.seed);
  const auto id = rig.load({0, 1, 2, 3}, {0, 1, 2, 3}, {1, 1, 1, 1});
  rig.use_bands(id, {R::kBlock / 2, R::kBlock});
  rig.hooks->hold_lane(Direction::load, held);
  rig.core->step_abandoned(1);
  if (!rig.band_issued(id, 0) || rig.wait(id, rig.compute, 10, 0) != WaitVerdict::ready) return false;
  typename R::Snapshot kernel;
  kernel.take(rig, {0, 2}, R::kBlock / 2);
  kernel.taken(attempt.patience_s);
  rig.hooks->release_lane(Direction::load, held);
  return kernel.taken() && kernel.saw(0, 0x80, R::kBlock / 2) && kernel.saw(1, 0x82, R::kBlock / 2);
}
template <typename R>
bool band_wait_covers_first_lane(Try attempt) {
  return band_wait_covers_lane<R>(std::move(attempt), 0);
}
template <typename R>
bool band_wait_covers_second_lane(Try attempt) {
  return band_wait_covers_lane<R>(std::move(attempt), 1);
}

// 4.3: a wait covers every lane the transfer used.
template <typename R>
bool wait_covers_lane(Try attempt, int held) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hooks->hold_lane(Direction::load, held);
  const auto id = rig.load({0, 1}, {0, 1});
  if (!rig.issued(id) || rig.wait(id, rig.compute) != WaitVerdict::ready) return false;
  typename R::Snapshot kernel;
  kernel.take(rig, {0, 1});
  kernel.taken(attempt.patience_s);
  rig.hooks->release_lane(Direction::load, held);
  return kernel.taken() && kernel.saw(0, 0x80) && kernel.saw(1, 0x81);
}
template <typename R>
bool wait_covers_first_lane(Try attempt) { return wait_covers_lane<R>(std::move(attempt), 0); }
template <typename R>
bool wait_covers_second_lane(Try attempt) { return wait_covers_lane<R>(std::move(attempt), 1); }

// 4.3: an event is not recorded again while it still stands for a transfer in flight.
template <typename R>
bool event_stands_for_its_transfer(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hooks->hold_lane(Direction::load, 0);
  const auto held = rig.load({0}, {0});
  if (!rig.issued(held)) return false;
  const auto other = rig.load({1}, {1});
  if (!rig.ended(other)) return false;
  if (rig.wait(held, rig.compute) != WaitVerdict::ready) return false;
  typename R::Snapshot kernel;
  kernel.take(rig, {0});
  kernel.taken(attempt.patience_s);
  rig.hooks->release_lane(Direction::load, 0);
  return kernel.taken() && kernel.saw(0, 0x80);
}

// 4.4: a load reads a host slot after the save that writes it.
template <typename R>
bool load_reads_after_save(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hold(Direction::save);
  rig.save({2}, {0});
  const auto id = rig.load({0}, {1});
  rig.ended(id, attempt.patience_s);
  rig.release(Direction::save);
  return rig.ended(id) && rig.device_holds(1, 0x12);
}

// 4.4: a host slot is written again only after the loads that read it.
template <typename R>
bool save_writes_after_load(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hold(Direction::load);
  const auto reader = rig.load({0}, {1});
  const auto id = rig.save({2}, {0});
  rig.ended(id, attempt.patience_s);
  rig.release(Direction::load);
  return rig.ended(id) && rig.ended(reader) && rig.device_holds(1, 0x80);
}

// 4.4 on the device: a load overwrites a slot only after the save that reads it.
template <typename R>
bool load_writes_after_save(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hold(Direction::save);
  const auto reader = rig.save({0}, {3});
  const auto id = rig.load({1}, {0});
  rig.ended(id, attempt.patience_s);
  rig.release(Direction::save);
  return rig.ended(id) && rig.ended(reader) && rig.host_holds(3, 0x10);
}

// 4.4 on the device: a save reads a slot after the load that writes it.
template <typename R>
bool save_reads_after_load(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hold(Direction::load);
  rig.load({0}, {1});
  const auto id = rig.save({1}, {5});
  rig.ended(id, attempt.patience_s);
  rig.release(Direction::load);
  return rig.ended(id) && rig.host_holds(5, 0x80);
}

// 4.4: of two loads into one slot the later one stays.
template <typename R>
bool later_load_stays(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hooks->hold_lane(Direction::load, 0);
  const auto first = rig.load({0}, {1});
  if (!rig.issued(first)) return false;
  const auto second = rig.load({2}, {1});
  rig.ended(second, attempt.patience_s);
  rig.hooks->release_lane(Direction::load, 0);
  return rig.ended(first) && rig.ended(second) && rig.device_holds(1, 0x82);
}

// 4.4: cancel marks, only completion frees.
template <typename R>
bool cancelled_load_keeps_its_slot_until_it_ended(Try attempt) {
  R rig(std::move(attempt.rules), attempt.seed);
  rig.hooks->hold_lane(Direction::load, 0);
  const auto cancelled = rig.load({0, 1}, {0, 1}, {0, 9});
  while (rig.core->events() == 0) std::this_thread::yield();
  rig.cancel(cancelled);
  const auto next = rig.load({2}, {0});
  rig.ended(next, attempt.patience_s);
  rig.hooks->release_lane(Direction::load, 0);
  if (!rig.ended(cancelled) || !rig.ended(next)) return false;
  rig.core->close(1);  // whatever the lane still had has run or never will
  return rig.device_holds(0, 0x82);
}

struct CopiesIgnoreSteps : OrderingRules {
  bool step_reached(std::int64_t, std::int64_t) const override { return true; }
};
struct LaunchedIsCompleted : OrderingRules {
  bool step_passed(StepState state) const override { return state != StepState::scheduled; }
};
struct UnrecordedIsCompleted : OrderingRules {
  bool step_passed(StepState state) const override { return state != StepState::launched; }
};
struct WaitsForAnything : OrderingRules {
  bool may_wait(bool) const override { return true; }
};
struct WaitsForAnyBand : OrderingRules {
  bool may_wait_band(std::int64_t, std::int64_t) const override { return true; }
};
struct WaitsForBandUnderWay : OrderingRules {
  bool may_wait_band(std::int64_t band, std::int64_t bands_issued) const override {
    return band <= bands_issued;
  }
};
struct WaitsForNewestLane : OrderingRules {
  bool wait_covers(bool newest) const override { return newest; }
};
struct WaitsForOlderLanes : OrderingRules {
  bool wait_covers(bool newest) const override { return !newest; }
};
struct EventsReusedAtOnce : OrderingRules {
  bool event_reusable(bool, int) const override { return true; }
};
struct ReadsIgnoreWrites : OrderingRules {
  bool read_may_begin(bool) const override { return true; }
};
struct WritesIgnoreReads : OrderingRules {
  bool write_may_begin(bool behind_write, bool) const override { return !behind_write; }
};
struct WritesIgnoreWrites : OrderingRules {
  bool write_may_begin(bool, bool behind_read) const override { return !behind_read; }
};
struct CancelFreesAtOnce : OrderingRules {
  bool may_end(std::size_t) const override { return true; }
};

using Scenario = bool (*)(Try);

inline int times_held(Scenario scenario, const std::function<std::unique_ptr<OrderingRules>()>& rules,
               double patience_s) {
  int held = 0;
  for (int run = 0; run < kRuns; ++run) {
    held += scenario(Try{rules(), static_cast<std::uint64_t>(1000 * run + 17), patience_s}) ? 1 : 0;
  }
  return held;
}

inline void check_rule(Scenario scenario) {
  CHECK(times_held(scenario, [] { return std::make_unique<OrderingRules>(); }, 15e-3) == kRuns);
}

template <typename Mutant>
void check_mutant(Scenario scenario) {
#if defined(__SANITIZE_THREAD__)
  static_cast<void>(scenario);
  return;  // a mutant is a data race: that is its point
#endif
  CHECK(times_held(scenario, [] { return std::make_unique<Mutant>(); }, 2) == 0);
}

template <typename R>
void rule_4_1_save_after_its_step() {
  check_rule(save_takes_what_the_step_wrote<R>);
  check_mutant<CopiesIgnoreSteps>(save_takes_what_the_step_wrote<R>);
  check_mutant<LaunchedIsCompleted>(save_takes_what_the_step_wrote<R>);
}

template <typename R>
void rule_4_1_unrecorded_step() {
  check_rule(later_step_waits_for_an_unrecorded_one<R>);
  check_mutant<UnrecordedIsCompleted>(later_step_waits_for_an_unrecorded_one<R>);
  check_mutant<CopiesIgnoreSteps>(later_step_waits_for_an_unrecorded_one<R>);
}

template <typename R>
void rule_4_1_abandoned_step() {
  check_rule(abandoned_step_waits_for_lower_ones<R>);
  check_mutant<LaunchedIsCompleted>(abandoned_step_waits_for_lower_ones<R>);
}

template <typename R>
void rule_4_2_issued_before_wait() {
  check_rule(launch_only_after_issue<R>);
  check_mutant<WaitsForAnything>(launch_only_after_issue<R>);
}

template <typename R>
void rule_4_2_by_layer() {
  check_rule(layer_only_after_its_band<R>);
  check_mutant<WaitsForAnyBand>(layer_only_after_its_band<R>);
  check_mutant<WaitsForBandUnderWay>(layer_only_after_its_band<R>);
}

template <typename R>
void rule_4_3_by_layer() {
  check_rule(band_wait_covers_first_lane<R>);
  check_rule(band_wait_covers_second_lane<R>);
  check_mutant<WaitsForNewestLane>(band_wait_covers_first_lane<R>);
  check_mutant<WaitsForOlderLanes>(band_wait_covers_second_lane<R>);
}

template <typename R>
void rule_4_3_both_lanes() {
  check_rule(wait_covers_first_lane<R>);
  check_rule(wait_covers_second_lane<R>);
  check_mutant<WaitsForNewestLane>(wait_covers_first_lane<R>);
  check_mutant<WaitsForOlderLanes>(wait_covers_second_lane<R>);
}

template <typename R>
void rule_4_3_event_reuse() {
  check_rule(event_stands_for_its_transfer<R>);
  check_mutant<EventsReusedAtOnce>(event_stands_for_its_transfer<R>);
}

template <typename R>
void rule_4_4_host_slot() {
  check_rule(load_reads_after_save<R>);
  check_mutant<ReadsIgnoreWrites>(load_reads_after_save<R>);
  check_rule(save_writes_after_load<R>);
  check_mutant<WritesIgnoreReads>(save_writes_after_load<R>);
}

template <typename R>
void rule_4_4_device_slot() {
  check_rule(load_writes_after_save<R>);
  check_mutant<WritesIgnoreReads>(load_writes_after_save<R>);
  check_rule(save_reads_after_load<R>);
  check_mutant<ReadsIgnoreWrites>(save_reads_after_load<R>);
  check_rule(later_load_stays<R>);
  check_mutant<WritesIgnoreWrites>(later_load_stays<R>);
}

template <typename R>
void rule_4_4_cancel_marks() {
  check_rule(cancelled_load_keeps_its_slot_until_it_ended<R>);
  check_mutant<CancelFreesAtOnce>(cancelled_load_keeps_its_slot_until_it_ended<R>);
}

}  // namespace forebay::ordering
