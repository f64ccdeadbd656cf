// Stage: a frozen weight in INT4, from floats and to INT8 codes, and those to floats.
#include "weight_int4.h"

#include <algorithm>
#include <cstdint>

#include "cpu/backend.h"
#include "cpu/row.h"
#include "cpu/scalar.h"

namespace hot::detail {
namespace {

constexpr int largest_group = 64;

// Quantises a group of fixed-point values and returns its step.
std::uint8_t encode_group(const SimdKernels& simd, const int* value, int count,
                          std::uint8_t* packed) {
  int amax = 0;
  for (int i = 0; i < count; ++i) amax = std::max(amax, std::abs(value[i]));
  int best = -1;
  std::uint32_t least = 0;
  for (int index = 0, before = -1; index < weight_int4::candidates; ++index) {
    const int step = weight_int4::candidate(amax, index);
    if (step == before) continue;
    before = step;
    const std::uint32_t error = simd.int4_error(value, count, step);
    if (best < 0 || error < least) least = error, best = step;
  }
  const float factor = weight_int4::code_factor(best);
  for (int i = 0; i < count; i += 2) {
    const int low = weight_int4::nearest(value[i], factor) & 15;
    const int high = weight_int4::nearest(value[i + 1], factor) & 15;
    packed[i / 2] = static_cast<std::uint8_t>(low | high << 4);
  }
  return static_cast<std::uint8_t>(best);
}

}  // namespace

void CpuBackend::quantize_weight_int4(const Context& context, const Int4WeightJob& job) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const Int4Weight& out = job.out;
  for_each_item(context, out.rows, out.k_padded, [&](std::int64_t r) {
    Row row(simd, job.w, job.hadamard_block, out.k_padded, nullptr, job.powers);
    const Scale scale = make_scale(row.amax(r, 0), 8);
    out.scale[r] = scale.scale;
    const float inv = scale.inv * static_cast<float>(weight_int4::unit);
    row.chunks(r, [&](std::int64_t start, std::int64_t count, const float* v) {
      for (std::int64_t i = 0; i < count; i += out.group) {
        int value[largest_group];
        for (int j = 0; j < out.group; ++j) {
          const float scaled = scale.keep == 0 ? 0.0F : v[i + j] * inv;
          // Rounds to nearest: the low bits of the sum are the integer.
          value[j] = static_cast<int>(float_bits(scaled + 0x1.8p23F) - 0x4b400000U);
        }
        const std::int64_t at = r * out.k_padded + start + i;
        out.steps[at / out.group] = encode_group(simd, value, out.group, out.packed + at / 2);
      }
    });
  });
}

void CpuBackend::expand_weight_int4(const Context& context, const Int4Weight& w,
                                    const Codes& out) const {
  std::copy_n(w.scale, w.rows, out.scale);
  for_each_item(context, w.rows * (w.k_padded / w.group), w.group, [&](std::int64_t g) {
    const int step = std::min<int>(w.steps[g], weight_int4::max_step);
    std::int8_t expanded[16];
    for (int code = -8; code < 8; ++code) {
      expanded[code & 15] = static_cast<std::int8_t>(weight_int4::expanded(code, step));
    }
    const std::uint8_t* const from = w.packed + g * (w.group / 2);
    std::int8_t* const to = out.codes + g * w.group;
    for (int i = 0; i < w.group / 2; ++i) {
      to[2 * i] = expanded[from[i] & 15];
      to[2 * i + 1] = expanded[from[i] >> 4];
    }
  });
}

void CpuBackend::dequantize_weight(const Context& context, const DequantizeWeightJob& job) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const Codes& w = job.w;
  const std::int64_t whole = round_up(job.out.cols, job.hadamard_block);
  for_each_item(context, w.rows, w.k_padded, [&](std::int64_t r) {
    float v[Row::chunk];
    const float scale = w.scale[r] / static_cast<float>(job.hadamard_block);
    for (std::int64_t start = 0; start < whole; start += Row::chunk) {
      const std::int64_t count = std::min(Row::chunk, whole - start);
      const std::int8_t* const codes = w.codes + r * w.k_padded + start;
      std::copy_n(codes, count, v);
      if (job.hadamard_block > 1) simd.fwht_row(v, count, job.hadamard_block);  // integers
      const std::int64_t real = std::min(count, job.out.cols - start);
      for (std::int64_t i = 0; i < real; ++i) v[i] *= scale;
      apply_powers(job.powers, start, real, v);
      store_row(simd, v, r, start, real, job.out);
    }
  });
}

}  // namespace hot::detail
