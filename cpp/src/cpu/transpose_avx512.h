// Transpose for the panels of the AVX-512 and AMX products. Internal linkage: see simd_impl.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace hot::detail {
namespace {

// Transposes the 32-bit words of up to 16 rows of up to 64 bytes: word i of line j is word j of row
// i. Words beyond the rows and bytes are 0.
inline void transpose_words(const std::int8_t* from, std::int64_t stride, int rows,
                            std::int64_t bytes, __m512i (&line)[16]) {
  const auto mask = bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = i < rows ? _mm512_maskz_loadu_epi8(mask, from + i * stride) : _mm512_setzero_si512();
  }
  for (int i = 0; i < 16; i += 2) {  // pairs of rows
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // groups of four rows, words of a lane
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  constexpr int even = 0x88, odd = 0xdd;  // selections of 128-bit lanes
  for (int i = 0; i < 4; ++i) {
    const __m512i upper_even = _mm512_shuffle_i32x4(a[i], a[i + 4], even);
    const __m512i upper_odd = _mm512_shuffle_i32x4(a[i], a[i + 4], odd);
    const __m512i lower_even = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], even);
    const __m512i lower_odd = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], odd);
    line[i] = _mm512_shuffle_i32x4(upper_even, lower_even, even);
    line[i + 8] = _mm512_shuffle_i32x4(upper_even, lower_even, odd);
    line[i + 4] = _mm512_shuffle_i32x4(upper_odd, lower_odd, even);
    line[i + 12] = _mm512_shuffle_i32x4(upper_odd, lower_odd, odd);
  }
}

}  // namespace
}  // namespace hot::detail
