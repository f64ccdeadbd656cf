// Device code of quantize_columns.cu, whose opening comment explains it: the work of a warp on a
// token tile, and the reductions of warps and CTAs. It is a header, because quantize_grouped.cu and
// quantize_rows_column_amax.cu also use it.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/rounding.cuh"
#include "kernels.h"
#include "plan/plan.h"

namespace hot::detail::columns {

// Address bits that the swizzle flips, by the number of the k16. In 16-bit types 8 lanes read 32
// bytes of a token, and four k16 are read at once. In fp32 it is 64 bytes and two k16.
template <class Tag>
__device__ int swizzle(int number) {
  return Tag::size == 2 ? (number & 3) << 5 : (number & 1) << 6;
}

inline constexpr int drawn_fold = -1;

struct Args {
  MatrixIn x;
  TokenOrder order;
  std::int64_t body_tokens;
  // `projected`: fold of every block, `drawn_fold` if each block draws its own, 0 for lowpass.
  int fold;
  float sketch_weight;
  DeviceKey sketch, key;
  Codes out;  // with the largest values between two passes
  std::int64_t token_tiles, column_tiles;
  int ctas;     // per column tile
  int cluster;  // CTAs that reduce to one scale: all, or 0 for none
  int bits;
  bool per_tensor, contiguous;  // contiguous: aligned rows, tokens in memory order
  bool independent;             // see begin_kernel
  bool sum_wanted, sum_accumulate;
  MatrixOut sum;
  float* partial_sums;  // [ctas, columns], written by column_amax_kernel
};

// Starts a warp's copies of a token tile, or of half its columns.
template <ColumnTransform transform, class Tag, int tile_warps>
__device__ void load_tile(const Args& args, std::int64_t first_token, std::int64_t first_column,
                          char* tile) {
  constexpr int vec16_elements = 16 / Tag::size, vecs = 4 / tile_warps;  // vectors per token
  constexpr int step = 32 / vecs;  // tokens that a warp copies at a time
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int vec16 = static_cast<int>(threadIdx.x) / 32 % tile_warps * vecs + lane % vecs;
  const std::int64_t col = first_column + vec16 * vec16_elements;
  const auto live =
      static_cast<int>(max(std::int64_t{0}, min(std::int64_t{vec16_elements}, args.x.cols - col)));
  const int real = static_cast<int>(
      max(std::int64_t{0}, min(std::int64_t{tile_tokens}, args.body_tokens - first_token)));
  const int local = lane / vecs;
  const auto place = [&](int i) {
    const int lane_place =
        (local * tile_row_bytes + vec16 * 16) ^ swizzle<Tag>(i * step / k16_tokens(transform));
    return tile + i * step * tile_row_bytes + lane_place;
  };
  if (args.contiguous) {
    const char* from = static_cast<const char*>(args.x.data) +
                       ((first_token + local) * args.x.row_stride + col) * Tag::size;
    const std::int64_t pitch = step * args.x.row_stride * Tag::size;
    if (real == tile_tokens && live == vec16_elements) {
#pragma unroll
      for (int i = 0; i < tile_tokens / step; ++i, from += pitch) {
        copy_async(shared_address(place(i)), from);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < tile_tokens / step; ++i, from += pitch) {
      const int bytes = local + i * step < real ? live * Tag::size : 0;
      copy_async(shared_address(place(i)), bytes > 0 ? from : args.x.data, bytes);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < tile_tokens / step; ++i) {
    const bool inside = local + i * step < real;
    const std::int64_t token = inside ? args.order.body(first_token + local + i * step) : 0;
#pragma unroll 1
    for (int j = 0; j < vec16_elements; ++j) {
      Tag::store(place(i), j,
                 inside && j < live ? Tag::load(args.x.data, token * args.x.row_stride +
                                                                 (col + j) * args.x.col_stride)
                                    : 0.0F);
    }
  }
}

// Loads two neighbouring columns of a token.
template <class Tag>
__device__ void load_two(const char* from, float& first, float& second) {
  unsigned words[Tag::size / 2];
  load_words(from, words);
  float pair[2];
  Tag::unpack(words, pair);
  first = pair[0];
  second = pair[1];
}

// Tokens of a lane's k16 of two columns in shared memory. Token t is at t * tile_row_bytes after
// `even` or `odd`, depending on the parity of t.
struct LaneK16 {
  const char* even;
  const char* odd;
  template <class Tag, int N>
  __device__ void load(int first_token, float (&v)[2][N]) const {
#pragma unroll
    for (int t = 0; t < N; ++t) {
      load_two<Tag>((t % 2 == 0 ? even : odd) + (first_token + t) * tile_row_bytes, v[0][t],
                    v[1][t]);
    }
  }
  // Loads a folded block. Value i is token t plus token t ^ a. The index t is i with a 0 inserted
  // at the position of a's top bit. It has the bits of i below that position, those of 2i above.
  template <class Tag>
  __device__ void load_folded(int first_token, int a, float (&v)[2][8]) const {
    const unsigned top = (1U << (31 - __clz(a))) * tile_row_bytes;
    const unsigned low = top - tile_row_bytes, high = ~(2 * top - 1);
    const unsigned apart = static_cast<unsigned>(a) * tile_row_bytes;
    const unsigned from =
        shared_address(even) + static_cast<unsigned>(first_token * tile_row_bytes);
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned once = i * tile_row_bytes, twice = 2 * i * tile_row_bytes;
      const unsigned token = from ^ (low & once) ^ (high & twice);
      float x[2], y[2];
      load_two<Tag>(static_cast<const char*>(__cvta_shared_to_generic(token)), x[0], x[1]);
      load_two<Tag>(static_cast<const char*>(__cvta_shared_to_generic(token ^ apart)), y[0], y[1]);
      v[0][i] = x[0] + y[0];
      v[1][i] = x[1] + y[1];
    }
  }
  // Address of a k of a column. The k of both columns replace their tokens, word for word.
  __device__ char* place(int column, int k) const {
    const int token = column * k16 + k;
    return const_cast<char*>(token % 2 == 0 ? even : odd) + token * tile_row_bytes;
  }
  __device__ void store(const float (&v)[2][k16]) const {
#pragma unroll
    for (int k = 0; k < 2 * k16; ++k) {
      *reinterpret_cast<unsigned*>(place(k / k16, k % k16)) = __float_as_uint(v[k / k16][k % k16]);
    }
  }
  __device__ void load_stored(float (&v)[2][k16]) const {
#pragma unroll
    for (int k = 0; k < 2 * k16; ++k) {
      v[k / k16][k % k16] =
          __uint_as_float(*reinterpret_cast<const unsigned*>(place(k / k16, k % k16)));
    }
  }
};

// Multiplies the tokens of two columns by their factors in `notes`.
__device__ inline void multiply_factors(const std::uint8_t* notes, float (&v)[2][k16]) {
#pragma unroll
  for (int t = 0; t < k16; t += 8) {
    unsigned words[4];
    load_words(notes + 2 * t, words);
    float factor[8];
    BF16::unpack(words, factor);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[0][t + i] *= factor[i];
      v[1][t + i] *= factor[i];
    }
  }
}

// Computes a k16 of two neighbouring columns. `notes` is WarpTile::lane_notes.
template <ColumnTransform transform, class Tag>
__device__ void project(const Args& args, const LaneK16& from, const std::uint8_t* notes,
                        float (&v)[2][k16]) {
  if constexpr (transform != ColumnTransform::projected) {
    from.load<Tag>(0, v);
    if constexpr (transform == ColumnTransform::hadamard) {
      butterfly<1, 16>(v[0]);
      butterfly<1, 16>(v[1]);
    } else if constexpr (transform == ColumnTransform::factored) {
      multiply_factors(notes, v);
    }
  } else if (args.fold != 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float folded[2][8];
      from.load_folded<Tag>(16 * half, notes[half], folded);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        butterfly<1, 8>(folded[c]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[c][8 * half + i] = i == 0 ? folded[c][i] : folded[c][i] * args.sketch_weight;
        }
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float block[2][16];
      from.load<Tag>(16 * half, block);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        butterfly<1, 16>(block[c]);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[c][8 * half + i] = block[c][lowpass_row(i)];
      }
    }
  }
}

