// The parts of the core on their own: layouts, steps, ring, throttle, streams and events.
#include <numeric>

#include "cuda/even_rows.hpp"
#include "transfer/backend_sim.hpp"
#include "check.hpp"
#include "transfer/pool.hpp"
#include "transfer/steps.hpp"
#include "transfer/window_ring.hpp"

using namespace forebay;

namespace {

std::uint64_t address(const std::vector<std::byte>& memory) {
  return reinterpret_cast<std::uint64_t>(memory.data());
}

std::int64_t total(const std::vector<Piece>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0},
                         [](std::int64_t sum, const Piece& piece) {
                           return sum + static_cast<std::int64_t>(piece.bytes);
                         });
}

}  // namespace

TEST(pieces_follow_the_fragments) {
  std::vector<std::byte> scattered(1000), plain(1000);
  const PoolLayout device(address(scattered), 10, {{0, 30, 30}, {500, 20, 20}});
  const PoolLayout host(address(plain), 10, {{0, 50, 50}});
  std::vector<Piece> pieces;
  append_pieces(pieces, device, 3, host, 7, 10, 45);
  CHECK(pieces.size() == 2 && total(pieces) == 35);
  CHECK(pieces[0].destination == scattered.data() + 3 * 30 + 10 && pieces[0].bytes == 20);
  CHECK(pieces[0].source == plain.data() + 7 * 50 + 10);
  CHECK(pieces[1].destination == scattered.data() + 500 + 3 * 20 && pieces[1].bytes == 15);
}

TEST(neighbours_are_merged) {
  std::vector<std::byte> a(1000), b(1000);
  const PoolLayout to(address(a), 10, {{0, 50, 50}});
  const PoolLayout from(address(b), 10, {{0, 50, 50}});
  std::vector<Piece> pieces;
  append_pieces(pieces, to, 3, from, 5, 0, 50);
  append_pieces(pieces, to, 4, from, 6, 0, 50);  // both continue
  append_pieces(pieces, to, 5, from, 8, 0, 50);  // only one does
  CHECK(pieces.size() == 2 && pieces[0].bytes == 100 && pieces[1].bytes == 50);
}

TEST(no_piece_crosses_a_seam) {
  std::vector<std::byte> a(1000), b(1000);
  const PoolLayout to(address(a), 10, {{0, 50, 50}});
  const PoolLayout from(address(b), 10, {{0, 50, 50}}, 100);
  std::vector<Piece> pieces;
  for (std::int64_t slot = 0; slot < 6; ++slot) append_pieces(pieces, to, slot, from, slot, 0, 50);
  CHECK(pieces.size() == 3);
  for (const Piece& piece : pieces) CHECK(piece.bytes == 100);
  pieces.clear();
  for (std::int64_t slot = 0; slot < 6; ++slot) append_pieces(pieces, from, slot, to, slot, 0, 50);
  CHECK(pieces.size() == 3);
  CHECK_THROWS(PoolLayout(address(a), 10, {{0, 50, 50}}, 75), SettingsError);
  CHECK_THROWS(PoolLayout(address(a), 10, {{0, 30, 30}, {500, 20, 20}}, 100), SettingsError);
}

TEST(every_cut_gives_every_byte_once) {
  std::vector<std::byte> a(4000), b(4000);
  const PoolLayout to(address(a), 10, {{0, 8, 7}, {100, 13, 13}, {400, 31, 1}, {900, 40, 29}});
  const PoolLayout from(address(b), 10, {{0, 60, 50}});
  CHECK(to.block_bytes() == 50);
  for (std::int64_t begin = 0; begin < 50; ++begin) {
    for (std::int64_t end = begin; end <= 50; ++end) {
      std::vector<Piece> pieces;
      append_pieces(pieces, to, 2, from, 9, begin, end);
      CHECK(total(pieces) == end - begin);
      if (!pieces.empty()) CHECK(pieces[0].source == b.data() + 9 * 60 + begin);
    }
  }
}

const cuda::Together anywhere = [](const Piece&, const Piece&) { return true; };

