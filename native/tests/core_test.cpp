// The core as its callers see it: classes, cancels, faults, hangs, bounds.
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "rig.hpp"

using namespace forebay;

namespace {

Rig::Options on_cpu() {
  Rig::Options options;
  options.sim = false;
  return options;
}

double process_cpu_s() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto of = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

// In the order in which they were handed to the link.
std::vector<WindowRecord> windows_of(Rig& rig) {
  std::int64_t dropped = 0;
  auto windows = rig.core->windows(&dropped);
  std::sort(windows.begin(), windows.end(),
            [](const auto& a, const auto& b) { return a.start_s < b.start_s; });
  return windows;
}

std::vector<std::int64_t> order(Rig& rig) {
  std::vector<std::int64_t> ids;
  for (const auto& window : windows_of(rig)) {
    if (ids.empty() || ids.back() != window.transfer) ids.push_back(window.transfer);
  }
  return ids;
}

}  // namespace

TEST(class_then_deadline_then_id) {
  Rig rig(on_cpu());
  rig.core->step_launched(1, 0);
  const auto held = rig.load({0}, {0}, {2});
  const auto late = rig.load({1}, {1}, {2}, TransferClass::prefetch, 9);
  const auto soon = rig.load({2}, {2}, {2}, TransferClass::prefetch, 5);
  const auto same = rig.load({3}, {3}, {2}, TransferClass::prefetch, 5);
  const auto raised = rig.load({4}, {4}, {2}, TransferClass::prefetch, 99);
  const auto demand = rig.load({5}, {5}, {2}, TransferClass::demand, 100);
  rig.core->expedite(std::span(&raised, 1), TransferClass::demand, 1);
  rig.core->expedite(std::span(&soon, 1), TransferClass::save, 1);  // never lowers
  rig.core->step_launched(2, 0);
  for (const auto id : {held, late, soon, same, raised, demand}) CHECK(rig.ended(id));
  CHECK((order(rig) == std::vector<std::int64_t>{held, raised, demand, soon, same, late}));
}

TEST(a_waiting_transfer_does_not_block_others) {
  Rig rig;
  const auto waits = rig.load({0}, {0}, {1}, TransferClass::demand);
  const auto goes = rig.load({1}, {1}, {}, TransferClass::prefetch);
  CHECK(rig.ended(goes) && rig.completions.count(waits) == 0);
  rig.core->step_abandoned(1);
  CHECK(rig.ended(waits));
}

TEST(blocks_begin_as_their_steps_complete) {
  Rig rig;
  const auto id = rig.load({0, 1}, {0, 1}, {0, 1});
  while (rig.core->events() == 0) std::this_thread::yield();
  CHECK(!rig.issued(id, 5e-3) && rig.wait(id, 0) == WaitVerdict::not_issued);
  rig.core->step_abandoned(1);
  CHECK(rig.issued(id) && rig.wait(id, 0) == WaitVerdict::ready);
  CHECK(Rig::holds(rig.device(1), 0x81));
}

TEST(a_load_lends_its_urgency_to_the_save_it_waits_for) {
  auto options = on_cpu();
  options.settings.lanes = 1;
  Rig rig(std::move(options));
  rig.hooks->hold_lane(Direction::save, 0);
  const auto first = rig.save({0}, {0});
  CHECK(rig.issued(first));
  const auto other = rig.save({1}, {1}, {}, 1);
  const auto needed = rig.save({2}, {2}, {}, 50);
  const auto load = rig.load({2}, {3});
  // Chosen after `load` was looked at: when this one ended, the save is raised.
  CHECK(rig.ended(rig.load({5}, {5}, {}, TransferClass::prefetch)));
  rig.hooks->release_lane(Direction::save, 0);
  for (const auto id : {first, other, needed, load}) CHECK(rig.ended(id));
  const auto went = order(rig);
  const auto place = [&](std::int64_t id) { return std::find(went.begin(), went.end(), id); };
  CHECK(place(first) < place(needed) && place(needed) < place(other));
  CHECK(Rig::holds(rig.device(3), 0x12));
}

