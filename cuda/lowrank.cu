// Stage: HLA along the tokens, and the K-contiguous operands that are made from its rows.
//
// Two passes over x: the largest values (atomicMax into the scales' memory), then the codes; the
// rows of P x are computed twice and never stored.
//
// tile_amax_kernel, tile_kernel: the hot path (n = 16, contiguous rows, an even number of columns).
//   A thread block takes 64 columns x 128 k. A thread has two neighbouring columns and two groups
//   of 16 k in registers: a warp reads 128 bytes (fp16) of every token, 16 loads are in flight. A
//   group is 16 tokens as they are (full), one whole block (w for g_x), or two blocks folded to 8
//   values each (sketch, r = 8: a fold reads tokens t and t ^ a, so that no register is indexed at
//   run time). The codes are turned in shared memory and leave as 128 contiguous bytes of a row.
//
// strip_kernel: everything else (blocks to 256, any row list, grids, prefix tokens, scales by k).
//   The block lies in shared memory, a column of it for each thread: no barriers, no conflicts.
//
// g_b: sums of 128 tokens (or what tile_amax_kernel met), then their sum, in a fixed order.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

constexpr int group = 16;

// Projection without its vector.
struct DeviceProjection {
  Basis basis;
  int block, rank, folds;
  float sketch_weight;  // 1 on the activation's side
  float prefix_factor;
  std::int64_t body_tokens, blocks, k, k_padded;
  TokenOrder order;
  std::uint8_t rows[64];
  RandomKey sketch;
};

DeviceProjection device_projection(const Projection& p, Side side, const Key& sketch_key) {
  DeviceProjection d{};
  d.basis = p.basis;
  d.block = p.block;
  d.rank = p.rank;
  d.folds = p.folds;
  d.sketch_weight = side == Side::gradient ? p.sketch_weight : 1.0F;
  d.prefix_factor = side == Side::gradient ? p.prefix_factor_g : p.prefix_factor_x;
  d.body_tokens = p.body_tokens;
  d.blocks = p.blocks;
  d.k = p.k;
  d.k_padded = p.k_padded;
  d.order = p.order;
  for (std::size_t i = 0; i < p.rows.size() && p.rank < p.block; ++i) {
    d.rows[i] = static_cast<std::uint8_t>(p.rows[i]);
  }
  d.sketch = random_key(sketch_key, Purpose::sketch);
  return d;
}

enum class Pass { amax, codes };

struct ColumnArgs {
  MatrixIn x;
  DeviceProjection p;
  std::int8_t* codes;
  float* scale;
  std::int64_t k_padded;
  std::int64_t run;  // groups (groups_kernel) or blocks (strip_kernel) of one thread
  int bits;
  bool per_tensor, per_k;
  RandomKey key;
  Pass pass;
  float* sums;  // tile_amax_kernel: sums of the tokens of every tile, or null
};

// The fold number `fold` of a block: a and the position of its top bit.
__device__ int sketch_draw(const RandomWords& draw, int fold, int length) {
  return 1 + static_cast<int>(__umulhi(draw.word[fold], static_cast<std::uint32_t>(length - 1)));
}

enum class Kind { full, whole, sketch8 };

constexpr int tile_columns = 64, tile_groups = 8, tile_threads = 128;
constexpr int tile_k = tile_groups * group;
constexpr int turn_stride = tile_k + 16;  // bytes of a column in shared memory, with its padding

// Two neighbouring elements of a row, aligned as a pair.
template <class Tag>
__device__ float2 load_pair(const MatrixIn& x, std::int64_t row, std::int64_t col) {
  unsigned words[Tag::size / 2];
  const char* from = static_cast<const char*>(x.data) + (row * x.row_stride + col) * Tag::size;
  if constexpr (Tag::size == 4) {
    load_words(from, words);
  } else {
    words[0] = *reinterpret_cast<const unsigned*>(from);
  }
  float v[2];
  Tag::unpack(words, v);
  return make_float2(v[0], v[1]);
}

