// The instances of the sm_90a product (gemm_int8_sm90.cuh), one in each gemm_int8_sm90_*.cu;
// no_sm90.cpp stands in for them in a build without CUTLASS or without sm_90a. Tiles of 128 x 128:
// pingpong (two tiles in turns, the epilogue of one behind the products of the other), and
// stream-K, where the tiles do not fill the GPU and the contraction is shared out instead (INT32
// sums: exact in any order).
#pragma once

#include <cstddef>

#include "kernels.h"

namespace hot::detail {

bool sm90_built() noexcept;

// Both scales are vectors; see sm90_can in gemm.cu for what else is needed.
void sm90_gemm_bf16_128x128(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_f16_128x128(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_f32_128x128(const Context&, const GemmArgs&, int sm_count);

std::size_t sm90_stream_k_workspace(const Context&, const GemmArgs&, int sm_count, int splits);
void sm90_gemm_bf16_stream_k(const Context&, const GemmArgs&, int sm_count, int splits,
                             void* workspace);

}  // namespace hot::detail
