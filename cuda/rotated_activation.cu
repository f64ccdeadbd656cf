// Stage: x kept as rht2, and back to INT8 for g_w (back to floats: decompress.cu); the
// sizes of tokens that are equalised, for every form of storage.
//
// rotate_kernel: x to codes.
//   A CTA takes a block of 64 tokens of 128 columns, by copies of 16 bytes to shared memory. A
//   thread holds the 64 values of a column in registers: no exchange between threads. The factors
//   of the tokens (signs and powers of two) and the dither of the rows are drawn once for the CTA,
//   5 Philox for 8192 values. 2.28 bytes an element for fp16.
//
// requantize_rotated_kernel: codes back to INT8.
//   A warp takes a channel, for up to 4096 rows; the 8 warps of a CTA share the dither of those.
//   1.28 bytes an element.
//
// token_exponents_kernel
//   A warp takes a token, twice: the largest value, then the sum of integers that are relative to
//   it, in any order. The second time the row is in the L1 or L2.
#include <cstdint>
#include <type_traits>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/packed_codes.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

constexpr int block = static_cast<int>(rotated_block);

// ---- x to codes --------------------------------------------------------------------------------

struct RotateArgs {
  MatrixIn x;
  DeviceKey signs, dither;
  std::uint8_t* packed;
  std::int64_t row_bytes;
  std::uint16_t* scale;
  std::int64_t blocks;
  bool aligned;  // rows of x, to 16 bytes
};

// CTAs on an SM: as many as no register spills for.
constexpr int rotate_sm_ctas(int dtype_size) { return dtype_size == 2 ? 5 : 4; }

// What the threads of a CTA share: of each token its factor, of each row what its dither adds.
struct RotateShared {
  float factor[block];
  std::uint32_t shift[block];  // u. With it, a code is byte 1 of a sum
  float value[block];          // of code 0, in scales

  // By the first 128 threads: two warps draw the signs, two the dither.
  __device__ void draw(const RotateArgs& args, std::int64_t number) {
    static_assert(rotated::threads == 2 * block);
    const int thread = static_cast<int>(threadIdx.x), i = thread % block;
    if (thread < block) {
      const std::int64_t token = number * block + i;
      const std::uint64_t negative =
          rotation_signs(args.signs, offset_of(args.signs), static_cast<std::uint64_t>(number));
      const unsigned power = token < args.x.rows ? row_power(args.x, token) : 0U;
      const auto sign = static_cast<unsigned>(negative >> i & 1U);
      factor[i] = __uint_as_float((sign << 15 | power) << 16);
    } else {
      const RandomWords words = random_words(args.dither, offset_of(args.dither),
                                             static_cast<std::uint64_t>(number * 4 + i / 16));
      const std::uint32_t low = (i & 4) == 0 ? words.word[0] : words.word[1];
      const std::uint32_t high = (i & 4) == 0 ? words.word[2] : words.word[3];
      const std::uint32_t word = (i & 8) == 0 ? low : high;
      const std::uint32_t u = word >> (8 * (i % 4)) & 255U;
      shift[i] = u;
      value[i] = static_cast<float>(511 - 2 * static_cast<int>(u) - 1024) / 512.0F;
    }
  }
};

// The sum of leaf(0) to leaf(Count - 1), neighbours first; the leaves are made in order.
template <int First, int Count, class Leaf>
__device__ __forceinline__ float tree_sum(const Leaf& leaf) {
  if constexpr (Count == 1) {
    return leaf(std::integral_constant<int, First>{});
  } else {
    const float a = tree_sum<First, Count / 2>(leaf);
    const float b = tree_sum<First + Count / 2, Count / 2>(leaf);
    return a + b;
  }
}

__device__ inline float integer_float() { return __uint_as_float(integer_bits); }

