#include "cuda/gemm_int8_sm90.cuh"

namespace hot::detail {
namespace {

using namespace cute;
using StreamK =
    Sm90Gemm<cutlass::bfloat16_t, Shape<_128, _128, _128>, Shape<_2, _1, _1>,
             cutlass::gemm::KernelTmaWarpSpecializedCooperative,
             cutlass::epilogue::TmaWarpSpecializedCooperative, cutlass::gemm::StreamKScheduler>;

}  // namespace

std::size_t sm90_stream_k_workspace(const Context& context, const GemmArgs& args, int sm_count,
                                    int splits) {
  return StreamK::workspace(context, args, sm_count, splits);
}

void sm90_gemm_bf16_stream_k(const Context& context, const GemmArgs& args, int sm_count, int splits,
                             void* workspace) {
  StreamK::run(context, args, sm_count, splits, workspace);
}

}  // namespace hot::detail
