// Stage: FWHT. Every plan reads the input once and writes the output once, 4 to 8 bytes an element
// in all, so the bound is the device copy. The order of the butterflies, distance 1, 2, 4, ..., is
// the same in all three, and the CPU's: equal bits.
//
// fwht_vectors, n <= 1024, contiguous and aligned: no shared memory. A thread holds vectors of V
//   elements (16 bytes of output). Index bits, lowest first: log2 V inside a vector (registers), T
//   lanes (shuffles; T = 8 lanes read a full 128-byte line), C vectors T * V apart (registers).
//   T grows past 8 only where C would pass 8. A thread takes 4 / C blocks: 64 bytes in flight.
// fwht_exchange, n = 2048 and 4096, contiguous and aligned: one thread block of n / 32 threads for
//   each transform, 32 elements a thread. Index bits 0-1, 2-6, 7-11 take turns in registers, with
//   an exchange through n floats of shared memory between; groups of 4 floats are swizzled so that
//   every access is free of bank conflicts.
// fwht_tile, everything else (any stride and alignment, n to 32768): a tile of P neighbouring
//   fibres x n in shared memory (at most 67 KB: it fits every GPU), read in whichever order the
//   memory lies, five index bits at a time in registers. n = 32768 is two halves of 16384, the
//   first waiting in registers.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cuda/backend.h"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/vec_io.cuh"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

// ---- where things lie ---------------------------------------------------------------------------

// A dimension of equal things, such as the blocks along the axis.
struct Dim {
  std::int64_t size, stride_x, stride_out;
};

constexpr int max_loop_dims = max_dims;  // the blocks along the axis, and up to three other axes

// The blocks to transform: nested dimensions, the nearest neighbours first.
struct Blocks {
  int dims;
  Dim dim[max_loop_dims];
  std::int64_t count;

  // Offsets of block i.
  __device__ void offsets(std::int64_t i, std::int64_t& x, std::int64_t& out) const {
    x = 0;
    out = 0;
    if (count <= 0xffffffff) {
      walk(static_cast<unsigned>(i), x, out);
    } else {
      walk(static_cast<unsigned long long>(i), x, out);
    }
  }

 private:
  template <class Index>
  __device__ void walk(Index i, std::int64_t& x, std::int64_t& out) const {
#pragma unroll
    for (int d = 0; d < max_loop_dims; ++d) {
      if (d >= dims) break;
      Index at = i;
      if (d + 1 < dims) {
        const auto size = static_cast<Index>(dim[d].size);
        i /= size;
        at -= i * size;
      }
      x += static_cast<std::int64_t>(at) * dim[d].stride_x;
      out += static_cast<std::int64_t>(at) * dim[d].stride_out;
    }
  }
};

struct Job {
  const void* x;
  void* out;
  DType x_dtype, out_dtype;
  std::int64_t axis_stride_x, axis_stride_out;
  Blocks blocks;
};

Blocks find_blocks(const FwhtArgs& args) {
  Blocks blocks{};
  const auto distance = [](const Dim& d) { return std::abs(d.stride_x) + std::abs(d.stride_out); };
  blocks.count = 1;
  const auto add = [&](std::int64_t size, std::int64_t stride_x, std::int64_t stride_out) {
    blocks.count *= size;
    if (size == 1) return;
    const Dim dim{size, stride_x, stride_out};
    int at = blocks.dims++;
    for (; at > 0 && distance(blocks.dim[at - 1]) > distance(dim); --at) {
      blocks.dim[at] = blocks.dim[at - 1];
    }
    blocks.dim[at] = dim;
  };
  add(args.axis_length / args.block, args.block * args.axis_stride_x,
      args.block * args.axis_stride_out);
  for (int d = 0; d < args.outer_dims; ++d) {
    add(args.outer_shape[d], args.outer_stride_x[d], args.outer_stride_out[d]);
  }
  // Dimensions that continue each other are one.
  int last = 0;
  for (int d = 1; d < blocks.dims; ++d) {
    Dim& low = blocks.dim[last];
    const Dim& high = blocks.dim[d];
    if (high.stride_x == low.size * low.stride_x && high.stride_out == low.size * low.stride_out) {
      low.size *= high.size;
    } else {
      blocks.dim[++last] = high;
    }
  }
  blocks.dims = std::min(blocks.dims, last + 1);
  return blocks;
}

