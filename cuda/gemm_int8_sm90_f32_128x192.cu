#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_f32_128x192(const Context& context, const GemmArgs& args, const Sm90Plan& plan) {
  WidePingpong<float, Sm90Output::store>::run(context, args, plan);
}

}  // namespace hot::detail
