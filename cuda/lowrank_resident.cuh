// Device code of lowrank_resident.cu, whose plan it follows: a thread block's part of quantising
// the columns of P x. A header, because quantize_small.cu runs it beside other work in one launch.
#pragma once

#include <cooperative_groups.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/projection.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/plan.h"
#include "kernels.h"

namespace hot::detail::resident {

// Where the swizzle puts the bytes of a group: 16-bit types are read 32 bytes of a token by a lane
// group, four groups at once; fp32 is read 64 bytes, two groups at once.
template <class Tag>
__device__ int swizzle(int group) {
  return Tag::size == 2 ? (group & 3) << 5 : (group & 1) << 6;
}

struct Args {
  MatrixIn x;
  TokenOrder order;
  std::int64_t body_tokens;
  float sketch_weight;
  DeviceKey sketch, key;
  std::int8_t* codes;
  float* scale;
  std::int64_t scales;
  std::uint32_t* amax;  // between two passes
  std::int64_t k_padded, units, strips;
  int parts;    // thread blocks of a strip
  int cluster;  // of them that tell each other: all, or 0 for none
  int slots;    // of Slots::yes
  int bits;
  bool per_tensor, flat;  // flat: rows aligned, tokens in the order of memory
  Pass pass;
  bool independent;  // of the kernel before
  bool sum_wanted, sum_accumulate;
  MatrixOut sum;
  float* partial_sums;  // [parts, columns], Pass::amax where not clustered
};

// Starts the copies of a warp's unit of a strip, or of its half of the columns.
template <Kind kind, class Tag, int unit_warps>
__device__ void copy_unit(const Args& args, std::int64_t first_token, std::int64_t first_column,
                          char* tokens) {
  constexpr int piece_elements = 16 / Tag::size, pieces = 4 / unit_warps;  // of a token
  constexpr int step = 32 / pieces;  // tokens of a warp at a time
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int quarter = static_cast<int>(threadIdx.x) / 32 % unit_warps * pieces + lane % pieces;
  const std::int64_t col = first_column + quarter * piece_elements;
  const auto live =
      static_cast<int>(max(std::int64_t{0}, min(std::int64_t{piece_elements}, args.x.cols - col)));
  const int real = static_cast<int>(
      max(std::int64_t{0}, min(std::int64_t{unit_tokens}, args.body_tokens - first_token)));
  const int local = lane / pieces;
  const auto place = [&](int i) {
    const int lane_place =
        (local * strip_bytes + quarter * 16) ^ swizzle<Tag>(i * step / group_tokens(kind));
    return tokens + i * step * strip_bytes + lane_place;
  };
  if (args.flat) {
    const char* from = static_cast<const char*>(args.x.data) +
                       ((first_token + local) * args.x.row_stride + col) * Tag::size;
    const std::int64_t pitch = step * args.x.row_stride * Tag::size;
    if (real == unit_tokens && live == piece_elements) {
#pragma unroll
      for (int i = 0; i < unit_tokens / step; ++i, from += pitch) {
        copy_async(shared_address(place(i)), from);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < unit_tokens / step; ++i, from += pitch) {
      const int bytes = local + i * step < real ? live * Tag::size : 0;
      copy_async(shared_address(place(i)), bytes > 0 ? from : args.x.data, bytes);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < unit_tokens / step; ++i) {
    const bool inside = local + i * step < real;
    const std::int64_t token = inside ? args.order.body(first_token + local + i * step) : 0;
#pragma unroll 1
    for (int j = 0; j < piece_elements; ++j) {
      Tag::store(place(i), j,
                 inside && j < live ? Tag::load(args.x.data, token * args.x.row_stride +
                                                                 (col + j) * args.x.col_stride)
                                    : 0.0F);
    }
  }
}

// Two neighbouring columns of a token.
template <class Tag>
__device__ void load_two(const char* from, float& first, float& second) {
  unsigned words[Tag::size / 2];
  if constexpr (Tag::size == 4) {
    load_words(from, words);
  } else {
    words[0] = *reinterpret_cast<const unsigned*>(from);
  }
  float pair[2];
  Tag::unpack(words, pair);
  first = pair[0];
  second = pair[1];
}

// A lane's group in shared memory: token t of it is at `even` or `odd`, by the parity of t, plus
// t * strip_bytes.
struct LaneGroup {
  const char* even;
  const char* odd;
  template <class Tag, int N>
  __device__ void load(int first_token, float (&v)[2][N]) const {
#pragma unroll
    for (int t = 0; t < N; ++t) {
      load_two<Tag>((t % 2 == 0 ? even : odd) + (first_token + t) * strip_bytes, v[0][t], v[1][t]);
    }
  }
  // The fold of a sketch: value i is token t plus token t ^ a, t being i with a 0 put in at the
  // place of a's top bit: the bits of i below it, those of 2i above it.
  template <class Tag>
  __device__ void load_folded(int first_token, int a, float (&v)[2][8]) const {
    const unsigned top = (1U << (31 - __clz(a))) * strip_bytes;
    const unsigned low = top - strip_bytes, high = ~(2 * top - 1);
    const unsigned apart = static_cast<unsigned>(a) * strip_bytes;
    const unsigned from = shared_address(even) + static_cast<unsigned>(first_token * strip_bytes);
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned once = i * strip_bytes, twice = 2 * i * strip_bytes;
      const unsigned token = from ^ (low & once) ^ (high & twice);
      float x[2], y[2];
      load_two<Tag>(static_cast<const char*>(__cvta_shared_to_generic(token)), x[0], x[1]);
      load_two<Tag>(static_cast<const char*>(__cvta_shared_to_generic(token ^ apart)), y[0], y[1]);
      v[0][i] = x[0] + y[0];
      v[1][i] = x[1] + y[1];
    }
  }
  // The k of both columns in place of the tokens that they were made of: a word for a word.
  __device__ char* place(int column, int k) const {
    const int token = column * group_k + k;
    return const_cast<char*>(token % 2 == 0 ? even : odd) + token * strip_bytes;
  }
  __device__ void keep(const float (&v)[2][group_k]) const {
#pragma unroll
    for (int k = 0; k < 2 * group_k; ++k) {
      *reinterpret_cast<unsigned*>(place(k / group_k, k % group_k)) =
          __float_as_uint(v[k / group_k][k % group_k]);
    }
  }
  __device__ void kept(float (&v)[2][group_k]) const {
#pragma unroll
    for (int k = 0; k < 2 * group_k; ++k) {
      v[k / group_k][k % group_k] =
          __uint_as_float(*reinterpret_cast<const unsigned*>(place(k / group_k, k % group_k)));
    }
  }
};

// Whether the 16 k of two columns take as many bytes as the 32 tokens that they are made of.
template <Kind kind, class Tag>
constexpr bool fits_in_place = in_place(kind, Tag::size);

// A group's 16 k of two neighbouring columns.
template <Kind kind, class Tag>
__device__ void project(const LaneGroup& from, const std::uint8_t* draws, float sketch_weight,
                        float (&v)[2][group_k]) {
  if constexpr (kind == Kind::full || kind == Kind::whole) {
    from.load<Tag>(0, v);
    if constexpr (kind == Kind::whole) {
      butterfly<1, 16>(v[0]);
      butterfly<1, 16>(v[1]);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kind == Kind::sketch8) {
        float folded[2][8];
        from.load_folded<Tag>(16 * half, draws[half], folded);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          butterfly<1, 8>(folded[c]);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            v[c][8 * half + i] = i == 0 ? folded[c][i] : folded[c][i] * sketch_weight;
          }
        }
      } else {
        float block[2][16];
        from.load<Tag>(16 * half, block);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          butterfly<1, 16>(block[c]);
#pragma unroll
          for (int i = 0; i < 8; ++i) v[c][8 * half + i] = block[c][kept_row(kind, i)];
        }
      }
    }
  }
}

