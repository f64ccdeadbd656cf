// The products with mma.sync, for every architecture from sm_80 on. gemm_sm80_plan.h has their
// tiles and chooses; each is compiled in a file of its own, made from gemm_sm80_tile.cu.in.
#pragma once

#include "kernels.h"
#include "plan/gemm_sm80_plan.h"

namespace hot::detail {

enum class MmaCodes : std::uint8_t { int8, int4 };
enum class MmaPart : std::uint8_t { tiles, fixup };

// A launch of a plan whose tile can do the product: that of the tiles, or of the sums of those that
// are shared. Of INT4 operands args.k counts values; their strides are bytes. `workspace`:
// mma_workspace(plan) bytes, aligned to 16.
void mma_gemm(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, MmaPart, void* workspace);

// mma_gemm for one tile.
template <class Tile>
void mma_run(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, MmaPart, void* workspace);

}  // namespace hot::detail
