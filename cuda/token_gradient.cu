// Stage: g_w of the token storages (docs/numerics.md, "One code a value"), but for the rows of g_y
// (token_rows.cu) and the product.
//
// token_transpose_kernel: q, [tokens, O'], to [O', tokens].
//   A CTA takes 128 x 128 codes: whole lines on both sides. 2 bytes an element.
//
// token_contributions_kernel: x as it was kept, times the scales of g_y's tokens, to INT8 rows of
//   channels, twice: the largest values, then the codes.
//   A lane takes 8 tokens of 16 features, a warp 64 of 64: whole sectors are read, and 64 bytes of
//   a row are written. One Philox serves a lane's 128 values. Of 4 bits 0.53 bytes an element, then
//   1.53.
//
// undo_transforms_kernel: the product's transforms undone. Two warps take a tile of 64 x 64 through
//   shared memory: a thread holds a row of it, then a column. 4 bytes an element and the result's.
//
// draw_tokens_kernel: a share of the tokens, by one CTA.
#include <cstdint>
#include <type_traits>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/device/token_codes.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

constexpr int tile = token::tile;  // tokens and features of a warp
static_assert(tile == 64 && token::tile_warps == 8);

// Token of a slot; -1: none.
template <bool drawn>
__device__ __forceinline__ std::int64_t token_of(const DeviceDrawn& of, std::int64_t slot) {
  if (slot >= of.slots) return -1;
  if constexpr (drawn) return of.token[slot];
  return slot;
}

// ---- q transposed ------------------------------------------------------------------------------

struct TransposeArgs {
  const std::int8_t* from;
  std::int64_t from_bytes;  // of a row
  std::int8_t* to;
  std::int64_t rows, to_bytes;  // O'; of a row, a multiple of 16
  DeviceDrawn drawn;
  unsigned strips;  // tiles of features
};

// Four words of four bytes, transposed.
__device__ __forceinline__ void transpose4(std::uint32_t (&w)[4]) {
  const std::uint32_t ab = __byte_perm(w[0], w[1], 0x5140U), AB = __byte_perm(w[0], w[1], 0x7362U);
  const std::uint32_t cd = __byte_perm(w[2], w[3], 0x5140U), CD = __byte_perm(w[2], w[3], 0x7362U);
  w[0] = __byte_perm(ab, cd, 0x5410U);
  w[1] = __byte_perm(ab, cd, 0x7632U);
  w[2] = __byte_perm(AB, CD, 0x5410U);
  w[3] = __byte_perm(AB, CD, 0x7632U);
}

// Where word `four` of a channel's tokens lies: rows of 128 bytes whose groups of 16 are exchanged,
// so that neither side meets bank conflicts.
__device__ __forceinline__ int turned_word(int channel, int four) {
  return channel * 32 + (four ^ (channel / 16 * 4));
}

template <bool drawn>
__global__ void __launch_bounds__(token::transpose_threads)
    token_transpose_kernel(const __grid_constant__ TransposeArgs args) {
  constexpr int side = token::transpose_tile;
  __shared__ __align__(16) std::uint32_t shared[side * side / 4];
  begin_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  // Backwards: the L2 still holds the end of q.
  const unsigned place = gridDim.x - 1 - blockIdx.x;
  const std::int64_t first_row = std::int64_t{place % args.strips} * side;
  const std::int64_t first_slot = std::int64_t{place / args.strips} * side;
  {
    const int sixteen = thread % 8, four = thread / 8;
    const std::int64_t row = first_row + 16 * sixteen;
    uint4 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const std::int64_t token = token_of<drawn>(args.drawn, first_slot + 4 * four + t);
      words[t] = make_uint4(0, 0, 0, 0);
      if (token >= 0 && row < args.rows) {
        words[t] = *reinterpret_cast<const uint4*>(args.from + token * args.from_bytes + row);
      }
    }
    const auto turn = [&](int part, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                          std::uint32_t d) {
      std::uint32_t w[4] = {a, b, c, d};
      transpose4(w);
#pragma unroll
      for (int i = 0; i < 4; ++i) shared[turned_word(16 * sixteen + 4 * part + i, four)] = w[i];
    };
    turn(0, words[0].x, words[1].x, words[2].x, words[3].x);
    turn(1, words[0].y, words[1].y, words[2].y, words[3].y);
    turn(2, words[0].z, words[1].z, words[2].z, words[3].z);
    turn(3, words[0].w, words[1].w, words[2].w, words[3].w);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < side * 8 / token::transpose_threads; ++i) {
    const int channel = (thread + i * token::transpose_threads) / 8, part = thread % 8;
    const std::int64_t row = first_row + channel, slot = first_slot + 16 * part;
    if (row >= args.rows || slot >= args.to_bytes) continue;
    *reinterpret_cast<uint4*>(args.to + row * args.to_bytes + slot) =
        *reinterpret_cast<const uint4*>(shared + turned_word(channel, 4 * part));
  }
}

