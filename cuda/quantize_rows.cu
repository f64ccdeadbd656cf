// Stage: the operand of g_x, rows of g_y after an FWHT.
//
// rows16_kernel: the hot path (Hadamard block 16).
//   T lanes share a row, at best within one warp. A lane holds B blocks of 16 neighbouring elements
//   in registers: one read of g_y (32 B bytes in flight for a lane in fp16), butterfly, largest
//   value by shuffles, one write of 16 codes a block. With one scale for the whole tensor it runs
//   twice, first for the largest value alone. 3 bytes an element for fp16 input and one scale a
//   row.
//
// wide_rows_kernel: the same for rows that more than two warps share, from sm_90 on.
//   A CTA goes from row to row. One instruction copies a row to shared memory (cp.async.bulk), the
//   next one's while this one's codes are made, and the one barrier of a row is that of its largest
//   value. Where only one CTA fits an SM, two rows are in flight.
//
// rows_kernel: any block and any length.
//   A CTA takes a row through 4096 floats of shared memory, twice (largest value, codes).
//
// Operand::amax holds the bit patterns of the largest values between two kernels.
#include <cstdint>
#include <type_traits>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize_rows.cuh"

namespace hot::detail {
namespace {

// threadIdx.x is the lane of a row: up to 32 of them, a power of two, with several rows
// (threadIdx.y) in a CTA, or a row to itself.
template <Rounding rounding, int hadamard, int B, class Tag>
__global__ void __launch_bounds__(rows16_max_lanes)
    rows16_kernel(const __grid_constant__ RowsArgs args) {
  __shared__ std::uint32_t shared[rows16_max_lanes / 32];
  begin_kernel();
  const int T = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  quantize_row16<rounding, hadamard, B, Tag>(args, row, lane, T, [&](std::uint32_t& amax) {
    if (args.pass == RowsPass::amax) {
      amax = warp_max(amax);
      if ((threadIdx.y * blockDim.x + threadIdx.x) % 32 == 0) atomic_max(args.amax, amax);
      return false;
    }
    amax = args.pass == RowsPass::codes ? *args.amax : row_max(amax, T, lane, shared);
    return true;
  });
}

// A barrier of bulk copies for each of `Buffers` rows.
template <Rounding rounding, int hadamard, int B, class Tag, int Buffers>
__global__ void __launch_bounds__(rows16_max_lanes)
    wide_rows_kernel(const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(128) char rows[];
  // Two: the last readers of a row may be late.
  __shared__ std::uint32_t shared[2][rows16_max_lanes / 32];
  __shared__ std::uint64_t barriers[Buffers];
  const int T = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  const int blocks = args.live_blocks, bytes = blocks * 16 * Tag::size;
  const unsigned barrier = shared_address(barriers);
  const auto copy_row = [&](std::int64_t row, int buffer) {
    if (row >= args.x.rows) return;
    const unsigned counted = barrier + static_cast<unsigned>(buffer) * 8;
    expect_bulk(counted, static_cast<unsigned>(bytes));
    copy_bulk(shared_address(rows + buffer * bytes),
              static_cast<const char*>(args.x.data) + row * args.x.row_stride * Tag::size,
              static_cast<unsigned>(bytes), counted);
  };
  if (lane == 0) {
#pragma unroll
    for (unsigned i = 0; i < Buffers; ++i) start_barrier(barrier + 8 * i);
  }
  __syncthreads();
  begin_kernel();
  const std::int64_t step = gridDim.x;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < Buffers; ++i) copy_row(blockIdx.x + i * step, i);
  }
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  unsigned turn = 0;
  for (std::int64_t row = blockIdx.x; row < args.x.rows; row += step, ++turn) {
    const int buffer = static_cast<int>(turn % Buffers);
    wait_bulk(barrier + static_cast<unsigned>(buffer) * 8, turn / Buffers);
    unsigned words[B][4 * Tag::size];
#pragma unroll
    for (int i = 0; i < B; ++i) {
#pragma unroll
      for (unsigned& word : words[i]) word = 0;
      const int block = lane + i * T;
      if (block < blocks) load_words(rows + buffer * bytes + block * 16 * Tag::size, words[i]);
    }
    float v[B][16];
#pragma unroll
    for (int i = 0; i < B; ++i) Tag::unpack(words[i], v[i]);
    quantize_row_values<rounding, hadamard>(
        args, offset, row, lane, T, v, [&](std::uint32_t& amax) {
          amax = row_max(amax, T, lane, shared[turn % 2]);
          if (lane == 0) copy_row(row + Buffers * step, buffer);  // all threads have read it
          return true;
        });
  }
}

constexpr int row_chunk = 4096;  // floats in shared memory; a multiple of every transform