// Whether every block starts where vectors of `elements` can be read and written.
bool aligned(const Job& job, int elements) {
  const auto fits = [&](std::uintptr_t bytes, DType dtype) {
    return bytes % std::min<std::size_t>(16, elements * dtype_size(dtype)) == 0;
  };
  bool ok = fits(reinterpret_cast<std::uintptr_t>(job.x), job.x_dtype) &&
            fits(reinterpret_cast<std::uintptr_t>(job.out), job.out_dtype);
  for (int d = 0; d < job.blocks.dims; ++d) {
    const Dim& dim = job.blocks.dim[d];
    ok = ok && fits(std::abs(dim.stride_x) * dtype_size(job.x_dtype), job.x_dtype) &&
         fits(std::abs(dim.stride_out) * dtype_size(job.out_dtype), job.out_dtype);
  }
  return ok;
}

// ---- fwht_vectors -------------------------------------------------------------------------------

constexpr int vector_threads = 256;

template <int LogN, int LogV>
struct VectorPlan {
  static constexpr int n = 1 << LogN, v = 1 << LogV;
  static constexpr int log_vectors = LogN > LogV ? LogN - LogV : 0;
  static constexpr int log_lanes =
      log_vectors > 6 ? log_vectors - 3 : (log_vectors < 3 ? log_vectors : 3);
  static constexpr int lanes = 1 << log_lanes;
  static constexpr int chunks = 1 << (log_vectors - log_lanes);
  static constexpr int slots = chunks < 4 ? 4 / chunks : 1;
  static constexpr int groups = vector_threads / lanes;  // that a thread block holds
  static constexpr int per_cta = groups * slots;
  static_assert(log_lanes <= 5);
};

// A block of `job` is one transform, or one vector where that holds several.
template <int LogN, int LogV>
__global__ void __launch_bounds__(vector_threads, 2) fwht_vectors(const Job job) {
  begin_kernel();
  using P = VectorPlan<LogN, LogV>;
  const unsigned lane = threadIdx.x % P::lanes;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * P::per_cta + threadIdx.x / P::lanes;

  std::int64_t at_x[P::slots], at_out[P::slots];
  bool inside[P::slots];
#pragma unroll
  for (int s = 0; s < P::slots; ++s) {
    const std::int64_t block = first + s * P::groups;
    inside[s] = block < job.blocks.count;
    job.blocks.offsets(inside[s] ? block : 0, at_x[s], at_out[s]);
    at_x[s] += lane * P::v;
    at_out[s] += lane * P::v;
  }

  float v[P::slots][P::chunks * P::v];
  with_dtype(job.x_dtype, [&](auto type) {
    using T = decltype(type);
    unsigned word[P::slots][P::chunks][P::v * T::size / 4] = {};
#pragma unroll
    for (int s = 0; s < P::slots; ++s) {
#pragma unroll
      for (int c = 0; c < P::chunks; ++c) {
        const std::int64_t at = at_x[s] + c * P::lanes * P::v;
        if (inside[s]) load_words(static_cast<const char*>(job.x) + at * T::size, word[s][c]);
      }
    }
#pragma unroll
    for (int s = 0; s < P::slots; ++s) {
#pragma unroll
      for (int c = 0; c < P::chunks; ++c) T::unpack(word[s][c], v[s] + c * P::v);
    }
  });

#pragma unroll
  for (int s = 0; s < P::slots; ++s) {
    butterfly<1, (P::n < P::v ? P::n : P::v)>(v[s]);
    butterfly_lanes<P::lanes>(v[s], lane);
    butterfly<P::v, P::v * P::chunks>(v[s]);
  }

  with_dtype(job.out_dtype, [&](auto type) {
    using T = decltype(type);
#pragma unroll
    for (int s = 0; s < P::slots; ++s) {
#pragma unroll
      for (int c = 0; c < P::chunks; ++c) {
        unsigned word[P::v * T::size / 4];
        T::pack(v[s] + c * P::v, word);
        const std::int64_t at = at_out[s] + c * P::lanes * P::v;
        if (inside[s]) store_words(word, static_cast<char*>(job.out) + at * T::size);
      }
    }
  });
}