TEST(cancel_in_every_state) {
  Rig rig;
  const auto waiting = rig.load({0}, {0}, {1});
  rig.cancel(waiting);
  CHECK(rig.ended(waiting, 1));
  CHECK(rig.completions[waiting].outcome == Outcome::cancelled);
  CHECK(rig.completions[waiting].blocks_done == 0 && rig.completions[waiting].bytes == 0);
  CHECK(rig.wait(waiting, 0) == WaitVerdict::not_issued);

  rig.hold(Direction::load);
  const auto in_flight = rig.load({1, 2, 3}, {1, 2, 3});
  CHECK(!rig.ended(in_flight, 5e-3));
  rig.cancel(in_flight);
  CHECK(!rig.ended(in_flight, 5e-3));
  rig.release(Direction::load);
  CHECK(rig.ended(in_flight));
  const Completion& part = rig.completions[in_flight];
  CHECK(part.outcome == Outcome::cancelled && part.blocks_done == 2 && part.blocks_touched == 2);
  CHECK(Rig::holds(rig.device(2), 0x82) && Rig::holds(rig.device(3), 0x13));

  rig.hold(Direction::load);
  const auto handed = rig.load({4}, {4});
  CHECK(rig.issued(handed));
  rig.cancel(handed);
  rig.release(Direction::load);
  CHECK(rig.ended(handed) && rig.completions[handed].outcome == Outcome::done);
  rig.cancel(handed);
  rig.cancel(12345);
  CHECK(rig.wait(handed, 0) == WaitVerdict::ready);
  CHECK(rig.wait(12345, 0) == WaitVerdict::not_issued);
}

TEST(a_fault_ends_its_transfer_and_no_other) {
  for (const bool sim : {true, false}) {
    Rig::Options options;
    options.sim = sim;
    options.settings.lanes = 1;
    Rig rig(std::move(options));
    rig.hooks->fail_window(Direction::load, 1);
    const auto id = rig.load({0, 1, 2, 3}, {0, 1, 2, 3});
    CHECK(rig.ended(id));
    const Completion& failed = rig.completions[id];
    CHECK(failed.outcome == Outcome::failed && failed.error == "injected fault");
    CHECK(failed.blocks_done == 1 && failed.blocks_touched == 2);
    CHECK(rig.wait(id, 0) == WaitVerdict::failed);
    const auto next = rig.load({0, 1, 2, 3}, {0, 1, 2, 3});
    CHECK(rig.ended(next) && rig.completions[next].outcome == Outcome::done);
    CHECK(Rig::holds(rig.device(1), 0x81));
  }
}

TEST(bands_come_one_behind_the_other) {
  Rig rig(on_cpu());
  const auto id = rig.load({0, 1, 2}, {0, 1, 2}, {1, 1, 1});
  CHECK_THROWS(rig.use_bands(id, {}), ProtocolError);
  CHECK_THROWS(rig.use_bands(id, {0, Rig::kBlock}), ProtocolError);
  CHECK_THROWS(rig.use_bands(id, {1024, 1024, Rig::kBlock}), ProtocolError);
  CHECK_THROWS(rig.use_bands(id, {1024, Rig::kBlock + 1}), ProtocolError);
  rig.use_bands(id, {1024, Rig::kBlock});
  rig.use_bands(id, {Rig::kBlock});  // it goes by bands already
  rig.use_bands(777, {Rig::kBlock});
  CHECK(rig.wait(id, 0, 10, 0) == WaitVerdict::not_issued);
  rig.hold(Direction::load);
  rig.core->step_abandoned(1);
  CHECK(rig.band_issued(id, 0) && !rig.band_issued(id, 1, 5e-3) && !rig.issued(id, 0));
  CHECK(rig.wait(id, 0, 0.02, 0) == WaitVerdict::timeout);
  CHECK(rig.wait(id, 0, 10, 1) == WaitVerdict::not_issued);
  CHECK(rig.wait(id, 0) == WaitVerdict::not_issued);
  rig.release(Direction::load);
  CHECK(rig.wait(id, 0, 10, 0) == WaitVerdict::ready);
  CHECK(rig.ended(id) && rig.wait(id, 0, 10, 1) == WaitVerdict::ready);
  std::vector<std::int64_t> bytes;
  for (const auto& window : windows_of(rig)) bytes.push_back(window.bytes);
  CHECK((bytes == std::vector<std::int64_t>{3 * 1024, 4096, 4096, 1024}));
  for (int slot = 0; slot < 3; ++slot) CHECK(Rig::holds(rig.device(slot), 0x80 + slot));
  const auto save = rig.save({0}, {0}, {2});
  CHECK_THROWS(rig.use_bands(save, {Rig::kBlock}), ProtocolError);
  rig.core->step_abandoned(2);
  CHECK(rig.ended(save));
}

TEST(only_what_is_left_goes_by_bands) {
  Rig rig(on_cpu());
  rig.hold(Direction::load);
  const auto id = rig.load({0, 1, 2, 3}, {0, 1, 2, 3});
  while (rig.core->events() < 2) std::this_thread::yield();  // two lanes have a block each
  rig.use_bands(id, {1024, Rig::kBlock});
  rig.release(Direction::load);
  CHECK(rig.band_issued(id, 1) && rig.ended(id));
  CHECK(rig.completions[id].blocks_done == 4);
  std::vector<std::int64_t> bytes;
  for (const auto& window : windows_of(rig)) bytes.push_back(window.bytes);
  CHECK((bytes == std::vector<std::int64_t>{4096, 4096, 2048, 4096, 2048}));
  for (int slot = 0; slot < 4; ++slot) CHECK(Rig::holds(rig.device(slot), 0x80 + slot));
}

