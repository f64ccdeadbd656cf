<<<<<<< HEAD
// Stage: product of packed INT4 operands with mma.sync, for sm_80, sm_86 and sm_89, which have INT4
// units. (sm_90 runs the instruction at a thirtieth of its INT8 rate and later ones have none:
// there operands are unpacked.)
//
// tile_kernel (gemm_sm80.cuh) with mma.m16n8k64: a step of 64 bytes is 128 values.
#include "cuda/gemm_sm80.cuh"
#include "cuda/launchers.h"
=======
// Stage: product of packed INT4 operands with mma.sync (gemm_sm80.cuh), for sm_80, sm_86 and sm_89,
// which have INT4 units. (sm_90 runs the instruction at a thirtieth of its INT8 rate and later ones
// have none: there operands are unpacked.)
#include "cuda/backend.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/gemm_sm80.h"
#include "cuda/launch.h"
>>>>>>> sm80

namespace hot::detail {
namespace {

<<<<<<< HEAD
struct MmaInt4 {
  __device__ static void run(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

}  // namespace

void launch_sm80_int4(const Context& context, const plan::Step& step, const GemmArgs& args) {
  GemmArgs bytes = args;
  bytes.k = args.k / 2;
  launch_tiles<MmaInt4, false>(context, step.shape, bytes);
=======
constexpr std::int64_t int32_safe_k4 = 43826196;  // 49 K <= 2^31 - 1

}  // namespace

bool CudaBackend::gemm_int4(const Context& context, const GemmArgs& args) const {
  const bool units = context.arch() == 80 ||
                     device_attribute(context, cudaDevAttrComputeCapabilityMajor, "gemm_int4") == 8;
  if (!units || args.k % 2 != 0 || args.k > int32_safe_k4 || !aligned_rows(args.a, args.lda) ||
      !aligned_rows(args.b, args.ldb)) {
    return false;
  }
  if (args.m == 0 || args.n == 0) return true;
  const DeviceGuard guard(context.device().index, "gemm_int4");
  const MmaProduct product = mma_product(args, MmaCodes::int4);
  mma_gemm(context, args, MmaCodes::int4, mma_choose(mma_device(context), product, false), nullptr);
  return true;
>>>>>>> sm80
}

}  // namespace hot::detail