// Codes of a block whose values are finite and not tiny; returns the scale, a bf16.
__device__ __forceinline__ std::uint16_t rotated_codes(const RotateShared& shared,
                                                       float (&v)[block], std::uint32_t amax,
                                                       std::uint32_t (&words)[4]) {
  const std::uint32_t exponent = amax >> 23;
  const float power = __uint_as_float((255U - exponent) << 23);
#pragma unroll
  for (int k = 0; k < block; ++k) v[k] *= power;
  const float squares = tree_sum<0, block>([&](auto k) { return v[k] * v[k]; });
  const float spread = __fsqrt_rn(__fdiv_rn(squares, 64.0F));
  const float range = fminf(__uint_as_float(amax) * power, 1.75F * spread);
  const float inv = 256.0F * __fdiv_rn(1.5F, range);
  constexpr int half = 128 * 3;  // 256ths of the largest value: h
  std::uint32_t sum[4], eights[4];
  const float products = tree_sum<0, block>([&](auto constant) {
    constexpr int k = decltype(constant)::value;
    const int rounded = __float_as_int(__fmaf_rn(v[k], inv, integer_float()));
    // max(min(rounded + h, 2h), 0), one instruction on sm_90
    const int clamped =
        __viaddmin_s32_relu(rounded, half - static_cast<int>(integer_bits), 2 * half);
    sum[k % 4] = static_cast<unsigned>(clamped) + shared.shift[k];
    if constexpr (k % 4 == 3) {
      const std::uint32_t four = gather_bytes<1>(sum[0], sum[1], sum[2], sum[3]);
      eights[k / 4 % 4] = __dp4a(four, 0x40100401U, 0U);  // four codes as one byte
    }
    if constexpr (k % 16 == 15) {
      words[k / 16] = gather_bytes<0>(eights[0], eights[1], eights[2], eights[3]);
    }
    // The code below the bits of 2^15, one of whose ulps is 1/256.
    const float code = __uint_as_float((sum[k % 4] & 0x300U) | 0x47000000U) - 32768.0F;
    return v[k] * (code + shared.value[k]);
  });
  const float back = __uint_as_float((exponent - 1U) << 23);  // 1 / power
  return bf16_nearest(__fdiv_rn(squares, products) * back);
}

// Starts the copies of 64 tokens of the CTA's columns; zeros past the last token or column. Of rows
// that no vector load fits a thread copies its column.
template <class Tag>
__device__ __forceinline__ void load_rotate_tile(const RotateArgs& args, std::int64_t first_token,
                                                 std::int64_t first_col, char* tile) {
  constexpr int elements = 16 / Tag::size, vectors = rotated::threads / elements;  // of a token
  constexpr int step = rotated::threads / vectors;  // tokens of the CTA at a time
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t tokens = args.x.rows - first_token;  // from here on
  if (!args.aligned) {
    const std::int64_t col = first_col + thread;
    const bool live = col < args.x.cols;
    const std::int64_t at = first_token * args.x.row_stride + col * args.x.col_stride;
#pragma unroll 16
    for (int t = 0; t < block; ++t) {
      Tag::store(tile, t * rotated::threads + thread,
                 live && t < tokens ? Tag::load(args.x.data, at + t * args.x.row_stride) : 0.0F);
    }
    return;
  }
  const int local = thread / vectors, vector = thread % vectors;
  const std::int64_t col = first_col + vector * elements;
  const auto live =
      static_cast<int>(max(std::int64_t{0}, min(std::int64_t{elements}, args.x.cols - col)));
  const char* from = static_cast<const char*>(args.x.data) +
                     ((first_token + local) * args.x.row_stride + col) * Tag::size;
  const std::int64_t pitch = step * args.x.row_stride * Tag::size;
  const unsigned to = shared_address(tile) + static_cast<unsigned>(thread * 16);
#pragma unroll
  for (int i = 0; i < block / step; ++i, from += pitch) {
    const int bytes = local + i * step < tokens ? live * Tag::size : 0;
    copy_async(to + static_cast<unsigned>(i * rotated::threads * 16),
               bytes > 0 ? from : args.x.data, bytes);
  }
  commit_copies();
}

