// Stage: HLA along the tokens, and the K-contiguous operands that are made from its rows.
//
// A thread owns a column and walks K: its tokens come 32 neighbouring columns at a time for a warp, its
// codes leave as 16 contiguous bytes for each group of 16 k, and a run of groups fills whole sectors.
// Two passes over x: the largest values (atomicMax into the scales' memory), then the codes; the rows
// of P x are computed twice and never stored.
// groups_kernel, the hot path: n = 16 in registers. A group is 16 tokens as they are (full), one whole
//   block (w for g_x), or two blocks folded to 8 values each (sketch, r = 8: a fold reads tokens t and
//   t ^ a, so that no register is indexed at run time).
// strip_kernel, everything else (any block to 256, any row list, grids, prefix tokens, one scale for each
//   k): the block lies in shared memory, a column of it for each thread; no barriers, no conflicts.
#include <algorithm>
#include <cstdint>

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
};

// The fold number `fold` of a block: a and the position of its top bit.
__device__ int sketch_draw(const RandomWords& draw, int fold, int length) {
  return 1 + static_cast<int>(__umulhi(draw.word[fold], static_cast<std::uint32_t>(length - 1)));
}

enum class Kind { full, whole, sketch8 };

template <Kind kind>
__device__ void project_group(const ColumnArgs& args, std::int64_t k_group, std::int64_t col,
                              float (&v)[group]) {
  const auto load = [&](std::int64_t token) {
    return token < args.x.rows ? load_element(args.x, token, col) : 0.0F;
  };
  if constexpr (kind == Kind::sketch8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t block = 2 * k_group + half, first = block * 16;
      const RandomWords draw = random_words(args.p.sketch, static_cast<std::uint64_t>(block));
      const int a = sketch_draw(draw, 0, 16);
      const int low = (1 << (31 - __clz(a))) - 1;  // bits below a's top bit
      float f[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int t = (i & low) | ((i & ~low) << 1);
        f[i] = load(first + t) + load(first + (t ^ a));
      }
      butterfly<1, 8>(f);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[8 * half + i] = i == 0 ? f[i] : f[i] * args.p.sketch_weight;
      }
    }
  } else {
#pragma unroll
    for (int t = 0; t < group; ++t) v[t] = load(k_group * group + t);
    if constexpr (kind == Kind::whole) butterfly<1, group>(v);
  }
}

