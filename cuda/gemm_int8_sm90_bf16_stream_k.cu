#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

std::size_t sm90_stream_k_workspace(const Context& context, const GemmArgs& args, int sm_count,
                                    int splits) {
  return StreamK<cutlass::bfloat16_t, false>::workspace(context, args, sm_count, splits);
}

void sm90_gemm_bf16_stream_k(const Context& context, const GemmArgs& args, int sm_count, int splits,
                             void* workspace) {
  StreamK<cutlass::bfloat16_t, false>::run(context, args, sm_count, splits, workspace);
}

}  // namespace hot::detail
