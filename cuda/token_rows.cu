// Stage: rows of the token storages (docs/numerics.md, "One code a value"): g_y for both products,
// and x as it is kept in 8, 4 or 2 bits.
//
// token_rows_kernel
//   Rows come to shared memory by cp.async, the next ones while these are worked on. A thread takes
//   64 elements of a row, so that a transform needs no exchange; its codes leave by way of its
//   place in shared memory, in whole lines. Factors of the features are signs for the most part,
//   which are turned in packed words. The dither is drawn once for 16 rows. Where g_b is wanted,
//   the rows are added up by columns as they lie there. One read: 3 bytes an element for fp16 and 8
//   bits, 2.53 for 4.
//
// token_long_rows_kernel: rows that no CTA holds in registers, in two passes.
#include <cstdint>
#include <type_traits>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/packed_codes.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/device/token_codes.cuh"
#include "cuda/launch.h"
#include "cuda/launchers.h"

namespace hot::detail {
namespace {

struct TokenRowsArgs {
  MatrixIn x;
  const std::uint16_t* factors;  // of the features, bf16
  int block;                     // of the transform
  int blocks;                    // of 16, of a row
  bool vectors;                  // rows can be copied 16 bytes at a time
  bool flat;                     // and lie one behind the other in whole pieces
  bool dense;                    // codes of a row's pieces of 64 fill it
  bool stochastic;
  int rows;  // that a CTA takes at a time
  std::int64_t cta_rows;
  DeviceKey key;  // of the rounding, or of the dither
  // 8 bits: rows of 16 * blocks codes, a scale each. Otherwise packed codes, ratios and bf16
  // scales.
  std::uint8_t* codes;
  float* scale;
  std::int64_t row_bytes, ratio_bytes;
  std::uint8_t* ratios;
  std::uint16_t* packed_scale;
  std::uint8_t* gap;  // bytes between ratios and scales, which are cleared
  int gap_bytes;
  float* sums;  // partial sums of the columns, a row for each CTA; or null
};

using token::item;
using token::max_column_vectors;

// ---- codes of a piece of 64 values -------------------------------------------------------------

__device__ inline float integer_float() { return __uint_as_float(integer_bits); }

__device__ inline std::uint32_t byte_of(std::uint32_t bytes, int i) {
  return __byte_perm(bytes, 0U, 0x4440U | static_cast<unsigned>(i));
}

// 16 codes of 4 bits: c = (m + B - 128) >> 8, whose four bits are those of byte 1; the addend is
// even, so ties stay ties.
__device__ __forceinline__ uint2 codes4(const float (&v)[item], int first, float unit,
                                        std::uint32_t byte) {
  const float magic = __uint_as_float(integer_bits - 128U);
  std::uint32_t sum[16];
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    const std::uint32_t bytes = spread_bytes(byte, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[4 * four + i] =
          __float_as_uint(__fmaf_rn(v[first + 4 * four + i], unit, magic)) + byte_of(bytes, i);
    }
  }
  uint2 words;
  words.x = pack_nibbles(gather_bytes<1>(sum[0], sum[2], sum[4], sum[6]),
                         gather_bytes<1>(sum[1], sum[3], sum[5], sum[7]));
  words.y = pack_nibbles(gather_bytes<1>(sum[8], sum[10], sum[12], sum[14]),
                         gather_bytes<1>(sum[9], sum[11], sum[13], sum[15]));
  return words;
}

// The sum of leaf(0) to leaf(Count - 1), neighbours first; the leaves are made in order.
template <int First, int Count, class Leaf>
__device__ __forceinline__ float tree_sum(const Leaf& leaf) {
  if constexpr (Count == 1) {
    return leaf(First);
  } else {
    const float a = tree_sum<First, Count / 2>(leaf);
    const float b = tree_sum<First + Count / 2, Count / 2>(leaf);
    return a + b;
  }
}

// A group of 32 values in 2 bits, of which `count` are real, the others zeros: the codes, and the
// scale; 0 where it is too small to have one.
__device__ __forceinline__ float codes2(const float (&v)[item], int first, std::uint32_t amax,
                                        int count, const std::uint32_t (&bytes)[2],
                                        std::uint32_t (&words)[2]) {
  words[0] = words[1] = 0;
  if (count == 0 || __uint_as_float(amax) < 0x1p-100F) return 0.0F;
  const std::uint32_t exponent = amax >> 23;
  const float power = __uint_as_float((255U - exponent) << 23);
  const float back = __uint_as_float((exponent - 1U) << 23);
  const float squares = tree_sum<0, 32>([&](int i) {
    const float y = v[first + i] * power;
    return y * y;
  });
  const float spread = __fsqrt_rn(__fdiv_rn(squares, static_cast<float>(count)));
  const float range = fminf(__uint_as_float(amax) * power, 1.75F * spread);
  const float inv = 256.0F * __fdiv_rn(1.5F, range);
  const float products = tree_sum<0, 32>([&](int i) {
    const float y = v[first + i] * power;
    const int m =
        __float_as_int(__fmaf_rn(y, inv, integer_float())) - static_cast<int>(integer_bits);
    const auto b = static_cast<int>(byte_of(spread_bytes(bytes[i / 16], i % 16 / 4), i % 4));
    const int code = (min(max(m, -384), 384) + b + 384) >> 8;
    words[i / 16] |= static_cast<unsigned>(code) << (2 * (i % 16));
    return y * (static_cast<float>(512 * code - 2 * (b & 0xf0) - 528) * (1.0F / 512));
  });
  return __fdiv_rn(squares, products) * back;
}

// Half to even.
__device__ inline std::uint32_t nearest_ratio(float group, float token) {
  if (!(group > 0.0F)) return 0;
  const std::uint32_t bits = __float_as_uint(__fdiv_rn(group, token));
  return ratio_byte(bits + 0x3ffffU + (bits >> 19 & 1U));
}

// Writes codes and scales of a row's pieces, from its largest value on. `own`: where a piece's
// codes are laid down if rows are dense (TokenRowsArgs); null: they go to global memory.
template <Storage storage>
class RowWriter {
 public:
  __device__ RowWriter(const TokenRowsArgs& args, const DeviceOffset& offset)
      : args_(args), offset_(offset) {}

