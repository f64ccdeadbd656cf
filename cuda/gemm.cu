// Stage: integer product on CUDA, the choice of a kernel. The instances for sm_90a (wgmma, by
// CUTLASS) take what the tensor memory accelerator can move; everything else, and every other
// architecture, goes to the mma.sync kernels of gemm_sm80.cu.
#include <algorithm>
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/gemm_int8_sm90.h"
#include "cuda/gemm_sm80.h"
#include "cuda/gemm_small.h"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

// Whether products go to wgmma where they can; the others then have no workspace.
bool sm90_here(const Context& context) {
  return sm90_built() && context.arch() != 80 &&
         device_attribute(context, cudaDevAttrComputeCapabilityMajor, "gemm") == 9;
}

bool sm90_can(const Context& context, const GemmArgs& args) {
  if (!sm90_here(context)) return false;
  const auto out_size = static_cast<std::int64_t>(dtype_size(args.out.dtype));
  return args.a_scale != nullptr && args.k > 0 && args.k <= int32_safe_k && args.m < INT32_MAX &&
         args.n < INT32_MAX && args.out.col_stride == 1 && aligned_rows(args.a, args.lda) &&
         aligned_rows(args.b, args.ldb) && args.k % 16 == 0 &&
         aligned_rows(args.out.data, args.out.row_stride * out_size) && args.n * out_size % 16 == 0;
}

// One scale for all, as a vector.
__global__ void spread_kernel(const float* scale, std::int64_t count, float* out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = *scale;
}

// Which instance, and how it goes through the tiles; every number measured (docs/performance.md).
enum class Sm90Kernel { pingpong, wide, stream_k };
struct Sm90Choice {
  Sm90Kernel kernel;
  Sm90Plan plan;
};

constexpr std::int64_t tile = 128, wide_tile = 192;
constexpr std::int64_t stream_k_least_k = 4096;

// Tiles per stripe: as many as the shorter side has use for twice over, where rounding both sides
// up to whole stripes (of clusters, two tiles along N) adds no more than 3 % of tiles.
int swizzle_of(std::int64_t tiles_m, std::int64_t tiles_n) {
  for (int swizzle = 8; swizzle > 1; swizzle /= 2) {
    const std::int64_t padded = round_up(tiles_m, swizzle) * round_up(tiles_n, 2 * swizzle);
    if (std::min(tiles_m, tiles_n) >= 2 * swizzle && padded * 100 <= tiles_m * tiles_n * 103) {
      return swizzle;
    }
  }
  return 1;
}

Sm90Choice sm90_choice(std::int64_t m, std::int64_t n, std::int64_t k, int sm_count,
                       bool has_wide) {
  const std::int64_t tiles_m = ceil_div(m, tile), tiles_n = ceil_div(n, tile);
  const std::int64_t tiles = tiles_m * tiles_n;
  // Fewer than two waves of tiles, but not nearly one, and a long contraction (g_w of a ViT): it is
  // shared out. With a third of a wave or less, equal parts beat CUTLASS's own division.
  const bool nearly_a_wave = tiles * 4 >= std::int64_t{3} * sm_count && tiles <= sm_count;
  if (k >= stream_k_least_k && tiles < std::int64_t{2} * sm_count && !nearly_a_wave) {
    const int splits =
        tiles * 3 <= sm_count ? static_cast<int>(std::min<std::int64_t>(sm_count / tiles, 6)) : 1;
    return {Sm90Kernel::stream_k, {sm_count, splits == 1, 1, splits}};
  }
  // One operand is narrow (g_x of a ViT): stripes gain nothing, a wider tile does, where it does
  // not cost more waves than its 6 % make good. Clusters are whole: two tiles along N, or along M.
  constexpr std::int64_t narrow = 32;  // tiles
  const auto waves = [&](std::int64_t count) { return ceil_div(count, sm_count); };
  const std::int64_t usual = waves(tiles_m * round_up(tiles_n, 2)) * tile;
  const std::int64_t wide = waves(round_up(tiles_m, 2) * ceil_div(n, wide_tile)) * wide_tile;
  if (has_wide && std::min(tiles_m, tiles_n) < narrow && m >= n && wide * 94 <= usual * 100) {
    return {Sm90Kernel::wide, {sm_count, false, 1, 1}};
  }
  const int swizzle = swizzle_of(tiles_m, tiles_n);
  return {Sm90Kernel::pingpong, {sm_count, swizzle > 1 || n > m, swizzle, 1}};
}

struct Sm90Instances {
  Sm90Pingpong *pingpong, *wide;  // wide: null: none
  Sm90StreamK* stream_k;          // null: none
};

