// Executes a plan, step by step.
#include "cuda/launchers.h"

#include "cuda/launch.h"

namespace hot::detail {

void launch_zero(const Context& context, const plan::Step& step, const Work& work) {
  check_cuda(cudaMemsetAsync(work.zeroed, 0, step.as<plan::ZeroStep>().bytes, context.stream()),
             work.call, "cudaMemsetAsync");
}

void launch_plan(const Context& context, const plan::Plan& plan, const Work& work) {
#define HOT_LAUNCHER(name, function, file, overlaps, launcher) launch_##launcher,
  using Launcher = void (*)(const Context&, const plan::Step&, const Work&);
  static constexpr Launcher launchers[plan::kernel_count] = {HOT_KERNELS(HOT_LAUNCHER)};
#undef HOT_LAUNCHER
  for (const plan::Step& step : plan) {
    launchers[static_cast<std::size_t>(step.kernel)](context, step, work);
  }
}

}  // namespace hot::detail
