// Stage: HLA along the tokens and the K-contiguous operands, blocks of 16 tokens, in one read of x.
//
// resident_kernel. A cluster of thread blocks takes a strip of columns, 64 bytes of every token (32
//   columns in 16-bit types, two sectors), and keeps all of it in shared memory: one read of x, the
//   largest values exchanged through the cluster's shared memory, then the codes from the same
//   bytes. P x of rank 8 takes the place of the tokens that it is made of (16-bit types: 16 values
//   in fp32 for 32 tokens, by the same lane); otherwise it is computed twice.
//     work     a warp owns a unit of 128 tokens (8 KB), from strip to strip: it waits for its own
//              copies (cp.async), looks at the unit, meets the others at two barriers, writes the
//              unit's codes and starts the copies of the next strip.
//              A lane takes 16 k of two neighbouring columns at a time in registers: 16 tokens as
//              they are (full), a whole block (w for g_x), or two blocks of rank 8: a sketch folds
//              to 8 values first (it reads tokens t and t ^ a: no register is indexed at run time),
//              lowpass and sequency keep 8 fixed rows.
//     banks    bits 5 and 6 of an address are swapped about by the number of the group of 16 k (16
//              tokens, or 32 at rank 8), so that a warp's four groups use all banks; every block
//              starts on 1024 bytes, so that tokens are reached by exclusive or.
//     stores   64 contiguous bytes of each of 16 channels by a warp, straight from registers.
//   16-bit types: 2 bytes read and 1 (rank 8: 0.5) written for an element, the least there is.
//   g_b falls out: row 0 of a block is the sum of its tokens.
//
// Where that cannot be, the same kernel runs twice, the largest values (atomicMax), then the codes,
// in the opposite order, which finds the end of x in the L2: no clusters before sm_90, one scale
// for the whole tensor, or more than 16,384 tokens (clusters that hold more spill registers or fill
// an SM with one thread block, and take longer: docs/performance.md).
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/lowrank_resident.cuh"
#include "cuda/lowrank_resident.h"

