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
#include "cuda/quantize_small.h"

#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/lowrank_resident.cuh"
#include "cuda/lowrank_resident.h"
#include "cuda/quantize.cuh"

namespace hot::detail {
namespace {

using resident::Kind;
using resident::Slots;

constexpr int threads = 32 * resident::most_warps;
// Warps of a unit, one for 16 columns: strips of 16-bit types have 32.
constexpr int unit_warps(int dtype_size) { return dtype_size == 2 ? 2 : 1; }
constexpr int row_blocks = 2;  // blocks of 16 of a lane
// More waves of thread blocks than this hide a launch by themselves.
constexpr int most_waves = 4;

// A range of thread blocks: whole clusters, `blocks` of which have work.
struct Range {
  unsigned blocks = 0, end = 0;
};

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
  quantize_row16<rounding, row_blocks, Tag>(
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

// The operands as kernels take them, and how each is shared out.
struct Plan {
  SmallArgs args{};
  Kind kind = Kind::full;
  Rounding rounding = Rounding::nearest;
  DType dtype = DType::f32;
  int cluster = 1;
  std::int64_t weight_blocks = 0, gradient_blocks = 0, rows_blocks = 0, groups_blocks = 0;
};

// Whether all that the jobs have in common is the same.
class Agreement {
 public:
  explicit Agreement(Plan& plan) : plan_(plan) {}
  bool dtype(DType dtype) { return same(plan_.dtype, dtype, has_dtype_); }
  bool rounding(Rounding rounding) {
    return rounding != Rounding::pseudo_stochastic && same(plan_.rounding, rounding, has_rounding_);
  }

 private:
  template <class T>
  static bool same(T& agreed, T value, bool& has) {
    if (!has) agreed = value;
    has = true;
    return agreed == value;
  }
  Plan& plan_;
  bool has_dtype_ = false, has_rounding_ = false;
};

// Units that a thread block holds.
int block_units(DType dtype) {
  return resident::most_warps / unit_warps(static_cast<int>(dtype_size(dtype)));
}

bool plan_columns(const Context& context, const ColumnsJob& job, Plan& plan, resident::Args& args,
                  Kind& kind) {
  if (job.out.k_padded == 0 || !resident_can(*job.projection, job.quant) ||
      !resident::kind_of(*job.projection, kind)) {
    return false;
  }
  args = resident::make_args(context, job.x, *job.projection, kind, job.side, job.sketch_key,
                             job.quant, job.out, job.sum);
  args.independent = false;
  const std::int64_t parts = ceil_div(args.units, block_units(job.x.dtype));
  if (parts > resident::most_parts) return false;
  plan.cluster = std::max(plan.cluster, static_cast<int>(parts));
  return true;
}

// A strip that fits in one thread block keeps to it; another takes a cluster.
std::int64_t share_columns(int cluster, resident::Args& args) {
  args.parts = args.cluster = args.units > block_units(args.x.dtype) ? cluster : 1;
  return args.strips * args.parts;
}

bool plan_operands(const Context& context, const BackwardOperands& operands, Plan& plan) {
  Agreement agreed(plan);
  Kind weight_kind{};
  if (const ColumnsJob* job = operands.weight) {
    if (!agreed.dtype(job->x.dtype) || job->quant.rounding != Rounding::nearest ||
        !plan_columns(context, *job, plan, plan.args.weight, weight_kind) ||
        weight_kind != Kind::whole) {
      return false;
    }
  }
  if (const ColumnsJob* job = operands.gradient_columns) {
    if (!agreed.dtype(job->x.dtype) || !agreed.rounding(job->quant.rounding) ||
        !plan_columns(context, *job, plan, plan.args.gradient, plan.kind)) {
      return false;
    }
  }
  if (const RowsJob* job = operands.gradient_rows) {
    const std::int64_t row_groups = job->out.k_padded / 16;
    if (!agreed.dtype(job->x.dtype) || !agreed.rounding(job->quant.rounding) ||
        job->hadamard_block != 16 || row_groups == 0 || row_groups > row_blocks * threads) {
      return false;
    }
    plan.args.rows = rows_args(context, job->x, 16, job->quant, job->out);
    int lanes_log2 = 0;
    while ((row_blocks << lanes_log2) < row_groups) ++lanes_log2;
    plan.args.row_lanes_log2 = lanes_log2;
    plan.rows_blocks = ceil_div(job->x.rows, threads >> lanes_log2);
  }
  if (const GroupsJob* job = operands.activation) {
    if (!agreed.rounding(job->rounding)) return false;
    plan.args.groups =
        requantize_args(context, job->packed, job->row_bytes, job->scale, job->tokens, job->out);
    plan.groups_blocks = ceil_div(job->out.rows, threads / 32);
  }
  const char* const stage = "backward_linear";
  // Only where the code that runs surely knows clusters, which is where it knows how to overlap.
  if (plan.cluster > 1 && (context.arch() == 80 || !kernels_overlap(context, stage))) {
    return false;
  }
  plan.weight_blocks =
      operands.weight == nullptr ? 0 : share_columns(plan.cluster, plan.args.weight);
  plan.gradient_blocks =
      operands.gradient_columns == nullptr ? 0 : share_columns(plan.cluster, plan.args.gradient);
  const std::int64_t most = std::int64_t{most_waves} * resident::sm_warps / resident::most_warps *
                            device_attribute(context, cudaDevAttrMultiProcessorCount, stage);
  return plan.weight_blocks <= small_slots && plan.gradient_blocks <= small_slots &&
         plan.rows_blocks <= small_slots &&
         plan.weight_blocks + plan.gradient_blocks + plan.rows_blocks + plan.groups_blocks <= most;
}

// One launch: some of the operands, each in its pass.
class Launch {
 public:
  // `exchanges`: whether the thread blocks of a strip tell each other what they find.
  Launch(const Plan& plan, bool exchanges)
      : args(plan.args), plan_(plan), cluster_(exchanges ? plan.cluster : 1) {}

  SmallArgs args;

  // Gives a range its thread blocks.
  void take(Range& range, std::int64_t blocks) {
    range.blocks = static_cast<unsigned>(blocks);
    range.end = static_cast<unsigned>(round_up(blocks, cluster_));
    blocks_ += range.end;
  }

  void run(const Context& context) const {
    const LaunchShape shape{
        blocks_, threads,
        resident::shared_bytes(block_units(plan_.dtype), resident::most_warps, cluster_), cluster_};
    resident::with_kind(plan_.kind, [&](auto kind) {
      host_with_dtype(plan_.dtype, [&](auto tag) {
        using Tag = decltype(tag);
        constexpr Kind k = decltype(kind)::value;
        launch("backward_linear", context,
               plan_.rounding == Rounding::nearest
                   ? quantize_small_kernel<k, Rounding::nearest, Tag>
                   : quantize_small_kernel<k, Rounding::stochastic, Tag>,
               shape, args);
      });
    });
  }

 private:
  const Plan& plan_;
  int cluster_;
  std::int64_t blocks_ = 0;
};

}  // namespace

bool quantize_small(const Context& context, const BackwardOperands& operands) {
  Plan plan;
  if (!plan_operands(context, operands, plan)) return false;
  const auto per_tensor = [](const auto* job) { return job != nullptr && job->quant.per_tensor; };
  const bool weight = per_tensor(operands.weight), rows = per_tensor(operands.gradient_rows),
             gradient = per_tensor(operands.gradient_columns);
  const bool parted_weight = plan.args.weight.parts > 1,
             parted_gradient = plan.args.gradient.parts > 1;
  if (weight || rows || gradient) {
    const bool sums = gradient && plan.args.gradient.sum_wanted && parted_gradient;
    Launch largest(plan, sums);
    SmallArgs& args = largest.args;
    args.weight.pass = args.gradient.pass = resident::Pass::amax;
    args.rows.pass = RowsPass::amax;
    args.weight.cluster = 0;
    if (!sums) args.gradient.cluster = 0;
    largest.take(args.weight_range, weight ? plan.weight_blocks : 0);
    largest.take(args.gradient_range, gradient ? plan.gradient_blocks : 0);
    largest.take(args.rows_range, rows ? plan.rows_blocks : 0);
    largest.run(context);
  }
  Launch codes(plan, (parted_weight && !weight) || (parted_gradient && !gradient));
  SmallArgs& args = codes.args;
  args.weight.pass = weight ? resident::Pass::codes : resident::Pass::both;
  args.gradient.pass = gradient ? resident::Pass::codes : resident::Pass::both;
  args.rows.pass = rows ? RowsPass::codes : RowsPass::row_scales;
  args.weight.slots = static_cast<int>(plan.weight_blocks);
  args.gradient.slots = static_cast<int>(plan.gradient_blocks);
  if (weight) args.weight.cluster = 0;
  if (gradient) args.gradient.cluster = 0;
  codes.take(args.weight_range, plan.weight_blocks);
  codes.take(args.gradient_range, plan.gradient_blocks);
  codes.take(args.rows_range, plan.rows_blocks);
  codes.take(args.groups_range, plan.groups_blocks);
  codes.run(context);
  return true;
}

}  // namespace hot::detail
