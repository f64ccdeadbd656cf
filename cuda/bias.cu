// Stage: g_b from its own kernels, and outputs that are zero.
//
// partial_sum_kernel, final_sum_kernel: sums of 128 tokens, then their sum, in a fixed order.
//   Traffic for fp16: 2 bytes per element. A quantiser of g_y for g_w can replace the first kernel.
// fill_zero_kernel: zeros for g_x or g_w if the contraction is empty.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

using namespace bias;

// Adds blocks of 16 tokens in the order of row 0 of their FWHT. A thread adds up a run of blocks.
template <class Tag>
__global__ void __launch_bounds__(sum_threads) partial_sum_kernel(MatrixIn x, float* partial) {
  begin_kernel();
  const std::int64_t tiles = (x.cols + sum_threads - 1) / sum_threads;
  const std::int64_t col = blockIdx.x % tiles * sum_threads + threadIdx.x;
  const std::int64_t run = blockIdx.x / tiles;
  if (col >= x.cols) return;
  float total = 0.0F;
  for (int block = 0; block < sum_run; ++block) {
    const std::int64_t token = (run * sum_run + block) * 16;
    float v[16];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      v[t] = token + t < x.rows ? Tag::load(x.data, (token + t) * x.row_stride + col * x.col_stride)
                                : 0.0F;
    }
    total += tree_sum(v);
  }
  partial[run * x.cols + col] = total;
}

__global__ void __launch_bounds__(32 * final_warps)
    final_sum_kernel(const float* partial, std::int64_t runs, bool accumulate, MatrixOut out,
                     bool independent) {
  begin_kernel(independent);
  __shared__ double shared[final_warps][32];
  const std::int64_t col = std::int64_t{blockIdx.x} * 32 + threadIdx.x % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  double total = 0.0;
  if (col < out.cols) {
#pragma unroll 8
    for (std::int64_t run = warp; run < runs; run += final_warps) {
      total += static_cast<double>(partial[run * out.cols + col]);
    }
  }
  shared[warp][threadIdx.x % 32] = total;
  __syncthreads();
  if (warp == 0 && col < out.cols) {
    for (int i = 1; i < final_warps; ++i) total += shared[i][threadIdx.x];
    float sum = static_cast<float>(total);
    if (accumulate) sum = load_element(out.contents(), 0, col) + sum;
    store_element(out, 0, col, sum);
  }
  end_kernel(independent);
}

__global__ void fill_zero_kernel(MatrixOut out) {
  begin_kernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < out.rows * out.cols) store_element(out, i / out.cols, i % out.cols, 0.0F);
}

}  // namespace

void launch_partial_sum(const Context& context, const plan::Step& step, const Work& work) {
  with_dtype(step.dtype, [&](auto tag) {
    launch("backward_linear", context, partial_sum_kernel<decltype(tag)>, step.shape, work.sum.x,
           work.all_scratch);
  });
}

void launch_final_sum(const Context& context, const plan::Step& step, const Work& work) {
  const ColumnSum& sum = work.sum;
  const float* const sums = step.reads.has(plan::Buffer::sums) ? sum.workspace : work.all_scratch;
  launch("backward_linear", context, final_sum_kernel, step.shape, sums,
         step.as<plan::SumsStep>().runs, sum.accumulate, sum.out, step.independent);
}

void launch_fill_zero(const Context& context, const plan::Step& step, const Work& work) {
  launch("backward_linear", context, fill_zero_kernel, step.shape,
         work.products[step.as<plan::ProductStep>().product].args.out);
}

}  // namespace hot::detail