constexpr int vector_log_limit = 10;

template <int LogV, int LogN = 0>
void launch_vectors(const Context& context, int log_n, const Job& job) {
  if constexpr (LogN <= vector_log_limit) {
    if (log_n != LogN) return launch_vectors<LogV, LogN + 1>(context, log_n, job);
    launch("fwht", context, fwht_vectors<LogN, LogV>,
           ceil_div(job.blocks.count, VectorPlan<LogN, LogV>::per_cta), vector_threads, 0, job);
  }
}

// ---- fwht_exchange ------------------------------------------------------------------------------

// Groups of 4 floats in shared memory, renamed: neither rows nor columns of 32 groups collide.
__device__ constexpr int swizzle(int group) { return group ^ (group >> 5 & 7); }

template <int LogN>
__global__ void __launch_bounds__((1 << LogN) / 32) fwht_exchange(const Job job) {
  begin_kernel();
  constexpr int n = 1 << LogN, threads = n / 32, vectors = 8;
  __shared__ __align__(16) float tile[n];
  const int thread = static_cast<int>(threadIdx.x);
  std::int64_t at_x, at_out;
  job.blocks.offsets(blockIdx.x, at_x, at_out);

  {  // bits 0-1
    float v[vectors * 4];
    with_dtype(job.x_dtype, [&](auto type) {
      using T = decltype(type);
      unsigned word[vectors][T::size];
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        const std::int64_t at = at_x + (k * threads + thread) * 4;
        load_words(static_cast<const char*>(job.x) + at * T::size, word[k]);
      }
#pragma unroll
      for (int k = 0; k < vectors; ++k) T::unpack(word[k], v + k * 4);
    });
    butterfly<1, 4>(v);
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      *reinterpret_cast<float4*>(tile + 4 * swizzle(k * threads + thread)) =
          make_float4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
    }
  }
  __syncthreads();
  {  // bits 2-6
    float v[32];
    const int low = thread & 3, high = thread >> 2;
#pragma unroll
    for (int r = 0; r < 32; ++r) v[r] = tile[4 * swizzle(high * 32 + r) + low];
    butterfly<1, 32>(v);
#pragma unroll
    for (int r = 0; r < 32; ++r) tile[4 * swizzle(high * 32 + r) + low] = v[r];
  }
  __syncthreads();
  // bits 7 and up; the lanes are neighbours, so these go straight to memory
  constexpr int rows = n / 128, columns = 32 / rows;
#pragma unroll
  for (int c = 0; c < columns; ++c) {
    float v[rows];
    const int column = c * threads + thread;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      v[r] = tile[4 * swizzle(r * 32 + column / 4) + column % 4];
    }
    butterfly<1, rows>(v);
    with_dtype(job.out_dtype, [&](auto type) {
#pragma unroll
      for (int r = 0; r < rows; ++r) type.store(job.out, at_out + r * 128 + column, v[r]);
    });
  }
}

// ---- fwht_tile ----------------------------------------------------------------------------------

constexpr int tile_log_limit = 14;   // elements of a tile: 16384
constexpr int fibre_log_limit = 10;  // fibres of a tile
constexpr int tile_threads = 512;

struct TileShape {
  int log_n, log_fibres;
  bool along_axis_x, along_axis_out;  // which way memory is walked: along the axis, across fibres
};

__device__ inline int padded(int word) { return word + (word >> 5); }

