// Stage: g_y for both products, if a cluster does not hold a column tile (quantize_columns.cu).
// Also x for the forward product that is saved with storage int8.
//
// rows_column_amax_kernel reads g_y once. It writes the codes of rows for g_x, or with a single
// scale only the largest value. It also writes the largest values of the columns of P g_y, and g_b.
// For x it writes the codes of rows and the largest values of the columns of P x. The codes of the
// columns need a second read (column_codes_kernel), which starts where this one ended: in the L2
// cache.
//   * tile: 16 whole rows in shared memory, or a multiple if rows are short. One CTA of 16 warps
//     per SM goes from tile to tile. While it processes a tile it copies the next one, with an
//     instruction per row (cp.async.bulk, from Hopper on).
//   * units: A unit is a run of neighbouring tiles. A CTA draws units from a counter in global
//     memory, two ahead of its work. A CTA that starts late, because another kernel holds its SM,
//     leaves the tiles to the others.
//   * rows: T lanes of a warp hold a row in registers, B blocks of 16 elements each. The work is
//     that of rows16_kernel: butterflies, largest value by shuffles, codes. There are instances for
//     g_y's block and for the forward pass's.
//   * columns: A thread takes 16 tokens of two neighbouring columns and transforms them. For a
//     sketch it folds them first, by a table of the tokens to add. Only this thread updates the
//     columns' largest values and sums in shared memory.
//   * sums: The last tile of a unit writes a partial sum of each column to global memory. A unit
//     has at most 32 tiles: this number of fp32 additions keeps g_b's error bound. The order of all
//     additions is the same in every run.
//   * end: A CTA updates the largest values in global memory once.
//   * traffic: 2 bytes read and 1 written per element, and 2 + 1 (rank 8: 0.5) for the codes of the
//     columns. Three kernels would read 2 bytes three times.
#include <cstdint>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/quantize_columns.cuh"
#include "cuda/quantize_rows.cuh"