template <Rounding rounding>
__global__ void rows_kernel(RowsArgs args) {
  begin_kernel();
  __shared__ float v[row_chunk];
  __shared__ std::uint32_t shared[32];
  const std::int64_t row = blockIdx.x;
  const int T = static_cast<int>(blockDim.x), t = static_cast<int>(threadIdx.x);
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  std::uint32_t amax = 0;
  DeviceScale s{};
  const int passes = args.pass == RowsPass::row_scales ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass) {
    const bool find =
        args.pass == RowsPass::amax || (args.pass == RowsPass::row_scales && pass == 0);
    if (!find) {
      if (args.pass == RowsPass::codes) amax = *args.amax;
      s = device_scale(amax, args.bits);
      if (t == 0 && row < args.scales) args.scale[row] = s.scale;
    }
    for (std::int64_t start = 0; start < args.k_padded; start += row_chunk) {
      const int count = static_cast<int>(min(std::int64_t{row_chunk}, args.k_padded - start));
      const std::int64_t end = (args.x.cols + args.block - 1) / args.block * args.block;
      const int live = static_cast<int>(min(std::int64_t{count}, end - start));
      __syncthreads();
      for (int i = t; i < count; i += T) {
        v[i] = start + i < args.x.cols ? load_element(args.x, row, start + i) : 0.0F;
      }
      for (int h = 1; h < args.block; h *= 2) {
        __syncthreads();
        for (int i = t; i < live / 2; i += T) {
          const int a = (i & ~(h - 1)) * 2 + (i & (h - 1));
          const float x = v[a], y = v[a + h];
          v[a] = x + y;
          v[a + h] = x - y;
        }
      }
      __syncthreads();
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
  if (args.pass == RowsPass::amax && t == 0) atomic_max(args.amax, amax);
}

template <int value>
using Constant = std::integral_constant<int, value>;

template <class Call>
void with_lane_blocks(int blocks, const Call& call) {
  switch (blocks) {
    case 1:
      return call(Constant<1>{});
    case 2:
      return call(Constant<2>{});
    case 3:
      return call(Constant<3>{});
    case 4:
      return call(Constant<4>{});
    case 5:
      return call(Constant<5>{});
    default:
      static_assert(rows16_max_blocks == 6);
      return call(Constant<6>{});
  }
}

// Calls call(block): of the transforms that have instances. Longer ones than 16 are the forward
// pass's, whose codes are rounded to nearest.
template <Rounding rounding, class Call>
void with_hadamard(int block, const Call& call) {
  if constexpr (rounding == Rounding::nearest) {
    if (block == 64) return call(Constant<64>{});
    if (block == 128) return call(Constant<128>{});
  }
  call(Constant<16>{});
}

// Calls call(kernel) with the kernel of an instance.
template <class Call>
void with_wide_rows(const plan::WideRows& of, const Call& call) {
  with_rounding(of.rounding, [&](auto r) {
    host_with_dtype(of.dtype, [&](auto tag) {
      with_lane_blocks(of.lane_blocks, [&](auto b) {
        using Tag = decltype(tag);
        constexpr Rounding rounding = decltype(r)::value;
        if constexpr (Tag::size == 2 && rounding != Rounding::pseudo_stochastic) {
          with_hadamard<rounding>(of.hadamard, [&](auto h) {
            constexpr int hadamard = decltype(h)::value, blocks = decltype(b)::value;
            call(of.buffers == 1 ? wide_rows_kernel<rounding, hadamard, blocks, Tag, 1>
                                 : wide_rows_kernel<rounding, hadamard, blocks, Tag, 2>);
          });
        }
      });
    });
  });
}

template <class Call>
void with_rows16(Rounding rounding, int hadamard, DType dtype, int lane_blocks, const Call& call) {
  with_rounding(rounding, [&](auto r) {
    host_with_dtype(dtype, [&](auto tag) {
      with_lane_blocks(lane_blocks, [&](auto b) {
        with_hadamard<decltype(r)::value>(hadamard, [&](auto h) {
          call(rows16_kernel<decltype(r)::value, decltype(h)::value, decltype(b)::value,
                             decltype(tag)>);
        });
      });
    });
  });
}

}  // namespace

std::int64_t clusters_at_once(const Context& context, const plan::WideRows& of,
                              const LaunchShape& shape) {
  std::int64_t blocks = 0;
  with_wide_rows(of, [&](auto kernel) {
    blocks = clusters_at_once("backward_linear", context, kernel, shape);
  });
  return blocks;
}

void launch_rows(const Context& context, const plan::Step& step, const RowsJob& job) {
  const auto& work = step.as<plan::RowsStep>();
  RowsArgs args = rows_args(context, job);
  args.pass = work.pass;
  const auto run = [&](auto kernel) {
    launch("backward_linear", context, kernel, step.shape, args);
  };
  if (step.kernel == plan::Kernel::rows) {
    with_rounding(step.rounding, [&](auto r) { run(rows_kernel<decltype(r)::value>); });
  } else if (step.kernel == plan::Kernel::wide_rows) {
    with_wide_rows({step.rounding, job.hadamard_block, work.lane_blocks, step.dtype, work.buffers},
                   run);
  } else {
    with_rows16(step.rounding, job.hadamard_block, step.dtype, work.lane_blocks, run);
  }
}

RowsArgs rows_args(const Context& context, const RowsJob& job) {
  return {job.x,
          job.out.codes,
          job.out.scale,
          job.out.scales,
          job.out.amax,
          job.out.k_padded,
          static_cast<int>(ceil_div(job.x.cols, 16)),
          job.quant.bits,
          job.hadamard_block,
          device_key(context.key(), job.quant.purpose),
          RowsPass::row_scales,
          rows_aligned(job.x) && job.x.cols % 16 == 0};
}

}  // namespace hot::detail
