// Memory stays bounded: many transfers, and many movers, one after the other.
#include <fstream>

#include "rig.hpp"

using namespace forebay;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMeasured = false;  // a sanitizer keeps what was freed
constexpr int kRounds = 200;
#else
constexpr bool kMeasured = true;
constexpr int kRounds = 4000;
#endif

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t size = 0;
  std::int64_t resident = 0;
  file >> size >> resident;
  return resident * 4096;
}

void one_round(Rig& rig, std::int64_t round) {
  rig.core->step_launched(round, rig.compute);
  const auto first = rig.load({0, 1, 2, 3}, {0, 1, 2, 3}, {round, round});
  const auto second = rig.save({4, 5}, {4, 5}, {round + 1000});
  rig.cancel(second);
  CHECK(rig.ended(first) && rig.ended(second));
  rig.completions.clear();
}

}  // namespace

TEST(many_transfers_take_no_more_memory) {
  Rig::Options options;
  options.longest_delay_s = 0;
  Rig rig(std::move(options));
  std::int64_t round = 0;
  for (int i = 0; i < kRounds / 4; ++i) one_round(rig, ++round);
  const std::int64_t before = resident_bytes();
  for (int i = 0; i < kRounds; ++i) one_round(rig, ++round);
  CHECK(!kMeasured || resident_bytes() - before < (2 << 20));
}

TEST(many_movers_take_no_more_memory) {
  const auto some = [](int movers) {
    for (int i = 0; i < movers; ++i) {
      Rig rig;
      rig.load({0, 1, 2}, {0, 1, 2}, {0, 0, 5});
    }
  };
  some(20);
  const std::int64_t before = resident_bytes();
  some(kRounds / 20);
  CHECK(!kMeasured || resident_bytes() - before < (2 << 20));
}