template <Kind kind, Rounding rounding>
__global__ void __launch_bounds__(128) groups_kernel(ColumnArgs args) {
  const std::int64_t strips = (args.x.cols + 127) / 128;
  const std::int64_t col = blockIdx.x % strips * 128 + threadIdx.x;
  const std::int64_t groups = args.k_padded / group;
  const std::int64_t begin = blockIdx.x / strips * args.run, end = min(groups, begin + args.run);
  if (col >= args.x.cols) return;
  auto* amax = reinterpret_cast<std::uint32_t*>(args.scale) + (args.per_tensor ? 0 : col);
  if (args.pass == Pass::amax) {
    std::uint32_t best = 0;
    for (std::int64_t g = begin; g < end; ++g) {
      float v[group];
      project_group<kind>(args, g, col, v);
#pragma unroll
      for (int i = 0; i < group; ++i) best = max(best, abs_bits(v[i]));
    }
    atomicMax(amax, best);
    return;
  }
  const DeviceScale s = device_scale(*amax, args.bits);
  for (std::int64_t g = begin; g < end; ++g) {
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (s.keep) {
      float v[group];
      project_group<kind>(args, g, col, v);
      codes = round_group<rounding>([&](int i) { return v[i] * s.inv; }, args.key,
                                    static_cast<std::uint64_t>(col * groups + g), args.bits);
    }
    *reinterpret_cast<uint4*>(args.codes + col * args.k_padded + g * group) = codes;
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

// Calls emit(k, value) for the rows of P x that the blocks [begin, end) give, in order; the range that
// holds the last block also gives the prefix rows.
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
          const DeviceScale s =
              args.per_k ? device_scale(amax[g * group + i], args.bits) : column;
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

// Whole groups of 16 k end with these blocks.
std::int64_t blocks_per_cut(int rank) {
  std::int64_t blocks = 1;
  while (blocks * rank % group != 0) ++blocks;
  return blocks;
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
  grid.blocks = ceil_div(cols, grid.threads) *
                std::max<std::int64_t>(1, ceil_div(p.blocks, grid.run));
  return grid;
}

constexpr int sum_columns = 32, sum_lanes = 32;

// Columns of a strip across the lanes of a warp, tokens across warps in blocks of 16 as row 0 of their
// FWHT adds them; a fixed order, so repeatable.
__global__ void column_sum_kernel(MatrixIn x, bool accumulate, MatrixOut out) {
  __shared__ double partial[sum_lanes][sum_columns];
  const std::int64_t col = std::int64_t{blockIdx.x} * sum_columns + threadIdx.x % sum_columns;
  const int lane = static_cast<int>(threadIdx.x) / sum_columns;
  double total = 0.0;
  if (col < x.cols) {
    for (std::int64_t block = lane; block * 16 < x.rows; block += sum_lanes) {
      float v[16];
#pragma unroll
      for (int t = 0; t < 16; ++t) {
        v[t] = block * 16 + t < x.rows ? load_element(x, block * 16 + t, col) : 0.0F;
      }
#pragma unroll
      for (int h = 1; h < 16; h *= 2) {
#pragma unroll
        for (int t = 0; t < 16; t += 2 * h) v[t] = v[t] + v[t + h];
      }
      total += static_cast<double>(v[0]);
    }
  }
  partial[lane][threadIdx.x % sum_columns] = total;
  __syncthreads();
  if (lane != 0 || col >= x.cols) return;
  for (int i = 1; i < sum_lanes; ++i) total += partial[i][threadIdx.x];
  float sum = static_cast<float>(total);
  if (accumulate) sum = load_out(out, 0, col) + sum;
  store_element(out, 0, col, sum);
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

void CudaBackend::quantize_columns(const Context& context, const MatrixIn& x, const Projection& p,
                                   Side side, const Key& sketch_key, const OperandQuant& quant,
                                   const Operand& out) const {
  const char* const stage = "backward_linear";
  const DeviceGuard guard(context.device().index, stage);
  check_cuda(cudaMemsetAsync(out.scale, 0, static_cast<std::size_t>(out.scales) * sizeof(float),
                             context.stream()),
             stage, "cudaMemsetAsync");
  if (x.cols == 0) return;
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
                  Pass::amax};
  const bool plain = !quant.per_k && p.order.samples == 0;
  const bool whole = p.block == 16 && p.rank == 16 && p.basis != Basis::sketch;
  const bool sketch8 = p.basis == Basis::sketch && p.block == 16 && p.rank == 8;
  with_rounding(quant.rounding, [&](auto r) {
    constexpr Rounding rounding = decltype(r)::value;
    const auto run_groups = [&](auto amax_kernel, auto codes_kernel) {
      const std::int64_t strips = ceil_div(x.cols, 128), groups = out.k_padded / group;
      if (groups == 0) return;
      args.pass = Pass::amax;
      args.run = 8;
      launch(stage, context, amax_kernel, strips * ceil_div(groups, args.run), 128, 0, args);
      args.pass = Pass::codes;
      args.run = 4;  // 64 bytes of codes: two whole sectors
      launch(stage, context, codes_kernel, strips * ceil_div(groups, args.run), 128, 0, args);
    };
    if (plain && p.basis == Basis::full) {
      run_groups(groups_kernel<Kind::full, Rounding::nearest>, groups_kernel<Kind::full, rounding>);
    } else if (plain && whole) {
      run_groups(groups_kernel<Kind::whole, Rounding::nearest>,
                 groups_kernel<Kind::whole, rounding>);
    } else if (plain && sketch8) {
      run_groups(groups_kernel<Kind::sketch8, Rounding::nearest>,
                 groups_kernel<Kind::sketch8, rounding>);
    } else {
      const Grid grid = strip_grid(p, x.cols, group);
      args.run = grid.run;
      launch(stage, context, strip_kernel<Rounding::nearest>, grid.blocks, grid.threads,
             grid.shared, args);
      args.pass = Pass::codes;
      launch(stage, context, strip_kernel<rounding>, grid.blocks, grid.threads, grid.shared, args);
    }
  });
  finish_scales(context, out.scale, out.scales, quant.bits);
}

void CudaBackend::column_sum(const Context& context, const MatrixIn& x, bool accumulate,
                             const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "backward_linear");
  launch("backward_linear", context, column_sum_kernel, ceil_div(x.cols, sum_columns),
         sum_columns * sum_lanes, 0, x, accumulate, out);
}

void CudaBackend::fill_zero(const Context& context, const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "backward_linear");
  launch("backward_linear", context, fill_zero_kernel, ceil_div(out.rows * out.cols, 256), 256, 0,
         out);
}

}  // namespace hot::detail
