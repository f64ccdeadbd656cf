// Inner loops in plain C++: one lane.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cpu/scalar.h"

namespace hot::detail {
namespace {

struct V {
  static constexpr int width = 1;
  using F = float;
  using I = std::uint32_t;

  static std::int32_t signed_of(I v) { return static_cast<std::int32_t>(v); }
  static I unsigned_of(std::int32_t v) { return static_cast<I>(v); }

  static F load(const float* p) { return *p; }
  static void store(float* p, F v) { *p = v; }
  static F set(float v) { return v; }
  static I seti(std::uint32_t v) { return v; }
  static I load_u8(const std::uint8_t* p) { return *p; }
  static I load_i8(const std::int8_t* p) { return unsigned_of(*p); }
  // Loads packed codes from index `first` (a multiple of the width), low nibble first.
  static I load_int4(const std::uint8_t* p, std::int64_t first) {
    return p[first / 2] >> (first % 2 * 4) & 15U;
  }
  static void store_i8(std::int8_t* p, I v) { *p = static_cast<std::int8_t>(signed_of(v)); }
  static F load_bf16(const std::uint16_t* p) { return bf16_to_float(*p); }
  static F load_f16(const std::uint16_t* p) { return f16_to_float(*p); }
  static void store_f16(std::uint16_t* p, F v) { *p = float_to_f16(v); }

  static F fused(F a, F b, F c) { return std::fma(a, b, c); }

  static I max_u(I a, I b) { return a > b ? a : b; }
  static I min_i(I a, I b) { return signed_of(a) < signed_of(b) ? a : b; }
  static I addi(I a, I b) { return a + b; }
  static I subi(I a, I b) { return a - b; }
  static I shift_right(I v, int n) { return v >> n; }
  static I shift_left(I v, int n) { return v << n; }
  static I greater(I a, I b) { return signed_of(a) > signed_of(b) ? ~0U : 0U; }
  static void mul_wide(I a, std::uint32_t b, I& high, I& low) {
    const std::uint64_t product = std::uint64_t{a} * b;
    high = static_cast<I>(product >> 32);
    low = static_cast<I>(product);
  }

  static I trunc_int(F v) { return unsigned_of(static_cast<std::int32_t>(v)); }
  static I bits_of(F v) { return float_bits(v); }
  static F float_of(I v) { return float_from_bits(v); }
  static F to_float(I v) { return static_cast<float>(signed_of(v)); }
  static F lookup16(I index, const float* table) { return table[index]; }
  static F fwht_inside(F v) { return v; }
};

}  // namespace
}  // namespace hot::detail

#include "cpu/simd_impl.h"

namespace hot::detail {
namespace {

// Panel layout: for every k, the values of 8 rows of b side by side.
constexpr int tile_m = 4, tile_n = 8;

std::size_t gemm_panel_bytes(std::int64_t k) { return static_cast<std::size_t>(k) * tile_n; }

void gemm_pack(const std::int8_t* b, std::int64_t ldb, int rows, std::int64_t k, void* panel) {
  auto* out = static_cast<std::int8_t*>(panel);
  for (std::int64_t i = 0; i < k; ++i) {
    for (int n = 0; n < tile_n; ++n) {
      *out++ = n < rows ? b[n * ldb + i] : static_cast<std::int8_t>(0);
    }
  }
}

void gemm_tile(const std::int8_t* a, std::int64_t lda, int rows, std::int64_t k, const void* panel,
               const std::int32_t*, std::int32_t* acc) {
  const auto* b = static_cast<const std::int8_t*>(panel);
  for (int m = 0; m < rows; ++m) {
    std::int32_t sum[tile_n] = {};
    for (std::int64_t i = 0; i < k; ++i) {
      for (int n = 0; n < tile_n; ++n) sum[n] += a[m * lda + i] * b[i * tile_n + n];
    }
    for (int n = 0; n < tile_n; ++n) acc[m * tile_n + n] = sum[n];
  }
}

}  // namespace

const SimdKernels& simd_plain() {
  static const SimdKernels table =
      kernels_with({tile_m, tile_n, gemm_panel_bytes, gemm_pack, nullptr, gemm_tile});
  return table;
}

}  // namespace hot::detail