  __device__ __forceinline__ void write8(std::int64_t row, std::uint32_t amax, int piece,
                                         const float (&v)[item], char* own) const {
    const DeviceScale s = device_scale(amax, 8);
    if (piece == 0) args_.scale[row] = s.scale;
#pragma unroll
    for (int b = 0; b < item / 16; ++b) {
      const int block = 4 * piece + b;
      const auto value = [&](int j) { return v[16 * b + j]; };
      const auto number = static_cast<std::uint64_t>(row * args_.blocks + block);
      uint4 codes = args_.stochastic
                        ? round_group<Rounding::stochastic>(value, UniformScale{s.inv}, args_.key,
                                                            offset_, number, 8)
                        : round_group<Rounding::nearest>(value, UniformScale{s.inv}, args_.key,
                                                         offset_, number, 8);
      if (!s.keep) codes = make_uint4(0, 0, 0, 0);
      put(row, block, own == nullptr ? nullptr : own + 16 * b, codes);
    }
  }

  // bytes(tile): of the dither, of 16 values.
  template <class Bytes>
  __device__ __forceinline__ void write4(std::int64_t row, std::uint32_t amax, int piece,
                                         const std::uint32_t (&group)[2], const Bytes& bytes,
                                         const float (&v)[item], char* own) const {
    const float largest = __uint_as_float(amax);
    const bool finite = amax < 0x7f800000U, keeps = finite && largest >= 0x1p-100F;
    const std::uint32_t half = keeps ? bf16_up(__fdiv_rn(largest, 7.5F)) : (finite ? 0U : 0x7fc0U);
    const float scale = __uint_as_float(half << 16);
    if (piece == 0) args_.packed_scale[row] = static_cast<std::uint16_t>(half);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      std::uint32_t ratio = 0;
      uint2 codes[2] = {};
      if (keeps && group[g] != 0) {
        const float rho = __fdiv_rn(__fdiv_rn(__uint_as_float(group[g]), 7.5F), scale);
        ratio = ratio_byte(__float_as_uint(rho) + 0x7ffffU);
        const float unit = 256.0F * __fdiv_rn(1.0F, ratio_value(ratio) * scale);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          codes[t] = codes4(v, 32 * g + 16 * t, unit, bytes(2 * g + t));
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        put(row, 4 * piece + 2 * g + t, own == nullptr ? nullptr : own + 16 * g + 8 * t, codes[t]);
      }
      put_ratio(row, 2 * piece + g, ratio);
    }
  }

