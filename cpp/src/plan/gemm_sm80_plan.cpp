#include "plan/gemm_sm80_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "operands.h"

namespace hot::detail {
namespace {

// Model of an SM of a GPU generation. The H200's figures were measured at 1.75 GHz
// (docs/dev/mma-sync.md). The others are derived from them and from data sheets.
struct Generation {
  int shared_bytes;
  double rate;     // INT8 multiply-adds per cycle
  double finish;   // bytes of the result per cycle
  double partial;  // bytes of shared tiles' sums per cycle, written and read again
};

Generation generation_of(int capability) {
  constexpr int kb = 1024;
  const int block = mma_shared_block(capability);
  if (block < 100 * kb) return {100 * kb, 1024, 5, 3};
  if (block < 200 * kb) return {164 * kb, 2048, 10, 4.5};
  return {228 * kb, 2200, 14, 5.3};
}

constexpr int block_reserved_bytes = 1024;  // shared memory that the system reserves per CTA
constexpr double start_cycles = 8000;       // from a launch to the first results
constexpr double second_launch_cycles = 2000;
constexpr double min_gain = 1.03;  // required for sharing tiles, which costs memory and a launch
constexpr int out_bytes = 2;       // assumed for every type of the result

// CTAs of a tile's kernel per SM; 0 if it does not fit.
int blocks_per_sm(int capability, const MmaTileFacts& tile) {
  if (tile.shared_bytes > mma_shared_block(capability)) return 0;
  const int held = tile.shared_bytes + block_reserved_bytes;
  return std::min(tile.blocks, generation_of(capability).shared_bytes / held);
}

// Time of an SM with `blocks` CTAs, relative to the time with `at_once`, the number that it could
// run. Fewer CTAs are faster, but not in proportion.
double part_of_full(std::int64_t blocks, int at_once) {
  if (blocks >= at_once) return 1.0;
  constexpr double alone = 0.45;  // one of four CTAs; one of two: 0.65
  return at_once == 2 ? 0.65 : alone + 0.2 * static_cast<double>(blocks - 1);
}

struct Division {
  MmaPlan plan;
  double cycles;
};

class Divider {
 public:
  Divider(const MmaDevice& device, const MmaProduct& product, int tile)
      : number_(tile),
        tile_(mma_tiles[tile]),
        gpu_(generation_of(device.capability)),
        sm_count_(device.sm_count),
        at_once_(std::max(1, blocks_per_sm(device.capability, tile_))),
        tiles_m_(ceil_div(product.m, tile_.m)),
        tiles_(tiles_m_ * ceil_div(product.n, tile_.n)),
        steps_(ceil_div(product.k, tile_.step)),
        slots_(std::int64_t{at_once_} * sm_count_),
        rest_(tiles_ % slots_),
        area_(static_cast<double>(tile_.m) * tile_.n),
        step_cycles_(area_ * tile_.step / (gpu_.rate * tile_.rate)),
        finish_cycles_(area_ * out_bytes / gpu_.finish) {}

  // One CTA per tile. If an SM runs one CTA at a time, the grid is persistent. Otherwise a CTA that
  // ends makes room for the next.
  Division whole() const {
    Division out = start();
    out.cycles += static_cast<double>(tiles_ / slots_) * full_cycles();
    out.plan.blocks = static_cast<int>(at_once_ == 1 ? std::min(tiles_, slots_) : tiles_);
    out.plan.whole = static_cast<int>(tiles_);
    if (rest_ != 0) {
      out.cycles += full_cycles() * part_of_full(ceil_div(rest_, sm_count_), at_once_);
    }
    return out;
  }

  // Shares the last tiles, which do not fill the GPU, evenly or with whole CTAs (fewer sums).
  Division shared() const {
    if (rest_ == 0 || steps_ == 0) return whole();
    const Division even = shared_among(std::min(slots_, rest_ * steps_));
    const Division split =
        shared_among(rest_ * std::clamp<std::int64_t>(slots_ / rest_, 1, steps_));
    return split.cycles < even.cycles ? split : even;
  }

  // Shares every tile of a contraction too long for INT32 sums, in parts that fit.
  Division parts() const {
    if (steps_ == 0) return whole();
    const std::int64_t longest = mma_int32_codes / tile_.step;
    const std::int64_t fewest = tiles_ * ceil_div(steps_, longest);
    const std::int64_t limit = tiles_ * std::min(steps_, most_parts);
    return shared_among(std::clamp(slots_, fewest, std::max(fewest, limit)), tiles_);
  }

 private:
  static constexpr std::int64_t most_parts = 64;  // per tile: fixup_kernel adds them in sequence

  double full_cycles() const {
    return at_once_ * (static_cast<double>(steps_) * step_cycles_ + finish_cycles_);
  }