namespace hot::detail {
namespace resident {
namespace {

bool keeps_rows(const Projection& p, Kind kind) {
  for (int i = 0; i < 8; ++i) {
    if (p.rows.size() != 8 || p.rows[static_cast<std::size_t>(i)] != kept_row(kind, i))
      return false;
  }
  return true;
}

std::int64_t unit_count(const Projection& p, Kind kind) {
  return ceil_div(p.k_padded, group_k * lane_groups * unit_steps(kind));
}
std::int64_t strip_count(const MatrixIn& x) {
  return ceil_div(x.cols, strip_bytes / static_cast<int>(dtype_size(x.dtype)));
}

}  // namespace

bool kind_of(const Projection& p, Kind& kind) {
  if (p.basis == Basis::full) {
    kind = Kind::full;
    return true;
  }
  if (p.block != 16) return false;
  if (p.basis == Basis::sketch) {
    kind = Kind::sketch8;
    return p.rank == 8;
  }
  if (p.rank == 16) {
    kind = Kind::whole;
    return true;
  }
  kind = keeps_rows(p, Kind::lowpass8) ? Kind::lowpass8 : Kind::sequency8;
  return keeps_rows(p, kind);
}

Args make_args(const Context& context, const MatrixIn& x, const Projection& p, Kind kind, Side side,
               const Key& sketch_key, const OperandQuant& quant, const Operand& out,
               const ColumnSum* sum) {
  Args args{};
  args.x = x;
  args.order = p.order;
  args.body_tokens = p.body_tokens;
  args.sketch_weight = side == Side::gradient ? p.sketch_weight : 1.0F;
  args.sketch = device_key(sketch_key, Purpose::sketch);
  args.key = device_key(context.key(), quant.purpose);
  args.codes = out.codes;
  args.scale = out.scale;
  args.scales = out.scales;
  args.amax = out.amax;
  args.k_padded = out.k_padded;
  args.units = unit_count(p, kind);
  args.bits = quant.bits;
  args.per_tensor = quant.per_tensor;
  args.flat = rows_aligned(x) && p.order.samples == 0;
  args.sum_wanted = sum != nullptr;
  if (sum != nullptr) {
    args.sum = sum->out;
    args.sum_accumulate = sum->accumulate;
    args.partial_sums = static_cast<float*>(sum->workspace);
  }
  args.strips = strip_count(x);
  args.independent = quant.independent;
  return args;
}

}  // namespace resident

namespace {

using namespace resident;

// Parts for two passes hold 512 tokens; a ColumnSum's workspace has room for parts of 128.
constexpr int two_pass_warps = 4;

constexpr int threads_of(Pass pass) {
  return 32 * (pass == Pass::both ? most_warps : two_pass_warps);
}
// Thread blocks on an SM: as many as its shared memory has room for (6; of the only pass 3) where
// hardly a register spills for it; random numbers take more.
template <Kind kind, class Tag>
constexpr int blocks_of(Pass pass, Rounding rounding) {
  const bool nearest = rounding == Rounding::nearest;
  if (pass == Pass::both) {
    return nearest || fits_in_place<kind, Tag> || (kind == Kind::full && Tag::size == 2) ? 3 : 2;
  }
  return pass == Pass::amax || nearest ? 6 : 5;
}

template <Kind kind, Rounding rounding, class Tag, Pass pass>
__global__ void __launch_bounds__(threads_of(pass), blocks_of<kind, Tag>(pass, rounding))
    resident_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char units[];
  quantize_strips<kind, rounding, Tag, Slots::no, 1, pass>(args, blockIdx.x, gridDim.x, units);
}

// The largest values do not depend on a rounding.
template <Kind kind, class Tag>
auto kernel_of(Pass pass, Rounding rounding) {
  const bool nearest = rounding == Rounding::nearest;
  if (pass == Pass::amax) return resident_kernel<kind, Rounding::nearest, Tag, Pass::amax>;
  if (pass == Pass::codes) {
    return nearest ? resident_kernel<kind, Rounding::nearest, Tag, Pass::codes>
                   : resident_kernel<kind, Rounding::stochastic, Tag, Pass::codes>;
  }
  return nearest ? resident_kernel<kind, Rounding::nearest, Tag, Pass::both>
                 : resident_kernel<kind, Rounding::stochastic, Tag, Pass::both>;
}

// Thread blocks of a cluster at most: 8 surely fit every device (most_parts); 16, for 16,384
// tokens, have to be asked for.
constexpr int large_parts = 16;

// A g_y of more than 8,192 tokens and so many columns is better left to gradient_kernel, which
// makes the rows' codes on the way; wider ones do not fit there.
constexpr std::int64_t least_gradient_columns = 2048, most_gradient_columns = 3072;

// How a strip is shared out: the division that should take least, by a model of an SM's cycles. A
// unit takes 900 of its cycles, but no less than 6000 pass from its copies to its codes (measured
// at 2 and 16 warps on an SM); the exchange in a cluster takes 1500.
struct Plan {
  int parts = 0, warps = 0;
  bool one_pass = true;
  int sm_count = 0;
};

Plan cluster_plan(std::int64_t units, std::int64_t strips, std::int64_t sm_count,
                  std::int64_t warps_on_sm) {
  Plan best;
  std::int64_t best_cycles = 0;
  for (int parts = 1; parts <= (best.parts == 0 ? large_parts : most_parts); ++parts) {
    const std::int64_t warps = ceil_div(units, parts);
    if (warps > most_warps) continue;
    const std::int64_t at_once =
        std::max<std::int64_t>(1, std::min(strips, sm_count * (warps_on_sm / warps) / parts));
    const std::int64_t warps_per_sm = ceil_div(at_once * parts, sm_count) * warps;
    const std::int64_t cycles =
        ceil_div(strips, at_once) *
        (std::max<std::int64_t>(6000, warps_per_sm * 900) + (parts > 1 ? 1500 : 0));
    if (best.parts == 0 || cycles < best_cycles) {
      best.parts = parts;
      best.warps = static_cast<int>(warps);
      best_cycles = cycles;
    }
  }
  return best;
}

// Whether a cluster holds a strip, and surely runs: only where the code knows how to overlap.
bool one_pass_can(const Context& context, std::int64_t cols, std::int64_t units,
                  const OperandQuant& quant) {
  const bool left = quant.purpose == Purpose::gradient_columns && cols >= least_gradient_columns &&
                    cols <= most_gradient_columns;
  return !quant.per_tensor && units <= (left ? most_parts : large_parts) * most_warps &&
         context.arch() != 80 && kernels_overlap(context, "backward_linear");
}

Plan plan_of(const Context& context, const MatrixIn& x, const Projection& p,
             const OperandQuant& quant, Kind kind) {
  const char* const stage = "backward_linear";
  const std::int64_t units = unit_count(p, kind);
  const int sm_count = device_attribute(context, cudaDevAttrMultiProcessorCount, stage);
  Plan plan;
  if (one_pass_can(context, x.cols, units, quant)) {
    int blocks = 0;
    with_kind(kind, [&](auto k) {
      host_with_dtype(x.dtype, [&](auto tag) {
        blocks = blocks_of<decltype(k)::value, decltype(tag)>(Pass::both, quant.rounding);
      });
    });
    plan = cluster_plan(units, strip_count(x), sm_count, most_warps * blocks);
  } else {
    plan = {static_cast<int>(ceil_div(units, two_pass_warps)), two_pass_warps, false};
  }
  plan.sm_count = sm_count;
  return plan;
}

// One launch of a plan.
void run_pass(const Context& context, Args& args, const Plan& plan, Kind kind, Rounding rounding,
              Pass pass) {
  const char* const stage = "backward_linear";
  args.pass = pass;
  args.parts = plan.parts;
  args.cluster = plan.one_pass ? plan.parts : 0;
  LaunchShape shape{args.strips * plan.parts, 32 * plan.warps,
                    shared_bytes(plan.warps, plan.warps, args.cluster), std::max(1, args.cluster)};
  with_kind(kind, [&](auto k) {
    host_with_dtype(args.x.dtype, [&](auto tag) {
      const auto kernel = kernel_of<decltype(k)::value, decltype(tag)>(pass, rounding);
      // Half of the SMs surely take what few strips there are: no need to ask.
      if (plan.one_pass && 2 * shape.blocks > plan.sm_count) {
        const std::int64_t clusters =
            std::min<std::int64_t>(args.strips, clusters_at_once(stage, context, kernel, shape));
        shape.blocks = clusters * plan.parts;
      }
      launch(stage, context, kernel, shape, args);
    });
  });
}

}  // namespace

