// Scales of an x that is kept in 4 bits (docs/numerics.md, "INT4").
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "operands.h"

namespace hot::detail {

// The smallest bf16 not below a positive finite value, as bits.
__device__ inline std::uint16_t bf16_up(float v) {
  return static_cast<std::uint16_t>((__float_as_uint(v) + 0xffffU) >> 16);
}

}  // namespace hot::detail