// Bits [bit, bit + Log) of the word index.
template <int Log>
__device__ void tile_butterfly(float* tile, int words, int bit) {
  for (int unit = static_cast<int>(threadIdx.x); unit < words >> Log;
       unit += static_cast<int>(blockDim.x)) {
    const int base = (unit >> bit << (bit + Log)) | (unit & ((1 << bit) - 1));
    float v[1 << Log];
#pragma unroll
    for (int r = 0; r < 1 << Log; ++r) v[r] = tile[padded(base | r << bit)];
    butterfly<1, (1 << Log)>(v);
#pragma unroll
    for (int r = 0; r < 1 << Log; ++r) tile[padded(base | r << bit)] = v[r];
  }
}

// `Log` index bits at a time.
template <int Log>
__device__ void tile_fwht(float* tile, int log_n, int log_fibres) {
  const int words = 1 << (log_n + log_fibres);
  for (int done = 0; done < log_n; done += Log) {
    const int bit = log_fibres + done;
    switch (min(Log, log_n - done)) {
      case 1:
        tile_butterfly<1>(tile, words, bit);
        break;
      case 2:
        tile_butterfly<2>(tile, words, bit);
        break;
      case 3:
        tile_butterfly<3>(tile, words, bit);
        break;
      case 4:
        tile_butterfly<4>(tile, words, bit);
        break;
      default:
        tile_butterfly<Log>(tile, words, bit);
        break;
    }
    __syncthreads();
  }
}

// Halves: two tiles of one fibre each, the halves of a transform twice as long.
template <bool Halves>
__global__ void __launch_bounds__(tile_threads) fwht_tile(const Job job, const TileShape shape) {
  begin_kernel();
  extern __shared__ __align__(16) unsigned char shared[];
  const int n = 1 << shape.log_n, fibres = 1 << shape.log_fibres, words = n * fibres;
  auto* offset_x = reinterpret_cast<std::int64_t*>(shared);
  std::int64_t* offset_out = offset_x + fibres;
  auto* tile = reinterpret_cast<float*>(offset_out + fibres);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);

  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * fibres;
  const int present = static_cast<int>(min(job.blocks.count - first, std::int64_t{fibres}));
  for (int p = thread; p < present; p += threads) {
    job.blocks.offsets(first + p, offset_x[p], offset_out[p]);
  }
  __syncthreads();

  const auto index = [&](bool along_axis, int at, int& i, int& p) {
    i = along_axis ? at & (n - 1) : at >> shape.log_fibres;
    p = along_axis ? at >> shape.log_n : at & (fibres - 1);
  };
  const auto read = [&](std::int64_t start) {
    with_dtype(job.x_dtype, [&](auto type) {
#pragma unroll 8
      for (int at = thread; at < words; at += threads) {
        int i, p;
        index(shape.along_axis_x, at, i, p);
        tile[padded(i << shape.log_fibres | p)] =
            p < present ? type.load(job.x, offset_x[p] + (start + i) * job.axis_stride_x) : 0.0F;
      }
    });
    __syncthreads();
    tile_fwht<Halves ? 4 : 5>(tile, shape.log_n, shape.log_fibres);  // halves hold 32 registers
  };

  read(0);
  if constexpr (!Halves) {
    with_dtype(job.out_dtype, [&](auto type) {
#pragma unroll 8
      for (int at = thread; at < words; at += threads) {
        int i, p;
        index(shape.along_axis_out, at, i, p);
        if (p < present) {
          type.store(job.out, offset_out[p] + i * job.axis_stride_out,
                     tile[padded(i << shape.log_fibres | p)]);
        }
      }
    });
  } else {
    constexpr int half = 1 << tile_log_limit, each = half / tile_threads;
    float low[each];
#pragma unroll
    for (int k = 0; k < each; ++k) low[k] = tile[padded(k * tile_threads + thread)];
    __syncthreads();
    read(half);
    with_dtype(job.out_dtype, [&](auto type) {
#pragma unroll
      for (int k = 0; k < each; ++k) {
        const int i = k * tile_threads + thread;
        const float a = low[k], b = tile[padded(i)];
        type.store(job.out, offset_out[0] + i * job.axis_stride_out, a + b);
        type.store(job.out, offset_out[0] + (i + half) * job.axis_stride_out, a - b);
      }
    });
  }
}

