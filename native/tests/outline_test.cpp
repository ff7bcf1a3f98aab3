// Drawings of the trees: what they say, and that their size has a bound.
#include "directory/outline.hpp"

#include <algorithm>
#include <numeric>

#include "check.hpp"
#include "directory/directory.hpp"

using namespace forebay;

namespace {

constexpr std::int64_t kWidth = 4;
constexpr std::int64_t kMaxBlocks = 1 << 20;

// Builds paths of numbered keys; ids count up in the order in which blocks are made.
struct Grown {
  Directory directory{kWidth, 64 * kWidth};
  std::int32_t next = 0;

  void path(const std::string& name, const std::vector<std::int32_t>& keys) {
    const KeyBytes bytes{reinterpret_cast<const std::byte*>(keys.data()), keys.size() * kWidth};
    const std::int64_t found = directory.match(name, bytes, nullptr).blocks;
    std::vector<std::int32_t> ids(keys.size() - found);
    std::iota(ids.begin(), ids.end(), next);
    next += static_cast<std::int32_t>(ids.size());
    directory.insert(name, bytes, found, ids, nullptr);
  }

  Outline outline(std::size_t most) const { return directory.outline(nullptr, kMaxBlocks, most); }
};

std::vector<std::int32_t> keys(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> made(count);
  std::iota(made.begin(), made.end(), first);
  return made;
}

std::vector<std::int32_t> joined(std::vector<std::int32_t> front, std::vector<std::int32_t> back) {
  front.insert(front.end(), back.begin(), back.end());
  return front;
}

double total_of(const Outline& outline) {
  double sum = 0;
  for (const OutlinePart& part : outline.parts) sum += part.parent < 0 ? part.weight : 0;
  return sum;
}

}  // namespace

TEST(outline_says_how_long_and_how_heavy_each_branch_is) {
  Grown grown;
  grown.path("a", joined(keys(0, 300), keys(1000, 5)));  // several nodes in line: one part
  grown.path("a", joined(keys(0, 300), keys(2000, 7)));
  grown.path("b", keys(0, 2));
  const Outline outline = grown.outline(100);
  CHECK(outline.exact);
  CHECK(outline.total == 314);
  CHECK(outline.parts.size() == 4);
  CHECK(total_of(outline) == 314);
  for (std::size_t at = 0; at < outline.parts.size(); ++at) {
    const OutlinePart& part = outline.parts[at];
    CHECK(part.parent < static_cast<std::int32_t>(at));
    if (part.blocks == 300) CHECK(part.weight == 312 && part.parent == -1);
    if (part.blocks == 5 || part.blocks == 7) CHECK(outline.parts[part.parent].blocks == 300);
  }
  const std::vector<std::string> names{"b", "unknown"};
  const Outline one = grown.directory.outline(&names, kMaxBlocks, 100);
  CHECK(one.parts.size() == 1 && one.total == 2);
}

TEST(outline_names_blocks_from_all_over_a_part) {
  Grown grown;
  grown.path("a", keys(0, 300));
  const Outline outline = grown.outline(100);
  const Nodes& nodes = grown.directory.nodes();
  const std::vector<std::int32_t> all = outline.blocks_of(nodes, 0, 1000);
  CHECK(all == keys(0, 300));
  const std::vector<std::int32_t> some = outline.blocks_of(nodes, 0, 3);
  CHECK((some == std::vector<std::int32_t>{50, 150, 250}));
}

TEST(outline_keeps_the_heaviest_and_what_stands_above_them) {
  Grown grown;
  for (std::int32_t branch = 0; branch < 50; ++branch) {
    grown.path("a", joined(keys(0, 3), keys(1000 * (branch + 1), branch + 1)));
  }
  const Outline outline = grown.outline(4);
  CHECK(outline.parts.size() == 4);
  CHECK(outline.parts[0].blocks == 3 && outline.parts[0].parent == -1);
  for (std::size_t at = 1; at < 4; ++at) {
    CHECK(outline.parts[at].parent == 0 && outline.parts[at].blocks >= 48);
  }
  CHECK(outline.parts[0].weight == 3 + 50 * 51 / 2);
}

TEST(outline_of_a_large_directory_is_bounded_and_finds_what_is_large) {
  Grown grown;
  // 40,000 small branches, and one that holds as much as all of them.
  for (std::int32_t branch = 0; branch < 40000; ++branch) grown.path("a", {-1, branch, branch});
  grown.path("b", keys(0, 80000));
  const Outline outline = grown.directory.outline(nullptr, grown.next, 400);
  CHECK(!outline.exact);
  CHECK(outline.parts.size() <= 400);
  CHECK(outline.total == 160001);
  double large = 0;
  for (const OutlinePart& part : outline.parts) {
    if (part.parent < 0) large = std::max(large, part.weight);
  }
  CHECK(large > 0.9 * 80000 && large < 1.1 * 80000);
  const std::vector<std::string> names{"a"};
  const Outline walked = grown.directory.outline(&names, grown.next, 400);
  CHECK(!walked.exact && walked.parts.size() <= 400);
}

TEST(outline_of_a_path_with_a_branch_at_each_block_ends) {
  Grown grown;
  const std::vector<std::int32_t> trunk = keys(0, 12000);
  for (std::int32_t length = 12000; length > 0; --length) {
    std::vector<std::int32_t> path(trunk.begin(), trunk.begin() + length);
    path.push_back(-length);
    grown.path("a", path);
  }
  CHECK(grown.directory.node_count() > 20000);
  const Outline outline = grown.directory.outline(nullptr, grown.next, 400);
  CHECK(outline.parts.size() <= 400);
  for (std::size_t at = 0; at < outline.parts.size(); ++at) {
    CHECK(outline.parts[at].parent < static_cast<std::int32_t>(at));
  }
}
