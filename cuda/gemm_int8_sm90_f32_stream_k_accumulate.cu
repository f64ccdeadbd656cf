#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_f32_stream_k_accumulate(const Context& context, const GemmArgs& args, int sm_count,
                                       int splits, void* workspace) {
  StreamK<float, true>::run(context, args, sm_count, splits, workspace);
}

}  // namespace hot::detail
