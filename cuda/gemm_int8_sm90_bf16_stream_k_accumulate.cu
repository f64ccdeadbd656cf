#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_bf16_stream_k_accumulate(const Context& context, const GemmArgs& args,
                                        const Sm90Plan& plan, void* workspace) {
  StreamK<cutlass::bfloat16_t, Sm90Output::accumulate>::run(context, args, plan, workspace);
}

}  // namespace hot::detail