template <class Tag>
__global__ void __launch_bounds__(rotated::threads, rotate_sm_ctas(Tag::size))
    rotate_kernel(const __grid_constant__ RotateArgs args) {
  __shared__ __align__(16) char tile[block * rotated::threads * Tag::size];
  __shared__ __align__(16) RotateShared shared;
  begin_kernel();
  const auto tiles = static_cast<unsigned>((args.x.cols + rotated::threads - 1) / rotated::threads);
  // Backwards where the sizes of tokens come first: the L2 still holds the end of x.
  const unsigned place = args.x.exponents == nullptr ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const std::int64_t number = place / tiles;
  const std::int64_t col = std::int64_t{place % tiles} * rotated::threads + threadIdx.x;
  const bool live = col < args.x.cols;
  load_rotate_tile<Tag>(args, number * block, col - threadIdx.x, tile);
  shared.draw(args, number);
  wait_copies<0>();
  __syncthreads();
  if (!live) return;
  float v[block];
#pragma unroll
  for (int t = 0; t < block; ++t) {
    v[t] = Tag::load(tile, t * rotated::threads + static_cast<int>(threadIdx.x)) * shared.factor[t];
  }
  // The larger of |a + b| and |a - b| is |a| + |b|, rounded alike.
  butterfly<1, block / 2>(v);
  float largest = 0.0F;
#pragma unroll
  for (int t = 0; t < block / 2; ++t) {
    largest = max_magnitude(largest, fabsf(v[t]) + fabsf(v[t + block / 2]));
  }
  butterfly<block / 2, block>(v);
  const std::uint32_t amax = abs_bits(largest);
  std::uint32_t words[block / 16] = {};
  std::uint16_t scale = 0;
  if (amax >= 0x7f800000U) {
    scale = 0x7fc0U;
  } else if (__uint_as_float(amax) >= 0x1p-100F) {
    scale = rotated_codes(shared, v, amax, words);
  }
  args.scale[col * args.blocks + number] = scale;
  store_words(words, args.packed + col * args.row_bytes + number * (block / 4));
}

// ---- codes to INT8 -----------------------------------------------------------------------------

struct RequantizeRotatedArgs {
  const std::uint8_t* packed;
  std::int64_t row_bytes;
  const std::uint16_t* scale;
  std::int64_t blocks;
  Operand out;
  DeviceKey key, dither;
  bool independent;
};

__global__ void __launch_bounds__(32 * rotated::channels)
    requantize_rotated_kernel(const __grid_constant__ RequantizeRotatedArgs args) {
  __shared__ uint4 turned[rotated::k16s];  // 255 - u of the rows
  static_assert(rotated::k16s == 32 * rotated::channels);
  begin_kernel(args.independent);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const auto tiles =
      static_cast<unsigned>((args.out.rows + rotated::channels - 1) / rotated::channels);
  const std::int64_t first = std::int64_t{blockIdx.x / tiles} * rotated::k16s;
  const std::int64_t row_k16s = args.out.k_padded / 16;
  const auto count = static_cast<int>(min(std::int64_t{rotated::k16s}, row_k16s - first));
  if (thread < count) {
    const RandomWords u = random_words(args.dither, offset_of(args.dither),
                                       static_cast<std::uint64_t>(first + thread));
    turned[thread] = make_uint4(~u.word[0], ~u.word[1], ~u.word[2], ~u.word[3]);
  }
  __syncthreads();
  const std::int64_t channel = std::int64_t{blockIdx.x % tiles} * rotated::channels + thread / 32;
  if (channel < args.out.rows) {
    const DeviceOffset offset = warp_offset<Rounding::stochastic>(args.key);
    const std::uint16_t* const scales = args.scale + channel * args.blocks;
    std::uint32_t largest = 0;  // scales are positive or NaN: the pattern orders them
    for (std::int64_t b = lane; b < args.blocks; b += 32) {
      largest = max(largest, std::uint32_t{scales[b]});
    }
    const float amax = 2.0F * __uint_as_float(warp_max(largest) << 16);
    const DeviceScale s = device_scale(abs_bits(amax), 8);
    if (lane == 0 && first == 0) args.out.scale[channel] = s.scale;
    const std::uint8_t* const from = args.packed + channel * args.row_bytes + first * 4;
    auto* const to = reinterpret_cast<uint4*>(args.out.codes + channel * args.out.k_padded) + first;
    for (int b = lane; b < count; b += 32) {
      uint4 codes = make_uint4(0, 0, 0, 0);
      if (s.keep) {
        const RotatedCodes packed{reinterpret_cast<const std::uint32_t*>(from)[b], turned[b]};
        const float factor = __uint_as_float(std::uint32_t{scales[(first + b) / 4]} << 16) * s.inv;
        codes = round_group<Rounding::stochastic>(
            [&](int i) { return packed.value(i); }, UniformScale{factor}, args.key, offset,
            static_cast<std::uint64_t>(channel * row_k16s + first + b), 8);
      }
      to[b] = codes;
    }
  }
  end_kernel(args.independent);
}

// ---- sizes of tokens ---------------------------------------------------------------------------

