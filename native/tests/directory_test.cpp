// The directory against a model that keeps every published path in a map, and with memory that ends
// in the middle of a call.
#include "directory/directory.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "check.hpp"
#include "scarce_memory.hpp"

using namespace forebay;

namespace {

constexpr std::size_t kWidth = 2;
constexpr std::int32_t kBlocks = 120;

using Place = std::pair<std::string, std::string>;  // a namespace, and the keys up to a block

KeyBytes bytes_of(const std::string& keys) {
  return {reinterpret_cast<const std::byte*>(keys.data()), keys.size()};
}

struct Model {
  std::map<Place, std::int32_t> block_at;
  std::map<std::int32_t, Place> place_of;

  std::vector<std::int32_t> match(const std::string& name, const std::string& keys) const {
    std::vector<std::int32_t> found;
    for (std::size_t end = kWidth; end <= keys.size(); end += kWidth) {
      const auto at = block_at.find({name, keys.substr(0, end)});
      if (at == block_at.end()) break;
      found.push_back(at->second);
    }
    return found;
  }

  std::set<std::int32_t> subtree(std::int32_t block) const {
    const auto& [name, keys] = place_of.at(block);
    std::set<std::int32_t> found;
    for (const auto& [other, place] : place_of) {
      if (place.first == name && place.second.starts_with(keys)) found.insert(other);
    }
    return found;
  }

  bool is_leaf(std::int32_t block) const { return subtree(block).size() == 1; }

  std::int64_t parent(std::int32_t block) const {
    const auto& [name, keys] = place_of.at(block);
    const auto at = block_at.find({name, keys.substr(0, keys.size() - kWidth)});
    return at == block_at.end() ? kNoBlock : at->second;
  }

  void remove(std::int32_t block) {
    block_at.erase(place_of.at(block));
    place_of.erase(block);
  }
};

struct Session {
  std::string name;
  std::string keys;
  std::int64_t block = kNoBlock;
  std::int64_t insert = 0;
  std::int64_t known = 0;
};

// One directory and its model through a random life.
class Life {
 public:
  Life(unsigned seed, std::int64_t run_blocks, int letters, bool failing)
      : random_(seed),
        letters_(letters),
        failing_(failing),
        directory_(kWidth, run_blocks * kWidth) {
    for (std::int32_t id = kBlocks - 1; id >= 0; --id) unused_.push_back(id);
  }

  void run(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      const int what = below(10);
      if (what < 5) insert();
      if (what == 5) refused_inserts();
      if (what == 6) remove_leaves();
      if (what == 7) remove_subtree();
      if (what > 7) match();
      if (round % 16 == 0) agree();
    }
    while (!model_.place_of.empty()) remove_subtree();
    agree();
    CHECK(directory_.node_count() == 0);
  }