// Largest magnitudes and sum of the tokens of a column. The last stage of a butterfly computes a +
// b and a - b. The larger magnitude is |a| + |b|, with the same rounding, so that stage is skipped.
// A weight above 1 keeps the order, so the rows of a sketch are weighted once, at the end
// (`largest[1]`). Sums of k16 are added up in `Sum`.
template <ColumnTransform transform, class Sum = double>
struct Partial {
  float largest[2] = {0.0F, 0.0F};
  Sum sum = 0;

  __device__ void add(float& amax, float v) const { amax = max_magnitude(amax, v); }

  __device__ void tokens(float (&v)[k16], bool sum_wanted) {
    float total = 0.0F;
    if constexpr (transform != ColumnTransform::hadamard) {
#pragma unroll
      for (int k = 0; k < k16; ++k) add(largest[0], v[k]);
      if (sum_wanted) total = tree_sum(v);
    } else {
      butterfly<1, 8>(v);
#pragma unroll
      for (int k = 0; k < 8; ++k) add(largest[0], fabsf(v[k]) + fabsf(v[k + 8]));
      total = v[0] + v[8];
    }
    if (sum_wanted) sum += static_cast<Sum>(total);
  }

  __device__ void folded(float (&v)[8], bool sum_wanted) {
    butterfly<1, 4>(v);
    const float total = v[0] + v[4];
    add(largest[0], total);
    add(largest[1], v[0] - v[4]);
#pragma unroll
    for (int k = 1; k < 4; ++k) add(largest[1], fabsf(v[k]) + fabsf(v[k + 4]));
    if (sum_wanted) sum += static_cast<Sum>(total);
  }