  __device__ __forceinline__ void write2(std::int64_t row, std::uint32_t amax, std::uint32_t most,
                                         int piece, const float (&group)[2],
                                         const std::uint32_t (&words)[2][2]) const {
    const bool finite = amax < 0x7f800000U;
    const bool keeps = finite && __uint_as_float(amax) >= 0x1p-100F;
    const std::uint32_t half =
        keeps ? bf16_nearest(__uint_as_float(most)) : (finite ? 0U : 0x7fc0U);
    if (piece == 0) args_.packed_scale[row] = static_cast<std::uint16_t>(half);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const std::uint32_t ratio = keeps ? nearest_ratio(group[g], __uint_as_float(half << 16)) : 0U;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        put(row, 4 * piece + 2 * g + t, nullptr, keeps ? words[g][t] : 0U);
      }
      put_ratio(row, 2 * piece + g, ratio);
    }
  }

 private:
  template <class Codes>
  __device__ __forceinline__ void put(std::int64_t row, int block, char* own,
                                      const Codes& codes) const {
    if (args_.dense && own != nullptr) {
      *reinterpret_cast<Codes*>(own) = codes;
    } else if (block < args_.blocks) {
      *reinterpret_cast<Codes*>(args_.codes + row * args_.row_bytes +
                                static_cast<int>(sizeof(Codes)) * block) = codes;
    }
  }
  __device__ __forceinline__ void put_ratio(std::int64_t row, int group,
                                            std::uint32_t ratio) const {
    if (2 * group < args_.blocks) {
      args_.ratios[row * args_.ratio_bytes + group] = static_cast<std::uint8_t>(ratio);
    }
  }

  const TokenRowsArgs& args_;
  DeviceOffset offset_;
};

// Values of a group: the last may have 16. 0: no group.
__device__ inline int group_values(const TokenRowsArgs& args, int group) {
  return min(max(16 * args.blocks - 32 * group, 0), 32);
}

__device__ void clear_gap(const TokenRowsArgs& args) {
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread < args.gap_bytes) args.gap[thread] = 0;
}

// ---- values of a piece -------------------------------------------------------------------------

// 16 values of a row times their features' factors. `plain`: those are signs alone, which 16-bit
// types take as they lie in memory.
template <class Tag>
__device__ __forceinline__ void apply_factors(unsigned (&words)[4 * Tag::size], const uint4& low,
                                              const uint4& high, bool plain, float (&v)[16]) {
  const std::uint32_t pair[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if constexpr (Tag::size == 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] ^= pair[i] & 0x80008000U;
  }
  Tag::unpack(words, v);
  if (Tag::size == 2 && plain) return;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t bits = i % 2 == 0 ? pair[i / 2] << 16 : pair[i / 2] & 0xffff0000U;
    v[i] *= __uint_as_float(Tag::size == 2 ? bits & 0x7fffffffU : bits);
  }
}

// Transforms a piece; the largest values of its two groups.
__device__ __forceinline__ void transform_item(float (&v)[item], int block,
                                               std::uint32_t (&group)[2]) {
  if (block == 64) {  // a path of its own moves no registers
    butterfly<1, 64>(v);
  } else {
    butterfly<1, 16>(v);
    if (block == 32) butterfly<16, 32>(v);
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    float largest = 0.0F;
#pragma unroll
    for (int i = 0; i < 32; ++i) largest = max_magnitude(largest, v[32 * g + i]);
    group[g] = abs_bits(largest);
  }
}

// Shared memory of a CTA: two buffers of rows, in pieces of 64 elements that start in different
// banks; factors; the dither of 16 rows.
using Layout = token::RowsLayout;

// A thread's place: a row of those that the CTA takes at a time, and a piece of it.
struct Place {
  int row, piece;
  unsigned lanes;  // of the warp, with the same row
};

// Copies rows to the two buffers of shared memory.
template <class Tag>
class RowCopies {
 public:
  __device__ RowCopies(const TokenRowsArgs& args, const Layout& layout, const Place& place,
                       char* memory)
      : args_(args), layout_(layout), memory_(memory) {
    piece_bytes_ = static_cast<int>(
        min(std::int64_t{item * Tag::size}, (args.x.cols - item * place.piece) * Tag::size));
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    vectors_ = static_cast<int>((args.x.cols * Tag::size + 15) / 16);
    if (!args.vectors || vectors_ == 0) return;
    step_rows_ = threads / vectors_;
    step_ = threads % vectors_;
    row_ = thread / vectors_;
    vector_ = thread % vectors_;
  }

