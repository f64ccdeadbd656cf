// Stage: vectors as INT8 codes of transformed blocks of 64 values, and their sum over processes.
//
// Both kernels: a lane has 16 values of a block in registers, four lanes a block. CTAs do not cross
// parts.
//
// encode_blocks_kernel
//   Traffic per value: 2 or 4 bytes read, 1.06 written, with 25 instructions.
//
// sum_blocks_kernel
//   A lane adds the ranks in order and loads four of them at a time. A code's byte becomes the
//   mantissa of 2^23 + code + 128, since conversions run at a fraction of the rate. Traffic per
//   value: 1.06 bytes read per rank, 2 or 4 written, with 4 instructions per rank.
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/device/begin_kernel.cuh"
#include "cuda/device/butterfly.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rounding.cuh"
#include "cuda/device/vec_io.cuh"
#include "cuda/launch.h"

namespace hot::detail {
namespace {

constexpr int threads = 256, chunk = 16;
constexpr int lanes = BlockParts::block / chunk, cta_blocks = threads / lanes;
constexpr int batch = 4;  // ranks whose codes are loaded together

struct EncodeArgs : EncodeBlocksJob {
  DeviceKey key;
  unsigned part_ctas;
  bool aligned;  // codes can be written in pieces of 16 bytes
};
struct SumArgs : SumBlocksJob {
  unsigned part_ctas;
  bool aligned;  // codes can be read in pieces of 16 bytes
};

// Chunk of a thread: 16 values of a block.
struct Chunk {
  std::int64_t part, at, first;  // its part, its number in the part, its first value in the vector
  std::int64_t left;             // values of the part from `first` on; 0 or less: only zeros
  bool real;                     // whether its block exists
};
__device__ inline Chunk thread_chunk(const BlockParts& parts, unsigned part_ctas) {
  const unsigned part = blockIdx.x / part_ctas;
  Chunk c{};
  c.part = part;
  c.at = std::int64_t{blockIdx.x - part * part_ctas} * threads + threadIdx.x;
  c.first = c.part * parts.size + c.at * chunk;
  c.left = min(parts.values, (c.part + 1) * parts.size) - c.first;
  c.real = c.at < parts.blocks * lanes;
  return c;
}

__device__ inline bool is_aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

template <class Tag, Rounding rounding>
__global__ void __launch_bounds__(threads)
    encode_blocks_kernel(const __grid_constant__ EncodeArgs args) {
  begin_kernel();
  const Chunk c = thread_chunk(args.parts, args.part_ctas);
  const char* const from = static_cast<const char*>(args.x) + c.first * Tag::size;
  float v[chunk] = {};
  if (c.left >= chunk && is_aligned(from)) {
    unsigned words[chunk / 4 * Tag::size];
    load_words(from, words);
    Tag::unpack(words, v);
  } else {
#pragma unroll
    for (int j = 0; j < chunk; ++j) {
      if (j < c.left) v[j] = Tag::load(from, j);
    }
  }
  const DeviceOffset offset = warp_offset<rounding>(args.key);
  butterfly<1, chunk>(v);
  butterfly_lanes<lanes>(v, threadIdx.x % 32);
  float largest = 0.0F;
#pragma unroll
  for (const float value : v) largest = max_magnitude(largest, value);
  const DeviceScale s = device_scale(lanes_max(abs_bits(largest), lanes), 8);
  DeviceKey key = args.key;
  key.stream_purpose += static_cast<std::uint32_t>(c.part) * stream_step;
  const uint4 codes = round_group<rounding>([&](int j) { return v[j]; }, UniformScale{s.inv}, key,
                                            offset, static_cast<std::uint64_t>(c.at), 8);
  if (!c.real) return;
  std::int8_t* const wire = args.wire + c.part * args.parts.bytes();
  unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (unsigned& word : words) word = s.keep ? word : 0;
  if (args.aligned) {
    store_words(words, wire + c.at * chunk);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) reinterpret_cast<unsigned*>(wire + c.at * chunk)[w] = words[w];
  }
  if (c.at % lanes == 0) {
    reinterpret_cast<float*>(wire + args.parts.blocks * BlockParts::block)[c.at / lanes] = s.scale;
  }
}

// Adds the codes of all ranks to a chunk.
template <bool aligned>
__device__ __forceinline__ void add_ranks(const SumArgs& args, const Chunk& c, float (&v)[chunk]) {
  const BlockParts& parts = args.parts;
  const std::int8_t* wire = args.wire + c.part * parts.bytes();
  const std::int64_t codes = c.at * chunk;
  const std::int64_t scale = parts.blocks * BlockParts::block + c.at / lanes * 4;
  const std::int64_t step = parts.count * parts.bytes();
#pragma unroll 1
  for (std::int64_t left = args.ranks; left > 0; left -= batch, wire += batch * step) {
    unsigned words[batch][4];
    float scales[batch];
#pragma unroll
    for (int r = 0; r < batch; ++r) {
      if (r >= left) continue;
      const std::int8_t* const from = wire + r * step;
      if constexpr (aligned) {
        load_words(from + codes, words[r]);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          words[r][w] = reinterpret_cast<const unsigned*>(from + codes)[w];
        }
      }
      scales[r] = *reinterpret_cast<const float*>(from + scale);
    }
#pragma unroll
    for (int r = 0; r < batch; ++r) {
      if (r >= left) continue;
#pragma unroll
      for (int j = 0; j < chunk; ++j) {
        const unsigned bits = __byte_perm(words[r][j / 4] ^ 0x80808080U, 0x4b000000U,
                                          0x7440U | static_cast<unsigned>(j % 4));
        v[j] += (__uint_as_float(bits) - 8388736.0F) * scales[r];  // the difference is exact
      }
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(threads) sum_blocks_kernel(const __grid_constant__ SumArgs args) {
  begin_kernel();
  const Chunk c = thread_chunk(args.parts, args.part_ctas);
  float v[chunk];
#pragma unroll
  for (float& value : v) value = -0.0F;  // -0 + a = a, also for a = -0
  if (c.real) {
    if (args.aligned) {
      add_ranks<true>(args, c, v);
    } else {
      add_ranks<false>(args, c, v);
    }
  }
  butterfly<1, chunk>(v);
  butterfly_lanes<lanes>(v, threadIdx.x % 32);
#pragma unroll
  for (float& value : v) value *= args.factor;
  char* const to = static_cast<char*>(args.out) + c.first * Tag::size;
  if (c.left >= chunk && is_aligned(to)) {
    unsigned words[chunk / 4 * Tag::size];
    Tag::pack(v, words);
    store_words(words, to);
  } else {
#pragma unroll
    for (int j = 0; j < chunk; ++j) {
      if (j < c.left) Tag::store(to, j, v[j]);
    }
  }
}

// CTAs of a part. The launch refuses a grid that is too large, so 32 bits suffice for others.
std::int64_t part_ctas(const BlockParts& parts) { return ceil_div(parts.blocks, cta_blocks); }

// Whether each part of a wire is aligned to 16 bytes.
bool parts_aligned(const void* wire, std::int64_t count, const BlockParts& parts) {
  return reinterpret_cast<std::uintptr_t>(wire) % 16 == 0 &&
         (count == 1 || parts.bytes() % 16 == 0);
}

}  // namespace

void CudaBackend::encode_blocks(const Context& context, const EncodeBlocksJob& job) const {
  const char* const stage = "encode_blocks";
  const DeviceGuard guard(context.device().index, stage);
  const std::int64_t ctas = part_ctas(job.parts);
  const EncodeArgs args{job, device_key(context.key(), Purpose::quantize),
                        static_cast<unsigned>(ctas),
                        parts_aligned(job.wire, job.parts.count, job.parts)};
  with_dtype(job.dtype, [&](auto tag) {
    with_rounding(job.rounding, [&](auto r) {
      launch(stage, context, encode_blocks_kernel<decltype(tag), decltype(r)::value>,
             {job.parts.count * ctas, threads}, args);
    });
  });
}

void CudaBackend::sum_blocks(const Context& context, const SumBlocksJob& job) const {
  const char* const stage = "sum_blocks";
  const DeviceGuard guard(context.device().index, stage);
  const std::int64_t ctas = part_ctas(job.parts);
  SumArgs args{job, static_cast<unsigned>(ctas),
               parts_aligned(job.wire, job.ranks * job.parts.count, job.parts)};
  args.factor /= BlockParts::block;
  with_dtype(job.dtype, [&](auto tag) {
    launch(stage, context, sum_blocks_kernel<decltype(tag)>, {job.parts.count * ctas, threads},
           args);
  });
}

}  // namespace hot::detail
