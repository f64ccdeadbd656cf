// Stage: K-contiguous operands from columns, in blocks of 16 tokens: g_y for g_w, w for g_x, x
// saved as INT8. P x is an FWHT of the tokens, a sketch or a basis of rank 8, or x itself.
// Equalised tokens are multiplied by a power of two each.
//
// columns_one_pass_kernel: one read of x.
//   A cluster keeps a column tile in shared memory: 64 bytes of every token (32 columns in 16-bit
//   types, two sectors). Its CTAs reduce the largest values through the cluster's shared memory.
//   They write the codes from the same bytes. In 16-bit types P x of rank 8 replaces its tokens (16
//   values in fp32 for 32 tokens, by the same lane). Otherwise P x is computed twice.
//   * work: A warp owns a token tile of 128 tokens (8 KB). It waits for its
//     own copies (cp.async), finds the largest values, passes two barriers and writes the codes.
//     Two or three CTAs on an SM overlap these phases. A cluster ends with its column tile, so the
//     GPU hands out the next one as soon as any cluster has ended.
//   * lanes: A lane keeps 16 k (a k16) of two neighbouring columns in registers. These are 16
//     tokens (full), a whole block (w for g_x), or two blocks of rank 8. A sketch first folds to 8
//     values: it reads tokens t and t ^ a, so no register is indexed at run time. The bases lowpass
//     and sequency keep 8 fixed rows.
//   * banks: Bits 5 and 6 of an address are swizzled by the number of the k16 (16 tokens, or 32 at
//     rank 8). The four k16 of a warp then use all banks. Every block starts at a multiple of 1024
//     bytes, so that tokens are addressed by exclusive or.
//   * stores: A warp writes 64 contiguous bytes of each of 16 channels from registers.
//   * traffic: In 16-bit types 2 bytes read and 1 (rank 8: 0.5) written per element, the minimum.
//     The sum g_b costs no read: row 0 of a block is the sum of its tokens.
//
// column_amax_kernel, column_codes_kernel: two reads, if a cluster cannot hold a column tile.
//   The first computes the largest values (atomicMax). The second writes the codes in the opposite
//   order, which finds the end of x in the L2 cache. They serve devices without clusters (before
//   sm_90), a single scale, and more than 8,192 tokens. Clusters of 16 CTAs find no place while
//   another kernel holds some SMs.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize_columns.cuh"