 private:
  int below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }
  std::string name() { return std::string(below(3), 'n'); }
  std::string path() {
    std::string keys;
    for (int blocks = below(14); blocks > 0; --blocks) {
      keys += {'k', static_cast<char>('a' + below(letters_))};
    }
    return keys;
  }

  const Session* some_session() {
    return sessions_.empty() || below(2) ? nullptr : &sessions_[below(sessions_.size())];
  }

  // A path that a session's may be the front of.
  std::string path_for(const Session* session) {
    return session != nullptr && below(4) ? session->keys + path() : path();
  }

  template <typename Call>
  auto with(const Session* session, Call call) {
    if (session == nullptr) return call(nullptr);
    const KeyBytes keys = bytes_of(session->keys);
    const Resume resume{session->name,  session->block,
                        session->insert, session->known,
                        below(2) ? &keys : nullptr};
    return call(&resume);
  }

  // Calls, now and then without the memory for it; whether that went through.
  template <typename Call>
  bool attempt(Call call) {
    if (failing_ && below(2)) check::run_out_after(below(12));
    try {
      call();
    } catch (const std::bad_alloc&) {
      return false;
    }
    check::run_out_after(-1);
    return true;
  }

  void match() {
    const Session* session = some_session();
    const std::string keys = path_for(session);
    const std::string in = session != nullptr && below(4) ? session->name : name();
    const std::string before = directory_.dump();
    const auto found =
        with(session, [&](const Resume* r) { return directory_.match(in, bytes_of(keys), r); });
    CHECK(directory_.dump() == before);
    std::vector<std::int32_t> ids(found.blocks);
    directory_.read(found, 0, ids.data());
    CHECK(ids == model_.match(in, keys));
    if (found.resumed) CHECK(found.resumed == session->known);
    if (ids.empty()) return;
    sessions_.push_back({in, keys, ids.back(), directory_.insert_of(ids.back()), found.blocks});
    if (sessions_.size() > 20) sessions_.erase(sessions_.begin() + below(20));
  }

  void insert() {
    const Session* session = some_session();
    const std::string keys = path_for(session);
    const std::string in = session != nullptr && below(4) ? session->name : name();
    const auto blocks = static_cast<std::int64_t>(keys.size() / kWidth);
    const std::vector<std::int32_t> published = model_.match(in, keys);
    const auto found = static_cast<std::int64_t>(published.size());
    const std::int64_t first = std::max<std::int64_t>(0, found - below(3));
    if (blocks - first > static_cast<std::int64_t>(unused_.size())) return;
    const std::vector<std::int32_t> ids(unused_.end() - (blocks - first), unused_.end());
    std::vector<std::int32_t> present;
    const bool done = attempt([&] {
      present = with(session, [&](const Resume* r) {
        return directory_.insert(in, bytes_of(keys + "kz"), first, ids, r);
      });
    });
    if (!done) {
      agree();
      return;
    }
    CHECK(present == std::vector<std::int32_t>(published.begin() + first, published.end()));
    for (std::int64_t at = found; at < blocks; ++at) {
      const std::int32_t block = ids[at - first];
      const Place place{in, keys.substr(0, (at + 1) * kWidth)};
      model_.block_at[place] = block;
      model_.place_of[block] = place;
      std::erase(unused_, block);
    }
  }

  void refused_inserts() {
    if (unused_.empty()) return;
    const std::string keys = path() + "kb";
    const std::string in = name();
    const auto found = static_cast<std::int64_t>(model_.match(in, keys).size());
    const auto blocks = static_cast<std::int64_t>(keys.size() / kWidth);
    const std::string before = directory_.dump();
    const auto try_ids = [&](std::int64_t first, std::vector<std::int32_t> ids) {
      directory_.insert(in, bytes_of(keys), first, ids, nullptr);
    };
    const std::int32_t unused = unused_.back();
    if (found + 1 < blocks) {
      CHECK_THROWS(try_ids(found + 1, {unused}), ParentMissingError);
      CHECK_THROWS(try_ids(found, {unused, unused}), ProtocolError);
    }
    if (found < blocks) {
      CHECK_THROWS(try_ids(found, {-1}), ProtocolError);
    }
    if (!model_.place_of.empty()) {
      const std::int32_t published = some_block();
      if (found < blocks) CHECK_THROWS(try_ids(found, {published}), ProtocolError);
      if (!model_.is_leaf(published)) CHECK_THROWS(directory_.remove_leaf(published), NotLeafError);
    }
    CHECK_THROWS(try_ids(-1, {unused}), ProtocolError);
    CHECK_THROWS(try_ids(blocks, {unused}), ProtocolError);
    CHECK_THROWS(try_ids(INT64_MAX, {unused}), ProtocolError);
    CHECK_THROWS(directory_.insert(in, bytes_of("k"), 0, {}, nullptr), ProtocolError);
    CHECK_THROWS(directory_.remove_leaf(unused), ProtocolError);
    CHECK_THROWS(directory_.remove_subtree(INT64_MAX), ProtocolError);
    CHECK(directory_.dump() == before);
  }

  std::int32_t some_block() {
    auto at = model_.place_of.begin();
    std::advance(at, below(static_cast<int>(model_.place_of.size())));
    return at->first;
  }

  // Blocks here and there, each followed by some of its ancestors.
  void remove_leaves() {
    std::vector<std::int32_t> blocks;
    for (int place = below(4); place > 0 && !model_.place_of.empty(); --place) {
      std::int64_t block = some_block();
      for (int climb = below(8); climb > 0 && block != kNoBlock; --climb) {
        if (std::find(blocks.begin(), blocks.end(), block) != blocks.end()) break;
        blocks.push_back(static_cast<std::int32_t>(block));
        block = model_.parent(blocks.back());
      }
    }
    std::vector<std::uint8_t> removed;
    if (!attempt([&] { removed = directory_.remove_leaves(blocks); })) return agree();
    for (std::size_t at = 0; at < blocks.size(); ++at) {
      CHECK((removed[at] != 0) == model_.is_leaf(blocks[at]));
      if (removed[at]) forget(blocks[at]);
    }
  }

  void remove_subtree() {
    if (model_.place_of.empty()) return;
    const std::int32_t top = some_block();
    std::vector<std::int32_t> removed;
    if (!attempt([&] { removed = directory_.remove_subtree(top); })) return agree();
    CHECK(std::set(removed.begin(), removed.end()) == model_.subtree(top));
    for (const std::int32_t block : removed) {
      CHECK(model_.is_leaf(block));
      forget(block);
    }
  }

  void forget(std::int32_t block) {
    model_.remove(block);
    unused_.push_back(block);
  }

  void agree() {
    directory_.check();
    CHECK(directory_.size() == static_cast<std::int64_t>(model_.place_of.size()));
    for (std::int32_t block = -1; block <= kBlocks; ++block) {
      CHECK(directory_.contains(block) == model_.place_of.contains(block));
    }
    for (const auto& [block, place] : model_.place_of) {
      CHECK(directory_.parent(block) == model_.parent(block));
      CHECK(directory_.is_leaf(block) == model_.is_leaf(block));
    }
  }

  std::mt19937 random_;
  int letters_;
  bool failing_;
  Directory directory_;
  Model model_;
  std::vector<std::int32_t> unused_;
  std::vector<Session> sessions_;
};

}  // namespace

