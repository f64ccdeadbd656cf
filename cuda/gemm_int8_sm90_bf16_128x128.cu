#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

bool sm90_built() noexcept { return true; }

void sm90_gemm_bf16_128x128(const Context& context, const GemmArgs& args, const Sm90Plan& plan) {
  Pingpong<cutlass::bfloat16_t, Sm90Output::store>::run(context, args, plan);
}

}  // namespace hot::detail