bool resident_can(const Projection& p, const OperandQuant& quant) {
  Kind kind;
  return kind_of(p, kind) && !quant.per_k && p.order.prefix_rows() == 0 &&
         quant.rounding != Rounding::pseudo_stochastic;
}

bool resident_one_pass(const Context& context, std::int64_t cols, const Projection& p,
                       const OperandQuant& quant) {
  Kind kind{};
  return resident_can(p, quant) && kind_of(p, kind) &&
         one_pass_can(context, cols, unit_count(p, kind), quant);
}

void resident_quantize_columns(const Context& context, const MatrixIn& x, const Projection& p,
                               Side side, const Key& sketch_key, const OperandQuant& quant,
                               const Operand& out, const ColumnSum* sum) {
  Kind kind{};
  static_cast<void>(kind_of(p, kind));
  Args args = make_args(context, x, p, kind, side, sketch_key, quant, out, sum);
  const Plan plan = plan_of(context, x, p, quant, kind);
  if (plan.one_pass) return run_pass(context, args, plan, kind, quant.rounding, Pass::both);
  run_pass(context, args, plan, kind, quant.rounding, Pass::amax);
  args.independent = false;
  args.sum_wanted = false;
  run_pass(context, args, plan, kind, quant.rounding, Pass::codes);
  if (sum != nullptr) finish_sums(context, plan.parts, *sum, true);
}

void resident_quantize_codes(const Context& context, const ColumnsJob& job) {
  Kind kind{};
  static_cast<void>(kind_of(*job.projection, kind));
  Args args = make_args(context, job.x, *job.projection, kind, job.side, job.sketch_key, job.quant,
                        job.out, nullptr);
  const Plan plan = plan_of(context, job.x, *job.projection, job.quant, kind);
  run_pass(context, args, plan, kind, job.quant.rounding, Pass::codes);
}

}  // namespace hot::detail
