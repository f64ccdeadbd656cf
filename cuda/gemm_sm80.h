// The products with mma.sync, for every architecture from sm_80 on. gemm_sm80_plan.h has their
// tiles and chooses; each is compiled in a gemm_sm80_<tile>.cu of its own.
#pragma once

#include "cuda/gemm_sm80_plan.h"
#include "kernels.h"

namespace hot::detail {

enum class MmaCodes : std::uint8_t { int8, int4 };

// What a plan depends on. Of INT4 operands k counts values; their strides are bytes.
MmaDevice mma_device(const Context&);
MmaProduct mma_product(const GemmArgs&, MmaCodes);

// Follows a plan whose tile can do the product; `workspace`: mma_workspace(plan) bytes, aligned to
// 16.
void mma_gemm(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, void* workspace);

// The product whose scales lie along the contraction.
void sm80_gemm_token(const Context&, const GemmTokenArgs&);

// mma_gemm for one tile.
template <class Tile>
void mma_run(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, void* workspace);

}  // namespace hot::detail
