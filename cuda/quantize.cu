// Stage: quantise and dequantise a matrix (public functions), any strides, any granularity.
// * matrix_amax_kernel, matrix_codes_kernel: a thread takes 16 elements of a row. Between the two
//   kernels the memory of the scales holds bit patterns of the largest values.
// * finish_scales_kernel: converts largest values to scales.
// * dequantize_kernel: a thread takes an element.
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

__global__ void finish_scales_kernel(const std::uint32_t* amax, int step, float* scale,
                                     std::int64_t count, int bits) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) scale[i] = device_scale(amax[i * step], bits).scale;
}

struct MatrixQuant {
  MatrixIn x;
  MatrixOut q;
  float* scale;
  QuantSpec spec;
  bool packed;
  DeviceKey key;
};

__global__ void matrix_amax_kernel(MatrixQuant args) {
  begin_kernel();
  auto* amax = reinterpret_cast<std::uint32_t*>(args.scale);
  const std::int64_t groups = (args.x.cols + 15) / 16;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.x.rows * groups) return;
  const std::int64_t row = i / groups, col = i % groups * 16;
  std::uint32_t best = 0;
  for (std::int64_t c = col; c < min(col + 16, args.x.cols); ++c) {
    const std::uint32_t bits = abs_bits(load_element(args.x, row, c));
    if (args.spec.scale == Granularity::channel) {
      atomic_max(amax + c, bits);
    } else {
      best = max(best, bits);
    }
  }
  if (args.spec.scale != Granularity::channel)
    atomic_max(amax + scale_at(args.spec.scale, row, col), best);
}

template <Rounding rounding>
__global__ void matrix_codes_kernel(MatrixQuant args) {
  begin_kernel();
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  const std::int64_t groups = (args.x.cols + 15) / 16;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.x.rows * groups) return;
  const std::int64_t row = i / groups, col = i % groups * 16;
  float value[16], inv[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    value[j] = inv[j] = 0.0F;
    if (col + j >= args.x.cols) continue;
    const DeviceScale s = device_scale(
        __float_as_uint(args.scale[scale_at(args.spec.scale, row, col + j)]), args.spec.bits);
    if (s.keep) value[j] = load_element(args.x, row, col + j), inv[j] = s.inv;
  }
  const uint4 codes =
      round_group<rounding>([&](int j) { return value[j]; }, [&](int j) { return inv[j]; },
                            args.key, offset, static_cast<std::uint64_t>(i), args.spec.bits);
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const int count = static_cast<int>(min(std::int64_t{16}, args.x.cols - col));
  std::int8_t* out = static_cast<std::int8_t*>(args.q.data) + row * args.q.row_stride;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j >= count) break;
    const auto code = static_cast<std::int8_t>(words[j / 4] >> (8 * (j % 4)));
    if (!args.packed) {
      out[col + j] = code;
    } else if (j % 2 == 0) {
      const int next = j + 1 < count ? static_cast<int>(words[j / 4] >> (8 * (j % 4) + 8)) : 0;
      out[(col + j) / 2] = static_cast<std::int8_t>((code & 15) | ((next & 15) << 4));
    }
  }
}

__global__ void dequantize_kernel(MatrixIn q, const float* scale, Granularity granularity,
                                  bool packed, MatrixOut out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= out.rows * out.cols) return;
  const std::int64_t r = i / out.cols, c = i % out.cols;
  const auto* codes = static_cast<const std::int8_t*>(q.data) + r * q.row_stride;
  int code = packed ? (codes[c / 2] >> (c % 2 == 0 ? 0 : 4)) & 15 : codes[c];
  if (packed) code = (code ^ 8) - 8;
  store_element(out, r, c, static_cast<float>(code) * scale[scale_at(granularity, r, c)]);
}

}  // namespace

void launch_finish_scales(const Context& context, const plan::Step& step, const Work& work) {
  const Operand& job = work.operands.at(step.as<plan::GenericColumnsStep>().of, Along::column);
  const std::uint32_t* const amax = job.out.amax;
  launch("quantize", context, finish_scales_kernel, step.shape, amax, job.quant.per_tensor ? 0 : 1,
         job.out.scale, job.out.scales, job.quant.bits);
}

void CudaBackend::quantize(const Context& context, const MatrixIn& x, const QuantSpec& spec,
                           const MatrixOut& q, float* scale) const {
  const DeviceGuard guard(context.device().index, "quantize");
  const std::int64_t scales = scale_count(x.rows, x.cols, spec.scale);
  check_cuda(
      cudaMemsetAsync(scale, 0, static_cast<std::size_t>(scales) * sizeof(float), context.stream()),
      "quantize", "cudaMemsetAsync");
  if (x.rows == 0 || x.cols == 0) return;
  const MatrixQuant args{
      x, q, scale, spec, q.dtype == DType::i4x2, device_key(context.key(), Purpose::quantize)};
  const LaunchShape grid{ceil_div(x.rows * ceil_div(x.cols, 16), 256), 256};
  launch("quantize", context, matrix_amax_kernel, grid, args);
  with_rounding(spec.rounding, [&](auto r) {
    launch("quantize", context, matrix_codes_kernel<decltype(r)::value>, grid, args);
  });
  launch("quantize", context, finish_scales_kernel, {ceil_div(scales, 256), 256},
         reinterpret_cast<const std::uint32_t*>(scale), 1, scale, scales, spec.bits);
}

void CudaBackend::dequantize(const Context& context, const MatrixIn& q, const float* scale,
                             Granularity granularity, const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "dequantize");
  launch("dequantize", context, dequantize_kernel, {ceil_div(out.rows * out.cols, 256), 256}, q,
         scale, granularity, q.dtype == DType::i4x2, out);
}

}  // namespace hot::detail
