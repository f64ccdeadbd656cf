// Products with mma.sync for INT8 and packed INT4 operands. There is one instance of the kernel per
// tile (gemm_sm80_plan.h lists the tiles and chooses).
//
// tile_kernel: a persistent grid. A CTA processes tiles in the plan's order. The operands of a step
//   of the contraction pass through a ring of stages, filled by cp.async. The ring continues over
//   the end of a tile: the next operands arrive while the results are written. A warp multiplies
//   fragments that ldmatrix reads a step ahead. The 16-byte pieces of rows are swizzled to avoid
//   bank conflicts. cp.async fills the tail of K with zeros. Rows beyond M or N repeat the last
//   row, and their results are not written.
//   The last tiles may be shared. Then each CTA writes its INT32 sums to the workspace, and
//   fixup_kernel adds them up. Sums are exact, so the bits do not depend on the division. If sums
//   of a contraction may exceed INT32, all tiles are shared, in parts that cannot exceed it. The
//   tile `any` is never shared and keeps the high parts of its sums in registers.
// The epilogue converts fragments of four neighbouring lanes to 16 contiguous bytes per lane by
//   shuffles. It needs no shared memory and no barrier, and overlaps the copies.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/gemm_sm80.h"
#include "cuda/gemm_sm80_order.cuh"
#include "cuda/launch.h"
#include "kernels.h"

namespace hot::detail {
namespace {

// Position of a 16-byte piece of a row in a stage. Rows 8 apart have the same swizzle.
template <class T>
__device__ inline unsigned piece_place(int row, int piece) {
  const int swizzle = T::step == 64 ? (row >> 1) & 3 : row & 7;
  return static_cast<unsigned>(row * T::step + ((piece ^ swizzle) << 4));
}

// Copies of a thread from global memory: in each step `unit` bytes of some rows.
template <class T, int unit>
class UnitCopies {
 public:
  __device__ UnitCopies(const MmaWork& work, unsigned ring)
      : segments_(work),
        to_(ring + piece_place<T>(first_row(), place() / 16) + static_cast<unsigned>(place() % 16)),
        stage_(0) {
    open();
  }

  // Calls copy(to, from, bytes, left) for the units of the next step, if any. `bytes` of a unit are
  // copied, the rest is zero; `left` is the rest of the row. Always ends a group of copies.
  template <class Copy>
  __device__ void load(const Copy& copy) {
    if (step_ < segments_.end) {
      const std::int64_t left = segments_.work.gemm.k - std::int64_t{step_} * T::step - place();
      const auto bytes = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{unit}, left)));
      const unsigned to = to_ + static_cast<unsigned>(stage_ * T::stage_bytes);
      const GemmArgs& gemm = segments_.work.gemm;
      const auto lda = static_cast<Stride>(gemm.lda), ldb = static_cast<Stride>(gemm.ldb);
#pragma unroll
      for (int row = 0; row < T::m; row += rows_at_once) {
        copy(to + static_cast<unsigned>(row * T::step),
             a_ + std::uint64_t{min(static_cast<unsigned>(row), a_rows_)} * lda, bytes, left);
      }
#pragma unroll
      for (int row = 0; row < T::n; row += rows_at_once) {
        copy(to + static_cast<unsigned>((T::m + row) * T::step),
             b_ + std::uint64_t{min(static_cast<unsigned>(row), b_rows_)} * ldb, bytes, left);
      }
      a_ += T::step;
      b_ += T::step;
      if (++stage_ == T::stages) stage_ = 0;
      if (++step_ == segments_.end) open();
    }
    commit_copies();
  }

 private:
  using Stride = std::conditional_t<T::any, std::uint64_t, unsigned>;  // see mma_product
  static constexpr int row_units = T::step / unit, rows_at_once = T::threads / row_units;
  static_assert(T::m % rows_at_once == 0 && T::n % rows_at_once == 0 && rows_at_once % 8 == 0);

  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / row_units; }
  __device__ static int place() { return static_cast<int>(threadIdx.x) % row_units * unit; }

  __device__ void open() {
    if (!segments_.next()) {
      step_ = segments_.end = 0;
      return;
    }
    const MmaWork& work = segments_.work;
    int row = 0, column = 0;
    tile_place(work, segments_.tile, row, column);
    step_ = segments_.first;
    const std::int64_t k = std::int64_t{step_} * T::step + place();
    const std::int64_t m = min(std::int64_t{row} * T::m + first_row(), work.gemm.m - 1);
    const std::int64_t n = min(std::int64_t{column} * T::n + first_row(), work.gemm.n - 1);
    a_ = work.gemm.a + m * work.gemm.lda + k;
    b_ = work.gemm.b + n * work.gemm.ldb + k;
    a_rows_ = static_cast<unsigned>(min(work.gemm.m - 1 - m, std::int64_t{T::m}));
    b_rows_ = static_cast<unsigned>(min(work.gemm.n - 1 - n, std::int64_t{T::n}));
  }

  Segments segments_;
  unsigned to_;
  int stage_, step_ = 0;
  const std::int8_t *a_ = nullptr, *b_ = nullptr;  // addresses in the first row
  unsigned a_rows_ = 0, b_rows_ = 0;               // number of rows that follow
};

