// Projection as a kernel argument, and the folds of a sketch.
#pragma once

#include <cstdint>

#include "cuda/device/rounding.cuh"
#include "operands.h"

namespace hot::detail {

// Projection as a kernel argument.
struct DeviceProjection : Projection {
  DeviceKey sketch;
};

// Offset a of a fold in a block of `length` values: value t is added to value t ^ a.
__device__ inline int sketch_draw(const RandomWords& draw, int fold, int length) {
  return 1 + static_cast<int>(__umulhi(draw.word[fold], static_cast<std::uint32_t>(length - 1)));
}

}  // namespace hot::detail
