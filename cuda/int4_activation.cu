// Stage: x to INT4, and back to INT8 for g_w (decompress.cu: back to floats).
//
// groups_kernel, group_quads_kernel: x to INT4.
//   A thread of groups_kernel takes the 64 tokens of a group in one channel. For 16-bit types a
//   thread of group_quads_kernel takes 16 tokens of four channels (int4_activation.cuh). Equalised
//   tokens need groups_kernel, because their products are fp32. Traffic for fp16: 2.53 bytes per
//   element.
//
// requantize_kernel: INT4 back to INT8.
//   A CTA takes a channel. Traffic: 1.53 bytes per element.
//
// token_exponents_kernel: exponents of equalised tokens, for every storage.
//   A warp reads a token twice: first the largest value, then the sum of integers relative to it,
//   which is exact in any order. The second read hits the L1 or L2 cache.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/int4_activation.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

template <class Tag>
__global__ void __launch_bounds__(128) groups_kernel(GroupsArgs args) {
  begin_kernel();
  const DeviceOffset offset = warp_offset<Rounding::stochastic>(args.key);
  const std::int64_t tiles = (args.x.cols + 127) / 128;
  const std::int64_t col = blockIdx.x % tiles * 128 + threadIdx.x;
  const std::int64_t g = blockIdx.x / tiles;
  __shared__ __align__(16) float power[64];  // factors of equalised tokens
  if (args.x.exponents != nullptr) {
    const std::int64_t token = g * 64 + threadIdx.x;
    if (threadIdx.x < 64) {
      power[threadIdx.x] =
          token < args.x.rows ? __uint_as_float(row_power(args.x, token) << 16) : 1.0F;
    }
    __syncthreads();
  }
  if (col >= args.x.cols) return;
  float v[64];
#pragma unroll
  for (int t = 0; t < 64; ++t) {
    const std::int64_t token = g * 64 + t;
    v[t] = token < args.x.rows
               ? Tag::load(args.x.data, token * args.x.row_stride + col * args.x.col_stride)
               : 0.0F;
  }
  if (args.x.exponents != nullptr) {
#pragma unroll
    for (int t = 0; t < 64; ++t) v[t] *= power[t];
  }
  std::uint32_t amax = 0;
#pragma unroll
  for (int t = 0; t < 64; ++t) amax = max(amax, abs_bits(v[t]));
  const GroupScale scale = group_scale(amax);
  args.out.scale[col * ((args.x.rows + 63) / 64) + g] = scale.bf16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    finish_half(args, offset, col, g, half, scale, [&](int t) { return v[32 * half + t]; });
  }
}

// groups_kernel for 16-bit types and aligned groups of four columns.
template <class Tag>
__global__ void __launch_bounds__(128) group_quads_kernel(GroupsArgs args) {
  begin_kernel();
  const auto tiles = static_cast<unsigned>((args.x.cols + 127) / 128);
  compress_quads<Tag>(args, threadIdx.x, std::int64_t{blockIdx.x % tiles} * 128,
                      blockIdx.x / tiles);
}

__global__ void requantize_kernel(const __grid_constant__ RequantizeArgs args, bool independent) {
  __shared__ std::uint32_t shared[32];
  begin_kernel(independent);
  requantize_channel(args, blockIdx.x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                     [&](std::uint32_t v) { return block_max(v, shared); });
  end_kernel(independent);
}

// ---- exponents of equalised tokens -------------------------------------------------------------

// Visits a lane's values of a row: four(words) per 16 aligned bytes, one(v) for the other values.
template <class Tag, class Four, class One>
__device__ __forceinline__ void visit_row(const MatrixIn& x, bool aligned, std::int64_t row,
                                          const Four& four, const One& one) {
  constexpr int vector = 16 / Tag::size;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto* const from = static_cast<const char*>(x.data) + row * x.row_stride * Tag::size;
  const std::int64_t whole = aligned ? x.cols / vector : 0;
#pragma unroll 4
  for (std::int64_t i = lane; i < whole; i += 32) {
    unsigned words[4];
    load_words(from + i * 16, words);
    four(words);
  }
  for (std::int64_t c = whole * vector + lane; c < x.cols; c += 32) {
    one(Tag::load(from, c * x.col_stride));
  }
}

