#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_f32_128x128_accumulate(const Context& context, const GemmArgs& args,
                                      const Sm90Plan& plan) {
  Pingpong<float, Sm90Output::accumulate>::run(context, args, plan);
}

}  // namespace hot::detail
