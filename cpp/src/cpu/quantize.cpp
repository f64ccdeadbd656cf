// Stages: quantise and dequantise a matrix, rows after an FWHT (g_y for g_x), INT4 groups of x.
#include <algorithm>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/row.h"
#include "cpu/scalar.h"

namespace hot::detail {
namespace {

constexpr std::int64_t chunk = Row::chunk;
constexpr std::int64_t group = 16;  // elements of one block of random bits
constexpr float int4_values[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};

// Biased exponent of the power of two at or below a token's mean magnitude. `largest` is the biased
// exponent of the token's largest value, 27 to 254.
std::uint8_t token_exponent(const SimdKernels& simd, Row& row, std::int64_t token, int largest,
                            std::int64_t cols) {
  const float unit = float_from_bits(static_cast<std::uint32_t>(268 - largest) << 23);
  std::int64_t sum = 0;
  row.chunks(token, [&](std::int64_t, std::int64_t count, const float* v) {
    sum += simd.sum_magnitudes(v, count, unit);
  });
  const float mean = static_cast<float>(sum) / static_cast<float>(cols);
  const int exponent = largest + static_cast<int>(float_bits(mean) >> 23) - 141;
  return static_cast<std::uint8_t>(std::clamp(exponent, 27, 227));
}

}  // namespace

void patterns_to_scales(float* scale, std::int64_t count, int bits) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t pattern;
    std::memcpy(&pattern, scale + i, sizeof pattern);
    const float value = make_scale(pattern, bits).scale;
    std::memcpy(scale + i, &value, sizeof value);
  }
}

void CpuBackend::quantize(const Context& context, const MatrixIn& x, const QuantSpec& spec,
                          const MatrixOut& q, float* scale) const {
  const std::int64_t scales = scale_count(x.rows, x.cols, spec.scale);
  auto* amax = reinterpret_cast<std::uint32_t*>(scale);  // bit patterns until the codes are written
  std::fill_n(amax, scales, 0U);
  if (x.rows == 0 || x.cols == 0) return;
  const SimdKernels& simd = simd_kernels(context.isa());
  const Rounder rounder{spec.rounding, spec.bits, random_key(context.key(), Purpose::quantize)};
  const bool packed = q.dtype == DType::i4x2, by_column = spec.scale == Granularity::channel;

  for_each_item(context, x.rows, x.cols, [&](std::int64_t r) {
    Row row(simd, x, 1, x.cols);
    if (!by_column) return atomic_max(amax + scale_at(spec.scale, r, 0), row.amax(r, 0));
    row.chunks(r, [&](std::int64_t start, std::int64_t count, const float* v) {
      for (std::int64_t i = 0; i < count; ++i) {
        atomic_max(amax + start + i, float_bits(v[i]) & 0x7fffffffU);
      }
    });
  });

  const std::int64_t row_blocks = ceil_div(x.cols, group);
  for_each_item(context, x.rows, x.cols, [&](std::int64_t r) {
    Row row(simd, x, 1, x.cols);
    row.chunks(r, [&](std::int64_t start, std::int64_t count, const float* v) {
      float masked[chunk], inv[chunk];  // for scales per channel
      std::int8_t codes[chunk];
      auto* out = static_cast<std::int8_t*>(q.data) + r * q.row_stride;
      std::int8_t* const to = packed ? codes : out + start;
      const auto blk = static_cast<std::uint64_t>(r * row_blocks + start / group);
      if (by_column) {
        for (std::int64_t i = 0; i < count; ++i) {
          const Scale column = make_scale(amax[start + i], spec.bits);
          masked[i] = float_from_bits(float_bits(v[i]) & column.keep);
          inv[i] = column.inv;
        }
        simd.quantize_row(masked, count, inv, true, rounder, blk, to);
      } else {
        const Scale s = make_scale(amax[scale_at(spec.scale, r, 0)], spec.bits);
        write_codes(simd, v, count, s, rounder, blk, to);
      }
      if (packed) pack_row(codes, count, reinterpret_cast<std::uint8_t*>(out) + start / 2);
    });
  });

  patterns_to_scales(scale, scales, spec.bits);
}

void CpuBackend::dequantize(const Context& context, const MatrixIn& q, const float* scale,
                            Granularity granularity, const MatrixOut& out) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const bool packed = q.dtype == DType::i4x2;
  for_each_item(context, out.rows, out.cols, [&](std::int64_t r) {
    float values[chunk];
    const auto* codes = static_cast<const std::int8_t*>(q.data) + r * q.row_stride;
    for (std::int64_t start = 0; start < out.cols; start += chunk) {
      const std::int64_t count = std::min(chunk, out.cols - start);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t c = start + i;
        const float code =
            packed ? int4_values[codes[c / 2] >> (c % 2 * 4) & 15] : static_cast<float>(codes[c]);
        values[i] = code * scale[scale_at(granularity, r, c)];
      }
      store_row(simd, values, r, start, count, out);
    }
  });
}

