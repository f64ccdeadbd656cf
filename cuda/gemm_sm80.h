// Products with mma.sync for every architecture from sm_80 on. gemm_sm80_plan.h lists the tiles and
// chooses. Each tile is compiled in its own file, generated from gemm_sm80_tile.cu.in.
#pragma once

#include "kernels.h"
#include "plan/gemm_sm80_plan.h"

namespace hot::detail {

enum class MmaCodes : std::uint8_t { int8, int4 };
enum class MmaPart : std::uint8_t { tiles, fixup };

// Launches a part of a plan: the tiles, or the fixup of shared tiles. The plan's tile must be able
// to do the product. For INT4 args.k counts values and strides count bytes. `workspace` has
// mma_workspace(plan) bytes and is 16-byte aligned.
void mma_gemm(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, MmaPart, void* workspace);

// mma_gemm for one tile.
template <class Tile>
void mma_run(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, MmaPart, void* workspace);

}  // namespace hot::detail
