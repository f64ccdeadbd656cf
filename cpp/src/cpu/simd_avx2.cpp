// Inner loops with AVX2 and F16C: 8 lanes. The product widens to INT16 (vpmaddwd), which is exact
// for every INT8 pair. vpmaddubsw would saturate.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/scalar.h"

namespace hot::detail {
namespace {

struct V {
  static constexpr int width = 8;
  using F = __m256;
  using I = __m256i;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F set(float v) { return _mm256_set1_ps(v); }
  static I seti(std::uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
  static I load_u8(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_i8(const std::int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // Loads packed codes from index `first` (a multiple of the width), low nibble first.
  static I load_int4(const std::uint8_t* p, std::int64_t first) {
    std::uint32_t word;
    std::memcpy(&word, p + first / 2, sizeof word);
    const I shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_srlv_epi32(seti(word), shifts) & seti(15);
  }
  static void store_i8(std::int8_t* p, I v) {
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  static F load_bf16(const std::uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static F load_f16(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f16(std::uint16_t* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static F fused(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static I max_u(I a, I b) { return _mm256_max_epu32(a, b); }
  static I min_i(I a, I b) { return _mm256_min_epi32(a, b); }
  static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
  static I subi(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I shift_right(I v, int n) { return _mm256_srli_epi32(v, n); }
  static I shift_left(I v, int n) { return _mm256_slli_epi32(v, n); }
  static I greater(I a, I b) { return _mm256_cmpgt_epi32(a, b); }
  static void mul_wide(I a, std::uint32_t b, I& high, I& low) {
    const I factor = seti(b);
    const I even = _mm256_mul_epu32(a, factor);
    const I odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  }

  static I trunc_int(F v) { return _mm256_cvttps_epi32(v); }
  static I bits_of(F v) { return _mm256_castps_si256(v); }
  static F float_of(I v) { return _mm256_castsi256_ps(v); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }

  static F lookup16(I index, const float* table) {
    const F low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    const F high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }

  // One level of the FWHT of 8 lanes: partner - v in lanes with a negative sign, else partner + v.
  static F stage(F v, F partner, F sign) { return partner + _mm256_xor_ps(v, sign); }
  static F fwht_inside(F v) {
    const float n = -0.0F;
    v = stage(v, _mm256_permute_ps(v, 0xB1), _mm256_setr_ps(0, n, 0, n, 0, n, 0, n));
    v = stage(v, _mm256_permute_ps(v, 0x4E), _mm256_setr_ps(0, 0, n, n, 0, 0, n, n));
    return stage(v, _mm256_permute2f128_ps(v, v, 1), _mm256_setr_ps(0, 0, 0, 0, n, n, n, n));
  }
};

}  // namespace
}  // namespace hot::detail

#include "cpu/simd_impl.h"

namespace hot::detail {
namespace {

// Tile of 6 x 16: 12 accumulators, two vectors of b, one of a. Panel layout: for every pair of k,
// the INT16 pairs of 16 rows of b, 64 bytes.
constexpr int tile_m = 6, tile_n = 16;

std::size_t gemm_panel_bytes(std::int64_t k) { return static_cast<std::size_t>((k + 1) / 2) * 64; }

void gemm_pack(const std::int8_t* b, std::int64_t ldb, int rows, std::int64_t k, void* panel) {
  auto* out = static_cast<std::int16_t*>(panel);
  for (std::int64_t i = 0; i < k; i += 2) {
    for (int n = 0; n < tile_n; ++n, out += 2) {
      out[0] = out[1] = 0;
      if (n >= rows) continue;  // a missing row has no address
      const std::int8_t* const row = b + n * ldb + i;
      out[0] = row[0];
      if (i + 1 < k) out[1] = row[1];
    }
  }
}

// Type of sums. GCC 12 keeps it in registers, but stores sums of type __m256i at every step.
using Sums = std::int32_t __attribute__((vector_size(32)));

Sums add_products(Sums sums, __m256i a, __m256i b) {
  return sums + reinterpret_cast<Sums>(_mm256_madd_epi16(a, b));
}

void gemm_tile(const std::int8_t* a, std::int64_t lda, int rows, std::int64_t k, const void* panel,
               const std::int32_t*, std::int32_t* acc) {
  constexpr std::int64_t chunk = 512;  // 6 KB of widened a
  alignas(32) std::int16_t wide[tile_m][chunk];
  Sums sum[tile_m][2] = {};
  const auto* b = static_cast<const __m256i*>(panel);
  for (std::int64_t start = 0; start < k; start += chunk) {
    const std::int64_t left = k - start < chunk ? k - start : chunk;
    for (int m = 0; m < tile_m; ++m) {
      const std::int8_t* row = a + (m < rows ? m : 0) * lda + start;
      for (std::int64_t i = 0; i < left; ++i) wide[m][i] = row[i];
      if (left % 2 != 0) wide[m][left] = 0;
    }
    for (std::int64_t i = 0; i < left; i += 2, b += 2) {
      const __m256i b0 = _mm256_loadu_si256(b), b1 = _mm256_loadu_si256(b + 1);
      for (int m = 0; m < tile_m; ++m) {
        std::int32_t pair;
        std::memcpy(&pair, &wide[m][i], sizeof pair);
        const __m256i both = _mm256_set1_epi32(pair);
        sum[m][0] = add_products(sum[m][0], both, b0);
        sum[m][1] = add_products(sum[m][1], both, b1);
      }
    }
  }
  for (int m = 0; m < rows; ++m) {
    std::memcpy(acc + m * tile_n, &sum[m][0], sizeof(Sums));
    std::memcpy(acc + m * tile_n + 8, &sum[m][1], sizeof(Sums));
  }
}

}  // namespace

const SimdKernels& simd_avx2() {
  static const SimdKernels table =
      kernels_with({tile_m, tile_n, gemm_panel_bytes, gemm_pack, nullptr, gemm_tile});
  return table;
}

}  // namespace hot::detail
