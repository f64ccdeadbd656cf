// Device code of int4_activation.cu: x to INT4 and back to INT8. It is a header, because
// quantize_rows_groups.cu and quantize_grouped.cu run it with other work in one launch.
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "work.h"

namespace hot::detail {

// INT4 value j of 16 as a float: value + 8 as the low bits of 2^23, minus 2^23 + 8.
__device__ inline float nibble(const uint2& packed, int j) {
  const std::uint32_t word = (j < 8 ? packed.x : packed.y) >> (j % 2 == 0 ? 0 : 4);
  const std::uint32_t biased = (word & 0x0f0f0f0fU) ^ 0x08080808U;
  const std::uint32_t bits = __byte_perm(biased, 0x4b000000U, 0x7650U | (j % 8 / 2));
  return __uint_as_float(bits) - 8388616.0F;
}

struct GroupsArgs {
  MatrixIn x;
  Groups out;
  DeviceKey key;
};

// Rounds a positive finite value up to bf16; returns its bits.
__device__ inline std::uint16_t bf16_up(float v) {
  return static_cast<std::uint16_t>((__float_as_uint(v) + 0xffffU) >> 16);
}

struct GroupScale {
  std::uint16_t bf16;
  float inv;
  bool keep;  // false: a value is not finite, and codes are 0
};

__device__ inline GroupScale group_scale(std::uint32_t amax) {
  if (amax >= 0x7f800000U) return {0x7fc0U, 0.0F, false};
  if (__uint_as_float(amax) < 0x1p-100F) return {0, 0.0F, true};
  const std::uint16_t half = bf16_up(divided_by(__uint_as_float(amax), 7.0F, 1.0F / 7.0F));
  return {half, __fdiv_rn(1.0F, __uint_as_float(std::uint32_t{half} << 16)), true};
}

// Rounds and writes half a group: `value(t)` for 32 tokens of a channel, 16 bytes.
template <class Value>
__device__ void finish_half(const GroupsArgs& args, const DeviceOffset& offset, std::int64_t col,
                            std::int64_t g, int half, const GroupScale& scale, const Value& value) {
  const std::int64_t at = g * 32 + half * 16, row_blocks = (args.x.rows + 15) / 16;
  if (at >= args.out.row_bytes) return;  // row_bytes is a multiple of 16
  uint2 codes[2] = {};
  if (scale.keep) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] =
          round_group_packed([&](int j) { return value(i * 16 + j); }, scale.inv, args.key, offset,
                             static_cast<std::uint64_t>(col * row_blocks + g * 4 + half * 2 + i));
    }
  }
  *reinterpret_cast<uint4*>(args.out.packed + col * args.out.row_bytes + at) =
      make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
}

// Compresses group g of columns of a 16-bit type, from `first_column` on, one column per thread of
// the CTA. A lane holds 16 tokens of four columns in 32 registers; three lanes, 8 apart, hold the
// group's other tokens. One instruction finds the largest values of two columns, since bit patterns
// of |v| have the order of the values. Each of the four lanes computes the scale of one column.
template <class Tag>
__device__ __forceinline__ void compress_quads(const GroupsArgs& args, unsigned thread,
                                               std::int64_t first_column, std::int64_t g) {
  const DeviceOffset offset = warp_offset<Rounding::stochastic>(args.key);
  const unsigned eighth = thread % 8, quarter = thread / 8 % 4;
  const std::int64_t col = first_column + (thread / 32 * 32 + eighth * 4);
  const bool live = col < args.x.cols;  // all lanes take part in the shuffles
  const std::int64_t first = g * 64 + quarter * 16;
  const std::int64_t pitch = args.x.row_stride * 2;
  const char* const from = static_cast<const char*>(args.x.data) + (first * pitch + col * 2);
  uint2 word[16];
  if (live && first + 16 <= args.x.rows) {
#pragma unroll
    for (int t = 0; t < 16; ++t) word[t] = *reinterpret_cast<const uint2*>(from + t * pitch);
  } else {
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      word[t] = live && first + t < args.x.rows ? *reinterpret_cast<const uint2*>(from + t * pitch)
                                                : make_uint2(0, 0);
    }
  }
  uint2 amax = make_uint2(0, 0);
