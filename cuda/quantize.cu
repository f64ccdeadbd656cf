// Stages: quantise and dequantise a matrix; rows after an FWHT (g_y for g_x); INT4 groups of x.
//
// rows16_kernel: the hot path (Hadamard block 16).
//   T lanes share a row, at best within one warp; a lane holds B blocks of 16 neighbouring elements
//   in registers: one read of g_y (32 B bytes in flight for a lane in fp16), butterfly, largest
//   value by shuffles, one write of 16 codes a block. With one scale for the whole tensor it runs
//   twice, first for the largest value alone. 3 bytes an element for fp16 input and one scale a
//   row.
//
// wide_rows_kernel: the same for rows that more than two warps share, from sm_90 on.
//   A thread block goes from row to row; one instruction copies a row to shared memory
//   (cp.async.bulk), the next one's while this one's codes are made, and the one barrier of a row
//   is that of its largest value. Where only one thread block fits an SM, two rows are on their
//   way.
//
// rows_kernel: any block and any length.
//   A thread block takes a row through 4096 floats of shared memory, twice (largest value, codes).
//
// groups_kernel, group_pairs_kernel: x to INT4.
//   A thread takes 64 tokens of one channel, or half of them of two channels in 16-bit types, and
//   writes 16 contiguous bytes at a time. 2.53 bytes an element for fp16.
//
// requantize_kernel: INT4 back to INT8.
//   A thread block takes a channel. 1.53 bytes an element.
//
// Operand::amax (in the public stage, the scales' memory) holds the bit patterns of the largest
// values between two kernels.
#include <algorithm>
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize.cuh"

namespace hot::detail {
namespace {

// threadIdx.x is the lane of a row: up to 32 of them, a power of two, with several rows
// (threadIdx.y) in a thread block, or a row to itself.
template <Rounding rounding, int hadamard, int B, class Tag>
__global__ void __launch_bounds__(rows16_most_lanes)
    rows16_kernel(const __grid_constant__ RowsArgs args) {
  __shared__ std::uint32_t shared[rows16_most_lanes / 32];
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
__global__ void __launch_bounds__(rows16_most_lanes)
    wide_rows_kernel(const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(128) char rows[];
  __shared__ std::uint32_t shared[2][rows16_most_lanes / 32];  // a row's last readers are late
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
          if (lane == 0) copy_row(row + Buffers * step, buffer);  // everybody has read this row
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
          codes = round_group<rounding>([&](int j) { return v[16 * b + j]; }, Same{s.inv}, args.key,
                                        offset, static_cast<std::uint64_t>(blk), args.bits);
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
      static_assert(rows16_most_blocks == 6);
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

__global__ void finish_scales_kernel(const std::uint32_t* amax, int step, float* scale,
                                     std::int64_t count, int bits) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) scale[i] = device_scale(amax[i * step], bits).scale;
}

// ---- the public quantise: any strides, any granularity, one thread for 16 elements
// ------------------

struct MatrixQuant {
  MatrixIn x;
  std::int8_t* codes;
  std::int64_t code_stride;
  float* scale;
  Granularity granularity;
  int bits;
  bool packed;
  DeviceKey key;
  __device__ std::int64_t scale_at(std::int64_t r, std::int64_t c) const {
    return granularity == Granularity::row ? r : granularity == Granularity::column ? c : 0;
  }
};

__global__ void matrix_amax_kernel(MatrixQuant args) {
  begin_kernel();
  auto* amax = reinterpret_cast<std::uint32_t*>(args.scale);
  const std::int64_t groups = (args.x.cols + 15) / 16;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.x.rows * groups) return;
  const std::int64_t row = i / groups, col = i % groups * 16;
  std::uint32_t best = 0;
  for (std::int64_t c = col; c < min(col + 16, args.x.cols); ++c) {
    const std::uint32_t bits = abs_bits(load_element(args.x, row, c));
    if (args.granularity == Granularity::column) {
      atomic_max(amax + c, bits);
    } else {
      best = max(best, bits);
    }
  }
  if (args.granularity != Granularity::column) atomic_max(amax + args.scale_at(row, col), best);
}

template <Rounding rounding>
__global__ void matrix_codes_kernel(MatrixQuant args) {
  begin_kernel();
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::int64_t groups = (args.x.cols + 15) / 16;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.x.rows * groups) return;
  const std::int64_t row = i / groups, col = i % groups * 16;
  float value[16], inv[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    value[j] = inv[j] = 0.0F;
    if (col + j >= args.x.cols) continue;
    const DeviceScale s =
        device_scale(__float_as_uint(args.scale[args.scale_at(row, col + j)]), args.bits);
    if (s.keep) value[j] = load_element(args.x, row, col + j), inv[j] = s.inv;
  }
  const uint4 codes =
      round_group<rounding>([&](int j) { return value[j]; }, [&](int j) { return inv[j]; },
                            args.key, offset, static_cast<std::uint64_t>(i), args.bits);
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const int count = static_cast<int>(min(std::int64_t{16}, args.x.cols - col));
  std::int8_t* out = args.codes + row * args.code_stride;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j >= count) break;
    const auto code = static_cast<std::int8_t>(words[j / 4] >> (8 * (j % 4)));
    if (!args.packed) {
      out[col + j] = code;
    } else if (j % 2 == 0) {
      const int next = j + 1 < count ? static_cast<int>(words[j / 4] >> (8 * (j % 4) + 8)) : 0;
      out[(col + j) / 2] = static_cast<std::int8_t>((code & 15) | ((next & 15) << 4));
    }
  }
}

