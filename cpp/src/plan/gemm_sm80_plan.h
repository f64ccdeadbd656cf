// The tiles of the product with mma.sync, and how a product is divided into them. Host code that
// needs neither a GPU nor CUDA's headers: a plan is a function of its arguments alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hot::detail {

// The most shared memory of a CTA, bytes; capability: 10 * major + minor.
constexpr int mma_shared_block(int capability) {
  const bool small = (capability >= 86 && capability < 90 && capability != 87) || capability >= 120;
  return 1024 * (small ? 99 : capability < 90 ? 163 : 227);
}

// Whether there is code for INT4: from sm_100 on mma.sync has none, sm_90 runs it slowly, for
// tests.
constexpr bool mma_int4(int capability) { return capability < 100; }

// Whether what is compiled for a capability holds the code of a tile. It may run on a later GPU
// whose thread blocks have more shared memory: 8.6's machine code on 8.7, and PTX on 9.0 and 10.0,
// where mma_can goes by the GPU. From 12.0 on no GPU has more.
constexpr bool mma_code(int capability, int shared_bytes, bool int4) {
  return (capability < 120 || shared_bytes <= mma_shared_block(capability)) &&
         (!int4 || mma_int4(capability));
}

// A tile of the result as a type, for the kernel (gemm_sm80.cuh). `step`: bytes of K in a stage of
// its ring; `blocks`: CTAs of a multiprocessor that its registers must allow; `any`: takes
// what the others do not, rows that start anywhere.
template <int m_, int n_, int warps_m_, int warps_n_, int step_, int stages_, int blocks_,
          bool any_ = false>
struct MmaTile {
  static constexpr bool any = any_;
  static constexpr int m = m_, n = n_, warps_m = warps_m_, warps_n = warps_n_, step = step_,
                       stages = stages_, blocks = blocks_, threads = 32 * warps_m * warps_n,
                       warp_m = m / warps_m, warp_n = n / warps_n, stage_bytes = (m + n) * step,
                       shared_bytes = stages * stage_bytes + 4 * (m + n);  // and the scales
  static constexpr bool int4 = m <= n && m * n >= 128 * 128;  // the others are not built for it
  static_assert(warp_m % 16 == 0 && warp_n % 32 == 0 && (step == 64 || step == 128) && stages > 2);
};

using Mma128x256x128 = MmaTile<128, 256, 2, 4, 128, 3, 1>;
using Mma256x128x128 = MmaTile<256, 128, 4, 2, 128, 3, 1>;
using Mma128x256x64 = MmaTile<128, 256, 2, 4, 64, 4, 1>;
using Mma128x128x64 = MmaTile<128, 128, 2, 2, 64, 3, 2>;
using Mma64x64x64 = MmaTile<64, 64, 2, 2, 64, 4, 4>;
using MmaAny = MmaTile<128, 128, 2, 4, 64, 4, 1, true>;

// The same as a value. `rate`: multiply-adds, relative to the quickest tile, where tiles fill the
// GPU; measured on an H200 (docs/dev/mma-sync.md).
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

// Its number in the list; -1: no tile of that name.
int mma_tile(std::string_view name);

struct MmaDevice {
  int sm_count;
  int capability;  // 10 * major + minor
};

struct MmaProduct {
  std::int64_t m, n, k;  // of k: bytes
  bool aligned;  // rows of the operands, and whole rows of the output, take 16-byte accesses
  bool long_k;   // sums may pass INT32: tiles are shared out in parts that do not, but for `any`
  bool int4 = false;  // packed operands
};

struct MmaPlan {
  int tile;    // its number in the list
  int band;    // rows of tiles that run together
  int blocks;  // of the grid
  int whole;   // tiles done by one CTA each; they come first
  int shared;  // tiles whose steps are divided among `sharers` CTAs
  int sharers;
};

// The longest part of a contraction whose sum an INT32 holds, -128 included: whole 128 of it.
inline constexpr int mma_int32_codes = 130944;

// Whether a tile does the product on the device at all. (Of a long contraction all but `any` need a
// workspace.)
bool mma_can(const MmaDevice&, const MmaProduct&, int tile);

// The plan that should be quickest; `may_share`: there will be a workspace.
MmaPlan mma_choose(const MmaDevice&, const MmaProduct&, bool may_share);

// The same with the tile given; `share`: whether the last tiles' steps are shared out, as all are
// of a long contraction.
MmaPlan mma_plan_of(const MmaDevice&, const MmaProduct&, int tile, bool share);

// Bytes: sums of the tiles that CTAs share.
std::size_t mma_workspace(const MmaPlan&);

// The launch that adds them up; 0 CTAs: nothing is shared.
inline constexpr int mma_fixup_threads = 128;
std::int64_t mma_fixup_blocks(const MmaPlan&);

}  // namespace hot::detail
