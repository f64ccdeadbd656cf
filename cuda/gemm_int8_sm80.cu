// Stage: integer product with mma.sync, for every architecture from sm_80 on.
//
// tile_kernel (gemm_sm80.cuh) with mma.m16n8k32.
// byte_kernel: any alignment; one thread for one result. Correct and slow.
// token_kernel: the fp32 product with a scale for each k (LQS), k in ascending order as on the CPU.
#include "cuda/gemm_sm80.cuh"
#include "cuda/launchers.h"

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

void launch_sm80(const Context& context, const plan::Step& step, const GemmArgs& args) {
  if (step.kernel == plan::Kernel::byte) {
    return launch("gemm", context, byte_kernel, step.shape, args);
  }
  if (step.kernel == plan::Kernel::tile_int8) {
    launch_tiles<MmaInt8, false>(context, step.shape, args);
  } else {
    launch_tiles<MmaInt8, true>(context, step.shape, args);
  }
}

void launch_token(const Context& context, const plan::Step& step, const GemmTokenArgs& args) {
  launch("gemm", context, token_kernel, step.shape, args);
}

}  // namespace hot::detail
