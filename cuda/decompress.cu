// Stage: x as it was kept (basis full), back to floats.
//
// decompress_kernel
//   A CTA takes 64 channels of a group of 64 tokens. Codes are contiguous along the
//   tokens: four threads read a channel, whole sectors of 32 bytes, into shared memory. Rows
//   of the result are contiguous along the channels: a warp takes a word of each of the 64 channels
//   there (8 INT4 or 4 INT8 tokens, two channels a lane) and writes whole rows of 64 elements, in
//   pairs where those are aligned. 0.53 (INT4) or 1 byte read for an element, 4 or 2 written.
//
// decompress_rotated_kernel: of rht2.
//   A thread takes the 64 tokens of a block of one channel in registers, as rotate_kernel does. A
//   range that begins inside a block takes all of it. 0.53 or 0.28 bytes read for an element.
//
// decompress_tokens_kernel: of the token storages.
//   A lane takes 16 features of 16 tokens, one after the other, as token_rows_kernel does: the
//   factors of the features and the dither stay in registers. 0.53 bytes read for 4 bits.
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/device/packed_codes.cuh"
#include "cuda/device/token_codes.cuh"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

constexpr int tile_channels = 64, threads = 256, warps = threads / 32;
constexpr int readers = threads / tile_channels;  // threads that read a channel
static_assert(int4_group == 64 && readers == 4);

struct DecompressArgs {
  const void* codes;
  std::int64_t row_bytes;
  const void* scale;
  std::int64_t scale_step;
  std::int64_t first;
  MatrixOut out;
  const std::uint8_t* exponents;  // of all tokens, or null
  bool pairs;                     // rows of `out` can be written by pairs of neighbouring columns
};

// 2 to the exponent of a token, by which it was divided before it was kept.
__device__ float token_size(const std::uint8_t* exponents, std::int64_t token) {
  return __uint_as_float(unsigned{exponents[token]} << 23);
}

// Two neighbouring elements, aligned as one.
template <class Tag>
__device__ void store_pair(const MatrixOut& out, std::int64_t row, std::int64_t col,
                           const float (&v)[2]) {
  void* const to = static_cast<char*>(out.data) + (row * out.row_stride + col) * Tag::size;
  if constexpr (Tag::size == 4) {
    *static_cast<float2*>(to) = make_float2(v[0], v[1]);
  } else {
    unsigned word[1];
    Tag::pack(v, word);
    *static_cast<unsigned*>(to) = word[0];
  }
}

