// Launchers of a plan's steps, each in the file of its kernel (plan/kernels.def). The step holds
// all decisions, the work the memory. The context's device must be current.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace hot::detail {

#define HOT_DECLARE(name, function, file, overlaps, launcher) \
  void launch_##launcher(const Context&, const plan::Step&, const Work&);
HOT_KERNELS(HOT_DECLARE)
#undef HOT_DECLARE

// Counter of tiles if the step zeroes it, or null.
inline std::uint32_t* counter_to_zero(const plan::Step& step, const Work& work) {
  return step.writes.has(plan::Buffer::counter) ? work.counter : nullptr;
}

// Launches all steps of a plan.
void launch_plan(const Context&, const plan::Plan&, const Work&);

}  // namespace hot::detail
