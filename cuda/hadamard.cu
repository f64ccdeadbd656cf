// Stage: FWHT. Every kernel reads the input once and writes the output once, 4 to 8 bytes per
// element in total. The bound is the time of a device copy. All three kernels and the CPU have the
// same order of butterflies (distance 1, 2, 4, ...) and therefore equal bits.
//
// fwht_vectors (n <= 512, contiguous and aligned) needs no shared memory.
//   A thread holds vectors of V elements (16 bytes of output). The lowest log2 V index bits are
//   inside a vector (registers). The next bits are T lanes (shuffles; T = 8 lanes read a full
//   128-byte line). The last bits are C vectors T * V apart (registers). T exceeds 8 only if C
//   would exceed 8. A thread takes 4 / C blocks: 64 bytes in flight.
//
// fwht_exchange (n = 1024 to 32768, contiguous and aligned) exchanges through shared memory.
//   A transform takes n / 64 threads with 64 elements and 96 registers each. An SM runs 640
//   threads: loads of some CTAs overlap arithmetic of others. The raw elements are copied by
//   cp.async, 16 bytes per lane. Index bits 0-5 are in registers (a thread reads 64 neighbours). An
//   exchange through n floats, in the place of the raw elements, precedes bits 6 and up. Above n =
//   4096 these take two steps with another exchange. Groups of 4 floats are swizzled to avoid bank
//   conflicts. Shared memory moves 12 bytes per 16-bit element (20 with the second exchange).
//   Shuffles would move 4 per distance. An SM holds only 2 transforms of n = 16384 and 1 of n =
//   32768. There the 16-bit elements of the next transform are copied during the arithmetic.
//
// fwht_tile handles everything else (any stride and alignment, n to 32768).
//   A tile of P neighbouring fibres x n lies in shared memory (at most 67 KB, which fits every
//   GPU). The tile is read in memory order. Registers transform five index bits at a time. A
//   transform of 32768 takes two halves of 16384, with the first half in registers.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cuda/backend.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/vec_io.cuh"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

// ---- layouts ------------------------------------------------------------------------------------

// Dimension of equally spaced items, such as the blocks along the axis.
struct Dim {
  std::int64_t size, stride_x, stride_out;
};

constexpr int max_loop_dims = max_dims;  // blocks along the axis, and up to three other axes

// Blocks to transform, in nested dimensions with the smallest distance first.
struct Blocks {
  int dims;
  Dim dim[max_loop_dims];
  std::int64_t count;

  // Computes the offsets of block i.
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

struct Job : FwhtArgs {
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
  // Merges dimensions that continue each other.
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

// Whether every block is aligned for vectors of `elements` elements.
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
  static constexpr int groups = vector_threads / lanes;  // groups of lanes per CTA
  static constexpr int per_cta = groups * slots;
  static_assert(log_lanes <= 5);
};

// A block of `job` is one transform, or one vector if a vector contains several transforms.
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

constexpr int vector_log_limit = 9;

template <int LogV>
void launch_vectors(const Context& context, int log_n, const Job& job) {
  with_constant<0, vector_log_limit>(log_n, [&](auto log) {
    constexpr int LogN = decltype(log)::value;
    launch("fwht", context, fwht_vectors<LogN, LogV>,
           {ceil_div(job.blocks.count, VectorPlan<LogN, LogV>::per_cta), vector_threads}, job);
  });
}

// ---- fwht_exchange ------------------------------------------------------------------------------

constexpr int exchange_log_limit = 15;
constexpr int each = 64;  // elements per thread

template <int LogN>
struct ExchangePlan {
  static constexpr int n = 1 << LogN;
  static constexpr int threads = n < 64 * each ? 64 : n / each;
  static constexpr int words = threads * each;  // floats of the tile
  static constexpr int transforms = words / n;
  // CTAs per SM: 5 warps per scheduler, which leaves each thread 96 registers.
  static constexpr int blocks_per_sm = threads < 640 ? 640 / threads : 1;
  // Index bits of the second and third step.
  static constexpr int log_second = LogN <= 12 ? LogN - 6 : (LogN - 5) / 2;
  static constexpr int log_third = LogN - 6 - log_second;
};

// Swizzle. A group is 4 floats or 16 bytes of raw elements. Group g of the 64 elements of thread
// `owner` has position g ^ own_swap(owner). Neighbouring threads then access different banks.
__device__ constexpr int own_swap(int owner) { return owner & 7; }

// Copies raw elements of `size` bytes to shared memory, for the transforms from number `first` on.
// A transform is copied by the n / 64 threads that process it first. Beyond the last transform the
// copy repeats the last one, whose results are not stored.
template <int LogN, int size>
__device__ void copy_raw(const Job& job, std::int64_t first, const unsigned char* raw) {
  using P = ExchangePlan<LogN>;
  constexpr int team = P::n / each, v = 16 / size;
  const int thread = static_cast<int>(threadIdx.x), transform = thread / team;
  std::int64_t at_x, at_out;
  job.blocks.offsets(min(first + transform, job.blocks.count - 1), at_x, at_out);
  const char* from = static_cast<const char*>(job.x) + at_x * size;
  const unsigned to = shared_address(raw);
#pragma unroll
  for (int k = 0; k < each / v; ++k) {
    const int vector = k * team + thread % team, group = transform * (P::n / v) + vector;
    copy_async(to + static_cast<unsigned>(16 * (group ^ own_swap(group * v / each))),
               from + 16 * vector);
  }
  commit_copies();
}

// Step for index bits [Bit, Bit + Log). A thread holds 2^Log rows, 2^Bit apart, of groups of
// `width` neighbouring columns. It then calls store(word, v), where v[r * width] is row r of column
// `word` and the next columns follow.
template <int Bit, int Log>
struct ExchangeStep {
  static_assert(Bit == 6 ? Log >= 3 : Bit >= 9,
                "the swizzle takes bits 6 to 8 from one of the two");
  static constexpr int rows = 1 << Log, width = each / rows < 4 ? each / rows : 4;
  static constexpr int slots = each / (rows * width), units = (1 << Bit) / width;

