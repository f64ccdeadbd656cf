// Stage: the sizes of features (docs/numerics.md, "One code a value"), of x where it is kept and of
// g_y in backward.
//
// sampled_tokens_kernel: the exponents of up to 512 tokens.
//   A CTA takes a token, twice: the largest value, then the mean magnitude relative to it.
//
// feature_sums_kernel: the squares of the features, by those exponents.
//   A CTA takes 128 tokens of the sample, 128 bytes of each; the L2 has them from the kernel
//   before. The CTA that ends last makes the exponents of all features, and their factors: a sign
//   and a power of two, as bf16. Sums are of whole numbers, in any order.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

using token::size_threads;
using token::strip_lanes;
using token::strip_tokens;

constexpr int warps = size_threads / 32;
constexpr int strip_rows = size_threads / strip_lanes;  // tokens at a time

struct SizesArgs {
  MatrixIn x;
  bool aligned;
  std::int64_t count;  // tokens of the sample; 0: exponents of 0
  std::uint8_t* sampled;
  unsigned long long* sums;
  unsigned* ticket;
  std::uint8_t* exponents;
  std::uint16_t* factors;
  float* ones;  // may be null
  std::int64_t padded;
  DeviceKey signs;
};

// The token of number j of the sample: sampled_token without its division.
static_assert(size_sample == 512);
__device__ __forceinline__ std::int64_t token_at(const SizesArgs& args, std::int64_t j) {
  return args.count < size_sample ? j : j * args.x.rows >> 9;
}

// Values [first, first + 16 bytes) of a token; zeros past the last column.
template <class Tag>
__device__ __forceinline__ void load_values(const SizesArgs& args, std::int64_t token,
                                            std::int64_t first, float (&v)[16 / Tag::size]) {
  constexpr int vector = 16 / Tag::size;
  const char* const row =
      static_cast<const char*>(args.x.data) + token * args.x.row_stride * Tag::size;
  if (args.aligned && first + vector <= args.x.cols) {
    unsigned words[4];
    load_words(row + first * Tag::size, words);
    Tag::unpack(words, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < vector; ++i) {
    v[i] = first + i < args.x.cols ? Tag::load(row, (first + i) * args.x.col_stride) : 0.0F;
  }
}

// The sum over the CTA, for all threads. `shared`: a place for each warp.
__device__ long long block_sum(long long v, long long* shared) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(0xffffffffU, v, lanes);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
#pragma unroll
  for (int w = 0; w < warps; ++w) v += shared[w];
  return v;
}

template <class Tag>
__global__ void __launch_bounds__(size_threads)
    sampled_tokens_kernel(const __grid_constant__ SizesArgs args) {
  constexpr int vector = 16 / Tag::size;
  __shared__ long long shared[warps];
  __shared__ std::uint32_t most[warps];
  begin_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t token = token_at(args, blockIdx.x);
  // For the next kernel.
  if (blockIdx.x == 0 && thread == 0) *args.ticket = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * size_threads + thread; i < args.x.cols;
       i += std::int64_t{gridDim.x} * size_threads) {
    args.sums[i] = 0;
  }
  std::uint32_t largest = 0;
#pragma unroll 4
  for (std::int64_t col = std::int64_t{vector} * thread; col < args.x.cols;
       col += std::int64_t{vector} * size_threads) {
    float v[vector];
    load_values<Tag>(args, token, col, v);
#pragma unroll
    for (const float value : v) largest = max(largest, abs_bits(value));
  }
  largest = block_max(largest, most) >> 23;
  if (largest < 27 || largest == 255) {  // counts for nothing
    if (thread == 0) args.sampled[blockIdx.x] = 0;
    return;
  }
  const float unit = __uint_as_float((268U - largest) << 23);  // the largest becomes 2^14 to 2^15
  long long sum = 0;
#pragma unroll 4
  for (std::int64_t col = std::int64_t{vector} * thread; col < args.x.cols;
       col += std::int64_t{vector} * size_threads) {
    float v[vector];
    load_values<Tag>(args, token, col, v);
    std::uint32_t part = 0U - vector * integer_bits;
#pragma unroll
    for (const float value : v) part += nearest_sum(fabsf(value), unit);
    sum += part;
  }
  sum = block_sum(sum, shared);
  const float mean = __fdiv_rn(__ll2float_rn(sum), __ll2float_rn(args.x.cols));
  const int found = static_cast<int>(largest + (__float_as_uint(mean) >> 23)) - 141;
  if (thread == 0) args.sampled[blockIdx.x] = static_cast<std::uint8_t>(min(max(found, 27), 227));
}

