// Which instance of the sm_90a product runs (cuda/gemm_int8_sm90.h), and how it divides the work.
#pragma once

#include <cstdint>

namespace hot::detail {

enum class Sm90Kernel : std::uint8_t { tile_128x128, tile_128x192, tile_128x256, stream_k };

// A product's kernel and the order of its tiles: along M or N, in stripes of `swizzle` tiles; for
// stream-K in how many shares the contraction is divided, 1: as CUTLASS would.
struct Sm90Plan {
  Sm90Kernel kernel;
  int sm_count;
  bool along_m;
  int swizzle, splits;
};

}  // namespace hot::detail
