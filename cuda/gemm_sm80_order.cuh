// Order of the tiles of gemm_sm80.cuh, and their division among CTAs.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace hot::detail {
namespace {

// Arguments of a launch. `k` and the strides of the operands count bytes.
struct MmaWork {
  GemmArgs gemm;
  int tiles_m, tiles_n, band;
  int steps;                   // steps of the contraction of a tile
  int whole, shared, sharers;  // see MmaPlan
  int alignment;               // alignment of the operands' rows: 16, 4 or 1 bytes
  bool split;                  // sums may exceed INT32, so their high parts are kept separately
  int4* sums;                  // sums of shared tiles
};

// Position of a tile. Tiles run in bands of rows, column by column. Tiles that run at the same time
// thus share rows of both operands in the L2 cache.
__device__ inline void tile_place(const MmaWork& work, int tile, int& row, int& column) {
  const int in_band = work.band * work.tiles_n, band = tile / in_band;
  const int height = min(work.band, work.tiles_m - band * work.band), at = tile - band * in_band;
  column = at / height;
  row = band * work.band + at - column * height;
}

// Division of the steps of all shared tiles into equal ranges. A unit is the number of a step.
__device__ inline int first_unit(const MmaWork& work, int sharer) {
  return static_cast<int>(std::int64_t{work.shared} * work.steps * sharer / work.sharers);
}
__device__ inline int sharer_of_unit(const MmaWork& work, int unit) {
  const auto units = std::int64_t{work.shared} * work.steps;
  return static_cast<int>(((unit + std::int64_t{1}) * work.sharers - 1) / units);
}

// Sequence of a CTA's work: segments of steps [first, end) of a tile.
struct Segments {
  const MmaWork& work;
  int next_whole, unit, last_unit;
  int tile = 0, first = 0, end = 0;

  __device__ explicit Segments(const MmaWork& w)
      : work(w), next_whole(static_cast<int>(blockIdx.x)), unit(0), last_unit(0) {
    if (next_whole < w.sharers) {
      unit = first_unit(w, static_cast<int>(blockIdx.x));
      last_unit = first_unit(w, static_cast<int>(blockIdx.x) + 1);
    }
  }

  __device__ bool next() {
    if (next_whole < work.whole) {
      tile = next_whole;
      next_whole += static_cast<int>(gridDim.x);
      first = 0;
      end = work.steps;
      return true;
    }
    if (unit >= last_unit) return false;
    const int shared = unit / work.steps;
    tile = work.whole + shared;
    first = unit - shared * work.steps;
    end = min(work.steps, first + last_unit - unit);
    unit += end - first;
    return true;
  }

  // Position of this segment's sums in the workspace. Sums of one tile are neighbours.
  __device__ int place() const { return static_cast<int>(blockIdx.x) + tile - work.whole; }
};

}  // namespace
}  // namespace hot::detail