__global__ void dequantize_kernel(MatrixIn q, const float* scale, Granularity granularity,
                                  bool packed, MatrixOut out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= out.rows * out.cols) return;
  const std::int64_t r = i / out.cols, c = i % out.cols;
  const auto* codes = static_cast<const std::int8_t*>(q.data) + r * q.row_stride;
  int code = packed ? (codes[c / 2] >> (c % 2 == 0 ? 0 : 4)) & 15 : codes[c];
  if (packed) code = (code ^ 8) - 8;
  const std::int64_t s = granularity == Granularity::row      ? r
                         : granularity == Granularity::column ? c
                                                              : 0;
  store_element(out, r, c, static_cast<float>(code) * scale[s]);
}

// ---- INT4 groups
// ------------------------------------------------------------------------------------

// The smallest bf16 not below a positive finite value, as bits.
__device__ std::uint16_t bf16_up(float v) {
  return static_cast<std::uint16_t>((__float_as_uint(v) + 0xffffU) >> 16);
}

// The low nibbles of eight bytes.
__device__ std::uint32_t pack_nibbles(std::uint32_t low, std::uint32_t high) {
  const auto pairs = [](std::uint32_t w) {  // bytes 0 and 2: two nibbles each
    return (w & ~0x00f000f0U) | ((w >> 4) & 0x00f000f0U);
  };
  return __byte_perm(pairs(low), pairs(high), 0x6420);
}

struct GroupsArgs {
  MatrixIn x;
  std::uint8_t* packed;
  std::int64_t row_bytes;
  std::uint16_t* scale;
  DeviceKey key;
};

struct GroupScale {
  std::uint16_t bf16;
  float inv;
  bool keep;  // false: codes are 0 although the values are not finite
};

__device__ GroupScale group_scale(std::uint32_t amax) {
  if (amax >= 0x7f800000U) return {0x7fc0U, 0.0F, false};
  if (__uint_as_float(amax) < 0x1p-100F) return {0, 0.0F, true};
  const std::uint16_t half = bf16_up(__fdiv_rn(__uint_as_float(amax), 7.0F));
  return {half, __fdiv_rn(1.0F, __uint_as_float(std::uint32_t{half} << 16)), true};
}

