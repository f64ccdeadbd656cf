#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_f16_128x128_accumulate(const Context& context, const GemmArgs& args, int sm_count) {
  Pingpong<cutlass::half_t, true>::run(context, args, sm_count);
}

}  // namespace hot::detail