QuantizeRows::QuantizeRows(const Context& context, const Operand& job)
    : simd_(simd_kernels(context.isa())),
      job_(job),
      rounder_{job.quant.rounding, job.quant.bits, random_key(context.key(), job.quant.purpose)},
      tasks_(context, job.x.rows, job.out.k_padded) {
  if (job.quant.per_tensor) std::memset(job.out.scale, 0, sizeof *job.out.scale);
}

void QuantizeRows::largest(std::int64_t task) const {
  Row row(simd_, job_.x, job_.transform.block, job_.out.k_padded, nullptr, job_.powers);
  std::uint32_t best = 0;
  tasks_.each(task, [&](std::int64_t r) { best = row.amax(r, best); });
  atomic_max(reinterpret_cast<std::uint32_t*>(job_.out.scale), best);
}

// Quantises rows. A row that fits the stack buffer and has its own scale is read once, else twice.
void QuantizeRows::codes(std::int64_t task) const {
  const Codes& out = job_.out;
  const OperandQuant& quant = job_.quant;
  std::uint32_t columns[chunk];
  if (columns_ != nullptr) std::fill_n(columns, job_.x.cols, 0U);
  Row row(simd_, job_.x, job_.transform.block, out.k_padded,
          columns_ == nullptr ? nullptr : columns, job_.powers);
  const std::int64_t row_blocks = out.k_padded / group;
  tasks_.each(task, [&](std::int64_t r) {
    const Scale s = make_scale(
        quant.per_tensor ? *reinterpret_cast<const std::uint32_t*>(out.scale) : row.amax(r, 0),
        quant.bits);
    if (!quant.per_tensor) out.scale[r] = s.scale;
    row.chunks(r, [&](std::int64_t start, std::int64_t count, const float* v) {
      write_codes(simd_, v, count, s, rounder_,
                  static_cast<std::uint64_t>(r * row_blocks + start / group),
                  out.codes + r * out.k_padded + start);
    });
  });
  if (columns_ == nullptr) return;
  for (std::int64_t i = 0; i < job_.x.cols; ++i) atomic_max(columns_ + i, columns[i]);
}

void QuantizeRows::finish() const {
  if (job_.quant.per_tensor) patterns_to_scales(job_.out.scale, 1, job_.quant.bits);
}

// Compresses x to INT4 in one pass. A task handles a group of 64 tokens of 64 channels.
void compress_groups(const Context& context, const Operand& job) {
  const MatrixIn& x = job.x;
  const Groups& out = job.groups;
  const SimdKernels& simd = simd_kernels(context.isa());
  const Rounder rounder{Rounding::stochastic, 4, random_key(context.key(), Purpose::activation)};
  const std::int64_t groups = ceil_div(x.rows, int4_group);
  const std::int64_t strips = ceil_div(x.cols, strip_columns);
  const std::int64_t row_blocks = round_up(x.rows, group) / group;
  context.pool()->run(strips * groups, [&](std::int64_t task) {
    const std::int64_t col = task % strips * strip_columns;
    const std::int64_t cols = std::min<std::int64_t>(strip_columns, x.cols - col);
    const std::int64_t g = task / strips;
    const std::int64_t tokens = std::min(int4_group, x.rows - g * int4_group);
    alignas(64) float rows[int4_group * strip_columns];
    if (cols < strip_columns || tokens < int4_group) {
      std::fill(rows, rows + int4_group * strip_columns, 0.0F);
    }
    const ColumnStrip from(simd, x, col, cols);
    for (std::int64_t t = 0; t < tokens; ++t) {
      from.load(g * int4_group + t, rows + t * strip_columns);
      if (t + group < tokens) from.prefetch(g * int4_group + t + group);
    }
    std::uint32_t amax[strip_columns] = {}, keep[strip_columns] = {};
    float inv[strip_columns] = {};
    simd.amax_strip(rows, int4_group, amax);
    for (std::int64_t c = 0; c < cols; ++c) {
      std::uint16_t half = 0;
      if (amax[c] >= float_infinity_bits) {
        half = bf16_nan;
      } else {
        keep[c] = ~0U;
        if (float_from_bits(amax[c]) >= 0x1p-100F) {
          half = float_to_bf16_up(float_from_bits(amax[c]) / 7.0F);
          inv[c] = 1.0F / bf16_to_float(half);
        }
      }
      out.scale[(col + c) * groups + g] = half;
    }
    std::int8_t codes[strip_columns * int4_group];
    for (std::int64_t part = 0; part < int4_group; part += group) {
      std::uint64_t blk[strip_columns] = {};
      for (std::int64_t c = 0; c < cols; ++c) {
        blk[c] =
            static_cast<std::uint64_t>((col + c) * row_blocks + (g * int4_group + part) / group);
      }
      simd.quantize_strip(rows + part * strip_columns, static_cast<int>(cols), inv, keep, rounder,
                          blk, codes + part, int4_group);
    }
    const std::int64_t bytes = std::min(int4_group / 2, out.row_bytes - g * int4_group / 2);
    for (std::int64_t c = 0; c < cols; ++c) {
      pack_row(codes + c * int4_group, 2 * bytes,
               out.packed + (col + c) * out.row_bytes + g * int4_group / 2);
    }
  });
}

