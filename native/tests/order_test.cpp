// The eviction order and the block counts against lists and maps.
#include "directory/order.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <random>

#include "check.hpp"
#include "directory/counts.hpp"

using namespace forebay;

namespace {

constexpr std::int32_t kBlocks = 40;

using List = std::vector<std::int32_t>;

class OrderLife {
 public:
  explicit OrderLife(unsigned seed) : random_(seed) {}

  void run(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      const int rank = below(2);
      const List blocks = some();
      switch (below(8)) {
        case 0: append(blocks, rank); break;
        case 1: prepend(blocks, rank); break;
        case 2: discard(blocks); break;
        case 3: pop(below(kBlocks), rank); break;
        case 4: pop_newest(below(8), rank); break;
        case 5: hold(blocks); break;
        case 6: release(blocks); break;
        default: refuse(rank); break;
      }
      agree();
    }
  }

 private:
  int below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }

  List some() {
    List all(kBlocks);
    for (std::int32_t block = 0; block < kBlocks; ++block) all[block] = block;
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(below(12));
    return all;
  }

  void drop(const List& blocks) {
    for (auto& rank : model_) {
      std::erase_if(rank, [&](std::int32_t block) {
        return std::find(blocks.begin(), blocks.end(), block) != blocks.end();
      });
    }
  }

  bool any_held(const List& blocks) {
    return std::any_of(blocks.begin(), blocks.end(),
                       [&](std::int32_t block) { return holds_[block] > 0; });
  }

  void append(const List& blocks, int rank) {
    if (any_held(blocks)) {
      CHECK_THROWS(order_.append(blocks, rank), ProtocolError);
      return;
    }
    order_.append(blocks, rank);
    drop(blocks);
    model_[rank].insert(model_[rank].end(), blocks.rbegin(), blocks.rend());
  }

  void prepend(const List& blocks, int rank) {
    if (any_held(blocks)) {
      CHECK_THROWS(order_.prepend(blocks, rank), ProtocolError);
      return;
    }
    order_.prepend(blocks, rank);
    drop(blocks);
    model_[rank].insert(model_[rank].begin(), blocks.begin(), blocks.end());
  }

  void discard(const List& blocks) {
    order_.discard(blocks);
    drop(blocks);
  }

  void pop(int count, int rank) {
    std::vector<std::uint8_t> busy(below(3) ? kBlocks : 0);
    for (auto& flag : busy) flag = below(3) == 0;
    List expected;
    for (const std::int32_t block : model_[rank]) {
      const bool held = !busy.empty() && busy[block];
      if (!held && static_cast<int>(expected.size()) < count) expected.push_back(block);
    }
    CHECK(order_.pop(count, rank, busy) == expected);
    drop(expected);
  }

  void pop_newest(int count, int rank) {
    const List& from = model_[rank];
    const int taken = std::min(count, static_cast<int>(from.size()));
    const List expected(from.rbegin(), from.rbegin() + taken);
    CHECK(order_.pop_newest(count, rank) == expected);
    drop(expected);
  }

  void hold(const List& blocks) {
    order_.hold(blocks);
    for (const std::int32_t block : blocks) ++holds_[block];
    drop(blocks);
  }

  void release(const List& blocks) {
    const bool all = std::all_of(blocks.begin(), blocks.end(),
                                 [&](std::int32_t block) { return holds_[block] > 0; });
    if (!all) {
      CHECK_THROWS(order_.release(blocks), ProtocolError);
      return;
    }
    List idle;
    for (const std::int32_t block : blocks) {
      if (--holds_[block] == 0) idle.push_back(block);
    }
    CHECK(order_.release(blocks) == idle);
  }

  void refuse(int rank) {
    for (const std::int32_t wrong : {-1, kBlocks, kBlocks + 1, INT32_MAX, INT32_MIN}) {
      const List blocks{0, 1, wrong};
      CHECK_THROWS(order_.append(blocks, rank), ProtocolError);
      CHECK_THROWS(order_.prepend(blocks, rank), ProtocolError);
      CHECK_THROWS(order_.discard(blocks), ProtocolError);
      CHECK_THROWS(order_.hold(blocks), ProtocolError);
      CHECK_THROWS(order_.release(blocks), ProtocolError);
      CHECK_THROWS(order_.holds(wrong), ProtocolError);
      CHECK_THROWS(order_.contains(wrong), ProtocolError);
    }
    for (const int wrong : {-1, 2}) {
      CHECK_THROWS(order_.append({}, wrong), ProtocolError);
      CHECK_THROWS(order_.pop(1, wrong, {}), ProtocolError);
      CHECK_THROWS(order_.pop_newest(1, wrong), ProtocolError);
      CHECK_THROWS(order_.peek(1, wrong), ProtocolError);
    }
    const std::vector<std::uint8_t> few(kBlocks - 1);
    CHECK_THROWS(order_.pop(1, rank, few), ProtocolError);
    CHECK(order_.pop(-1, rank, {}).empty() && order_.peek(INT64_MIN, rank).empty());
  }

  void agree() const {
    for (int rank = 0; rank < 2; ++rank) {
      const List& model = model_[rank];
      CHECK(order_.count(rank) == static_cast<std::int64_t>(model.size()));
      CHECK(order_.peek(INT64_MAX, rank) == model);
      const auto front = std::min<std::size_t>(3, model.size());
      CHECK(order_.peek(3, rank) == List(model.begin(), model.begin() + front));
    }
    for (std::int32_t block = 0; block < kBlocks; ++block) {
      CHECK(order_.holds(block) == holds_[block]);
      const auto stands = [&](const List& rank) {
        return std::find(rank.begin(), rank.end(), block) != rank.end();
      };
      CHECK(order_.contains(block) == (stands(model_[0]) || stands(model_[1])));
    }
  }

  std::mt19937 random_;
  EvictionOrder order_{kBlocks, "a lease"};
  std::array<List, 2> model_;
  std::array<std::int32_t, kBlocks> holds_{};
};

}  // namespace

