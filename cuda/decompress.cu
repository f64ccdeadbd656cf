// Stage: saved x (basis full) back to floats.
//
// decompress_kernel
//   A CTA takes 64 channels of a group of 64 tokens. Codes are contiguous along the tokens. Four
//   threads copy a channel to shared memory in whole sectors of 32 bytes. Rows of the result are
//   contiguous along the channels. A warp reads a word of each of the 64 channels (8 INT4 or 4 INT8
//   tokens), two channels per lane. It writes whole rows of 64 elements, in pairs if those are
//   aligned. Traffic per element: 0.53 (INT4) or 1 byte read, 4 or 2 written.
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/matrix_io.cuh"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

constexpr int tile_channels = 64, threads = 256, warps = threads / 32;
constexpr int readers = threads / tile_channels;  // threads that read a channel
static_assert(int4_group == 64 && readers == 4);

struct DecompressArgs : DecompressJob {
  bool pairs;  // rows of `out` can be written as pairs of neighbouring columns
};

// Power of two by which a token was divided before it was saved.
__device__ float token_size(const std::uint8_t* exponents, std::int64_t token) {
  return __uint_as_float(unsigned{exponents[token]} << 23);
}

// Stores two neighbouring elements, aligned as a pair.
template <class Tag>
__device__ void store_pair(const MatrixOut& out, std::int64_t row, std::int64_t col,
                           const float (&v)[2]) {
  unsigned words[Tag::size / 2];
  Tag::pack(v, words);
  store_words(words, static_cast<char*>(out.data) + (row * out.row_stride + col) * Tag::size);
}

template <bool int4, class Tag>
__global__ void __launch_bounds__(threads)
    decompress_kernel(const __grid_constant__ DecompressArgs args) {
  constexpr int word_tokens = int4 ? 8 : 4;
  constexpr int words = int4_group / word_tokens;  // per channel
  constexpr int reader_words = words / readers;    // 8 or 16 bytes
  constexpr int pitch = words + 1;                 // odd, so that channels use different banks
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
    // Beyond the last channel the tile is undefined and nothing is stored.
    const unsigned word[2] = {tile[channel[0] * pitch + w], tile[channel[1] * pitch + w]};
#pragma unroll
    for (int t = 0; t < word_tokens; ++t) {
      const std::int64_t row = group * int4_group + w * word_tokens + t - args.first;
      if (row < 0 || row >= out.rows) continue;
      float v[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        constexpr int bits = 32 / word_tokens;
        // Shifts the code to the top, then back with its sign.
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

}  // namespace

void CudaBackend::decompress(const Context& context, const DecompressJob& job) const {
  const DeviceGuard guard(context.device().index, "decompress_activation");
  const MatrixOut& out = job.out;
  const bool pairs = out.col_stride == 1 && out.cols % 2 == 0 && out.row_stride % 2 == 0 &&
                     reinterpret_cast<std::uintptr_t>(out.data) % (2 * dtype_size(out.dtype)) == 0;
  const std::int64_t groups = ceil_div(job.first + out.rows, int4_group) - job.first / int4_group;
  const LaunchShape shape{ceil_div(out.cols, tile_channels) * groups, threads};
  with_dtype(out.dtype, [&](auto tag) {
    using Tag = decltype(tag);
    launch(
        "decompress_activation", context,
        job.storage == Storage::int4 ? decompress_kernel<true, Tag> : decompress_kernel<false, Tag>,
        shape, DecompressArgs{job, pairs});
  });
}

}  // namespace hot::detail
