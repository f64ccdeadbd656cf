// Device code of quantize.cu, whose plan it follows: rows of g_y for g_x, and x from INT4 back to
// INT8. A header, because quantize_small.cu runs it beside other work in one launch.
#pragma once

#include <cstdint>

#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/plan.h"
#include "kernels.h"

namespace hot::detail {

struct RowsArgs {
  MatrixIn x;
  std::int8_t* codes;
  float* scale;
  std::int64_t scales;
  std::uint32_t* amax;
  std::int64_t k_padded;
  int live_blocks;  // of 16, of a row of x; zeros follow up to k_padded
  int bits, block;
  DeviceKey key;
  RowsPass pass;
  bool aligned;
};

__device__ inline std::uint32_t warp_max(std::uint32_t v) {
  return __reduce_max_sync(0xffffffffU, v);
}

// The largest value of a thread block, for all of its threads.
__device__ inline std::uint32_t block_max(std::uint32_t v, std::uint32_t* shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  v = warp_max(v);
  if (threads == 32) return v;
  __syncthreads();
  if (thread % 32 == 0) shared[thread / 32] = v;
  __syncthreads();
  for (int w = 0; w < threads / 32; ++w) v = max(v, shared[w]);
  return v;
}

// The largest value of a row that T lanes share: of one warp if T is a power of two up to 32, else
// of T / 32 neighbouring warps, by `shared` (a word for each warp of the thread block).
__device__ inline std::uint32_t row_max(std::uint32_t v, int T, int thread, std::uint32_t* shared) {
  if (T <= 32) {
    for (int h = 1; h < T; h *= 2) v = max(v, __shfl_xor_sync(0xffffffffU, v, h));
    return v;
  }
  v = warp_max(v);
  if (thread % 32 == 0) shared[thread / 32] = v;
  __syncthreads();
  const int first = thread / T * (T / 32);
  for (int w = 0; w < T / 32; ++w) v = max(v, shared[first + w]);
  return v;
}

// Lane `lane` of the T that share row `row`, with the values of its B blocks of 16 at most in v.
// `hadamard`: block of the transform, 16 or more; neighbouring lanes share one of more than 16.
// `scale_of(amax)` turns the largest value of the lane into that of the scale's whole range; false:
// no codes are wanted. All threads of the thread block come here, past the last row too.
template <Rounding rounding, int hadamard, int B, class ScaleOf>
__device__ __forceinline__ void quantize_row_values(const RowsArgs& args,
                                                    const DeviceOffset& offset, std::int64_t row,
                                                    int lane, int T, float (&v)[B][16],
                                                    const ScaleOf& scale_of) {
  const int blocks = static_cast<int>(args.k_padded / 16);
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < B; ++i) {
    butterfly<1, 16>(v[i]);
    butterfly_lanes<hadamard / 16>(v[i], static_cast<unsigned>(lane));
#pragma unroll
    for (int j = 0; j < 16; ++j) largest = max_magnitude(largest, v[i][j]);
  }
  std::uint32_t amax = abs_bits(largest);
  if (!scale_of(amax) || row >= args.x.rows) return;
  const DeviceScale s = device_scale(amax, args.bits);
  if (lane == 0 && row < args.scales) args.scale[row] = s.scale;
  const std::uint64_t first = static_cast<std::uint64_t>(row * blocks + lane);
  auto* to = reinterpret_cast<uint4*>(args.codes + row * args.k_padded) + lane;
#pragma unroll
  for (int i = 0; i < B; ++i) {
    uint4 codes =
        round_group<rounding>([&](int j) { return v[i][j]; }, Same{s.inv}, args.key, offset,
                              first + static_cast<std::uint64_t>(i * T), args.bits);
    if (!s.keep) codes = make_uint4(0, 0, 0, 0);
    // No branch before this one: it would part the code of the blocks.
    if (lane + i * T < blocks) to[i * T] = codes;
  }
}

