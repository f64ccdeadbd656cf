#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_f32_128x128(const Context& context, const GemmArgs& args, int sm_count) {
  using namespace cute;
  Sm90Gemm<float, Shape<_128, _128, _128>, Shape<_2, _1, _1>,
           cutlass::gemm::KernelTmaWarpSpecializedPingpong,
           cutlass::epilogue::TmaWarpSpecialized>::run(context, args, sm_count);
}

}  // namespace hot::detail
