// What the codes of the token storages stand for (docs/numerics.md, "One code a value").
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "token_codes.h"

namespace hot::detail {

// 16 times the reversed bits of 0 to 15, four bytes a word: what sets the random bytes of
// neighbours apart.
__device__ inline std::uint32_t byte_offsets(int four) {
  constexpr std::uint32_t offsets[4] = {0xC0408000U, 0xE060A020U, 0xD0509010U, 0xF070B030U};
  return offsets[four];
}

// Byte `i` of 16 random ones.
__device__ inline std::uint32_t random_byte(const RandomWords& draw, int i) {
  const std::uint32_t low = (i & 4) == 0 ? draw.word[0] : draw.word[1];
  const std::uint32_t high = (i & 4) == 0 ? draw.word[2] : draw.word[3];
  return ((i & 8) == 0 ? low : high) >> (8 * (i & 3)) & 255U;
}

// The bytes of places [4 * four, 4 * four + 4) of 16 that share a random byte.
__device__ inline std::uint32_t spread_bytes(std::uint32_t byte, int four) {
  return __vadd4(byte * 0x01010101U, byte_offsets(four));
}

// What a byte of the ratios stands for.
__device__ inline float ratio_value(std::uint32_t ratio) {
  return ratio == 0 ? 0.0F : __uint_as_float((ratio + 1777U) << 19);
}

// The byte of a ratio whose pattern has been rounded to the upper 13 bits.
__device__ inline std::uint32_t ratio_byte(std::uint32_t rounded_bits) {
  return static_cast<std::uint32_t>(min(max(static_cast<int>(rounded_bits >> 19) - 1777, 1), 255));
}

// Eight packed codes and their dither as bytes, n - least: a code above the least one in the upper
// half, in the lower 15 - b, the upper half of the dither's byte. What they stand for is (n + 1/2)
// / 16.
template <Storage storage>
struct OctetBytes;

// (upper & 0xf0..) | (lower & 0x0f..): one instruction.
__device__ inline std::uint32_t merge_halves(std::uint32_t upper, std::uint32_t lower) {
  return (upper & 0xf0f0f0f0U) | (lower & 0x0f0f0f0fU);
}

// `byte`: the random one; `eight`: which eight of 16 features.
template <>
struct OctetBytes<Storage::token4> {
  static constexpr int least = -128;
  std::uint32_t even, odd;
  __device__ OctetBytes(std::uint32_t word, std::uint32_t byte, int eight) {
    // 16 less the reversed bits of the even and of the odd features.
    constexpr std::uint32_t turned[2][2] = {{0x0A0E0C00U, 0x02060408U}, {0x090D0B0FU, 0x01050307U}};
    const std::uint32_t b = (~byte >> 4 & 15U) * 0x01010101U, codes = word ^ 0x88888888U;
    even = merge_halves(codes << 4, b + turned[eight][0]);
    odd = merge_halves(codes, b + turned[eight][1]);
  }
  __device__ std::uint32_t word(int i) const { return i % 2 == 0 ? even : odd; }
  __device__ static int place(int i) { return i / 2; }
};

template <>
struct OctetBytes<Storage::token2> {
  static constexpr int least = -32;
  std::uint32_t low, high;
  __device__ OctetBytes(std::uint32_t word, std::uint32_t byte, int eight) {
    constexpr std::uint32_t turned[2][2] = {{0x040C0800U, 0x020A060EU}, {0x030B070FU, 0x0109050DU}};
    const std::uint32_t b = (~byte >> 4 & 15U) * 0x01010101U;
    low = merge_halves(spread(word & 255U), b + turned[eight][0]);
    high = merge_halves(spread(word >> 8 & 255U), b + turned[eight][1]);
  }
  // Four codes, each to the upper half of a byte.
  __device__ static std::uint32_t spread(std::uint32_t four) {
    return (four << 4 | four << 10 | four << 16 | four << 22) & 0x30303030U;
  }
  __device__ std::uint32_t word(int i) const { return i < 4 ? low : high; }
  __device__ static int place(int i) { return i % 4; }
};

// Values of eight packed codes times `step`, each rounded once. A byte is put into the lowest bits
// of 2^23, which is exact.
template <Storage storage>
__device__ __forceinline__ void octet_values(std::uint32_t word, std::uint32_t byte, int eight,
                                             float step, float* v) {
  using Bytes = OctetBytes<storage>;
  const Bytes bytes(word, byte, eight);
  const float by = step * 0.0625F, rest = step * 0.03125F;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float raised = __uint_as_float(
        __byte_perm(bytes.word(i), 0x4B000000U, 0x7440U | static_cast<unsigned>(Bytes::place(i))));
    v[i] = __fmaf_rn(raised - static_cast<float>(0x800000 - Bytes::least), by, rest);
  }
}

}  // namespace hot::detail