// Copies for rows aligned to 16 bytes.
template <class T>
struct PieceCopies : UnitCopies<T, 16> {
  using UnitCopies<T, 16>::UnitCopies;
  __device__ void load() {
    UnitCopies<T, 16>::load([](unsigned to, const std::int8_t* from, int bytes, std::int64_t) {
      copy_async(to, from, bytes);
    });
  }
};

// Unaligned word of a row with `left` remaining bytes, padded with zeros. Reads nothing beyond the
// row's end, which may be out of bounds.
__device__ inline unsigned word_at(const std::int8_t* from, std::int64_t left) {
  if (left < 8) {
    unsigned value = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) value |= static_cast<unsigned>(static_cast<unsigned char>(from[i])) << (8 * i);
    }
    return value;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  const auto* aligned = reinterpret_cast<const unsigned*>(address & ~std::uintptr_t{3});
  const auto shift = static_cast<unsigned>(address & 3);
  const unsigned high = shift != 0 ? aligned[1] : 0;
  return __funnelshift_r(aligned[0], high, 8 * shift);
}

// Copies for rows of any alignment. Rows not aligned to 16 bytes are copied in 32-bit words: by
// cp.async if the words are aligned, otherwise through registers and a funnel shift.
template <class T>
class AnyCopies {
 public:
  __device__ AnyCopies(const MmaWork& work, unsigned ring)
      : alignment_(work.alignment), pieces_(work, ring), words_(work, ring) {}
  __device__ void load() {
    if (alignment_ == 16) {
      pieces_.load();
    } else if (alignment_ == 4) {
      words_.load([](unsigned to, const std::int8_t* from, int bytes, std::int64_t) {
        copy_word_async(to, from, bytes);
      });
    } else {
      words_.load([](unsigned to, const std::int8_t* from, int, std::int64_t left) {
        store_shared(to, word_at(from, left));
      });
    }
  }

 private:
  int alignment_;
  PieceCopies<T> pieces_;
  UnitCopies<T, 4> words_;
};

// Loads a warp's fragments of an operand for 32 bytes of K, number `k32` of a stage.
template <class T, int count>
__device__ void load_fragments(unsigned (&r)[count][4], unsigned stage, unsigned place, int k32) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    load_matrices(r[i], stage + (place ^ static_cast<unsigned>(k32 * 32)) +
                            static_cast<unsigned>(i * 16 * T::step));
  }
}

// Starts the copies of a tile's scales, first rows, then columns.
template <class T>
__device__ void load_scales(const MmaWork& work, int tile, float* scales) {
  const GemmArgs& gemm = work.gemm;
  if (gemm.a_scale == nullptr) return;
  int row = 0, column = 0;
  tile_place(work, tile, row, column);
#pragma unroll
  for (int first = 0; first < T::m + T::n; first += T::threads) {
    const int t = first + static_cast<int>(threadIdx.x);
    if (t < T::m) {
      const std::int64_t m = min(std::int64_t{row} * T::m + t, gemm.m - 1);
      copy_word_async(shared_address(scales + t), gemm.a_scale + m * gemm.a_scale_step);
    } else if (t < T::m + T::n) {
      const std::int64_t n = min(std::int64_t{column} * T::n + t - T::m, gemm.n - 1);
      copy_word_async(shared_address(scales + t), gemm.b_scale + n * gemm.b_scale_step);
    }
  }
}

