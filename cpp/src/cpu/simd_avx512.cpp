// Inner loops with AVX-512 (F, BW, VL, DQ) and VNNI: 16 lanes. vpdpbusd multiplies unsigned by
// signed bytes. Therefore b is stored plus 128, and the sums of a row start at -128 * sum(a),
// modulo 2^32. GCC 12 warns about "undefined" registers in its own intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/scalar.h"
#include "cpu/transpose_avx512.h"

namespace hot::detail {
namespace {

struct V {
  static constexpr int width = 16;
  using F = __m512;
  using I = __m512i;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F set(float v) { return _mm512_set1_ps(v); }
  static I seti(std::uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
  static I load_u8(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_i8(const std::int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Loads packed codes from index `first` (a multiple of the width), low nibble first.
  static I load_int4(const std::uint8_t* p, std::int64_t first) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + first / 2));
    const __m128i all = _mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4));
    return _mm512_cvtepu8_epi32(all) & seti(15);
  }
  static void store_i8(std::int8_t* p, I v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
  }
  static F load_bf16(const std::uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static F load_f16(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_f16(std::uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static F fused(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static I max_u(I a, I b) { return _mm512_max_epu32(a, b); }
  static I min_i(I a, I b) { return _mm512_min_epi32(a, b); }
  static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
  static I subi(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I shift_right(I v, int n) { return _mm512_srli_epi32(v, static_cast<unsigned>(n)); }
  static I shift_left(I v, int n) { return _mm512_slli_epi32(v, static_cast<unsigned>(n)); }
  static I greater(I a, I b) { return _mm512_movm_epi32(_mm512_cmpgt_epi32_mask(a, b)); }
  static void mul_wide(I a, std::uint32_t b, I& high, I& low) {
    const I factor = seti(b);
    const I even = _mm512_mul_epu32(a, factor);
    const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  }

  static I trunc_int(F v) { return _mm512_cvttps_epi32(v); }
  static I bits_of(F v) { return _mm512_castps_si512(v); }
  static F float_of(I v) { return _mm512_castsi512_ps(v); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }

  static F lookup16(I index, const float* table) {
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
  }

  // One level of the FWHT of 16 lanes: `upper` lanes become partner - v, the others partner + v. A
  // fused multiply-add by 1 or -1 rounds like the sum.
  static F stage(F v, F partner, __mmask16 upper) {
    return _mm512_fmadd_ps(v, _mm512_mask_blend_ps(upper, set(1.0F), set(-1.0F)), partner);
  }
  static F fwht_inside(F v) {
    v = stage(v, _mm512_permute_ps(v, 0xB1), 0xAAAA);
    v = stage(v, _mm512_permute_ps(v, 0x4E), 0xCCCC);
    v = stage(v, _mm512_shuffle_f32x4(v, v, 0xB1), 0xF0F0);
    return stage(v, _mm512_shuffle_f32x4(v, v, 0x4E), 0xFF00);
  }
};

}  // namespace
}  // namespace hot::detail

#include "cpu/simd_impl.h"

namespace hot::detail {
namespace {

// Tile of 6 x 64: 24 accumulators, four vectors of b, one of a. Panel layout: for every four k, the
// four bytes of each of 64 rows of b, 256 bytes.
constexpr int tile_m = 6, tile_n = 64;

std::size_t gemm_panel_bytes(std::int64_t k) { return static_cast<std::size_t>((k + 3) / 4) * 256; }

void gemm_pack(const std::int8_t* b, std::int64_t ldb, int rows, std::int64_t k, void* panel) {
  auto* out = static_cast<std::int8_t*>(panel);
  const __m512i signs = _mm512_set1_epi8(-128);
  for (std::int64_t i = 0; i < k; i += 64) {
    const int lines = static_cast<int>((k - i < 64 ? k - i : 64) + 3) / 4;
    for (int n = 0; n < tile_n; n += 16) {
      __m512i line[16];
      transpose_words(n < rows ? b + n * ldb + i : b, ldb, rows - n, k - i, line);
      for (int j = 0; j < lines; ++j) {
        _mm512_storeu_si512(out + (i / 4 + j) * 4 * tile_n + 4 * n,
                            _mm512_xor_si512(line[j], signs));
      }
    }
  }
}

std::int32_t gemm_row_bias(const std::int8_t* a, std::int64_t k) {
  __m512i sums = _mm512_setzero_si512();
  const __m512i ones = _mm512_set1_epi8(1);
  std::int64_t i = 0;
  for (; i + 64 <= k; i += 64) sums = _mm512_dpbusd_epi32(sums, ones, _mm512_loadu_si512(a + i));
  if (i < k) {
    const auto mask = static_cast<__mmask64>((std::uint64_t{1} << (k - i)) - 1);
    sums = _mm512_dpbusd_epi32(sums, ones, _mm512_maskz_loadu_epi8(mask, a + i));
  }
  return -128 * _mm512_reduce_add_epi32(sums);
}

// Type of sums. GCC 12 keeps it in registers, but stores sums of type __m512i at every step.
using Sums = std::int32_t __attribute__((vector_size(64)));

Sums add_products(Sums sums, __m512i b, __m512i a) {
  return reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), b, a));
}

// Sums of `rows` rows over `steps` steps of four k.
template <int rows>
void tile_rows(const std::int8_t* a, std::int64_t lda, std::int64_t steps, const std::int8_t* b,
               const std::int32_t* bias, std::int32_t* acc) {
  Sums sum[rows][4];
  for (int m = 0; m < rows; ++m) {
    for (int j = 0; j < 4; ++j) sum[m][j] = reinterpret_cast<Sums>(_mm512_set1_epi32(bias[m]));
  }
  for (; steps > 0; --steps, a += 4, b += 4 * tile_n) {
    const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 64);
    const __m512i b2 = _mm512_loadu_si512(b + 128), b3 = _mm512_loadu_si512(b + 192);
    for (int m = 0; m < rows; ++m) {
      std::int32_t bytes;
      std::memcpy(&bytes, a + m * lda, sizeof bytes);
      const __m512i four = _mm512_set1_epi32(bytes);
      sum[m][0] = add_products(sum[m][0], b0, four);
      sum[m][1] = add_products(sum[m][1], b1, four);
      sum[m][2] = add_products(sum[m][2], b2, four);
      sum[m][3] = add_products(sum[m][3], b3, four);
    }
  }
  for (int m = 0; m < rows; ++m) {
    for (int j = 0; j < 4; ++j) {
      _mm512_storeu_si512(acc + m * tile_n + 16 * j, reinterpret_cast<__m512i>(sum[m][j]));
    }
  }
}

void gemm_tile(const std::int8_t* a, std::int64_t lda, int rows, std::int64_t k, const void* panel,
               const std::int32_t* bias, std::int32_t* acc) {
  using Rows = decltype(&tile_rows<1>);
  static constexpr Rows of_rows[tile_m] = {tile_rows<1>, tile_rows<2>, tile_rows<3>,
                                           tile_rows<4>, tile_rows<5>, tile_rows<6>};
  const auto* const b = static_cast<const std::int8_t*>(panel);
  of_rows[rows - 1](a, lda, k / 4, b, bias, acc);
  const std::int64_t done = k / 4 * 4;
  if (done == k) return;
  const auto* const rest = reinterpret_cast<const std::uint8_t*>(b + done * tile_n);
  for (int m = 0; m < rows; ++m) {
    for (std::int64_t i = done; i < k; ++i) {
      const int factor = a[m * lda + i];
      for (int n = 0; n < tile_n; ++n) {
        std::int32_t& sum = acc[m * tile_n + n];
        // Unsigned arithmetic: intermediate sums of bytes plus 128 may overflow an INT32.
        sum =
            static_cast<std::int32_t>(static_cast<std::uint32_t>(sum) +
                                      static_cast<std::uint32_t>(factor * rest[4 * n + i - done]));
      }
    }
  }
}

}  // namespace

const SimdKernels& simd_avx512() {
  static const SimdKernels table =
      kernels_with({tile_m, tile_n, gemm_panel_bytes, gemm_pack, gemm_row_bias, gemm_tile});
  return table;
}

}  // namespace hot::detail
