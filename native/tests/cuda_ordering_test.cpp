// The same rules and mutants on a CUDA device; without one each test says so and passes.
#include "cuda_rig.hpp"
#include "ordering.hpp"

using namespace forebay;

TEST(cuda_rule_4_1_save_after_its_step) { if (cuda_device_here()) ordering::rule_4_1_save_after_its_step<CudaRig>(); }
TEST(cuda_rule_4_1_unrecorded_step) { if (cuda_device_here()) ordering::rule_4_1_unrecorded_step<CudaRig>(); }
TEST(cuda_rule_4_1_abandoned_step) { if (cuda_device_here()) ordering::rule_4_1_abandoned_step<CudaRig>(); }
TEST(cuda_rule_4_2_issued_before_wait) { if (cuda_device_here()) ordering::rule_4_2_issued_before_wait<CudaRig>(); }
TEST(cuda_rule_4_2_by_layer) { if (cuda_device_here()) ordering::rule_4_2_by_layer<CudaRig>(); }
TEST(cuda_rule_4_3_both_lanes) { if (cuda_device_here()) ordering::rule_4_3_both_lanes<CudaRig>(); }
TEST(cuda_rule_4_3_by_layer) { if (cuda_device_here()) ordering::rule_4_3_by_layer<CudaRig>(); }
TEST(cuda_rule_4_3_event_reuse) { if (cuda_device_here()) ordering::rule_4_3_event_reuse<CudaRig>(); }
TEST(cuda_rule_4_4_host_slot) { if (cuda_device_here()) ordering::rule_4_4_host_slot<CudaRig>(); }
TEST(cuda_rule_4_4_device_slot) { if (cuda_device_here()) ordering::rule_4_4_device_slot<CudaRig>(); }
TEST(cuda_rule_4_4_cancel_marks) { if (cuda_device_here()) ordering::rule_4_4_cancel_marks<CudaRig>(); }
