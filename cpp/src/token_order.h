// Maps positions of the transformed sequence to tokens in memory (docs/numerics.md, "Token
// layout"). constexpr: the CPU backend and the CUDA kernels share it.
#pragma once

#include <cstdint>

namespace hot::detail {

struct TokenOrder {
  std::int64_t samples = 0;  // 0: one flat sequence in memory order
  int grid_h = 0, grid_w = 0, prefix = 0;
  int tile_h = 1, tile_w = 1;

  constexpr std::int64_t prefix_rows() const { return samples * prefix; }

  // Token at a position of the transformed sequence. The complete tiles of all samples come first,
  // then the tokens outside tiles in raster order.
  constexpr std::int64_t body(std::int64_t position) const {
    if (samples == 0) return position;
    const std::int64_t tiles_h = grid_h / tile_h, tiles_w = grid_w / tile_w;
    const std::int64_t tile_area = std::int64_t{tile_h} * tile_w;
    const std::int64_t tiled = tiles_h * tiles_w * tile_area;  // tokens of a sample inside tiles
    const std::int64_t area = std::int64_t{grid_h} * grid_w;
    std::int64_t sample = 0, y = 0, x = 0;
    if (position < samples * tiled) {
      sample = position / tiled;
      const std::int64_t tile = position % tiled / tile_area;
      const std::int64_t inside = position % tile_area;
      y = tile / tiles_w * tile_h + inside / tile_w;
      x = tile % tiles_w * tile_w + inside % tile_w;
    } else {
      const std::int64_t rest = position - samples * tiled;
      const std::int64_t left = area - tiled;  // tokens of a sample outside tiles
      sample = rest / left;
      std::int64_t index = rest % left;
      const std::int64_t right = grid_w - tiles_w * tile_w;  // untiled tokens of a row with tiles
      const std::int64_t tiled_rows = tiles_w == 0 ? 0 : tiles_h * tile_h;
      if (index < tiled_rows * right) {
        y = index / right;
        x = tiles_w * tile_w + index % right;
      } else {
        index -= tiled_rows * right;
        y = tiled_rows + index / grid_w;
        x = index % grid_w;
      }
    }
    return sample * (area + prefix) + prefix + y * grid_w + x;
  }

  // Token of prefix row j, sample-major.
  constexpr std::int64_t prefix_token(std::int64_t j) const {
    const std::int64_t area = std::int64_t{grid_h} * grid_w;
    return j / prefix * (area + prefix) + j % prefix;
  }
};

}  // namespace hot::detail