TEST(even_pieces_are_rows) {
  std::vector<std::byte> a(4000), b(4000);
  // Ten slots of four layers, 100 bytes apart; blocks of 40 bytes on the other side.
  const PoolLayout layers(address(a), 10, {{0, 10, 10}, {100, 10, 10}, {200, 10, 10}, {300, 10, 10}});
  const PoolLayout plain(address(b), 10, {{0, 40, 40}});
  std::vector<Piece> pieces;
  append_pieces(pieces, layers, 3, plain, 5, 0, 40);
  append_pieces(pieces, layers, 4, plain, 9, 0, 40);
  append_pieces(pieces, layers, 5, plain, 2, 5, 33);  // cut in the first and in the last layer
  std::vector<cuda::Rows> rows;
  cuda::even_rows(pieces, 1 << 20, anywhere, rows);
  CHECK(rows.size() == 5);
  CHECK(rows[0].count == 4 && rows[0].first.bytes == 10);
  CHECK(rows[0].destination.pitch == 100 && rows[0].source.pitch == 10 && !rows[0].in_slices());
  CHECK(rows[1].count == 4 && rows[1].first.source == b.data() + 9 * 40);
  CHECK(rows[2].count == 1 && rows[3].count == 2 && rows[4].count == 1);
}

TEST(rows_further_apart_than_a_pitch_may_be_are_slices) {
  std::vector<std::byte> a(4000), b(4000);
  const PoolLayout layers(address(a), 10, {{0, 10, 10}, {105, 10, 10}, {210, 10, 10}, {315, 10, 10}});
  const PoolLayout plain(address(b), 10, {{0, 40, 40}});
  std::vector<Piece> pieces;
  append_pieces(pieces, layers, 3, plain, 5, 0, 40);
  std::vector<cuda::Rows> rows;
  cuda::even_rows(pieces, 105, anywhere, rows);
  CHECK(rows.size() == 1 && rows[0].destination.pitch == 105 && !rows[0].in_slices());
  // No half of 105 bytes is a whole number of them: thirds are.
  cuda::even_rows(pieces, 104, anywhere, rows);
  CHECK(rows.size() == 1 && rows[0].count == 4 && rows[0].in_slices());
  CHECK(rows[0].destination.pitch == 35 && rows[0].destination.height == 3);
  CHECK(rows[0].source.pitch == 10 && rows[0].source.height == 1);
  cuda::even_rows(pieces, 20, anywhere, rows);
  CHECK(rows.size() == 1 && rows[0].destination.pitch == 15 && rows[0].destination.height == 7);
  cuda::even_rows(pieces, 14, anywhere, rows);  // a row of 10 bytes has no shorter pitch that fits
  CHECK(rows.size() == pieces.size());
}

TEST(rows_do_not_span_blocks_however_even_they_lie) {
  std::vector<std::byte> a(4000), b(4000);
  const PoolLayout to(address(a), 10, {{0, 50, 50}});
  const PoolLayout from(address(b), 10, {{0, 50, 50}}, 100);
  std::vector<Piece> pieces;
  for (std::int64_t slot = 0; slot < 8; slot += 2) append_pieces(pieces, to, slot, from, slot, 0, 50);
  std::vector<cuda::Rows> rows;
  cuda::even_rows(pieces, 1 << 20, anywhere, rows);
  CHECK(rows.size() == pieces.size() && rows.size() == 4);
}

TEST(rows_do_not_leave_an_allocation_however_even_they_lie) {
  std::vector<std::byte> a(4000), b(4000);
  const PoolLayout layers(address(a), 10, {{0, 10, 10}, {100, 10, 10}, {200, 10, 10}, {300, 10, 10}});
  const PoolLayout plain(address(b), 10, {{0, 40, 40}});
  std::vector<Piece> pieces;
  append_pieces(pieces, layers, 3, plain, 5, 0, 40);
  const auto allocated_by_200 = [&](const Piece& first, const Piece& last) {
    return (first.destination - a.data()) / 200 == (last.destination - a.data()) / 200;
  };
  std::vector<cuda::Rows> rows;
  cuda::even_rows(pieces, 1 << 20, allocated_by_200, rows);
  CHECK(rows.size() == 2 && rows[0].count == 2 && rows[1].count == 2);
  CHECK(rows[1].first.destination == a.data() + 230 && rows[1].destination.pitch == 100);
}

