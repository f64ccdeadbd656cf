// Stage: integer product with mma.sync for every architecture from sm_80 on: dispatch of a plan to
// the kernel of its tile (gemm_sm80.cuh).
//
// token_kernel: fp32 product with a scale per k (LQS), k in ascending order as on the CPU. A CTA
// computes tiles of the result, a thread 2 x 2 values of each.
#include "cuda/gemm_sm80.h"

#include <cstdint>

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

// A step of k of a tile's operands in fp32, a row per k. Two more columns put the rows that a warp
// writes into different banks.
struct TokenStage {
  float a[token_product::step][token_product::tile + 2];
  float b[token_product::step][token_product::tile + 2];
};

// A thread's share of a step: four codes of one row of each operand, zeros outside. They are
// converted in `store`, so that their loads run while the previous step is computed.
class TokenCodes {
 public:
  static constexpr int codes = token_product::tile * token_product::step / token_product::threads;
  static_assert(codes == 4 && k_alignment % codes == 0);

  __device__ TokenCodes()
      : row_(static_cast<int>(threadIdx.x) / (token_product::step / codes)),
        k_(static_cast<int>(threadIdx.x) % (token_product::step / codes) * codes) {}

  // K is a multiple of 16, and rows are aligned to 16 bytes.
  __device__ void load(const GemmArgs& args, std::int64_t first_m, std::int64_t first_n,
                       std::int64_t first_k) {
    const std::int64_t m = first_m + row_, n = first_n + row_, k = first_k + k_;
    const bool inside = k < args.k;
    a_ = inside && m < args.m ? *reinterpret_cast<const unsigned*>(args.a + m * args.lda + k) : 0;
    b_ = inside && n < args.n ? *reinterpret_cast<const unsigned*>(args.b + n * args.ldb + k) : 0;
#pragma unroll
    for (int i = 0; i < codes; ++i) scale_[i] = inside ? args.a_scale[k + i] : 0.0F;
  }
  __device__ void store(TokenStage& stage) const {
#pragma unroll
    for (int i = 0; i < codes; ++i) {
      stage.a[k_ + i][row_] = code(a_, i) * scale_[i];
      stage.b[k_ + i][row_] = code(b_, i);
    }
  }

 private:
  static __device__ float code(unsigned codes_of_row, int i) {
    return static_cast<float>(static_cast<std::int8_t>(codes_of_row >> 8 * i));
  }

  int row_, k_;
  unsigned a_ = 0, b_ = 0;
  float scale_[codes];
};

__global__ void __launch_bounds__(token_product::threads) token_kernel(GemmArgs args) {
  constexpr int tile = token_product::tile, step = token_product::step, side = tile / 2;
  static_assert(side * side == token_product::threads);
  __shared__ TokenStage stages[2];
  begin_kernel();
  const int row = static_cast<int>(threadIdx.x) / side * 2;
  const int col = static_cast<int>(threadIdx.x) % side * 2;
  const std::int64_t tiles_n = (args.n + tile - 1) / tile;
  const std::int64_t tiles = (args.m + tile - 1) / tile * tiles_n;
  TokenCodes next;
  for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const std::int64_t m = t / tiles_n * tile, n = t % tiles_n * tile;
    float sums[2][2] = {};
    next.load(args, m, n, 0);
    int current = 0;
    for (std::int64_t k = 0; k < args.k; k += step, current ^= 1) {
      const TokenStage& stage = stages[current];
      next.store(stages[current]);
      __syncthreads();  // the other stage was read before its last barrier
      if (k + step < args.k) next.load(args, m, n, k + step);
#pragma unroll
      for (int i = 0; i < step; ++i) {
        const float2 a = *reinterpret_cast<const float2*>(&stage.a[i][row]);
        const float2 b = *reinterpret_cast<const float2*>(&stage.b[i][col]);
        sums[0][0] += a.x * b.x;
        sums[0][1] += a.x * b.y;
        sums[1][0] += a.y * b.x;
        sums[1][1] += a.y * b.y;
      }
    }
    __syncthreads();  // the next tile begins with either stage
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t out_m = m + row + i / 2, out_n = n + col + i % 2;
      if (out_m >= args.m || out_n >= args.n) continue;
      float v = sums[i / 2][i % 2] * args.b_scale[out_n * args.b_scale_step] * args.inv_divisor;
      if (args.accumulate) v = load_element(args.out.contents(), out_m, out_n) + v;
      store_element(args.out, out_m, out_n, v);
    }
  }
}

}  // namespace

void mma_gemm(const Context& context, const GemmArgs& args, MmaCodes codes, const MmaPlan& plan,
              MmaPart part, void* workspace) {
  runs[plan.tile](context, args, codes, plan, part, workspace);
}

void launch_mma(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::ProductStep>();
  const WorkProduct& product = work.products[part.product];
  mma_gemm(context, product.args, part.int4 ? MmaCodes::int4 : MmaCodes::int8, part.mma,
           step.kernel == plan::Kernel::mma_fixup ? MmaPart::fixup : MmaPart::tiles,
           product.scratch);
}

void launch_token(const Context& context, const plan::Step& step, const Work& work) {
  launch("gemm", context, token_kernel, step.shape,
         work.products[step.as<plan::ProductStep>().product].args);
}

}  // namespace hot::detail