  __device__ void lowpass(float (&v)[16], bool sum_wanted) {
    butterfly<1, 16>(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) add(largest[0], v[lowpass_row(i)]);
    if (sum_wanted) sum += static_cast<Sum>(v[0]);
  }

  // Adds two blocks of rank 8 that are already weighted.
  __device__ void projected(const float (&v)[k16], bool sum_wanted) {
#pragma unroll
    for (int k = 0; k < k16; ++k) add(largest[0], v[k]);
    if (sum_wanted) sum += static_cast<Sum>(v[0]) + static_cast<Sum>(v[8]);
  }
};

template <ColumnTransform transform, class Tag>
__device__ void accumulate(const Args& args, const LaneK16& from, const std::uint8_t* notes,
                           Partial<transform> (&partial)[2]) {
  const bool sum_wanted = args.sum_wanted;
  if constexpr (transform != ColumnTransform::projected) {
    float v[2][16];
    from.load<Tag>(0, v);
    if constexpr (transform == ColumnTransform::factored) {
      for (int c = 0; c < 2 && sum_wanted; ++c) {
        partial[c].sum += static_cast<double>(tree_sum(v[c]));
      }
      multiply_factors(notes, v);
    }
    const bool sums_left = sum_wanted && transform != ColumnTransform::factored;
    partial[0].tokens(v[0], sums_left);
    partial[1].tokens(v[1], sums_left);
  } else if (args.fold != 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[2][8];
      from.load_folded<Tag>(16 * half, notes[half], v);
      partial[0].folded(v[0], sum_wanted);
      partial[1].folded(v[1], sum_wanted);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[2][16];
      from.load<Tag>(16 * half, v);
      partial[0].lowpass(v[0], sum_wanted);
      partial[1].lowpass(v[1], sum_wanted);
    }
  }
}

// Largest values and sums of the columns of a column tile, per warp or per CTA.
struct Partials {
  double sum[max_tile_columns];
  std::uint32_t amax[max_tile_columns];
};
static_assert(sizeof(Partials) == partials_bytes);

// Shared memory behind the token tiles.
struct SharedMemory {
  Partials* cluster;    // of each CTA of the cluster
  Partials* warp;       // [warps]
  std::uint8_t* notes;  // [warps][tile_notes], folds of blocks or factors of tokens
  __device__ SharedMemory(char* tiles, int tile_count, int warps, int cluster_size)
      : cluster(reinterpret_cast<Partials*>(tiles + tile_count * tile_bytes)),
        warp(cluster + max(1, cluster_size)),
        notes(reinterpret_cast<std::uint8_t*>(warp + warps)) {}
};