// The same from global memory.
template <Rounding rounding, int hadamard, int B, class Tag, class ScaleOf>
__device__ __forceinline__ void quantize_row16(const RowsArgs& args, std::int64_t row, int lane,
                                               int T, const ScaleOf& scale_of) {
  const bool real = row < args.x.rows;
  float v[B][16];
  if (args.aligned) {
    unsigned words[B][4 * Tag::size];  // all of a lane's loads first
    const char* from =
        static_cast<const char*>(args.x.data) + (row * args.x.row_stride + lane * 16) * Tag::size;
#pragma unroll
    for (int i = 0; i < B; ++i) {
#pragma unroll
      for (unsigned& word : words[i]) word = 0;
      if (real && lane + i * T < args.live_blocks)
        load_words(from + i * T * 16 * Tag::size, words[i]);
    }
#pragma unroll
    for (int i = 0; i < B; ++i) Tag::unpack(words[i], v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < B; ++i) {
      const std::int64_t col = (lane + std::int64_t{i} * T) * 16;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        v[i][j] =
            real && col + j < args.x.cols
                ? Tag::load(args.x.data, row * args.x.row_stride + (col + j) * args.x.col_stride)
                : 0.0F;
      }
    }
  }
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  quantize_row_values<rounding, hadamard>(args, offset, row, lane, T, v, scale_of);
}

// INT4 value j of 16, as a float: 8 more than the value, below the bits of 2^23, less 2^23 + 8.
__device__ inline float nibble(const uint2& packed, int j) {
  const std::uint32_t word = (j < 8 ? packed.x : packed.y) >> (j % 2 == 0 ? 0 : 4);
  const std::uint32_t biased = (word & 0x0f0f0f0fU) ^ 0x08080808U;
  const std::uint32_t bits = __byte_perm(biased, 0x4b000000U, 0x7650U | (j % 8 / 2));
  return __uint_as_float(bits) - 8388616.0F;
}

struct RequantizeArgs {
  const std::uint8_t* packed;
  std::int64_t row_bytes;
  const std::uint16_t* scale;
  std::int64_t groups;
  Operand out;
  DeviceKey key;
};

// Thread t of the T that share channel `row`; `all_max` makes a value the largest of theirs.
template <Rounding rounding, class AllMax>
__device__ __forceinline__ void requantize_channel(const RequantizeArgs& args, std::int64_t row,
                                                   int t, int T, const AllMax& all_max) {
  const int row_blocks = static_cast<int>(args.out.k_padded / 16);
  const auto* from = reinterpret_cast<const uint2*>(args.packed + row * args.row_bytes);
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::uint16_t* const scales = args.scale + row * args.groups;
  std::uint32_t largest = 0;  // scales are positive or NaN: the pattern orders them
  for (std::int64_t g = t; g < args.groups; g += T) {
    largest = max(largest, std::uint32_t{scales[g]});
  }
  largest = all_max(largest);
  const float amax = 7.0F * __uint_as_float(largest << 16);
  const DeviceScale s = device_scale(abs_bits(amax), 8);
  if (t == 0) args.out.scale[row] = s.scale;
  const std::uint64_t first =
      static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>(row_blocks);
  auto* to = reinterpret_cast<uint4*>(args.out.codes + row * args.out.k_padded);
  for (int b = t; b < row_blocks; b += T) {
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (s.keep) {
      const uint2 packed = from[b];
      const float factor = __uint_as_float(std::uint32_t{scales[b / 4]} << 16) * s.inv;
      codes = round_group<rounding>([&](int j) { return nibble(packed, j); }, Same{factor},
                                    args.key, offset, first + static_cast<std::uint64_t>(b), 8);
    }
    to[b] = codes;
  }
}

// ---- host (quantize.cu)

// All but the pass.
RowsArgs rows_args(const Context&, const RowsJob&);
RequantizeArgs requantize_args(const Context&, const GroupsJob&);

}  // namespace hot::detail
