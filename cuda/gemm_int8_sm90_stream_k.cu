// Stream-K, see gemm_int8_sm90.h.
#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

template <class Out, Sm90Output output>
using StreamK =
    Sm90Gemm<Out, output, 128, AlongM, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
             cutlass::epilogue::TmaWarpSpecializedCooperative, cutlass::gemm::StreamKScheduler>;

constexpr Sm90Instance sm90_stream_k[] = {
    StreamK<cutlass::bfloat16_t, Sm90Output::store>::instance(),
    StreamK<float, Sm90Output::store>::instance(),
    StreamK<float, Sm90Output::accumulate>::instance(),
    {},
};

}  // namespace hot::detail
