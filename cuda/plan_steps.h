// What the files of the plan share: plan.cpp makes the plans of whole calls, plan_quantize.cpp adds
// the steps that quantise operands, plan_gemm.cpp those of products.
#pragma once

#include <cstdint>

#include "cuda/plan.h"

namespace hot::detail::plan {

// ---- thresholds: every number that was measured ------------------------------------------------

// Cycles of gemm_small_kernel, fitted to the times of every division of the paper's 16 layers at
// both ranks on an H200 (in a CUDA graph). The divisions that it chooses take 1.02 times those of
// the best, in geometric mean, and 1.21 at most.
struct TileCost {
  int tile_m;
  double block;          // of an SM, for a CTA: start, output
  double step;           // of an SM, for 128 k of a tile
  double wait;           // for 128 k of a tile, of a CTA that is alone
  double exchange;       // of an SM, for a CTA's sums, where a tile is shared
  double exchange_wait;  // the same of a CTA that is alone
};

// Every architecture takes them: no other was measured.
struct Thresholds {
  // A model of an SM's cycles for a column tile in a cluster: a token tile takes `tile_cycles`, but
  // no less than `latency_cycles` pass from its copies to its codes (H200, at 2 and 16 warps on an
  // SM); the all-reduce of the cluster takes `reduce_cycles`.
  std::int64_t tile_cycles = 900, latency_cycles = 6000, reduce_cycles = 1500;
  // More waves of CTAs than this hide a launch by themselves: no quantize_grouped_kernel.
  // H200, the paper's layers.
  int grouped_waves = 4;
  // Above this many multiply-adds the kernels for large products are as fast as gemm_small_kernel,
  // launch by launch. H200.
  std::int64_t small_gemm_work = std::int64_t{1} << 30;
  TileCost tile_costs[2] = {{64, 1190, 400, 300, 1260, 140}, {128, 2240, 530, 730, 2520, 700}};
  // wgmma products; H200, a sweep of 14 kernels in 8 orders (docs: "Products, TOPS").
  std::int64_t stream_k_min_k = 4096;      // shorter contractions are not shared out
  int max_splits = 6;                      // of a contraction, in equal shares
  std::int64_t narrow_tiles = 32;          // an operand of fewer is narrow: a wider tile may gain
  int wide_gain = 94, wide_gain_of = 100;  // a wider tile's time for equal work, of the usual one's
  // Tiles of 128 x 256; H100 at its power limit, 45 products of five models, 26 November 2026: from
  // this contraction on, where they take at most these percents of the usual tiles' columns an SM,
  // or of stream-K's.
  std::int64_t large_min_k = 8192;
  int large_gain_of = 106, large_gain_of_shared = 140;
  int max_swizzle = 8;   // tiles of a stripe
  int stripe_waste = 3;  // tiles added by rounding to whole stripes, in percent
};
inline constexpr Thresholds thresholds{};

// ---- reasons that several kernels have ---------------------------------------------------------

Reason why_not(const DeviceFacts&, Feature);
inline constexpr Reason of_dtype{"%t"}, equalized{"tokens are equalised"},
    scales_by_token{"gw_scale is token"}, pseudo_stochastic{"rounding is pseudo_stochastic"};
inline Reason too_long(std::int64_t columns) {
  return {"%f %n is too long for registers", columns};
}
// `can`: rows start on 16 bytes and are whole 16 bytes.
inline Reason not_fours(std::int64_t columns) { return {"%f %n is not a multiple of 4", columns}; }
inline Reason not_vectors(bool can, std::int64_t columns) {
  return can ? Reason{} : Reason{"rows of %a are not a multiple of 16 bytes (%f %n, %t)", columns};
}

// The next step's kernel loads single elements where there is a reason against 16 bytes at once.
inline void note_loads(Plan& plan, Kernel kernel, const Reason& why) {
  plan.takes({kernel, "%a is read element by element", why});
}

// ---- operands (plan_quantize.cpp) --------------------------------------------------------------

struct RowsShape {
  Source of;
  Buffer codes;
  ArrayFacts x;
  std::int64_t rows, cols;
  int hadamard_block;
  OperandQuant quant;
  std::int64_t k_padded;
};

struct ColumnsShape {
  Source of;
  Buffer codes;
  ArrayFacts x;
  std::int64_t cols;
  const Projection& p;
  OperandQuant quant;
  std::int64_t scales;
  bool sum = false, accumulate = false;  // g_b
  Buffer amax() const { return of == Source::w ? Buffer::weight_amax : Buffer::columns_amax; }
};

// How lanes share a row in registers.
struct RowShare {
  int lanes, blocks;  // of a row; of 16 elements of a lane. No lanes: too long
};
RowShare row_share(std::int64_t blocks, int most_per_lane = rows16_max_blocks);

void add_zero(Plan&, const AmaxWords&);

// Null: not wanted.
struct OperandShapes {
  const RowsShape* rows = nullptr;
  const ColumnsShape* columns = nullptr;
  const ColumnsShape* weight = nullptr;
  std::int64_t packed_channels = 0;  // of x, from packed codes to INT8
  AmaxWords zeroed{};
};

// All operands of a backward. Returns whether these steps also make g_b.
bool add_operands(Plan&, const DeviceFacts&, const OperandShapes&);
void add_rows(Plan&, const RowsShape&);
// Rows and x as INT4 from one read, or the reason why no kernel does that.
Reason add_rows_groups(Plan&, const RowsShape&, const CompressShape&);
// Return whether these steps also make the sum. Largest values are zeros.
bool add_rows_and_columns(Plan&, const DeviceFacts&, const RowsShape&, const ColumnsShape&);
bool add_columns(Plan&, const DeviceFacts&, const ColumnsShape&);
// g_b from `runs` partial sums of each column.
void add_final_sum(Plan&, std::int64_t runs, std::int64_t cols, bool accumulate, Buffer sums);
// Partial sums of a column: of g_b on its own, and of rows_column_amax_kernel at most.
std::int64_t sum_runs(std::int64_t rows);
std::int64_t rows_column_amax_sums(const DeviceFacts&, std::int64_t rows);

// g_b on its own, at the end of a call; before it the reason, where g_y has been read.
inline void note_sum_again(Plan& plan, const Reason& why) {
  plan.takes({Kernel::partial_sum, "g_y is read again for g_b", why});
}
void add_sum_alone(Plan&, const LinearShape&, const ArrayFacts& gy, bool accumulate);

// ---- products (plan_gemm.cpp) ------------------------------------------------------------------

struct ProductBuffers {
  Buffers a, b;
  Buffer out;
};

// Up to two products that do not depend on each other, and their numbers in the call.
struct Products {
  ProductShape shapes[2]{};
  ProductBuffers buffers[2]{};
  int index[2]{};
  int count = 0;

  // [m, k] times [n, k], with a scale for each row.
  ProductShape& add(int number, std::int64_t m, std::int64_t n, std::int64_t k, const OutFacts& out,
                    const ProductBuffers& of) {
    index[count] = number;
    buffers[count] = of;
    ProductShape& p = shapes[count++];
    p.m = m;
    p.n = n;
    p.k = k;
    p.one_scale_a = m == 1;
    p.one_scale_b = n == 1;
    p.out = out;
    return p;
  }
};

// g_x = g_y w, or zeros.
void add_gx(Plan&, Products&, const BackwardWork&, const OutFacts& out);
// Zeros, where they are g_w.
void add_no_gw(Plan&, const BackwardWork&);
void add_products(Plan&, const DeviceFacts&, const Products&);

}  // namespace hot::detail::plan
