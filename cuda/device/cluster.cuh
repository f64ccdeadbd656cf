// Thread blocks of a cluster: barriers and each other's shared memory (sm_90 on). Before sm_90 a
// cluster is one thread block.
#pragma once

namespace hot::detail {

__device__ inline unsigned cluster_rank() {
  unsigned rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// All threads of all thread blocks arrive, then wait. What was written to shared memory before the
// arrival is seen by everyone after the wait.
__device__ inline void arrive_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ inline void wait_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// 16 bytes of the shared memory of thread block `rank`, from the place that is `address` here.
// Volatile: not before the barrier; no memory clobber: several are on their way at once.
__device__ inline int4 load_from_cluster(unsigned address, unsigned rank) {
  int4 v = {};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 there;\n\t"
      "mapa.shared::cluster.u32 there, %4, %5;\n\t"
      "ld.shared::cluster.v4.s32 {%0,%1,%2,%3}, [there];\n\t}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(address), "r"(rank));
#endif
  return v;
}

}  // namespace hot::detail
