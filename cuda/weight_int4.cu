// Stage: a frozen weight in INT4, from floats and to INT8 codes, and those to floats.
//
// quantize_weight_int4_kernel
//   A CTA moves a row through 4096 floats of shared memory, twice if it is longer (largest value,
//   codes). A warp takes a group. Each lane tries one step on all values of the group.
//
// expand_weight_int4_kernel
//   A thread expands 16 values at a time, 4 times. The eight magnitudes of a group's codes are
//   bytes of two registers, which a byte permutation indexes by four codes at once. Traffic per
//   value: 0.53 byte read, 1 byte written, with 3 instructions.
//
// dequantize_weight_kernel
//   A thread takes 16 codes of a row. Blocks above 16 span neighbouring lanes. The transform adds
//   integers below 2^15 as floats, so the order of additions does not matter. Traffic per value: 1
//   byte read, 2 or 4 written.
#include <algorithm>
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/quantize_rows.cuh"
#include "weight_int4.h"

namespace hot::detail {
namespace {

constexpr int threads = 256;
static_assert(weight_int4::candidates == 32);  // a lane each

// Quantises a group of fixed-point values in shared memory; all lanes of a warp call it.
template <int group>
__device__ void encode_group(const float* fixed, int lane, std::uint8_t* packed,
                             std::uint8_t* step) {
  const auto value = [&](int i) { return __float_as_int(fixed[i]); };
  int amax = 0;
#pragma unroll
  for (int i = 0; i < group; i += 32) amax = max(amax, abs(value(i + lane)));
  amax = __reduce_max_sync(0xffffffffU, amax);
  const int tried = weight_int4::candidate(amax, lane);
  float factor = weight_int4::code_factor(tried);
  std::uint32_t error = 0;
#pragma unroll 8
  for (int i = 0; i < group; ++i) {
    const int code = weight_int4::nearest(value(i), factor);
    const int off = value(i) - weight_int4::unit * weight_int4::expanded(code, tried);
    error += static_cast<std::uint32_t>(off * off);
  }
  const bool least = error == __reduce_min_sync(0xffffffffU, error);
  const int winner = __ffs(static_cast<int>(__ballot_sync(0xffffffffU, least))) - 1;
  const int best = __shfl_sync(0xffffffffU, tried, winner);
  factor = __shfl_sync(0xffffffffU, factor, winner);
  if (lane == 0) *step = static_cast<std::uint8_t>(best);
#pragma unroll
  for (int i = 0; i < group; i += 32) {
    const auto code = static_cast<unsigned>(weight_int4::nearest(value(i + lane), factor)) & 15U;
    unsigned word = code << (4 * (lane % 8));
#pragma unroll
    for (int h = 1; h < 8; h *= 2) word |= __shfl_xor_sync(0xffffffffU, word, h);
    if (lane % 8 == 0) *reinterpret_cast<unsigned*>(packed + (i + lane) / 2) = word;
  }
}

template <int group>
__global__ void __launch_bounds__(threads)
    quantize_weight_int4_kernel(const __grid_constant__ Int4WeightJob args) {
  __shared__ float v[row_chunk];
  __shared__ std::uint32_t shared[threads / 32];
  begin_kernel();
  const Int4Weight& out = args.out;
  const std::int64_t row = blockIdx.x;
  const int t = static_cast<int>(threadIdx.x), warp = t / 32, lane = t % 32;
  const auto load = [&](std::int64_t start) {
    return load_row_chunk(args.w, args.powers, args.hadamard_block, out.k_padded, row, start, v);
  };
  std::uint32_t amax = 0;
  int count = 0;
  for (std::int64_t start = 0; start < out.k_padded; start += row_chunk) {
    count = load(start);
    for (int i = t; i < count; i += threads) amax = max(amax, abs_bits(v[i]));
  }
  const DeviceScale s = device_scale(block_max(amax, shared), 8);
  if (t == 0) out.scale[row] = s.scale;
  const float inv = s.inv * static_cast<float>(weight_int4::unit);
  for (std::int64_t start = 0; start < out.k_padded; start += row_chunk) {
    if (out.k_padded > row_chunk) count = load(start);
    for (int i = t; i < count; i += threads) {
      v[i] = __int_as_float(s.keep ? __float2int_rn(v[i] * inv) : 0);
    }
    __syncthreads();
    for (int g = warp; g < count / group; g += threads / 32) {
      const std::int64_t at = row * out.k_padded + start + g * group;
      encode_group<group>(v + g * group, lane, out.packed + at / 2, out.steps + at / group);
    }
  }
}

// ---- expansion

constexpr int chunk = 16, chunks_per_thread = 4;

struct ExpandArgs {
  Int4Weight w;
  Codes out;
  std::int64_t chunks;
  int step_shift;  // log2 of the chunks of a group
};

// Bytes of x and y (0 to 7) by the lower 3 bits of four nibbles. A nibble with its upper bit set
// takes the sign of its byte eight times instead.
__device__ inline unsigned permute_or_sign(unsigned x, unsigned y, unsigned nibbles) {
  unsigned out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(nibbles));
  return out;
}

// INT8 codes of INT4 codes that share a step (weight_int4::expanded).
class Expander {
 public:
  __device__ explicit Expander(unsigned step) {
    const unsigned m = min(step, static_cast<unsigned>(weight_int4::max_step));
    // Two products of 16 bits in a register. Bytes 0 and 2 of the shifted sums are magnitudes.
    const auto pair = [&](unsigned odd) {
      return (m * (odd | (odd + 2) << 16) + 0x00080008U) >> 4;
    };
    low_ = __byte_perm(pair(1), pair(5), 0x6420);
    high_ = __byte_perm(pair(9), pair(13), 0x6420);
    reversed_low_ = __byte_perm(high_, 0, 0x0123);
    reversed_high_ = __byte_perm(low_, 0, 0x0123);
  }
  // Expands the four lower nibbles.
  __device__ unsigned operator()(unsigned nibbles) const {
    // A code of the other sign takes the sign of a magnitude, 0.
    const unsigned positive = permute_or_sign(low_, high_, nibbles);
    const unsigned negative = permute_or_sign(reversed_low_, reversed_high_, nibbles ^ 0x8888U);
    return positive | ((0x80808080U - negative) ^ 0x80808080U);
  }