template <class Tag>
__global__ void __launch_bounds__(32 * exponent_rows)
    token_exponents_kernel(MatrixIn x, bool aligned, std::uint8_t* exponents) {
  begin_kernel();
  const std::int64_t row =
      std::int64_t{blockIdx.x} * exponent_rows + static_cast<int>(threadIdx.x) / 32;
  if (row >= x.rows) return;
  // Bit patterns of magnitudes have the order of the values. A word holds two 16-bit values.
  std::uint32_t amax = 0, pairs = 0;
  visit_row<Tag>(
      x, aligned, row,
      [&](const unsigned (&words)[4]) {
#pragma unroll
        for (const unsigned word : words) {
          if constexpr (Tag::size == 2) {
            pairs = __vmaxu2(pairs, word & 0x7fff7fffU);
          } else {
            amax = max(amax, word & 0x7fffffffU);
          }
        }
      },
      [&](float v) { amax = max(amax, abs_bits(v)); });
  if constexpr (Tag::size == 2) {
    const unsigned one[1] = {pairs};
    float v[2];
    Tag::unpack(one, v);
    amax = max(amax, max(abs_bits(v[0]), abs_bits(v[1])));
  }
  const std::uint32_t largest = warp_max(amax) >> 23;
  if (largest < 27 || largest == 255) {
    if (threadIdx.x % 32 == 0) {
      exponents[row] = static_cast<std::uint8_t>(largest == 255 ? 127 : 27);
    }
    return;
  }
  const float unit = __uint_as_float((268U - largest) << 23);  // maps the largest to 2^14 ... 2^15
  const auto integer = [&](float v) {
    return __float_as_uint(__fmaf_rn(fabsf(v), unit, __uint_as_float(integer_bits)));
  };
  unsigned long long sum = 0;
  visit_row<Tag>(
      x, aligned, row,
      [&](const unsigned (&words)[4]) {
        constexpr unsigned vector = 16 / Tag::size;
        float v[vector];
        Tag::unpack(words, v);
        std::uint32_t part = 0U - vector * integer_bits;
#pragma unroll
        for (const float value : v) part += integer(value);
        sum += part;
      },
      [&](float v) { sum += integer(v) - integer_bits; });
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
  if (threadIdx.x % 32 != 0) return;
  const float mean = __fdiv_rn(__ull2float_rn(sum), __ll2float_rn(x.cols));
  const int exponent = static_cast<int>(largest + (__float_as_uint(mean) >> 23)) - 141;
  exponents[row] = static_cast<std::uint8_t>(min(max(exponent, 27), 227));
}

}  // namespace

RequantizeArgs requantize_args(const Context& context, const Operand& job) {
  return {job.groups, ceil_div(job.groups.tokens, int4_group), job.out,
          device_key(context.key(), Purpose::requantize)};
}

GroupsArgs groups_args(const Context& context, const Operand& job) {
  return {job.x, job.groups, device_key(context.key(), Purpose::activation)};
}

void launch_groups(const Context& context, const plan::Step& step, const Work& work) {
  const GroupsArgs args = groups_args(context, work.operands.at(Source::x, Along::column));
  const auto run = [&](auto kernel) {
    launch("compress_activation", context, kernel, step.shape, args);
  };
  with_dtype(step.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    if constexpr (Tag::size == 2) {
      if (step.kernel == plan::Kernel::group_quads) return run(group_quads_kernel<Tag>);
    }
    run(groups_kernel<Tag>);
  });
}

void launch_token_exponents(const Context& context, const plan::Step& step, const Work& work) {
  const Operand& job = work.operands.at(Source::x, Along::column);
  MatrixIn x = job.x;
  x.exponents = nullptr;
  x.divide = false;
  with_dtype(step.dtype, [&](auto tag) {
    launch("compress_activation", context, token_exponents_kernel<decltype(tag)>, step.shape, x,
           plan::rows_aligned(x), job.exponents);
  });
}

void launch_requantize(const Context& context, const plan::Step& step, const Work& work) {
  launch("backward_linear", context, requantize_kernel, step.shape,
         requantize_args(context, work.operands.at(Source::x, Along::column)), step.independent);
}

}  // namespace hot::detail
