#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_f16_128x128(const Context& context, const GemmArgs& args, const Sm90Plan& plan) {
  Pingpong<cutlass::half_t, Sm90Output::store>::run(context, args, plan);
}

}  // namespace hot::detail
