// Tiles of the mma.sync product, and the division of a product into tiles. This is host code
// without a CUDA header. A plan depends on its arguments only, not on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hot::detail {

// Maximum shared memory of a CTA in bytes. `capability` is 10 * major + minor.
constexpr int mma_shared_block(int capability) {
  const bool small = (capability >= 86 && capability < 90 && capability != 87) || capability >= 120;
  return 1024 * (small ? 99 : capability < 90 ? 163 : 227);
}

// Whether mma.sync supports INT4. sm_90 runs it slowly (for tests), sm_100 and later not at all.
constexpr bool mma_int4(int capability) { return capability < 100; }

// Whether code compiled for a capability includes a tile. It may run on a later GPU with more
// shared memory: machine code of 8.6 on 8.7, and PTX on 9.0 and 10.0. In this case mma_can decides
// by the GPU. No GPU from 12.0 on has more.
constexpr bool mma_code(int capability, int shared_bytes, bool int4) {
  return (capability < 120 || shared_bytes <= mma_shared_block(capability)) &&
         (!int4 || mma_int4(capability));
}

// Tile of the result as a type, for the kernel (gemm_sm80.cuh). `step`: bytes of K in a stage of
// its ring. `blocks`: CTAs per SM that its registers must allow. `any`: accepts rows of any
// alignment, which other tiles do not.
template <int m_, int n_, int warps_m_, int warps_n_, int step_, int stages_, int blocks_,
          bool any_ = false>
struct MmaTile {
  static constexpr bool any = any_;
  static constexpr int m = m_, n = n_, warps_m = warps_m_, warps_n = warps_n_, step = step_,
                       stages = stages_, blocks = blocks_, threads = 32 * warps_m * warps_n,
                       warp_m = m / warps_m, warp_n = n / warps_n, stage_bytes = (m + n) * step,
                       shared_bytes = stages * stage_bytes + 4 * (m + n);  // with the scales
  static constexpr bool int4 = m <= n && m * n >= 128 * 128;               // tiles built for INT4
  static_assert(warp_m % 16 == 0 && warp_n % 32 == 0 && (step == 64 || step == 128) && stages > 2);
};

using Mma128x256x128 = MmaTile<128, 256, 2, 4, 128, 3, 1>;
using Mma256x128x128 = MmaTile<256, 128, 4, 2, 128, 3, 1>;
using Mma128x256x64 = MmaTile<128, 256, 2, 4, 64, 4, 1>;
using Mma128x128x64 = MmaTile<128, 128, 2, 2, 64, 3, 2>;
using Mma64x64x64 = MmaTile<64, 64, 2, 2, 64, 4, 4>;
using MmaAny = MmaTile<128, 128, 2, 4, 64, 4, 1, true>;

// Tile as a value. `rate` is the rate of multiply-adds relative to the fastest tile if tiles fill
// the GPU, measured on an H200 (docs/dev/mma-sync.md).
struct MmaTileFacts {
  std::string_view name;
  int m, n, threads, warp_m, step, blocks, shared_bytes;
  bool any, int4;
  double rate;
};

template <class T>
constexpr MmaTileFacts mma_facts(std::string_view name, double rate) {
  return {name,   T::m,    T::n, T::threads, T::warp_m, T::step, T::blocks, T::shared_bytes,
          T::any, T::int4, rate};
}

inline constexpr MmaTileFacts mma_tiles[] = {
    mma_facts<Mma128x256x128>("128x256x128", 1.0), mma_facts<Mma256x128x128>("256x128x128", 1.0),
    mma_facts<Mma128x256x64>("128x256x64", 0.92),  mma_facts<Mma128x128x64>("128x128x64", 0.90),
    mma_facts<Mma64x64x64>("64x64x64", 0.62),      mma_facts<MmaAny>("any", 0.5),
};
inline constexpr int mma_tile_count = static_cast<int>(sizeof(mma_tiles) / sizeof(mma_tiles[0]));

// Number of a tile in the list, or -1.
int mma_tile(std::string_view name);

struct MmaDevice {
  int sm_count;
  int capability;  // 10 * major + minor
};

struct MmaProduct {
  std::int64_t m, n, k;  // k counts bytes
  bool aligned;          // rows of operands and output allow 16-byte accesses
  bool long_k;           // sums may exceed INT32; tiles but `any` are then shared in shorter parts
  bool int4 = false;     // packed operands
};

struct MmaPlan {
  int tile;    // number in the list
  int band;    // rows of tiles that run together
  int blocks;  // CTAs of the grid
  int whole;   // first tiles, computed by one CTA each
  int shared;  // last tiles, whose steps are divided among `sharers` CTAs
  int sharers;
};

// Longest part of a contraction whose sum fits an INT32 (-128 included), a multiple of 128.
inline constexpr int mma_int32_codes = 130944;

// Whether a tile can do a product on a device. For long_k all tiles but `any` need a workspace.
bool mma_can(const MmaDevice&, const MmaProduct&, int tile);

// Plan with the least predicted time. `may_share`: the call has a workspace.
MmaPlan mma_choose(const MmaDevice&, const MmaProduct&, bool may_share);

// Plan for a given tile. `share`: shares the last tiles (long_k always shares all).
MmaPlan mma_plan_of(const MmaDevice&, const MmaProduct&, int tile, bool share);

// Bytes of the sums of shared tiles.
std::size_t mma_workspace(const MmaPlan&);

// Launch shape of fixup_kernel; 0 CTAs if no tile is shared.
inline constexpr int mma_fixup_threads = 128;
std::int64_t mma_fixup_blocks(const MmaPlan&);

}  // namespace hot::detail