// Wide tiles for what g_x is, stream-K for what g_w is; fp16 ones are rare, with autocast they are
// fp32.
Sm90Instances sm90_instances(DType out, bool accumulate) {
  switch (out) {
    case DType::bf16:
      return accumulate ? Sm90Instances{sm90_gemm_bf16_128x128_accumulate, nullptr,
                                        sm90_gemm_bf16_stream_k_accumulate}
                        : Sm90Instances{sm90_gemm_bf16_128x128, sm90_gemm_bf16_128x192,
                                        sm90_gemm_bf16_stream_k};
    case DType::f16:
      return {accumulate ? sm90_gemm_f16_128x128_accumulate : sm90_gemm_f16_128x128, nullptr,
              nullptr};
    default:
      return accumulate ? Sm90Instances{sm90_gemm_f32_128x128_accumulate, nullptr,
                                        sm90_gemm_f32_stream_k_accumulate}
                        : Sm90Instances{sm90_gemm_f32_128x128, sm90_gemm_f32_128x192,
                                        sm90_gemm_f32_stream_k};
  }
}

void sm90_gemm(const Context& context, const GemmArgs& args, void* workspace) {
  const int sm_count = device_attribute(context, cudaDevAttrMultiProcessorCount, "gemm");
  GemmArgs spread = args;
  auto* vectors = static_cast<float*>(workspace);
  if (args.a_scale_step == 0) {
    launch("gemm", context, spread_kernel, ceil_div(args.m, 256), 256, 0, args.a_scale, args.m,
           vectors);
    spread.a_scale = vectors;
  }
  vectors += round_up(args.m, 64);
  if (args.b_scale_step == 0) {
    launch("gemm", context, spread_kernel, ceil_div(args.n, 256), 256, 0, args.b_scale, args.n,
           vectors);
    spread.b_scale = vectors;
  }
  vectors += round_up(args.n, 64);
  const Sm90Instances instances = sm90_instances(args.out.dtype, args.accumulate);
  const Sm90Choice choice =
      sm90_choice(args.m, args.n, args.k, sm_count, instances.wide != nullptr);
  if (choice.kernel == Sm90Kernel::stream_k && instances.stream_k != nullptr) {
    instances.stream_k(context, spread, choice.plan, vectors);
  } else if (choice.kernel == Sm90Kernel::wide) {
    instances.wide(context, spread, choice.plan);
  } else {
    instances.pingpong(context, spread, choice.plan);
  }
}

}  // namespace

// wgmma: the scales as vectors, where they are single numbers, and what stream-K adds up in.
// mma.sync: the sums of tiles that thread blocks share.
std::size_t CudaBackend::gemm_workspace(const Context& context, std::int64_t m, std::int64_t n,
                                        std::int64_t k) const {
  if (m <= 0 || n <= 0 || m >= INT32_MAX || n >= INT32_MAX || k > int32_safe_k) return 0;
  const DeviceGuard guard(context.device().index, "gemm");
  if (!sm90_here(context)) {
    return mma_workspace(mma_choose(mma_device(context), {m, n, k, true, false}, true));
  }
  std::size_t bytes = static_cast<std::size_t>(round_up(m, 64) + round_up(n, 64)) * sizeof(float);
  const int sm_count = device_attribute(context, cudaDevAttrMultiProcessorCount, "gemm");
  const Sm90Choice choice = sm90_choice(m, n, k, sm_count, false);
  if (choice.kernel == Sm90Kernel::stream_k) {
    GemmArgs args{};
    args.m = m;
    args.n = n;
    args.k = args.lda = args.ldb = k;
    args.out.row_stride = n;
    bytes += sm90_stream_k_workspace(context, args, choice.plan);
  }
  return bytes;
}

void CudaBackend::gemm(const Context& context, const GemmArgs& args, void* workspace) const {
  if (args.m == 0 || args.n == 0) return;
  const DeviceGuard guard(context.device().index, "gemm");
  if (sm90_can(context, args)) return sm90_gemm(context, args, workspace);
  const MmaProduct product = mma_product(args, MmaCodes::int8);
  const bool may_share = !sm90_here(context) && args.m < INT32_MAX && args.n < INT32_MAX;
  mma_gemm(context, args, MmaCodes::int8, mma_choose(mma_device(context), product, may_share),
           workspace);
}

// Above this many multiply-adds the kernels for large products are as fast, launch by launch.
// Measured: docs/performance.md.
constexpr std::int64_t small_most_work = std::int64_t{1} << 30;

void CudaBackend::gemms(const Context& context, const GemmArgs* products, void* const* workspaces,
                        int count) const {
  const DeviceGuard guard(context.device().index, "gemm");
  std::int64_t work = 0;
  for (int i = 0; i < count; ++i) work += products[i].m * products[i].n * products[i].k;
  if (work <= small_most_work && small_gemms_can(context, products, count)) {
    return small_gemms(context, products, count);
  }
  for (int i = 0; i < count; ++i) gemm(context, products[i], workspaces[i]);
}

void CudaBackend::gemm_token(const Context& context, const GemmTokenArgs& args, void*) const {
  if (args.m == 0 || args.n == 0) return;
  const DeviceGuard guard(context.device().index, "gemm");
  sm80_gemm_token(context, args);
}

}  // namespace hot::detail
