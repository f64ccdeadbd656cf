// Scales and codes of an x that is kept in 4 or 2 bits (docs/numerics.md, "INT4", "x kept as
// rht2").
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "operands.h"

namespace hot::detail {

// The smallest bf16 not below a positive finite value, as bits.
__device__ inline std::uint16_t bf16_up(float v) {
  return static_cast<std::uint16_t>((__float_as_uint(v) + 0xffffU) >> 16);
}

// The nearest bf16, half to even, as bits.
__device__ inline std::uint16_t bf16_nearest(float v) {
  const std::uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// 16 packed codes of rht2, and the random bytes of their rows, turned (255 - u).
struct RotatedCodes {
  std::uint32_t word;
  uint4 turned;

  // What code i stands for, in scales: (512 c + 511 - 2u - 1024) / 512 = (256 c + 255 - u) / 256 -
  // 2 + 1/512. Codes and turned bytes are put below the bits of 2^15, one of whose ulps is 1/256;
  // every step is exact.
  __device__ float value(int i) const {
    const std::uint32_t four[4] = {turned.x, turned.y, turned.z, turned.w};
    const std::uint32_t codes = word >> (2 * (i % 4)) & 0x03030303U;  // code i is byte i / 4
    const std::uint32_t both =
        __byte_perm(four[i / 4], codes, static_cast<unsigned>(i % 4 | (4 + i / 4) << 4));
    const std::uint32_t pattern = __byte_perm(both, 0x47000000U, 0x7610U);
    return (__uint_as_float(pattern) - 32770.0F) + 1.0F / 512;
  }
};

}  // namespace hot::detail