// Rounds and writes half a group, 32 tokens of a channel, `value(t)` each: 16 bytes.
template <Rounding rounding, class Value>
__device__ void finish_half(const GroupsArgs& args, const DeviceOffset& offset, std::int64_t col,
                            std::int64_t g, int half, const GroupScale& scale, const Value& value) {
  const std::int64_t at = g * 32 + half * 16, row_blocks = (args.x.rows + 15) / 16;
  if (at >= args.row_bytes) return;  // rows are whole 16 bytes
  std::uint32_t words[4] = {0, 0, 0, 0};
  if (scale.keep) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 codes = round_group<rounding>(
          [&](int j) { return value(i * 16 + j); }, Same{scale.inv}, args.key, offset,
          static_cast<std::uint64_t>(col * row_blocks + g * 4 + half * 2 + i), 4);
      words[2 * i] = pack_nibbles(codes.x, codes.y);
      words[2 * i + 1] = pack_nibbles(codes.z, codes.w);
    }
  }
  *reinterpret_cast<uint4*>(args.packed + col * args.row_bytes + at) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

template <Rounding rounding, class Tag>
__global__ void __launch_bounds__(128) groups_kernel(GroupsArgs args) {
  begin_kernel();
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::int64_t strips = (args.x.cols + 127) / 128;
  const std::int64_t col = blockIdx.x % strips * 128 + threadIdx.x;
  const std::int64_t g = blockIdx.x / strips;
  if (col >= args.x.cols) return;
  float v[64];
#pragma unroll
  for (int t = 0; t < 64; ++t) {
    const std::int64_t token = g * 64 + t;
    v[t] = token < args.x.rows
               ? Tag::load(args.x.data, token * args.x.row_stride + col * args.x.col_stride)
               : 0.0F;
  }
  std::uint32_t amax = 0;
#pragma unroll
  for (int t = 0; t < 64; ++t) amax = max(amax, abs_bits(v[t]));
  const GroupScale scale = group_scale(amax);
  args.scale[col * ((args.x.rows + 63) / 64) + g] = scale.bf16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    finish_half<rounding>(args, offset, col, g, half, scale,
                          [&](int t) { return v[32 * half + t]; });
  }
}

// The same for 16-bit types: a lane has two columns as they are in memory and half a group, 32
// words in registers; the lane 16 further has the other half. The largest of both columns by one
// instruction (patterns of |v| have the order of the values).
template <Rounding rounding, class Tag>
__global__ void __launch_bounds__(128) group_pairs_kernel(GroupsArgs args) {
  begin_kernel();
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::int64_t strips = (args.x.cols + 127) / 128;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t col = blockIdx.x % strips * 128 + warp * 32 + 2 * (lane % 16);
  const std::int64_t g = blockIdx.x / strips;
  const int half = lane / 16;
  const bool live = col < args.x.cols;  // all lanes stay for the exchange
  const std::int64_t first = g * 64 + half * 32;
  const auto* from =
      static_cast<const char*>(args.x.data) + (first * args.x.row_stride + col) * Tag::size;
  const std::int64_t pitch = args.x.row_stride * Tag::size;
  unsigned word[32];
  if (live && first + 32 <= args.x.rows) {
#pragma unroll
    for (int t = 0; t < 32; ++t) word[t] = *reinterpret_cast<const unsigned*>(from + t * pitch);
  } else {
#pragma unroll
    for (int t = 0; t < 32; ++t) {
      word[t] = live && first + t < args.x.rows
                    ? *reinterpret_cast<const unsigned*>(from + t * pitch)
                    : 0U;
    }
  }
  unsigned most = 0;
#pragma unroll
  for (int t = 0; t < 32; ++t) most = __vmaxu2(most, word[t] & 0x7fff7fffU);
  most = __vmaxu2(most, __shfl_xor_sync(0xffffffffU, most, 16));
  if (!live) return;
  const auto pair = [](unsigned packed, int c) {
    const unsigned one[1] = {packed};
    float v[2];
    Tag::unpack(one, v);
    return v[c];
  };
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const GroupScale scale = group_scale(abs_bits(pair(most, c)));
    if (half == 0) args.scale[(col + c) * ((args.x.rows + 63) / 64) + g] = scale.bf16;
    finish_half<rounding>(args, offset, col + c, g, half, scale,
                          [&](int t) { return pair(word[t], c); });
  }
}

