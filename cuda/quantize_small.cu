// Stages: all operands of a small backward, quantised in one launch.
//
// quantize_small_kernel. Thread blocks of 256 threads in four ranges, long work first: columns of
// w, columns
//   of P g_y (with g_b), rows of g_y, x from INT4. Each range runs the device code of the kernel
//   that does the work alone (lowrank_resident.cuh, quantize.cuh) on its own share of the grid, so
//   that its bytes are theirs; what is spared is launches, each of which takes as long as a few
//   hundred kilobytes.
//     columns  a thread block holds 4 units of 128 tokens of a strip (fp32: 8), and two warps share
//              a unit, a half of its columns each: what takes long here is a warp's own work.
//              Longer strips take the whole cluster, whose size is that of the longest.
//     rows     256 threads share 256 / T rows, T lanes with 2 blocks of 16 elements each.
//     x        a warp takes a channel.
//   One scale for a whole operand needs its largest value first: the same kernel runs once more
//   before, over those operands alone; every thread block leaves its largest value in a slot of its
//   own, and all that round read all slots. No atomics, nothing to zero. The second launch copies
//   what it reads before it waits for the first; neither needs clusters, but for the sums of g_b.
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/lowrank_resident.cuh"
#include "cuda/quantize.cuh"

namespace hot::detail {
namespace {

using resident::Kind;
using resident::Slots;

using small_quantize::row_blocks;
using small_quantize::threads;
using small_quantize::unit_warps;
using Range = plan::SmallRange;

struct SmallArgs {
  resident::Args weight, gradient;
  RowsArgs rows;
  RequantizeArgs groups;
  int row_lanes_log2;
  Range weight_range, gradient_range, rows_range, groups_range;
};

template <Rounding rounding, class Tag>
__device__ __forceinline__ void rows_block(const SmallArgs& args, unsigned block,
                                           std::uint32_t* shared) {
  const int T = 1 << args.row_lanes_log2, thread = static_cast<int>(threadIdx.x);
  const RowsArgs& rows = args.rows;
  if (rows.pass != RowsPass::codes) begin_kernel();  // codes: loads first, as in quantize_strips
  const std::int64_t row =
      std::int64_t{block} * (threads >> args.row_lanes_log2) + (thread >> args.row_lanes_log2);
  quantize_row16<rounding, 16, row_blocks, Tag>(
      rows, row, thread & (T - 1), T, [&](std::uint32_t& amax) {
        if (rows.pass == RowsPass::amax) {
          amax = block_max(amax, shared);
          if (thread == 0) rows.amax[block] = amax;
          return false;
        }
        if (rows.pass == RowsPass::codes) {
          begin_kernel();
          amax = resident::warp_slots_max(rows.amax, static_cast<int>(args.rows_range.blocks));
        } else {
          amax = row_max(amax, T, thread, shared);
        }
        return true;
      });
}

template <Kind kind, Rounding rounding, class Tag>
__global__ void __launch_bounds__(threads, resident::sm_warps / resident::most_warps)
    quantize_small_kernel(const __grid_constant__ SmallArgs args) {
  extern __shared__ __align__(1024) char units[];
  __shared__ std::uint32_t shared[threads / 32];
  unsigned block = blockIdx.x;
  if (block < args.weight_range.end) {
    return resident::quantize_strips<Kind::whole, Rounding::nearest, Tag, Slots::yes,
                                     unit_warps(Tag::size)>(args.weight, block,
                                                            args.weight_range.blocks, units);
  }
  block -= args.weight_range.end;
  if (block < args.gradient_range.end) {
    return resident::quantize_strips<kind, rounding, Tag, Slots::yes, unit_warps(Tag::size)>(
        args.gradient, block, args.gradient_range.blocks, units);
  }
  block -= args.gradient_range.end;
  if (block < args.rows_range.end) return rows_block<rounding, Tag>(args, block, shared);
  block -= args.rows_range.end;
  begin_kernel();
  const std::int64_t channel =
      std::int64_t{block} * (threads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (channel >= args.groups.out.rows) return;
  requantize_channel<rounding>(args.groups, channel, static_cast<int>(threadIdx.x) % 32, 32,
                               [](std::uint32_t v) { return warp_max(v); });
}

}  // namespace

void launch_small(const Context& context, const plan::Step& step, const SmallJobs& jobs) {
  const auto& work = step.as<plan::SmallStep>();
  SmallArgs args{};
  if (jobs.weight != nullptr) {
    args.weight = resident::make_args(context, *jobs.weight, Kind::whole, nullptr);
  }
  if (jobs.columns != nullptr) {
    args.gradient = resident::make_args(context, *jobs.columns, work.kind, jobs.sum);
  }
  if (jobs.rows != nullptr) args.rows = rows_args(context, *jobs.rows);
  if (jobs.groups != nullptr) args.groups = requantize_args(context, *jobs.groups);
  args.row_lanes_log2 = work.row_lanes_log2;
  args.weight_range = work.weight;
  args.gradient_range = work.gradient;
  args.rows_range = work.rows;
  args.groups_range = work.groups;
  args.weight.pass = work.weight_pass;
  args.weight.parts = work.weight_parts;
  args.weight.cluster = work.weight_cluster;
  args.weight.slots = work.weight_slots;
  args.gradient.pass = work.gradient_pass;
  args.gradient.parts = work.gradient_parts;
  args.gradient.cluster = work.gradient_cluster;
  args.gradient.slots = work.gradient_slots;
  args.rows.pass = work.rows_pass;
  resident::with_kind(work.kind, [&](auto kind) {
    host_with_dtype(step.dtype, [&](auto tag) {
      using Tag = decltype(tag);
      constexpr Kind k = decltype(kind)::value;
      launch("backward_linear", context,
             step.rounding == Rounding::nearest
                 ? quantize_small_kernel<k, Rounding::nearest, Tag>
                 : quantize_small_kernel<k, Rounding::stochastic, Tag>,
             step.shape, args);
    });
  });
}

}  // namespace hot::detail
