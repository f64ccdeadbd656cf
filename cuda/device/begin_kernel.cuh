// Begin and end of a kernel that may overlap its neighbours on the stream.
#pragma once

#include <cstdint>

// HOT_HOPPER_CODE is 1 in host code and in code for sm_90. Kernels that plans use only there have
// no body in code for other architectures.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define HOT_HOPPER_CODE 1
#else
#define HOT_HOPPER_CODE 0
#endif

namespace hot::detail {

// begin_kernel and end_kernel are the first and last statement of every kernel that launch()
// starts, for all of its threads. If kernels may overlap (cuda/launch.h), a kernel starts when
// every CTA of the previous one has started, and begin_kernel waits until that one has finished. An
// `independent` kernel has no data dependency on any launch since the last dependent one. It waits
// at its end, so that kernels still complete in stream order.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void begin_kernel(bool independent = false) {
  if (!independent) wait_for_previous_kernel();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void end_kernel(bool independent) {
  if (independent) wait_for_previous_kernel();
}

// Zeroes the counter of tiles for a later product, or nothing if it is null (Plan::zero_counter).
// All threads of a kernel call it after a wait for the previous kernel. The product waits until its
// predecessor has ended. Kernels between the two wait for their own predecessors before they end,
// so this kernel has ended, too.
__device__ inline void zero_counter(std::uint32_t* counter) {
  if (counter == nullptr || blockIdx.x != 0 || threadIdx.x != 0 || threadIdx.y != 0) return;
  *counter = 0;
}

}  // namespace hot::detail
