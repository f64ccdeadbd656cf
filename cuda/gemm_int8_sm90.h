// The instances of the sm_90a product, and what calls them.
#pragma once

#include "kernels.h"

namespace hot::detail {

enum class Sm90Tile {
  pingpong_128x128,     // two tiles in turns: the epilogue of one hides behind the other's products
  cooperative_128x256,  // more reuse of operands, for results with tiles enough
};

// Whether the product can run on the tensor memory accelerator: sizes, alignment, no accumulation.
bool sm90_can(const GemmArgs& args);

void sm90_gemm_bf16_128x128(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_bf16_128x256(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_f16_128x128(const Context&, const GemmArgs&, int sm_count);
void sm90_gemm_f32_128x128(const Context&, const GemmArgs&, int sm_count);

}  // namespace hot::detail