  // Starts those of rows [row, row + rows), as far as they are real, to buffer `turn`.
  __device__ __forceinline__ void start(std::int64_t row, int rows, std::int64_t end,
                                        int turn) const {
    const int real = static_cast<int>(min(std::int64_t{rows}, end - row));
    char* const buffer = memory_ + turn * layout_.buffer;
    if (args_.flat) {
      copy_flat(row, real, buffer);
    } else if (args_.vectors) {
      copy_vectors(row, vectors_ == 0 ? 0 : real, buffer);
    } else {
      copy_elements(row, real, buffer);
    }
    commit_copies();
  }

  // Codes lay in a place whose last elements are past the last column: they are zeros again.
  __device__ __forceinline__ void clear(char* own, int code_bytes) const {
    for (int at = (max(piece_bytes_, 0) + 15) / 16 * 16; at < code_bytes; at += 16) {
      *reinterpret_cast<uint4*>(own + at) = make_uint4(0, 0, 0, 0);
    }
  }

 private:
  // A warp copies the pieces of its threads.
  __device__ __forceinline__ void copy_flat(std::int64_t row, int real, char* buffer) const {
    constexpr int vectors = item * Tag::size / 16, together = 32 / vectors;  // of a piece; pieces
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = static_cast<int>(threadIdx.x) - lane + lane / vectors;
    const int left = real * layout_.pieces - first;
    const char* const from = static_cast<const char*>(args_.x.data) +
                             row * args_.x.cols * Tag::size + first * item * Tag::size +
                             lane % vectors * 16;
    const unsigned to =
        shared_address(buffer) + static_cast<unsigned>(first * layout_.pitch + lane % vectors * 16);
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      copy_async_if(j * together < left, to + static_cast<unsigned>(j * together * layout_.pitch),
                    from + j * 512);
    }
  }

  __device__ __forceinline__ void copy_vectors(std::int64_t row, int real, char* buffer) const {
    constexpr int piece_vectors = item * Tag::size / 16;
    const std::int64_t row_bytes = args_.x.row_stride * Tag::size;
    const char* const from = static_cast<const char*>(args_.x.data) + row * row_bytes;
    const int last = static_cast<int>(args_.x.cols * Tag::size) - (vectors_ - 1) * 16;
    const unsigned to = shared_address(buffer);
    for (int r = row_, i = vector_; r < real;) {
      const int at =
          (r * layout_.pieces + i / piece_vectors) * layout_.pitch + i % piece_vectors * 16;
      copy_async(to + static_cast<unsigned>(at), from + r * row_bytes + i * 16,
                 i == vectors_ - 1 ? last : 16);
      r += step_rows_;
      i += step_;
      if (i >= vectors_) i -= vectors_, ++r;
    }
  }

  __device__ __forceinline__ void copy_elements(std::int64_t row, int real, char* buffer) const {
    for (int r = 0; r < real; ++r) {
      for (int c = static_cast<int>(threadIdx.x); c < args_.x.cols;
           c += static_cast<int>(blockDim.x)) {
        char* const to = buffer + (r * layout_.pieces + c / item) * layout_.pitch;
        const std::int64_t from = (row + r) * args_.x.row_stride + c * args_.x.col_stride;
        if constexpr (Tag::size == 4) {
          reinterpret_cast<unsigned*>(to)[c % item] =
              static_cast<const unsigned*>(args_.x.data)[from];
        } else {
          reinterpret_cast<std::uint16_t*>(to)[c % item] =
              static_cast<const std::uint16_t*>(args_.x.data)[from];
        }
      }
    }
  }

  const TokenRowsArgs& args_;
  const Layout& layout_;
  char* memory_;
  int piece_bytes_;  // of the thread's place that are in the array
  int vectors_, step_rows_ = 0, step_ = 0, row_ = 0, vector_ = 0;
};