// ---- contributions -----------------------------------------------------------------------------

struct ContributionArgs {
  const std::uint8_t* codes;
  std::int64_t row_bytes;
  const std::uint8_t* ratios;
  std::int64_t ratio_bytes;
  const void* scale;         // of x's tokens, fp32 or bf16
  const float* token_scale;  // of g_y's
  DeviceDrawn drawn;
  std::int64_t features;  // I'
  std::int64_t tiles;     // of 64 slots, of a warp
  unsigned strips;
  DeviceKey dither, random;
  std::uint32_t* amax;
  Operand out;
};

// What a lane takes of a tile: features [sixteen * 16, + 16), slots [run * 8, + 8). All of them are
// of one tile of the dither.
constexpr int lane_slots = 8, lane_features = 16;

struct LanePlace {
  std::int64_t feature, slot;
  __device__ LanePlace(std::int64_t tile_feature, std::int64_t tile_slot) {
    const auto lane = static_cast<int>(threadIdx.x) % 32;
    feature = tile_feature + lane / 8 * lane_features;
    slot = tile_slot + lane % 8 * lane_slots;
  }
};

// The orders of the product that takes rows as they lie (gemm_int8_sm90_rows.cuh). Its tokens, of
// 16: two of each 8, in turns; those of a lane's slots t are one half of them.
__device__ __forceinline__ constexpr int product_token(int t, int half) {
  return 4 * half + 2 * (t / 4) + 8 * (t / 2 % 2) + t % 2;
}
// The row of its result that a feature has, of token::product_rows.
__device__ __forceinline__ int product_row(int feature) {
  const int four = feature / 4;
  return 64 * (feature / 2 % 2) + 16 * (four / 8) + 8 * (feature % 2) + four % 8;
}

// The 16 bytes that each random byte gives its neighbours, in the order of their places.
template <bool by_rows>
struct SpreadTable {
  uint4 bytes[256];

  // All threads of a CTA; a barrier follows.
  __device__ __forceinline__ void fill() {
    static_assert(32 * token::tile_warps == 256);
    const auto byte = threadIdx.x;
    const uint4 all = make_uint4(spread_bytes(byte, 0), spread_bytes(byte, 1),
                                 spread_bytes(byte, 2), spread_bytes(byte, 3));
    bytes[byte] =
        by_rows ? make_uint4(__byte_perm(all.x, all.z, 0x5410U), __byte_perm(all.x, all.z, 0x7632U),
                             __byte_perm(all.y, all.w, 0x5410U), __byte_perm(all.y, all.w, 0x7632U))
                : all;
  }
  // The first or the second eight.
  __device__ __forceinline__ uint2 eight(std::uint32_t byte, int half) const {
    return reinterpret_cast<const uint2*>(bytes + byte)[half];
  }
};

// Token of a lane's slot t, from the first of its tile of 16 on where tokens are by rows, else from
// the lane's first.
template <bool by_rows>
__device__ __forceinline__ int token_of_slot(int t, int half) {
  return by_rows ? product_token(t, half) : t;
}

template <Storage storage, bool drawn, bool by_rows>
class LaneValues {
 public:
  __device__ __forceinline__ LaneValues(const ContributionArgs& args, const DeviceOffset& offset,
                                        const LanePlace& at)
      : args_(args), offset_(offset), at_(at), half_(static_cast<int>(at.slot / 8 % 2)) {
    first_ = by_rows ? at.slot - 8 * half_ : at.slot;
    if (!drawn && first_ + (by_rows ? dither_tile : lane_slots) <= args.drawn.slots) {
      load_full();
    } else {
#pragma unroll
      for (int t = 0; t < lane_slots; ++t) load(t);
    }
    if constexpr (!drawn && storage != Storage::token8) draw(at.slot / dither_tile);
  }

