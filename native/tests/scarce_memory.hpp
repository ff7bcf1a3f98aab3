// Memory that ends in the middle of a call.
#pragma once

namespace check {

// The allocation behind the next `allocations` fails, once; negative: none does.
void run_out_after(int allocations);

}  // namespace check