template <Rounding rounding>
__global__ void requantize_kernel(const __grid_constant__ RequantizeArgs args, bool independent) {
  __shared__ std::uint32_t shared[32];
  begin_kernel(independent);
  requantize_channel<rounding>(args, blockIdx.x, static_cast<int>(threadIdx.x),
                               static_cast<int>(blockDim.x),
                               [&](std::uint32_t v) { return block_max(v, shared); });
  end_kernel(independent);
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

void launch_finish_scales(const Context& context, const plan::Step& step, const ColumnsJob& job) {
  const std::uint32_t* const amax = job.out.amax;
  launch("quantize", context, finish_scales_kernel, step.shape, amax, job.quant.per_tensor ? 0 : 1,
         job.out.scale, job.out.scales, job.quant.bits);
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

RequantizeArgs requantize_args(const Context& context, const GroupsJob& job) {
  return {job.packed, job.row_bytes,
          job.scale,  ceil_div(job.tokens, int4_group),
          job.out,    device_key(context.key(), Purpose::requantize)};
}

void CudaBackend::quantize(const Context& context, const MatrixIn& x, const QuantSpec& spec,
                           const MatrixOut& q, float* scale) const {
  const DeviceGuard guard(context.device().index, "quantize");
  const std::int64_t scales = scale_count(x.rows, x.cols, spec.scale);
  check_cuda(
      cudaMemsetAsync(scale, 0, static_cast<std::size_t>(scales) * sizeof(float), context.stream()),
      "quantize", "cudaMemsetAsync");
  if (x.rows == 0 || x.cols == 0) return;
  const MatrixQuant args{x,
                         static_cast<std::int8_t*>(q.data),
                         q.row_stride,
                         scale,
                         spec.scale,
                         spec.bits,
                         q.dtype == DType::i4x2,
                         device_key(context.key(), Purpose::quantize)};
  const std::int64_t grid = ceil_div(x.rows * ceil_div(x.cols, 16), 256);
  launch("quantize", context, matrix_amax_kernel, grid, 256, 0, args);
  with_rounding(spec.rounding, [&](auto r) {
    launch("quantize", context, matrix_codes_kernel<decltype(r)::value>, grid, 256, 0, args);
  });
  launch("quantize", context, finish_scales_kernel, ceil_div(scales, 256), 256, 0,
         reinterpret_cast<const std::uint32_t*>(scale), 1, scale, scales, spec.bits);
}

void CudaBackend::dequantize(const Context& context, const MatrixIn& q, const float* scale,
                             Granularity granularity, const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "dequantize");
  launch("dequantize", context, dequantize_kernel, ceil_div(out.rows * out.cols, 256), 256, 0, q,
         scale, granularity, q.dtype == DType::i4x2, out);
}

void launch_groups(const Context& context, const plan::Step& step, const MatrixIn& x,
                   std::uint8_t* packed, std::int64_t row_bytes, std::uint16_t* scale) {
  const GroupsArgs args{x, packed, row_bytes, scale,
                        device_key(context.key(), Purpose::activation)};
  const auto run = [&](auto kernel) {
    launch("compress_activation", context, kernel, step.shape, args);
  };
  with_rounding(step.rounding, [&](auto r) {
    constexpr Rounding mode = decltype(r)::value;
    host_with_dtype(step.dtype, [&](auto tag) {
      using Tag = decltype(tag);
      if constexpr (Tag::size == 2) {
        if (step.kernel == plan::Kernel::group_pairs) return run(group_pairs_kernel<mode, Tag>);
      }
      run(groups_kernel<mode, Tag>);
    });
  });
}

void launch_requantize(const Context& context, const plan::Step& step, const GroupsJob& job) {
  with_rounding(step.rounding, [&](auto r) {
    launch("backward_linear", context, requantize_kernel<decltype(r)::value>, step.shape,
           requantize_args(context, job), step.independent);
  });
}

}  // namespace hot::detail
