// Launchers of a plan's steps, each in the file of its kernel (plan/kernels.def). The step holds
// all decisions, the work the memory. The context's device must be current.
#pragma once

#include "plan/plan.h"

namespace hot::detail {

#define HOT_DECLARE(name, function, file, overlaps, launcher) \
  void launch_##launcher(const Context&, const plan::Step&, const Work&);
HOT_KERNELS(HOT_DECLARE)
#undef HOT_DECLARE

// Launches all steps of a plan.
void launch_plan(const Context&, const plan::Plan&, const Work&);

}  // namespace hot::detail