// Calls four(words) for every 16 bytes of a row that a lane has, where rows are aligned, and one(v)
// for the rest of its values.
template <class Tag, class Four, class One>
__device__ __forceinline__ void visit_row(const MatrixIn& x, bool aligned, std::int64_t row,
                                          const Four& four, const One& one) {
  constexpr int vector = 16 / Tag::size;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto* const from = static_cast<const char*>(x.data) + row * x.row_stride * Tag::size;
  const std::int64_t whole = aligned ? x.cols / vector : 0;
#pragma unroll 4
  for (std::int64_t i = lane; i < whole; i += 32) {
    unsigned words[4];
    load_words(from + i * 16, words);
    four(words);
  }
  for (std::int64_t c = whole * vector + lane; c < x.cols; c += 32) {
    one(Tag::load(from, c * x.col_stride));
  }
}

template <class Tag>
__global__ void __launch_bounds__(32 * rotated::exponent_rows)
    token_exponents_kernel(MatrixIn x, bool aligned, std::uint8_t* exponents) {
  begin_kernel();
  const std::int64_t row =
      std::int64_t{blockIdx.x} * rotated::exponent_rows + static_cast<int>(threadIdx.x) / 32;
  if (row >= x.rows) return;
  // Patterns of magnitudes have the order of the values, two 16-bit ones in a word.
  std::uint32_t most = 0, pairs = 0;
  visit_row<Tag>(
      x, aligned, row,
      [&](const unsigned (&words)[4]) {
#pragma unroll
        for (const unsigned word : words) {
          if constexpr (Tag::size == 2) {
            pairs = __vmaxu2(pairs, word & 0x7fff7fffU);
          } else {
            most = max(most, word & 0x7fffffffU);
          }
        }
      },
      [&](float v) { most = max(most, abs_bits(v)); });
  if constexpr (Tag::size == 2) {
    const unsigned one[1] = {pairs};
    float v[2];
    Tag::unpack(one, v);
    most = max(most, max(abs_bits(v[0]), abs_bits(v[1])));
  }
  const std::uint32_t largest = warp_max(most) >> 23;
  if (largest < 27 || largest == 255) {
    if (threadIdx.x % 32 == 0) {
      exponents[row] = static_cast<std::uint8_t>(largest == 255 ? 127 : 27);
    }
    return;
  }
  const float unit = __uint_as_float((268U - largest) << 23);  // the largest becomes 2^14 to 2^15
  const auto integer = [&](float v) {
    return __float_as_uint(__fmaf_rn(fabsf(v), unit, integer_float()));
  };
  unsigned long long sum = 0;
  visit_row<Tag>(
      x, aligned, row,
      [&](const unsigned (&words)[4]) {
        constexpr unsigned vector = 16 / Tag::size;
        float v[vector];
        Tag::unpack(words, v);
        std::uint32_t part = 0U - vector * integer_bits;
#pragma unroll
        for (const float value : v) part += integer(value);
        sum += part;
      },
      [&](float v) { sum += integer(v) - integer_bits; });
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
  if (threadIdx.x % 32 != 0) return;
  const float mean = __fdiv_rn(__ull2float_rn(sum), __ll2float_rn(x.cols));
  const int found = static_cast<int>(largest + (__float_as_uint(mean) >> 23)) - 141;
  exponents[row] = static_cast<std::uint8_t>(min(max(found, 27), 227));
}

}  // namespace

void launch_token_exponents(const Context& context, const plan::Step& step,
                            const CompressJob& job) {
  host_with_dtype(step.dtype, [&](auto tag) {
    launch("compress_activation", context, token_exponents_kernel<decltype(tag)>, step.shape, job.x,
           rows_aligned(job.x), job.exponents);
  });
}

void launch_rotate(const Context& context, const plan::Step& step, const CompressJob& job) {
  const RotateArgs args{job.equalized(),
                        device_key(context.key(), Purpose::signs),
                        device_key(context.key(), Purpose::activation),
                        job.packed,
                        job.row_bytes,
                        job.scale,
                        job.projection->blocks,
                        rows_aligned(job.x)};
  host_with_dtype(step.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    launch("compress_activation", context, rotate_kernel<Tag>, step.shape, args);
  });
}

void launch_requantize_rotated(const Context& context, const plan::Step& step,
                               const GroupsJob& job) {
  const RequantizeRotatedArgs args{job.packed,
                                   job.row_bytes,
                                   job.scale,
                                   ceil_div(job.tokens, rotated_block),
                                   job.out,
                                   device_key(context.key(), Purpose::requantize),
                                   device_key(job.key, Purpose::activation),
                                   step.independent};
  launch("backward_linear", context, requantize_rotated_kernel, step.shape, args);
}

}  // namespace hot::detail
