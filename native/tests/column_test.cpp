// Columns against maps, and what they refuse.
#include "directory/column.hpp"

#include <algorithm>
#include <map>
#include <random>

#include "check.hpp"

using namespace forebay;

namespace {

constexpr std::int32_t kIds = 30;

using List = std::vector<std::int32_t>;
using Runs = std::vector<std::pair<std::int64_t, std::int64_t>>;

List some_ids(std::mt19937& random) {
  List ids(random() % 8);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % kIds);
  return ids;
}

void change(Column<std::int64_t>& column, std::map<std::int32_t, std::int64_t>& model,
            std::mt19937& random) {
  const List ids = some_ids(random);
  std::int64_t value = static_cast<std::int64_t>(random() % 4);
  switch (random() % 4) {
    case 0:
      column.put(ids, value);
      for (const std::int32_t id : ids) model[id] = value;
      break;
    case 1:
      column.put_up(ids, value);
      for (const std::int32_t id : ids) model[id] = value++;
      break;
    case 2:
      column.raise_to(ids, value);
      for (const std::int32_t id : ids) model[id] = std::max(model[id], value);
      break;
    default:
      std::vector<std::int64_t> values(ids.size());
      for (std::int64_t& each : values) each = static_cast<std::int64_t>(random() % 4);
      column.put_each(ids, values);
      for (std::size_t at = 0; at < ids.size(); ++at) model[ids[at]] = values[at];
  }
}

Runs runs_of(const List& ids, std::map<std::int32_t, std::int64_t>& model) {
  Runs runs;
  for (const std::int32_t id : ids) {
    if (model[id] == 0) continue;
    if (runs.empty() || runs.back().first != model[id]) runs.emplace_back(model[id], 0);
    ++runs.back().second;
  }
  return runs;
}

}  // namespace

TEST(columns_agree_with_a_map) {
  std::mt19937 random(7);
  Column<std::int64_t> column(kIds, 0);
  std::map<std::int32_t, std::int64_t> model;
  for (int round = 0; round < 4000; ++round) {
    change(column, model, random);
    const List along = some_ids(random);
    CHECK(column.runs(along) == runs_of(along, model));
    std::vector<std::int64_t> read(along.size());
    column.read(along, read.data());
    for (std::size_t at = 0; at < along.size(); ++at) CHECK(read[at] == model[along[at]]);
  }
}

TEST(a_column_starts_with_what_it_is_filled_with) {
  const Column<std::int32_t> column(3, -1);
  CHECK(column.size() == 3 && column.of(0) == -1 && column.of(2) == -1);
}

TEST(columns_refuse_ids_that_are_none) {
  Column<std::int64_t> column(4, 0);
  const std::vector<std::int64_t> two{5, 6};
  std::vector<std::int64_t> read(2);
  for (const std::int32_t wrong : {-1, 4, INT32_MAX, INT32_MIN}) {
    const List ids{1, wrong};
    CHECK_THROWS(column.put(ids, 5), ProtocolError);
    CHECK_THROWS(column.put_up(ids, 5), ProtocolError);
    CHECK_THROWS(column.put_each(ids, two), ProtocolError);
    CHECK_THROWS(column.raise_to(ids, 5), ProtocolError);
    CHECK_THROWS(column.runs(ids), ProtocolError);
    CHECK_THROWS(column.read(ids, read.data()), ProtocolError);
    CHECK_THROWS(column.of(wrong), ProtocolError);
  }
  CHECK_THROWS(column.put_each(List{1}, two), ProtocolError);
  CHECK(column.of(1) == 0);
  CHECK_THROWS(Column<std::int64_t>(-1, 0), SettingsError);
}
