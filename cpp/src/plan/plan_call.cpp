// Plan of a whole call.
#include <cstdint>

#include "plan/steps.h"

namespace hot::detail::plan {

// All operands are quantised before the products. Then g_y is read again while the L2 cache may
// still hold it, and kernels overlap.
Plan plan_of(const DeviceFacts& facts, const Work& work) {
  Plan plan;
  const bool summed = add_operands(plan, facts, work);
  if (work.widens()) {
    plan.add(Kernel::widen, {ceil_div(work.bias.cols, 256), 256}, Buffer::bias, Buffer::wide_bias);
  }
  add_products(plan, facts, work);
  const ColumnSum& sum = work.sum;
  plan.scratch.sums_alone = sum.out.cols * sum_runs(sum.x.rows);
  if (summed || sum.out.cols == 0) return plan;
  if (work.operands.begin() != work.operands.end()) {
    plan.takes({Kernel::partial_sum,
                "g_y is read again for g_b",
                {"no kernel of its rows or columns adds them up"}});
  }
  const std::int64_t runs = sum_runs(sum.x.rows);
  plan.add(Kernel::partial_sum, {runs * ceil_div(sum.x.cols, bias::sum_threads), bias::sum_threads},
           Buffer::gy, Buffer::all_scratch, SumsStep{runs}, sum.x.dtype);
  add_final_sum(plan, runs, sum.x.cols, sum.accumulate, Buffer::all_scratch);
  return plan;
}

}  // namespace hot::detail::plan
