// Stage: FWHT along any axis. A contiguous axis is transformed row by row. Any other axis is
// transformed in strips of `strip_columns` neighbouring fibres, which reads whole cache lines.
#include <algorithm>

#include "cpu/backend.h"

namespace hot::detail {
namespace {

constexpr int strip_block_limit = 256;  // a strip has up to 256 x 64 floats: 64 KB of stack

struct OuterIndex {
  std::int64_t x = 0, out = 0;  // element offsets
};

OuterIndex outer_index(const FwhtArgs& args, std::int64_t flat, int dims) {
  OuterIndex at;
  for (int d = dims - 1; d >= 0; --d) {
    const std::int64_t i = flat % args.outer_shape[d];
    flat /= args.outer_shape[d];
    at.x += i * args.outer_stride_x[d];
    at.out += i * args.outer_stride_out[d];
  }
  return at;
}

void fwht_fibres(const Context& context, const SimdKernels& simd, const FwhtArgs& args) {
  std::int64_t fibres = 1;
  for (int d = 0; d < args.outer_dims; ++d) fibres *= args.outer_shape[d];
  const std::int64_t blocks = args.axis_length / args.block;
  // Transforms several short blocks at once.
  constexpr std::int64_t buffer_size = max_fwht_block;
  const std::int64_t run = std::min(blocks, std::max<std::int64_t>(1, 4096 / args.block));
  const std::int64_t runs = ceil_div(blocks, run);
  for_each_item(context, fibres * runs, run * args.block, [&](std::int64_t i) {
    float buffer[buffer_size];
    const OuterIndex at = outer_index(args, i / runs, args.outer_dims);
    const std::int64_t start = i % runs * run * args.block;
    const std::int64_t count = std::min(run * args.block, args.axis_length - start);
    load_run(simd, args.x, args.x_dtype, at.x + start * args.axis_stride_x, args.axis_stride_x,
             count, buffer);
    simd.fwht_row(buffer, count, args.block);
    store_run(simd, buffer, count, args.out, args.out_dtype, at.out + start * args.axis_stride_out,
              args.axis_stride_out);
  });
}

// Transforms strips. The last outer axis is contiguous: neighbouring fibres are the strip's lanes.
void fwht_strips(const Context& context, const SimdKernels& simd, const FwhtArgs& args) {
  const int last = args.outer_dims - 1;
  const std::int64_t width = args.outer_shape[last];
  std::int64_t planes = 1;
  for (int d = 0; d < last; ++d) planes *= args.outer_shape[d];
  const std::int64_t strips = ceil_div(width, strip_columns);
  const std::int64_t blocks = args.axis_length / args.block;
  for_each_item(context, planes * blocks * strips, strip_columns * args.block, [&](std::int64_t i) {
    float strip[strip_block_limit * strip_columns];
    const OuterIndex at = outer_index(args, i / (blocks * strips), last);
    const std::int64_t row = i / strips % blocks * args.block;
    const std::int64_t col = i % strips * strip_columns;
    const std::int64_t cols = std::min<std::int64_t>(strip_columns, width - col);
    if (cols < strip_columns) std::fill(strip, strip + args.block * strip_columns, 0.0F);
    for (std::int64_t r = 0; r < args.block; ++r) {
      load_run(simd, args.x, args.x_dtype, at.x + (row + r) * args.axis_stride_x + col, 1, cols,
               strip + r * strip_columns);
    }
    simd.fwht_strip(strip, args.block);
    for (std::int64_t r = 0; r < args.block; ++r) {
      store_run(simd, strip + r * strip_columns, cols, args.out, args.out_dtype,
                at.out + (row + r) * args.axis_stride_out + col, 1);
    }
  });
}

}  // namespace

void CpuBackend::fwht(const Context& context, const FwhtArgs& args) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  FwhtArgs sorted = args;
  if (args.axis_stride_x != 1 || args.axis_stride_out != 1) {
    for (int d = 0; d < args.outer_dims; ++d) {
      if (args.outer_stride_x[d] != 1 || args.outer_stride_out[d] != 1) continue;
      const int last = args.outer_dims - 1;
      std::swap(sorted.outer_shape[d], sorted.outer_shape[last]);
      std::swap(sorted.outer_stride_x[d], sorted.outer_stride_x[last]);
      std::swap(sorted.outer_stride_out[d], sorted.outer_stride_out[last]);
      if (args.block <= strip_block_limit) return fwht_strips(context, simd, sorted);
      break;
    }
  }
  fwht_fibres(context, simd, sorted);
}

}  // namespace hot::detail
