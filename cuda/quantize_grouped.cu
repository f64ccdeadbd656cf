// Stage: all operands of a small layer, quantised in one launch.
//
// quantize_grouped_kernel: CTAs of 256 threads in four ranges, longest work first.
//   The ranges are columns of w, columns of P g_y (with g_b), rows of g_y, and x from INT4. A range
//   runs the device code of the separate kernel (quantize_columns.cuh, quantize_rows.cuh,
//   int4_activation.cuh) on its share of the grid and writes the same bytes. This saves launches.
//   Each launch costs as much time as a few hundred kilobytes.
//   * columns: A CTA holds 4 token tiles of a column tile (fp32: 8). Two warps share a token tile,
//     with half of its columns each, because the work of a warp limits the time. Longer column
//     tiles take a whole cluster, whose size is that of the longest.
//   * rows: 256 threads share 256 / T rows, T lanes with 2 blocks of 16 elements each.
//   * x: A warp takes a channel.
//   * single scales: The kernel first runs over the operands with a single scale, for the largest
//     values. Every CTA writes its largest value to its own slot, and the CTAs of the second launch
//     read all slots: no atomics, no zeroing. The second launch starts its copies before it waits
//     for the first. Neither launch needs clusters, except for the sums of g_b.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/int4_activation.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize_columns.cuh"
#include "cuda/quantize_rows.cuh"

namespace hot::detail {
namespace {

using namespace grouped;
using columns::ColumnTransform;

// Range that quantises the columns of an operand.
struct ColumnsRange : plan::GroupedOperand {
  columns::Args args;
};

struct GroupedArgs {
  ColumnsRange weight, gradient;
  RowsArgs rows;
  RequantizeArgs groups;
  int row_lanes_log2;
  plan::GroupedRange rows_range;
  std::uint32_t* counter;  // of tiles, to be zeroed, or null
};

// Maximum of the slots; every lane of the warp gets it.
__device__ inline std::uint32_t slots_max(const std::uint32_t* slots, int count) {
  std::uint32_t amax = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) amax = max(amax, slots[i]);
  return warp_max(amax);
}

template <ColumnTransform transform, class Tag>
__device__ __forceinline__ void columns_block(const ColumnsRange& operand, unsigned block,
                                              char* memory) {
  if (block >= operand.range.blocks) return begin_kernel();  // CTA that only fills the last cluster
  const columns::Args& args = operand.args;
  const columns::WarpTile<transform, Tag, tile_warps(Tag::size)> tile(
      args, columns::place_in_cluster(args, block), memory);
  tile.draw_folds();
  // The second of two launches copies before it waits. The first launch has already waited for the
  // kernels that make the matrix, and the slots are read later.
  const bool waits_late = operand.pass == Pass::codes;
  // All CTAs must have started before one writes to another's shared memory.
  const bool reduces = args.cluster > 1 && operand.pass != Pass::codes;
  if (reduces) arrive_cluster();
  if (!waits_late) begin_kernel();
  tile.load();
  if (waits_late) begin_kernel();
  const DeviceOffset offset = warp_offset<columns::rounding_of(transform)>(args.key);
  tile.wait_loaded();
  columns::ColumnTotal total;
  if (operand.pass == Pass::codes) {
    total.amax = slots_max(args.out.amax, static_cast<int>(operand.range.blocks));
  } else {
    tile.template accumulate_tile<false>();
    if (reduces) wait_cluster();
    total = tile.total(tile.reduce(args.cluster), args.cluster);
    if (args.sum_wanted && tile.writes_column()) {
      tile.write_sum(total.sum);
    }
  }
  if (operand.pass == Pass::amax) {
    if (tile.warp() == 0) {
      const std::uint32_t amax = warp_max(total.amax);
      if (tile.lane() == 0) args.out.amax[block] = amax;
    }
    return;
  }
  const DeviceScale scale = device_scale(total.amax, args.bits);
  if (tile.writes_column()) tile.write_scale(scale);
  tile.template write_codes<false>(scale, offset);
}

template <class Tag>
__device__ __forceinline__ void rows_block(const GroupedArgs& args, unsigned block,
                                           std::uint32_t* shared) {
  const int T = 1 << args.row_lanes_log2, thread = static_cast<int>(threadIdx.x);
  const RowsArgs& rows = args.rows;
  if (rows.pass != Pass::codes) begin_kernel();  // codes: waits later, see columns_block
  const std::int64_t row =
      std::int64_t{block} * (threads >> args.row_lanes_log2) + (thread >> args.row_lanes_log2);
  quantize_row16<gradient_block, row_blocks, Tag>(
      rows, row, thread & (T - 1), T, [&](std::uint32_t& amax) {
        if (rows.pass == Pass::amax) {
          amax = block_max(amax, shared);
          if (thread == 0) rows.amax[block] = amax;
          return false;
        }
        if (rows.pass == Pass::codes) {
          begin_kernel();
          amax = slots_max(rows.amax, static_cast<int>(args.rows_range.blocks));
        } else {
          amax = row_max(amax, T, thread & (T - 1), shared);
        }
        return true;
      });
}

template <ColumnTransform transform, class Tag>
__global__ void __launch_bounds__(threads, columns::min_sm_warps / columns::max_warps)
    quantize_grouped_kernel(const __grid_constant__ GroupedArgs args) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ std::uint32_t shared[threads / 32];
  if (args.counter != nullptr && blockIdx.x == 0) {  // blocks begin their kernel later
    wait_for_previous_kernel();
    zero_counter(args.counter);
  }
  unsigned block = blockIdx.x;
  if (block < args.weight.range.end) {
    return columns_block<ColumnTransform::hadamard, Tag>(args.weight, block, memory);
  }
  block -= args.weight.range.end;
  if (block < args.gradient.range.end) {
    return columns_block<transform, Tag>(args.gradient, block, memory);
  }
  block -= args.gradient.range.end;
  if (block < args.rows_range.end) return rows_block<Tag>(args, block, shared);
  block -= args.rows_range.end;
  begin_kernel();
  const std::int64_t channel =
      std::int64_t{block} * (threads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (channel >= args.groups.out.rows) return;
  requantize_channel(args.groups, channel, static_cast<int>(threadIdx.x) % 32, 32,
                     [](std::uint32_t v) { return warp_max(v); });
}

}  // namespace

