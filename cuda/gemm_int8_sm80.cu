// Stage: integer product with mma.sync, for every architecture from sm_80 on.
//
// tile_kernel (gemm_sm80.cuh) with mma.m16n8k32.
// byte_kernel: any alignment; one thread for one result. Correct and slow.
// token_kernel: the fp32 product with a scale for each k (LQS), k in ascending order as on the CPU.
#include "cuda/gemm_int8_sm80.h"

#include "cuda/gemm_sm80.cuh"

namespace hot::detail {
namespace {

__global__ void byte_kernel(GemmArgs args) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.m * args.n) return;
  const std::int64_t m = i / args.n, n = i % args.n;
  long long acc = 0;
  for (std::int64_t k = 0; k < args.k; ++k) {
    acc += static_cast<int>(args.a[m * args.lda + k]) * static_cast<int>(args.b[n * args.ldb + k]);
  }
  if (args.a_scale == nullptr) {
    finish_int(args, m, n, static_cast<int>(acc));
  } else {
    finish(args, m, n, static_cast<float>(acc));
  }
}

__global__ void token_kernel(GemmTokenArgs args) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.m * args.n) return;
  const std::int64_t m = i / args.n, n = i % args.n;
  float acc = 0.0F;
  for (std::int64_t k = 0; k < args.k; ++k) {
    const float a = static_cast<float>(args.a[m * args.lda + k]) * args.k_scale[k];
    acc += a * static_cast<float>(args.b[n * args.ldb + k]);
  }
  float v = acc * args.b_scale[n * args.b_scale_step] * args.inv_divisor;
  if (args.accumulate) v = load_out(args.out, m, n) + v;
  store_element(args.out, m, n, v);
}

}  // namespace

void sm80_gemm(const Context& context, const GemmArgs& args) {
  if (!aligned_rows(args.a, args.lda) || !aligned_rows(args.b, args.ldb)) {
    return launch("gemm", context, byte_kernel, ceil_div(args.m * args.n, 256), 256, 0, args);
  }
  if (args.k <= int32_safe_k) {
    launch_tiles<MmaInt8, false>(context, args);
  } else {
    launch_tiles<MmaInt8, true>(context, args);
  }
}

void sm80_gemm_token(const Context& context, const GemmTokenArgs& args) {
  launch("gemm", context, token_kernel, ceil_div(args.m * args.n, 256), 256, 0, args);
}

}  // namespace hot::detail
