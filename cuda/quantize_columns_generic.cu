// Stage: K-contiguous operands that quantize_columns.cu does not support: blocks up to 256, any
// list of kept rows, prefix tokens, scales per k, pseudo-stochastic rounding. It is slower.
//
// generic_columns_kernel: two passes over x, first the largest values (atomicMax), then the codes.
//   A thread takes a column and keeps a block of it in its own column of shared memory. There are
//   no barriers and no bank conflicts.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/lowrank.cuh"

namespace hot::detail {
namespace {

using columns::k16;

struct ColumnArgs {
  MatrixIn x;
  DeviceProjection p;
  Codes out;
  OperandQuant quant;
  RowRuns runs;
  DeviceKey key;
  Pass pass;
};

template <Rounding rounding>
__global__ void generic_columns_kernel(ColumnArgs args) {
  begin_kernel();
  extern __shared__ float shared[];
  const int threads = static_cast<int>(blockDim.x);
  const std::int64_t tiles = (args.x.cols + threads - 1) / threads;
  const std::int64_t place = blockIdx.x % tiles * threads + threadIdx.x;
  const bool live = place < args.x.cols;
  const std::int64_t col = live ? place : args.x.cols - 1;  // warp_max needs whole warps
  const RowRun run = args.runs[blockIdx.x / tiles];
  const SharedColumn v{shared + threadIdx.x, threads};
  const SharedColumn pending{shared + args.p.block * threads + threadIdx.x, threads};
  std::uint32_t* const amax = args.out.amax;
  if (args.pass == Pass::amax) {
    std::uint32_t best = 0;
    walk_rows(args.x, args.p, col, run, v, [&](std::int64_t k, float value) {
      if (args.quant.per_contraction) {
        const std::uint32_t largest = warp_max(abs_bits(value));
        if (threadIdx.x % 32 == 0) atomicMax(amax + k, largest);
      } else {
        best = max(best, abs_bits(value));
      }
    });
    if (!args.quant.per_contraction) atomic_max(amax + (args.quant.per_tensor ? 0 : col), best);
    return;
  }
  const DeviceOffset offset = offset_of(args.key);
  const std::int64_t k16_count = args.out.k_padded / k16;
  const auto finish = [&](std::int64_t g) {
    const DeviceScale column =
        args.quant.per_contraction
            ? DeviceScale{}
            : device_scale(amax[args.quant.per_tensor ? 0 : col], args.quant.bits);
    const auto scale_at = [&](int i) {
      return args.quant.per_contraction ? device_scale(amax[g * k16 + i], args.quant.bits) : column;
    };
    const uint4 codes =
        round_group<rounding>([&](int i) { return scale_at(i).keep ? pending[i] : 0.0F; },
                              [&](int i) { return scale_at(i).inv; }, args.key, offset,
                              static_cast<std::uint64_t>(col * k16_count + g), args.quant.bits);
    if (!live) return;
    *reinterpret_cast<uint4*>(args.out.codes + col * args.out.k_padded + g * k16) = codes;
  };
  std::int64_t next = run.begin * args.p.rank + run.prefix;
  walk_rows(args.x, args.p, col, run, v, [&](std::int64_t k, float value) {
    pending[static_cast<int>(k % k16)] = value;
    next = k + 1;
    if (next % k16 == 0) finish(k / k16);
  });
  if (next % k16 != 0) {  // at the end of the last run
    const std::int64_t g = next / k16;
    for (; next % k16 != 0; ++next) pending[static_cast<int>(next % k16)] = 0.0F;
    finish(g);
  }
}

}  // namespace

void launch_generic_columns(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::GenericColumnsStep>();
  const Operand& job = work.operands.at(part.of, Along::column);
  const bool amax = step.kernel == plan::Kernel::generic_amax;
  const ColumnArgs args{job.x,
                        {job.transform, device_key(job.sketch_key, Purpose::sketch)},
                        job.out,
                        job.quant,
                        RowRuns(job.transform, part.run),
                        device_key(context.key(), job.quant.purpose),
                        amax ? Pass::amax : Pass::codes};
  with_rounding(amax ? Rounding::nearest : job.quant.rounding, [&](auto r) {
    launch("backward_linear", context, generic_columns_kernel<decltype(r)::value>, step.shape,
           args);
  });
}

}  // namespace hot::detail