// Exchanges words of two lanes, `lanes` apart: b and d of the lower lane with a and c of the upper.
__device__ inline void exchange(unsigned& a, unsigned& b, unsigned& c, unsigned& d, int lanes) {
  const bool upper = threadIdx.x & static_cast<unsigned>(lanes);
  const unsigned x = __shfl_xor_sync(~0U, upper ? a : b, lanes);
  const unsigned y = __shfl_xor_sync(~0U, upper ? c : d, lanes);
  if (upper) {
    a = x, c = y;
  } else {
    b = x, d = y;
  }
}

// Type tag for unscaled sums, next to the three float types.
struct I32 {
  static constexpr int size = 4;
};

// Use of the scaled sums.
enum class Output { store, accumulate, bias };
template <Output output>
using OutputConstant = std::integral_constant<Output, output>;

// Calls f(tag of the output's type, use of the sums). One kernel serves all combinations.
template <class F>
__device__ void with_output(const GemmArgs& gemm, const F& f) {
  if (gemm.a_scale == nullptr) {
    f(I32{}, OutputConstant<Output::store>{});
  } else if (gemm.accumulate) {
    with_dtype(gemm.out.dtype, [&](auto tag) { f(tag, OutputConstant<Output::accumulate>{}); });
  } else if (gemm.bias != nullptr) {
    with_dtype(gemm.out.dtype, [&](auto tag) { f(tag, OutputConstant<Output::bias>{}); });
  } else {
    with_dtype(gemm.out.dtype, [&](auto tag) { f(tag, OutputConstant<Output::store>{}); });
  }
}

// Writes 16 rows x 32 columns of the output. In each of 4 fragments of 8 columns, a lane holds two
// neighbouring columns of rows lane / 4 and lane / 4 + 8. With `vectors` four lanes exchange words
// and each writes 16 contiguous bytes. There are no branches, so loads need not wait for stores.
template <class Tag, bool vectors, Output output>
class Writer {
 public:
  static constexpr int columns = 32;

  __device__ Writer(const GemmArgs& gemm, std::int64_t m0, std::int64_t n0)
      : gemm_(gemm), m0_(m0), n0_(n0), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // `sum(j, e)` is element e of fragment j, in mma.sync's order, in 32 or 64 bits. `a_scale` holds
  // the scales of the two rows, `b_scale(j)` those of the two columns of fragment j.
  template <class Sum, class BScale>
  __device__ void write(const Sum& sum, const float (&a_scale)[2], const BScale& b_scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t m = m0_ + half * 8 + lane_ / 4;
      unsigned word[words];
      if constexpr (bare) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          word[i] = static_cast<unsigned>(static_cast<int>(sum(i / 2, half * 2 + i % 2)));
        }
      } else {
        float v[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 b = b_scale(j);
          v[2 * j] = dequantised(static_cast<float>(sum(j, half * 2)), a_scale[half], b.x,
                                 gemm_.inv_divisor);
          v[2 * j + 1] = dequantised(static_cast<float>(sum(j, half * 2 + 1)), a_scale[half], b.y,
                                     gemm_.inv_divisor);
        }
        if constexpr (output == Output::bias) {
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] += gemm_.bias[min(own_column(i), gemm_.n - 1)];
        }
        if constexpr (output == Output::accumulate) {
          float before[8] = {};
          load_row(m, before);
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = before[i] + v[i];
        }
        Tag::pack(v, word);
      }
      store_row(m, word);
    }
  }

 private:
  static constexpr bool bare = std::is_same_v<Tag, I32>;
  static constexpr int words = 8 * Tag::size / 4, pieces = words / 4;

  // Column of the lane's element i of a row.
  __device__ std::int64_t own_column(int i) const {
    return n0_ + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
  }
  // First column of the lane's 16-byte piece after the exchange.
  __device__ std::int64_t piece_column(int piece) const {
    return n0_ + (Tag::size == 2 ? lane_ % 4 * 8 : piece * 16 + lane_ % 2 * 8 + lane_ % 4 / 2 * 4);
  }
  // Transposes words of neighbouring lanes, its own inverse. 16-bit types: lane q of four gets word
  // q of all. Others: the even lane of two gets both first pairs, the odd lane both second pairs.
  __device__ static void transpose(unsigned (&w)[4]) {
    if constexpr (Tag::size == 2) {
      exchange(w[0], w[1], w[2], w[3], 1);
      exchange(w[0], w[2], w[1], w[3], 2);
    } else {
      exchange(w[0], w[2], w[1], w[3], 1);
    }
  }

  __device__ void load_row(std::int64_t m, float (&v)[8]) const {
    if constexpr (vectors) {
      unsigned word[words] = {};
#pragma unroll
      for (int p = 0; p < pieces; ++p) {
        unsigned piece[4] = {};
        const std::int64_t n = piece_column(p);
        if (m < gemm_.m && n < gemm_.n) load_words(place(m, n), piece);
        transpose(piece);
#pragma unroll
        for (int w = 0; w < 4; ++w) word[p * 4 + w] = piece[w];
      }
      Tag::unpack(word, v);
    } else if (m < gemm_.m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const std::int64_t n = own_column(i);
        if (n < gemm_.n) {
          v[i] = Tag::load(gemm_.out.data, m * gemm_.out.row_stride + n * gemm_.out.col_stride);
        }
      }
    }
  }

  __device__ void store_row(std::int64_t m, const unsigned (&word)[words]) const {
    if constexpr (vectors) {
#pragma unroll
      for (int p = 0; p < pieces; ++p) {
        unsigned piece[4] = {word[p * 4], word[p * 4 + 1], word[p * 4 + 2], word[p * 4 + 3]};
        transpose(piece);
        const std::int64_t n = piece_column(p);
        if (m < gemm_.m && n < gemm_.n) store_words(piece, place(m, n));
      }
    } else if (m < gemm_.m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const std::int64_t n = own_column(i);
        if (n >= gemm_.n) continue;
        const std::int64_t at = m * gemm_.out.row_stride + n * gemm_.out.col_stride;
        if constexpr (Tag::size == 2) {
          static_cast<unsigned short*>(gemm_.out.data)[at] =
              static_cast<unsigned short>(word[i / 2] >> (i % 2 * 16));
        } else {
          static_cast<unsigned*>(gemm_.out.data)[at] = word[i];
        }
      }
    }
  }

  // Address of an element in a contiguous row.
  __device__ void* place(std::int64_t m, std::int64_t n) const {
    return static_cast<char*>(gemm_.out.data) + (m * gemm_.out.row_stride + n) * Tag::size;
  }

  const GemmArgs& gemm_;
  std::int64_t m0_, n0_;
  int lane_;
};

