// Tiles of 128 x 192, see gemm_int8_sm90.h.
#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

template <class Out, Sm90Output output>
using WidePingpong =
    Sm90Gemm<Out, output, 192, AlongM, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
             cutlass::epilogue::TmaWarpSpecialized, DynamicTiles<FirstTile::inside_barrier>>;

constexpr Sm90Instance sm90_wide_pingpong[] = {
    WidePingpong<cutlass::bfloat16_t, Sm90Output::store>::instance(),
    WidePingpong<cutlass::bfloat16_t, Sm90Output::bias>::instance(),
    WidePingpong<float, Sm90Output::store>::instance(),
    {},
};

}  // namespace hot::detail
