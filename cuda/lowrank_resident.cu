// Stage: HLA along the tokens and the K-contiguous operands, blocks of 16 tokens, in one read of x.
//
// resident_kernel. A cluster of thread blocks takes a strip of columns, 64 bytes of every token (32
//   columns in 16-bit types, two sectors), and keeps all of it in shared memory: one read of x, the
//   largest values exchanged through the cluster's shared memory, then the codes from the same
//   bytes. The rows of P x are computed twice and never stored.
//     work     a warp owns a unit of 128 tokens (8 KB), from strip to strip: it waits for its own
//              copies (cp.async), looks at the unit, meets the others at two barriers, writes the
//              unit's codes and starts the copies of the next strip.
//              A lane takes 16 k of two neighbouring columns at a time in registers: 16 tokens as
//              they are (full), a whole block (w for g_x), or two blocks of rank 8: a sketch folds
//              to 8 values first (it reads tokens t and t ^ a: no register is indexed at run time),
//              lowpass and sequency keep 8 fixed rows.
//     banks    bits 5 and 6 of an address are swapped about by the number of the group of 16 k (16
//              tokens, or 32 at rank 8), so that a warp's four groups use all banks; every block
//              starts on 1024 bytes, so that tokens are reached by exclusive or.
//     stores   64 contiguous bytes of each of 16 channels by a warp, straight from registers.
//   16-bit types: 2 bytes read and 1 (rank 8: 0.5) written for an element, the least there is.
//   g_b falls out: row 0 of a block is the sum of its tokens.
//
// Where that cannot be, the same kernel runs twice, the largest values (atomicMax), then the codes,
// in the opposite order, which finds the end of x in the L2: no clusters before sm_90, one scale
// for the whole tensor, or more than 8,192 tokens (clusters that hold more spill registers or fill
// an SM with one thread block, and take longer: docs/performance.md).
#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/projection.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/launch.h"
#include "cuda/lowrank_resident.h"

namespace hot::detail {
namespace {

enum class Kind { full, whole, sketch8, lowpass8, sequency8 };
enum class Pass { both, amax, codes };

constexpr int strip_bytes = 64, unit_tokens = 128, unit_bytes = unit_tokens * strip_bytes;
constexpr int unit_blocks = unit_tokens / 16;
constexpr int group_k = 16, lane_groups = 4, warp_columns = 16;
constexpr int most_strip_columns = strip_bytes / 2;
// 128 registers a thread: 16 warps on an SM.
constexpr int most_warps = 8, sm_warps = 16, most_parts = 8;

// Row i of those that a basis keeps at rank 8, ascending; kind_of compares them with the caller's.
constexpr int kept_row(Kind kind, int i) {
  constexpr int lowpass[8] = {0, 2, 3, 8, 10, 11, 12, 14};
  return kind == Kind::lowpass8 ? lowpass[i] : 2 * i;
}

constexpr int group_tokens(Kind kind) {
  return kind == Kind::full || kind == Kind::whole ? 16 : 32;
}
// Steps of four groups in a unit.
constexpr int unit_steps(Kind kind) { return unit_tokens / (lane_groups * group_tokens(kind)); }

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
  int bits;
  bool per_tensor, flat;  // flat: rows aligned, tokens in the order of memory
  Pass pass;
  bool independent;  // of the kernel before
  bool sum_wanted, sum_accumulate;
  MatrixOut sum;
  float* partial_sums;  // [parts, columns], Pass::amax
};

// Starts the copies of a warp's unit of a strip.
template <Kind kind, class Tag>
__device__ void copy_unit(const Args& args, std::int64_t first_token, std::int64_t first_column,
                          char* tokens) {
  constexpr int piece_elements = 16 / Tag::size, step = 8;  // tokens of a warp at a time
  const int lane = static_cast<int>(threadIdx.x) % 32, quarter = lane % 4;
  const std::int64_t col = first_column + quarter * piece_elements;
  const auto live =
      static_cast<int>(max(std::int64_t{0}, min(std::int64_t{piece_elements}, args.x.cols - col)));
  const int real = static_cast<int>(
      max(std::int64_t{0}, min(std::int64_t{unit_tokens}, args.body_tokens - first_token)));
  const int local = lane / 4;
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
};

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
// weighted rows of a sketch are weighted once, at the end: `largest[1]`.
template <Kind kind>
struct Seen {
  float largest[2] = {0.0F, 0.0F};
  double sum = 0.0;

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
    if (sum_wanted) sum += static_cast<double>(total);
  }

