// Stage: HLA along the tokens, and the K-contiguous operands that are made from its rows.
//
// The hot path, blocks of 16 with a scale for a channel, is lowrank_resident.cu.
//
// strip_kernel: everything else (blocks to 256, any row list, prefix tokens, scales by k). Two
// passes
//   over x: the largest values (atomicMax), then the codes. A block lies in
//   shared memory, a column of it for each thread: no barriers, no conflicts.
//
// g_b on its own: sums of 128 tokens, then their sum, in a fixed order.
#include <algorithm>
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/projection.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/lowrank_resident.h"

namespace hot::detail {
namespace {

constexpr int group = 16;

enum class Pass { amax, codes };

struct ColumnArgs {
  MatrixIn x;
  DeviceProjection p;
  std::int8_t* codes;
  std::uint32_t* amax;
  std::int64_t k_padded;
  std::int64_t run;  // blocks of one thread
  int bits;
  bool per_tensor, per_k;
  DeviceKey key;
  Pass pass;
};

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
  const DeviceOffset offset = offset_of(p.sketch);
  for (std::int64_t block = begin; block < end; ++block) {
    for (int t = 0; t < p.block; ++t) {
      const std::int64_t position = block * p.block + t;
      v[t] = position < p.body_tokens ? load_element(x, p.order.body(position), col) : 0.0F;
    }
    int length = p.block;
    if (p.basis == Basis::sketch && p.folds > 0) {
      const RandomWords draw = random_words(p.sketch, offset, static_cast<std::uint64_t>(block));
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
  begin_kernel();
  extern __shared__ float shared[];
  const int threads = static_cast<int>(blockDim.x);
  const std::int64_t strips = (args.x.cols + threads - 1) / threads;
  const std::int64_t col = blockIdx.x % strips * threads + threadIdx.x;
  const std::int64_t begin = blockIdx.x / strips * args.run;
  const std::int64_t end = min(args.p.blocks, begin + args.run);
  if (col >= args.x.cols) return;
  const SharedColumn v{shared + threadIdx.x, threads};
  const SharedColumn pending{shared + args.p.block * threads + threadIdx.x, threads};
  std::uint32_t* const amax = args.amax;
  if (args.pass == Pass::amax) {
    std::uint32_t best = 0;
    walk_rows(args.x, args.p, col, begin, end, v, [&](std::int64_t k, float value) {
      if (args.per_k) {
        atomic_raise(amax + k, abs_bits(value));
      } else {
        best = max(best, abs_bits(value));
      }
    });
    if (!args.per_k) atomic_raise(amax + (args.per_tensor ? 0 : col), best);
    return;
  }
  const DeviceOffset offset = offset_of(args.key);
  const std::int64_t groups = args.k_padded / group;
  const std::int64_t first = begin * args.p.rank;
  const std::int64_t last = end < args.p.blocks ? end * args.p.rank : args.k_padded;
  const auto finish = [&](std::int64_t g) {
    const DeviceScale column =
        args.per_k ? DeviceScale{} : device_scale(amax[args.per_tensor ? 0 : col], args.bits);
    const auto scale_at = [&](int i) {
      return args.per_k ? device_scale(amax[g * group + i], args.bits) : column;
    };
    const uint4 codes =
        round_group<rounding>([&](int i) { return scale_at(i).keep ? pending[i] : 0.0F; },
                              [&](int i) { return scale_at(i).inv; }, args.key, offset,
                              static_cast<std::uint64_t>(col * groups + g), args.bits);
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
  begin_kernel();
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
  begin_kernel();
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
                                 MatrixOut out, bool independent) {
  begin_kernel(independent);
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
  if (part == 0 && col < out.cols) {
    for (int i = 1; i < 8; ++i) total += shared[i][threadIdx.x];
    float sum = static_cast<float>(total);
    if (accumulate) sum = load_out(out, 0, col) + sum;
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

void finish_sums(const Context& context, std::int64_t runs, const ColumnSum& sum,
                 bool independent) {
  launch("backward_linear", context, final_sum_kernel, ceil_div(sum.out.cols, 32), 256, 0,
         static_cast<const float*>(sum.workspace), runs, sum.accumulate, sum.out, independent);
}

void CudaBackend::hla(const Context& context, const MatrixIn& x, const Projection& p, Side side,
                      const Key& sketch_key, const MatrixOut& out) const {
  if (p.k == 0 || x.cols == 0) return;
  const DeviceGuard guard(context.device().index, "hla");
  const Grid grid = strip_grid(p, x.cols, 0);
  launch("hla", context, hla_kernel, grid.blocks, grid.threads, grid.shared, x,
         device_projection(p, side, sketch_key), grid.run, out);
}

std::int64_t CudaBackend::columns_amax_words(const Context& context, std::int64_t cols,
                                             const Projection& p, const OperandQuant& quant) const {
  if (p.k_padded > 0 && resident_one_pass(context, cols, p, quant)) return 0;
  return quant.per_tensor ? small_slots : quant.per_k ? p.k_padded : cols;
}

bool CudaBackend::quantize_columns(const Context& context, const MatrixIn& x, const Projection& p,
                                   Side side, const Key& sketch_key, const OperandQuant& quant,
                                   const Operand& out, const ColumnSum* sum) const {
  const char* const stage = "backward_linear";
  const DeviceGuard guard(context.device().index, stage);
  if (x.cols > 0 && out.k_padded > 0 && resident_can(p, quant)) {
    resident_quantize_columns(context, x, p, side, sketch_key, quant, out, sum);
    return sum != nullptr;
  }
  if (x.cols == 0) return false;
  const int step = quant.per_tensor ? 0 : 1;
  if (out.k_padded == 0) {  // no tokens: no codes, and scales of 0
    finish_scales(context, out.amax, step, out.scale, out.scales, quant.bits);
    return false;
  }
  const Grid grid = strip_grid(p, x.cols, group);
  ColumnArgs args{x,
                  device_projection(p, side, sketch_key),
                  out.codes,
                  out.amax,
                  out.k_padded,
                  grid.run,
                  quant.bits,
                  quant.per_tensor,
                  quant.per_k,
                  device_key(context.key(), quant.purpose),
                  Pass::amax};
  with_rounding(quant.rounding, [&](auto r) {
    launch(stage, context, strip_kernel<Rounding::nearest>, grid.blocks, grid.threads, grid.shared,
           args);
    args.pass = Pass::codes;
    launch(stage, context, strip_kernel<decltype(r)::value>, grid.blocks, grid.threads, grid.shared,
           args);
  });
  finish_scales(context, out.amax, step, out.scale, out.scales, quant.bits);
  return false;
}

// A partial sum for every 128 tokens, or those of quantize_gradient.
std::size_t CudaBackend::column_sum_workspace(const Context& context, std::int64_t rows,
                                              std::int64_t cols) const {
  const std::int64_t runs = std::max(ceil_div(rows, 16 * sum_run), gradient_sums(context, rows));
  return static_cast<std::size_t>(runs * cols) * sizeof(float);
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
  finish_sums(context, runs, sum, false);
}

void CudaBackend::fill_zero(const Context& context, const MatrixOut& out) const {
  const DeviceGuard guard(context.device().index, "backward_linear");
  launch("backward_linear", context, fill_zero_kernel, ceil_div(out.rows * out.cols, 256), 256, 0,
         out);
}

}  // namespace hot::detail
