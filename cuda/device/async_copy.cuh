// Asynchronous copies from global to shared memory. Threads copy 16 bytes at a time (cp.async, from
// sm_80 on). Bulk copies need one instruction, and a barrier in shared memory counts their bytes
// (cp.async.bulk, from sm_90 on; a no-op before).
#pragma once

namespace hot::detail {

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copies `bytes` of 16 bytes and fills the rest with zeros. Both addresses are multiples of 16.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies 16 bytes if `wanted`, without a branch.
__device__ inline void copy_async_if(bool wanted, unsigned to, const void* from) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\t"
      "setp.ne.s32 wanted, %2, 0;\n\t"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// Copies a 32-bit word.
__device__ inline void copy_word_async(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Copies `bytes` of a 32-bit word and fills the rest with zeros.
__device__ inline void copy_word_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void store_shared(unsigned to, unsigned word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the last `Pending` groups of this thread's copies.
template <int Pending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Waits for all of this thread's copies, also those of the open group.
__device__ inline void wait_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Initialises a barrier (8 bytes). Called by one thread, before a barrier of all threads.
__device__ inline void start_barrier(unsigned barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
      "fence.mbarrier_init.release.cluster;" ::"r"(barrier)
      : "memory");
#endif
}

// Sets the bytes that the next turn of a barrier expects. Called by one thread, before the copies.
__device__ inline void expect_bulk(unsigned barrier, unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Starts a bulk copy. Addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// Waits until the barrier has counted all bytes of turn number `turn`, counted from 0.
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
