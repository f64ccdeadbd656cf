#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_bf16_128x256(const Context& context, const GemmArgs& args, int sm_count) {
  using namespace cute;
  Sm90Gemm<cutlass::bfloat16_t, Shape<_128, _256, _128>, Shape<_2, _1, _1>,
           cutlass::gemm::KernelTmaWarpSpecializedCooperative,
           cutlass::epilogue::TmaWarpSpecializedCooperative>::run(context, args, sm_count);
}

}  // namespace hot::detail