 private:
  unsigned low_, high_;                    // magnitudes of the codes 0 to 7
  unsigned reversed_low_, reversed_high_;  // magnitudes of the codes -8 to -1
};

__global__ void __launch_bounds__(threads)
    expand_weight_int4_kernel(const __grid_constant__ ExpandArgs args) {
  begin_kernel();
  constexpr int block_chunks = threads * chunks_per_thread;  // whole groups
  const std::int64_t first = std::int64_t{blockIdx.x} * block_chunks;
  const int count = static_cast<int>(min(std::int64_t{block_chunks}, args.chunks - first));
  const uint2* const from = reinterpret_cast<const uint2*>(args.w.packed) + first;
  const std::uint8_t* const steps = args.w.steps + (first >> args.step_shift);
  uint4* const to = reinterpret_cast<uint4*>(args.out.codes) + first;
  const int t = static_cast<int>(threadIdx.x);
  uint2 packed[chunks_per_thread];
  unsigned step[chunks_per_thread];
#pragma unroll
  for (int i = 0; i < chunks_per_thread; ++i) {
    const int at = t + i * threads;
    if (at < count) packed[i] = from[at], step[i] = steps[at >> args.step_shift];
  }
#pragma unroll
  for (int i = 0; i < chunks_per_thread; ++i) {
    const int at = t + i * threads;
    if (at >= count) continue;
    const Expander expand(step[i]);
    to[at] = make_uint4(expand(packed[i].x), expand(packed[i].x >> 16), expand(packed[i].y),
                        expand(packed[i].y >> 16));
  }
  const std::int64_t all = std::int64_t{gridDim.x} * threads;
#pragma unroll 1
  for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < args.w.rows;
       i += all) {
    args.out.scale[i] = args.w.scale[i];
  }
}

// ---- floats