  __device__ static int place(int word, int row) {
    return (word ^ 4 * own_swap(Bit == 6 ? row : word >> 6)) + (row << Bit);
  }

  template <class Store>
  __device__ static void run(const float* tile, int threads, const Store& store) {
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      const int unit = s * threads + static_cast<int>(threadIdx.x);
      const int word = (unit / units << (Bit + Log)) | unit % units * width;
      float v[rows * width];
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        unsigned words[width];
        load_words(tile + place(word, r), words);
        F32::unpack(words, v + r * width);
      }
      butterfly<width, rows * width>(v);
      store(word, v);
    }
  }

  // Runs the step in place.
  __device__ static void run(float* tile, int threads) {
    run(tile, threads, [&](int word, const float* v) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        unsigned words[width];
        F32::pack(v + r * width, words);
        store_words(words, tile + place(word, r));
      }
    });
  }

  // Runs the step and writes the output of the transforms from number `first` on.
  template <int LogN>
  __device__ static void finish(const float* tile, int threads, const Job& job,
                                std::int64_t first) {
    run(tile, threads, [&](int word, const float* v) {
      const std::int64_t transform = first + (word >> LogN);
      if (transform >= job.blocks.count) return;
      std::int64_t at_x, at_out;
      job.blocks.offsets(transform, at_x, at_out);
      at_out += word & ((1 << LogN) - 1);
      with_dtype(job.out_dtype, [&](auto type) {
        using T = decltype(type);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const std::int64_t at = at_out + (r << Bit);
          if constexpr (width == 1) {
            T::store(job.out, at, v[r]);
          } else {
            unsigned words[width * T::size / 4];
            T::pack(v + r * width, words);
            store_words(words, static_cast<char*>(job.out) + at * T::size);
          }
        }
      });
    });
  }
};

// Prefetch (16-bit elements only): raw elements have separate memory. A CTA takes every
// gridDim.x-th transform and copies the next one during the arithmetic.
template <int LogN, bool Prefetch>
__global__ void __launch_bounds__(ExchangePlan<LogN>::threads, ExchangePlan<LogN>::blocks_per_sm)
    fwht_exchange(const Job job) {
  begin_kernel();
  using P = ExchangePlan<LogN>;
  using Second = ExchangeStep<6, P::log_second>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile = reinterpret_cast<float*>(shared);
  const unsigned char* raw = shared + (Prefetch ? P::words * sizeof(float) : 0);
  const int thread = static_cast<int>(threadIdx.x);

  std::int64_t first = std::int64_t{blockIdx.x} * P::transforms;
  if (Prefetch || job.x_dtype != DType::f32) {
    copy_raw<LogN, 2>(job, first, raw);
  } else {
    copy_raw<LogN, 4>(job, first, raw);
  }
  do {
    wait_copies<0>();
    __syncthreads();
    {  // bits 0-5
      float v[each];
      with_dtype(job.x_dtype, [&](auto type) {
        using T = decltype(type);
        constexpr int size = 16 / T::size, groups = each / size;
#pragma unroll
        for (int k = 0; k < groups; ++k) {
          unsigned words[4];
          load_words(raw + 16 * ((thread * groups + own_swap(thread)) ^ k), words);
          T::unpack(words, v + k * size);
        }
      });
      butterfly<1, each>(v);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < each / 4; ++k) {
        *reinterpret_cast<float4*>(tile + ((thread * each + 4 * own_swap(thread)) ^ 4 * k)) =
            make_float4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
      }
    }
    const std::int64_t next = first + std::int64_t{gridDim.x} * P::transforms;
    if (Prefetch && next < job.blocks.count) copy_raw<LogN, 2>(job, next, raw);
    __syncthreads();
    if constexpr (P::log_third == 0) {
      Second::template finish<LogN>(tile, P::threads, job, first);
    } else {
      Second::run(tile, P::threads);
      __syncthreads();
      ExchangeStep<6 + P::log_second, P::log_third>::template finish<LogN>(tile, P::threads, job,
                                                                           first);
    }
    first = next;
  } while (Prefetch && first < job.blocks.count);
}