template <bool int4, class Tag>
__global__ void __launch_bounds__(threads)
    decompress_kernel(const __grid_constant__ DecompressArgs args) {
  constexpr int word_tokens = int4 ? 8 : 4;
  constexpr int words = int4_group / word_tokens;  // of a channel
  constexpr int reader_words = words / readers;    // 8 or 16 bytes
  constexpr int pitch = words + 1;                 // odd: channels of a warp in different banks
  __shared__ unsigned tile[tile_channels * pitch];
  begin_kernel();
  const MatrixOut& out = args.out;
  const std::int64_t tiles = (out.cols + tile_channels - 1) / tile_channels;
  const std::int64_t first_channel = blockIdx.x % tiles * tile_channels;
  const std::int64_t group = args.first / int4_group + blockIdx.x / tiles;
  const int thread = static_cast<int>(threadIdx.x);
  {
    const int channel = thread / readers, reader = thread % readers;
    const std::int64_t at = group * words * 4 + reader * reader_words * 4;  // bytes of the row
    if (first_channel + channel < out.cols && at < args.row_bytes) {
      const char* const from =
          static_cast<const char*>(args.codes) + (first_channel + channel) * args.row_bytes + at;
      unsigned word[reader_words];
      load_words(from, word);
#pragma unroll
      for (int i = 0; i < reader_words; ++i)
        tile[channel * pitch + reader * reader_words + i] = word[i];
    }
  }
  __syncthreads();
  const int lane = thread % 32;
  const int channel[2] = {args.pairs ? 2 * lane : lane, args.pairs ? 2 * lane + 1 : lane + 32};
  bool there[2];
  float scale[2] = {0.0F, 0.0F};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const std::int64_t global = first_channel + channel[c];
    there[c] = global < out.cols;
    if (!there[c]) continue;
    const std::int64_t at = global * args.scale_step;
    if constexpr (int4) {
      const unsigned half = static_cast<const std::uint16_t*>(args.scale)[at + group];
      scale[c] = __uint_as_float(half << 16);
    } else {
      scale[c] = static_cast<const float*>(args.scale)[at];
    }
  }
  for (int w = thread / 32; w < words; w += warps) {
    // Past the last channel the tile is undefined, and nothing is stored.
    const unsigned word[2] = {tile[channel[0] * pitch + w], tile[channel[1] * pitch + w]};
#pragma unroll
    for (int t = 0; t < word_tokens; ++t) {
      const std::int64_t row = group * int4_group + w * word_tokens + t - args.first;
      if (row < 0 || row >= out.rows) continue;
      float v[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        constexpr int bits = 32 / word_tokens;
        // To the top, then back with its sign.
        const int code = static_cast<int>(word[c] << (32 - bits * (t + 1))) >> (32 - bits);
        v[c] = static_cast<float>(code) * scale[c];
        if (args.exponents != nullptr) v[c] *= token_size(args.exponents, row + args.first);
      }
      if (args.pairs) {
        if (there[1]) store_pair<Tag>(out, row, first_channel + channel[0], v);
        continue;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (there[c]) {
          Tag::store(out.data, row * out.row_stride + (first_channel + channel[c]) * out.col_stride,
                     v[c]);
        }
      }
    }
  }
}

struct DecompressRotatedArgs {
  const std::uint8_t* codes;
  std::int64_t row_bytes;
  const std::uint16_t* scale;
  std::int64_t scale_step;
  std::int64_t first;
  MatrixOut out;
  const std::uint8_t* exponents;  // of all tokens, or null
  DeviceKey signs, dither;
};

template <class Tag>
__global__ void __launch_bounds__(rotated::threads)
    decompress_rotated_kernel(const __grid_constant__ DecompressRotatedArgs args) {
  constexpr int block = static_cast<int>(rotated_block);
  __shared__ uint4 turned[block / 16];         // 255 - u of the rows
  __shared__ __align__(16) float sign[block];  // divided by 64
  __shared__ __align__(16) float size[block];  // of the tokens
  begin_kernel();
  const MatrixOut& out = args.out;
  const auto tiles = static_cast<unsigned>((out.cols + rotated::threads - 1) / rotated::threads);
  const std::int64_t number = args.first / block + blockIdx.x / tiles;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t channel = std::int64_t{blockIdx.x % tiles} * rotated::threads + thread;
  // Tokens of the block that are wanted.
  const auto begin = static_cast<int>(max(std::int64_t{0}, args.first - number * block));
  const auto end =
      static_cast<int>(min(std::int64_t{block}, args.first + out.rows - number * block));
  if (thread < block) {
    const std::uint64_t negative =
        rotation_signs(args.signs, offset_of(args.signs), static_cast<std::uint64_t>(number));
    sign[thread] = (negative >> thread & 1U) != 0 ? -0x1p-6F : 0x1p-6F;
    size[thread] = args.exponents != nullptr && thread >= begin && thread < end
                       ? token_size(args.exponents, number * block + thread)
                       : 1.0F;
  } else if (thread < block + block / 16) {
    const int part = thread - block;
    const RandomWords u = random_words(args.dither, offset_of(args.dither),
                                       static_cast<std::uint64_t>(number * (block / 16) + part));
    turned[part] = make_uint4(~u.word[0], ~u.word[1], ~u.word[2], ~u.word[3]);
  }
  __syncthreads();
  if (channel >= out.cols) return;
  unsigned words[block / 16];
  load_words(args.codes + channel * args.row_bytes + number * (block / 4), words);
  const unsigned half = args.scale[channel * args.scale_step + number];
  const float scale = __uint_as_float(half << 16);
  float v[block];
#pragma unroll
  for (int part = 0; part < block / 16; ++part) {
    const RotatedCodes codes{words[part], turned[part]};
#pragma unroll
    for (int i = 0; i < 16; ++i) v[16 * part + i] = codes.value(i) * scale;
  }
  butterfly<1, block>(v);
#pragma unroll
  for (int t = 0; t < block; ++t) {
    if (t < begin || t >= end) continue;
    const std::int64_t row = number * block + t - args.first;
    Tag::store(out.data, row * out.row_stride + channel * out.col_stride, v[t] * sign[t] * size[t]);
  }
}