// Position of a warp in a tile.
template <class T>
__device__ int warp_row() {
  return static_cast<int>(threadIdx.x) / 32 / T::warps_n * T::warp_m;
}
template <class T>
__device__ int warp_column() {
  return static_cast<int>(threadIdx.x) / 32 % T::warps_n * T::warp_n;
}

template <class Mma, class T>
__device__ void multiply_tiles(const MmaWork& work) {
  constexpr int k32s = T::step / 32, rows = T::warp_m / 16, columns = T::warp_n / 8,
                pairs = columns / 2;
  constexpr bool any = T::any;
  // Steps between carries. The remainder of a sum is below 2^16, and these steps add at most 2^30.
  constexpr int int32_steps = 65536 / T::step;
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned ring = shared_address(shared);
  auto* const scales = reinterpret_cast<float*>(shared + T::stages * T::stage_bytes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned a_place = piece_place<T>(warp_row<T>() + lane % 16, lane / 16);
  const unsigned b_place =
      static_cast<unsigned>(T::m * T::step) +
      piece_place<T>(warp_column<T>() + lane % 8 + lane / 16 * 8, lane / 8 % 2);

  std::conditional_t<any, AnyCopies<T>, PieceCopies<T>> copies(work, ring);
#pragma unroll
  for (int s = 0; s < T::stages - 1; ++s) copies.load();
  int stage = 0;
  unsigned here = ring;
  unsigned a[2][rows][4], b[2][pairs][4];
  wait_copies<T::stages - 2>();
  __syncthreads();

  Segments segments(work);
  while (segments.next()) {
    load_fragments<T>(a[0], here, a_place, 0);
    load_fragments<T>(b[0], here, b_place, 0);
    // Shared tiles store unscaled sums. Their scales are not prefetched, because those copies could
    // arrive after the scales of the next tile.
    const bool alone = segments.end - segments.first == work.steps;
    int sum[rows][columns][4] = {};
    int high[any ? rows : 1][any ? columns : 1][4] = {};  // high parts of long sums, times 2^16
    for (int step = segments.first; step < segments.end; ++step) {
#pragma unroll
      for (int k32 = 0; k32 < k32s; ++k32) {
        if (k32 == k32s - 1) {
          // The next stage has arrived for all threads, and all have read the current one.
          if (++stage == T::stages) stage = 0;
          here = ring + static_cast<unsigned>(stage * T::stage_bytes);
          wait_copies<T::stages - 2>();
          __syncthreads();
          if (alone && step == segments.first) load_scales<T>(work, segments.tile, scales);
        }
        const int now = k32 % 2, other = (k32 + 1) % 2;
        load_fragments<T>(a[other], here, a_place, (k32 + 1) % k32s);
        load_fragments<T>(b[other], here, b_place, (k32 + 1) % k32s);
        if (k32 == 0) copies.load();
#pragma unroll
        for (int i = 0; i < rows; ++i) {
#pragma unroll
          for (int c = 0; c < columns; ++c) {
            const int j = i % 2 == 0 ? c : columns - 1 - c;
            Mma::run(sum[i][j], a[now][i], b[now][j / 2][j % 2 * 2], b[now][j / 2][j % 2 * 2 + 1]);
          }
        }
      }
      if constexpr (any) {
        if (work.split && (step + 1) % int32_steps == 0) {
#pragma unroll
          for (int i = 0; i < rows; ++i) {
#pragma unroll
            for (int j = 0; j < columns; ++j) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                high[i][j][e] += sum[i][j][e] >> 16;
                sum[i][j][e] &= 0xFFFF;
              }
            }
          }
        }
      }
    }

    if (!alone) {
      constexpr int warp_sums = rows * columns * 32;
      int4* const to = work.sums + std::int64_t{segments.place()} * (T::m * T::n / 4) +
                       static_cast<int>(threadIdx.x) / 32 * warp_sums + lane;
#pragma unroll
      for (int i = 0; i < rows; ++i) {
#pragma unroll
        for (int j = 0; j < columns; ++j) {
          to[(i * columns + j) * 32] =
              make_int4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]);
        }
      }
      continue;
    }
    if (segments.end - segments.first < T::stages) {  // otherwise the scales have arrived
      if (segments.end == segments.first) {
        __syncthreads();  // no thread uses the previous scales
        load_scales<T>(work, segments.tile, scales);
      }
      wait_all_copies();
      __syncthreads();
    }
    int row = 0, column = 0;
    tile_place(work, segments.tile, row, column);
    const std::int64_t m0 = std::int64_t{row} * T::m + warp_row<T>();
    const std::int64_t n0 = std::int64_t{column} * T::n + warp_column<T>();
    const float* const a_scale = scales + warp_row<T>() + lane / 4;
    const float* const b_scale = scales + T::m + warp_column<T>() + lane % 4 * 2;
    with_output(work.gemm, [&](auto tag, auto output) {
      using Tag = decltype(tag);
#pragma unroll
      for (int i = 0; i < rows; ++i) {
#pragma unroll
        for (int j0 = 0; j0 < columns; j0 += 4) {
          const Writer<Tag, !any, decltype(output)::value> writer(work.gemm, m0 + i * 16,
                                                                  n0 + j0 * 8);
          const auto result = [&](int j, int e) {
            if constexpr (any && !std::is_same_v<Tag, I32>) {
              return (std::int64_t{high[i][j0 + j][e]} << 16) + sum[i][j0 + j][e];
            } else {
              return sum[i][j0 + j][e];
            }
          };
          writer.write(result, {a_scale[i * 16], a_scale[i * 16 + 8]}, [&](int j) {
            return *reinterpret_cast<const float2*>(b_scale + (j0 + j) * 8);
          });
        }
      }
    });
  }
}

