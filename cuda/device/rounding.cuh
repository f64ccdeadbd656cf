// Scales, rounding and random bits of docs/numerics.md on the device. Operations and their order
// equal those of cpp/src/cpu (with --fmad=false), and so do the bits.
#pragma once

#include <cstdint>

#include "cuda/device/vec_io.cuh"
#include "hot/quantize.h"
#include "operands.h"

namespace hot::detail {

struct DeviceScale {
  float scale, inv;
  bool keep;  // false: a value is not finite, and codes are 0
};

// Single factor for all 16 elements of a group.
struct UniformScale {
  float inv;
  __device__ float operator()(int) const { return inv; }
};

// a / q for a >= 2^-100 and q = 7 or 127, rounded once like a division. r is the reciprocal of q.
// The exact remainder corrects the product.
__device__ inline float divided_by(float a, float q, float r) {
  const float guess = a * r;
  return __fmaf_rn(__fmaf_rn(-guess, q, a), r, guess);
}

__device__ inline DeviceScale device_scale(std::uint32_t amax_bits, int bits) {
  const float q = bits == 4 ? 7.0F : 127.0F;
  const float amax = __uint_as_float(amax_bits);
  if (amax_bits >= 0x7f800000U) return {__uint_as_float(0x7fc00000U), 0.0F, false};
  if (amax < 0x1p-100F) return {0.0F, 0.0F, true};
  return {divided_by(amax, q, bits == 4 ? 1.0F / 7.0F : 1.0F / 127.0F), __fdiv_rn(q, amax), true};
}

__device__ inline std::uint32_t abs_bits(float v) { return __float_as_uint(v) & 0x7fffffffU; }

// atomicMax that skips the atomic if the value is not larger, because atomics to one address queue.
__device__ inline void atomic_max(std::uint32_t* amax, std::uint32_t v) {
  if (__ldcg(amax) < v) atomicMax(amax, v);
}

struct RandomWords {
  std::uint32_t word[4];  // bytes of 16 elements, lowest byte first
};

// Random key as a kernel argument. The host computes the round keys of Philox. They are operands in
// constant memory and cost no instruction.
struct DeviceKey {
  std::uint32_t stream_purpose, offset_low, offset_high;
  std::uint32_t round_low[philox_rounds], round_high[philox_rounds];
  const std::uint64_t* counter;  // Key::counter, in device memory
};

inline DeviceKey device_key(const Key& key, Purpose purpose) {
  Key on_host = key;
  on_host.counter = nullptr;
  const RandomKey random = random_key(on_host, purpose);
  DeviceKey d{random.stream_purpose, random.offset_low, random.offset_high, {}, {}, key.counter};
  for (std::uint32_t round = 0; round < philox_rounds; ++round) {
    d.round_low[round] = random.seed_low + round * 0x9E3779B9U;
    d.round_high[round] = random.seed_high + round * 0xBB67AE85U;
  }
  return d;
}

// Sum of a key's offset and counter, as words of the Philox counter.
struct DeviceOffset {
  std::uint32_t low, high;
};

// Reads the counter. Must follow the wait for the previous kernel (cuda/launch.h), which may write
// it. Uses a predicate, because a branch would split the surrounding code.
__device__ inline DeviceOffset offset_of(const DeviceKey& key) {
  DeviceOffset offset{key.offset_low, key.offset_high};
  asm volatile(
      "{\n\t.reg .pred counted;\n\t.reg .u32 low, high;\n\t"
      "setp.ne.u64 counted, %2, 0;\n\t"
      "@counted ld.global.v2.u32 {low, high}, [%2];\n\t"
      "@counted add.cc.u32 %0, %0, low;\n\t"
      "@counted addc.u32 %1, %1, high;\n\t}"
      : "+r"(offset.low), "+r"(offset.high)
      : "l"(key.counter)
      : "memory");
  return offset;
}

// offset_of for a whole warp; all lanes must call it. The reduction moves the result to uniform
// registers, which are plentiful.
template <Rounding rounding>
__device__ inline DeviceOffset warp_offset(const DeviceKey& key) {
  if constexpr (rounding != Rounding::stochastic) return {};
  const DeviceOffset offset = offset_of(key);
  return {__reduce_max_sync(0xffffffffU, offset.low), __reduce_max_sync(0xffffffffU, offset.high)};
}

// Random words of a block of 16 elements (Philox4x32).
__device__ inline RandomWords random_words(const DeviceKey& key, const DeviceOffset& offset,
                                           std::uint64_t blk) {
  std::uint32_t c0 = static_cast<std::uint32_t>(blk);
  std::uint32_t c1 = (static_cast<std::uint32_t>(blk >> 32) & 0xffffU) | key.stream_purpose;
  std::uint32_t c2 = offset.low, c3 = offset.high;
#pragma unroll
  for (int round = 0; round < philox_rounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * c0, p1 = std::uint64_t{0xCD9E8D57U} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ key.round_low[round];
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ key.round_high[round];
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
  }
  return {{c0, c1, c2, c3}};
}

// Offset a of a sketch's fold in a block of `length` values: value t is added to value t ^ a.
__device__ inline int sketch_draw(const RandomWords& draw, int fold, int length) {
  return 1 + static_cast<int>(__umulhi(draw.word[fold], static_cast<std::uint32_t>(length - 1)));
}

// Word of byte B of four words, the first word's byte lowest.
template <int B>
__device__ inline std::uint32_t gather_bytes(std::uint32_t w0, std::uint32_t w1, std::uint32_t w2,
                                             std::uint32_t w3) {
  constexpr unsigned pair = B | (B + 4) << 4;
  return __byte_perm(__byte_perm(w0, w1, pair), __byte_perm(w2, w3, pair), 0x5410);
}

// Rounding by a multiply-add to 1.5 * 2^23 (docs/numerics.md, "Rounding"). The low bits of the sum
// are the product in two's complement, rounded once to an integer. Codes are bytes of such sums:
// conversions and shifts would run at a fraction of the rate.
constexpr std::uint32_t integer_bits = 0x4b400000U;

__device__ inline std::uint32_t nearest_sum(float v, float inv) {
  return __float_as_uint(__fmaf_rn(v, inv, __uint_as_float(integer_bits)));
}

// Stochastic rounding with byte `byte` of the random bits u, which is part of the addend. The code,
// (256 v inv + u) >> 8, is byte 1 of the sum.
__device__ inline std::uint32_t stochastic_sum(float v, float inv, std::uint32_t u, int byte) {
  const float magic =
      __uint_as_float(__byte_perm(u, integer_bits, 0x7650U | static_cast<unsigned>(byte)));
  return __float_as_uint(__fmaf_rn(v, 256.0F * inv, magic));
}

__device__ inline int round_pseudo_stochastic(float v, int bits) {
  const int q_max = bits == 4 ? 7 : 127, h = bits == 4 ? 10 : 8;
  const float a = fabsf(v);
  const int whole = __float2int_rz(a);
  const float fraction = a - static_cast<float>(whole);
  const int f = __float2int_rz(fraction * static_cast<float>(1 << (2 * h + 1)));
  const int p = f >> (h + 1), r = f & ((1 << (h + 1)) - 1);
  const int code = min(whole + (2 * p + 1 > r && f > 0 ? 1 : 0), q_max);
  return v < 0.0F ? -code : code;
}

// Codes of value(i) * inv(i) for 16 consecutive k, as 4 words, lowest byte first. Products have
// magnitudes of at most Q (1 + 2^-22), so codes need no clamp.
template <Rounding rounding, class Value, class Inv>
__device__ inline uint4 round_group(const Value& value, const Inv& inv, const DeviceKey& key,
                                    const DeviceOffset& offset, std::uint64_t blk, int bits) {
  RandomWords random{};
  if constexpr (rounding == Rounding::stochastic) random = random_words(key, offset, blk);
  std::uint32_t packed[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float v[4] = {value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3)};
    const float by[4] = {inv(4 * w), inv(4 * w + 1), inv(4 * w + 2), inv(4 * w + 3)};
    if constexpr (rounding == Rounding::nearest) {
      packed[w] = gather_bytes<0>(nearest_sum(v[0], by[0]), nearest_sum(v[1], by[1]),
                                  nearest_sum(v[2], by[2]), nearest_sum(v[3], by[3]));
    } else if constexpr (rounding == Rounding::stochastic) {
      std::uint32_t sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = stochastic_sum(v[i], by[i], random.word[w], i);
      packed[w] = gather_bytes<1>(sum[0], sum[1], sum[2], sum[3]);
    } else {
      std::uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        code[j] = static_cast<std::uint32_t>(round_pseudo_stochastic(v[j] * by[j], bits));
      }
      packed[w] = gather_bytes<0>(code[0], code[1], code[2], code[3]);
    }
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// Packs eight codes as nibbles. Their bytes come from `even` and `odd` in turns.
__device__ inline std::uint32_t pack_nibbles(std::uint32_t even, std::uint32_t odd) {
  return (even & 0x0f0f0f0fU) | (odd << 4 & 0xf0f0f0f0U);
}

// Stochastically rounded, packed INT4 codes of 16 consecutive k: code i in nibble i.
template <class Value>
__device__ inline uint2 round_group_packed(const Value& value, float inv, const DeviceKey& key,
                                           const DeviceOffset& offset, std::uint64_t blk) {
  const RandomWords random = random_words(key, offset, blk);
  std::uint32_t packed[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    std::uint32_t sum[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = 8 * w + j;
      sum[j] = stochastic_sum(value(i), inv, random.word[i / 4], i % 4);
    }
    const std::uint32_t even = gather_bytes<1>(sum[0], sum[2], sum[4], sum[6]);
    const std::uint32_t odd = gather_bytes<1>(sum[1], sum[3], sum[5], sum[7]);
    packed[w] = pack_nibbles(even, odd);
  }
  return make_uint2(packed[0], packed[1]);
}

// Larger of |a| and |b|, or NaN if one is NaN.
__device__ inline float max_magnitude(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(fabsf(a)), "f"(fabsf(b)));
  return out;
}

// Calls f with a rounding as a compile-time constant (host).
template <class F>
void with_rounding(Rounding rounding, const F& f) {
  with_constant<Rounding::nearest, Rounding::pseudo_stochastic>(rounding, f);
}

}  // namespace hot::detail
