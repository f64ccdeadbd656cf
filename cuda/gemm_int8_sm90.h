// The instances of the sm_90a product (gemm_int8_sm90.cuh), one in each gemm_int8_sm90_*.cu; no_sm90.cpp
// stands in for them in a build without CUTLASS or without sm_90a. Tiles: 128 x 128 pingpong (two
// tiles in turns, the epilogue of one behind the products of the other), 128 x 256 cooperative.
#pragma once

#include "kernels.h"

namespace hot::detail {

bool sm90_built() noexcept;

// Both scales are vectors; see sm90_can in gemm.cu for what else is needed.
void sm90_gemm_bf16_128x128(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_bf16_128x256(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_f16_128x128(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_f32_128x128(const Context&, const GemmArgs&, int sm_count);

}  // namespace hot::detail
