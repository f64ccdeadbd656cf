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

#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/lowrank_resident.cuh"

namespace hot::detail {
namespace resident {

Args make_args(const Context& context, const ColumnsJob& job, Kind kind, const ColumnSum* sum) {
  const Projection& p = *job.projection;
  Args args{};
  args.x = job.x;
  args.order = p.order;
  args.body_tokens = p.body_tokens;
  args.sketch_weight = job.side == Side::gradient ? p.sketch_weight : 1.0F;
  args.sketch = device_key(job.sketch_key, Purpose::sketch);
  args.key = device_key(context.key(), job.quant.purpose);
  args.codes = job.out.codes;
  args.scale = job.out.scale;
  args.scales = job.out.scales;
  args.amax = job.out.amax;
  args.k_padded = job.out.k_padded;
  args.units = unit_count(p, kind);
  args.bits = job.quant.bits;
  args.per_tensor = job.quant.per_tensor;
  args.flat = rows_aligned(job.x) && p.order.samples == 0;
  args.sum_wanted = sum != nullptr;
  if (sum != nullptr) {
    args.sum = sum->out;
    args.sum_accumulate = sum->accumulate;
    args.partial_sums = static_cast<float*>(sum->workspace);
  }
  args.strips = strip_count(job.x.cols, job.x.dtype);
  return args;
}

}  // namespace resident

namespace {

using namespace resident;

constexpr int threads_of(Pass pass) {
  return 32 * (pass == Pass::both ? most_warps : two_pass_warps);
}

template <Kind kind, Rounding rounding, class Tag, Pass pass>
__global__ void __launch_bounds__(threads_of(pass), sm_blocks(kind, Tag::size, pass, rounding))
    resident_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char units[];
  quantize_strips<kind, rounding, Tag, Slots::no, 1, pass>(args, blockIdx.x, gridDim.x, units);
}

// Calls call(kernel) with the kernel of an instance. The largest values do not depend on a
// rounding.
template <class Call>
void with_kernel(Kind kind, DType dtype, Pass pass, Rounding rounding, const Call& call) {
  const bool nearest = rounding == Rounding::nearest;
  with_kind(kind, [&](auto k) {
    host_with_dtype(dtype, [&](auto tag) {
      constexpr Kind of = decltype(k)::value;
      using Tag = decltype(tag);
      if (pass == Pass::amax) {
        call(resident_kernel<of, Rounding::nearest, Tag, Pass::amax>);
      } else if (pass == Pass::codes) {
        call(nearest ? resident_kernel<of, Rounding::nearest, Tag, Pass::codes>
                     : resident_kernel<of, Rounding::stochastic, Tag, Pass::codes>);
      } else {
        call(nearest ? resident_kernel<of, Rounding::nearest, Tag, Pass::both>
                     : resident_kernel<of, Rounding::stochastic, Tag, Pass::both>);
      }
    });
  });
}

}  // namespace

std::int64_t clusters_at_once(const Context& context, const plan::ColumnClusters& of,
                              const LaunchShape& shape) {
  std::int64_t clusters = 0;
  with_kernel(of.kind, of.dtype, Pass::both, of.rounding, [&](auto kernel) {
    clusters = clusters_at_once("backward_linear", context, kernel, shape);
  });
  return clusters;
}

void launch_columns(const Context& context, const plan::Step& step, const ColumnsJob& job,
                    const ColumnSum* sum) {
  const auto& work = step.as<plan::ColumnsStep>();
  Args args = make_args(context, job, work.kind, work.pass == Pass::codes ? nullptr : sum);
  args.pass = work.pass;
  args.parts = work.parts;
  args.cluster = work.cluster;
  args.independent = step.independent;
  with_kernel(work.kind, step.dtype, work.pass, step.rounding,
              [&](auto kernel) { launch("backward_linear", context, kernel, step.shape, args); });
}

}  // namespace hot::detail