// Writes to the corresponding address in CTA `rank`, or without a cluster in this CTA.
template <class T>
__device__ void store_to_cta(T* place, int rank, int cluster, T value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (cluster > 1) place = cooperative_groups::this_cluster().map_shared_rank(place, rank);
#endif
  *place = value;
}

__device__ inline void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

// Work of a CTA: its column tile, and its rank among the CTAs that share it.
struct Place {
  int rank;
  unsigned column_tile;
};

// Place if the CTAs of a column tile are neighbours, as in a cluster. Divides in 32 bits, because a
// 64-bit division takes as long as a load.
__device__ inline Place place_in_cluster(const Args& args, unsigned block) {
  const auto ctas = static_cast<unsigned>(args.ctas);
  const unsigned tile = block / ctas;
  return {static_cast<int>(block - tile * ctas), tile};
}

// Place if column tiles are neighbours, so that whole rows of x are read at the same time.
__device__ inline Place place_in_row(const Args& args, unsigned block) {
  const auto tiles = static_cast<unsigned>(args.column_tiles);
  const unsigned rank = block / tiles;
  return {static_cast<int>(rank), block - rank * tiles};
}

// Largest value and sum of a lane's column.
struct ColumnTotal {
  std::uint32_t amax = 0;
  double sum = 0.0;
};

// Token tile of a warp. If `tile_warps` is 2, two warps share it, with half of its columns each.
template <ColumnTransform transform, class Tag, int tile_warps>
class WarpTile {
 public:
  static constexpr int columns = tile_row_bytes / Tag::size;