void token_exponents(const Context& context, const Operand& job) {
  MatrixIn x = job.x;
  std::uint8_t* const exponents = job.exponents;
  x.exponents = nullptr;
  const SimdKernels& simd = simd_kernels(context.isa());
  for_each_item(context, x.rows, x.cols, [&](std::int64_t r) {
    Row row(simd, x, 1, x.cols);
    const auto largest = static_cast<int>(row.amax(r, 0) >> 23);
    exponents[r] = largest == 255 ? 127
                   : largest < 27 ? 27
                                  : token_exponent(simd, row, r, largest, x.cols);
  });
}

// Decodes a saved x. A task handles a group of 64 tokens of 64 channels: codes are contiguous along
// tokens, the result along channels.
void CpuBackend::decompress(const Context& context, const DecompressJob& job) const {
  const SimdKernels& simd = simd_kernels(context.isa());
  const MatrixOut& out = job.out;
  const std::int64_t strips = ceil_div(out.cols, strip_columns);
  const std::int64_t end = job.first + out.rows;
  const std::int64_t first_group = job.first / int4_group;
  const std::int64_t groups = ceil_div(end, int4_group) - first_group;
  context.pool()->run(strips * groups, [&](std::int64_t task) {
    const std::int64_t col = task % strips * strip_columns;
    const std::int64_t cols = std::min<std::int64_t>(strip_columns, out.cols - col);
    const std::int64_t g = first_group + task / strips;
    // A byte holds two codes, so the decoded range starts and ends at even tokens.
    const std::int64_t start = g * int4_group;
    const std::int64_t from = std::max(job.first, start), to = std::min(end, start + int4_group);
    const std::int64_t begin = from / 2 * 2, count = round_up(to, 2) - begin;
    alignas(64) float rows[int4_group * strip_columns];
    for (std::int64_t c = 0; c < cols; ++c) {
      const auto* codes = static_cast<const std::uint8_t*>(job.codes) + (col + c) * job.row_bytes;
      const std::int64_t at = (col + c) * job.scale_step;
      float values[int4_group], scale;
      if (job.storage == Storage::int4) {
        scale = bf16_to_float(static_cast<const std::uint16_t*>(job.scale)[at + g]);
        simd.expand_int4(codes + begin / 2, count, int4_values, values);
      } else {
        scale = static_cast<const float*>(job.scale)[at];
        for (std::int64_t i = 0; i < count; ++i) {
          values[i] = static_cast<float>(static_cast<std::int8_t>(codes[begin + i]));
        }
      }
      for (std::int64_t i = 0; i < count; ++i) rows[i * strip_columns + c] = values[i] * scale;
    }
    for (std::int64_t token = from; token < to; ++token) {
      float* const row = rows + (token - begin) * strip_columns;
      if (job.exponents != nullptr) {
        const float power = float_from_bits(static_cast<std::uint32_t>(job.exponents[token]) << 23);
        for (std::int64_t c = 0; c < cols; ++c) row[c] *= power;
      }
      store_row(simd, row, token - job.first, col, cols, out);
    }
  });
}

RequantizeGroups::RequantizeGroups(const Context& context, const Operand& job)
    : simd_(simd_kernels(context.isa())),
      job_(job),
      rounder_{Rounding::stochastic, 8, random_key(context.key(), Purpose::requantize)},
      tasks_(context, job.out.rows, job.out.k_padded) {}

void RequantizeGroups::codes(std::int64_t task) const {
  const Codes& out = job_.out;
  const Groups& from = job_.groups;
  const std::int64_t groups = ceil_div(from.tokens, int4_group);
  const std::int64_t row_blocks = out.k_padded / group;
  float values[chunk], inv[chunk];
  tasks_.each(task, [&](std::int64_t r) {
    const std::uint8_t* const packed = from.packed + r * from.row_bytes;
    const std::uint16_t* const group_scale = from.scale + r * groups;
    std::uint16_t largest = 0;  // scales are positive or NaN, so bit patterns have their order
    for (std::int64_t g = 0; g < groups; ++g) largest = std::max(largest, group_scale[g]);
    const float amax = 7.0F * bf16_to_float(largest);
    const Scale s = make_scale(float_bits(amax) & 0x7fffffffU, 8);
    out.scale[r] = s.scale;
    for (std::int64_t start = 0; start < out.k_padded; start += chunk) {
      const std::int64_t count = std::min(chunk, out.k_padded - start);
      std::int8_t* const to = out.codes + r * out.k_padded + start;
      if (s.keep == 0) {
        std::memset(to, 0, static_cast<std::size_t>(count));
        continue;
      }
      for (std::int64_t i = 0; i < count; i += int4_group) {
        const std::int64_t part = std::min(int4_group, count - i);
        const float factor = bf16_to_float(group_scale[(start + i) / int4_group]) * s.inv;
        std::fill(inv + i, inv + i + part, factor);
      }
      simd_.expand_int4(packed + start / 2, count, int4_values, values);
      simd_.quantize_row(values, count, inv, true, rounder_,
                         static_cast<std::uint64_t>(r * row_blocks + start / group), to);
    }
  });
}

}  // namespace hot::detail
