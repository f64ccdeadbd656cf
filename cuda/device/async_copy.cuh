// Copies from global to shared memory that run beside the arithmetic: by the threads, 16 bytes at a
// time (cp.async, sm_80 on), or in bulk with one instruction, which a barrier in shared memory
// counts (cp.async.bulk, sm_90 on; a no-op before).
#pragma once

#include <cstdint>

namespace hot::detail {

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// `bytes` of 16 from global memory, zeros for the rest; both addresses aligned to 16.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same if `wanted`, without a branch.
__device__ inline void copy_async_if(bool wanted, unsigned to, const void* from) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\t"
      "setp.ne.s32 wanted, %2, 0;\n\t"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// One 32-bit word.
__device__ inline void copy_word_async(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// `bytes` of one, zeros for the rest.
__device__ inline void copy_word_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void store_shared(unsigned to, unsigned word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `Pending` groups of this thread's copies have arrived.
template <int Pending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Waits until all of this thread's copies have arrived, also those of the open group.
__device__ inline void wait_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One thread, before a barrier of all threads: initialises the barrier (8 bytes).
__device__ inline void start_barrier(unsigned barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
      "fence.mbarrier_init.release.cluster;" ::"r"(barrier)
      : "memory");
#endif
}

// One thread, before the copies: how many bytes the barrier's next turn expects.
__device__ inline void expect_bulk(unsigned barrier, unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// Waits until the barrier has counted all bytes of turn number `turn`, from 0 on.
__device__ inline void wait_bulk(unsigned barrier, unsigned turn) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred come;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 come, [%0], %1;\n\t"
      "@!come bra again;\n\t}" ::"r"(barrier),
      "r"(turn % 2)
      : "memory");
#endif
}

}  // namespace hot::detail
