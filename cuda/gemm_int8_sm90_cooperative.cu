// Tiles of 128 x 256, see gemm_int8_sm90.h.
#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

template <class Out, Sm90Output output>
using Cooperative =
    Sm90Gemm<Out, output, 256, AlongM, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
             cutlass::epilogue::TmaWarpSpecializedCooperative,
             DynamicTiles<FirstTile::after_barrier>>;

constexpr Sm90Instance sm90_cooperative[] = {
    Cooperative<cutlass::bfloat16_t, Sm90Output::store>::instance(),
    Cooperative<cutlass::bfloat16_t, Sm90Output::bias>::instance(),
    Cooperative<float, Sm90Output::store>::instance(),
    Cooperative<float, Sm90Output::accumulate>::instance(),
    {},
};

}  // namespace hot::detail