  __device__ void folded(float (&v)[8], bool sum_wanted) {
    butterfly<1, 4>(v);
    const float total = v[0] + v[4];
    add(largest[0], total);
    add(largest[1], v[0] - v[4]);
#pragma unroll
    for (int k = 1; k < 4; ++k) add(largest[1], fabsf(v[k]) + fabsf(v[k + 4]));
    if (sum_wanted) sum += static_cast<double>(total);
  }

  __device__ void rows(float (&v)[16], bool sum_wanted) {
    butterfly<1, 16>(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) add(largest[0], v[kept_row(kind, i)]);
    if (sum_wanted) sum += static_cast<double>(v[0]);
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

// Shared memory: the units, then this. Two of what is told: a thread block may be one strip ahead
// of another.
struct SharedTail {
  Exchange* told;       // [2][cluster]
  Exchange* seen;       // [warps]
  std::uint8_t* draws;  // [warps][unit_blocks]: subspaces of a sketch
  __device__ SharedTail(char* units, int warps, int cluster)
      : told(reinterpret_cast<Exchange*>(units + warps * unit_bytes)),
        seen(told + 2 * max(1, cluster)),
        draws(reinterpret_cast<std::uint8_t*>(seen + warps)) {}
};

std::size_t shared_bytes(int warps, int cluster) {
  return static_cast<std::size_t>(warps) * (unit_bytes + sizeof(Exchange) + unit_blocks) +
         2 * static_cast<std::size_t>(std::max(1, cluster)) * sizeof(Exchange);
}

// Writes `value` of this thread block to the same place of another one of its cluster.
template <class T>
__device__ void tell(T* place, int rank, T value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  *cooperative_groups::this_cluster().map_shared_rank(place, rank) = value;
#else
  *place = value;
#endif
}

__device__ void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

template <Kind kind, Rounding rounding, class Tag>
__global__ void __launch_bounds__(32 * most_warps, sm_warps / most_warps)
    resident_kernel(Args args) {
  constexpr int columns = strip_bytes / Tag::size, halves = columns / warp_columns;
  extern __shared__ __align__(1024) char units[];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  // A cluster's parts are neighbours. In two passes the strips are, so that whole rows of x are
  // read at a time.
  const bool clustered = args.pass == Pass::both;
  const auto block =
      static_cast<std::int64_t>(args.pass == Pass::codes ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int rank = static_cast<int>(clustered ? block % args.parts : block / args.strips);
  const SharedTail shared(units, warps, args.cluster);
  const std::int64_t unit = std::int64_t{rank} * warps + warp;
  char* const tokens = units + warp * unit_bytes;
  std::uint8_t* const draws = shared.draws + warp * unit_blocks;
  if (kind == Kind::sketch8 && lane < unit_blocks) {
    const auto token_block = static_cast<std::uint64_t>(unit * unit_blocks + lane);
    draws[lane] =
        static_cast<std::uint8_t>(sketch_draw(random_words(args.sketch, token_block), 0, 16));
  }
  begin_kernel(args.independent);
  const std::int64_t strip_step = gridDim.x / args.parts;  // two passes: all strips
  std::int64_t strip = clustered ? block / args.parts : block % args.strips;
  copy_unit<kind, Tag>(args, unit * unit_tokens, strip * columns, tokens);
  commit_copies();

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

  for (int turn = 0; strip < args.strips; strip += strip_step, ++turn) {
    wait_copies<0>();
    __syncwarp();
    Exchange* const told = shared.told + turn % 2 * args.cluster;
    if (args.pass != Pass::codes) {
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        Seen<kind> seen[2];
#pragma unroll 1
        for (int step = 0; step < unit_steps(kind); ++step) {
          look<kind, Tag>(group_at(step, half), lane_draws, args.sum_wanted, seen);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float largest = seen[c].largest[0];
          if constexpr (kind == Kind::sketch8) {
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
      // A thread for a column and a thread block to tell.
      for (int i = thread; i < columns * max(1, args.cluster); i += static_cast<int>(blockDim.x)) {
        const int c = i % columns, to = i / columns;
        std::uint32_t most = 0;
        for (int w = 0; w < warps; ++w) most = max(most, shared.seen[w].amax[c]);
        Exchange* const mine = told + (args.cluster == 0 ? 0 : rank);
        tell(&mine->amax[c], to, most);
        if (args.sum_wanted && to == 0) {
          double total = 0.0;
          for (int w = 0; w < warps; ++w) total += shared.seen[w].sum[c];
          tell(&mine->sum[c], to, total);
        }
      }
      if (args.cluster > 1) {
        cluster_barrier();
      } else {
        __syncthreads();
      }
    }

    // A lane for a column of the strip.
    const std::int64_t column = strip * columns + lane;
    const bool has_column = lane < columns && column < args.x.cols;
    std::uint32_t most = 0;
    double total = 0.0;
    if (args.pass == Pass::codes) {
      if (has_column) {
        most = args.amax[args.per_tensor ? 0 : column];
      }
    } else if (lane < columns) {
      for (int r = 0; r < max(1, args.cluster); ++r) most = max(most, told[r].amax[lane]);
      if (args.sum_wanted && warp == 0 && (rank == 0 || args.cluster == 0)) {
        for (int r = 0; r < max(1, args.cluster); ++r) total += told[r].sum[lane];
      }
    }
    if (args.pass == Pass::amax) {
      if (warp == 0 && has_column) {
        atomic_raise(args.amax + (args.per_tensor ? 0 : column), most);
        if (args.sum_wanted) {
          args.partial_sums[rank * args.x.cols + column] = static_cast<float>(total);
        }
      }
    } else {
      const DeviceScale scale = device_scale(most, args.bits);
      if (warp == 0 && rank == 0 && has_column) {
        if (column < args.scales) args.scale[column] = scale.scale;
        if (clustered && args.sum_wanted) {
          float sum = static_cast<float>(total);
          if (args.sum_accumulate) sum = load_out(args.sum, 0, column) + sum;
          store_element(args.sum, 0, column, sum);
        }
      }
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        const int first = half * warp_columns + 2 * pair;
        const std::int64_t row = strip * columns + first;
        float inv[2];
        bool keep[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          inv[c] = __shfl_sync(0xffffffffU, scale.inv, first + c);
          keep[c] = __shfl_sync(0xffffffffU, static_cast<int>(scale.keep), first + c) != 0;
        }
#pragma unroll 1
        for (int step = 0; step < unit_steps(kind); ++step) {
          const std::int64_t g = (unit * unit_steps(kind) + step) * lane_groups + lane_group;
          float v[2][group_k];
          project<kind, Tag>(group_at(step, half), lane_draws, args.sketch_weight, v);
          if (g >= groups) continue;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (row + c >= args.x.cols) break;
            uint4 codes = round_group<rounding>([&](int k) { return v[c][k] * inv[c]; }, args.key,
                                                static_cast<std::uint64_t>((row + c) * groups + g),
                                                args.bits);
            if (!keep[c]) codes = make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4*>(args.codes + (row + c) * args.k_padded + g * group_k) = codes;
          }
        }
      }
    }
    if (strip + strip_step < args.strips) {
      __syncwarp();
      copy_unit<kind, Tag>(args, unit * unit_tokens, (strip + strip_step) * columns, tokens);
      commit_copies();
    }
  }
  end_kernel(args.independent);
}

bool keeps_rows(const Projection& p, Kind kind) {
  for (int i = 0; i < 8; ++i) {
    if (p.rows.size() != 8 || p.rows[static_cast<std::size_t>(i)] != kept_row(kind, i))
      return false;
  }
  return true;
}

bool kind_of(const Projection& p, Kind& kind) {
  if (p.basis == Basis::full) {
    kind = Kind::full;
    return true;
  }
  if (p.block != 16) return false;
  if (p.basis == Basis::sketch) {
    kind = Kind::sketch8;
    return p.rank == 8;
  }
  if (p.rank == 16) {
    kind = Kind::whole;
    return true;
  }
  kind = keeps_rows(p, Kind::lowpass8) ? Kind::lowpass8 : Kind::sequency8;
  return keeps_rows(p, kind);
}

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

// How a strip is shared out: the division that should take least, by a model of an SM's cycles. A
// unit takes 900 of its cycles, but no less than 6000 pass from its copies to its codes (measured
// at 2 and 16 warps on an SM); the exchange in a cluster takes 1500.
struct Plan {
  int parts = 0, warps = 0;
  bool one_pass = true;
  int sm_count = 0;
};

Plan cluster_plan(std::int64_t units, std::int64_t strips, std::int64_t sm_count) {
  Plan best;
  std::int64_t best_cycles = 0;
  for (int parts = 1; parts <= most_parts; ++parts) {
    const std::int64_t warps = ceil_div(units, parts);
    if (warps > most_warps) continue;
    const std::int64_t at_once =
        std::max<std::int64_t>(1, std::min(strips, sm_count * (sm_warps / warps) / parts));
    const std::int64_t warps_per_sm = ceil_div(at_once * parts, sm_count) * warps;
    const std::int64_t cycles =
        ceil_div(strips, at_once) *
        (std::max<std::int64_t>(6000, warps_per_sm * 900) + (parts > 1 ? 1500 : 0));
    if (best.parts == 0 || cycles < best_cycles) {
      best.parts = parts;
      best.warps = static_cast<int>(warps);
      best_cycles = cycles;
    }
  }
  return best;
}

// Parts for two passes hold 512 tokens; a ColumnSum's workspace has room for parts of 128.
constexpr int two_pass_warps = 4;

std::int64_t unit_count(const Projection& p, Kind kind) {
  return ceil_div(p.k_padded, group_k * lane_groups * unit_steps(kind));
}
std::int64_t strip_count(const MatrixIn& x) {
  return ceil_div(x.cols, strip_bytes / static_cast<int>(dtype_size(x.dtype)));
}

Plan plan_of(const Context& context, const MatrixIn& x, const Projection& p,
             const OperandQuant& quant, Kind kind) {
  const char* const stage = "backward_linear";
  const std::int64_t units = unit_count(p, kind);
  const int sm_count = device_attribute(context, cudaDevAttrMultiProcessorCount, stage);
  Plan plan;
  if (!quant.per_tensor && context.arch() != 80 &&
      device_attribute(context, cudaDevAttrComputeCapabilityMajor, stage) >= 9) {
    plan = cluster_plan(units, strip_count(x), sm_count);
  }
  if (plan.parts == 0) {
    plan = {static_cast<int>(ceil_div(units, two_pass_warps)), two_pass_warps, false};
  }
  plan.sm_count = sm_count;
  return plan;
}

}  // namespace

bool resident_can(const Projection& p, const OperandQuant& quant) {
  Kind kind;
  return kind_of(p, kind) && !quant.per_k && p.order.prefix_rows() == 0 &&
         quant.rounding != Rounding::pseudo_stochastic;
}

bool resident_one_pass(const Context& context, const MatrixIn& x, const Projection& p,
                       const OperandQuant& quant) {
  Kind kind{};
  return kind_of(p, kind) && plan_of(context, x, p, quant, kind).one_pass;
}

void resident_quantize_columns(const Context& context, const MatrixIn& x, const Projection& p,
                               Side side, const Key& sketch_key, const OperandQuant& quant,
                               const Operand& out, const ColumnSum* sum) {
  const char* const stage = "backward_linear";
  Kind kind{};
  static_cast<void>(kind_of(p, kind));
  Args args{};
  args.x = x;
  args.order = p.order;
  args.body_tokens = p.body_tokens;
  args.sketch_weight = side == Side::gradient ? p.sketch_weight : 1.0F;
  args.sketch = device_key(sketch_key, Purpose::sketch);
  args.key = device_key(context.key(), quant.purpose);
  args.codes = out.codes;
  args.scale = out.scale;
  args.scales = out.scales;
  args.amax = out.amax;
  args.k_padded = out.k_padded;
  args.units = unit_count(p, kind);
  args.bits = quant.bits;
  args.per_tensor = quant.per_tensor;
  args.flat = rows_aligned(x) && p.order.samples == 0;
  args.sum_wanted = sum != nullptr;
  if (sum != nullptr) {
    args.sum = sum->out;
    args.sum_accumulate = sum->accumulate;
    args.partial_sums = static_cast<float*>(sum->workspace);
  }
  args.strips = strip_count(x);
  const Plan plan = plan_of(context, x, p, quant, kind);
  const bool one_pass = plan.one_pass;
  args.parts = plan.parts;
  args.cluster = one_pass ? plan.parts : 0;
  args.independent = quant.independent;
  LaunchShape shape{args.strips * plan.parts, 32 * plan.warps,
                    shared_bytes(plan.warps, args.cluster), std::max(1, args.cluster)};
  const auto run = [&](auto rounding, Pass pass) {
    args.pass = pass;
    with_kind(kind, [&](auto k) {
      host_with_dtype(x.dtype, [&](auto tag) {
        const auto kernel =
            resident_kernel<decltype(k)::value, decltype(rounding)::value, decltype(tag)>;
        // Half of the SMs surely take what few strips there are: no need to ask.
        if (one_pass && 2 * shape.blocks > plan.sm_count) {
          const std::int64_t clusters =
              std::min<std::int64_t>(args.strips, clusters_at_once(stage, context, kernel, shape));
          shape.blocks = clusters * plan.parts;
        }
        launch(stage, context, kernel, shape, args);
      });
    });
  };
  using Nearest = std::integral_constant<Rounding, Rounding::nearest>;
  using Stochastic = std::integral_constant<Rounding, Rounding::stochastic>;
  const auto codes = [&](Pass pass) {
    quant.rounding == Rounding::nearest ? run(Nearest{}, pass) : run(Stochastic{}, pass);
  };
  if (one_pass) return codes(Pass::both);
  run(Nearest{}, Pass::amax);
  args.independent = false;
  args.sum_wanted = false;
  codes(Pass::codes);
  if (sum != nullptr) finish_sums(context, args.parts, *sum);
}

}  // namespace hot::detail