// What the first pass wants of a group's column: the largest magnitudes and the sum of the tokens.
// The last stage of a butterfly makes a + b and a - b, the larger of which is |a| + |b|, rounded
// alike: the pair is compared before it exists. A weight above 1 keeps the order, so that the
// weighted rows of a sketch are weighted once, at the end: `largest[1]`. `Sum` is what the sums of
// groups are added up in.
template <Kind kind, class Sum = double>
struct Seen {
  float largest[2] = {0.0F, 0.0F};
  Sum sum = 0;

  __device__ void add(float& most, float v) const { most = max_magnitude(most, v); }

  __device__ void group(float (&v)[group_k], bool sum_wanted) {
    float total = 0.0F;
    if constexpr (kind == Kind::full) {
#pragma unroll
      for (int k = 0; k < group_k; ++k) add(largest[0], v[k]);
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

  __device__ void rows(float (&v)[16], bool sum_wanted) {
    butterfly<1, 16>(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) add(largest[0], v[kept_row(kind, i)]);
    if (sum_wanted) sum += static_cast<Sum>(v[0]);
  }

  // Of two blocks of rank 8, weighted already.
  __device__ void projected(const float (&v)[group_k], bool sum_wanted) {
#pragma unroll
    for (int k = 0; k < group_k; ++k) add(largest[0], v[k]);
    if (sum_wanted) sum += static_cast<Sum>(v[0]) + static_cast<Sum>(v[8]);
  }

  // In the order in which row 0 of an FWHT adds them.
  __device__ static float tree_sum(const float (&v)[group_k]) {
    float total[group_k];
#pragma unroll
    for (int t = 0; t < group_k; ++t) total[t] = v[t];
#pragma unroll
    for (int h = 1; h < group_k; h *= 2) {
#pragma unroll
      for (int t = 0; t < group_k; t += 2 * h) total[t] = total[t] + total[t + h];
    }
    return total[0];
  }
};

template <Kind kind, class Tag>
__device__ void look(const LaneGroup& from, const std::uint8_t* draws, bool sum_wanted,
                     Seen<kind> (&seen)[2]) {
  if constexpr (kind == Kind::full || kind == Kind::whole) {
    float v[2][16];
    from.load<Tag>(0, v);
    seen[0].group(v[0], sum_wanted);
    seen[1].group(v[1], sum_wanted);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kind == Kind::sketch8) {
        float v[2][8];
        from.load_folded<Tag>(16 * half, draws[half], v);
        seen[0].folded(v[0], sum_wanted);
        seen[1].folded(v[1], sum_wanted);
      } else {
        float v[2][16];
        from.load<Tag>(16 * half, v);
        seen[0].rows(v[0], sum_wanted);
        seen[1].rows(v[1], sum_wanted);
      }
    }
  }
}

