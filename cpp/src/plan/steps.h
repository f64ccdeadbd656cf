// Declarations shared by the files of the plan. Plans of whole calls are in plan.cpp, steps that
// quantise operands in plan_quantize.cpp, steps of products in plan_gemm.cpp.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace hot::detail::plan {

// ---- thresholds: all measured numbers ----------------------------------------------------------

// Model of the cycles of gemm_small_kernel. It was fitted to the times of all divisions for the
// paper's 16 layers, at both ranks, on an H200 in a CUDA graph. A chosen division takes 1.02 times
// the time of the best one in geometric mean, and at most 1.21 times.
struct TileCost {
  int tile_m;
  double block;          // SM time per CTA: start, output
  double step;           // SM time per 128 k of a tile
  double wait;           // latency per 128 k of a tile
  double exchange;       // SM time per CTA for the sums of a shared tile
  double exchange_wait;  // latency of that exchange
};

// Thresholds of all architectures, measured on an H200 unless a comment says otherwise.
struct Thresholds {
  // Model of an SM's cycles for a column tile in a cluster. A token tile takes `tile_cycles`, with
  // a latency of at least `latency_cycles` (measured with 2 and 16 warps per SM). The all-reduce of
  // the cluster takes `reduce_cycles`.
  std::int64_t tile_cycles = 900, latency_cycles = 6000, reduce_cycles = 1500;
  // Maximum waves of CTAs for quantize_grouped_kernel. More waves hide a launch by themselves.
  // Measured on the paper's layers.
  int grouped_waves = 4;
  // Maximum multiply-adds for gemm_small_kernel. Above it separate kernels are as fast.
  std::int64_t small_gemm_work = std::int64_t{1} << 30;
  TileCost tile_costs[2] = {{64, 1190, 400, 300, 1260, 140}, {128, 2240, 530, 730, 2520, 700}};
  // wgmma products: a sweep of 14 kernels in 8 orders (docs: "Products, TOPS").
  std::int64_t stream_k_min_k = 4096;      // minimum contraction for stream-K
  int max_splits = 6;                      // equal shares of a contraction
  std::int64_t narrow_tiles = 32;          // an operand with fewer tiles is narrow
  int wide_gain = 94, wide_gain_of = 100;  // time of a wide tile for equal work, in percent
  // Tiles of 128 x 256, measured on an H100 at its power limit: 45 products of five models, and
  // the contraction with an 8B's layers. They need this contraction, and at most these percentages
  // of the usual tiles' columns per SM, or of stream-K's.
  std::int64_t large_min_k = 4096;
  int large_gain_of = 106, large_gain_of_shared = 140;
  int max_swizzle = 8;   // tiles per stripe
  int stripe_waste = 3;  // maximum tiles added by rounding up to whole stripes, in percent
};
inline constexpr Thresholds thresholds{};

// ---- reasons shared by several kernels ---------------------------------------------------------

Reason why_not(const DeviceFacts&, Feature);
inline constexpr Reason of_dtype{"%t"}, equalized{"tokens are equalised"},
    scales_by_token{"gw_scale is token"}, pseudo_stochastic{"rounding is pseudo_stochastic"};
inline Reason too_long(std::int64_t columns) {
  return {"%f %n is too long for registers", columns};
}
inline Reason not_fours(std::int64_t columns) { return {"%f %n is not a multiple of 4", columns}; }
// `can`: rows start at multiples of 16 bytes and have a multiple of 16 bytes.
inline Reason not_vectors(bool can, std::int64_t columns) {
  return can ? Reason{} : Reason{"rows of %a are not a multiple of 16 bytes (%f %n, %t)", columns};
}

// Records that the next step's kernel loads single elements, if there is a reason against 16 bytes.
inline void note_loads(Plan& plan, Kernel kernel, const Reason& why) {
  plan.takes({kernel, "%a is read element by element", why});
}

// ---- operands (plan_quantize.cpp) --------------------------------------------------------------

// Division of a row among the registers of lanes.
struct RowShare {
  int lanes, blocks;  // lanes per row (0: the row is too long), blocks of 16 per lane
};
RowShare row_share(std::int64_t blocks, int most_per_lane = rows16_max_blocks);

// Adds all operands of a call. Returns true if these steps also make g_b.
bool add_operands(Plan&, const DeviceFacts&, const Work&);

// ---- g_b (plan.cpp) ----------------------------------------------------------------------------

// Partial sums per column of g_b, at most by any kernel.
std::int64_t most_sum_runs(const DeviceFacts&, std::int64_t rows);
// Arrays that a sum reads.
inline Buffers sum_reads(bool accumulate) { return accumulate ? Buffers(Buffer::gb) : Buffers(); }
// Adds g_b from `runs` partial sums per column.
void add_final_sum(Plan&, std::int64_t runs, std::int64_t cols, bool accumulate, Buffer sums);

// ---- products (plan_gemm.cpp) ------------------------------------------------------------------

// Adds the products of a call, zeros if a contraction is empty.
void add_products(Plan&, const DeviceFacts&, const Work&);

}  // namespace hot::detail::plan