  __device__ __forceinline__ WarpTile(const Args& args, const Place& place, char* memory)
      : args_(args),
        place_(place),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(thread_ / 32),
        lane_(thread_ % 32),
        warps_(static_cast<int>(blockDim.x) / 32),
        shared_(memory, warps_ / tile_warps, warps_, args.cluster),
        number_(place.rank * (warps_ / tile_warps) + warp_ / tile_warps),
        tile_(memory + warp_ / tile_warps * tile_bytes),
        notes_(shared_.notes + warp_ * tile_notes(transform)),
        k16_count_(args.out.k_padded / k16) {
    // The last token tile has only the steps that contain k.
    steps_ = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{tile_steps(transform)},
                                                       (k16_count_ + warp_k16s - 1) / warp_k16s -
                                                           number_ * tile_steps(transform))));
  }

  // Writes the fold of each block. Drawn folds wait for the previous kernel if the key has a
  // counter, which that kernel may write.
  __device__ __forceinline__ void draw_folds() const {
    if constexpr (transform == ColumnTransform::projected) {
      const bool drawn = args_.fold == drawn_fold;
      if (drawn && args_.sketch.counter != nullptr && !args_.independent) {
        wait_for_previous_kernel();
      }
      if (lane_ >= tile_blocks) return;
      const auto token_block = static_cast<std::uint64_t>(number_ * tile_blocks + lane_);
      const int fold =
          drawn
              ? sketch_draw(random_words(args_.sketch, offset_of(args_.sketch), token_block), 0, 16)
              : args_.fold;
      notes_[lane_] = static_cast<std::uint8_t>(fold);
    }
  }

  // Reads the tokens' factors, after the wait for the previous kernel, which may write exponents.
  __device__ __forceinline__ void load_factors() const {
    if constexpr (transform == ColumnTransform::factored) {
      auto* const factors = reinterpret_cast<std::uint16_t*>(notes_);
#pragma unroll
      for (int i = lane_; i < tile_tokens; i += 32) {
        const std::int64_t token = std::int64_t{number_} * tile_tokens + i;
        factors[i] =
            static_cast<std::uint16_t>(token < args_.body_tokens ? row_power(args_.x, token) : 0U);
      }
    }
  }

  // Starts the copies. The last CTA of a column tile may have idle warps, which have no token tile.
  __device__ __forceinline__ void load() const {
    if (number_ < args_.token_tiles) {
      load_tile<transform, Tag, tile_warps>(args_, std::int64_t{number_} * tile_tokens,
                                            std::int64_t{place_.column_tile} * columns, tile_);
    }
    commit_copies();
  }

  __device__ void wait_loaded() const {
    wait_copies<0>();
    __syncwarp();
  }

  // Computes the largest values and sums of the token tile for reduce(). `in_place` replaces the
  // tokens by P x, for write_codes().
  template <bool in_place>
  __device__ __forceinline__ void accumulate_tile() const {
#pragma unroll 1
    for (int half = first_half(); half < last_half(); ++half) {
      Partial<transform> partial[2];
#pragma unroll 1
      for (int step = 0; step < steps_; ++step) {
        const LaneK16 from = lane_k16(step, half);
        if constexpr (in_place) {
          float v[2][k16];
          project<transform, Tag>(args_, from, lane_notes(step), v);
          from.store(v);
          partial[0].projected(v[0], args_.sum_wanted);
          partial[1].projected(v[1], args_.sum_wanted);
        } else {
          accumulate<transform, Tag>(args_, from, lane_notes(step), partial);
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = partial[c].largest[0];
        if constexpr (transform == ColumnTransform::projected && !in_place) {
          largest = max_magnitude(largest, partial[c].largest[1] * args_.sketch_weight);
        }
#pragma unroll
        for (int lanes = 8; lanes < 32; lanes *= 2) {
          largest = max_magnitude(largest, __shfl_xor_sync(0xffffffffU, largest, lanes));
          partial[c].sum += __shfl_xor_sync(0xffffffffU, partial[c].sum, lanes);
        }
        if (lane_ < 8) {
          const int column = half * warp_columns + 2 * lane_ + c;
          shared_.warp[warp_].amax[column] = abs_bits(largest);
          shared_.warp[warp_].sum[column] = partial[c].sum;
        }
      }
    }
    __syncthreads();
  }

  // Reduces the warps' partials, and gathers those of all CTAs in each: `cluster` of them, below 2:
  // this one alone. Sums go to CTA 0.
  __device__ __forceinline__ Partials* reduce(int cluster) const {
    Partials* const gathered = shared_.cluster;
    // A thread for a column and a CTA to write to.
    for (int i = thread_; i < columns * max(1, cluster); i += static_cast<int>(blockDim.x)) {
      const int c = i % columns, to = i / columns;
      std::uint32_t amax = 0;
      const int first_warp = tile_warps == 1 ? 0 : c / warp_columns;
      for (int w = first_warp; w < warps_; w += tile_warps) {
        amax = max(amax, shared_.warp[w].amax[c]);
      }
      Partials* const mine = gathered + (cluster == 0 ? 0 : place_.rank);
      store_to_cta(&mine->amax[c], to, cluster, amax);
      if (args_.sum_wanted && to == 0) {
        double sum = 0.0;
        for (int w = first_warp; w < warps_; w += tile_warps) sum += shared_.warp[w].sum[c];
        store_to_cta(&mine->sum[c], to, cluster, sum);
      }
    }
    if (cluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
    return gathered;
  }

  // Total of this lane's column. The sum is valid in warp 0 of CTA 0 (without a cluster: of each).
  __device__ __forceinline__ ColumnTotal total(const Partials* gathered, int cluster) const {
    ColumnTotal total;
    if (lane_ >= columns) return total;
    for (int r = 0; r < max(1, cluster); ++r) total.amax = max(total.amax, gathered[r].amax[lane_]);
    if (args_.sum_wanted && warp_ == 0 && (place_.rank == 0 || cluster == 0)) {
      for (int r = 0; r < max(1, cluster); ++r) total.sum += gathered[r].sum[lane_];
    }
    return total;
  }

  // Column of this lane in the column tile.
  __device__ std::int64_t column() const {
    return std::int64_t{place_.column_tile} * columns + lane_;
  }
  __device__ bool has_column() const { return lane_ < columns && column() < args_.x.cols; }
  // Whether this lane, among all CTAs, writes the scale and sum of its column.
  __device__ bool writes_column() const { return warp_ == 0 && place_.rank == 0 && has_column(); }

  __device__ __forceinline__ void write_scale(const DeviceScale& scale) const {
    if (column() < args_.out.scales) args_.out.scale[column()] = scale.scale;
  }

  __device__ __forceinline__ void write_sum(double total) const {
    float sum = static_cast<float>(total);
    if (args_.sum_accumulate) sum = load_element(args_.sum.contents(), 0, column()) + sum;
    store_element(args_.sum, 0, column(), sum);
  }

  // Writes the codes. `scale` is that of this lane's column.
  template <bool in_place>
  __device__ __forceinline__ void write_codes(const DeviceScale& scale,
                                              const DeviceOffset& offset) const {
#pragma unroll 1
    for (int half = first_half(); half < last_half(); ++half) {
      const int first = half * warp_columns + 2 * pair();
      const std::int64_t row = std::int64_t{place_.column_tile} * columns + first;
      float inv[2];
      bool keep[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        inv[c] = __shfl_sync(0xffffffffU, scale.inv, first + c);
        keep[c] = __shfl_sync(0xffffffffU, static_cast<int>(scale.keep), first + c) != 0;
      }
#pragma unroll 1
      for (int step = 0; step < steps_; ++step) {
        const int k = (number_ * tile_steps(transform) + step) * warp_k16s + lane_ / 8;
        float v[2][k16];
        if constexpr (in_place) {
          lane_k16(step, half).load_stored(v);
        } else {
          project<transform, Tag>(args_, lane_k16(step, half), lane_notes(step), v);
        }
        if (k >= k16_count_) continue;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (row + c >= args_.x.cols) break;
          uint4 codes = round_group<rounding_of(transform)>(
              [&](int i) { return v[c][i]; }, UniformScale{inv[c]}, args_.key, offset,
              static_cast<std::uint64_t>((row + c) * k16_count_ + k), args_.bits);
          if (!keep[c]) codes = make_uint4(0, 0, 0, 0);
          *reinterpret_cast<uint4*>(args_.out.codes + (row + c) * args_.out.k_padded + k * k16) =
              codes;
        }
      }
    }
  }

  __device__ int warp() const { return warp_; }
  __device__ int lane() const { return lane_; }

 private:
  static constexpr int halves = columns / warp_columns;
  static_assert(tile_warps == 1 || tile_warps == halves);

  __device__ int first_half() const { return tile_warps == 1 ? 0 : warp_ % tile_warps; }
  __device__ int last_half() const { return tile_warps == 1 ? halves : first_half() + 1; }
  // Column pair of this lane. Lanes 8 i to 8 i + 7 process k16 number i of a step.
  __device__ int pair() const { return lane_ % 8; }
  // Notes on the tokens of a lane's k16: two folds, or a factor per token.
  __device__ const std::uint8_t* lane_notes(int step) const {
    constexpr int bytes = tile_notes(transform) * k16_tokens(transform) / tile_tokens;
    return notes_ + (step * warp_k16s + lane_ / 8) * bytes;
  }

  __device__ __forceinline__ LaneK16 lane_k16(int step, int half) const {
    // Swizzling bit 6 exchanges even and odd tokens, bit 5 the halves of a token.
    const int turned = swizzle<Tag>(lane_ / 8), parity = turned & tile_row_bytes;
    const char* from = tile_ +
                       (step * warp_k16s + lane_ / 8) * k16_tokens(transform) * tile_row_bytes +
                       (((half * warp_columns + 2 * pair()) * Tag::size) ^ (turned - parity));
    return {from + parity, from - parity};
  }

  const Args& args_;
  const Place place_;
  int thread_, warp_, lane_, warps_;
  SharedMemory shared_;
  int number_;  // number of the token tile
  char* tile_;
  std::uint8_t* notes_;
  std::int64_t k16_count_;  // per row of codes
  int steps_;
};

// ---- host (quantize_columns.cu)

// Arguments except the division of the work (ctas, cluster). `sum`: also g_b.
Args make_args(const Context&, const Work&, const Operand&, ColumnTransform, bool sum);

}  // namespace hot::detail::columns
