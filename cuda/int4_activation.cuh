// Device code of int4_activation.cu: x to INT4, and back to INT8. A header, because
// quantize_rows_groups.cu and quantize_grouped.cu run it beside other work in one launch.
#pragma once

#include <cstdint>

#include "cuda/device/matrix_io.cuh"
#include "cuda/device/packed_codes.cuh"
#include "cuda/device/rounding.cuh"
#include "kernels.h"

namespace hot::detail {

// INT4 value j of 16, as a float: 8 more than the value, below the bits of 2^23, less 2^23 + 8.
__device__ inline float nibble(const uint2& packed, int j) {
  const std::uint32_t word = (j < 8 ? packed.x : packed.y) >> (j % 2 == 0 ? 0 : 4);
  const std::uint32_t biased = (word & 0x0f0f0f0fU) ^ 0x08080808U;
  const std::uint32_t bits = __byte_perm(biased, 0x4b000000U, 0x7650U | (j % 8 / 2));
  return __uint_as_float(bits) - 8388616.0F;
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

__device__ inline GroupScale group_scale(std::uint32_t amax) {
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
          [&](int j) { return value(i * 16 + j); }, UniformScale{scale.inv}, args.key, offset,
          static_cast<std::uint64_t>(col * row_blocks + g * 4 + half * 2 + i), 4);
      words[2 * i] = pack_nibbles(codes.x, codes.y);
      words[2 * i + 1] = pack_nibbles(codes.z, codes.w);
    }
  }
  *reinterpret_cast<uint4*>(args.packed + col * args.row_bytes + at) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

// Group g of as many columns as the CTA has threads, from `first_column` on, of a 16-bit type. A
// lane has two columns as they are in memory and half a group, 32 words in registers; the lane 16
// further has the other half. The largest of both columns by one instruction (patterns of |v| have
// the order of the values).
template <Rounding rounding, class Tag>
__device__ __forceinline__ void compress_pairs(const GroupsArgs& args, std::int64_t first_column,
                                               std::int64_t g) {
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t col = first_column + warp * 32 + 2 * (lane % 16);
  const int half = lane / 16;
  const bool live = col < args.x.cols;  // all lanes take part in the shuffle
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

struct RequantizeArgs {
  const std::uint8_t* packed;
  std::int64_t row_bytes;
  const std::uint16_t* scale;
  std::int64_t groups;
  Operand out;
  DeviceKey key;
};

// Thread t of the T that share channel `row`; `all_max` returns the largest of their values.
template <Rounding rounding, class AllMax>
__device__ __forceinline__ void requantize_channel(const RequantizeArgs& args, std::int64_t row,
                                                   int t, int T, const AllMax& all_max) {
  const int row_blocks = static_cast<int>(args.out.k_padded / 16);
  const auto* from = reinterpret_cast<const uint2*>(args.packed + row * args.row_bytes);
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::uint16_t* const scales = args.scale + row * args.groups;
  std::uint32_t largest = 0;  // scales are positive or NaN: the pattern orders them
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
      codes = round_group<rounding>([&](int j) { return nibble(packed, j); }, UniformScale{factor},
                                    args.key, offset, first + static_cast<std::uint64_t>(b), 8);
    }
    to[b] = codes;
  }
}

// ---- host (int4_activation.cu)

GroupsArgs groups_args(const Context&, const CompressJob&);
RequantizeArgs requantize_args(const Context&, const GroupsJob&);

}  // namespace hot::detail