template <class Mma, class T>
__global__ void __launch_bounds__(T::threads, T::blocks)
    tile_kernel(const __grid_constant__ MmaWork work) {
  begin_kernel();
#if defined(__CUDA_ARCH__)
  if constexpr (mma_code(__CUDA_ARCH__ / 10, T::shared_bytes, !std::is_same_v<Mma, MmaInt8>)) {
    multiply_tiles<Mma, T>(work);
  }
#endif
}

// Adds up the sums of shared tiles in 64 bits, as long contractions require. A warp here handles 16
// rows of a warp of tile_kernel.
constexpr int fixup_threads = mma_fixup_threads;
template <class T>
__global__ void __launch_bounds__(fixup_threads)
    fixup_kernel(const __grid_constant__ MmaWork work) {
  begin_kernel();
  constexpr int rows = T::warp_m / 16, columns = T::warp_n / 8;
  constexpr int tile_fragments = T::threads / 32 * rows;
  const int fragment = static_cast<int>((blockIdx.x * fixup_threads + threadIdx.x) / 32);
  const int shared = fragment / tile_fragments, at = fragment - shared * tile_fragments;
  if (shared >= work.shared) return;
  const int first = sharer_of_unit(work, shared * work.steps);
  const int last = sharer_of_unit(work, (shared + 1) * work.steps - 1);
  if (first == last) return;  // one CTA computed the whole tile
  const int4* from = work.sums + std::int64_t{first + shared} * (T::m * T::n / 4) +
                     at * columns * 32 + static_cast<int>(threadIdx.x) % 32;
  std::int64_t sum[columns][4] = {};
  for (int sharer = first; sharer <= last; ++sharer, from += T::m * T::n / 4) {
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const int4 partial = from[j * 32];
      sum[j][0] += partial.x, sum[j][1] += partial.y, sum[j][2] += partial.z,
          sum[j][3] += partial.w;
    }
  }
  int row = 0, column = 0;
  tile_place(work, work.whole + shared, row, column);
  const int warp = at / rows;
  const std::int64_t m0 = std::int64_t{row} * T::m + warp / T::warps_n * T::warp_m + at % rows * 16;
  const std::int64_t n0 = std::int64_t{column} * T::n + warp % T::warps_n * T::warp_n;
  const GemmArgs& gemm = work.gemm;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  with_output(gemm, [&](auto tag, auto output) {
    using Tag = decltype(tag);
    float a_scale[2] = {};
    if constexpr (!std::is_same_v<Tag, I32>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t m = min(m0 + half * 8 + lane / 4, gemm.m - 1);
        a_scale[half] = gemm.a_scale[m * gemm.a_scale_step];
      }
    }
#pragma unroll
    for (int j0 = 0; j0 < columns; j0 += 4) {
      const Writer<Tag, true, decltype(output)::value> writer(gemm, m0, n0 + j0 * 8);
      writer.write([&](int j, int e) { return sum[j0 + j][e]; }, a_scale,
                   [&](int j) {
                     const std::int64_t n = n0 + (j0 + j) * 8 + lane % 4 * 2;
                     return make_float2(gemm.b_scale[min(n, gemm.n - 1) * gemm.b_scale_step],
                                        gemm.b_scale[min(n + 1, gemm.n - 1) * gemm.b_scale_step]);
                   });
    }
  });
}

