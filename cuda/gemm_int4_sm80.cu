// Stage: product of packed INT4 operands with mma.sync (gemm_sm80.cuh), for sm_80, sm_86 and sm_89,
// which have INT4 units. (sm_90 runs the instruction at a thirtieth of its INT8 rate, for tests,
// and later ones have none: there operands are unpacked.)
#include "cuda/backend.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/gemm_sm80.h"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

constexpr std::int64_t int32_safe_k4 = 43826196;  // 49 K <= 2^31 - 1

}  // namespace

bool CudaBackend::gemm_int4(const Context& context, const GemmArgs& args) const {
  const int major = device_attribute(context, cudaDevAttrComputeCapabilityMajor, "gemm_int4");
  const bool wanted = major == 8 || (context.arch() == 80 && mma_int4(10 * major));
  if (!wanted || args.k % 2 != 0 || args.k > int32_safe_k4 || !aligned_rows(args.a, args.lda) ||
      !aligned_rows(args.b, args.ldb)) {
    return false;
  }
  if (args.m == 0 || args.n == 0) return true;
  const DeviceGuard guard(context.device().index, "gemm_int4");
  const MmaProduct product = mma_product(args, MmaCodes::int4);
  mma_gemm(context, args, MmaCodes::int4, mma_choose(mma_device(context), product, false), nullptr);
  return true;
}

}  // namespace hot::detail