namespace hot::detail {
namespace {

using namespace rows_column_amax;
using columns::ColumnTransform;

struct RowsColumnAmaxArgs {
  RowsArgs rows;
  columns::Args columns;
  ColumnTransform transform;
  int lanes;         // of a row: T
  int token_blocks;  // of a tile
  unsigned tiles, unit_tiles;
  unsigned* counter;  // zero before the launch
};

// Starts the copies of a tile and writes the offsets of its folds. Offset 2 i is a token of the
// lower half, offset 2 i + 1 the token that is added to it.
[[maybe_unused]] __device__ void start_tile(const RowsColumnAmaxArgs& args, const Layout& layout,
                                            unsigned tile, char* to, int* folds, unsigned barrier) {
  const int thread = static_cast<int>(threadIdx.x);
  const int rows = args.token_blocks * token_block;
  const std::int64_t first = std::int64_t{tile} * rows;
  const auto real = static_cast<int>(min(std::int64_t{rows}, args.rows.x.rows - first));
  if (thread < 32) {
    if (thread == 0) expect_bulk(barrier, static_cast<unsigned>(real * layout.row_bytes));
    __syncwarp();
    const std::int64_t pitch = args.rows.x.row_stride * 2;
    const char* from = static_cast<const char*>(args.rows.x.data) + first * pitch;
    const unsigned place = shared_address(to);
    for (int row = thread; row < real; row += 32) {
      copy_bulk(place + static_cast<unsigned>(row * layout.row_bytes), from + row * pitch,
                static_cast<unsigned>(layout.row_bytes), barrier);
    }
  }
  for (int i = real * layout.row_bytes + 16 * thread; i < layout.tile_bytes; i += 16 * threads) {
    *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
  }
  if (args.transform != ColumnTransform::projected || args.columns.fold == 0 ||
      thread >= args.token_blocks * token_block) {
    return;
  }
  const auto block = static_cast<std::uint64_t>(tile) * static_cast<unsigned>(args.token_blocks) +
                     static_cast<unsigned>(thread / token_block);
  const int a =
      args.columns.fold == columns::drawn_fold
          ? sketch_draw(random_words(args.columns.sketch, offset_of(args.columns.sketch), block), 0,
                        token_block)
          : args.columns.fold;
  // The token is i with a 0 inserted at the position of a's top bit.
  const int top = 1 << (31 - __clz(a)), i = thread % token_block / 2;
  const int token = (i & (top - 1)) | (2 * i & ~(2 * top - 1));
  folds[thread] = (thread % 2 == 0 ? token : token ^ a) * layout.row_bytes;
}

template <int hadamard, int B>
__device__ __forceinline__ void quantize_tile_rows(const RowsColumnAmaxArgs& args,
                                                   const Layout& layout, const DeviceOffset& offset,
                                                   unsigned tile, const char* tokens,
                                                   std::uint32_t& largest) {
  const int thread = static_cast<int>(threadIdx.x), T = args.lanes, lane = thread & (T - 1);
  const int local = thread / T;  // row within the tile; the CTA has one group of T lanes per row
  const int blocks = static_cast<int>(args.rows.k_padded / 16);
  const char* from = tokens + local * layout.row_bytes;
  unsigned words[B][8];
#pragma unroll
  for (int i = 0; i < B; ++i) {
    const int block = lane + i * T;
#pragma unroll
    for (unsigned& word : words[i]) word = 0;
    if (block < blocks) load_words(from + block * 32, words[i]);
  }
  float v[B][16];
#pragma unroll
  for (int i = 0; i < B; ++i) BF16::unpack(words[i], v[i]);
  const std::int64_t row = std::int64_t{tile} * (args.token_blocks * token_block) + local;
  quantize_row_values<hadamard>(args.rows, offset, row, lane, T, v, [&](std::uint32_t& amax) {
    if (args.rows.pass == Pass::amax) {
      largest = max(largest, amax);
      return false;
    }
    amax = lanes_max(amax, T);
    return true;
  });
}

// Place of a tile in its unit.
struct TilePlace {
  unsigned unit;
  bool first, last;
};

[[maybe_unused]] __device__ inline TilePlace place_of(const RowsColumnAmaxArgs& args, unsigned unit,
                                                      unsigned tile) {
  return {unit, tile == unit * args.unit_tiles,
          tile + 1 == min((unit + 1) * args.unit_tiles, args.tiles)};
}

// Updates the largest values and sums of two columns of P g_y per thread.
template <ColumnTransform transform>
__device__ __forceinline__ void accumulate_columns(const RowsColumnAmaxArgs& args,
                                                   const Layout& layout, const char* tokens,
                                                   const int* folds, const TilePlace& place,
                                                   std::uint32_t* all_largest, float* all_sums) {
  auto* const largest = reinterpret_cast<uint2*>(all_largest);
  auto* const sums = reinterpret_cast<float2*>(all_sums);
  const int pairs = static_cast<int>(args.rows.x.cols) / 2;
  float2* const all =
      reinterpret_cast<float2*>(args.columns.partial_sums) + std::int64_t{place.unit} * pairs;
  for (int i = static_cast<int>(threadIdx.x); i < args.token_blocks * pairs; i += threads) {
    const int block = args.token_blocks == 1 ? 0 : i / pairs, pair = i - block * pairs;
    const char* from = tokens + block * token_block * layout.row_bytes + pair * 4;
    columns::Partial<transform, float> partial[2];
    if (transform == ColumnTransform::projected && args.columns.fold != 0) {
      const auto* offsets = reinterpret_cast<const int4*>(folds + block * token_block);
      float v[2][8];
#pragma unroll
      for (int two = 0; two < 4; ++two) {
        const int4 at = offsets[two];
        float x[2], y[2];
        columns::load_two<BF16>(from + at.x, x[0], x[1]);
        columns::load_two<BF16>(from + at.y, y[0], y[1]);
        v[0][2 * two] = x[0] + y[0];
        v[1][2 * two] = x[1] + y[1];
        columns::load_two<BF16>(from + at.z, x[0], x[1]);
        columns::load_two<BF16>(from + at.w, y[0], y[1]);
        v[0][2 * two + 1] = x[0] + y[0];
        v[1][2 * two + 1] = x[1] + y[1];
      }
      partial[0].folded(v[0], true);
      partial[1].folded(v[1], true);
    } else {
      float v[2][token_block];
#pragma unroll
      for (int t = 0; t < token_block; ++t) {
        columns::load_two<BF16>(from + t * layout.row_bytes, v[0][t], v[1][t]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if constexpr (transform == ColumnTransform::projected) {
          partial[c].lowpass(v[c], true);
        } else {
          partial[c].tokens(v[c], args.columns.sum_wanted);
        }
      }
    }
    std::uint32_t amax[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float value = partial[c].largest[0];
      if constexpr (transform == ColumnTransform::projected) {
        value = max_magnitude(value, partial[c].largest[1] * args.columns.sketch_weight);
      }
      amax[c] = abs_bits(value);
    }
    const uint2 before = largest[i];
    largest[i] = make_uint2(max(before.x, amax[0]), max(before.y, amax[1]));
    if (args.columns.sum_wanted) {
      const float2 before_sum = place.first ? make_float2(0.0F, 0.0F) : sums[i];
      const float2 sum = make_float2(before_sum.x + partial[0].sum, before_sum.y + partial[1].sum);
      if (place.last && args.token_blocks == 1) {
        all[i] = sum;
      } else {
        sums[i] = sum;
      }
    }
  }
  if (!args.columns.sum_wanted || !place.last || args.token_blocks == 1) return;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < pairs; i += threads) {
    float2 sum = sums[i];
    for (int block = 1; block < args.token_blocks; ++block) {
      const float2 more = sums[block * pairs + i];
      sum = make_float2(sum.x + more.x, sum.y + more.y);
    }
    all[i] = sum;
  }
}

template <int hadamard, int B>
__global__ void __launch_bounds__(threads, 1)
    rows_column_amax_kernel(const __grid_constant__ RowsColumnAmaxArgs args) {
#if HOT_HOPPER_CODE
  extern __shared__ __align__(128) char shared[];
  const Layout layout(args.rows.x.cols, args.token_blocks);
  // The drawn units: that of this tile, the next one, the one after.
  auto* const units = reinterpret_cast<unsigned*>(shared + layout.units());
  auto* const largest = reinterpret_cast<std::uint32_t*>(shared + layout.largest());
  auto* const sums = reinterpret_cast<float*>(shared + layout.sums());
  auto* const folds = reinterpret_cast<int*>(shared + layout.folds());
  const unsigned barriers = shared_address(shared + layout.barriers());
  if (threadIdx.x == 0) {
    start_barrier(barriers);
    start_barrier(barriers + barrier_bytes);
  }
  for (int i = static_cast<int>(threadIdx.x); i < layout.slots; i += threads) largest[i] = 0;
  begin_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) units[i] = atomicAdd(args.counter, 1U);
  }
  __syncthreads();
  unsigned tile = units[0] * args.unit_tiles, drawn = 0;
  if (tile < args.tiles) start_tile(args, layout, tile, shared, folds, barriers);
  const DeviceOffset offset = warp_offset<rows16_rounding(hadamard)>(args.rows.key);
  std::uint32_t rows_largest = 0;
  for (unsigned turn = 0; tile < args.tiles; ++turn) {
    const unsigned here = turn % 2, next = here ^ 1;
    wait_bulk(barriers + here * barrier_bytes, turn / 2);
    __syncthreads();  // this tile is loaded, and all are done with the previous one
    const auto next_of = [&] {
      return place_of(args, units[drawn % 3], tile).last ? units[(drawn + 1) % 3] * args.unit_tiles
                                                         : tile + 1;
    };
    if (next_of() < args.tiles) {
      start_tile(args, layout, next_of(), shared + next * layout.tile_bytes,
                 folds + next * layout.fold_words, barriers + next * barrier_bytes);
    }
    unsigned later = 0;
    if (threadIdx.x == 0 && tile == units[drawn % 3] * args.unit_tiles) {
      later = atomicAdd(args.counter, 1U);
    }
    const char* const tokens = shared + here * layout.tile_bytes;
    quantize_tile_rows<hadamard, B>(args, layout, offset, tile, tokens, rows_largest);
    const int* const tile_folds = folds + here * layout.fold_words;
    // Read again: registers are few.
    const TilePlace place = place_of(args, units[drawn % 3], tile);
    if (args.transform == ColumnTransform::full) {
      accumulate_columns<ColumnTransform::full>(args, layout, tokens, tile_folds, place, largest,
                                                sums);
    } else {
      accumulate_columns<ColumnTransform::projected>(args, layout, tokens, tile_folds, place,
                                                     largest, sums);
    }
    // The place is free: its unit was that of the tile before this unit.
    if (place.first && threadIdx.x == 0) units[(drawn + 2) % 3] = later;
    tile = next_of();
    if (place.last) ++drawn;
  }
  __syncthreads();
  const int columns = static_cast<int>(args.rows.x.cols);
  std::uint32_t all_columns = 0;
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += threads) {
    std::uint32_t column = 0;
    for (int block = 0; block < args.token_blocks; ++block) {
      column = max(column, largest[block * columns + c]);
    }
    if (!args.columns.per_tensor) atomic_max(args.columns.out.amax + c, column);
    all_columns = max(all_columns, column);
  }
  const bool leader = threadIdx.x % 32 == 0;
  if (args.columns.per_tensor) {
    all_columns = warp_max(all_columns);
    if (leader) atomic_max(args.columns.out.amax, all_columns);
  }
  if (args.rows.pass == Pass::amax) {
    rows_largest = warp_max(rows_largest);
    if (leader) atomic_max(args.rows.amax, rows_largest);
  }
#endif
}

}  // namespace

void launch_rows_column_amax(const Context& context, const plan::Step& step, const Work& work) {
  const auto& part = step.as<plan::RowsColumnAmaxStep>();
  const Operand& rows = work.operands.at(part.of, Along::row);
  RowsColumnAmaxArgs args{};
  args.rows = rows_args(context, rows);
  args.rows.pass = part.pass;
  args.columns = columns::make_args(context, work, work.operands.at(part.of, Along::column),
                                    part.transform, true);
  args.transform = part.transform;
  args.lanes = part.lanes;
  args.token_blocks = part.token_blocks;
  args.tiles = part.tiles;
  args.unit_tiles = part.unit_tiles;
  args.counter = args.columns.out.amax + part.counter;
  with_constant<rows16_min_blocks, rows16_max_blocks>(part.lane_blocks, [&](auto b) {
    constexpr int B = decltype(b)::value;
    launch(part.of == Source::gy ? "backward_linear" : "quantize_forward_input", context,
           rows.transform.block == gradient_block ? rows_column_amax_kernel<gradient_block, B>
                                                  : rows_column_amax_kernel<forward_block, B>,
           step.shape, args);
  });
}

}  // namespace hot::detail
