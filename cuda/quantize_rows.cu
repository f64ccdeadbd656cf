// Stage: rows after an FWHT: g_y for g_x, x and w for the forward product.
//
// rows16_kernel: the fast path (Hadamard block 16, stochastic; block 64 across lanes, nearest).
//   T lanes share a row, if possible within one warp. A lane holds B blocks of 16 neighbouring
//   elements in registers. It reads g_y once, with 32 B bytes in flight per lane in fp16.
//   Butterflies follow, then the largest value by shuffles, then a write of 16 codes per block.
//   With a single scale the kernel runs twice, first for the largest value. Traffic with a scale
//   per row: 3 bytes per element for fp16.
//
// rows_kernel: any block and any length.
//   A CTA moves a row through 4096 floats of shared memory, twice (largest value, codes).
//
// Operand::amax holds the bit patterns of the largest values between two kernels.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize_rows.cuh"

namespace hot::detail {
namespace {

// threadIdx.x is the lane within a row. A power of two up to 32 lanes allows several rows per CTA
// (threadIdx.y). More lanes take a CTA per row.
template <int hadamard, int B, class Tag, bool powers>
__global__ void __launch_bounds__(rows16_max_lanes)
    rows16_kernel(const __grid_constant__ RowsArgs args) {
  __shared__ std::uint32_t shared[rows16_max_lanes / 32];
  begin_kernel();
  zero_counter(args.counter);
  const int T = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  quantize_row16<hadamard, B, Tag, powers>(args, row, lane, T, [&](std::uint32_t& amax) {
    if (args.pass == Pass::amax) {
      amax = warp_max(amax);
      if ((threadIdx.y * blockDim.x + threadIdx.x) % 32 == 0) atomic_max(args.amax, amax);
      return false;
    }
    amax = args.pass == Pass::codes ? *args.amax : row_max(amax, T, lane, shared);
    return true;
  });
}

template <Rounding rounding>
__global__ void rows_kernel(RowsArgs args) {
  begin_kernel();
  zero_counter(args.counter);
  __shared__ float v[row_chunk];
  __shared__ std::uint32_t shared[32];
  const std::int64_t row = blockIdx.x;
  const int T = static_cast<int>(blockDim.x), t = static_cast<int>(threadIdx.x);
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  std::uint32_t amax = 0;
  DeviceScale s{};
  const int passes = args.pass == Pass::both ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass) {
    const bool find = args.pass == Pass::amax || (args.pass == Pass::both && pass == 0);
    if (!find) {
      if (args.pass == Pass::codes) amax = *args.amax;
      s = device_scale(amax, args.bits);
      if (t == 0 && row < args.scales) args.scale[row] = s.scale;
    }
    for (std::int64_t start = 0; start < args.k_padded; start += row_chunk) {
      const int count =
          load_row_chunk(args.x, args.powers, args.block, args.k_padded, row, start, v);
      if (find) {
        for (int i = t; i < count; i += T) amax = max(amax, abs_bits(v[i]));
        continue;
      }
      for (int b = t; b < count / 16; b += T) {
        uint4 codes = make_uint4(0, 0, 0, 0);
        if (s.keep) {
          const std::int64_t blk = row * (args.k_padded / 16) + start / 16 + b;
          codes =
              round_group<rounding>([&](int j) { return v[16 * b + j]; }, UniformScale{s.inv},
                                    args.key, offset, static_cast<std::uint64_t>(blk), args.bits);
        }
        *reinterpret_cast<uint4*>(args.codes + row * args.k_padded + start + 16 * b) = codes;
      }
    }
    if (find) amax = block_max(amax, shared);
  }
  if (args.pass == Pass::amax && t == 0) atomic_max(args.amax, amax);
}

}  // namespace

void launch_rows(const Context& context, const plan::Step& step, const Work& work) {
  const auto& rows = step.as<plan::RowsStep>();
  const Operand& job = work.operands.at(rows.of, Along::row);
  RowsArgs args = rows_args(context, job);
  args.pass = rows.pass;
  args.counter = counter_to_zero(step, work);
  const char* const stage = rows.of == Source::gy ? "backward_linear" : "forward_linear";
  const auto run = [&](auto kernel) { launch(stage, context, kernel, step.shape, args); };
  if (step.kernel == plan::Kernel::rows) {
    with_rounding(job.quant.rounding, [&](auto r) { run(rows_kernel<decltype(r)::value>); });
  } else {
    with_dtype(step.dtype, [&](auto tag) {
      using Tag = decltype(tag);
      with_constant<rows16_min_blocks, rows16_max_blocks>(rows.lane_blocks, [&](auto b) {
        constexpr int B = decltype(b)::value;
        run(job.transform.block == gradient_block ? rows16_kernel<gradient_block, B, Tag, false>
            : job.powers.exponents == nullptr     ? rows16_kernel<forward_block, B, Tag, false>
                                                  : rows16_kernel<forward_block, B, Tag, true>);
      });
    });
  }
}

RowsArgs rows_args(const Context& context, const Operand& job) {
  return {job.x,
          job.out.codes,
          job.out.scale,
          job.out.scales,
          job.out.amax,
          job.out.k_padded,
          static_cast<int>(ceil_div(job.x.cols, 16)),
          job.quant.bits,
          job.transform.block,
          device_key(context.key(), job.quant.purpose),
          Pass::both,
          plan::rows_aligned(job.x) && job.x.cols % 16 == 0,
          job.powers,
          nullptr};
}

}  // namespace hot::detail