// 64 values of a row times the factors of their features.
template <class Tag>
__device__ __forceinline__ void load_item(const char* from, const char* factors, bool plain,
                                          float (&v)[item]) {
#pragma unroll
  for (int i = 0; i < item; i += 16) {
    unsigned words[4 * Tag::size];
    load_words(from + i * Tag::size, words);
    const auto* const sixteen = reinterpret_cast<const uint4*>(factors + 2 * i);
    float part[16];
    apply_factors<Tag>(words, sixteen[0], sixteen[1], plain, part);
#pragma unroll
    for (int j = 0; j < 16; ++j) v[i + j] = part[j];
  }
}

// The column sums of a thread's vectors of 16 bytes.
template <class Tag>
struct ColumnSums {
  static constexpr int vector = 16 / Tag::size, piece_vectors = item / vector;
  static constexpr int most = max_column_vectors * Tag::size / 2;
  float total[most][vector] = {};

  __device__ __forceinline__ void add(const char* buffer, int rows, const Layout& layout) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
#pragma unroll
    for (int k = 0; k < most; ++k) {
      const int i = thread + k * threads;
      if (i >= layout.pieces * piece_vectors) break;
      const char* at = buffer + i / piece_vectors * layout.pitch + i % piece_vectors * 16;
#pragma unroll 2
      for (int r = 0; r < rows; ++r, at += layout.pieces * layout.pitch) {
        unsigned words[4];
        load_words(at, words);
        float v[vector];
        Tag::unpack(words, v);
#pragma unroll
        for (int j = 0; j < vector; ++j) total[k][j] += v[j];
      }
    }
  }

  __device__ __forceinline__ void store(float* to, std::int64_t cols) const {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
#pragma unroll
    for (int k = 0; k < most; ++k) {
      const std::int64_t col = std::int64_t{vector} * (thread + k * threads);
#pragma unroll
      for (int j = 0; j < vector; ++j) {
        if (col + j < cols) to[col + j] = total[k][j];
      }
    }
  }
};

// The largest value of a row, of all of its threads. `slots`: a word for each row, three times: one
// for this step, one that may still be read, one that is cleared.
class SlotMax {
 public:
  __device__ SlotMax(std::uint32_t* slots, int rows, const Place& place)
      : slots_(slots), rows_(rows), place_(place) {
    leader_ = static_cast<int>(threadIdx.x) % 32 == __ffs(static_cast<int>(place.lanes)) - 1;
  }
  __device__ void add(std::uint32_t v) {
    v = __reduce_max_sync(place_.lanes, v);
    if (leader_) atomicMax(slots_ + turn_ * rows_ + place_.row, v);
  }
  // After a barrier.
  __device__ std::uint32_t get() {
    const std::uint32_t v = slots_[turn_ * rows_ + place_.row];
    const int before = turn_ == 0 ? 2 : turn_ - 1;
    if (place_.piece == 0) slots_[before * rows_ + place_.row] = 0;
    turn_ = turn_ == 2 ? 0 : turn_ + 1;
    return v;
  }

 private:
  std::uint32_t* slots_;
  int rows_;
  Place place_;
  bool leader_;
  int turn_ = 0;
};

// `each`: bytes of a thread's codes, 16 to 64, which lie at the beginning of its place; a warp
// writes those of its threads whose rows lie one behind the other.
template <int each>
__device__ __forceinline__ void write_codes(std::uint8_t* to, const char* warp_places, int pitch,
                                            int items) {
  constexpr int vectors = each / 16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < vectors; ++j) {
    const int i = j * 32 + lane, of = i / vectors, part = i % vectors;
    if (of < items) {
      reinterpret_cast<uint4*>(to)[i] =
          *reinterpret_cast<const uint4*>(warp_places + of * pitch + part * 16);
    }
  }
}

