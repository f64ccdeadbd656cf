// Stores of a CTA to the shared memory of other CTAs of its cluster (from sm_90 on). Before sm_90 a
// cluster is one CTA, and these functions do nothing.
//
// The receiver sets the bytes that it expects (expect_bytes, one thread). All CTAs synchronise
// (arrive_cluster, wait_cluster), so that all have started and expect. The senders send
// (send_async) and may exit. The receiver waits (wait_bytes). This takes one trip through the
// cluster's network. Barriers around plain stores would take two, and a fence of all memory.
#pragma once

#include "cuda/device/async_copy.cuh"

namespace hot::detail {

__device__ inline unsigned cluster_rank() {
  unsigned rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Address in CTA `rank` that corresponds to `address` in this CTA.
__device__ inline unsigned cluster_address(unsigned address, unsigned rank) {
  unsigned there = address;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// Makes `barrier` (8 bytes, used once) expect `bytes`. Called by one thread, before arrive_cluster.
__device__ inline void expect_bytes(unsigned barrier, unsigned bytes) {
  start_barrier(barrier);
  expect_bulk(barrier, bytes);
}

// Called by all threads of all CTAs, in whole warps. Orders expect_bytes only.
__device__ inline void arrive_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void wait_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Sends 8 bytes to a cluster_address. The barrier in that CTA counts them.
__device__ inline void send_async(unsigned to, int2 v, unsigned barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.s32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "r"(v.x), "r"(v.y), "r"(barrier)
      : "memory");
#endif
}

// Waits until all expected bytes have arrived.
__device__ inline void wait_bytes(unsigned barrier) { wait_bulk(barrier, 0); }

}  // namespace hot::detail