  // Contributions of slot t, of features [8 * half, + 8) of the lane.
  __device__ __forceinline__ void values(int t, int half, float (&v)[8]) {
    const float w = weight_[t];
    if constexpr (storage == Storage::token8) {
      const std::uint32_t words[4] = {codes_[t].x, codes_[t].y, codes_[t].z, codes_[t].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const std::uint32_t word = words[2 * half + i / 4];
        v[i] = static_cast<float>(static_cast<int>(word << (24 - 8 * (i % 4))) >> 24) * w;
      }
    } else {
      std::uint32_t byte;
      if constexpr (drawn) {
        const std::int64_t token = max(token_of<true>(args_.drawn, at_.slot + t), std::int64_t{0});
        if (token / dither_tile != drawn_tile_) draw(token / dither_tile);
        byte = random_byte(draw_, static_cast<int>(token % dither_tile));
      } else {
        // A lane has half of the bytes.
        const bool first = by_rows ? t / 2 % 2 == 0 : t < 4;
        const int place = by_rows ? t / 4 * 2 + t % 2 : t % 4;
        byte = (first ? draw_.word[0] : draw_.word[1]) >> (8 * place) & 255U;
      }
      octet_values<storage>(octet(t, half), byte, half, w, v);
    }
  }

 private:
  using Codes =
      std::conditional_t<storage == Storage::token8, uint4,
                         std::conditional_t<storage == Storage::token4, uint2, std::uint32_t>>;
  static constexpr int code_bits = storage == Storage::token8   ? 8
                                   : storage == Storage::token4 ? 4
                                                                : 2;

  __device__ __forceinline__ std::uint32_t octet(int t, int half) const {
    if constexpr (storage == Storage::token4) return half == 0 ? codes_[t].x : codes_[t].y;
    if constexpr (storage == Storage::token2) return half == 0 ? codes_[t] : codes_[t] >> 16;
    return 0;
  }

  __device__ __forceinline__ Codes load_codes(const std::uint8_t* row) const {
    return *reinterpret_cast<const Codes*>(row + at_.feature * code_bits / 8);
  }