#pragma unroll
  for (int t = 0; t < 16; ++t) {
    amax.x = __vmaxu2(amax.x, word[t].x & 0x7fff7fffU);
    amax.y = __vmaxu2(amax.y, word[t].y & 0x7fff7fffU);
  }
#pragma unroll
  for (int h = 8; h < 32; h *= 2) {
    amax.x = __vmaxu2(amax.x, __shfl_xor_sync(0xffffffffU, amax.x, h));
    amax.y = __vmaxu2(amax.y, __shfl_xor_sync(0xffffffffU, amax.y, h));
  }
  const auto value = [](unsigned packed, int c) {
    const unsigned one[1] = {packed};
    float v[2];
    Tag::unpack(one, v);
    return v[c];
  };
  const unsigned two = quarter < 2 ? amax.x : amax.y;
  const GroupScale scale = group_scale(abs_bits(quarter % 2 == 0 ? value(two, 0) : value(two, 1)));
  if (live) args.out.scale[(col + quarter) * ((args.x.rows + 63) / 64) + g] = scale.bf16;
  const unsigned finite = __ballot_sync(0xffffffffU, scale.keep) >> eighth;
  const std::int64_t at = g * 32 + quarter * 8, row_blocks = (args.x.rows + 15) / 16;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float inv = __shfl_sync(0xffffffffU, scale.inv, static_cast<int>(eighth) + 8 * c);
    uint2 codes = round_group_packed(
        [&](int t) { return value(c < 2 ? word[t].x : word[t].y, c % 2); }, inv, args.key, offset,
        static_cast<std::uint64_t>((col + c) * row_blocks + g * 4 + quarter));
    if ((finite >> (8 * c) & 1) == 0) codes = make_uint2(0, 0);
    if (live && at < args.out.row_bytes) {  // row_bytes is a multiple of 16
      *reinterpret_cast<uint2*>(args.out.packed + (col + c) * args.out.row_bytes + at) = codes;
    }
  }
}

struct RequantizeArgs {
  Groups from;
  std::int64_t groups;  // per channel
  Codes out;
  DeviceKey key;
};

// Requantises channel `row` as thread t of T. `all_max` is the maximum over these threads.
template <class AllMax>
__device__ __forceinline__ void requantize_channel(const RequantizeArgs& args, std::int64_t row,
                                                   int t, int T, const AllMax& all_max) {
  const int row_blocks = static_cast<int>(args.out.k_padded / 16);
  const auto* from = reinterpret_cast<const uint2*>(args.from.packed + row * args.from.row_bytes);
  const DeviceOffset offset = warp_offset<Rounding::stochastic>(args.key);
  const std::uint16_t* const scales = args.from.scale + row * args.groups;
  std::uint32_t largest = 0;  // scales are positive or NaN, so bit patterns have their order
  for (std::int64_t g = t; g < args.groups; g += T) {
    largest = max(largest, std::uint32_t{scales[g]});
  }
  largest = all_max(largest);
  const float amax = 7.0F * __uint_as_float(largest << 16);
  const DeviceScale s = device_scale(abs_bits(amax), 8);
  if (t == 0) args.out.scale[row] = s.scale;
  const std::uint64_t first =
      static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>(row_blocks);
  auto* to = reinterpret_cast<uint4*>(args.out.codes + row * args.out.k_padded);
  for (int b = t; b < row_blocks; b += T) {
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (s.keep) {
      const uint2 packed = from[b];
      const float factor = __uint_as_float(std::uint32_t{scales[b / 4]} << 16) * s.inv;
      codes = round_group<Rounding::stochastic>([&](int j) { return nibble(packed, j); },
                                                UniformScale{factor}, args.key, offset,
                                                first + static_cast<std::uint64_t>(b), 8);
    }
    to[b] = codes;
  }
}

// ---- host (int4_activation.cu)

GroupsArgs groups_args(const Context&, const Operand&);
RequantizeArgs requantize_args(const Context&, const Operand&);

}  // namespace hot::detail