template <Storage storage, bool sum, class Tag>
__global__ void __launch_bounds__(token::max_row_threads, Tag::size == 2 ? 2 : 1)
    token_rows_kernel(const __grid_constant__ TokenRowsArgs args) {
  extern __shared__ __align__(16) char memory[];
  __shared__ std::uint32_t slots[2][3 * token::max_rows];
  constexpr bool packed = storage != Storage::token8;
  begin_kernel();
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int blocks = args.blocks, rows = args.rows;
  const Layout layout(blocks, rows, Tag::size, packed);
  const int pieces = layout.pieces;
  char* const factors = memory + layout.factors;
  auto* const dither = reinterpret_cast<uint4*>(memory + layout.dither);
  const std::int64_t begin = std::int64_t{blockIdx.x} * args.cta_rows;
  const std::int64_t end = min(args.x.rows, begin + args.cta_rows);

  // Zeros past the last column, where no copy comes; then the first rows.
  for (int i = thread; i < layout.factors / 16; i += threads) {
    reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = thread; i < 6 * token::max_rows; i += threads) (&slots[0][0])[i] = 0;
  bool powers = false;
  for (int i = thread; i < 8 * pieces; i += threads) {
    uint4 eight = make_uint4(0x3f803f80U, 0x3f803f80U, 0x3f803f80U, 0x3f803f80U);
    if (i < 2 * blocks) eight = reinterpret_cast<const uint4*>(args.factors)[i];
    *reinterpret_cast<uint4*>(factors + i / 8 * token::factor_pitch + i % 8 * 16) = eight;
    powers = powers || ((eight.x ^ 0x3f803f80U) & 0x7fff7fffU) != 0 ||
             ((eight.y ^ 0x3f803f80U) & 0x7fff7fffU) != 0 ||
             ((eight.z ^ 0x3f803f80U) & 0x7fff7fffU) != 0 ||
             ((eight.w ^ 0x3f803f80U) & 0x7fff7fffU) != 0;
  }
  if constexpr (packed) clear_gap(args);
  const bool plain = __syncthreads_or(powers ? 1 : 0) == 0;

  // Threads past the last place stand at the first of a row of their own.
  const bool placed = thread < rows * pieces;
  const Place place{placed ? thread / pieces : rows, placed ? thread % pieces : 0,
                    __match_any_sync(0xffffffffU, placed ? thread / pieces : rows)};
  const RowCopies<Tag> copies(args, layout, place, memory);
  copies.start(begin, rows, end, 0);
  SlotMax row_max(slots[0], token::max_rows, place), most_of(slots[1], token::max_rows, place);
  const DeviceOffset offset = offset_of(args.key);
  const RowWriter<storage> writer(args, offset);
  const char* const own_factors = factors + place.piece * token::factor_pitch;
  [[maybe_unused]] ColumnSums<Tag> sums;
  [[maybe_unused]] std::int64_t drawn = begin / dither_tile;  // the next tile to be drawn
  unsigned number = 0;
#pragma unroll 1
  for (std::int64_t step = begin; step < end; step += rows, ++number) {
    const int turn = static_cast<int>(number % 2);
    char* const buffer = memory + turn * layout.buffer;
    wait_copies<0>();
    __syncthreads();  // also: the other buffer, the dither and the slots have been read
    if (step + rows < end) copies.start(step + rows, rows, end, turn ^ 1);
    if constexpr (packed) {
      // Rows of two tiles at most, of which one may have been drawn.
      for (; drawn <= (step + rows - 1) / dither_tile; ++drawn) {
        for (int i = thread; i < blocks; i += threads) {
          const RandomWords draw =
              random_words(args.key, offset, static_cast<std::uint64_t>(drawn * blocks + i));
          dither[drawn % 2 * blocks + i] =
              make_uint4(draw.word[0], draw.word[1], draw.word[2], draw.word[3]);
        }
      }
    }
    const std::int64_t row = step + place.row;
    const bool real = placed && row < end;
    char* const own = buffer + thread * layout.pitch;
    float v[item];
    std::uint32_t group[2] = {};
    if (placed) {
      load_item<Tag>(own, own_factors, plain, v);
      transform_item(v, args.block, group);
    }
    row_max.add(max(group[0], group[1]));
    if constexpr (sum) {
      sums.add(buffer, static_cast<int>(min(std::int64_t{rows}, end - step)), layout);
    }
    __syncthreads();
    const std::uint32_t amax = row_max.get();
    const auto bytes = [&](int tile) {
      const int block = min(4 * place.piece + tile, blocks - 1);
      const auto tile_row = static_cast<int>(row / dither_tile % 2) * blocks;
      return std::uint32_t{reinterpret_cast<const std::uint8_t*>(
          dither)[16 * (tile_row + block) + static_cast<int>(row % dither_tile)]};
    };
    if constexpr (storage == Storage::token2) {
      float scale[2] = {};
      std::uint32_t words[2][2] = {};
      if (placed) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          const std::uint32_t both[2] = {bytes(2 * g), bytes(2 * g + 1)};
          scale[g] =
              codes2(v, 32 * g, group[g], group_values(args, 2 * place.piece + g), both, words[g]);
        }
      }
      const std::uint32_t most = max(__float_as_uint(scale[0]), __float_as_uint(scale[1]));
      most_of.add(amax < 0x7f800000U ? most : 0U);
      __syncthreads();
      const std::uint32_t largest = most_of.get();
      if (real) writer.write2(row, amax, largest, place.piece, scale, words);
    } else if constexpr (storage == Storage::token4) {
      if (real) writer.write4(row, amax, place.piece, group, bytes, v, own);
    } else {
      if (real) writer.write8(row, amax, place.piece, v, own);
    }
    if constexpr (storage != Storage::token2) {
      if (args.dense) {
        constexpr int each = storage == Storage::token8 ? 64 : 32;
        const int first = thread & ~31;
        const auto items = static_cast<int>(min(std::int64_t{rows}, end - step)) * pieces - first;
        write_codes<each>(args.codes + (step * pieces + first) * each,
                          buffer + first * layout.pitch, layout.pitch, items);
        __syncwarp();
        if (placed) copies.clear(own, each);
      }
    }
  }
  if constexpr (sum) sums.store(args.sums + std::int64_t{blockIdx.x} * args.x.cols, args.x.cols);
}

