// Stage: quantize_forward_input for an x that is also saved as INT4.
//
// rows_groups_kernel reads x (16-bit types) from DRAM once. It transforms rows in blocks of 64 and
// writes their INT8 codes for the forward product. It also writes the packed codes for backward.
//   * chunk: 64 tokens, a group of the packed codes. Some CTAs process its rows like rows16_kernel,
//     the others its columns like group_quads_kernel. They are neighbours in the grid and run at
//     the same time. The second reader hits the L2 cache. CTAs that wait for memory (rows) share an
//     SM with CTAs that compute random numbers (groups).
//   * traffic: 2 bytes read and 1.53 written per element. Two kernels would read 4.
#include <cstdint>

#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/int4_activation.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize_rows.cuh"

namespace hot::detail {
namespace {

struct RowsGroupsArgs {
  RowsArgs rows;
  GroupsArgs groups;
  int row_ctas, column_ctas;  // per chunk
};

// Minimum CTAs per SM for B blocks per lane. Fewer blocks leave registers for more warps.
template <int B>
inline constexpr int min_ctas = B <= 2   ? 4
                                : B == 3 ? 3
                                         : 1;

template <int B, class Tag>
__global__ void __launch_bounds__(rows_groups::max_threads(B), min_ctas<B>)
    rows_groups_kernel(const __grid_constant__ RowsGroupsArgs args) {
  __shared__ std::uint32_t shared[rows16_max_lanes / 32];
  begin_kernel();
  // threadIdx.x is the lane of a row, threadIdx.y the row of the CTA.
  const auto ctas = static_cast<unsigned>(args.row_ctas + args.column_ctas);
  const std::int64_t chunk = blockIdx.x / ctas;
  const int cta = static_cast<int>(blockIdx.x % ctas);
  if (cta < args.row_ctas) {
    const int T = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
    const auto local = cta * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
    // All threads take part. Threads beyond the chunk behave as beyond the last row.
    const std::int64_t row = local < int4_group ? chunk * int4_group + local : args.rows.x.rows;
    quantize_row16<forward_block, B, Tag>(args.rows, row, lane, T, [&](std::uint32_t& amax) {
      amax = row_max(amax, T, lane, shared);
      return true;
    });
  } else {
    const unsigned threads = blockDim.x * blockDim.y;
    compress_quads<Tag>(args.groups, threadIdx.y * blockDim.x + threadIdx.x,
                        std::int64_t{cta - args.row_ctas} * threads, chunk);
  }
}

}  // namespace

void launch_rows_groups(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::RowsGroupsStep>();
  const Operands& all = work.operands;
  const RowsGroupsArgs args{rows_args(context, all.at(Source::x, Along::row)),
                            groups_args(context, all.at(Source::x, Along::column)), part.row_ctas,
                            part.column_ctas};
  with_dtype(step.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    if constexpr (Tag::size == 2) {
      with_constant<rows16_min_blocks, rows16_max_blocks>(part.lane_blocks, [&](auto b) {
        launch("quantize_forward_input", context, rows_groups_kernel<decltype(b)::value, Tag>,
               step.shape, args);
      });
    }
  });
}

}  // namespace hot::detail