TEST(a_directory_agrees_with_a_map) {
  for (unsigned seed = 0; seed < 12; ++seed) Life(seed, 1 + seed % 5, 2 + seed % 2, false).run(160);
}

TEST(a_directory_of_wide_branches_agrees_with_a_map) {
  for (unsigned seed = 0; seed < 6; ++seed) Life(100 + seed, 64, 24, false).run(160);
}

TEST(a_call_that_runs_out_of_memory_changes_nothing) {
  for (unsigned seed = 0; seed < 12; ++seed) Life(200 + seed, 1 + seed % 5, 2, true).run(160);
  for (unsigned seed = 0; seed < 6; ++seed) Life(300 + seed, 64, 24, true).run(160);
}

TEST(an_id_far_away_costs_little) {
  Directory directory(kWidth, 64);
  const std::vector<std::int32_t> ids{INT32_MAX, 0};
  directory.insert("n", bytes_of("kakb"), 0, ids, nullptr);
  directory.check();
  CHECK(directory.contains(INT32_MAX) && !directory.contains(INT32_MAX - 5000));
  CHECK(directory.parent(0) == INT32_MAX);
}

TEST(what_is_removed_is_used_again) {
  Directory directory(kWidth, 4);
  std::vector<std::int32_t> ids{0, 1, 2, 3, 4, 5};
  for (int round = 0; round < 50; ++round) {
    const std::string name = std::to_string(round);
    directory.insert(name, bytes_of("kakbkckdkekf"), 0, ids, nullptr);
    directory.insert(name, bytes_of("kakbkckx"), 3, std::vector<std::int32_t>{6}, nullptr);
    directory.remove_subtree(0);
    CHECK(directory.node_count() == 0);
  }
  CHECK(directory.nodes_made() <= 8);
}

TEST(a_branch_among_thousands_is_found_and_removed) {
  Directory directory(4, 64);
  const auto keys = [](std::int32_t child) {
    return "root" + std::string(reinterpret_cast<const char*>(&child), sizeof(child));
  };
  constexpr std::int32_t kChildren = 3000;
  for (std::int32_t child = 1; child <= kChildren; ++child) {
    const std::vector<std::int32_t> ids{0, child};
    directory.insert("n", bytes_of(keys(child)), 0, ids, nullptr);
  }
  directory.check();
  std::vector<std::int32_t> order;
  for (std::int32_t child = 1; child <= kChildren; ++child) order.push_back(child);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  for (std::size_t at = 0; at < order.size(); ++at) {
    CHECK(directory.match("n", bytes_of(keys(order[at])), nullptr).blocks == 2);
    directory.remove_leaf(order[at]);
    CHECK(directory.match("n", bytes_of(keys(order[at])), nullptr).blocks == 1);
    if (at % 500 == 0 || at + 10 > order.size()) directory.check();
  }
  CHECK(directory.node_count() == 2);
}
