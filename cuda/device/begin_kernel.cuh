// How a kernel begins and ends where it may overlap its neighbours on the stream.
#pragma once

// Whether this code can run on sm_90 (or is the host's). Kernels that plans take there alone have
// no body elsewhere: builds for other architectures neither compile nor carry it.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
#define HOT_HOPPER_CODE 1
#else
#define HOT_HOPPER_CODE 0
#endif

namespace hot::detail {

// First and last statement of every kernel that launch() starts, for all of its threads. Where
// kernels may overlap (cuda/launch.h), a kernel starts when every CTA of the previous one has
// started, and begin_kernel waits until that one has finished. An `independent` kernel has no data
// dependency on any launch since the last dependent one. It waits at its end, so completion stays
// ordered on the stream.
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

}  // namespace hot::detail