template <int LogN, bool Prefetch>
void launch_exchange(const Context& context, std::int64_t blocks, std::size_t shared,
                     const Job& job) {
  const auto kernel = fwht_exchange<LogN, Prefetch>;
  // Uses the whole L1 cache as shared memory.
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "fwht", "cudaFuncSetAttribute");
  launch("fwht", context, kernel, {blocks, ExchangePlan<LogN>::threads, shared}, job);
}

// Launches fwht_exchange, or returns false if the device has too little shared memory.
bool try_exchange(const Context& context, int log_n, const Job& job) {
  const LaunchFacts& device = launch_facts(context, "fwht");
  const auto limit = static_cast<std::size_t>(device.shared_bytes);
  return with_constant<vector_log_limit + 1, exchange_log_limit>(log_n, [&](auto log) {
    constexpr int LogN = decltype(log)::value;
    using P = ExchangePlan<LogN>;
    constexpr std::size_t tile = P::words * sizeof(float);
    if (tile > limit) return false;
    const std::int64_t blocks = ceil_div(job.blocks.count, P::transforms);
    if constexpr (P::blocks_per_sm <= 2) {
      const std::size_t both = tile + P::words * dtype_size(job.x_dtype);
      if (dtype_size(job.x_dtype) == 2 && P::blocks_per_sm * both <= limit) {
        const auto resident = std::int64_t{device.sm_count} * P::blocks_per_sm;
        launch_exchange<LogN, true>(context, std::min(blocks, resident), both, job);
        return true;
      }
    }
    launch_exchange<LogN, false>(context, blocks, tile, job);
    return true;
  });
}

// ---- fwht_tile ----------------------------------------------------------------------------------

constexpr int tile_log_limit = 14;   // at most 16384 elements per tile
constexpr int fibre_log_limit = 10;  // at most 1024 fibres per tile
constexpr int tile_threads = 512;

struct TileShape {
  int log_n, log_fibres;
  bool along_axis_x, along_axis_out;  // order of accesses: along the axis, otherwise across fibres
};

__device__ inline int padded(int word) { return word + (word >> 5); }

// Butterflies for bits [bit, bit + Log) of the word index.
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

// Transforms a tile, `Log` index bits at a time.
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

// Halves: two tiles of one fibre each are the halves of a transform twice as long.
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
    tile_fwht<Halves ? 4 : 5>(tile, shape.log_n, shape.log_fibres);  // halves need 32 registers
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

void launch_tile(const Context& context, int log_n, const Job& job) {
  const bool halves = log_n > tile_log_limit;
  TileShape shape{};
  shape.log_n = std::min(log_n, tile_log_limit);
  // Tiles of 8192 elements (33 KB) let several CTAs share an SM.
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
         {ceil_div(job.blocks.count, fibres), threads, shared}, job, shape);
}

}  // namespace

// ---- choice -------------------------------------------------------------------------------------

void CudaBackend::fwht(const Context& context, const FwhtArgs& args) const {
  const Job job{args, find_blocks(args)};
  if (job.blocks.count == 0) return;
  const DeviceGuard guard(context.device().index, "fwht");

  const int log_n = log2_ceil(args.block);
  const bool contiguous = args.block == 1 || (args.axis_stride_x == 1 && args.axis_stride_out == 1);
  if (!contiguous) return launch_tile(context, log_n, job);

  if (log_n > vector_log_limit) {
    if (!aligned(job, 8) || !try_exchange(context, log_n, job)) launch_tile(context, log_n, job);
    return;
  }

  const int log_v = args.out_dtype == DType::f32 ? 2 : 3, v = 1 << log_v;
  Job vectors = job;
  if (args.block < v) {
    // Transforms shorter than a vector: neighbours share a vector, fwht_tile takes the last ones.
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
