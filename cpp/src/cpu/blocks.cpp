// Stage: vectors as INT8 codes of transformed blocks of 64 values, and their sum over processes.
#include <algorithm>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/row.h"

namespace hot::detail {
namespace {

constexpr std::int64_t block = BlockParts::block;

// Calls `visit` with each block: its part, its number in the part, its first value in the vector,
// and how many of its values exist.
template <class Visit>
void each_block(const Context& context, const BlockParts& parts, const Visit& visit) {
  for_each_item(context, parts.count * parts.blocks, block, [&](std::int64_t b) {
    const std::int64_t part = b / parts.blocks, i = b % parts.blocks;
    const std::int64_t first = part * parts.size + i * block;
    const std::int64_t end = std::min(parts.values, (part + 1) * parts.size);
    visit(part, i, first, std::clamp<std::int64_t>(end - first, 0, block));
  });
}

}  // namespace

void CpuBackend::encode_blocks(const Context& context, const EncodeBlocksJob& job) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const BlockParts& parts = job.parts;
  const RandomKey key = random_key(context.key(), Purpose::quantize);
  each_block(context, parts,
             [&](std::int64_t part, std::int64_t i, std::int64_t first, std::int64_t count) {
               alignas(64) float v[block] = {};
               if (count > 0) load_run(simd, job.x, job.dtype, first, 1, count, v);
               simd.fwht_row(v, block, block);
               const Scale s = make_scale(simd.amax(v, block, 0), 8);
               std::int8_t* const wire = job.wire + part * parts.bytes();
               std::memcpy(wire + parts.blocks * block + i * 4, &s.scale, 4);
               Rounder rounder{job.rounding, 8, key};
               rounder.key.stream_purpose += static_cast<std::uint32_t>(part) * stream_step;
               write_codes(simd, v, block, s, rounder, static_cast<std::uint64_t>(i * (block / 16)),
                           wire + i * block);
             });
}

void CpuBackend::sum_blocks(const Context& context, const SumBlocksJob& job) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const BlockParts& parts = job.parts;
  const float factor = job.factor / block;
  each_block(context, parts,
             [&](std::int64_t part, std::int64_t i, std::int64_t first, std::int64_t count) {
               if (count == 0) return;
               alignas(64) float v[block];
               std::fill(v, v + block, -0.0F);  // -0 + a = a, also for a = -0
               for (std::int64_t rank = 0; rank < job.ranks; ++rank) {
                 const std::int8_t* const wire =
                     job.wire + (rank * parts.count + part) * parts.bytes();
                 float scale;
                 std::memcpy(&scale, wire + parts.blocks * block + i * 4, 4);
                 for (std::int64_t j = 0; j < block; ++j) {
                   v[j] += static_cast<float>(wire[i * block + j]) * scale;
                 }
               }
               simd.fwht_row(v, block, block);
               for (float& value : v) value *= factor;
               store_run(simd, v, count, job.out, job.dtype, first, 1);
             });
}

}  // namespace hot::detail
