// Inner loops with AMX: integer products in tile registers, everything else as in AVX-512. tdpbssd
// multiplies signed bytes, so sums start at 0. Integer sums are exact and give the same bits. GCC
// 12 warns about "undefined" registers in its own intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/simd.h"
#include "cpu/transpose_avx512.h"

namespace hot::detail {
namespace {

// Tile of 96 x 32: three blocks of 32 rows. A block splits a and b into halves. Registers 0 to 3
// hold its sums, 4 and 5 the halves of a, 6 and 7 the halves of b. A step multiplies 64 k. Panel
// layout: for every step and half, 16 lines of four k for 16 rows of b, 1024 bytes.
constexpr int tile_m = gemm_task_rows, tile_n = 32, block_m = 32, half = 16;
constexpr std::int64_t step_k = 64;
constexpr std::size_t half_bytes = 1024;

// Operand of ldtilecfg.
struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Configuration for `rows` rows of a. Registers without rows must not be used.
constexpr TileConfig config_of(int rows) {
  TileConfig config;
  const int first = rows < half ? rows : half;
  const int heights[8] = {first, first,        rows - first, rows - first,
                          first, rows - first, half,         half};
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<std::uint8_t>(heights[i]);
    config.row_bytes[i] = heights[i] == 0 ? std::uint16_t{0} : std::uint16_t{64};
  }
  return config;
}

struct AllConfigs {
  alignas(64) TileConfig of_rows[block_m + 1];
  constexpr AllConfigs() : of_rows{} {
    for (int rows = 1; rows <= block_m; ++rows) of_rows[rows] = config_of(rows);
  }
};
constexpr AllConfigs configs;

std::size_t gemm_panel_bytes(std::int64_t k) {
  return static_cast<std::size_t>((k + step_k - 1) / step_k) * 2 * half_bytes;
}

void gemm_pack(const std::int8_t* b, std::int64_t ldb, int rows, std::int64_t k, void* panel) {
  auto* out = static_cast<char*>(panel);
  for (std::int64_t i = 0; i < k; i += step_k) {
    for (int n = 0; n < tile_n; n += half, out += half_bytes) {
      __m512i line[16];
      transpose_words(n < rows ? b + n * ldb + i : b, ldb, rows - n, k - i, line);
      for (int j = 0; j < 16; ++j) _mm512_storeu_si512(out + 64 * j, line[j]);
    }
  }
}

// Multiplies one step. `two`: a has a second half.
template <bool two>
void multiply(const std::int8_t* a, std::int64_t lda, const char* b) {
  _tile_loadd(4, a, lda);
  _tile_loadd(6, b, 64);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(7, b + half_bytes, 64);
  _tile_dpbssd(1, 4, 7);
  if constexpr (two) {
    _tile_loadd(5, a + half * lda, lda);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

// Computes the sums of a block.
template <bool two>
void block(const std::int8_t* a, std::int64_t lda, int rows, std::int64_t k, const char* b,
           std::int32_t* sums) {
  constexpr int row_bytes = tile_n * static_cast<int>(sizeof(std::int32_t));
  std::int32_t* const below = sums + half * tile_n;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  std::int64_t i = 0;
  for (; i + step_k <= k; i += step_k) {
    multiply<two>(a + i, lda, b);
    b += 2 * half_bytes;
  }
  if (i < k) {  // copies the rest, so that no read passes the end of a's rows
    alignas(64) std::int8_t rest[block_m * step_k] = {};
    for (int m = 0; m < rows; ++m) {
      std::memcpy(rest + m * step_k, a + m * lda + i, static_cast<std::size_t>(k - i));
    }
    // Needed because GCC's intrinsics do not declare that a tile load reads memory.
    __asm__ volatile("" ::"r"(rest) : "memory");
    multiply<two>(rest, step_k, b);
  }
  _tile_stored(0, sums, row_bytes);
  _tile_stored(1, sums + half, row_bytes);
  if constexpr (two) {
    _tile_stored(2, below, row_bytes);
    _tile_stored(3, below + half, row_bytes);
  }
  __asm__ volatile("" ::: "memory");
}

// Loads one configuration for all tiles of a task, because loading has a long latency.
void gemm_begin(int rows) { _tile_loadconfig(&configs.of_rows[rows < block_m ? rows : block_m]); }

void gemm_end() { _tile_release(); }  // otherwise Linux saves 8 KB at every thread switch

void gemm_tile(const std::int8_t* a, std::int64_t lda, int rows, std::int64_t k, const void* panel,
               const std::int32_t*, std::int32_t* acc) {
  const auto* const b = static_cast<const char*>(panel);
  if (rows <= half) return block<false>(a, lda, rows, k, b, acc);
  if (rows <= block_m) return block<true>(a, lda, rows, k, b, acc);
  for (int next = 0; next < rows; next += block_m) {
    // The last block takes the last 32 rows, and may repeat some.
    const int m = next + block_m <= rows ? next : rows - block_m;
    block<true>(a + m * lda, lda, block_m, k, b, acc + m * tile_n);
  }
}

}  // namespace

const SimdKernels& simd_amx() {
  static const SimdKernels table = [] {
    SimdKernels kernels = simd_avx512();
    kernels.gemm = {tile_m,  tile_n,    gemm_panel_bytes, gemm_pack,
                    nullptr, gemm_tile, gemm_begin,       gemm_end};
    return kernels;
  }();
  return table;
}

}  // namespace hot::detail
