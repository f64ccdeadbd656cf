// Stage: x kept as INT4, and back to INT8 for g_w (back to floats: decompress.cu).
//
// groups_kernel, group_quads_kernel: x to INT4.
//   A thread takes the 64 tokens of a group in one channel, or half of them of two channels in
//   16-bit types, and writes 16 contiguous bytes at a time. 2.53 bytes an element for fp16.
//   Equalised tokens take the first: their powers are of fp32.
//
// requantize_kernel: INT4 back to INT8.
//   A CTA takes a channel. 1.53 bytes an element.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/packed_codes.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/int4_activation.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

template <Rounding rounding, class Tag>
__global__ void __launch_bounds__(128) groups_kernel(GroupsArgs args) {
  begin_kernel();
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::int64_t tiles = (args.x.cols + 127) / 128;
  const std::int64_t col = blockIdx.x % tiles * 128 + threadIdx.x;
  const std::int64_t g = blockIdx.x / tiles;
  __shared__ __align__(16) float power[64];  // of the tokens, where they are equalised
  if (args.x.exponents != nullptr) {
    const std::int64_t token = g * 64 + threadIdx.x;
    if (threadIdx.x < 64) {
      power[threadIdx.x] =
          token < args.x.rows ? __uint_as_float(row_power(args.x, token) << 16) : 1.0F;
    }
    __syncthreads();
  }
  if (col >= args.x.cols) return;
  float v[64];
#pragma unroll
  for (int t = 0; t < 64; ++t) {
    const std::int64_t token = g * 64 + t;
    v[t] = token < args.x.rows
               ? Tag::load(args.x.data, token * args.x.row_stride + col * args.x.col_stride)
               : 0.0F;
  }
  if (args.x.exponents != nullptr) {
#pragma unroll
    for (int t = 0; t < 64; ++t) v[t] *= power[t];
  }
  std::uint32_t amax = 0;
#pragma unroll
  for (int t = 0; t < 64; ++t) amax = max(amax, abs_bits(v[t]));
  const GroupScale scale = group_scale(amax);
  args.scale[col * ((args.x.rows + 63) / 64) + g] = scale.bf16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    finish_half<rounding>(args, offset, col, g, half, scale,
                          [&](int t) { return v[32 * half + t]; });
  }
}

// The same for 16-bit types.
template <Rounding rounding, class Tag>
__global__ void __launch_bounds__(128) group_quads_kernel(GroupsArgs args) {
  begin_kernel();
  const auto tiles = static_cast<unsigned>((args.x.cols + 127) / 128);
  compress_quads<rounding, Tag>(args, threadIdx.x, std::int64_t{blockIdx.x % tiles} * 128,
                                blockIdx.x / tiles);
}

template <Rounding rounding>
__global__ void requantize_kernel(const __grid_constant__ RequantizeArgs args, bool independent) {
  __shared__ std::uint32_t shared[32];
  begin_kernel(independent);
  requantize_channel<rounding>(args, blockIdx.x, static_cast<int>(threadIdx.x),
                               static_cast<int>(blockDim.x),
                               [&](std::uint32_t v) { return block_max(v, shared); });
  end_kernel(independent);
}

}  // namespace

RequantizeArgs requantize_args(const Context& context, const GroupsJob& job) {
  return {job.packed, job.row_bytes,
          job.scale,  ceil_div(job.tokens, int4_group),
          job.out,    device_key(context.key(), Purpose::requantize)};
}

GroupsArgs groups_args(const Context& context, const CompressJob& job) {
  return {job.equalized(), job.packed, job.row_bytes, job.scale,
          device_key(context.key(), Purpose::activation)};
}

void launch_groups(const Context& context, const plan::Step& step, const CompressJob& job) {
  const GroupsArgs args = groups_args(context, job);
  const auto run = [&](auto kernel) {
    launch("compress_activation", context, kernel, step.shape, args);
  };
  with_rounding(step.rounding, [&](auto r) {
    constexpr Rounding mode = decltype(r)::value;
    host_with_dtype(step.dtype, [&](auto tag) {
      using Tag = decltype(tag);
      if constexpr (Tag::size == 2) {
        if (step.kernel == plan::Kernel::group_quads) return run(group_quads_kernel<mode, Tag>);
      }
      run(groups_kernel<mode, Tag>);
    });
  });
}

void launch_requantize(const Context& context, const plan::Step& step, const GroupsJob& job) {
  with_rounding(step.rounding, [&](auto r) {
    launch("backward_linear", context, requantize_kernel<decltype(r)::value>, step.shape,
           requantize_args(context, job), step.independent);
  });
}

}  // namespace hot::detail