struct DecompressTokensArgs {
  const std::uint8_t* codes;
  std::int64_t row_bytes;
  const std::uint8_t* ratios;
  std::int64_t ratio_bytes;
  const void* scale;
  const std::uint8_t* exponents;
  int block, blocks;  // of the transform; of 16 features
  std::int64_t first;
  MatrixOut out;
  bool aligned;
  DeviceKey signs, dither;
};

template <Storage storage, class Tag>
__global__ void __launch_bounds__(rotated::threads)
    decompress_tokens_kernel(const __grid_constant__ DecompressTokensArgs args) {
  begin_kernel();
  const MatrixOut& out = args.out;
  const auto chunks =
      static_cast<unsigned>((args.blocks + rotated::threads - 1) / rotated::threads);
  const int block =
      static_cast<int>(blockIdx.x % chunks) * rotated::threads + static_cast<int>(threadIdx.x);
  const bool live = block < args.blocks;
  const int col = 16 * block;
  const std::int64_t token_tile = args.first / dither_tile + blockIdx.x / chunks;
  float factor[16];
  const std::uint64_t negative =
      rotation_signs(args.signs, offset_of(args.signs), static_cast<std::uint64_t>(block / 4)) >>
      (block % 4 * 16);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned exponent = col + i < out.cols ? args.exponents[col + i] : 127U;
    const auto sign = static_cast<unsigned>(negative >> i & 1U);
    factor[i] = __uint_as_float(sign << 31 | exponent << 23) *
                __fdiv_rn(1.0F, static_cast<float>(args.block));
  }
  RandomWords draw{};
  if constexpr (storage != Storage::token8) {
    draw = random_words(args.dither, offset_of(args.dither),
                        static_cast<std::uint64_t>(token_tile * args.blocks + block));
  }
  for (int t = 0; t < dither_tile; ++t) {
    const std::int64_t token = token_tile * dither_tile + t, row = token - args.first;
    if (row < 0 || row >= out.rows) continue;
    float v[16] = {};
    if (live) {
      const std::uint8_t* const from = args.codes + token * args.row_bytes;
      if constexpr (storage == Storage::token8) {
        const float scale = static_cast<const float*>(args.scale)[token];
        unsigned words[4];
        load_words(from + col, words);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          v[i] = static_cast<float>(static_cast<int>(words[i / 4] << (24 - 8 * (i % 4))) >> 24) *
                 scale;
        }
      } else {
        const std::uint32_t half = static_cast<const std::uint16_t*>(args.scale)[token];
        const float step = ratio_value(args.ratios[token * args.ratio_bytes + block / 2]) *
                           __uint_as_float(half << 16);
        const std::uint32_t byte = random_byte(draw, t);
        std::uint32_t words[2];
        if constexpr (storage == Storage::token4) {
          load_words(from + col / 2, words);
        } else {
          words[0] = *reinterpret_cast<const std::uint32_t*>(from + col / 4);
          words[1] = words[0] >> 16;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          octet_values<storage>(words[half], byte, half, step, v + 8 * half);
        }
      }
    }
    transform16(v, args.block, threadIdx.x % 32);
    if (!live) continue;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= factor[i];
    if (args.aligned && col + 16 <= out.cols) {
      unsigned words[4 * Tag::size];
      Tag::pack(v, words);
      store_words(words, static_cast<char*>(out.data) + (row * out.row_stride + col) * Tag::size);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (col + i < out.cols) {
        Tag::store(out.data, row * out.row_stride + (col + i) * out.col_stride, v[i]);
      }
    }
  }
}

