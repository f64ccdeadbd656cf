// Device code of quantize_rows.cu, whose opening comment explains it. It is a header, because other
// files run it with more work in one launch.
#pragma once

#include <cstdint>

#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "kernels.h"
#include "plan/plan.h"

namespace hot::detail {

struct RowsArgs {
  MatrixIn x;
  std::int8_t* codes;
  float* scale;
  std::int64_t scales;
  std::uint32_t* amax;
  std::int64_t k_padded;
  int live_blocks;  // blocks of 16 in a row of x; zeros follow up to k_padded
  int bits, block;
  DeviceKey key;
  Pass pass;
  bool aligned;
  ColumnPowers powers;
  std::uint32_t* counter;  // of tiles, to be zeroed, or null
};

__device__ inline float power_of(const ColumnPowers& powers, std::int64_t col) {
  return __uint_as_float(powers.factor(powers.exponents[col]));
}

// Divides 16 values of an x from column `col` on, a multiple of 16.
__device__ __forceinline__ void apply_powers(const ColumnPowers& powers, int col, float (&v)[16]) {
  unsigned words[4];
  load_words(powers.exponents + col, words);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    // Shifts the byte to the top, then back with its sign.
    const int exponent = static_cast<int>(words[j / 4] << (24 - 8 * (j % 4))) >> 24;
    v[j] *= __uint_as_float(ColumnPowers::bits(-exponent));
  }
}

constexpr int row_chunk = 4096;  // floats in shared memory, a multiple of every block

// Loads a chunk of a row into v and transforms it; returns its length. Zeros follow the last
// column. All threads of the CTA call it, and it ends with a barrier.
__device__ inline int load_row_chunk(const MatrixIn& x, const ColumnPowers& powers, int block,
                                     std::int64_t k_padded, std::int64_t row, std::int64_t start,
                                     float* v) {
  const int T = static_cast<int>(blockDim.x), t = static_cast<int>(threadIdx.x);
  const int count = static_cast<int>(min(std::int64_t{row_chunk}, k_padded - start));
  const std::int64_t end = (x.cols + block - 1) / block * block;
  const int live = static_cast<int>(min(std::int64_t{count}, end - start));
  __syncthreads();
  for (int i = t; i < count; i += T) {
    v[i] = start + i < x.cols ? load_element(x, row, start + i) : 0.0F;
    if (powers.exponents != nullptr && start + i < x.cols) v[i] *= power_of(powers, start + i);
  }
  for (int h = 1; h < block; h *= 2) {
    __syncthreads();
    for (int i = t; i < live / 2; i += T) {
      const int a = (i & ~(h - 1)) * 2 + (i & (h - 1));
      const float p = v[a], q = v[a + h];
      v[a] = p + q;
      v[a + h] = p - q;
    }
  }
  __syncthreads();
  return count;
}

// Quantises a row that T lanes share. Lane `lane` has up to B blocks of 16 values in v. `hadamard`
// is the block of the transform; blocks above 16 span neighbouring lanes. `scale_of(amax)` replaces
// the largest value of the lane by the largest value of the scale's range. It returns false if no
// codes are needed. All threads of the CTA call this function, also beyond the last row.
template <int hadamard, int B, class ScaleOf>
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
    uint4 codes = round_group<rows16_rounding(hadamard)>(
        [&](int j) { return v[i][j]; }, UniformScale{s.inv}, args.key, offset,
        first + static_cast<std::uint64_t>(i * T), args.bits);
    if (!s.keep) codes = make_uint4(0, 0, 0, 0);
    // An earlier branch would split the code of the blocks.
    if (lane + i * T < blocks) to[i * T] = codes;
  }
}

// quantize_row_values for a row in global memory. `powers`: features have exponents, which takes
// instructions that other rows do not load.
template <int hadamard, int B, class Tag, bool powers = false, class ScaleOf>
__device__ __forceinline__ void quantize_row16(const RowsArgs& args, std::int64_t row, int lane,
                                               int T, const ScaleOf& scale_of) {
  const bool real = row < args.x.rows;
  float v[B][16];
  if (args.aligned) {
    unsigned words[B][4 * Tag::size];  // issues all loads of a lane first
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
    if constexpr (powers) {
#pragma unroll
      for (int i = 0; i < B; ++i) {
        if (lane + i * T < args.live_blocks) apply_powers(args.powers, (lane + i * T) * 16, v[i]);
      }
    }
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
        if constexpr (powers) {
          if (col + j < args.x.cols) v[i][j] *= power_of(args.powers, col + j);
        }
      }
    }
  }
  const DeviceOffset offset = warp_offset<rows16_rounding(hadamard)>(args.key);
  quantize_row_values<hadamard>(args, offset, row, lane, T, v, scale_of);
}

// ---- host (quantize_rows.cu)

// Arguments except the pass.
RowsArgs rows_args(const Context&, const Operand&);

}  // namespace hot::detail