// What the thread blocks of a strip tell each other: largest values and sums of its columns.
struct Exchange {
  double sum[most_strip_columns];
  std::uint32_t amax[most_strip_columns];
};
static_assert(sizeof(Exchange) == exchange_bytes);

// Shared memory: the units, then this. Two of what is told: a thread block may be one strip ahead
// of another.
struct SharedTail {
  Exchange* told;       // [2][cluster]
  Exchange* seen;       // [warps]
  std::uint8_t* draws;  // [warps][unit_blocks]: subspaces of a sketch
  __device__ SharedTail(char* units, int count, int warps, int cluster)
      : told(reinterpret_cast<Exchange*>(units + count * unit_bytes)),
        seen(told + 2 * max(1, cluster)),
        draws(reinterpret_cast<std::uint8_t*>(seen + warps)) {}
};

// Writes `value` of this thread block to the same place of thread block `rank` of the `cluster`
// that tell each other; alone, to its own.
template <class T>
__device__ void tell(T* place, int rank, int cluster, T value) {
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

// The largest of partial maxima, for every lane of a warp.
__device__ inline std::uint32_t warp_slots_max(const std::uint32_t* slots, int count) {
  std::uint32_t most = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) most = max(most, slots[i]);
  return __reduce_max_sync(0xffffffffU, most);
}

