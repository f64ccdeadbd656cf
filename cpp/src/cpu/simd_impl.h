// Inner loops, written once for a vector type `V` of V::width lanes. simd_*.cpp define V and then
// include this file. Everything has internal linkage and uses no templates of the standard library.
// Otherwise the linker could put code compiled for AVX-512 into the plain path.
#pragma once

#include <type_traits>

#include "cpu/scalar.h"
#include "cpu/simd.h"
#include "weight_int4.h"

namespace hot::detail {
namespace {

using F = V::F;
using I = V::I;
constexpr int W = V::width;

inline I loadi(const std::uint32_t* p) {
  I v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void storei(std::uint32_t* p, I v) { std::memcpy(p, &v, sizeof v); }
inline I abs_bits(F v) { return V::bits_of(v) & V::seti(0x7fffffffU); }
inline F magnitudes(F v) { return V::float_of(abs_bits(v)); }
// Code with the sign of v.
inline I with_sign_of(F v, I code) {
  const I negative = V::greater(V::seti(0), V::bits_of(v));  // all bits set if true
  return V::subi(code ^ negative, negative);
}

// ---- conversion -------------------------------------------------------------------------------

void load(const void* src, DType dtype, std::int64_t count, float* dst) {
  const auto* half = static_cast<const std::uint16_t*>(src);
  std::int64_t i = 0;
  if (dtype == DType::f32) {
    // Rows of a strip are short. A copy of constant size avoids a call.
    if (count == strip_columns) {
      std::memcpy(dst, src, strip_columns * sizeof(float));
    } else {
      std::memcpy(dst, src, static_cast<std::size_t>(count) * sizeof(float));
    }
  } else if (dtype == DType::bf16) {
    for (; i + W <= count; i += W) V::store(dst + i, V::load_bf16(half + i));
    for (; i < count; ++i) dst[i] = bf16_to_float(half[i]);
  } else {
    for (; i + W <= count; i += W) V::store(dst + i, V::load_f16(half + i));
    for (; i < count; ++i) dst[i] = f16_to_float(half[i]);
  }
}

void store(const float* src, std::int64_t count, DType dtype, void* dst) {
  auto* half = static_cast<std::uint16_t*>(dst);
  std::int64_t i = 0;
  if (dtype == DType::f32) {
    std::memcpy(dst, src, static_cast<std::size_t>(count) * sizeof(float));
  } else if (dtype == DType::bf16) {
    for (; i < count; ++i) half[i] = float_to_bf16(src[i]);
  } else {
    for (; i + W <= count; i += W) V::store_f16(half + i, V::load(src + i));
    for (; i < count; ++i) half[i] = float_to_f16(src[i]);
  }
}

// ---- Hadamard ---------------------------------------------------------------------------------

// FWHT of values in registers. With a variable h, GCC would keep the values in memory.
template <int count, int h = 1>
inline void fwht_registers(F (&t)[count]) {
  if constexpr (h < count) {
    for (int i = 0; i < count; ++i) {
      if ((i & h) == 0) {
        const F a = t[i], b = t[i + h];
        t[i] = a + b;
        t[i + h] = a - b;
      }
    }
    fwht_registers<count, 2 * h>(t);
  }
}

// FWHT across `radix` vectors, `stride` floats apart. `inside` first transforms each vector.
template <int radix, bool inside>
inline void fwht_vectors(float* v, int stride) {
  F t[radix];
  for (int j = 0; j < radix; ++j) {
    t[j] = V::load(v + j * stride);
    if constexpr (inside) t[j] = V::fwht_inside(t[j]);
  }
  fwht_registers<radix>(t);
  for (int j = 0; j < radix; ++j) V::store(v + j * stride, t[j]);
}

// FWHT across `units` units of `width` floats with a stride of `stride` floats. Up to 16 units fit
// the registers and take one pass. More take a pass per factor of 16.
template <bool inside>
inline void fwht_levels(float* v, int units, int stride, int width) {
  const int radix = units < 16 ? units : 16;
  for (int first = 0; first < units; first += radix) {
    float* const from = v + first * stride;
    for (int c = 0; c < width; c += W) {
      if (radix == 16) fwht_vectors<16, inside>(from + c, stride);
      if (radix == 8) fwht_vectors<8, inside>(from + c, stride);
      if (radix == 4) fwht_vectors<4, inside>(from + c, stride);
      if (radix == 2) fwht_vectors<2, inside>(from + c, stride);
      if (radix == 1) fwht_vectors<1, inside>(from + c, stride);
    }
  }
  if (radix < units) fwht_levels<false>(v, units / radix, stride * radix, radix * stride);
}

// FWHT of a row: butterflies within a vector use shuffles, the others combine vectors.
void fwht_row(float* row, std::int64_t count, int block) {
  for (std::int64_t start = 0; start < count; start += block) {
    float* v = row + start;
    if (block >= W) {
      fwht_levels<true>(v, block / W, W, W);
      continue;
    }
    for (int h = 1; h < block; h *= 2) {
      for (int i = 0; i < block; i += 2 * h) {
        for (int j = i; j < i + h; ++j) {
          const float a = v[j], b = v[j + h];
          v[j] = a + b;
          v[j + h] = a - b;
        }
      }
    }
  }
}

void fwht_strip(float* strip, int block) {
  fwht_levels<false>(strip, block, strip_columns, strip_columns);
}

void fold_strip(const float* in, int length, int a, float* out) {
  int top = 1;
  while (top * 2 <= a) top *= 2;
  for (int t = 0; t < length; ++t) {
    if ((t & top) != 0) continue;
    const float* x = in + t * strip_columns;
    const float* y = in + (t ^ a) * strip_columns;
    for (int c = 0; c < strip_columns; c += W) {
      V::store(out + c, V::load(x + c) + V::load(y + c));
    }
    out += strip_columns;
  }
}

void scale_row(float* row, float factor) {
  const F f = V::set(factor);
  for (int c = 0; c < strip_columns; c += W) V::store(row + c, V::load(row + c) * f);
}

// ---- amax -------------------------------------------------------------------------------------

std::uint32_t amax(const float* v, std::int64_t count, std::uint32_t start) {
  std::int64_t i = 0;
  std::uint32_t best = start;
  if (count >= W) {
    I m = V::seti(0);
    for (; i + W <= count; i += W) m = V::max_u(m, abs_bits(V::load(v + i)));
    std::uint32_t lanes[W];
    storei(lanes, m);
    for (int j = 0; j < W; ++j) best = lanes[j] > best ? lanes[j] : best;
  }
  for (; i < count; ++i) {
    const std::uint32_t bits = float_bits(v[i]) & 0x7fffffffU;
    best = bits > best ? bits : best;
  }
  return best;
}

void amax_strip(const float* v, std::int64_t rows, std::uint32_t* amax) {
  for (int c = 0; c < strip_columns; c += W) {
    I m = loadi(amax + c);
    const float* p = v + c;
    for (std::int64_t k = 0; k < rows; ++k, p += strip_columns) {
      m = V::max_u(m, abs_bits(V::load(p)));
    }
    storei(amax + c, m);
  }
}

void amax_columns(const float* v, std::int64_t count, std::uint32_t* amax) {
  std::int64_t i = 0;
  for (; i + W <= count; i += W) {
    storei(amax + i, V::max_u(loadi(amax + i), abs_bits(V::load(v + i))));
  }
  for (; i < count; ++i) {
    const std::uint32_t bits = float_bits(v[i]) & 0x7fffffffU;
    amax[i] = bits > amax[i] ? bits : amax[i];
  }
}

// ---- random bits ------------------------------------------------------------------------------

// Random words of W blocks: lane i of word[w] is word w of blk[i].
inline void random_words(const RandomKey& key, const std::uint64_t* blk, I (&word)[4]) {
  std::uint32_t low[W], high[W];
  for (int i = 0; i < W; ++i) {
    low[i] = static_cast<std::uint32_t>(blk[i]);
    high[i] = (static_cast<std::uint32_t>(blk[i] >> 32) & 0xffffU) | key.stream_purpose;
  }
  word[0] = loadi(low);
  word[1] = loadi(high);
  word[2] = V::seti(key.offset_low);
  word[3] = V::seti(key.offset_high);
  std::uint32_t k0 = key.seed_low, k1 = key.seed_high;
  for (int round = 0; round < philox_rounds; ++round) {
    I h0, l0, h1, l1;
    V::mul_wide(word[0], 0xD2511F53U, h0, l0);
    V::mul_wide(word[2], 0xCD9E8D57U, h1, l1);
    word[0] = h1 ^ word[1] ^ V::seti(k0);
    word[2] = h0 ^ word[3] ^ V::seti(k1);
    word[1] = l1;
    word[3] = l0;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
}

// Writes the random bytes of `blocks` consecutive blocks, blocks <= W.
inline void random_run(const RandomKey& key, std::uint64_t blk, int blocks, std::uint8_t* out) {
  std::uint64_t blks[W];
  for (int i = 0; i < W; ++i) blks[i] = blk + static_cast<std::uint64_t>(i);
  I random[4];
  random_words(key, blks, random);
  std::uint32_t words[4][W];
  for (int w = 0; w < 4; ++w) storei(words[w], random[w]);
  for (int i = 0; i < blocks; ++i) {
    const std::uint32_t four[4] = {words[0][i], words[1][i], words[2][i], words[3][i]};
    std::memcpy(out + 16 * i, four, sizeof four);  // little endian: lowest byte first
  }
}

// ---- rounding ---------------------------------------------------------------------------------

// Rounding of value * inv to codes (docs/numerics.md, "Rounding"). A fused addition of 1.5 * 2^23
// leaves the integer (half to even) in the low bits of the sum.
constexpr float integer_float = 12582912.0F;
constexpr std::uint32_t integer_bits = 0x4b400000U;

inline I rounded_product(F a, F b, F magic) {
  return V::subi(V::bits_of(V::fused(a, b, magic)), V::seti(integer_bits));
}

template <int bits>
inline I pseudo_stochastic_code(F v) {
  constexpr int q_max = bits == 4 ? 7 : 127, h = bits == 4 ? 10 : 8;
  const F a = magnitudes(v);
  const I whole = V::trunc_int(a);
  const F fraction = a - V::to_float(whole);
  const I f = V::trunc_int(fraction * V::set(static_cast<float>(1 << (2 * h + 1))));
  const I p = V::shift_right(f, h + 1);
  const I r = f & V::seti((1U << (h + 1)) - 1);
  // All bits set if true.
  const I up = V::greater(V::addi(V::addi(p, p), V::seti(1)), r) & V::greater(f, V::seti(0));
  return with_sign_of(v, V::min_i(V::subi(whole, up), V::seti(q_max)));
}

template <Rounding rounding, int bits>
inline I round_code(F value, F inv, I u) {
  if constexpr (rounding == Rounding::nearest) {
    return rounded_product(value, inv, V::set(integer_float));
  } else if constexpr (rounding == Rounding::stochastic) {
    const F magic = V::to_float(u) + V::set(integer_float);  // exact, also 256 * inv
    const I sum = rounded_product(value, inv * V::set(256.0F), magic);
    // Arithmetic shift by 8, built from a logical shift.
    return V::subi(V::shift_right(V::addi(sum, V::seti(1U << 16)), 8), V::seti(1U << 8));
  } else {
    return pseudo_stochastic_code<bits>(value * inv);
  }
}

template <Rounding rounding, int bits>
void quantize_row_as(const float* v, std::int64_t count, const float* inv, bool each,
                     const RandomKey& key, std::uint64_t blk, std::int8_t* out) {
  constexpr int run = 16 * W;  // elements that share W random blocks
  std::uint8_t random[run] = {};
  float tail[run], tail_inv[run];
  for (std::int64_t start = 0; start < count; start += run) {
    const std::int64_t left = count - start < run ? count - start : run;
    const int blocks = static_cast<int>((left + 15) / 16);
    if constexpr (rounding == Rounding::stochastic) {
      random_run(key, blk + static_cast<std::uint64_t>(start / 16), blocks, random);
    }
    const float* in = v + start;
    const float* factors = each ? inv + start : inv;
    std::int8_t* codes = out + start;
    std::int8_t last[run];
    const bool partial = left < run && left % W != 0;
    if (partial) {
      for (int i = 0; i < run; ++i) tail[i] = i < left ? in[i] : 0.0F;
      if (each) {
        for (int i = 0; i < run; ++i) tail_inv[i] = i < left ? factors[i] : 0.0F;
        factors = tail_inv;
      }
      in = tail;
      codes = last;
    }
    for (int i = 0; i < left; i += W) {
      const I u = rounding == Rounding::stochastic ? V::load_u8(random + i) : V::seti(0);
      const F factor = each ? V::load(factors + i) : V::set(*factors);
      V::store_i8(codes + i, round_code<rounding, bits>(V::load(in + i), factor, u));
    }
    if (partial) std::memcpy(out + start, last, static_cast<std::size_t>(left));
  }
}

template <bool by_k, Rounding rounding, int bits>
void quantize_strip_as(const float* v, int cols, const float* inv, const std::uint32_t* keep,
                       const RandomKey& key, const std::uint64_t* blk, std::int8_t* out,
                       std::int64_t ld) {
  for (int c = 0; c < cols; c += W) {
    I random[4] = {};
    if constexpr (rounding == Rounding::stochastic) random_words(key, blk + c, random);
    std::uint32_t packed[4][W];
    for (int w = 0; w < 4; ++w) {
      I four = V::seti(0);
      for (int j = 0; j < 4; ++j) {
        const int k = 4 * w + j;
        const F factor = by_k ? V::set(inv[k]) : V::load(inv + c);
        const I mask = by_k ? V::seti(keep[k]) : loadi(keep + c);
        const F x = V::float_of(V::bits_of(V::load(v + k * strip_columns + c)) & mask);
        const I byte = V::shift_right(random[w], 8 * j) & V::seti(255);
        const I code = round_code<rounding, bits>(x, factor, byte);
        four = four | V::shift_left(code & V::seti(255), 8 * j);
      }
      storei(packed[w], four);
    }
    const int lanes = cols - c < W ? cols - c : W;
    for (int i = 0; i < lanes; ++i) {
      const std::uint32_t codes[4] = {packed[0][i], packed[1][i], packed[2][i], packed[3][i]};
      std::memcpy(out + (c + i) * ld, codes, sizeof codes);
    }
  }
}

// Calls `call` with rounding and bits as compile-time constants.
template <class Call>
inline void dispatch_rounder(const Rounder& r, const Call& call) {
  using std::integral_constant;
  const auto with = [&](auto rounding) {
    if (r.bits == 4) return call(rounding, integral_constant<int, 4>{});
    call(rounding, integral_constant<int, 8>{});
  };
  switch (r.rounding) {
    case Rounding::nearest:
      return with(integral_constant<Rounding, Rounding::nearest>{});
    case Rounding::stochastic:
      return with(integral_constant<Rounding, Rounding::stochastic>{});
    case Rounding::pseudo_stochastic:
      return with(integral_constant<Rounding, Rounding::pseudo_stochastic>{});
  }
}

void quantize_row(const float* v, std::int64_t count, const float* inv, bool each, const Rounder& r,
                  std::uint64_t blk, std::int8_t* out) {
  dispatch_rounder(r, [&](auto rounding, auto bits) {
    quantize_row_as<rounding(), bits()>(v, count, inv, each, r.key, blk, out);
  });
}

template <bool by_k>
void quantize_strip(const float* v, int cols, const float* inv, const std::uint32_t* keep,
                    const Rounder& r, const std::uint64_t* blk, std::int8_t* out, std::int64_t ld) {
  dispatch_rounder(r, [&](auto rounding, auto bits) {
    quantize_strip_as<by_k, rounding(), bits()>(v, cols, inv, keep, r.key, blk, out, ld);
  });
}

// ---- sums and tables --------------------------------------------------------------------------

std::uint32_t sum_magnitudes(const float* v, std::int64_t count, float unit) {
  I sums = V::seti(0);
  std::int64_t i = 0;
  for (; i + W <= count; i += W) {
    const F magnitude = magnitudes(V::load(v + i));
    sums = V::addi(sums, rounded_product(magnitude, V::set(unit), V::set(integer_float)));
  }
  std::uint32_t lanes[W], total = 0;
  storei(lanes, sums);
  for (int j = 0; j < W; ++j) total += lanes[j];
  for (; i < count; ++i) {
    const float magnitude = v[i] < 0 ? -v[i] : v[i];
    total += float_bits(magnitude * unit + integer_float) - integer_bits;
  }
  return total;
}

void expand_int4(const std::uint8_t* packed, std::int64_t count, const float* table, float* out) {
  std::int64_t i = 0;
  for (; i + W <= count; i += W) V::store(out + i, V::lookup16(V::load_int4(packed, i), table));
  for (; i < count; ++i) out[i] = table[packed[i / 2] >> (i % 2 * 4) & 15];
}

// Compilers vectorise it.
std::uint32_t int4_error(const int* value, int count, int step) {
  const float factor = weight_int4::code_factor(step);
  std::uint32_t error = 0;
  for (int i = 0; i < count; ++i) {
    const int code = weight_int4::nearest(value[i], factor);
    const int off = value[i] - weight_int4::unit * weight_int4::expanded(code, step);
    error += static_cast<std::uint32_t>(off * off);
  }
  return error;
}

// ---- products ---------------------------------------------------------------------------------

// Dequantises a tile. The template arguments keep branches out of the loops over columns.
template <bool accumulate, bool biased, bool one_scale>
inline void dequantize_rows(const SumsTile& tile) {
  for (int m = 0; m < tile.rows; ++m) {
    const float scale = tile.a_scale[m * tile.a_step] * tile.inv_divisor;
    const F a = V::set(scale);
    const std::int32_t* const sums = tile.sums + m * tile.ld;
    float* const out = tile.out + m * tile.out_ld;
    int i = 0;
    for (; i + W <= tile.cols; i += W) {
      const F b = one_scale ? V::set(*tile.b_scale) : V::load(tile.b_scale + i);
      const F sum = V::to_float(loadi(reinterpret_cast<const std::uint32_t*>(sums) + i));
      F v = sum * b * a;
      if (accumulate) v = V::load(out + i) + v;
      if (biased) v = v + V::load(tile.bias + i);
      V::store(out + i, v);
    }
    for (; i < tile.cols; ++i) {
      float v = static_cast<float>(sums[i]) * tile.b_scale[one_scale ? 0 : i] * scale;
      if (accumulate) v = out[i] + v;
      if (biased) v += tile.bias[i];
      out[i] = v;
    }
  }
}

template <bool accumulate, bool biased>
inline void dequantize_scaled(const SumsTile& tile) {
  if (tile.b_step == 0) return dequantize_rows<accumulate, biased, true>(tile);
  dequantize_rows<accumulate, biased, false>(tile);
}

void dequantize(const SumsTile& tile) {
  if (tile.accumulate) return dequantize_scaled<true, false>(tile);
  if (tile.bias != nullptr) return dequantize_scaled<false, true>(tile);
  dequantize_scaled<false, false>(tile);
}

void axpy(float a, const std::int8_t* b, std::int64_t count, float* acc) {
  const F factor = V::set(a);
  std::int64_t i = 0;
  for (; i + W <= count; i += W) {
    V::store(acc + i, V::load(acc + i) + factor * V::to_float(V::load_i8(b + i)));
  }
  for (; i < count; ++i) {
    const float product = a * static_cast<float>(b[i]);
    acc[i] = acc[i] + product;
  }
}

// Function table of an instruction set: the loops above and its products.
SimdKernels kernels_with(const GemmKernels& gemm) {
  return {load,
          store,
          fwht_row,
          fwht_strip,
          fold_strip,
          scale_row,
          amax,
          amax_strip,
          amax_columns,
          quantize_row,
          quantize_strip<false>,
          quantize_strip<true>,
          sum_magnitudes,
          expand_int4,
          int4_error,
          dequantize,
          axpy,
          gemm};
}

}  // namespace
}  // namespace hot::detail