void decompress_tokens(const Context& context, const DecompressJob& job) {
  const MatrixOut& out = job.out;
  const TokenCodesIn& x = *job.tokens;
  const TokenCodesLayout& layout = x.layout;
  const DecompressTokensArgs args{
      x.data,
      layout.row_bytes,
      x.data + layout.ratio_offset,
      layout.ratio_bytes,
      x.scales(),
      x.exponents(),
      layout.block,
      static_cast<int>(layout.padded / 16),
      job.first,
      out,
      rows_aligned({out.data, out.dtype, out.rows, out.cols, out.row_stride, out.col_stride}),
      device_key(in_signs_key(x.storage, job.key), Purpose::signs),
      device_key(job.key, Purpose::activation)};
  const std::int64_t tiles = ceil_div(job.first + out.rows, dither_tile) - job.first / dither_tile;
  const LaunchShape shape{ceil_div(args.blocks, rotated::threads) * tiles, rotated::threads};
  host_with_dtype(out.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    launch("decompress_activation", context,
           x.storage == Storage::token8   ? decompress_tokens_kernel<Storage::token8, Tag>
           : x.storage == Storage::token4 ? decompress_tokens_kernel<Storage::token4, Tag>
                                          : decompress_tokens_kernel<Storage::token2, Tag>,
           shape, args);
  });
}

// Whether every row can be written by pairs of neighbouring columns.
bool pairs_aligned(const MatrixOut& out) {
  return detail::pairs_aligned(
      MatrixIn{out.data, out.dtype, out.rows, out.cols, out.row_stride, out.col_stride});
}

void decompress_rotated(const Context& context, const DecompressJob& job) {
  const MatrixOut& out = job.out;
  const DecompressRotatedArgs args{static_cast<const std::uint8_t*>(job.codes),
                                   job.row_bytes,
                                   static_cast<const std::uint16_t*>(job.scale),
                                   job.scale_step,
                                   job.first,
                                   out,
                                   job.exponents,
                                   device_key(job.key, Purpose::signs),
                                   device_key(job.key, Purpose::activation)};
  const std::int64_t blocks =
      ceil_div(job.first + out.rows, rotated_block) - job.first / rotated_block;
  const LaunchShape shape{ceil_div(out.cols, rotated::threads) * blocks, rotated::threads};
  host_with_dtype(out.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    launch("decompress_activation", context, decompress_rotated_kernel<Tag>, shape, args);
  });
}

}  // namespace

void CudaBackend::decompress(const Context& context, const DecompressJob& job) const {
  const DeviceGuard guard(context.device().index, "decompress_activation");
  if (job.tokens) return decompress_tokens(context, job);
  if (job.storage == Storage::rht2) return decompress_rotated(context, job);
  const MatrixOut& out = job.out;
  const DecompressArgs args{job.codes, job.row_bytes, job.scale,     job.scale_step,
                            job.first, out,           job.exponents, pairs_aligned(out)};
  const std::int64_t groups = ceil_div(job.first + out.rows, int4_group) - job.first / int4_group;
  const LaunchShape shape{ceil_div(out.cols, tile_channels) * groups, threads};
  host_with_dtype(out.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    launch(
        "decompress_activation", context,
        job.storage == Storage::int4 ? decompress_kernel<true, Tag> : decompress_kernel<false, Tag>,
        shape, args);
  });
}

}  // namespace hot::detail