// Group `g` of two columns. `draws[i]`: a of the block i of this tile.
template <Kind kind, class Tag>
__device__ void project_group(const ColumnArgs& args, std::int64_t g, int first_block,
                              const int* draws, std::int64_t col, float (&v)[2][group]) {
  const auto load = [&](std::int64_t token) {
    return token < args.x.rows ? load_pair<Tag>(args.x, token, col) : make_float2(0.0F, 0.0F);
  };
  if constexpr (kind == Kind::sketch8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t first = (2 * g + half) * 16;
      const int a = draws[first_block + half];
      const int low = (1 << (31 - __clz(a))) - 1;  // bits below a's top bit
      float f[2][8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int t = (i & low) | ((i & ~low) << 1);
        const float2 x = load(first + t), y = load(first + (t ^ a));
        f[0][i] = x.x + y.x;
        f[1][i] = x.y + y.y;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        butterfly<1, 8>(f[c]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[c][8 * half + i] = i == 0 ? f[c][i] : f[c][i] * args.p.sketch_weight;
        }
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < group; ++t) {
      const float2 x = load(g * group + t);
      v[0][t] = x.x;
      v[1][t] = x.y;
    }
    if constexpr (kind == Kind::whole) {
      butterfly<1, group>(v[0]);
      butterfly<1, group>(v[1]);
    }
  }
}

// The subspaces of the tile's blocks, one thread each.
template <Kind kind>
__device__ void draw_tile(const ColumnArgs& args, std::int64_t first_group, int* draws) {
  if constexpr (kind == Kind::sketch8) {
    if (threadIdx.x < 2 * tile_groups) {
      const std::int64_t block = 2 * first_group + threadIdx.x;
      draws[threadIdx.x] =
          sketch_draw(random_words(args.p.sketch, static_cast<std::uint64_t>(block)), 0, 16);
    }
    __syncthreads();
  }
}

// The sum of the tokens of a group, in the order in which row 0 of their FWHT adds them.
template <Kind kind>
__device__ float group_sum(const float (&v)[group]) {
  if constexpr (kind == Kind::sketch8) {
    return v[0] + v[8];
  } else if constexpr (kind == Kind::whole) {
    return v[0];
  } else {
    float sum[group];
#pragma unroll
    for (int t = 0; t < group; ++t) sum[t] = v[t];
#pragma unroll
    for (int h = 1; h < group; h *= 2) {
#pragma unroll
      for (int t = 0; t < group; t += 2 * h) sum[t] = sum[t] + sum[t + h];
    }
    return sum[0];
  }
}

template <Kind kind, class Tag>
__global__ void __launch_bounds__(tile_threads) tile_amax_kernel(ColumnArgs args) {
  __shared__ int draws[2 * tile_groups];
  __shared__ std::uint32_t best_of[tile_threads / 32][tile_columns];
  const std::int64_t strips = (args.x.cols + tile_columns - 1) / tile_columns;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t col0 = blockIdx.x % strips * tile_columns, col = col0 + 2 * lane;
  const std::int64_t groups = args.k_padded / group;
  std::uint32_t best[2] = {0, 0};
  __shared__ float sums_of[4][tile_columns];
  for (std::int64_t tile = 0; tile < args.run; ++tile) {
    const std::int64_t first = (blockIdx.x / strips * args.run + tile) * tile_groups;
    if (first >= groups) break;
    if (tile > 0) __syncthreads();  // the last tile's draws and sums are no longer read
    draw_tile<kind>(args, first, draws);
    float sum[2] = {0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < tile_groups / 4; ++i) {
      const int local = i * 4 + warp;
      if (col >= args.x.cols || first + local >= groups) continue;
      float v[2][group];
      project_group<kind, Tag>(args, first + local, 2 * local, draws, col, v);
#pragma unroll
      for (int k = 0; k < group; ++k) {
        best[0] = max(best[0], abs_bits(v[0][k]));
        best[1] = max(best[1], abs_bits(v[1][k]));
      }
      if (args.sums != nullptr) {
#pragma unroll
        for (int c = 0; c < 2; ++c) sum[c] += group_sum<kind>(v[c]);
      }
    }
    if (args.sums == nullptr) continue;
    sums_of[warp][2 * lane] = sum[0];
    sums_of[warp][2 * lane + 1] = sum[1];
    __syncthreads();
    const int c = static_cast<int>(threadIdx.x);
    if (c < tile_columns && col0 + c < args.x.cols) {
      args.sums[first / tile_groups * args.x.cols + col0 + c] =
          (sums_of[0][c] + sums_of[1][c]) + (sums_of[2][c] + sums_of[3][c]);
    }
  }
  auto* amax = reinterpret_cast<std::uint32_t*>(args.scale);
  if (args.per_tensor) {
    const std::uint32_t largest = __reduce_max_sync(0xffffffffU, max(best[0], best[1]));
    if (lane == 0) atomicMax(amax, largest);
    return;
  }
  best_of[warp][2 * lane] = best[0];
  best_of[warp][2 * lane + 1] = best[1];
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  if (c >= tile_columns || col0 + c >= args.x.cols) return;
  atomicMax(amax + col0 + c,
            max(max(best_of[0][c], best_of[1][c]), max(best_of[2][c], best_of[3][c])));
}

