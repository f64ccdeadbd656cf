// The inner loops of the CPU backend, once for each instruction set. The tables are made from
// simd_impl.h (AMX has products of its own) and give the same bits: every operation is one IEEE
// fp32 operation (a fused multiply-add only where one is written) or an integer one.
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

// Widest strip of columns that the column kernels take at once.
inline constexpr int strip_columns = 64;

// INT32 sums of a product's tile and what becomes of them: (sum * b_scale) * (a_scale *
// inv_divisor), added to `out` or with a bias added.
struct SumsTile {
  const std::int32_t* sums;
  std::int64_t ld;
  int rows, cols;
  const float *a_scale, *b_scale;
  std::int64_t a_step, b_step;  // 0: one scale for all
  float inv_divisor;
  const float* bias;  // of the columns; may be null
  bool accumulate;
  float* out;
  std::int64_t out_ld;
};

// Rows of a that a thread multiplies before it takes others: the tiles of every set divide it.
inline constexpr int gemm_task_rows = 96;

// Integer product. A panel holds `nr` rows of b; a tile is up to `mr` rows of a.
struct GemmKernels {
  int mr, nr;
  std::size_t (*panel_bytes)(std::int64_t k);
  void (*pack)(const std::int8_t* b, std::int64_t ldb, int rows, std::int64_t k, void* panel);
  // The start of a row's sums; null: they start at 0, and `tile` takes no bias.
  std::int32_t (*row_bias)(const std::int8_t* a, std::int64_t k);
  // acc: [rows, nr].
  void (*tile)(const std::int8_t* a, std::int64_t lda, int rows, std::int64_t k, const void* panel,
               const std::int32_t* bias, std::int32_t* acc);
  // Before and after a thread's calls of `tile`, all with that number of rows, where registers have
  // to be set up for them; null elsewhere.
  void (*begin)(int rows) = nullptr;
  void (*end)() = nullptr;
};

struct SimdKernels {
  // Contiguous elements to and from fp32.
  void (*load)(const void* src, DType dtype, std::int64_t count, float* dst);
  void (*store)(const float* src, std::int64_t count, DType dtype, void* dst);

  // In-place FWHT of consecutive blocks of a contiguous row.
  void (*fwht_row)(float* row, std::int64_t count, int block);
  // In-place FWHT down `block` rows of `strip_columns` floats (row stride strip_columns).
  void (*fwht_strip)(float* strip, int block);
  // out[t] = in[t] + in[t ^ a] for the t without a's top bit, rows of strip_columns floats.
  void (*fold_strip)(const float* in, int length, int a, float* out);
  void (*scale_row)(float* row, float factor);  // strip_columns floats

  // Bit pattern of the largest |v|; NaN wins.
  std::uint32_t (*amax)(const float* v, std::int64_t count, std::uint32_t start);
  // amax[c] = max(amax[c], bits(|v[k][c]|)) for `rows` rows of strip_columns floats.
  void (*amax_strip)(const float* v, std::int64_t rows, std::uint32_t* amax);
  // amax[c] = max(amax[c], bits(|v[c]|)) for a row.
  void (*amax_columns)(const float* v, std::int64_t count, std::uint32_t* amax);

  // Codes of a contiguous run that starts at column 0 of a row whose first random block is `blk`;
  // one inv, or one for `each`.
  void (*quantize_row)(const float* v, std::int64_t count, const float* inv, bool each,
                       const Rounder&, std::uint64_t blk, std::int8_t* out);
  // Codes of 16 rows (k) x strip_columns columns, transposed: out[c * ld + 0..15], c < cols.
  // inv and keep (all ones, or 0 where codes must be 0) per column; blk[c]: random block.
  void (*quantize_strip)(const float* v, int cols, const float* inv, const std::uint32_t* keep,
                         const Rounder&, const std::uint64_t* blk, std::int8_t* out,
                         std::int64_t ld);
  // The same with a factor for every k instead of every column.
  void (*quantize_strip_by_k)(const float* v, int cols, const float* inv, const std::uint32_t* keep,
                              const Rounder&, const std::uint64_t* blk, std::int8_t* out,
                              std::int64_t ld);

  // Sum of |v| * unit to the nearest integers; unit is a power of two, every one at most 2^15 and
  // count at most 2^16.
  std::uint32_t (*sum_magnitudes)(const float* v, std::int64_t count, float unit);

  // out[i] = table[nibble i], low nibble first; count even.
  void (*expand_int4)(const std::uint8_t* packed, std::int64_t count, const float* table,
                      float* out);

  void (*dequantize)(const SumsTile&);

  // acc[n] += (a * s) * b[n] for int8 b: one k of the fp32 product with a scale for each k.
  void (*axpy)(float a, const std::int8_t* b, std::int64_t count, float* acc);

  GemmKernels gemm;
};

const SimdKernels& simd_plain();
const SimdKernels& simd_avx2();
const SimdKernels& simd_avx512();
const SimdKernels& simd_amx();  // where HOT_AMX
const SimdKernels& simd_kernels(Isa isa);

}  // namespace hot::detail
