// Scales, rounding and random bits of docs/numerics.md on the device: the same operations in the
// same order as cpp/src/cpu (this directory is compiled with --fmad=false), so the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hot/quantize.h"
#include "random_key.h"

namespace hot::detail {

struct DeviceScale {
  float scale, inv;
  bool keep;  // false: codes are 0 although the values are not finite
};

__device__ inline DeviceScale device_scale(std::uint32_t amax_bits, int bits) {
  const float q = bits == 4 ? 7.0F : 127.0F;
  const float amax = __uint_as_float(amax_bits);
  if (amax_bits >= 0x7f800000U) return {__uint_as_float(0x7fc00000U), 0.0F, false};
  if (amax < 0x1p-100F) return {0.0F, 0.0F, true};
  return {__fdiv_rn(amax, q), __fdiv_rn(q, amax), true};
}

__device__ inline std::uint32_t abs_bits(float v) { return __float_as_uint(v) & 0x7fffffffU; }

struct RandomWords {
  std::uint32_t word[4];
  // Twice byte i.
  __device__ std::uint32_t twice(int i) const {
    const int shift = 8 * (i % 4) - 1;
    return (shift < 0 ? word[i / 4] << 1 : word[i / 4] >> shift) & 510U;
  }
};

// Philox4x32-10 of one block of 16 elements.
__device__ inline RandomWords random_words(const RandomKey& key, std::uint64_t blk) {
  std::uint32_t c0 = static_cast<std::uint32_t>(blk);
  std::uint32_t c1 = (static_cast<std::uint32_t>(blk >> 32) & 0xffffU) | key.stream_purpose;
  std::uint32_t c2 = key.offset_low, c3 = key.offset_high;
  std::uint32_t k0 = key.seed_low, k1 = key.seed_high;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t h0 = __umulhi(0xD2511F53U, c0), l0 = 0xD2511F53U * c0;
    const std::uint32_t h1 = __umulhi(0xCD9E8D57U, c2), l1 = 0xCD9E8D57U * c2;
    c0 = h1 ^ c1 ^ k0;
    c2 = h0 ^ c3 ^ k1;
    c1 = l1;
    c3 = l0;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

// v is value * inv, twice_u twice the element's random byte (stochastic only).
template <Rounding rounding>
__device__ inline int round_code(float v, std::uint32_t twice_u, int bits) {
  const int q_max = bits == 4 ? 7 : 127;
  if constexpr (rounding == Rounding::nearest) {
    return max(-q_max, min(q_max, __float2int_rn(v)));
  } else {
    const float a = fabsf(v);
    int code;
    if constexpr (rounding == Rounding::stochastic) {
      // (ceil(512 a) + 510 - 2u) >> 9: docs/numerics.md, "Rounding". Added to 2^23 and rounded up,
      // the product leaves its ceiling in the low bits: one instruction, where a conversion to an
      // integer runs at an eighth of the rate. |v| <= Q (1 + 2^-22), so that nothing passes Q.
      const int ceiling = __float_as_int(__fmaf_ru(a, 512.0F, 8388608.0F));
      code = (ceiling - static_cast<int>(twice_u) + (510 - 0x4b000000)) >> 9;
    } else {
      const int h = bits == 4 ? 10 : 8;
      const int whole = __float2int_rz(a);
      const float fraction = a - static_cast<float>(whole);
      const int f = __float2int_rz(fraction * static_cast<float>(1 << (2 * h + 1)));
      const int p = f >> (h + 1), r = f & ((1 << (h + 1)) - 1);
      code = min(whole + (2 * p + 1 > r && f > 0 ? 1 : 0), q_max);
    }
    return v < 0.0F ? -code : code;
  }
}

// Two codes as bytes, the first lowest, below the low half of `upper`.
__device__ inline std::uint32_t pack_codes(int first, int second, std::uint32_t upper) {
  std::uint32_t out;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(second), "r"(first), "r"(upper));
  return out;
}

// Codes of 16 consecutive k as 4 words, lowest byte first. `value(i)` is value i times its inv.
template <Rounding rounding, class Value>
__device__ inline uint4 round_group(const Value& value, const RandomKey& key, std::uint64_t blk,
                                    int bits) {
  RandomWords random{};
  if constexpr (rounding == Rounding::stochastic) random = random_words(key, blk);
  std::uint32_t packed[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    int code[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      code[j] = round_code<rounding>(value(4 * w + j), random.twice(4 * w + j), bits);
    }
    packed[w] = pack_codes(code[0], code[1], pack_codes(code[2], code[3], 0));
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// A run-time rounding becomes a template argument on the host.
template <class Call>
inline void with_rounding(Rounding rounding, const Call& call) {
  switch (rounding) {
    case Rounding::nearest:
      return call(std::integral_constant<Rounding, Rounding::nearest>{});
    case Rounding::stochastic:
      return call(std::integral_constant<Rounding, Rounding::stochastic>{});
    case Rounding::pseudo_stochastic:
      return call(std::integral_constant<Rounding, Rounding::pseudo_stochastic>{});
  }
}

}  // namespace hot::detail
