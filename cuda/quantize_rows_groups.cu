// Stage: quantize_forward_input of an x that is kept as INT4.
//
// rows_groups_kernel reads x once, 16-bit types. It makes the rows' INT8 codes for the forward
// product, after a transform in blocks of 64, and the packed codes that are kept for backward.
//   tile     64 tokens, a group of the packed codes. A cluster shares it; a CTA holds an equal part
//            of its columns in shared memory (cp.async.bulk, an instruction a row, so Hopper on).
//   rows     As in rows16_kernel: T lanes of a warp hold a share of a row. Where there are several
//            CTAs, they exchange the largest values of their shares.
//   groups   As in group_pairs_kernel, from shared memory.
//   2 bytes read and 1.53 written for an element, where two kernels read 4.
#include <algorithm>
#include <cstdint>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/int4_activation.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize_rows.cuh"

namespace hot::detail {
namespace {

using rows_groups::barrier_bytes;
using rows_groups::hadamard_block;
using rows_groups::Layout;
using rows_groups::threads;
using rows_groups::tokens;

struct RowsGroupsArgs {
  RowsArgs rows;
  GroupsArgs groups;
  int columns, ctas;  // of a CTA; of a cluster
  int lanes;          // of a row of so many columns: T
};

// Starts the copies of the CTA's share of a tile; rows past the last one are zeros.
[[maybe_unused]] __device__ void start_tile(const RowsGroupsArgs& args, const Layout& layout,
                                            std::int64_t first, std::int64_t column, char* to,
                                            unsigned barrier) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto real = static_cast<int>(min(std::int64_t{tokens}, args.rows.x.rows - first));
  if (thread < 32) {
    if (thread == 0) expect_bulk(barrier, static_cast<unsigned>(real * layout.row_bytes));
    __syncwarp();
    const std::int64_t pitch = args.rows.x.row_stride * 2;
    const char* from = static_cast<const char*>(args.rows.x.data) + first * pitch + column * 2;
    for (int row = thread; row < real; row += 32) {
      copy_bulk(shared_address(to + row * layout.row_bytes), from + row * pitch,
                static_cast<unsigned>(layout.row_bytes), barrier);
    }
  }
  for (int i = real * layout.row_bytes + 16 * thread; i < layout.largest(); i += 16 * threads) {
    *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
  }
}

// The largest value of a row from those of its shares. Each CTA sends its own to all, and
// `barrier`, the same place in each, counts what arrives.
[[maybe_unused]] __device__ __forceinline__ std::uint32_t row_max_of_cluster(
    std::uint32_t amax, int ctas, int lane, int T, const uint2* shares, unsigned rank,
    unsigned barrier) {
  for (int peer = lane; peer < ctas; peer += T) {
    const auto to = static_cast<unsigned>(peer);
    send_async(cluster_address(shared_address(shares + rank), to),
               make_int2(static_cast<int>(amax), 0), cluster_address(barrier, to));
  }
  wait_bytes(barrier);
  for (int share = 0; share < ctas; ++share) amax = max(amax, shares[share].x);
  return amax;
}

template <int B, class Tag>
__device__ __forceinline__ void quantize_tile_rows(const RowsGroupsArgs& args, const Layout& layout,
                                                   std::int64_t first, unsigned rank,
                                                   const char* tile, const uint2* largest,
                                                   unsigned barriers) {
  const int thread = static_cast<int>(threadIdx.x), T = args.lanes, lane = thread & (T - 1);
  const RowPart part{static_cast<int>(rank) * (args.columns / 16), args.columns / 16};
  const DeviceOffset offset{};  // rounded to nearest
  for (int step = 0; step < rows_groups::steps(T); ++step) {
    const int local = step * (threads / T) + thread / T;
    const char* from = tile + local * layout.row_bytes;
    float v[B][16];
    load_row_values<Tag>(from, part.blocks, lane, T, v);
    quantize_row_values<Rounding::nearest, hadamard_block>(
        args.rows, offset, first + local, part, lane, T, v, [&](std::uint32_t& amax) {
          amax = row_max(amax, T, lane, nullptr);
          if (args.ctas > 1) {
            amax = row_max_of_cluster(amax, args.ctas, lane, T, largest + local * args.ctas, rank,
                                      barriers + static_cast<unsigned>((1 + step) * barrier_bytes));
          }
          return true;
        });
  }
}

template <Rounding rounding, class Tag>
__device__ __forceinline__ void compress_tile_groups(const RowsGroupsArgs& args,
                                                     const Layout& layout,
                                                     const DeviceOffset& offset, std::int64_t group,
                                                     std::int64_t column, const char* tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int half = lane / 16;
  for (int at = warp * 32; at < args.columns; at += threads) {
    const int local = at + 2 * (lane % 16);
    const char* from = tile + half * 32 * layout.row_bytes + local * 2;
    unsigned word[32];
#pragma unroll
    for (int t = 0; t < 32; ++t) {
      word[t] = *reinterpret_cast<const unsigned*>(from + t * layout.row_bytes);
    }
    compress_pair_half<rounding, Tag>(args.groups, offset, column + local, group, half, true, word);
  }
}

template <Rounding rounding, int B, class Tag>
__global__ void __launch_bounds__(threads, 2)
    rows_groups_kernel(const __grid_constant__ RowsGroupsArgs args) {
#if HOT_HOPPER_CODE
  extern __shared__ __align__(128) char shared[];
  const Layout layout(args.columns, args.ctas);
  const auto* const largest = reinterpret_cast<const uint2*>(shared + layout.largest());
  const unsigned barriers = shared_address(shared + layout.barriers());
  const bool alone = args.ctas == 1;
  if (threadIdx.x == 0) {
    start_barrier(barriers);
    // A step brings the largest value of each of its rows' shares, in 8 bytes.
    const auto bytes = static_cast<unsigned>(threads / args.lanes * args.ctas * 8);
    for (int step = 0; !alone && step < rows_groups::steps(args.lanes); ++step) {
      expect_bytes(barriers + static_cast<unsigned>((1 + step) * barrier_bytes), bytes);
    }
  }
  __syncthreads();
  if (!alone) arrive_cluster();
  begin_kernel();
  const unsigned rank = alone ? 0 : cluster_rank();
  const std::int64_t group = blockIdx.x / static_cast<unsigned>(args.ctas);
  const std::int64_t first = group * tokens, column = std::int64_t{rank} * args.columns;
  start_tile(args, layout, first, column, shared, barriers);
  const DeviceOffset offset = warp_offset<rounding>(args.groups.key);
  if (!alone) wait_cluster();  // all expect what is sent
  wait_bulk(barriers, 0);
  __syncthreads();  // and zeros are written
  quantize_tile_rows<B, Tag>(args, layout, first, rank, shared, largest, barriers);
  compress_tile_groups<rounding, Tag>(args, layout, offset, group, column, shared);
#endif
}

using KernelOf = void (*)(RowsGroupsArgs);

template <Rounding rounding, class Tag>
KernelOf kernel_of(int lane_blocks) {
  constexpr KernelOf kernels[rows16_max_blocks] = {
      rows_groups_kernel<rounding, 1, Tag>, rows_groups_kernel<rounding, 2, Tag>,
      rows_groups_kernel<rounding, 3, Tag>, rows_groups_kernel<rounding, 4, Tag>,
      rows_groups_kernel<rounding, 5, Tag>, rows_groups_kernel<rounding, 6, Tag>};
  return kernels[lane_blocks - 1];
}

}  // namespace

void launch_rows_groups(const Context& context, const plan::Step& step, const RowsJob& rows,
                        const CompressJob& kept) {
  const auto& work = step.as<plan::RowsGroupsStep>();
  const RowsGroupsArgs args{rows_args(context, rows), groups_args(context, kept), work.columns,
                            step.shape.cluster, work.lanes};
  host_with_dtype(step.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    if constexpr (Tag::size == 2) {
      launch("quantize_forward_input", context,
             step.rounding == Rounding::stochastic
                 ? kernel_of<Rounding::stochastic, Tag>(work.lane_blocks)
                 : kernel_of<Rounding::nearest, Tag>(work.lane_blocks),
             step.shape, args);
    }
  });
}

}  // namespace hot::detail