template <Kind kind, Rounding rounding, class Tag>
__global__ void __launch_bounds__(tile_threads) tile_kernel(ColumnArgs args) {
  __shared__ int draws[2 * tile_groups];
  __shared__ __align__(16) unsigned char turned[tile_columns * turn_stride];
  const std::int64_t strips = (args.x.cols + tile_columns - 1) / tile_columns;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t col0 = blockIdx.x % strips * tile_columns, col = col0 + 2 * lane;
  const std::int64_t first = blockIdx.x / strips * tile_groups;
  const std::int64_t groups = args.k_padded / group;
  draw_tile<kind>(args, first, draws);
  if (col < args.x.cols) {
    const auto* amax = reinterpret_cast<const std::uint32_t*>(args.scale);
    DeviceScale s[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      s[c] = device_scale(amax[args.per_tensor ? 0 : col + c], args.bits);
    }
#pragma unroll
    for (int i = 0; i < tile_groups / 4; ++i) {
      const int local = i * 4 + warp;
      if (first + local >= groups) continue;
      float v[2][group];
      project_group<kind, Tag>(args, first + local, 2 * local, draws, col, v);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint4 codes = make_uint4(0, 0, 0, 0);
        if (s[c].keep) {
          codes = round_group<rounding>(
              [&](int k) { return v[c][k] * s[c].inv; }, args.key,
              static_cast<std::uint64_t>((col + c) * groups + first + local), args.bits);
        }
        *reinterpret_cast<uint4*>(turned + (2 * lane + c) * turn_stride + local * group) = codes;
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < tile_columns * tile_groups / tile_threads; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * tile_threads;
    const int c = piece / tile_groups, g = piece % tile_groups;
    if (col0 + c < args.x.cols && first + g < groups) {
      *reinterpret_cast<uint4*>(args.codes + (col0 + c) * args.k_padded + (first + g) * group) =
          *reinterpret_cast<const uint4*>(turned + c * turn_stride + g * group);
    }
  }
}

// A column of shared memory: element i of this thread.
struct SharedColumn {
  float* base;
  int threads;
  __device__ float& operator[](int i) const { return base[i * threads]; }
};

__device__ void butterfly_shared(const SharedColumn& v, int length) {
  for (int h = 1; h < length; h *= 2) {
    for (int i = 0; i < length; ++i) {
      if ((i & h) != 0) continue;
      const float a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
}

// Calls emit(k, value) for the rows of P x that the blocks [begin, end) give, in order; the range
// that holds the last block also gives the prefix rows.
template <class Emit>
__device__ void walk_rows(const MatrixIn& x, const DeviceProjection& p, std::int64_t col,
                          std::int64_t begin, std::int64_t end, const SharedColumn& v,
                          const Emit& emit) {
  std::int64_t k = begin * p.rank;
  for (std::int64_t block = begin; block < end; ++block) {
    for (int t = 0; t < p.block; ++t) {
      const std::int64_t position = block * p.block + t;
      v[t] = position < p.body_tokens ? load_element(x, p.order.body(position), col) : 0.0F;
    }
    int length = p.block;
    if (p.basis == Basis::sketch && p.folds > 0) {
      const RandomWords draw = random_words(p.sketch, static_cast<std::uint64_t>(block));
      for (int fold = 0; fold < p.folds; ++fold, length /= 2) {
        const int a = sketch_draw(draw, fold, length);
        const int top = 1 << (31 - __clz(a));
        int to = 0;  // in place: result i comes from rows i and above
        for (int t = 0; t < length; ++t) {
          if ((t & top) == 0) v[to++] = v[t] + v[t ^ a];
        }
      }
    }
    if (p.basis != Basis::full) butterfly_shared(v, length);
    for (int i = 0; i < p.rank; ++i) {
      float value;
      if (p.basis == Basis::sketch) {
        value = i == 0 || p.folds == 0 ? v[i] : v[i] * p.sketch_weight;
      } else {
        value = v[p.rank == p.block ? i : p.rows[i]];
      }
      emit(k++, value);
    }
  }
  if (end < p.blocks) return;
  for (std::int64_t j = 0; j < p.order.prefix_rows(); ++j) {
    emit(k++, load_element(x, p.order.prefix_token(j), col) * p.prefix_factor);
  }
}

template <Rounding rounding>
__global__ void strip_kernel(ColumnArgs args) {
  extern __shared__ float shared[];
  const int threads = static_cast<int>(blockDim.x);
  const std::int64_t strips = (args.x.cols + threads - 1) / threads;
  const std::int64_t col = blockIdx.x % strips * threads + threadIdx.x;
  const std::int64_t begin = blockIdx.x / strips * args.run;
  const std::int64_t end = min(args.p.blocks, begin + args.run);
  if (col >= args.x.cols) return;
  const SharedColumn v{shared + threadIdx.x, threads};
  const SharedColumn pending{shared + args.p.block * threads + threadIdx.x, threads};
  auto* amax = reinterpret_cast<std::uint32_t*>(args.scale);
  if (args.pass == Pass::amax) {
    std::uint32_t best = 0;
    walk_rows(args.x, args.p, col, begin, end, v, [&](std::int64_t k, float value) {
      if (args.per_k) {
        atomicMax(amax + k, abs_bits(value));
      } else {
        best = max(best, abs_bits(value));
      }
    });
    if (!args.per_k) atomicMax(amax + (args.per_tensor ? 0 : col), best);
    return;
  }
  const std::int64_t groups = args.k_padded / group;
  const std::int64_t first = begin * args.p.rank;
  const std::int64_t last = end < args.p.blocks ? end * args.p.rank : args.k_padded;
  const auto finish = [&](std::int64_t g) {
    const DeviceScale column =
        args.per_k ? DeviceScale{} : device_scale(amax[args.per_tensor ? 0 : col], args.bits);
    const uint4 codes = round_group<rounding>(
        [&](int i) {
          const DeviceScale s = args.per_k ? device_scale(amax[g * group + i], args.bits) : column;
          return s.keep ? pending[i] * s.inv : 0.0F;
        },
        args.key, static_cast<std::uint64_t>(col * groups + g), args.bits);
    *reinterpret_cast<uint4*>(args.codes + col * args.k_padded + g * group) = codes;
  };
  std::int64_t next = first;
  walk_rows(args.x, args.p, col, begin, end, v, [&](std::int64_t k, float value) {
    pending[static_cast<int>(k % group)] = value;
    next = k + 1;
    if (next % group == 0) finish(k / group);
  });
  if (next % group != 0 && last == args.k_padded) {
    const std::int64_t g = next / group;
    for (; next % group != 0; ++next) pending[static_cast<int>(next % group)] = 0.0F;
    finish(g);
  }
}

__global__ void hla_kernel(MatrixIn x, DeviceProjection p, std::int64_t run, MatrixOut out) {
  extern __shared__ float shared[];
  const int threads = static_cast<int>(blockDim.x);
  const std::int64_t strips = (x.cols + threads - 1) / threads;
  const std::int64_t col = blockIdx.x % strips * threads + threadIdx.x;
  const std::int64_t begin = blockIdx.x / strips * run, end = min(p.blocks, begin + run);
  if (col >= x.cols) return;
  walk_rows(x, p, col, begin, end, SharedColumn{shared + threadIdx.x, threads},
            [&](std::int64_t k, float value) { store_element(out, k, col, value); });
}

struct Grid {
  std::int64_t run, blocks;
  int threads;
  std::size_t shared;
};

Grid strip_grid(const Projection& p, std::int64_t cols, int extra) {
  Grid grid{};
  grid.threads = p.block <= 64 ? 128 : 32;
  grid.shared = static_cast<std::size_t>((p.block + extra) * grid.threads) * sizeof(float);
  const std::int64_t cut = blocks_per_cut(p.rank);
  grid.run = round_up(std::max<std::int64_t>(1, 64 / p.block), cut);
  grid.blocks =
      ceil_div(cols, grid.threads) * std::max<std::int64_t>(1, ceil_div(p.blocks, grid.run));
  return grid;
}

// Blocks of 16 tokens as row 0 of their FWHT adds them; a thread adds up the blocks of its run.
constexpr int sum_threads = 128, sum_run = 8;  // 128 tokens of a column for a thread

template <class Tag>
__global__ void __launch_bounds__(sum_threads) partial_sum_kernel(MatrixIn x, float* partial) {
  const std::int64_t strips = (x.cols + sum_threads - 1) / sum_threads;
  const std::int64_t col = blockIdx.x % strips * sum_threads + threadIdx.x;
  const std::int64_t run = blockIdx.x / strips;
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
#pragma unroll
    for (int h = 1; h < 16; h *= 2) {
#pragma unroll
      for (int t = 0; t < 16; t += 2 * h) v[t] = v[t] + v[t + h];
    }
    total += v[0];
  }
  partial[run * x.cols + col] = total;
}

__global__ void final_sum_kernel(const float* partial, std::int64_t runs, bool accumulate,
                                 MatrixOut out) {
  __shared__ double shared[8][32];
  const std::int64_t col = std::int64_t{blockIdx.x} * 32 + threadIdx.x % 32;
  const int part = static_cast<int>(threadIdx.x) / 32;
  double total = 0.0;
  if (col < out.cols) {
    for (std::int64_t run = part; run < runs; run += 8) {
      total += static_cast<double>(partial[run * out.cols + col]);
    }
  }
  shared[part][threadIdx.x % 32] = total;
  __syncthreads();
  if (part != 0 || col >= out.cols) return;
  for (int i = 1; i < 8; ++i) total += shared[i][threadIdx.x];
  float sum = static_cast<float>(total);
  if (accumulate) sum = load_out(out, 0, col) + sum;
  store_element(out, 0, col, sum);
}

// Adds up the partial sums in sum.workspace.
void run_final_sum(const Context& context, std::int64_t runs, const ColumnSum& sum) {
  launch("backward_linear", context, final_sum_kernel, ceil_div(sum.out.cols, 32), 256, 0,
         static_cast<const float*>(sum.workspace), runs, sum.accumulate, sum.out);
}

__global__ void fill_zero_kernel(MatrixOut out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < out.rows * out.cols) store_element(out, i / out.cols, i % out.cols, 0.0F);
}

}  // namespace

