// Projection as a kernel argument, and the folds of a sketch.
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "operands.h"

namespace hot::detail {

// Copy of a Projection in a fixed-size form for kernels.
struct DeviceProjection {
  Basis basis;
  int block, rank, folds;
  float sketch_weight;  // 1 on side activation
  float prefix_factor;
  std::int64_t body_tokens, blocks;
  TokenOrder order;
  std::uint8_t rows[64];
  DeviceKey sketch;
};

inline DeviceProjection device_projection(const Projection& p, Side side, const Key& sketch_key) {
  DeviceProjection d{};
  d.basis = p.basis;
  d.block = p.block;
  d.rank = p.rank;
  d.folds = p.folds;
  d.sketch_weight = side == Side::gradient ? p.sketch_weight : 1.0F;
  d.prefix_factor = side == Side::gradient ? p.prefix_factor_g : p.prefix_factor_x;
  d.body_tokens = p.body_tokens;
  d.blocks = p.blocks;
  d.order = p.order;
  for (std::size_t i = 0; i < p.rows.size() && p.rank < p.block; ++i) {
    d.rows[i] = static_cast<std::uint8_t>(p.rows[i]);
  }
  d.sketch = device_key(sketch_key, Purpose::sketch);
  return d;
}

// Offset a of a fold in a block of `length` values: value t is added to value t ^ a.
__device__ inline int sketch_draw(const RandomWords& draw, int fold, int length) {
  return 1 + static_cast<int>(__umulhi(draw.word[fold], static_cast<std::uint32_t>(length - 1)));
}

}  // namespace hot::detail