TEST(a_fault_in_a_band_tells_which_blocks_may_be_torn) {
  auto options = on_cpu();
  options.settings.lanes = 1;
  Rig rig(std::move(options));
  rig.hooks->fail_window(Direction::load, 1);
  const auto id = rig.load({0, 1, 2, 3}, {0, 1, 2, 3}, {1, 1, 1, 1});
  rig.use_bands(id, {2048, Rig::kBlock});
  rig.core->step_abandoned(1);
  CHECK(rig.ended(id));
  const Completion& failed = rig.completions[id];
  CHECK(failed.outcome == Outcome::failed && failed.blocks_done == 0);
  CHECK(failed.torn_from == 2 && failed.blocks_touched == 4 && failed.bytes == 4096);
  CHECK(rig.wait(id, 0, 10, 0) == WaitVerdict::failed);
  const auto part = rig.load({0, 1}, {0, 1}, {2, 2});
  rig.use_bands(part, {2048, Rig::kBlock});
  rig.cancel(part);
  CHECK(rig.ended(part) && rig.completions[part].outcome == Outcome::cancelled);
  CHECK(rig.wait(part, 0, 10, 0) == WaitVerdict::not_issued);
}

TEST(a_fault_reaches_the_one_who_waits) {
  Rig rig(on_cpu());
  rig.hooks->fail_window(Direction::load, 0);
  rig.hold(Direction::load);
  const auto id = rig.load({0}, {0});
  CHECK(rig.issued(id));
  rig.release(Direction::load);
  CHECK(rig.wait(id, 0) == WaitVerdict::failed);
}

TEST(close_is_bounded_when_a_lane_hangs) {
  for (const bool sim : {true, false}) {
    Rig::Options options;
    options.sim = sim;
    Rig rig(std::move(options));
    rig.hold(Direction::save);
    const auto waiting = rig.load({5}, {5}, {7});
    const auto hung = rig.save({0, 1, 2, 3}, {0, 1, 2, 3});
    while (rig.core->events() < 2) std::this_thread::yield();
    const double start = now_s();
    rig.core->close(0.3);
    CHECK(now_s() - start < 0.8);
    CHECK(rig.ended(hung, 0.1) && rig.ended(waiting, 0.1));
    CHECK(rig.completions[waiting].outcome == Outcome::cancelled);
    const Completion& lost = rig.completions[hung];
    CHECK(lost.outcome == Outcome::failed && !lost.error.empty());
    CHECK(lost.blocks_done == 0 && lost.blocks_touched == 2);
    CHECK_THROWS(rig.load({1}, {1}), ProtocolError);
    CHECK_THROWS(rig.core->step_launched(1, 0), ProtocolError);
    rig.core->close(0.3);
  }
}

TEST(close_lets_windows_in_flight_land) {
  Rig rig(on_cpu());
  rig.hold(Direction::load);
  const auto id = rig.load({0}, {0});
  CHECK(rig.issued(id));
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    rig.release(Direction::load);
  });
  rig.core->close(5);
  later.join();
  CHECK(rig.ended(id, 0.1) && rig.completions[id].outcome == Outcome::done);
}

