// Tiles of 128 x 128, see gemm_int8_sm90.h.
#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

template <class Out, Sm90Output output>
using Pingpong =
    Sm90Gemm<Out, output, 128, AlongN, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
             cutlass::epilogue::TmaWarpSpecialized, DynamicTiles<FirstTile::inside_barrier>>;

constexpr Sm90Instance sm90_pingpong[] = {
    Pingpong<cutlass::bfloat16_t, Sm90Output::store>::instance(),
    Pingpong<cutlass::bfloat16_t, Sm90Output::bias>::instance(),
    Pingpong<cutlass::half_t, Sm90Output::store>::instance(),
    Pingpong<cutlass::half_t, Sm90Output::bias>::instance(),
    Pingpong<float, Sm90Output::store>::instance(),
    Pingpong<float, Sm90Output::accumulate>::instance(),
    Pingpong<float, Sm90Output::bias>::instance(),
    {},
};

}  // namespace hot::detail