void launch_grouped(const Context& context, const plan::Step& step, const Work& work) {
  const auto& parts = step.as<plan::GroupedStep>();
  const Operands& all = work.operands;
  GroupedArgs args{};
  const auto columns = [&](const Operand* job, const plan::GroupedOperand& part,
                           ColumnTransform transform) {
    ColumnsRange operand{part, {}};
    if (job != nullptr) operand.args = columns::make_args(context, work, *job, transform, true);
    operand.args.ctas = part.ctas;
    operand.args.cluster = part.cluster;
    return operand;
  };
  args.weight =
      columns(all.find(Source::w, Along::column), parts.weight, ColumnTransform::hadamard);
  args.gradient = columns(all.find(Source::gy, Along::column), parts.gradient, parts.transform);
  if (const Operand* job = all.find(Source::gy, Along::row)) args.rows = rows_args(context, *job);
  if (const Operand* job = all.find(Source::x, Along::column, From::groups)) {
    args.groups = requantize_args(context, *job);
  }
  args.row_lanes_log2 = parts.row_lanes_log2;
  args.rows_range = parts.rows.range;
  args.rows.pass = parts.rows.pass;
  args.counter = counter_to_zero(step, work);
  const auto run = [&](auto tag) {
    using Tag = decltype(tag);
    launch("backward_linear", context,
           parts.transform == ColumnTransform::projected
               ? quantize_grouped_kernel<ColumnTransform::projected, Tag>
               : quantize_grouped_kernel<ColumnTransform::full, Tag>,
           step.shape, args);
  };
  step.dtype == DType::f32 ? run(F32{}) : run(BF16{});
}

}  // namespace hot::detail