// Whether two passes leave partial maxima of a tensor in `slots` words of `amax`, one a thread
// block, and have a strip's parts in a cluster (quantize_small.cu), or raise `amax` by atomics.
enum class Slots { no, yes };

// What thread block `block_index` of `blocks` does. `units` is its dynamic shared memory. Begins
// the kernel itself, after what needs nothing from the one before.
// A `known` pass needs less code and fewer registers.
template <Kind kind, Rounding rounding, class Tag, Slots slots, int unit_warps,
          Pass known = Pass::any>
__device__ __forceinline__ void quantize_strips(const Args& args, unsigned block_index,
                                                unsigned blocks, char* units) {
  const Pass pass = known == Pass::any ? args.pass : known;
  constexpr int columns = strip_bytes / Tag::size, halves = columns / warp_columns;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int warps = static_cast<int>(blockDim.x) / 32, unit_count = warps / unit_warps;
  // A cluster's parts are neighbours. In two passes the strips are, so that whole rows of x are
  // read at a time.
  const bool clustered = slots == Slots::yes || pass == Pass::both;
  // 32 bits: a division of 64 takes as long as a load.
  const unsigned block = pass == Pass::codes && !clustered ? blocks - 1 - block_index : block_index;
  const auto parts = static_cast<unsigned>(args.parts), strips = static_cast<unsigned>(args.strips);
  const unsigned rank_divisor = clustered ? parts : strips;
  const unsigned quotient = block / rank_divisor, rest = block - quotient * rank_divisor;
  const int rank = static_cast<int>(clustered ? rest : quotient);
  const SharedTail shared(units, unit_count, warps, args.cluster);
  const std::int64_t unit = std::int64_t{rank} * unit_count + warp / unit_warps;
  char* const tokens = units + warp / unit_warps * unit_bytes;
  std::uint8_t* const draws = shared.draws + warp * unit_blocks;
  // What the kernel before may write, as it does a counter, is waited for.
  if (kind == Kind::sketch8 && args.sketch.counter != nullptr && !args.independent) {
    wait_for_previous_kernel();
  }
  if (kind == Kind::sketch8 && lane < unit_blocks) {
    const auto token_block = static_cast<std::uint64_t>(unit * unit_blocks + lane);
    const RandomWords words = random_words(args.sketch, offset_of(args.sketch), token_block);
    draws[lane] = static_cast<std::uint8_t>(sketch_draw(words, 0, 16));
  }
  // The second of two launches (Slots) needs of the first only what it reads later: its copies come
  // before the wait. What x is made by has ended: the first one waited for it.
  const bool copies_first = slots == Slots::yes && pass == Pass::codes;
  // Nobody writes to a thread block that may not have started: all of a cluster meet before.
  const bool tells = args.cluster > 1 && pass != Pass::codes;
  if (tells) arrive_cluster();
  if (!copies_first) begin_kernel(args.independent);
  // Two passes, and Slots: all strips at once.
  const unsigned strip_step = slots == Slots::no && pass == Pass::both ? blocks / parts : strips;
  unsigned strip = clustered ? quotient : rest;
  // The last thread blocks of a strip may have more warps than there are units.
  const bool active = unit < args.units;
  if (active) {
    copy_unit<kind, Tag, unit_warps>(args, unit * unit_tokens, std::int64_t{strip} * columns,
                                     tokens);
  }
  commit_copies();
  if (copies_first) begin_kernel(args.independent);
  const DeviceOffset offset = warp_offset<rounding>(args.key);

  static_assert(unit_warps == 1 || unit_warps == halves);
  const int first_half = unit_warps == 1 ? 0 : warp % unit_warps;
  const int last_half = unit_warps == 1 ? halves : first_half + 1;
  const int pair = lane % 8, lane_group = lane / 8;
  // The swizzle of bit 6 exchanges even and odd tokens, that of bit 5 halves of a token.
  const int turned = swizzle<Tag>(lane_group);
  const int parity = turned & strip_bytes;
  const auto group_at = [&](int step, int half) {
    const char* from = tokens +
                       (step * lane_groups + lane_group) * group_tokens(kind) * strip_bytes +
                       (((half * warp_columns + 2 * pair) * Tag::size) ^ (turned - parity));
    return LaneGroup{from + parity, from - parity};
  };
  const std::uint8_t* const lane_draws = draws + 2 * lane_group;
  const std::int64_t groups = args.k_padded / group_k;
  // One read, and a group's results fit where its tokens were: P x is computed once.
  constexpr bool in_place = known == Pass::both && fits_in_place<kind, Tag>;
  // Of the last unit only what holds groups.
  const auto live_steps = static_cast<int>(max(
      std::int64_t{0}, min(std::int64_t{unit_steps(kind)},
                           (groups + lane_groups - 1) / lane_groups - unit * unit_steps(kind))));

  for (int turn = 0; strip < strips; strip += strip_step, ++turn) {
    wait_copies<0>();
    __syncwarp();
    Exchange* const told = shared.told + turn % 2 * args.cluster;
    if (pass != Pass::codes) {
#pragma unroll 1
      for (int half = first_half; half < last_half; ++half) {
        Seen<kind> seen[2];
#pragma unroll 1
        for (int step = 0; step < live_steps; ++step) {
          const LaneGroup group = group_at(step, half);
          if constexpr (in_place) {
            float v[2][group_k];
            project<kind, Tag>(group, lane_draws, args.sketch_weight, v);
            group.keep(v);
            seen[0].projected(v[0], args.sum_wanted);
            seen[1].projected(v[1], args.sum_wanted);
          } else {
            look<kind, Tag>(group, lane_draws, args.sum_wanted, seen);
          }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float largest = seen[c].largest[0];
          if constexpr (kind == Kind::sketch8 && !in_place) {
            largest = max_magnitude(largest, seen[c].largest[1] * args.sketch_weight);
          }
#pragma unroll
          for (int lanes = 8; lanes < 32; lanes *= 2) {
            largest = max_magnitude(largest, __shfl_xor_sync(0xffffffffU, largest, lanes));
            seen[c].sum += __shfl_xor_sync(0xffffffffU, seen[c].sum, lanes);
          }
          if (lane < 8) {
            shared.seen[warp].amax[half * warp_columns + 2 * lane + c] = abs_bits(largest);
            shared.seen[warp].sum[half * warp_columns + 2 * lane + c] = seen[c].sum;
          }
        }
      }
      __syncthreads();
      if (tells && turn == 0) wait_cluster();
      // A thread for a column and a thread block to tell.
      for (int i = thread; i < columns * max(1, args.cluster); i += static_cast<int>(blockDim.x)) {
        const int c = i % columns, to = i / columns;
        std::uint32_t most = 0;
        const int seen_by = unit_warps == 1 ? 0 : c / warp_columns;
        for (int w = seen_by; w < warps; w += unit_warps) most = max(most, shared.seen[w].amax[c]);
        Exchange* const mine = told + (args.cluster == 0 ? 0 : rank);
        tell(&mine->amax[c], to, args.cluster, most);
        if (args.sum_wanted && to == 0) {
          double total = 0.0;
          for (int w = seen_by; w < warps; w += unit_warps) total += shared.seen[w].sum[c];
          tell(&mine->sum[c], to, args.cluster, total);
        }
      }
      if (args.cluster > 1) {
        cluster_barrier();
      } else {
        __syncthreads();
      }
    }

    // A lane for a column of the strip.
    const std::int64_t column = std::int64_t{strip} * columns + lane;
    const bool has_column = lane < columns && column < args.x.cols;
    std::uint32_t most = 0;
    double total = 0.0;
    if (pass == Pass::codes) {
      if (slots == Slots::yes) {
        most = warp_slots_max(args.amax, args.slots);
      } else if (has_column) {
        most = args.amax[args.per_tensor ? 0 : column];
      }
    } else if (lane < columns) {
      for (int r = 0; r < max(1, args.cluster); ++r) most = max(most, told[r].amax[lane]);
      if (args.sum_wanted && warp == 0 && (rank == 0 || args.cluster == 0)) {
        for (int r = 0; r < max(1, args.cluster); ++r) total += told[r].sum[lane];
      }
    }
    if (pass == Pass::amax) {
      if (slots == Slots::yes && warp == 0) {
        const std::uint32_t strip_most = __reduce_max_sync(0xffffffffU, most);
        if (lane == 0) args.amax[block] = strip_most;
      } else if (warp == 0 && has_column) {
        atomic_max(args.amax + (args.per_tensor ? 0 : column), most);
      }
      if (warp == 0 && has_column && args.sum_wanted && !clustered) {
        args.partial_sums[rank * args.x.cols + column] = static_cast<float>(total);
      }
    }
    const auto store_sum = [&] {
      float sum = static_cast<float>(total);
      if (args.sum_accumulate) sum = load_out(args.sum, 0, column) + sum;
      store_element(args.sum, 0, column, sum);
    };
    if (slots == Slots::yes && pass == Pass::amax && args.sum_wanted && warp == 0 && rank == 0 &&
        has_column) {
      store_sum();
    }
    if (pass != Pass::amax) {
      const DeviceScale scale = device_scale(most, args.bits);
      if (warp == 0 && rank == 0 && has_column) {
        if (column < args.scales) args.scale[column] = scale.scale;
        if (pass == Pass::both && args.sum_wanted) store_sum();
      }
#pragma unroll 1
      for (int half = first_half; half < last_half; ++half) {
        const int first = half * warp_columns + 2 * pair;
        const std::int64_t row = std::int64_t{strip} * columns + first;
        float inv[2];
        bool keep[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          inv[c] = __shfl_sync(0xffffffffU, scale.inv, first + c);
          keep[c] = __shfl_sync(0xffffffffU, static_cast<int>(scale.keep), first + c) != 0;
        }
#pragma unroll 1
        for (int step = 0; step < live_steps; ++step) {
          const std::int64_t g = (unit * unit_steps(kind) + step) * lane_groups + lane_group;
          float v[2][group_k];
          if constexpr (in_place) {
            group_at(step, half).kept(v);
          } else {
            project<kind, Tag>(group_at(step, half), lane_draws, args.sketch_weight, v);
          }
          if (g >= groups) continue;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (row + c >= args.x.cols) break;
            uint4 codes = round_group<rounding>(
                [&](int k) { return v[c][k]; }, Same{inv[c]}, args.key, offset,
                static_cast<std::uint64_t>((row + c) * groups + g), args.bits);
            if (!keep[c]) codes = make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4*>(args.codes + (row + c) * args.k_padded + g * group_k) = codes;
          }
        }
      }
    }
    if (slots == Slots::yes) break;  // as is known: less code to fetch
    if (active && strip + strip_step < strips) {
      __syncwarp();
      copy_unit<kind, Tag, unit_warps>(args, unit * unit_tokens,
                                       std::int64_t{strip + strip_step} * columns, tokens);
      commit_copies();
    }
  }
  end_kernel(args.independent);
}

// ---- host (lowrank_resident.cu)

template <class Call>
void with_kind(Kind kind, const Call& call) {
  switch (kind) {
    case Kind::full:
      return call(std::integral_constant<Kind, Kind::full>{});
    case Kind::whole:
      return call(std::integral_constant<Kind, Kind::whole>{});
    case Kind::sketch8:
      return call(std::integral_constant<Kind, Kind::sketch8>{});
    case Kind::lowpass8:
      return call(std::integral_constant<Kind, Kind::lowpass8>{});
    case Kind::sequency8:
      return call(std::integral_constant<Kind, Kind::sequency8>{});
  }
}

// All but how the work is shared out: parts, cluster, slots, pass. `sum`: g_b, null: not wanted.
Args make_args(const Context&, const ColumnsJob&, Kind, const ColumnSum* sum);

}  // namespace hot::detail::resident