// A CTA a row, a thread some of its pieces, which it makes twice.
template <Storage storage, class Tag>
__global__ void __launch_bounds__(token::max_row_threads)
    token_long_rows_kernel(const __grid_constant__ TokenRowsArgs args) {
  __shared__ std::uint32_t shared[token::max_row_threads / 32];
  begin_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (storage != Storage::token8) clear_gap(args);
  const DeviceOffset offset = offset_of(args.key);
  const RowWriter<storage> writer(args, offset);
  const std::int64_t row = blockIdx.x;
  // Calls visit(piece, v, group) for the thread's pieces.
  const auto visit_pieces = [&](const auto& visit) {
#pragma unroll 1
    for (int piece = thread; 4 * piece < args.blocks; piece += token::max_row_threads) {
      float v[item];
#pragma unroll
      for (int i = 0; i < item; ++i) {
        const std::int64_t col = std::int64_t{item} * piece + i;
        v[i] = 0.0F;
        if (col >= args.x.cols) continue;
        v[i] = Tag::load(args.x.data, row * args.x.row_stride + col * args.x.col_stride) *
               __uint_as_float(std::uint32_t{args.factors[col]} << 16);
      }
      std::uint32_t group[2];
      transform_item(v, args.block, group);
      visit(piece, v, group);
    }
  };
  const auto byte_at = [&](int piece, int tile) {
    const int block = min(4 * piece + tile, args.blocks - 1);
    const RandomWords draw = random_words(
        args.key, offset, static_cast<std::uint64_t>(row / dither_tile * args.blocks + block));
    return random_byte(draw, static_cast<int>(row % dither_tile));
  };
  const auto quantize2 = [&](int piece, const float (&v)[item], const std::uint32_t (&group)[2],
                             float (&scale)[2], std::uint32_t (&words)[2][2]) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const std::uint32_t both[2] = {byte_at(piece, 2 * g), byte_at(piece, 2 * g + 1)};
      scale[g] = codes2(v, 32 * g, group[g], group_values(args, 2 * piece + g), both, words[g]);
    }
  };
  std::uint32_t amax = 0;
  [[maybe_unused]] std::uint32_t most = 0;
  visit_pieces([&](int piece, const float (&v)[item], const std::uint32_t (&group)[2]) {
    amax = max(amax, max(group[0], group[1]));
    if constexpr (storage == Storage::token2) {
      float scale[2];
      std::uint32_t words[2][2];
      quantize2(piece, v, group, scale, words);
      for (int g = 0; g < 2; ++g) {
        if (group[g] < 0x7f800000U) most = max(most, __float_as_uint(scale[g]));
      }
    }
  });
  amax = block_max(amax, shared);
  if constexpr (storage == Storage::token2)
    most = block_max(amax < 0x7f800000U ? most : 0U, shared);
  visit_pieces([&](int piece, const float (&v)[item], const std::uint32_t (&group)[2]) {
    if constexpr (storage == Storage::token8) {
      writer.write8(row, amax, piece, v, nullptr);
    } else if constexpr (storage == Storage::token4) {
      writer.write4(
          row, amax, piece, group, [&](int tile) { return byte_at(piece, tile); }, v, nullptr);
    } else {
      float scale[2];
      std::uint32_t words[2][2];
      quantize2(piece, v, group, scale, words);
      writer.write2(row, amax, most, piece, scale, words);
    }
  });
}

