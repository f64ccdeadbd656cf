// Stage: integer product with mma.sync, for every architecture from sm_80 on: the way from a plan
// to a tile's kernel (gemm_sm80.cuh); and
// token_kernel: the fp32 product with a scale for each k (LQS), k in ascending order as on the CPU.
#include "cuda/gemm_sm80.h"

#include "cuda/device/async_copy.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

using Run = void(const Context&, const GemmArgs&, MmaCodes, const MmaPlan&, void*);
constexpr Run* runs[] = {mma_run<Mma128x256x128>, mma_run<Mma256x128x128>, mma_run<Mma128x256x64>,
                         mma_run<Mma128x128x64>,  mma_run<Mma64x64x64>,    mma_run<MmaAny>};
static_assert(sizeof(runs) / sizeof(runs[0]) == mma_tile_count);

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

MmaDevice mma_device(const Context& context) {
  return {device_attribute(context, cudaDevAttrMultiProcessorCount, "gemm"),
          10 * device_attribute(context, cudaDevAttrComputeCapabilityMajor, "gemm") +
              device_attribute(context, cudaDevAttrComputeCapabilityMinor, "gemm")};
}

MmaProduct mma_product(const GemmArgs& args, MmaCodes codes) {
  const auto out_size = static_cast<std::int64_t>(dtype_size(args.out.dtype));
  constexpr std::int64_t narrow = UINT32_MAX;  // strides of tile_kernel have 32 bits
  const bool int8 = codes == MmaCodes::int8;
  return {args.m,
          args.n,
          int8 ? args.k : ceil_div(args.k, 2),
          aligned_rows(args.a, args.lda) && aligned_rows(args.b, args.ldb) && args.lda < narrow &&
              args.ldb < narrow && args.out.col_stride == 1 &&
              aligned_rows(args.out.data, args.out.row_stride * out_size) &&
              args.n * out_size % 16 == 0,
          int8 && args.k > int32_safe_k,
          !int8};
}

void mma_gemm(const Context& context, const GemmArgs& args, MmaCodes codes, const MmaPlan& plan,
              void* workspace) {
  if (plan.blocks == 0) {
    throw Error(ErrorCode::unsupported, "gemm: too many tiles for one launch");
  }
  runs[plan.tile](context, args, codes, plan, workspace);
}

void sm80_gemm_token(const Context& context, const GemmTokenArgs& args) {
  launch("gemm", context, token_kernel, ceil_div(args.m * args.n, 256), 256, 0, args);
}

}  // namespace hot::detail