void CudaBackend::hla(const Context& context, const MatrixIn& x, const Projection& p, Side side,
                      const Key& sketch_key, const MatrixOut& out) const {
  if (p.k == 0 || x.cols == 0) return;
  const DeviceGuard guard(context.device().index, "hla");
  const Grid grid = strip_grid(p, x.cols, 0);
  launch("hla", context, hla_kernel, grid.blocks, grid.threads, grid.shared, x,
         device_projection(p, side, sketch_key), grid.run, out);
}

bool CudaBackend::quantize_columns(const Context& context, const MatrixIn& x, const Projection& p,
                                   Side side, const Key& sketch_key, const OperandQuant& quant,
                                   const Operand& out, const ColumnSum* sum) const {
  const char* const stage = "backward_linear";
  const DeviceGuard guard(context.device().index, stage);
  check_cuda(cudaMemsetAsync(out.scale, 0, static_cast<std::size_t>(out.scales) * sizeof(float),
                             context.stream()),
             stage, "cudaMemsetAsync");
  if (x.cols == 0) return false;
  ColumnArgs args{x,
                  device_projection(p, side, sketch_key),
                  out.codes,
                  out.scale,
                  out.k_padded,
                  0,
                  quant.bits,
                  quant.per_tensor,
                  quant.per_k,
                  random_key(context.key(), quant.purpose),
                  Pass::amax,
                  sum == nullptr ? nullptr : static_cast<float*>(sum->workspace)};
  const bool whole = p.block == 16 && p.rank == 16 && p.basis != Basis::sketch;
  const bool sketch8 = p.basis == Basis::sketch && p.block == 16 && p.rank == 8;
  const bool tiled = !quant.per_k && p.order.samples == 0 && pairs_aligned(x) &&
                     quant.rounding != Rounding::pseudo_stochastic &&
                     (p.basis == Basis::full || whole || sketch8);
  if (out.k_padded == 0) {
    // No tokens: no codes, and the scales are 0 already.
  } else if (tiled) {
    const std::int64_t strips = ceil_div(x.cols, tile_columns);
    const std::int64_t tiles = ceil_div(out.k_padded, tile_k);
    const auto run_tiles = [&](auto amax_kernel, auto codes_kernel) {
      args.run = std::max<std::int64_t>(1, strips * tiles / 8192);
      launch(stage, context, amax_kernel, strips * ceil_div(tiles, args.run), tile_threads, 0,
             args);
      launch(stage, context, codes_kernel, strips * tiles, tile_threads, 0, args);
    };
    const auto with_kind = [&](auto rounding, auto tag) {
      using Tag = decltype(tag);
      constexpr Rounding mode = decltype(rounding)::value;
      if (p.basis == Basis::full) {
        run_tiles(tile_amax_kernel<Kind::full, Tag>, tile_kernel<Kind::full, mode, Tag>);
      } else if (whole) {
        run_tiles(tile_amax_kernel<Kind::whole, Tag>, tile_kernel<Kind::whole, mode, Tag>);
      } else {
        run_tiles(tile_amax_kernel<Kind::sketch8, Tag>, tile_kernel<Kind::sketch8, mode, Tag>);
      }
    };
    host_with_dtype(x.dtype, [&](auto tag) {
      if (quant.rounding == Rounding::nearest) {
        with_kind(std::integral_constant<Rounding, Rounding::nearest>{}, tag);
      } else {
        with_kind(std::integral_constant<Rounding, Rounding::stochastic>{}, tag);
      }
    });
  } else {
    with_rounding(quant.rounding, [&](auto r) {
      const Grid grid = strip_grid(p, x.cols, group);
      args.run = grid.run;
      launch(stage, context, strip_kernel<Rounding::nearest>, grid.blocks, grid.threads,
             grid.shared, args);
      args.pass = Pass::codes;
      launch(stage, context, strip_kernel<decltype(r)::value>, grid.blocks, grid.threads,
             grid.shared, args);
    });
  }
  finish_scales(context, out.scale, out.scales, quant.bits);
  if (!tiled || sum == nullptr || out.k_padded == 0) return false;
  run_final_sum(context, ceil_div(out.k_padded, tile_k), *sum);
  return true;
}

// A partial sum for every 128 tokens (256 where tile_amax_kernel meets them in a sketch).
std::size_t CudaBackend::column_sum_workspace(const Context&, std::int64_t rows,
                                              std::int64_t cols) const {
  return static_cast<std::size_t>(ceil_div(rows, 16 * sum_run) * cols) * sizeof(float);
}

void CudaBackend::column_sum(const Context& context, const MatrixIn& x,
                             const ColumnSum& sum) const {
  const char* const stage = "backward_linear";
  const DeviceGuard guard(context.device().index, stage);
  const std::int64_t runs = ceil_div(x.rows, 16 * sum_run);
  if (runs > 0) {
    host_with_dtype(x.dtype, [&](auto tag) {
      launch(stage, context, partial_sum_kernel<decltype(tag)>,
             runs * ceil_div(x.cols, sum_threads), sum_threads, 0, x,
             static_cast<float*>(sum.workspace));
    });
  }
  run_final_sum(context, runs, sum);
}

void CudaBackend::fill_zero(const Context& context, const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "backward_linear");
  launch("backward_linear", context, fill_zero_kernel, ceil_div(out.rows * out.cols, 256), 256, 0,
         out);
}

}  // namespace hot::detail