using KernelOf = void (*)(TokenRowsArgs);

template <Storage storage, class Tag>
KernelOf kernel_of(bool in_registers, bool sum) {
  if (!in_registers) return token_long_rows_kernel<storage, Tag>;
  if constexpr (storage == Storage::token8) {
    if (sum) return token_rows_kernel<storage, true, Tag>;
  }
  return token_rows_kernel<storage, false, Tag>;
}

void launch_rows(const char* stage, const Context& context, const plan::Step& step,
                 TokenRowsArgs args, Storage storage) {
  const auto& work = step.as<plan::TokenRowsStep>();
  const int each = storage == Storage::token8 ? 64 : storage == Storage::token4 ? 32 : 16;
  args.rows = work.rows;
  args.cta_rows = work.cta_rows;
  args.vectors = rows_aligned(args.x);
  args.flat = args.vectors && args.x.cols > 0 && args.x.cols % item == 0 &&
              args.x.row_stride == args.x.cols;
  args.dense = args.blocks > 0 && args.row_bytes == ceil_div(args.blocks, 4) * each;
  host_with_dtype(step.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    const bool in_registers = work.rows > 0, sum = args.sums != nullptr;
    const KernelOf kernel =
        storage == Storage::token4   ? kernel_of<Storage::token4, Tag>(in_registers, sum)
        : storage == Storage::token2 ? kernel_of<Storage::token2, Tag>(in_registers, sum)
                                     : kernel_of<Storage::token8, Tag>(in_registers, sum);
    launch(stage, context, kernel, step.shape, args);
  });
}

}  // namespace

void launch_token_rows(const Context& context, const plan::Step& step, const RowsJob& job,
                       float* sums) {
  TokenRowsArgs args{};
  args.x = job.x;
  args.factors = reinterpret_cast<const std::uint16_t*>(job.factors);
  args.block = job.hadamard_block;
  args.blocks = static_cast<int>(job.out.k_padded / 16);
  args.stochastic = job.quant.rounding == Rounding::stochastic;
  args.key = device_key(context.key(), job.quant.purpose);
  args.codes = reinterpret_cast<std::uint8_t*>(job.out.codes);
  args.scale = job.out.scale;
  args.row_bytes = job.out.k_padded;
  args.sums = sums;
  launch_rows(step.as<plan::TokenRowsStep>().of == plan::RowsOf::gy ? "backward_linear"
                                                                    : "compress_activation",
              context, step, args, Storage::token8);
}

void launch_kept_tokens(const Context& context, const plan::Step& step, const CompressJob& job,
                        const float* factors) {
  const TokenCodesOut& out = *job.tokens;
  const TokenCodesLayout& layout = out.layout;
  if (out.storage == Storage::token8) {
    const Operand codes{reinterpret_cast<std::int8_t*>(out.data),
                        reinterpret_cast<float*>(out.scales()), layout.tokens, layout.padded,
                        layout.tokens};
    return launch_token_rows(
        context, step, {job.x, layout.block, activation_quant(job.spec), codes, factors}, nullptr);
  }
  TokenRowsArgs args{};
  args.x = job.x;
  args.factors = reinterpret_cast<const std::uint16_t*>(factors);
  args.block = layout.block;
  args.blocks = static_cast<int>(layout.padded / 16);
  args.key = device_key(context.key(), Purpose::activation);
  args.codes = out.data;
  args.row_bytes = layout.row_bytes;
  args.ratio_bytes = layout.ratio_bytes;
  args.ratios = out.data + layout.ratio_offset;
  args.packed_scale = reinterpret_cast<std::uint16_t*>(out.scales());
  const std::size_t ratios_end =
      layout.ratio_offset + static_cast<std::size_t>(layout.tokens * layout.ratio_bytes);
  args.gap = out.data + ratios_end;
  args.gap_bytes = static_cast<int>(layout.scale_offset - ratios_end);
  launch_rows("compress_activation", context, step, args, out.storage);
}

}  // namespace hot::detail
