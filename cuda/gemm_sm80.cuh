// The tile of the products with mma.sync, for INT8 and for packed INT4 operands.
//
// tile_kernel: tile 128 x 128 of the result, 8 warps of 64 x 32, contraction in steps of 64 bytes
//   through a ring of 4 stages of cp.async (64 KB of shared memory); fragments by ldmatrix from
//   rows of 64 bytes whose 16-byte pieces are swizzled by (row / 2) % 4, which is free of bank
//   conflicts. INT32 sums; where they could overflow they are moved to fp32 and start again. Needs
//   16-byte aligned rows; tails of M, N and K are filled with zeros by cp.async itself.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/launch.h"
#include "cuda/plan.h"
#include "kernels.h"

namespace hot::detail {
namespace {

using namespace sm80;
constexpr std::int64_t int32_steps = 131072 / tile_k;  // 127^2 * 131072 < 2^31

__device__ inline void finish(const GemmArgs& args, std::int64_t m, std::int64_t n, float acc) {
  if (m >= args.m || n >= args.n) return;
  float v = dequantised(acc, args.a_scale[m * args.a_scale_step],
                        args.b_scale[n * args.b_scale_step], args.inv_divisor);
  if (args.accumulate) v = load_out(args.out, m, n) + v;
  store_element(args.out, m, n, v);
}

__device__ inline void finish_int(const GemmArgs& args, std::int64_t m, std::int64_t n, int acc) {
  if (m >= args.m || n >= args.n) return;
  static_cast<std::int32_t*>(args.out.data)[m * args.out.row_stride + n * args.out.col_stride] =
      acc;
}

// Address of a 16-byte piece of a row in a stage.
__device__ inline unsigned piece(unsigned base, int row, int chunk) {
  return base + static_cast<unsigned>(row * tile_k + ((chunk ^ ((row >> 1) & 3)) << 4));
}

// `split`: the contraction may pass what INT32 holds. Everything counts bytes of a row, whatever
// they hold: the fragments of both instructions are the same 32-bit words.
template <class Mma, bool split>
__global__ void __launch_bounds__(threads, split ? 1 : 2) tile_kernel(GemmArgs args) {
  begin_kernel();
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned base = shared_address(shared);
  const std::int64_t tiles_n = (args.n + tile_n - 1) / tile_n;
  const std::int64_t m0 = blockIdx.x / tiles_n * tile_m, n0 = blockIdx.x % tiles_n * tile_n;
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  const int warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
  const std::int64_t steps = (args.k + tile_k - 1) / tile_k;

  // A stage is 256 rows of 4 pieces; each thread brings 4.
  const auto bring = [&](std::int64_t step) {
    if (step < steps) {
      const unsigned to = base + static_cast<unsigned>(step % stages) * stage_bytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = t / 4 + i * 64, chunk = t % 4;
        const bool of_a = i < 2;
        const std::int64_t r = of_a ? m0 + row : n0 + row - tile_m;
        const std::int64_t k = step * tile_k + chunk * 16;
        const std::int8_t* from = (of_a ? args.a + r * args.lda : args.b + r * args.ldb) + k;
        const bool real = r < (of_a ? args.m : args.n) && k < args.k;
        const int bytes = real ? static_cast<int>(min(std::int64_t{16}, args.k - k)) : 0;
        copy_async(piece(to, row, chunk), real ? from : args.a, bytes);
      }
    }
    commit_copies();
  };

  int acc[4][4][4] = {};
  float total[split ? 4 : 1][4][4] = {};
  const auto flush = [&] {
    if constexpr (split) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            total[i][j][e] += static_cast<float>(acc[i][j][e]);
            acc[i][j][e] = 0;
          }
        }
      }
    }
  };

#pragma unroll
  for (int s = 0; s < stages - 1; ++s) bring(s);
  for (std::int64_t step = 0; step < steps; ++step) {
    wait_copies<stages - 2>();
    __syncthreads();  // the stage has come for all; the one that `bring` overwrites is done with
    bring(step + stages - 1);
    const unsigned a_base = base + static_cast<unsigned>(step % stages) * stage_bytes;
    const unsigned b_base = a_base + tile_m * tile_k;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 of the 64 bytes
      unsigned a[4][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_matrices(a[i], piece(a_base, warp_m + i * 16 + lane % 16, half * 2 + lane / 16));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {  // two n8 fragments: rows 0-7 byte 0, 16, rows 8-15 byte 0, 16
        load_matrices(b[j], piece(b_base, warp_n + j * 16 + lane % 8 + lane / 16 * 8,
                                  half * 2 + lane / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          Mma::run(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
    if (split && (step + 1) % int32_steps == 0) flush();
  }
  flush();

#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::int64_t m = m0 + warp_m + i * 16 + lane / 4 + e / 2 * 8;
        const std::int64_t n = n0 + warp_n + j * 8 + lane % 4 * 2 + e % 2;
        if (args.a_scale == nullptr) {
          finish_int(args, m, n, acc[i][j][e]);
        } else {
          finish(args, m, n, split ? total[split ? i : 0][j][e] : static_cast<float>(acc[i][j][e]));
        }
      }
    }
  }
}

template <class Mma, bool split>
void launch_tiles(const Context& context, const LaunchShape& shape, const GemmArgs& args) {
  launch("gemm", context, tile_kernel<Mma, split>, shape, args);
}

}  // namespace
}  // namespace hot::detail
