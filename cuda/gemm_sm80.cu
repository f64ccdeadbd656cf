// Stage: integer product with mma.sync for every architecture from sm_80 on: dispatch of a plan to
// the kernel of its tile (gemm_sm80.cuh).
//
// token_kernel: fp32 product with a scale per k (LQS), k in ascending order as on the CPU.
#include "cuda/gemm_sm80.h"

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

using Run = void(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, MmaPart, void*);
constexpr Run* runs[] = {mma_run<Mma128x256x128>, mma_run<Mma256x128x128>, mma_run<Mma128x256x64>,
                         mma_run<Mma128x128x64>,  mma_run<Mma64x64x64>,    mma_run<MmaAny>};
static_assert(sizeof(runs) / sizeof(runs[0]) == mma_tile_count);

__global__ void token_kernel(GemmArgs args) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.m * args.n) return;
  const std::int64_t m = i / args.n, n = i % args.n;
  float acc = 0.0F;
  for (std::int64_t k = 0; k < args.k; ++k) {
    const float a = static_cast<float>(args.a[m * args.lda + k]) * args.a_scale[k];
    acc += a * static_cast<float>(args.b[n * args.ldb + k]);
  }
  float v = acc * args.b_scale[n * args.b_scale_step] * args.inv_divisor;
  if (args.accumulate) v = load_element(args.out.contents(), m, n) + v;
  store_element(args.out, m, n, v);
}

}  // namespace

void mma_gemm(const Context& context, const GemmArgs& args, MmaCodes codes, const MmaPlan& plan,
              MmaPart part, void* workspace) {
  runs[plan.tile](context, args, codes, plan, part, workspace);
}

void launch_mma(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::ProductStep>();
  const WorkProduct& product = work.products[part.product];
  if (part.mma.blocks == 0) {
    throw Error(ErrorCode::unsupported, "gemm: too many tiles for one launch");
  }
  mma_gemm(context, product.args, part.int4 ? MmaCodes::int4 : MmaCodes::int8, part.mma,
           step.kernel == plan::Kernel::mma_fixup ? MmaPart::fixup : MmaPart::tiles,
           product.scratch);
}

void launch_token(const Context& context, const plan::Step& step, const Work& work) {
  launch("gemm", context, token_kernel, step.shape,
         work.products[step.as<plan::ProductStep>().product].args);
}

}  // namespace hot::detail
