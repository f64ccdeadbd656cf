// Scalar functions of docs/numerics.md: 16-bit floats, Philox, scales. All have internal linkage,
// because files compiled for different instruction sets must not share them.
#pragma once

#include <cstdint>
#include <cstring>

#include "random_key.h"

namespace hot::detail {
namespace {

inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline constexpr std::uint32_t float_infinity_bits = 0x7f800000U;
inline constexpr std::uint16_t bf16_nan = 0x7fc0U;

inline float bf16_to_float(std::uint16_t half) {
  return float_from_bits(static_cast<std::uint32_t>(half) << 16);
}

inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffU) > float_infinity_bits) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  }
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// Rounds a positive finite value up to bf16.
inline std::uint16_t float_to_bf16_up(float value) {
  return static_cast<std::uint16_t>((float_bits(value) + 0xffffU) >> 16);
}

inline float f16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinity or NaN; a NaN becomes quiet, as in hardware
    const std::uint32_t quiet = magnitude > 0x7c00U ? 0x400000U : 0U;
    return float_from_bits(sign | float_infinity_bits | quiet | ((magnitude & 0x3ffU) << 13));
  }
  // Multiplying by 2^112 moves the exponent bias from 15 to 127. Exact, also for subnormals.
  return float_from_bits(
      sign | float_bits(float_from_bits(magnitude << 13) * float_from_bits(0x77800000U)));
}

inline std::uint16_t float_to_f16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t half;
  if (magnitude > float_infinity_bits) {
    half = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  } else if (magnitude >= 0x477ff000U) {  // rounds to 65536 or more
    half = 0x7c00U;
  } else if (magnitude < 0x38800000U) {  // subnormal: let an fp32 addition do the rounding
    half = float_bits(float_from_bits(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    half = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

struct Philox {
  std::uint32_t word[4];
};

inline Philox philox4x32(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                         std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < philox_rounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

// Random words of block `blk`.
inline Philox philox_block(const RandomKey& key, std::uint64_t blk) {
  return philox4x32(static_cast<std::uint32_t>(blk),
                    (static_cast<std::uint32_t>(blk >> 32) & 0xffffU) | key.stream_purpose,
                    key.offset_low, key.offset_high, key.seed_low, key.seed_high);
}

// Scale and its inverse. `keep` has all bits set, or is 0 (codes 0) if a value is not finite.
struct Scale {
  float scale, inv;
  std::uint32_t keep;
};

inline Scale make_scale(std::uint32_t amax_bits, int bits) {
  const float q = bits == 4 ? 7.0F : 127.0F;
  const float amax = float_from_bits(amax_bits);
  if (amax_bits >= float_infinity_bits) return {float_from_bits(0x7fc00000U), 0.0F, 0U};
  if (amax < 0x1p-100F) return {0.0F, 0.0F, ~0U};
  return {amax / q, q / amax, ~0U};
}

}  // namespace
}  // namespace hot::detail
