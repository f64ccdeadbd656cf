// CTAs of a cluster that write to each other's shared memory (sm_90 on; before, a cluster
// is one CTA, and nothing here does anything).
//
// The receiver sets how many bytes it expects (expect_bytes, one thread). All CTAs synchronise
// (arrive_cluster, wait_cluster), so that all have started and expect. The senders send
// (send_async) and may exit. The receiver waits (wait_bytes). That takes one trip through the
// cluster's network; barriers around plain stores take two, and a fence of all memory.
#pragma once

#include <cstdint>

#include "cuda/device/async_copy.cuh"

namespace hot::detail {

__device__ inline unsigned cluster_rank() {
  unsigned rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// The address in CTA `rank` that corresponds to `address` here.
__device__ inline unsigned cluster_address(unsigned address, unsigned rank) {
  unsigned there = address;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// One thread, before arrive_cluster: `barrier` (8 bytes, once in its life) expects `bytes`.
__device__ inline void expect_bytes(unsigned barrier, unsigned bytes) {
  start_barrier(barrier);
  expect_bulk(barrier, bytes);
}

// All threads of all CTAs, whole warps at a time; orders nothing but expect_bytes.
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

// 8 bytes to a cluster_address, counted by the barrier there.
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