// Exponents and factors of all features, by one CTA.
__device__ void finish_sizes(const SizesArgs& args, long long* shared) {
  __shared__ std::uint64_t negative[size_threads];
  constexpr int batch = 8;  // loads in flight
  const int thread = static_cast<int>(threadIdx.x);
  const auto level = [](unsigned long long sum) {
    return static_cast<long long>(__float_as_uint(__ull2float_rn(sum)) >> 20);
  };
  // Calls visit(i, sum) for this thread's features below `end`.
  const auto visit_sums = [&](std::int64_t begin, std::int64_t end, const auto& visit) {
    for (std::int64_t i = begin + thread; i < end; i += batch * size_threads) {
      unsigned long long sum[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const std::int64_t at = i + b * size_threads;
        sum[b] = at < args.x.cols && args.count > 0 ? __ldcg(args.sums + at) : 0ULL;
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (i + b * size_threads < end) visit(i + b * size_threads, sum[b]);
      }
    }
  };
  long long levels = 0, found = 0;
  if (args.count > 0) {
    visit_sums(0, args.x.cols, [&](std::int64_t, unsigned long long sum) {
      if (sum == 0) return;
      levels += level(sum);
      ++found;
    });
    levels = block_sum(levels, shared);
    found = block_sum(found, shared);
  }
  const long long middle = found == 0 ? 0 : levels / found;
  const DeviceOffset offset = offset_of(args.signs);
  constexpr std::int64_t chunk = std::int64_t{64} * size_threads;
  for (std::int64_t start = 0; start < args.padded; start += chunk) {
    __syncthreads();
    if (start + 64 * thread < args.padded) {
      negative[thread] =
          rotation_signs(args.signs, offset, static_cast<std::uint64_t>(start / 64 + thread));
    }
    __syncthreads();
    visit_sums(start, min(args.padded, start + chunk), [&](std::int64_t i, unsigned long long sum) {
      int exponent = 0;
      if (sum != 0) {
        const auto eighths = static_cast<int>(level(sum) - middle);
        if (eighths <= -32 || eighths >= 32) exponent = (eighths + 16) >> 5;
      }
      exponent = min(max(exponent, -30), 30);
      if (i < args.x.cols) args.exponents[i] = static_cast<std::uint8_t>(exponent + 127);
      const auto local = static_cast<int>(i - start);
      const auto sign = static_cast<unsigned>(negative[local / 64] >> (local % 64) & 1U);
      args.factors[i] =
          static_cast<std::uint16_t>(sign << 15 | static_cast<unsigned>(127 - exponent) << 7);
      if (args.ones != nullptr) args.ones[i] = 1.0F;
    });
  }
}

template <class Tag>
__global__ void __launch_bounds__(size_threads)
    feature_sums_kernel(const __grid_constant__ SizesArgs args) {
  constexpr int vector = 16 / Tag::size, strip = strip_lanes * vector;
  __shared__ long long shared[warps];
  __shared__ float unit[strip_tokens];
  __shared__ unsigned long long partial[warps][strip];
  __shared__ bool last;
  begin_kernel();
  if (args.count == 0) return finish_sizes(args, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const auto parts = static_cast<unsigned>((args.count + strip_tokens - 1) / strip_tokens);
  const std::int64_t first_col = std::int64_t{blockIdx.x / parts} * strip;
  const int first = static_cast<int>(blockIdx.x % parts) * strip_tokens;
  const int count = static_cast<int>(min(std::int64_t{strip_tokens}, args.count - first));
  if (thread < count) {
    const unsigned exponent = args.sampled[first + thread];
    unit[thread] = exponent == 0 ? 0.0F : __uint_as_float((254U - exponent) << 23);
  }
  __syncthreads();
  const std::int64_t col = first_col + std::int64_t{thread % strip_lanes} * vector;
  unsigned long long total[vector] = {};
#pragma unroll 4
  for (int j = thread / strip_lanes; j < count; j += strip_rows) {
    float v[vector];
    load_values<Tag>(args, token_at(args, first + j), col, v);
    const float by = unit[j];
#pragma unroll
    for (int i = 0; i < vector; ++i) {
      // A token that counts for nothing may hold what is not finite.
      const float z = by == 0.0F ? 0.0F : v[i] * by;
      total[i] += __float2ull_rn(fminf(z * z * 0x1p24F, 0x1p44F));
    }
  }
#pragma unroll
  for (int i = 0; i < vector; ++i) {
#pragma unroll
    for (int lanes = strip_lanes; lanes < 32; lanes *= 2) {
      total[i] += __shfl_xor_sync(0xffffffffU, total[i], lanes);
    }
    if (lane < strip_lanes) partial[thread / 32][lane * vector + i] = total[i];
  }
  __syncthreads();
  const std::int64_t own = first_col + thread;
  if (thread < strip && own < args.x.cols) {
    unsigned long long sum = 0;
#pragma unroll
    for (int w = 0; w < warps; ++w) sum += partial[w][thread];
    if (sum != 0) atomicAdd(args.sums + own, sum);
    __threadfence();
  }
  __syncthreads();
  if (thread == 0) last = atomicAdd(args.ticket, 1U) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  finish_sizes(args, shared);
}

}  // namespace

void launch_feature_sizes(const Context& context, const plan::Step& step, const SizesJob& job) {
  const SizesArgs args{job.x,
                       rows_aligned(job.x),
                       step.as<plan::SizesStep>().tokens,
                       job.scratch.sampled_exponents,
                       reinterpret_cast<unsigned long long*>(job.scratch.sums),
                       job.scratch.ticket,
                       job.exponents,
                       reinterpret_cast<std::uint16_t*>(job.scratch.factors),
                       job.ones,
                       job.padded,
                       device_key(job.signs, Purpose::signs)};
  host_with_dtype(step.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    launch(job.stage, context,
           step.kernel == plan::Kernel::sampled_tokens ? sampled_tokens_kernel<Tag>
                                                       : feature_sums_kernel<Tag>,
           step.shape, args);
  });
}

}  // namespace hot::detail
