// Choice of an instance of the sm_90a product (cuda/gemm_int8_sm90.h), and its division of work.
#pragma once

#include <cstdint>

namespace hot::detail {

enum class Sm90Kernel : std::uint8_t { tile_128x128, tile_128x192, tile_128x256, stream_k };

// Kernel of a product and the order of its tiles: along M or N, in stripes of `swizzle` tiles.
// `splits` is stream-K's number of shares of the contraction (1: CUTLASS decides).
struct Sm90Plan {
  Sm90Kernel kernel;
  int sm_count;
  bool along_m;
  int swizzle, splits;
};

}  // namespace hot::detail