struct DequantizeArgs : DequantizeWeightJob {
  std::int64_t chunks;  // of 16 codes, in all rows
  bool aligned;         // rows of `out` can be written in pieces of 16 bytes
};

template <class Tag>
__global__ void __launch_bounds__(threads)
    dequantize_weight_kernel(const __grid_constant__ DequantizeArgs args) {
  begin_kernel();
  const std::int64_t at = std::int64_t{blockIdx.x} * threads + threadIdx.x;
  const bool real = at < args.chunks;
  const std::int64_t row_chunks = args.w.k_padded / chunk;
  const std::int64_t row = real ? at / row_chunks : 0, col = at % row_chunks * chunk;
  unsigned words[4] = {0, 0, 0, 0};
  if (real) load_words(args.w.codes + at * chunk, words);
  float v[chunk];
#pragma unroll
  for (int j = 0; j < chunk; ++j) {
    v[j] = static_cast<float>(static_cast<int>(words[j / 4] << (24 - 8 * (j % 4))) >> 24);
  }
  const int block = args.hadamard_block;
  if (block >= 16) {
    butterfly<1, 16>(v);
    const auto lane = static_cast<unsigned>(threadIdx.x) % 32;
    for (unsigned h = 1; h < static_cast<unsigned>(block / 16); h *= 2) {
      butterfly_lanes_at(v, lane, h);
    }
  } else {
    if (block > 1) butterfly<1, 2>(v);
    if (block > 2) butterfly<2, 4>(v);
    if (block > 4) butterfly<4, 8>(v);
  }
  const MatrixOut& out = args.out;
  if (!real || col >= out.cols) return;
  const float scale = args.w.scale[row] / static_cast<float>(block);
#pragma unroll
  for (float& value : v) value *= scale;
  if (args.aligned) {
    if (args.powers.exponents != nullptr) apply_powers(args.powers, static_cast<int>(col), v);
    unsigned packed[4 * Tag::size];
    Tag::pack(v, packed);
    store_words(packed, static_cast<char*>(out.data) + (row * out.row_stride + col) * Tag::size);
    return;
  }
#pragma unroll
  for (int j = 0; j < chunk; ++j) {
    if (col + j >= out.cols) continue;
    if (args.powers.exponents != nullptr) v[j] *= power_of(args.powers, col + j);
    Tag::store(out.data, row * out.row_stride + (col + j) * out.col_stride, v[j]);
  }
}

}  // namespace

void CudaBackend::dequantize_weight(const Context& context, const DequantizeWeightJob& job) const {
  const char* const stage = "dequantize_weight";
  const DeviceGuard guard(context.device().index, stage);
  const std::int64_t chunks = job.w.rows * (job.w.k_padded / chunk);
  const bool aligned = plan::rows_aligned(job.out.contents()) && job.out.cols % chunk == 0;
  with_dtype(job.out.dtype, [&](auto tag) {
    launch(stage, context, dequantize_weight_kernel<decltype(tag)>,
           {ceil_div(chunks, threads), threads}, DequantizeArgs{job, chunks, aligned});
  });
}

void CudaBackend::quantize_weight_int4(const Context& context, const Int4WeightJob& job) const {
  const char* const stage = "quantize_weight_int4";
  const DeviceGuard guard(context.device().index, stage);
  launch(stage, context,
         job.out.group == 32 ? quantize_weight_int4_kernel<32> : quantize_weight_int4_kernel<64>,
         {job.out.rows, threads}, job);
}

void CudaBackend::expand_weight_int4(const Context& context, const Int4Weight& w,
                                     const Codes& out) const {
  const char* const stage = "expand_weight_int4";
  const DeviceGuard guard(context.device().index, stage);
  const std::int64_t chunks = w.rows * (w.k_padded / chunk);
  const ExpandArgs args{w, out, chunks, w.group == 32 ? 1 : 2};
  launch(stage, context, expand_weight_int4_kernel,
         {std::max<std::int64_t>(1, ceil_div(chunks, threads * chunks_per_thread)), threads}, args);
}

}  // namespace hot::detail