  Division start() const {
    Division out{};
    out.plan.tile = number_;
    // Tiles that run at the same time should cover about a square.
    const double side = std::sqrt(static_cast<double>(slots_) * tile_.n / tile_.m);
    out.plan.band = static_cast<int>(std::clamp<std::int64_t>(std::llround(side), 1, tiles_m_));
    out.cycles = start_cycles;
    return out;
  }

  Division shared_among(std::int64_t sharers) const {
    Division out = shared_among(sharers, rest_);
    if (tiles_ > slots_) out.plan.blocks = static_cast<int>(slots_);
    out.cycles += static_cast<double>(tiles_ / slots_) * full_cycles();
    return out;
  }

  // Divides the last `shared` tiles among the sharers.
  Division shared_among(std::int64_t sharers, std::int64_t shared) const {
    Division out = start();
    out.plan.blocks = static_cast<int>(sharers);
    out.plan.whole = static_cast<int>(tiles_ - shared);
    out.plan.shared = static_cast<int>(shared);
    out.plan.sharers = static_cast<int>(sharers);
    const bool aligned = sharers % shared == 0;  // then no CTA works on two tiles
    const double sums = static_cast<double>(sharers + (aligned ? 0 : shared)) * area_ * 4;
    const std::int64_t steps = ceil_div(sharers, slots_) * ceil_div(shared * steps_, sharers);
    out.cycles += at_once_ * static_cast<double>(steps) * step_cycles_ +
                  sums / (gpu_.partial * sm_count_) + second_launch_cycles;
    return out;
  }

  int number_;
  const MmaTileFacts& tile_;
  Generation gpu_;
  int sm_count_, at_once_;
  std::int64_t tiles_m_, tiles_, steps_, slots_, rest_;
  double area_, step_cycles_, finish_cycles_;
};

}  // namespace

int mma_tile(std::string_view name) {
  for (int i = 0; i < mma_tile_count; ++i) {
    if (mma_tiles[i].name == name) return i;
  }
  return -1;
}

bool mma_can(const MmaDevice& device, const MmaProduct& product, int tile) {
  const MmaTileFacts& facts = mma_tiles[tile];
  if (blocks_per_sm(device.capability, facts) == 0) return false;
  if (product.int4 && !(facts.int4 && mma_int4(device.capability))) return false;
  const std::int64_t tiles = ceil_div(product.m, facts.m) * ceil_div(product.n, facts.n);
  if (tiles > INT32_MAX) return false;
  if (facts.any || !product.long_k) return facts.any || product.aligned;
  // The steps of all tiles must be countable in 32 bits.
  return product.aligned && tiles * ceil_div(product.k, facts.step) <= INT32_MAX;
}

MmaPlan mma_plan_of(const MmaDevice& device, const MmaProduct& product, int tile, bool share) {
  const Divider divider(device, product, tile);
  if (mma_tiles[tile].any) return divider.whole().plan;
  if (product.long_k) return divider.parts().plan;
  return share ? divider.shared().plan : divider.whole().plan;
}

MmaPlan mma_choose(const MmaDevice& device, const MmaProduct& product, bool may_share) {
  const int any = mma_tile("any");
  if (!mma_can(device, product, any)) return {};  // no code for INT4
  Division best = Divider(device, product, any).whole();
  best.cycles = INFINITY;
  for (int tile = 0; tile < any; ++tile) {
    if (!mma_can(device, product, tile) || (product.long_k && !may_share)) continue;
    const Divider divider(device, product, tile);
    Division candidate = product.long_k ? divider.parts() : divider.whole();
    if (may_share && !product.long_k) {
      const Division shared = divider.shared();
      if (shared.cycles * min_gain < candidate.cycles) candidate = shared;
    }
    // Among mirrored tiles, prefers the one whose longer side lies along the product's shorter
    // side.
    const bool along = (mma_tiles[tile].m > mma_tiles[tile].n) == (product.m < product.n);
    if (!along) candidate.cycles *= 1.001;
    if (candidate.cycles < best.cycles) best = candidate;
  }
  return best.plan;
}

std::size_t mma_workspace(const MmaPlan& plan) {
  if (plan.shared == 0) return 0;
  const MmaTileFacts& tile = mma_tiles[plan.tile];
  return static_cast<std::size_t>(plan.sharers + plan.shared) *
         static_cast<std::size_t>(tile.m * tile.n) * sizeof(std::int32_t);
}

std::int64_t mma_fixup_blocks(const MmaPlan& plan) {
  const MmaTileFacts& tile = mma_tiles[plan.tile];
  // One warp per 16 rows of a warp of tile_kernel.
  const std::int64_t fragments =
      std::int64_t{plan.shared} * (tile.threads / 32) * (tile.warp_m / 16);
  return ceil_div(fragments, mma_fixup_threads / 32);
}

}  // namespace hot::detail