TEST(a_lost_lane_fails_its_transfer_and_serves_again_when_it_wakes) {
  auto options = on_cpu();
  options.settings.window_timeout_s = 0.3;
  Rig rig(std::move(options));
  rig.hooks->hold_lane(Direction::load, 0);
  const auto lost = rig.load({0}, {0});
  CHECK(rig.ended(lost, 5) && rig.completions[lost].outcome == Outcome::failed);
  CHECK(rig.completions[lost].blocks_touched == 1);
  const auto other_lane = rig.load({1, 2}, {1, 2});
  CHECK(rig.ended(other_lane) && rig.completions[other_lane].outcome == Outcome::done);

  rig.hooks->hold_lane(Direction::load, 1);
  const auto also_lost = rig.load({3}, {3});
  CHECK(rig.ended(also_lost, 5));
  const auto no_lane = rig.load({4}, {4});
  CHECK(rig.ended(no_lane, 5) && rig.completions[no_lane].outcome == Outcome::failed);
  CHECK(rig.completions[no_lane].blocks_touched == 0);

  rig.release(Direction::load);
  std::int64_t again = 0;
  for (int tries = 0; tries < 1000; ++tries) {
    again = rig.load({5}, {5});
    CHECK(rig.ended(again));
    if (rig.completions[again].outcome == Outcome::done) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(rig.completions[again].outcome == Outcome::done);
}

TEST(waits_are_bounded) {
  Rig rig(on_cpu());
  rig.hold(Direction::load);
  const auto id = rig.load({0}, {0});
  CHECK(rig.issued(id));
  CHECK(rig.wait(id, 0, 0.02) == WaitVerdict::timeout);
  CHECK(!rig.core->wait_news(0.02));
  CHECK_THROWS(rig.wait(id, 77), ProtocolError);
  rig.release(Direction::load);
  CHECK(rig.wait(id, 0) == WaitVerdict::ready);
}

TEST(bad_submissions_change_nothing) {
  Rig rig;
  const std::vector<std::int32_t> slots{0, 1}, outside{0, 8}, negative{-1, 0}, one{0};
  const std::vector<std::int64_t> steps{0, 0};
  const auto make = [&](std::int64_t id, const auto& from, const auto& to, double deadline = 0) {
    return Core::make_transfer(id, Direction::load, TransferClass::demand, deadline, from, to,
                               steps);
  };
  CHECK_THROWS(rig.core->submit({make(1, slots, slots), make(2, slots, outside)}), ProtocolError);
  CHECK_THROWS(rig.core->submit({make(1, negative, slots)}), ProtocolError);
  CHECK_THROWS(rig.core->submit({make(1, one, slots)}), ProtocolError);
  CHECK_THROWS(rig.core->submit({make(1, slots, slots, std::nan(""))}), ProtocolError);
  CHECK_THROWS(rig.core->submit({make(2, slots, slots), make(2, slots, slots)}), ProtocolError);
  CHECK_THROWS(rig.core->submit({make(0, slots, slots)}), ProtocolError);
  CHECK(rig.core->live_transfers() == 0 && rig.core->poll().issued.empty());
  rig.core->submit({make(1, slots, slots, std::numeric_limits<double>::infinity())});
  CHECK(rig.ended(1));
}

TEST(an_empty_transfer_is_done_at_once) {
  Rig rig;
  const auto id = rig.load({}, {});
  CHECK(rig.ended(id, 0) && rig.completions[id].outcome == Outcome::done);
}

TEST(unpolled_transfers_are_bounded) {
  auto options = on_cpu();
  options.settings.most_transfers = 2;
  Rig rig(std::move(options));
  rig.load({}, {});
  rig.load({}, {});
  CHECK_THROWS(rig.load({}, {}), ProtocolError);
  rig.core->poll();
  rig.load({}, {});
}

TEST(settings_that_cannot_work_are_refused) {
  const auto with = [](auto change) {
    Rig::Options options;
    change(options.settings);
    Rig rig(std::move(options));
  };
  CHECK_THROWS(with([](Settings& s) { s.window_bytes = 0; }), SettingsError);
  CHECK_THROWS(with([](Settings& s) { s.lanes = 0; }), SettingsError);
  CHECK_THROWS(with([](Settings& s) { s.lanes = 9; }), SettingsError);
  CHECK_THROWS(with([](Settings& s) { s.window_timeout_s = 0; }), SettingsError);
  CHECK_THROWS(with([](Settings& s) { s.most_transfers = 0; }), SettingsError);
  CHECK_THROWS(with([](Settings& s) { s.window_records = -1; }), SettingsError);
}

TEST(the_link_keeps_its_rate) {
  auto options = on_cpu();
  options.link_bytes_per_s = 2e6;
  Rig rig(std::move(options));
  const double start = now_s();
  std::int64_t last = 0;
  for (int round = 0; round < 12; ++round) last = rig.load({0, 1, 2, 3}, {0, 1, 2, 3});
  CHECK(rig.ended(last));
  const double expected = 12 * 4 * static_cast<double>(Rig::kBlock) / 2e6;
  const double took = now_s() - start;
  CHECK(took > 0.9 * expected && took < 3 * expected);
}

TEST(nothing_spins_while_idle) {
  Rig rig;
  rig.core->step_launched(1, rig.compute);
  CHECK(rig.step_completed(1));
  rig.load({0}, {0}, {9});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = process_cpu_s();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK(process_cpu_s() - before < 0.03);
}

TEST(events_are_pooled) {
  Rig rig;
  for (int round = 1; round <= 200; ++round) {
    rig.core->step_launched(round, rig.compute);
    const auto id = rig.load({0, 1, 2, 3}, {0, 1, 2, 3}, {round, round, round, round});
    CHECK(rig.ended(id));
  }
  CHECK(rig.core->events() <= 8 && rig.core->live_transfers() == 0);
}

TEST(a_step_whose_stream_dies_never_completes) {
  Rig rig;
  rig.sim->hold(rig.compute);
  rig.core->step_launched(1, rig.compute);
  CHECK(!rig.step_completed(1, 5e-3));
  rig.core->close(1);
  CHECK(!rig.step_completed(1, 5e-3));
}
