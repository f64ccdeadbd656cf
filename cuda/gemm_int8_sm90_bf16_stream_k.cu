#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

std::size_t sm90_stream_k_workspace(const Context& context, const GemmArgs& args,
                                    const Sm90Plan& plan) {
  return StreamK<cutlass::bfloat16_t, Sm90Output::store>::workspace(context, args, plan);
}

void sm90_gemm_bf16_stream_k(const Context& context, const GemmArgs& args, const Sm90Plan& plan,
                             void* workspace) {
  StreamK<cutlass::bfloat16_t, Sm90Output::store>::run(context, args, plan, workspace);
}

}  // namespace hot::detail
