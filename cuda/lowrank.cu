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
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

using strip::group;
using strip::sum_run;
using strip::sum_threads;

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
        atomic_max(amax + k, abs_bits(value));
      } else {
        best = max(best, abs_bits(value));
      }
    });
    if (!args.per_k) atomic_max(amax + (args.per_tensor ? 0 : col), best);
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

// Blocks of 16 tokens as row 0 of their FWHT adds them; a thread adds up the blocks of its run.
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

void CudaBackend::hla(const Context& context, const MatrixIn& x, const Projection& p, Side side,
                      const Key& sketch_key, const MatrixOut& out) const {
  if (p.k == 0 || x.cols == 0) return;
  const DeviceGuard guard(context.device().index, "hla");
  const plan::StripGrid grid = plan::strip_grid(p, x.cols, 0);
  launch("hla", context, hla_kernel, grid.blocks, grid.threads, grid.shared_bytes, x,
         device_projection(p, side, sketch_key), grid.run, out);
}

void launch_strips(const Context& context, const plan::Step& step, const ColumnsJob& job) {
  const ColumnArgs args{job.x,
                        device_projection(*job.projection, job.side, job.sketch_key),
                        job.out.codes,
                        job.out.amax,
                        job.out.k_padded,
                        step.as<plan::StripStep>().run,
                        job.quant.bits,
                        job.quant.per_tensor,
                        job.quant.per_k,
                        device_key(context.key(), job.quant.purpose),
                        step.kernel == plan::Kernel::strip_amax ? Pass::amax : Pass::codes};
  with_rounding(step.rounding, [&](auto r) {
    launch("backward_linear", context, strip_kernel<decltype(r)::value>, step.shape, args);
  });
}

void launch_partial_sum(const Context& context, const plan::Step& step, const MatrixIn& x,
                        void* sums) {
  host_with_dtype(step.dtype, [&](auto tag) {
    launch("backward_linear", context, partial_sum_kernel<decltype(tag)>, step.shape, x,
           static_cast<float*>(sums));
  });
}

void launch_final_sum(const Context& context, const plan::Step& step, const ColumnSum& sum) {
  launch("backward_linear", context, final_sum_kernel, step.shape,
         static_cast<const float*>(sum.workspace), step.as<plan::SumsStep>().runs, sum.accumulate,
         sum.out, step.independent);
}

void launch_fill_zero(const Context& context, const plan::Step& step, const MatrixOut& out) {
  launch("backward_linear", context, fill_zero_kernel, step.shape, out);
}

}  // namespace hot::detail