namespace hot::detail {
namespace columns {

Args make_args(const Context& context, const Work& work, const Operand& job,
               ColumnTransform transform, bool sum) {
  const Projection& p = job.transform;
  Args args{};
  args.x = job.x;
  args.order = p.order;
  args.body_tokens = p.body_tokens;
  args.fold = p.basis == Basis::sketch              ? drawn_fold
              : p.rows.size() > 1 && p.rows[1] == 2 ? sequency_fold
                                                    : 0;
  args.sketch_weight = p.sketch_weight;
  args.sketch = device_key(job.sketch_key, Purpose::sketch);
  args.key = device_key(context.key(), job.quant.purpose);
  args.out = job.out;
  args.token_tiles = token_tiles(p, transform);
  args.bits = job.quant.bits;
  args.per_tensor = job.quant.per_tensor;
  args.contiguous = plan::rows_aligned(job.x) && p.order.samples == 0;
  args.sum_wanted = sum && job.sum;
  if (args.sum_wanted) {
    args.sum = work.sum.out;
    args.sum_accumulate = work.sum.accumulate;
    args.partial_sums = work.sum.workspace;
  }
  args.column_tiles = column_tiles(job.x.cols, job.x.dtype);
  return args;
}

}  // namespace columns

namespace {

using namespace columns;

// Quantises with one read of x: a cluster holds a column tile.
template <ColumnTransform transform, class Tag>
__global__ void __launch_bounds__(32 * max_warps, sm_ctas(transform, Tag::size, Pass::both))
    columns_one_pass_kernel(const __grid_constant__ Args args) {
#if HOT_HOPPER_CODE
  extern __shared__ __align__(1024) char memory[];
  // True if a k16 fits the memory of its tokens. Then P x is computed once.
  constexpr bool in_place = fits_in_place(transform, Tag::size);
  const WarpTile<transform, Tag, 1> tile(args, place_in_cluster(args, blockIdx.x), memory);
  tile.draw_folds();
  // All CTAs must have started before one writes to another's shared memory.
  if (args.cluster > 1) arrive_cluster();
  begin_kernel(args.independent);
  tile.load();
  tile.load_factors();
  const DeviceOffset offset = warp_offset<rounding_of(transform)>(args.key);
  tile.wait_loaded();
  tile.template accumulate_tile<in_place>();
  if (args.cluster > 1) wait_cluster();
  const ColumnTotal total = tile.total(tile.reduce(args.cluster), args.cluster);
  const DeviceScale scale = device_scale(total.amax, args.bits);
  if (tile.writes_column()) {
    tile.write_scale(scale);
    if (args.sum_wanted) tile.write_sum(total.sum);
  }
  tile.template write_codes<in_place>(scale, offset);
  end_kernel(args.independent);
#endif
}

// First of two passes: largest values, and partial sums of g_b.
template <ColumnTransform transform, class Tag>
__global__ void __launch_bounds__(32 * two_pass_warps, sm_ctas(transform, Tag::size, Pass::amax))
    column_amax_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char memory[];
  const Place place = place_in_row(args, blockIdx.x);
  const WarpTile<transform, Tag, 1> tile(args, place, memory);
  tile.draw_folds();
  begin_kernel(args.independent);
  tile.load();
  tile.load_factors();
  tile.wait_loaded();
  tile.template accumulate_tile<false>();
  const ColumnTotal total = tile.total(tile.reduce(0), 0);
  if (tile.warp() == 0 && tile.has_column()) {
    const std::int64_t column = tile.column();
    atomic_max(args.out.amax + (args.per_tensor ? 0 : column), total.amax);
    if (args.sum_wanted) {
      args.partial_sums[place.rank * args.x.cols + column] = static_cast<float>(total.sum);
    }
  }
  end_kernel(args.independent);
}

// Second pass: codes. It goes backwards through x, because the L2 cache still holds the end.
template <ColumnTransform transform, class Tag>
__global__ void __launch_bounds__(32 * two_pass_warps, sm_ctas(transform, Tag::size, Pass::codes))
    column_codes_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char memory[];
  const WarpTile<transform, Tag, 1> tile(args, place_in_row(args, gridDim.x - 1 - blockIdx.x),
                                         memory);
  tile.draw_folds();
  begin_kernel(args.independent);
  tile.load();
  tile.load_factors();
  const DeviceOffset offset = warp_offset<rounding_of(transform)>(args.key);
  tile.wait_loaded();
  std::uint32_t amax = 0;
  if (tile.has_column()) {
    amax = args.out.amax[args.per_tensor ? 0 : tile.column()];
  }
  const DeviceScale scale = device_scale(amax, args.bits);
  if (tile.writes_column()) tile.write_scale(scale);
  tile.template write_codes<false>(scale, offset);
  end_kernel(args.independent);
}

}  // namespace

void launch_columns(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::ColumnsStep>();
  Args args = make_args(context, work, work.operands.at(part.of, Along::column), part.transform,
                        part.pass != Pass::codes);
  args.ctas = part.ctas;
  args.cluster = part.cluster;
  args.independent = step.independent;
  with_constant<ColumnTransform::full, ColumnTransform::factored>(part.transform, [&](auto t) {
    constexpr ColumnTransform transform = decltype(t)::value;
    with_dtype(step.dtype, [&](auto tag) {
      using Tag = decltype(tag);
      launch("backward_linear", context,
             part.pass == Pass::both   ? columns_one_pass_kernel<transform, Tag>
             : part.pass == Pass::amax ? column_amax_kernel<transform, Tag>
                                       : column_codes_kernel<transform, Tag>,
             step.shape, args);
    });
  });
}

}  // namespace hot::detail