  // Slots that are tokens, all of them real.
  __device__ __forceinline__ void load_full() {
    const auto token = [&](int t) { return first_ + token_of_slot<by_rows>(t, half_); };
    const std::uint8_t* const row = args_.codes + token(0) * args_.row_bytes;
#pragma unroll
    for (int t = 0; t < lane_slots; ++t) {
      codes_[t] = load_codes(row + token_of_slot<by_rows>(t, 0) * args_.row_bytes);
    }
    float s[lane_slots];
    if constexpr (by_rows) {
#pragma unroll
      for (int t = 0; t < lane_slots; t += 2) {
        const float2 two = *reinterpret_cast<const float2*>(args_.token_scale + token(t));
        s[t] = two.x, s[t + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int t = 0; t < lane_slots; t += 4) {
        const float4 four = *reinterpret_cast<const float4*>(args_.token_scale + token(t));
        s[t] = four.x, s[t + 1] = four.y, s[t + 2] = four.z, s[t + 3] = four.w;
      }
    }
    if constexpr (storage == Storage::token8) {
      const float* const scale = static_cast<const float*>(args_.scale);
#pragma unroll
      for (int t = 0; t < lane_slots; ++t) weight_[t] = scale[token(t)] * s[t];
    } else {
      const std::uint8_t* const ratio =
          args_.ratios + token(0) * args_.ratio_bytes + at_.feature / token_group;
      const auto* const scale = static_cast<const std::uint16_t*>(args_.scale);
      std::uint32_t ratios[lane_slots];
#pragma unroll
      for (int t = 0; t < lane_slots; ++t) {
        ratios[t] = ratio[token_of_slot<by_rows>(t, 0) * args_.ratio_bytes];
      }
#pragma unroll
      for (int t = 0; t < lane_slots; t += 2) {
        const std::uint32_t two = *reinterpret_cast<const std::uint32_t*>(scale + token(t));
        weight_[t] = ratio_value(ratios[t]) * __uint_as_float(two << 16) * s[t];
        weight_[t + 1] = ratio_value(ratios[t + 1]) * __uint_as_float(two & 0xffff0000U) * s[t + 1];
      }
    }
  }

  // Without a branch: loads wait for each other behind one. An empty slot has any token's codes and
  // the weight 0.
  __device__ __forceinline__ void load(int t) {
    const std::int64_t slot = first_ + token_of_slot<by_rows>(t, half_);
    const std::int64_t token = token_of<drawn>(args_.drawn, slot);
    const bool real = token >= 0;
    const std::int64_t from = real ? token : std::int64_t{0};
    const float s = args_.token_scale[from];
    codes_[t] = load_codes(args_.codes + from * args_.row_bytes);
    float weight;
    if constexpr (storage == Storage::token8) {
      weight = static_cast<const float*>(args_.scale)[from] * s;
    } else {
      const std::uint32_t half = static_cast<const std::uint16_t*>(args_.scale)[from];
      const std::uint32_t ratio =
          args_.ratios[from * args_.ratio_bytes + at_.feature / token_group];
      weight = ratio_value(ratio) * __uint_as_float(half << 16) * s;
    }
    if constexpr (drawn) weight *= args_.drawn.factor[min(slot, args_.drawn.slots - 1)];
    weight_[t] = real ? weight : 0.0F;
  }

  __device__ __forceinline__ void draw(std::int64_t token_tile) {
    drawn_tile_ = token_tile;
    draw_ = random_words(args_.dither, offset_,
                         static_cast<std::uint64_t>(token_tile * (args_.features / dither_tile) +
                                                    at_.feature / dither_tile));
    if constexpr (by_rows) {  // two bytes of two words, in turns
      if (half_ == 1) draw_.word[0] = draw_.word[1], draw_.word[2] = draw_.word[3];
      draw_.word[1] = draw_.word[2];
    } else if (!drawn && half_ == 1) {
      draw_.word[0] = draw_.word[2], draw_.word[1] = draw_.word[3];
    }
  }

  const ContributionArgs& args_;
  DeviceOffset offset_;
  LanePlace at_;
  int half_;            // of a tile of 16
  std::int64_t first_;  // token_of_slot counts from here
  Codes codes_[lane_slots];
  float weight_[lane_slots];
  std::int64_t drawn_tile_ = -1;
  RandomWords draw_{};
};

template <Storage storage, bool drawn>
__global__ void __launch_bounds__(32 * token::tile_warps, 3)
    token_amax_kernel(const __grid_constant__ ContributionArgs args) {
  __shared__ std::uint32_t most[tile];
  begin_kernel();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  if (thread < tile) most[thread] = 0;
  __syncthreads();
  const DeviceOffset offset = offset_of(args.dither);
  const std::int64_t strip = blockIdx.x % args.strips;
  const std::int64_t first =
      std::int64_t{blockIdx.x / args.strips} * token::tile_warps * args.tiles + warp;
  float largest[lane_features] = {};
#pragma unroll 1
  for (std::int64_t i = 0; i < args.tiles; ++i) {
    const LanePlace at(strip * tile, (first + i * token::tile_warps) * tile);
    if (at.feature >= args.features || at.slot >= args.drawn.slots) break;
    LaneValues<storage, drawn, false> x(args, offset, at);
#pragma unroll
    for (int t = 0; t < lane_slots; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[8];
        x.values(t, half, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          largest[8 * half + j] = max_magnitude(largest[8 * half + j], v[j]);
        }
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < lane_features; ++j) {
    const std::uint32_t v = lanes_max(abs_bits(largest[j]), 8);
    if (thread % 8 == 0) atomicMax(&most[thread % 32 / 8 * lane_features + j], v);
  }
  __syncthreads();
  if (thread < tile && strip * tile + thread < args.features) {
    atomic_max(args.amax + strip * tile + thread, most[thread]);
  }
}

template <Storage storage, bool drawn, bool by_rows, Rounding rounding>
__global__ void __launch_bounds__(32 * token::tile_warps, 2)
    token_contributions_kernel(const __grid_constant__ ContributionArgs args) {
  __shared__ SpreadTable<by_rows> table;
  __shared__ float inverse[tile];
  __shared__ std::uint32_t kept[tile / 32];
  begin_kernel();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const DeviceOffset offset = offset_of(args.dither), random_offset = offset_of(args.random);
  const std::int64_t strip = blockIdx.x % args.strips, range = blockIdx.x / args.strips;
  if constexpr (rounding == Rounding::stochastic) table.fill();
  if (thread < tile) {
    const std::int64_t channel = min(strip * tile + thread, args.features - 1);
    const DeviceScale s = device_scale(args.amax[channel], 8);
    inverse[thread] = s.inv;
    const std::uint32_t keeps = __ballot_sync(0xffffffffU, s.keep);
    if (thread % 32 == 0) kept[warp] = keeps;
    if (range == 0 && strip * tile + thread < args.features) args.out.scale[channel] = s.scale;
  }
  __syncthreads();
  const LanePlace at(strip * tile, (range * token::tile_warps + warp) * tile);
  if (at.feature >= args.features || at.slot >= args.out.k_padded) return;
  LaneValues<storage, drawn, by_rows> x(args, offset, at);
  RandomWords random{};
  if constexpr (rounding == Rounding::stochastic) {
    const std::int64_t slot_tiles = (args.drawn.slots + dither_tile - 1) / dither_tile;
    random = random_words(
        args.random, random_offset,
        static_cast<std::uint64_t>(at.feature / dither_tile * slot_tiles + at.slot / dither_tile));
  }
  const int slots = at.slot % dither_tile == 0 ? 0 : 1;  // half of the tile's
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t feature = at.feature + 8 * half;
    const int local = thread % 32 / 8 * lane_features + 8 * half;
    const std::uint32_t keep = kept[local / 32] >> (local % 32);
    float inv[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) inv[j] = inverse[local + j];
    uint2 out[8], bytes[8];
    if constexpr (rounding == Rounding::stochastic) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        bytes[j] = table.eight(random.word[2 * half + j / 4] >> (8 * (j % 4)) & 255U, slots);
      }
    }
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      std::uint32_t sum[8][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float v[8];
        x.values(4 * four + t, half, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if constexpr (rounding == Rounding::stochastic) {
            sum[j][t] = stochastic_sum(v[j], inv[j], four == 0 ? bytes[j].x : bytes[j].y, t);
          } else {
            sum[j][t] = nearest_sum(v[j], inv[j]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        constexpr int byte = rounding == Rounding::stochastic ? 1 : 0;
        std::uint32_t codes = gather_bytes<byte>(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
        if ((keep >> j & 1U) == 0) codes = 0;
        (four == 0 ? out[j].x : out[j].y) = codes;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<uint2*>(args.out.codes + (feature + j) * args.out.k_padded + at.slot) =
          out[j];
    }
  }
}

// ---- the transforms undone ---------------------------------------------------------------------

struct UndoArgs {
  const float* product;
  bool by_rows;
  std::int64_t rows, cols;  // O', I'
  int out_block, in_block;
  const std::uint16_t* out_factors;  // sign / size of the out features, bf16
  DeviceKey in_signs;
  const std::uint8_t* in_exponents;
  bool accumulate;
  MatrixOut out;
  unsigned strips;
};

constexpr int pitch = tile + 4;  // floats: rows start on 16 bytes, in different banks

__device__ __forceinline__ void butterfly_blocks(float (&v)[tile], int block) {
  butterfly<1, 16>(v);
  if (block >= 32) butterfly<16, 32>(v);
  if (block >= 64) butterfly<32, 64>(v);
}

// +-2^-e, a bf16, as +-2^e / block.
__device__ inline float turned_factor(std::uint32_t factor, int block) {
  const std::uint32_t power = (factor & 0x8000U) | (254U - (factor >> 7 & 255U)) << 7;
  return __uint_as_float(power << 16) * __fdiv_rn(1.0F, static_cast<float>(block));
}

template <class Tag>
__global__ void __launch_bounds__(2 * tile, 4)
    undo_transforms_kernel(const __grid_constant__ UndoArgs args) {
  __shared__ __align__(16) float shared[2][tile * pitch];
  __shared__ float out_factor[2][tile];
  begin_kernel();
  const int half = static_cast<int>(threadIdx.x) / tile;
  const int thread = static_cast<int>(threadIdx.x) % tile;
  const std::int64_t number = std::int64_t{blockIdx.x} * 2 + half;
  const std::int64_t row = number / args.strips * tile, col = number % args.strips * tile;
  float* const values = shared[half];
  // A tile past the last is one of zeros.
  const int rows = static_cast<int>(max(std::int64_t{0}, min(std::int64_t{tile}, args.rows - row)));
  const int cols = static_cast<int>(min(std::int64_t{tile}, args.cols - col));
  {
    const int quad = thread % 16, first = thread / 16;
#pragma unroll
    for (int r = 0; r < tile; r += 4) {
      const bool real = r + first < rows && 4 * quad < cols;
      std::int64_t from_row = row + r + first;
      if (args.by_rows) {
        const auto local = static_cast<int>(from_row % token::product_rows);
        from_row += product_row(local) - local;
      }
      const float* const from =
          real ? args.product + from_row * args.cols + col + 4 * quad : args.product;
      copy_async(shared_address(values + (r + first) * pitch + 4 * quad), from, real ? 16 : 0);
    }
    commit_copies();
  }
  const std::int64_t own_row = row + thread, own_col = col + thread;
  out_factor[half][thread] =
      own_row < args.out.rows ? turned_factor(args.out_factors[own_row], args.out_block) : 0.0F;
  float in_factor = 0.0F;
  if (own_col < args.out.cols) {
    const std::uint64_t negative = rotation_signs(args.in_signs, offset_of(args.in_signs),
                                                  static_cast<std::uint64_t>(col / 64));
    const auto sign = static_cast<unsigned>(negative >> thread & 1U);
    in_factor = __uint_as_float(sign << 31 | unsigned{args.in_exponents[own_col]} << 23) *
                __fdiv_rn(1.0F, static_cast<float>(args.in_block));
  }
  wait_copies<0>();
  __syncthreads();
  float v[tile];
#pragma unroll
  for (int i = 0; i < tile; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(values + thread * pitch + i);
    v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
  }
  butterfly_blocks(v, args.in_block);
#pragma unroll
  for (int i = 0; i < tile; i += 4) {
    *reinterpret_cast<float4*>(values + thread * pitch + i) =
        make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < tile; ++r) v[r] = values[r * pitch + thread];
  butterfly_blocks(v, args.out_block);
  if (own_col >= args.out.cols) return;
  const int real_rows =
      static_cast<int>(max(std::int64_t{0}, min(std::int64_t{tile}, args.out.rows - row)));
#pragma unroll
  for (int r = 0; r < tile; ++r) {
    if (r >= real_rows) break;
    float value = v[r] * in_factor * out_factor[half][r];
    const std::int64_t at = (row + r) * args.out.row_stride + own_col * args.out.col_stride;
    if (args.accumulate) value = Tag::load(args.out.data, at) + value;
    Tag::store(args.out.data, at, value);
  }
}

// ---- a share of the tokens ---------------------------------------------------------------------

constexpr std::uint32_t levels = (0x7f800000U >> 20) + 1;

struct DrawArgs {
  const void* scale;
  bool packed;
  const float* token_scale;
  std::int64_t tokens, slots;
  DeviceKey key;
  std::int32_t* token;
  float* factor;
};

// Of what a token contributes, eighths of an octave; 0: nothing.
__device__ std::uint32_t contribution_level(const DrawArgs& args, std::int64_t token) {
  const float kept =
      args.packed ? __uint_as_float(
                        std::uint32_t{static_cast<const std::uint16_t*>(args.scale)[token]} << 16)
                  : static_cast<const float*>(args.scale)[token];
  return min(abs_bits(args.token_scale[token] * kept), 0x7f800000U) >> 20;
}

__device__ std::uint64_t level_weight(std::uint32_t level, std::uint32_t top) {
  const std::uint64_t mantissa = 8 + (level & 7U);
  const std::uint32_t below = (top >> 3) - (level >> 3);
  const std::uint64_t weight = below <= 28  ? mantissa << (28 - below)
                               : below < 64 ? mantissa >> (below - 28)
                                            : 0;
  return max(std::uint64_t{1}, weight);
}

__device__ std::uint64_t warp_sum(std::uint64_t v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(0xffffffffU, v, lanes);
  return v;
}

__global__ void __launch_bounds__(token::draw_threads)
    draw_tokens_kernel(const __grid_constant__ DrawArgs args) {
  constexpr int threads = token::draw_threads, warps = threads / 32;
  constexpr std::uint64_t one = std::uint64_t{1} << 32;
  __shared__ std::uint32_t count[levels], shared[32], whole_level;
  __shared__ std::uint64_t partial[warps];
  __shared__ double shared_share;
  begin_kernel();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (std::uint32_t level = threadIdx.x; level < levels; level += threads) count[level] = 0;
  for (std::int64_t slot = thread; slot < args.slots; slot += threads) {
    args.token[slot] = -1;
    args.factor[slot] = 0.0F;
  }
  __syncthreads();
  std::uint32_t top = 0;
  for (std::int64_t l = thread; l < args.tokens; l += threads) {
    const std::uint32_t level = contribution_level(args, l);
    atomicAdd(&count[level], 1U);
    top = max(top, level);
  }
  top = block_max(top, shared);
  std::uint64_t mass = 0;
  for (std::uint32_t level = 1 + threadIdx.x; level <= top; level += threads) {
    if (count[level] > 0) mass += count[level] * level_weight(level, top);
  }
  mass = warp_sum(mass);
  if (lane == 0) partial[warp] = mass;
  __syncthreads();
  if (thread == 0) {
    mass = 0;
    for (int w = 0; w < warps; ++w) mass += partial[w];
    std::uint64_t left = static_cast<std::uint64_t>(args.slots);
    // Levels above `whole` are taken as they are, the others by chance.
    std::uint32_t whole = top;
    while (whole > 0 && mass > 0) {
      if (count[whole] > 0) {
        const std::uint64_t weight = level_weight(whole, top);
        if (left * weight < mass) break;
        left -= count[whole];
        mass -= count[whole] * weight;
      }
      --whole;
    }
    whole_level = whole;
    shared_share =
        mass == 0 ? 0.0 : __ddiv_rn(__ull2double_rn(left) * 0x1p32, __ull2double_rn(mass));
  }
  __syncthreads();
  const std::uint32_t whole = whole_level;
  const double share = shared_share;
  std::uint64_t before = random_words(args.key, offset_of(args.key), 0).word[0];
  for (std::int64_t base = 0; base < args.tokens; base += threads) {
    const std::int64_t l = base + thread;
    std::uint64_t part = 0;
    const std::uint32_t level = l < args.tokens ? contribution_level(args, l) : 0U;
    if (level != 0) {
      part = one;
      if (level <= whole) {
        const double wanted = __ull2double_rn(level_weight(level, top)) * share;
        part = wanted < 0x1p32 ? __double2ull_rz(wanted) : one;
      }
    }
    std::uint64_t up_to = part;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const std::uint64_t other = __shfl_up_sync(0xffffffffU, up_to, static_cast<unsigned>(lanes));
      if (lane >= lanes) up_to += other;
    }
    __syncthreads();
    if (lane == 31) partial[warp] = up_to;
    __syncthreads();
    std::uint64_t all = 0;
    for (int w = 0; w < warps; ++w) {
      if (w == warp) up_to += all;
      all += partial[w];
    }
    up_to += before;
    before += all;
    const std::uint64_t slot = (up_to - part) >> 32;
    if (part != 0 && up_to >> 32 != slot && slot < static_cast<std::uint64_t>(args.slots)) {
      args.token[slot] = static_cast<std::int32_t>(l);
      args.factor[slot] = __double2float_rn(__ddiv_rn(0x1p32, __ull2double_rn(part)));
    }
  }
}

// ---- launches ----------------------------------------------------------------------------------

constexpr const char* stage = "backward_linear";

template <Storage storage>
auto contributions_kernel(bool drawn, bool by_rows, bool stochastic) {
  constexpr Rounding at_random = Rounding::stochastic, nearest = Rounding::nearest;
  if (drawn) {
    return stochastic ? token_contributions_kernel<storage, true, false, at_random>
                      : token_contributions_kernel<storage, true, false, nearest>;
  }
  if (by_rows) {
    return stochastic ? token_contributions_kernel<storage, false, true, at_random>
                      : token_contributions_kernel<storage, false, true, nearest>;
  }
  return stochastic ? token_contributions_kernel<storage, false, false, at_random>
                    : token_contributions_kernel<storage, false, false, nearest>;
}

template <class Call>
void with_drawn(const DeviceDrawn& drawn, const Call& call) {
  drawn.token != nullptr ? call(std::true_type{}) : call(std::false_type{});
}

template <class Call>
void with_storage(Storage storage, const Call& call) {
  switch (storage) {
    case Storage::token4:
      return call(std::integral_constant<Storage, Storage::token4>{});
    case Storage::token2:
      return call(std::integral_constant<Storage, Storage::token2>{});
    default:
      return call(std::integral_constant<Storage, Storage::token8>{});
  }
}

}  // namespace

void launch_draw_tokens(const Context& context, const plan::Step& step,
                        const ContributionsJob& job) {
  const TokenCodesIn& x = *job.x;
  const DrawArgs args{x.scales(),      x.storage != Storage::token8,
                      job.token_scale, x.layout.tokens,
                      job.drawn.slots, device_key(context.key(), Purpose::sketch),
                      job.drawn.token, job.drawn.factor};
  launch(stage, context, draw_tokens_kernel, step.shape, args);
}

void launch_token_transpose(const Context& context, const plan::Step& step,
                            const TransposeJob& job) {
  const TransposeArgs args{job.from.codes,
                           job.from.k_padded,
                           job.to.codes,
                           job.to.rows,
                           job.to.k_padded,
                           job.drawn,
                           static_cast<unsigned>(ceil_div(job.to.rows, token::transpose_tile))};
  with_drawn(job.drawn, [&](auto drawn) {
    launch(stage, context, token_transpose_kernel<decltype(drawn)::value>, step.shape, args);
  });
}

void launch_contributions(const Context& context, const plan::Step& step,
                          const ContributionsJob& job) {
  const TokenCodesIn& x = *job.x;
  const auto& work = step.as<plan::ContributionsStep>();
  const ContributionArgs args{x.data,
                              x.layout.row_bytes,
                              x.data + x.layout.ratio_offset,
                              x.layout.ratio_bytes,
                              x.scales(),
                              job.token_scale,
                              job.drawn,
                              x.layout.padded,
                              work.tiles,
                              static_cast<unsigned>(ceil_div(x.layout.padded, tile)),
                              device_key(job.key, Purpose::activation),
                              device_key(context.key(), Purpose::requantize),
                              job.out.amax,
                              job.out};
  const bool amax = step.kernel == plan::Kernel::token_amax;
  const bool stochastic = step.rounding == Rounding::stochastic;
  with_storage(x.storage, [&](auto storage) {
    constexpr Storage of = decltype(storage)::value;
    const bool drawn = job.drawn.token != nullptr;
    launch(stage, context,
           !amax   ? contributions_kernel<of>(drawn, work.by_rows, stochastic)
           : drawn ? token_amax_kernel<of, true>
                   : token_amax_kernel<of, false>,
           step.shape, args);
  });
}

void launch_undo_transforms(const Context& context, const plan::Step& step, const UndoJob& job) {
  const UndoArgs args{static_cast<const float*>(job.product.data),
                      job.by_rows,
                      job.product.rows,
                      job.product.cols,
                      job.out_block,
                      job.in_block,
                      reinterpret_cast<const std::uint16_t*>(job.out_factors),
                      device_key(job.in_key, Purpose::signs),
                      job.in_exponents,
                      job.accumulate,
                      job.out,
                      static_cast<unsigned>(ceil_div(job.product.cols, tile))};
  host_with_dtype(step.dtype, [&](auto tag) {
    launch(stage, context, undo_transforms_kernel<decltype(tag)>, step.shape, args);
  });
}

}  // namespace hot::detail