// ---- host --------------------------------------------------------------------------------------

template <class T>
MmaWork mma_work(const GemmArgs& args, std::int64_t k, const MmaPlan& plan, void* workspace) {
  MmaWork work{};
  work.gemm = args;
  work.gemm.k = k;
  work.tiles_m = static_cast<int>(ceil_div(args.m, T::m));
  work.tiles_n = static_cast<int>(ceil_div(args.n, T::n));
  work.band = plan.band;
  work.steps = static_cast<int>(ceil_div(k, T::step));
  work.whole = plan.whole;
  work.shared = plan.shared;
  work.sharers = plan.sharers;
  const auto bits =
      reinterpret_cast<std::uintptr_t>(args.a) | static_cast<std::uintptr_t>(args.lda) |
      reinterpret_cast<std::uintptr_t>(args.b) | static_cast<std::uintptr_t>(args.ldb);
  work.alignment = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
  work.split = args.k > int32_safe_k && k == args.k;
  work.sums = static_cast<int4*>(workspace);
  return work;
}

}  // namespace

template <class T>
void mma_run(const Context& context, const GemmArgs& args, MmaCodes codes, const MmaPlan& plan,
             MmaPart part, void* workspace) {
  const bool int8 = codes == MmaCodes::int8;
  const MmaWork work = mma_work<T>(args, int8 ? args.k : ceil_div(args.k, 2), plan, workspace);
  const LaunchShape shape{plan.blocks, T::threads, T::shared_bytes};
  if (part == MmaPart::fixup) {
    if constexpr (!T::any) {
      launch("gemm", context, fixup_kernel<T>, {mma_fixup_blocks(plan), fixup_threads}, work);
    }
  } else if (int8) {
    launch("gemm", context, tile_kernel<MmaInt8, T>, shape, work);
  } else if constexpr (T::int4) {
    launch("gemm", context, tile_kernel<MmaInt4, T>, shape, work);
  }
}

}  // namespace hot::detail
