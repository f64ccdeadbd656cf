// Function tables of the CPU backend's inner loops, one per instruction set. They are compiled from
// simd_impl.h (AMX adds its own products). All give the same bits: every operation is one IEEE fp32
// operation or an integer operation. Multiply-adds are fused only where the source says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/context.h"
#include "hot/quantize.h"
#include "hot/tensor.h"
#include "random_key.h"

namespace hot::detail {

struct Rounder {
  Rounding rounding = Rounding::nearest;
  int bits = 8;
  RandomKey key{};
};

// Columns of a strip, the unit of the column kernels.
inline constexpr int strip_columns = 64;

// INT32 sums of a product's tile and their dequantisation: (sum * b_scale) * (a_scale *
// inv_divisor), then added to `out`, or a bias added.
struct SumsTile {
  const std::int32_t* sums;
  std::int64_t ld;
  int rows, cols;
  const float *a_scale, *b_scale;
  std::int64_t a_step, b_step;  // 0: one scale for all
  float inv_divisor;
  const float* bias;  // one per column, or null
  bool accumulate;
  float* out = nullptr;
  std::int64_t out_ld = 0;
};

// Rows of a per task. The tile height of every instruction set divides it.
inline constexpr int gemm_task_rows = 96;

// Integer product. A panel holds `nr` rows of b; a tile has up to `mr` rows of a.
struct GemmKernels {
  int mr, nr;
  std::size_t (*panel_bytes)(std::int64_t k);
  void (*pack)(const std::int8_t* b, std::int64_t ldb, int rows, std::int64_t k, void* panel);
  // Initial value of a row's sums. Null: sums start at 0, and `tile` ignores `bias`.
  std::int32_t (*row_bias)(const std::int8_t* a, std::int64_t k);
  // Writes the sums of a tile to acc [rows, nr].
  void (*tile)(const std::int8_t* a, std::int64_t lda, int rows, std::int64_t k, const void* panel,
               const std::int32_t* bias, std::int32_t* acc);
  // Set up and release registers for calls of `tile` with `rows` rows; null if not needed.
  void (*begin)(int rows) = nullptr;
  void (*end)() = nullptr;
};

struct SimdKernels {
  // Convert contiguous elements to and from fp32.
  void (*load)(const void* src, DType dtype, std::int64_t count, float* dst);
  void (*store)(const float* src, std::int64_t count, DType dtype, void* dst);

  // Transforms consecutive blocks of a contiguous row in place (FWHT).
  void (*fwht_row)(float* row, std::int64_t count, int block);
  // Transforms `block` rows of `strip_columns` floats in place, along the columns (FWHT).
  void (*fwht_strip)(float* strip, int block);
  // Folds rows of strip_columns floats: in[t] + in[t ^ a] for all t without a's top bit.
  void (*fold_strip)(const float* in, int length, int a, float* out);
  void (*scale_row)(float* row, float factor);  // strip_columns floats

  // Returns the bit pattern of the largest |v|, at least `start`. NaN counts as the largest.
  std::uint32_t (*amax)(const float* v, std::int64_t count, std::uint32_t start);
  // amax[c] = max(amax[c], bits(|v[k][c]|)) for `rows` rows of strip_columns floats.
  void (*amax_strip)(const float* v, std::int64_t rows, std::uint32_t* amax);
  // amax[c] = max(amax[c], bits(|v[c]|)) for a row.
  void (*amax_columns)(const float* v, std::int64_t count, std::uint32_t* amax);

  // Quantises a contiguous run from random block `blk` on. `inv` has one factor per value if
  // `each`.
  void (*quantize_row)(const float* v, std::int64_t count, const float* inv, bool each,
                       const Rounder&, std::uint64_t blk, std::int8_t* out);
  // Quantises 16 rows (k) of strip_columns columns, transposed: out[c * ld + 0..15], c < cols. The
  // factor inv, keep (all bits set, or 0 for codes 0) and the random block blk are per column.
  void (*quantize_strip)(const float* v, int cols, const float* inv, const std::uint32_t* keep,
                         const Rounder&, const std::uint64_t* blk, std::int8_t* out,
                         std::int64_t ld);
  // quantize_strip with inv and keep per k instead of per column.
  void (*quantize_strip_by_k)(const float* v, int cols, const float* inv, const std::uint32_t* keep,
                              const Rounder&, const std::uint64_t* blk, std::int8_t* out,
                              std::int64_t ld);

  // Returns the sum of |v| * unit, each rounded to the nearest integer. `unit` is a power of two.
  // Each product is at most 2^15, and `count` at most 2^16.
  std::uint32_t (*sum_magnitudes)(const float* v, std::int64_t count, float unit);

  // out[i] = table[nibble i], low nibble first.
  void (*expand_int4)(const std::uint8_t* packed, std::int64_t count, const float* table,
                      float* out);

  // Squared error of fixed-point values as INT4 codes with a step, after expansion to INT8.
  std::uint32_t (*int4_error)(const int* value, int count, int step);

  void (*dequantize)(const SumsTile&);

  // acc[n] += a * b[n]: one k of the fp32 product, with the scale of k multiplied into a.
  void (*axpy)(float a, const std::int8_t* b, std::int64_t count, float* acc);

  GemmKernels gemm;
};

const SimdKernels& simd_plain();
const SimdKernels& simd_avx2();
const SimdKernels& simd_avx512();
const SimdKernels& simd_amx();  // only if HOT_AMX
const SimdKernels& simd_kernels(Isa isa);

}  // namespace hot::detail
