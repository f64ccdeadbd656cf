// Stage: integer product with mma.sync for every architecture from sm_80 on: dispatch of a plan to
// the kernel of its tile (gemm_sm80.cuh).
//
// token_kernel: fp32 product with a scale per k (LQS), k in ascending order as on the CPU. A CTA
// computes tiles of the result, a thread 4 x 4 values of each.
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

// A step of k of a tile's operands in fp32, a row per k. Rows are aligned for reads of 16 bytes. A
// warp writes one of them at a time, so that its writes share no bank.
struct TokenStage {
  static constexpr int pitch = token_product::tile + 4;
  float a[token_product::step][pitch];
  float b[token_product::step][pitch];
};

// A thread's share of a step: codes of one row of each operand, zeros outside. Lanes have rows, and
// warps parts of k. `load` reads a step ahead, and `store` converts.
class TokenCodes {
 public:
  static constexpr int codes = token_product::tile * token_product::step / token_product::threads;
  static_assert(token_product::tile == 32 && codes % 32 == 0);

  __device__ TokenCodes()
      : row_(static_cast<int>(threadIdx.x) % 32), k_(static_cast<int>(threadIdx.x) / 32 * codes) {}

  // K is a multiple of 16, and rows are aligned to 16 bytes.
  __device__ void load(const GemmArgs& args, std::int64_t first_m, std::int64_t first_n,
                       std::int64_t first_k) {
    const std::int64_t m = first_m + row_, n = first_n + row_, first = first_k + k_;
#pragma unroll
    for (int i = 0; i < codes / 16; ++i) {
      const std::int64_t k = first + i * 16;
      a_[i] = load16(args.a + m * args.lda + k, k < args.k && m < args.m);
      b_[i] = load16(args.b + n * args.ldb + k, k < args.k && n < args.n);
    }
#pragma unroll
    for (int i = 0; i < codes / 32; ++i) {
      const std::int64_t k = first + i * 32 + row_;
      scale_[i] = k < args.k ? args.a_scale[k] : 0.0F;
    }
  }
  __device__ void store(TokenStage& stage) const {
#pragma unroll
    for (int i = 0; i < codes; ++i) {
      const float scale = __shfl_sync(0xffffffffU, scale_[i / 32], i % 32);
      stage.a[k_ + i][row_] = code(a_, i) * scale;
      stage.b[k_ + i][row_] = code(b_, i);
    }
  }

 private:
  static __device__ uint4 load16(const std::int8_t* codes_of_row, bool inside) {
    return inside ? *reinterpret_cast<const uint4*>(codes_of_row) : uint4{0, 0, 0, 0};
  }
  static __device__ float code(const uint4* codes_of_row, int i) {
    const uint4& v = codes_of_row[i / 16];
    const unsigned word = i / 4 % 4 == 0 ? v.x : i / 4 % 4 == 1 ? v.y : i / 4 % 4 == 2 ? v.z : v.w;
    return static_cast<float>(static_cast<std::int8_t>(word >> i % 4 * 8));
  }

  int row_, k_;
  uint4 a_[codes / 16], b_[codes / 16];
  float scale_[codes / 32];  // of the warp's part of k, one a lane
};

__global__ void __launch_bounds__(token_product::threads) token_kernel(GemmArgs args) {
  constexpr int tile = token_product::tile, step = token_product::step, part = 4;
  constexpr int side = tile / part;
  static_assert(side * side == token_product::threads);
  __shared__ alignas(16) TokenStage stage;
  begin_kernel();
  const int row = static_cast<int>(threadIdx.x) / side * part;
  const int col = static_cast<int>(threadIdx.x) % side * part;
  const std::int64_t tiles_n = (args.n + tile - 1) / tile;
  const std::int64_t tiles = (args.m + tile - 1) / tile * tiles_n;
  TokenCodes next;
  for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const std::int64_t m = t / tiles_n * tile, n = t % tiles_n * tile;
    float sums[part][part] = {};
    next.load(args, m, n, 0);
    for (std::int64_t k = 0; k < args.k; k += step) {
      next.store(stage);
      __syncthreads();
      if (k + step < args.k) next.load(args, m, n, k + step);
      const int count = static_cast<int>(min(args.k - k, static_cast<std::int64_t>(step)));
      for (int first = 0; first < count; first += 16) {
#pragma unroll
        for (int i = first; i < first + 16; ++i) {
          const float4 va = *reinterpret_cast<const float4*>(&stage.a[i][row]);
          const float4 vb = *reinterpret_cast<const float4*>(&stage.b[i][col]);
          const float a[part] = {va.x, va.y, va.z, va.w}, b[part] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
          for (int j = 0; j < part * part; ++j)
            sums[j / part][j % part] += a[j / part] * b[j % part];
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < part * part; ++i) {
      const std::int64_t out_m = m + row + i / part, out_n = n + col + i % part;
      if (out_m >= args.m || out_n >= args.n) continue;
      float v = sums[i / part][i % part] * args.b_scale[out_n * args.b_scale_step];
      v *= args.inv_divisor;
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
