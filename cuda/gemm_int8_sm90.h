// The instances of the sm_90a product (gemm_int8_sm90.cuh), one in each gemm_int8_sm90_*.cu;
// no_sm90.cpp stands in for them in a build without CUTLASS or without sm_90a. Tiles of 128 x 128
// and 128 x 192: pingpong (two tiles in turns, the epilogue of one behind the products of the
// other), and stream-K, where the tiles do not fill the GPU and the contraction is shared out
// instead (INT32 sums: exact in any order). *_accumulate add to what is there, *_bias a bias.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace hot::detail {

bool sm90_built() noexcept;

// How the tiles of a product are gone through: along M or N, in stripes of `swizzle` tiles; for
// stream-K in how many parts the contraction is cut, 1: as CUTLASS would.
struct Sm90Plan {
  int sm_count;
  bool along_m;
  int swizzle, splits;
};

// What happens to the scaled sums.
enum class Sm90Output { store, accumulate, bias };

// Both scales are vectors; see sm90_can in gemm.cu for what else is needed.
using Sm90Pingpong = void(const Context&, const GemmArgs&, const Sm90Plan&);
Sm90Pingpong sm90_gemm_bf16_128x128, sm90_gemm_bf16_128x128_accumulate;
Sm90Pingpong sm90_gemm_f16_128x128, sm90_gemm_f16_128x128_accumulate;
Sm90Pingpong sm90_gemm_f32_128x128, sm90_gemm_f32_128x128_accumulate;
Sm90Pingpong sm90_gemm_bf16_128x192, sm90_gemm_f32_128x192;
Sm90Pingpong sm90_gemm_bf16_128x128_bias, sm90_gemm_f16_128x128_bias, sm90_gemm_f32_128x128_bias;
Sm90Pingpong sm90_gemm_bf16_128x192_bias;

using Sm90StreamK = void(const Context&, const GemmArgs&, const Sm90Plan&, void* workspace);
Sm90StreamK sm90_gemm_bf16_stream_k, sm90_gemm_bf16_stream_k_accumulate;
Sm90StreamK sm90_gemm_f32_stream_k, sm90_gemm_f32_stream_k_accumulate;
// Bytes, for each of them the same.
std::size_t sm90_stream_k_workspace(const Context&, const GemmArgs&, const Sm90Plan&);

}  // namespace hot::detail
