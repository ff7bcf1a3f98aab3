// The ordering rules and their mutants on the sim backend.
#include "ordering.hpp"
#include "rig.hpp"

using namespace forebay;

namespace {

struct SimRig : Rig {
  using Snapshot = forebay::Snapshot;

  SimRig(std::unique_ptr<OrderingRules> rules, std::uint64_t seed)
      : Rig(options(std::move(rules), seed)) {}

  static Options options(std::unique_ptr<OrderingRules> rules, std::uint64_t seed) {
    Options made;
    made.seed = seed;
    made.rules = std::move(rules);
    return made;
  }
};

}  // namespace

TEST(rule_4_1_save_after_its_step) { ordering::rule_4_1_save_after_its_step<SimRig>(); }
TEST(rule_4_1_unrecorded_step) { ordering::rule_4_1_unrecorded_step<SimRig>(); }
TEST(rule_4_1_abandoned_step) { ordering::rule_4_1_abandoned_step<SimRig>(); }
TEST(rule_4_2_issued_before_wait) { ordering::rule_4_2_issued_before_wait<SimRig>(); }
TEST(rule_4_2_by_layer) { ordering::rule_4_2_by_layer<SimRig>(); }
TEST(rule_4_3_both_lanes) { ordering::rule_4_3_both_lanes<SimRig>(); }
TEST(rule_4_3_by_layer) { ordering::rule_4_3_by_layer<SimRig>(); }
TEST(rule_4_3_event_reuse) { ordering::rule_4_3_event_reuse<SimRig>(); }
TEST(rule_4_4_host_slot) { ordering::rule_4_4_host_slot<SimRig>(); }
TEST(rule_4_4_device_slot) { ordering::rule_4_4_device_slot<SimRig>(); }
TEST(rule_4_4_cancel_marks) { ordering::rule_4_4_cancel_marks<SimRig>(); }