TEST(an_order_agrees_with_lists) {
  for (unsigned seed = 0; seed < 20; ++seed) OrderLife(seed).run(300);
}

TEST(an_order_takes_a_block_named_twice_once) {
  EvictionOrder order(4, "a lease");
  order.append(List{1, 2, 1}, 0);
  CHECK(order.count(0) == 2);
  order.prepend(List{3, 3}, 1);
  order.discard(List{2, 2});
  CHECK(order.peek(4, 0) == List{1} && order.peek(4, 1) == List{3});
  order.hold(List{1, 1});
  CHECK(order.holds(1) == 2 && order.count(0) == 0);
  CHECK_THROWS(order.release(List{1, 1, 1}), ProtocolError);
  CHECK(order.holds(1) == 2);
  CHECK(order.release(List{1, 1}) == List{1});
}

TEST(a_stretch_of_an_order_leaves_in_either_direction) {
  for (const List& gone : {List{2, 3, 4}, List{4, 3, 2}, List{3, 2, 4}, List{3, 4, 2}, List{2, 4}}) {
    EvictionOrder order(8, "a lease");
    order.append(List{1, 2, 3, 4, 5}, 0);
    order.append(List{6, 7}, 1);
    order.discard(gone);
    List left{7, 6};
    CHECK(order.peek(8, 1) == left);
    left = gone.size() == 3 ? List{5, 1} : List{5, 3, 1};
    CHECK(order.peek(8, 0) == left);
    std::reverse(left.begin(), left.end());
    CHECK(order.pop_newest(8, 0) == left && order.count(0) == 0);
  }
}

TEST(counts_agree_with_a_map) {
  std::mt19937 random(5);
  BlockCounts counts(kBlocks, "a lease");
  std::map<std::int32_t, int> model;
  for (int round = 0; round < 4000; ++round) {
    List blocks(random() % 6);
    for (std::int32_t& block : blocks) block = static_cast<std::int32_t>(random() % kBlocks);
    std::map<std::int32_t, int> after = model;
    List changed;
    bool refused = false;
    const bool adds = random() % 2;
    for (const std::int32_t block : blocks) {
      if (adds && after[block]++ == 0) changed.push_back(block);
      if (!adds && --after[block] == 0) changed.push_back(block);
      if (!adds && after[block] < 0) refused = true;
    }
    if (refused) {
      CHECK_THROWS(counts.take_away(blocks), ProtocolError);
    } else {
      CHECK((adds ? counts.add(blocks) : counts.take_away(blocks)) == changed);
      model = after;
    }
    std::int64_t held = 0;
    for (std::int32_t block = 0; block < kBlocks; ++block) {
      CHECK(counts.of(block) == model[block]);
      held += model[block] > 0;
    }
    CHECK(counts.held() == held);
  }
}

TEST(counts_refuse_blocks_that_are_none) {
  BlockCounts counts(4, "a lease");
  for (const std::int32_t wrong : {-1, 4, INT32_MAX, INT32_MIN}) {
    CHECK_THROWS(counts.add(List{1, wrong}), ProtocolError);
    CHECK_THROWS(counts.take_away(List{1, wrong}), ProtocolError);
    CHECK_THROWS(counts.of(wrong), ProtocolError);
  }
  CHECK(counts.held() == 0 && counts.of(1) == 0);
  CHECK_THROWS(BlockCounts(-1, "a lease"), SettingsError);
  CHECK_THROWS(EvictionOrder(INT64_MAX, "a lease"), SettingsError);
}
