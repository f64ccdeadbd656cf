// The stock tiles of CUTLASS that bench_gemm.py holds hotcore's INT8 product against, one in each
// .cu. Nothing here is part of libhot.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace hot::stock {

// out[m, n] = (sum over k of a[m, k] * b[n, k]) * b_scale[n] * a_scale[m], to bf16. All arrays are
// dense, row by row; k and n multiples of 16 bytes.
struct Problem {
  int m, n, k;
  const std::int8_t *a, *b;
  const float *a_scale, *b_scale;
  void* out;
};

// How the tiles are gone through: along M or N, in stripes of at most `swizzle` tiles.
struct Order {
  bool along_m;
  int swizzle;
};

// 0, or the cutlass::Status that came instead.
using Run = int(const Problem&, Order, cudaStream_t);
// wgmma; the names end in the cluster, M x N.
Run pingpong_128x128_2x1, cooperative_128x192_2x1, cooperative_128x256_2x1, cooperative_256x128_1x2;

}  // namespace hot::stock
