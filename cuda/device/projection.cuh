// Projection as a kernel argument, and the folds of a sketch.
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "operands.h"

namespace hot::detail {

// Projection of one side as a kernel argument.
struct DeviceProjection : Projection {
  float prefix_factor;
  std::uint8_t kept_rows[64];
  DeviceKey sketch;
};

inline DeviceProjection device_projection(const Projection& p, Side side, const Key& sketch_key) {
  const bool gradient = side == Side::gradient;
  DeviceProjection d{p,
                     gradient ? p.prefix_factor_g : p.prefix_factor_x,
                     {},
                     device_key(sketch_key, Purpose::sketch)};
  if (!gradient) d.sketch_weight = 1.0F;
  for (std::size_t i = 0; i < p.rows.size() && p.rank < p.block; ++i) {
    d.kept_rows[i] = static_cast<std::uint8_t>(p.rows[i]);
  }
  return d;
}

// Offset a of a fold in a block of `length` values: value t is added to value t ^ a.
__device__ inline int sketch_draw(const RandomWords& draw, int fold, int length) {
  return 1 + static_cast<int>(__umulhi(draw.word[fold], static_cast<std::uint32_t>(length - 1)));
}

}  // namespace hot::detail