int log2_ceil(std::int64_t value) {
  int log = 0;
  while ((std::int64_t{1} << log) < value) ++log;
  return log;
}

void launch_tile(const Context& context, int log_n, const Job& job) {
  const bool halves = log_n > tile_log_limit;
  TileShape shape{};
  shape.log_n = std::min(log_n, tile_log_limit);
  // 8192 elements, 33 KB: several thread blocks share a multiprocessor.
  shape.log_fibres = std::min(
      {std::max(0, tile_log_limit - 1 - log_n), fibre_log_limit, log2_ceil(job.blocks.count)});
  const int fibres = 1 << shape.log_fibres, words = fibres << shape.log_n;
  const bool alone = job.blocks.dims == 0;
  const Dim& near = job.blocks.dim[0];
  shape.along_axis_x = alone || std::abs(job.axis_stride_x) < std::abs(near.stride_x);
  shape.along_axis_out = alone || std::abs(job.axis_stride_out) < std::abs(near.stride_out);

  const std::size_t shared = static_cast<std::size_t>(fibres) * 2 * sizeof(std::int64_t) +
                             static_cast<std::size_t>(words + words / 32) * sizeof(float);
  const int threads = std::clamp(std::max(words / 32, fibres / 4), 32, tile_threads);
  launch("fwht", context, halves ? fwht_tile<true> : fwht_tile<false>,
         ceil_div(job.blocks.count, fibres), threads, shared, job, shape);
}

}  // namespace

// ---- choice -------------------------------------------------------------------------------------

void CudaBackend::fwht(const Context& context, const FwhtArgs& args) const {
  Job job{args.x,           args.out,           args.x_dtype,
          args.out_dtype,   args.axis_stride_x, args.axis_stride_out,
          find_blocks(args)};
  if (job.blocks.count == 0) return;
  const DeviceGuard guard(context.device().index, "fwht");

  const int log_n = log2_ceil(args.block);
  const bool contiguous = args.block == 1 || (args.axis_stride_x == 1 && args.axis_stride_out == 1);
  if (!contiguous) return launch_tile(context, log_n, job);

  if (log_n > vector_log_limit) {
    if (log_n > 12 || !aligned(job, 4)) return launch_tile(context, log_n, job);
    launch("fwht", context, log_n == 11 ? fwht_exchange<11> : fwht_exchange<12>, job.blocks.count,
           args.block / 32, 0, job);
    return;
  }

  const int log_v = args.out_dtype == DType::f32 ? 2 : 3, v = 1 << log_v;
  Job vectors = job;
  if (args.block < v) {
    // Transforms shorter than a vector: neighbours share one, the last few are left to a tile.
    Dim& near = vectors.blocks.dim[0];
    const std::int64_t rest = near.size * args.block % v / args.block;
    if (vectors.blocks.dims == 0 || near.stride_x != args.block || near.stride_out != args.block ||
        (rest != 0 && vectors.blocks.dims > 1)) {
      return launch_tile(context, log_n, job);
    }
    vectors.blocks.count = vectors.blocks.count * args.block / v;
    near = Dim{near.size * args.block / v, v, v};
    if (rest != 0 && aligned(vectors, v)) {
      Job tail = job;
      tail.x = static_cast<const char*>(job.x) +
               near.size * v * static_cast<std::int64_t>(dtype_size(job.x_dtype));
      tail.out = static_cast<char*>(job.out) +
                 near.size * v * static_cast<std::int64_t>(dtype_size(job.out_dtype));
      tail.blocks.count = tail.blocks.dim[0].size = rest;
      launch_tile(context, log_n, tail);
    }
  }
  if (!aligned(vectors, v)) return launch_tile(context, log_n, job);
  if (vectors.blocks.count == 0) return;
  if (log_v == 2) {
    launch_vectors<2>(context, log_n, vectors);
  } else {
    launch_vectors<3>(context, log_n, vectors);
  }
}

}  // namespace hot::detail
