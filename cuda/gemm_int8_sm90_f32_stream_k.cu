#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {

void sm90_gemm_f32_stream_k(const Context& context, const GemmArgs& args, const Sm90Plan& plan,
                            void* workspace) {
  StreamK<float, Sm90Output::store>::run(context, args, plan, workspace);
}

}  // namespace hot::detail
