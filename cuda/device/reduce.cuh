// Maximum of the values of several threads, as bit patterns of magnitudes.
#pragma once

#include <cstdint>

namespace hot::detail {

__device__ inline std::uint32_t warp_max(std::uint32_t v) {
  return __reduce_max_sync(0xffffffffU, v);
}

// Maximum over the CTA; every thread gets it.
__device__ inline std::uint32_t block_max(std::uint32_t v, std::uint32_t* shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  v = warp_max(v);
  if (threads == 32) return v;
  __syncthreads();
  if (thread % 32 == 0) shared[thread / 32] = v;
  __syncthreads();
  for (int w = 0; w < threads / 32; ++w) v = max(v, shared[w]);
  return v;
}

// Maximum over T neighbouring lanes of a warp, T a power of two.
__device__ inline std::uint32_t lanes_max(std::uint32_t v, int T) {
  for (int h = 1; h < T; h *= 2) v = max(v, __shfl_xor_sync(0xffffffffU, v, h));
  return v;
}

// Maximum over the T lanes of a row; this thread is number `lane`. T is a power of two up to 32, or
// a multiple of 32. In the second case `shared` (a word per warp of the CTA) connects the warps.
__device__ inline std::uint32_t row_max(std::uint32_t v, int T, int lane, std::uint32_t* shared) {
  if (T < 32) return lanes_max(v, T);
  v = warp_max(v);
  if (T == 32) return v;
  const int warp = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) / 32;
  if (lane % 32 == 0) shared[warp] = v;
  __syncthreads();
  return warp_max(lane % 32 < T / 32 ? shared[warp - lane / 32 + lane % 32] : 0);
}

}  // namespace hot::detail