TEST(pieces_in_falling_or_uneven_order_are_no_rows) {
  std::vector<std::byte> a(1000), b(1000);
  std::vector<Piece> pieces;
  const std::size_t to[] = {300, 200, 100, 400, 700, 790};
  for (std::size_t i = 0; i < 6; ++i) {
    pieces.push_back({a.data() + to[i], b.data() + 50 * i, 50, i > 0});
  }
  std::vector<cuda::Rows> rows;
  cuda::even_rows(pieces, 1 << 20, anywhere, rows);
  CHECK(rows.size() == 4);  // 100 to 400 to 700 are even
  CHECK(rows[2].count == 3 && rows[2].destination.pitch == 300 && rows[2].source.pitch == 50);
}

TEST(layouts_that_cannot_work_are_refused) {
  CHECK_THROWS(PoolLayout(0, 0, {{0, 1, 1}}), SettingsError);
  CHECK_THROWS(PoolLayout(0, 1LL << 31, {{0, 1, 1}}), SettingsError);
  CHECK_THROWS(PoolLayout(0, 1, {}), SettingsError);
  CHECK_THROWS(PoolLayout(0, 1, {{0, 1, 2}}), SettingsError);
  CHECK_THROWS(PoolLayout(0, 1, {{0, 8, 0}}), SettingsError);
}

TEST(steps_complete_in_order) {
  const OrderingRules rules;
  StepLedger steps(rules);
  steps.launched(2);
  steps.completed(2);
  steps.abandoned(3);
  CHECK(steps.completed_step() == 0);
  steps.launched(1);
  CHECK(steps.completed_step() == 0);
  steps.completed(1);
  CHECK(steps.completed_step() == 3);
  CHECK_THROWS(steps.launched(2), ProtocolError);
  steps.launched(4);
  CHECK_THROWS(steps.abandoned(4), ProtocolError);
  steps.withdrawn(4);
  steps.abandoned(4);
  CHECK(steps.completed_step() == 4);
}

TEST(a_gap_of_steps_is_bounded) {
  const OrderingRules rules;
  StepLedger steps(rules);
  CHECK_THROWS(
      for (std::int64_t step = 2; step < 1 << 20; ++step) steps.abandoned(step), ProtocolError);
}

TEST(ring_keeps_the_newest) {
  WindowRing ring(3);
  for (std::int64_t i = 0; i < 5; ++i) ring.push(WindowRecord{i, 0, 0, 0, 0, 0, 0, {}});
  const auto records = ring.drain();
  CHECK(records.size() == 3 && records.front().transfer == 2 && records.back().transfer == 4);
  CHECK(ring.dropped() == 2 && ring.drain().empty());
  WindowRing none(0);
  none.push(WindowRecord{});
  CHECK(none.dropped() == 1 && none.drain().empty());
}

TEST(throttle_books_the_rate) {
  Throttle link(1e6);
  const auto start = Clock::now();
  auto end = start;
  for (int i = 0; i < 100; ++i) end = link.book(5000);
  const double took = std::chrono::duration<double>(end - start).count();
  CHECK(took > 0.49 && took < 0.51);
}

TEST(an_unrecorded_event_is_complete) {
  SimBackend backend(1, 0);
  const auto event = backend.create_event();
  CHECK(backend.query(event) == Signal::done);
  CHECK(backend.wait(event, 0) == Signal::done);
  backend.destroy_event(event);
}

TEST(a_wait_covers_the_record_at_its_time) {
  SimBackend backend(1, 0);
  const auto first = backend.open_compute_stream();
  const auto second = backend.open_compute_stream();
  const auto waiter = backend.open_compute_stream();
  const auto event = backend.create_event();
  const auto reached = backend.create_event();
  backend.record(event, first);
  CHECK(backend.wait(event, 10) == Signal::done);
  backend.stream_wait(waiter, event, 0);
  backend.record(reached, waiter);
  backend.hold(second);
  backend.record(event, second);  // a later record does not hold the earlier wait back
  CHECK(backend.wait(reached, 10) == Signal::done);
  CHECK(backend.query(event) == Signal::pending);
  backend.close();
  CHECK(backend.query(event) == Signal::failed);
  backend.destroy_event(event);
  backend.destroy_event(reached);
}

TEST(work_after_close_fails_its_events) {
  CpuBackend backend(0);
  const auto lane = backend.open_lane(Direction::load, 0);
  const auto event = backend.create_event();
  backend.close();
  backend.close();
  backend.record(event, lane);
  CHECK(backend.wait(event, 10) == Signal::failed);
  CHECK(!backend.error_text(event).empty());
  CHECK_THROWS(backend.record(event, 99), ProtocolError);
  backend.destroy_event(event);
}
