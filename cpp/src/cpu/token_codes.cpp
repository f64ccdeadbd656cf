// Stage: one code a value (docs/numerics.md): x kept by tokens, the sizes of features, and what
// g_w needs besides rows of g_y and a product: their transpose, the tokens' contributions, and the
// transforms undone.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backward_work.h"
#include "cpu/backend.h"
#include "cpu/row.h"
#include "cpu/scalar.h"

namespace hot::detail {
namespace {

constexpr std::int64_t tile = dither_tile;

float power_of_two(int exponent) {
  return float_from_bits(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// The random byte of token t of a tile: byte t of the tile's block.
void tile_bytes(const RandomKey& key, std::uint64_t block, std::uint8_t* out) {
  const Philox draw = philox_block(key, block);
  std::memcpy(out, draw.word, sizeof draw.word);
}

// The dither of packed codes of `padded` features.
class Dither {
 public:
  Dither(const Key& key, std::int64_t padded)
      : key_(random_key(key, Purpose::activation)), tiles_(padded / tile) {}

  // A byte for each tile of features [first, first + count), multiples of a tile, of a token: good
  // until the next call. Tokens of a tile after each other are drawn once.
  const std::uint8_t* bytes(std::int64_t token, std::int64_t first, std::int64_t count) {
    if (first != first_ || token / tile != tile_row_) {
      first_ = first;
      tile_row_ = token / tile;
      const std::int64_t block = tile_row_ * tiles_ + first / tile;
      for (std::int64_t t = 0; t < count / tile; ++t) {
        tile_bytes(key_, static_cast<std::uint64_t>(block + t), drawn_ + tile * t);
      }
    }
    for (std::int64_t t = 0; t < count / tile; ++t) bytes_[t] = drawn_[tile * t + token % tile];
    return bytes_;
  }

 private:
  RandomKey key_;
  std::int64_t tiles_, first_ = -1, tile_row_ = -1;
  std::uint8_t drawn_[Row::chunk], bytes_[Row::chunk / tile];
};

// What a byte of the ratios stands for.
float ratio_value(std::uint8_t ratio) {
  return float_from_bits((static_cast<std::uint32_t>(ratio) + 1777U) << 19);
}

// The byte of a ratio whose bit pattern has been rounded to the upper 13 bits.
std::uint8_t ratio_byte(std::uint32_t rounded_bits) {
  return static_cast<std::uint8_t>(std::clamp(static_cast<int>(rounded_bits >> 19) - 1777, 1, 255));
}

std::uint8_t ratio_rounded_up(std::uint32_t amax_bits, float token_scale) {
  if (amax_bits == 0) return 0;
  return ratio_byte(float_bits(float_from_bits(amax_bits) / 7.5F / token_scale) + 0x7ffffU);
}

float token_scale(const TokenCodesIn& codes, std::int64_t token) {
  if (codes.storage == Storage::token8) {
    float scale;
    std::memcpy(&scale, codes.scales() + 4 * token, sizeof scale);
    return scale;
  }
  std::uint16_t half;
  std::memcpy(&half, codes.scales() + 2 * token, sizeof half);
  return bf16_to_float(half);
}

// What the codes of a kept x stand for.
class TokenValues {
 public:
  // `key`: that x was kept with.
  TokenValues(const SimdKernels& simd, const TokenCodesIn& codes, const Key& key)
      : simd_(simd), codes_(codes), dither_(key, codes.layout.padded) {}

  // Asks the caches for a token's codes: strips of rows are not foreseen.
  void prefetch(std::int64_t token, std::int64_t first) const {
    __builtin_prefetch(codes_.row(token) + first * codes_.layout.row_bytes / codes_.layout.padded);
  }

  // Features [first, first + count) of a token, multiples of 16, at most Row::chunk: times `factor`
  // and then `second` by way of their scales.
  void load(std::int64_t token, std::int64_t first, std::int64_t count, float factor, float second,
            float* v) {
    const float scale = token_scale(codes_, token);
    if (codes_.storage == Storage::token8) {
      std::fill_n(v, count, 0.0F);
      return simd_.axpy(scale * factor * second,
                        reinterpret_cast<const std::int8_t*>(codes_.row(token)) + first, count, v);
    }
    const int bits = codes_.storage == Storage::token4 ? 4 : 2;
    const std::uint8_t* const ratios = codes_.ratios(token);
    for (std::int64_t t = 0; t < count / tile; ++t) {
      const std::uint8_t ratio = ratios[(first + t * tile) / token_group];
      factors_[t] = (ratio == 0 ? 0.0F : ratio_value(ratio)) * scale * factor * second;
    }
    simd_.undither_row(bits, codes_.row(token) + first * bits / 8, count, factors_,
                       dither_.bytes(token, first, count), v);
  }

 private:
  const SimdKernels& simd_;
  const TokenCodesIn& codes_;
  Dither dither_;
  float factors_[Row::chunk / tile];
};

// Tokens of a task: whole tiles.
std::int64_t tokens_per_task(const Context& context, std::int64_t tokens, std::int64_t width) {
  return round_up(rows_per_task(context, tokens, width), tile);
}

// Of `count` values, a power of two: neighbours first.
float sum_pairs(float* v, std::int64_t count) {
  for (; count > 1; count /= 2) {
    for (std::int64_t i = 0; i < count / 2; ++i) v[i] = v[2 * i] + v[2 * i + 1];
  }
  return v[0];
}

// x as token4 or token2, a task's tokens at a time.
class KeepPacked {
 public:
  KeepPacked(const Context& context, const SimdKernels& simd, const MatrixIn& x,
             const TokenCodesOut& out, const float* factors)
      : simd_(simd),
        out_(out),
        dither_(context.key(), out.layout.padded),
        row_(simd, x, out.layout.block, out.layout.padded, nullptr, factors) {}

  void keep(std::int64_t token) {
    const TokenCodesLayout& layout = out_.layout;
    const std::uint32_t amax = row_.amax(token, 0);
    const bool finite = amax < float_infinity_bits;
    if (!finite || float_from_bits(amax) < 0x1p-100F) {
      set_scale(token, finite ? std::uint16_t{0} : bf16_nan);
      std::memset(out_.row(token), 0, static_cast<std::size_t>(layout.row_bytes));
      std::memset(out_.ratios(token), 0, static_cast<std::size_t>(layout.ratio_bytes));
      return;
    }
    if (out_.storage == Storage::token4) {
      const std::uint16_t half = float_to_bf16_up(float_from_bits(amax) / 7.5F);
      set_scale(token, half);
      row_.chunks(token, [&](std::int64_t start, std::int64_t count, const float* v) {
        keep4(token, start, count, v, bf16_to_float(half));
      });
    } else {
      keep2(token);
    }
  }

 private:
  void set_scale(std::int64_t token, std::uint16_t half) {
    std::memcpy(out_.scales() + 2 * token, &half, sizeof half);
  }

  void keep4(std::int64_t token, std::int64_t start, std::int64_t count, const float* v,
             float scale) {
    for (std::int64_t first = 0; first < count; first += token_group) {
      const std::int64_t part = std::min(token_group, count - first);
      const std::uint8_t ratio = ratio_rounded_up(simd_.amax(v + first, part, 0), scale);
      out_.ratios(token)[(start + first) / token_group] = ratio;
      std::fill(inv_ + first / tile, inv_ + (first + part) / tile,
                ratio == 0 ? 0.0F : 1.0F / (ratio_value(ratio) * scale));
    }
    simd_.dither_row(4, v, count, inv_, dither_.bytes(token, start, count), nullptr,
                     out_.row(token) + start / 2);
  }

  // The scales of groups come first: the token's is the largest of them. A row that is longer than
  // a buffer is gone over twice.
  void keep2(std::int64_t token) {
    const std::int64_t padded = out_.layout.padded;
    float largest = 0;
    const auto groups = [&](std::int64_t start, std::int64_t count, const float* v) {
      const std::uint8_t* const bytes = dither_.bytes(token, start, count);
      for (std::int64_t first = 0; first < count; first += token_group) {
        scales_[first / token_group] =
            keep_group(token, start + first, std::min(token_group, count - first), v + first,
                       bytes + first / tile);
      }
    };
    row_.chunks(token, [&](std::int64_t start, std::int64_t count, const float* v) {
      groups(start, count, v);
      const std::int64_t found = ceil_div(count, token_group);
      for (std::int64_t g = 0; g < found; ++g) largest = std::max(largest, scales_[g]);
    });
    const std::uint16_t half = float_to_bf16(largest);
    set_scale(token, half);
    row_.chunks(token, [&](std::int64_t start, std::int64_t count, const float* v) {
      if (padded > Row::chunk) groups(start, count, v);
      for (std::int64_t g = 0; g < ceil_div(count, token_group); ++g) {
        std::uint8_t ratio = 0;
        if (scales_[g] > 0) {
          const std::uint32_t bits = float_bits(scales_[g] / bf16_to_float(half));
          ratio = ratio_byte(bits + 0x3ffffU + ((bits >> 19) & 1U));  // half to even
        }
        out_.ratios(token)[start / token_group + g] = ratio;
      }
    });
  }

  // Writes the codes of a group; its scale, 0 where it is too small to have one.
  float keep_group(std::int64_t token, std::int64_t first, std::int64_t count, const float* v,
                   const std::uint8_t* bytes) {
    std::uint8_t* const out = out_.row(token) + first / 4;
    const std::uint32_t amax = simd_.amax(v, count, 0);
    if (float_from_bits(amax) < 0x1p-100F) {
      std::memset(out, 0, static_cast<std::size_t>(count / 4));
      return 0;
    }
    const float power = float_from_bits((255U - (amax >> 23)) << 23);
    const float back = float_from_bits(((amax >> 23) - 1U) << 23);
    float y[token_group], products[token_group], values[token_group], inv[2];
    for (std::int64_t i = 0; i < count; ++i) y[i] = v[i] * power;
    for (std::int64_t i = 0; i < count; ++i) products[i] = y[i] * y[i];
    const float squares = sum_pairs(products, count);
    const float spread = std::sqrt(squares / static_cast<float>(count));
    std::fill_n(inv, 2, 1.5F / std::min(float_from_bits(amax) * power, 1.75F * spread));
    simd_.dither_row(2, y, count, inv, bytes, values, out);
    for (std::int64_t i = 0; i < count; ++i) products[i] = y[i] * values[i];
    return squares / sum_pairs(products, count) * back;
  }

  const SimdKernels& simd_;
  const TokenCodesOut& out_;
  Dither dither_;
  Row row_;
  float inv_[Row::chunk / tile], scales_[Row::chunk / token_group];
};

}  // namespace

// ---- the sizes of features ---------------------------------------------------------------------

FeatureSizes::FeatureSizes(const Context& context, const MatrixIn& x, const FeatureScratch& scratch,
                           std::uint8_t* exponents)
    : simd_(simd_kernels(context.isa())),
      x_(x),
      scratch_(scratch),
      exponents_(exponents),
      count_(std::min(x.rows, size_sample)) {}

void FeatureSizes::add_tokens(Phase& phase) const {
  phase.add<&FeatureSizes::tokens>(ceil_div(count_, tokens_at_once), *this);
}

void FeatureSizes::add_sums(Phase& phase) const {
  phase.add<&FeatureSizes::sums>(ceil_div(x_.cols, strip_columns), *this);
}

void FeatureSizes::tokens(std::int64_t task) const {
  Row row(simd_, x_, 1, x_.cols);
  const std::int64_t first = task * tokens_at_once;
  for (std::int64_t j = first; j < std::min(count_, first + tokens_at_once); ++j) {
    const std::int64_t token = sampled_token(j, count_, x_.rows);
    const auto largest = static_cast<int>(row.amax(token, 0) >> 23);
    // 0: the token counts for nothing.
    scratch_.sampled_exponents[j] = largest < 27 || largest == 255
                                        ? std::uint8_t{0}
                                        : token_exponent(simd_, row, token, largest, x_.cols);
  }
}

void FeatureSizes::sums(std::int64_t task) const {
  const std::int64_t col = task * strip_columns;
  const std::int64_t cols = std::min<std::int64_t>(strip_columns, x_.cols - col);
  alignas(64) float values[strip_columns] = {};
  double total[strip_columns] = {};  // whole numbers of at most 2^53
  const ColumnStrip from(simd_, x_, col, cols);
  for (std::int64_t j = 0; j < count_; ++j) {
    const int exponent = scratch_.sampled_exponents[j];
    if (exponent == 0) continue;
    from.load(sampled_token(j, count_, x_.rows), values);
    simd_.add_squares(values, power_of_two(127 - exponent), total);
  }
  for (std::int64_t c = 0; c < cols; ++c) {
    scratch_.sums[col + c] = static_cast<std::int64_t>(total[c]);
  }
}

void FeatureSizes::finish() const {
  const auto level = [&](std::int64_t i) {
    return static_cast<std::int64_t>(float_bits(static_cast<float>(scratch_.sums[i])) >> 20);
  };
  std::int64_t sum = 0, count = 0;
  for (std::int64_t i = 0; i < x_.cols; ++i) {
    if (scratch_.sums[i] == 0) continue;
    sum += level(i);
    ++count;
  }
  const std::int64_t middle = count == 0 ? 0 : sum / count;
  for (std::int64_t i = 0; i < x_.cols; ++i) {
    std::int64_t exponent = 0;
    if (scratch_.sums[i] != 0) {
      const std::int64_t eighths = level(i) - middle;
      // An arithmetic shift, written as a division of what is not negative.
      if (eighths <= -32 || eighths >= 32) exponent = (eighths + 16 + 32 * 1024) / 32 - 1024;
    }
    exponents_[i] = static_cast<std::uint8_t>(std::clamp<std::int64_t>(exponent, -30, 30) + 127);
  }
}

void feature_factors(const Key& key, const std::uint8_t* exponents, bool divide, float scale,
                     std::int64_t first, std::int64_t count, float* factors) {
  const RandomKey random = random_key(key, Purpose::signs);
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t feature = first + i, end = std::min(count, i + 64 - feature % 64);
    std::uint64_t negative = rotation_signs(random, feature / 64) >> (feature % 64);
    for (; i < end; ++i, negative >>= 1) {
      const auto biased = static_cast<std::uint32_t>(exponents[first + i]);
      const std::uint32_t power = (divide ? 254U - biased : biased) << 23;
      const auto sign = static_cast<std::uint32_t>(negative & 1U) << 31;
      factors[i] = float_from_bits(power | sign) * scale;
    }
  }
}

// ---- x as it is kept ---------------------------------------------------------------------------

void compress_tokens(const Context& context, const CompressJob& job, void* workspace) {
  const SimdKernels& simd = simd_kernels(context.isa());
  const TokenCodesOut& out = *job.tokens;
  const TokenCodesLayout& layout = out.layout;
  WorkspaceCursor cursor(workspace);
  const FeatureScratch scratch = take_features(cursor, layout.features, layout.padded);
  const FeatureSizes sizes(context, job.x, scratch, out.exponents());
  Phase phase(context);
  sizes.add_tokens(phase);
  phase.run();
  sizes.add_sums(phase);
  phase.run();
  sizes.finish();
  feature_factors(in_signs_key(out.storage, context.key()), out.exponents(), true, 1.0F, 0,
                  layout.features, scratch.factors);
  // What the alignment of the scales leaves free.
  const std::size_t ratios_end =
      layout.ratio_offset + static_cast<std::size_t>(layout.tokens * layout.ratio_bytes);
  std::memset(out.data + ratios_end, 0, layout.scale_offset - ratios_end);
  if (out.storage == Storage::token8) {
    const Operand codes{reinterpret_cast<std::int8_t*>(out.data),
                        reinterpret_cast<float*>(out.scales()), layout.tokens, layout.padded,
                        layout.tokens};
    return quantize_rows(context,
                         {job.x, layout.block, activation_quant(job.spec), codes, scratch.factors});
  }
  const std::int64_t per_task = tokens_per_task(context, layout.tokens, layout.padded);
  context.pool()->run(ceil_div(layout.tokens, per_task), [&](std::int64_t task) {
    KeepPacked kept(context, simd, job.x, out, scratch.factors);
    const std::int64_t end = std::min(layout.tokens, (task + 1) * per_task);
    for (std::int64_t token = task * per_task; token < end; ++token) kept.keep(token);
  });
}

void decompress_tokens(const Context& context, const DecompressJob& job) {
  const SimdKernels& simd = simd_kernels(context.isa());
  const TokenCodesIn& codes = *job.tokens;
  const TokenCodesLayout& layout = codes.layout;
  const std::int64_t per_task = tokens_per_task(context, job.out.rows, layout.padded);
  context.pool()->run(ceil_div(job.out.rows, per_task), [&](std::int64_t task) {
    const std::int64_t end = std::min(job.out.rows, (task + 1) * per_task);
    TokenValues kept(simd, codes, job.key);
    float values[Row::chunk], factors[Row::chunk];
    for (std::int64_t start = 0; start < layout.features; start += Row::chunk) {
      const std::int64_t count = std::min(Row::chunk, layout.padded - start);
      const std::int64_t real = std::min(count, layout.features - start);
      feature_factors(in_signs_key(codes.storage, job.key), codes.exponents(), false,
                      1.0F / static_cast<float>(layout.block), start, real, factors);
      for (std::int64_t row = task * per_task; row < end; ++row) {
        kept.load(job.first + row, start, count, 1.0F, 1.0F, values);
        simd.fwht_row(values, count, layout.block);
        simd.multiply(values, real, factors);
        store_row(simd, values, row, start, real, job.out);
      }
    }
  });
}

// ---- g_w ---------------------------------------------------------------------------------------

namespace {

// Of what a token contributes, eighths of an octave; 0: nothing.
std::uint32_t contribution_level(const TokenCodesIn& x, const float* gradient_scale,
                                 std::int64_t token) {
  const std::uint32_t bits =
      float_bits(gradient_scale[token] * token_scale(x, token)) & 0x7fffffffU;
  return std::min(bits, float_infinity_bits) >> 20;
}

constexpr std::uint32_t levels = (float_infinity_bits >> 20) + 1;

std::uint64_t level_weight(std::uint32_t level, std::uint32_t top) {
  const std::uint64_t mantissa = 8 + (level & 7U);
  const std::uint32_t below = (top >> 3) - (level >> 3);
  const std::uint64_t weight = below <= 28  ? mantissa << (28 - below)
                               : below < 64 ? mantissa >> (below - 28)
                                            : 0;
  return std::max<std::uint64_t>(1, weight);
}

}  // namespace

void draw_tokens(const Context& context, const TokenCodesIn& x, const float* gradient_scale,
                 std::int64_t slots, std::int64_t* token, float* factor) {
  constexpr std::uint64_t one = std::uint64_t{1} << 32;
  const std::int64_t tokens = x.layout.tokens;
  std::uint32_t count[levels] = {};
  std::uint32_t top = 0;
  for (std::int64_t l = 0; l < tokens; ++l) {
    const std::uint32_t level = contribution_level(x, gradient_scale, l);
    ++count[level];
    top = std::max(top, level);
  }
  std::uint64_t left = static_cast<std::uint64_t>(slots), mass = 0;
  for (std::uint32_t level = 1; level <= top; ++level) {
    if (count[level] > 0) mass += count[level] * level_weight(level, top);
  }
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
  const double share =
      mass == 0 ? 0.0 : static_cast<double>(left) * 0x1p32 / static_cast<double>(mass);
  const std::uint64_t start = philox_block(random_key(context.key(), Purpose::sketch), 0).word[0];
  std::fill_n(token, slots, std::int64_t{-1});
  std::uint64_t sum = start;
  for (std::int64_t l = 0; l < tokens; ++l) {
    const std::uint32_t level = contribution_level(x, gradient_scale, l);
    if (level == 0) continue;
    std::uint64_t part = one;
    if (level <= whole) {
      const double wanted = static_cast<double>(level_weight(level, top)) * share;
      part = wanted < 0x1p32 ? static_cast<std::uint64_t>(wanted) : one;
    }
    const std::uint64_t slot = sum >> 32;
    sum += part;
    if (sum >> 32 == slot) continue;
    if (slot >= static_cast<std::uint64_t>(slots)) break;  // by a rounding of fp64
    token[slot] = l;
    factor[slot] = static_cast<float>(0x1p32 / static_cast<double>(part));
  }
}

void TransposeCodes::add_codes(Phase& phase) const {
  phase.add<&TransposeCodes::codes>(ceil_div(to_.k_padded, block) * ceil_div(to_.rows, block),
                                    *this);
}

void TransposeCodes::codes(std::int64_t task) const {
  const std::int64_t strips = ceil_div(to_.rows, block);
  const std::int64_t row = task % strips * block, token = task / strips * block;
  const std::int64_t rows = std::min(block, to_.rows - row);
  const std::int64_t tokens = std::min(block, drawn_.slots - token);
  const std::int64_t padded = std::min(block, to_.k_padded - token);
  // 8 x 8 bytes at a time, in three rounds of exchanges.
  const auto swap = [](std::uint64_t& a, std::uint64_t& b, int shift, std::uint64_t mask) {
    const std::uint64_t t = ((a >> shift) ^ b) & mask;
    b ^= t;
    a ^= t << shift;
  };
  for (std::int64_t t = 0; t < padded; t += 8) {
    for (std::int64_t r = 0; r < rows; r += 8) {
      std::uint64_t line[8] = {};
      for (std::int64_t i = 0; i < std::min<std::int64_t>(8, tokens - t); ++i) {
        const std::int64_t slot = token + t + i;
        const std::int64_t at = drawn_.token == nullptr ? slot : drawn_.token[slot];
        if (at >= 0) std::memcpy(&line[i], from_.codes + at * from_.k_padded + row + r, 8);
      }
      for (int i = 0; i < 4; ++i) swap(line[i], line[i + 4], 32, 0x00000000FFFFFFFFU);
      for (int i : {0, 1, 4, 5}) swap(line[i], line[i + 2], 16, 0x0000FFFF0000FFFFU);
      for (int i : {0, 2, 4, 6}) swap(line[i], line[i + 1], 8, 0x00FF00FF00FF00FFU);
      for (std::int64_t i = 0; i < 8; ++i) {
        std::memcpy(to_.codes + (row + r + i) * to_.k_padded + token + t, &line[i], 8);
      }
    }
  }
}

Contributions::Contributions(const Context& context, const TokenCodesIn& codes, const Key& key,
                             const float* gradient_scale, const DrawnTokens& drawn,
                             Rounding rounding, const Operand& out)
    : simd_(simd_kernels(context.isa())),
      codes_(codes),
      key_(key),
      gradient_scale_(gradient_scale),
      drawn_(drawn),
      stochastic_(rounding == Rounding::stochastic),
      random_(random_key(context.key(), Purpose::requantize)),
      out_(out) {
  strips_ = ceil_div(codes.layout.padded, strip_columns);
  const std::int64_t tiles = ceil_div(drawn.slots, tile);
  const std::int64_t wanted = ceil_div(std::int64_t{8} * context.threads(), strips_);
  const std::int64_t least =
      ceil_div(task_elements(context, tiles * tile * codes.layout.padded), tile * strip_columns);
  whole_ = keeps_strips(context, strips_, tiles * tile);
  tiles_per_task_ =
      whole_ ? std::max<std::int64_t>(1, tiles) : std::max(least, ceil_div(tiles, wanted));
  ranges_ = ceil_div(tiles, tiles_per_task_);
  std::fill_n(amax(), out.rows, 0U);
}

std::uint32_t* Contributions::amax() const { return reinterpret_cast<std::uint32_t*>(out_.scale); }

void Contributions::add_largest(Phase& phase) const {
  if (whole_) return phase.add<&Contributions::whole>(strips_ * ranges_, *this);
  phase.add<&Contributions::largest>(strips_ * ranges_, *this);
}
void Contributions::add_codes(Phase& phase) const {
  if (!whole_) phase.add<&Contributions::codes>(strips_ * ranges_, *this);
}
void Contributions::finish() const { patterns_to_scales(out_.scale, out_.rows, 8); }

std::int64_t Contributions::first_column(std::int64_t task) const {
  return task % strips_ * strip_columns;
}
int Contributions::columns(std::int64_t task) const {
  return static_cast<int>(
      std::min<std::int64_t>(strip_columns, codes_.layout.padded - first_column(task)));
}

template <class Visit>
void Contributions::tiles(std::int64_t task, const Visit& visit) const {
  const std::int64_t col = first_column(task), cols = columns(task);
  const std::int64_t first = task / strips_ * tiles_per_task_;
  const std::int64_t last = std::min(ceil_div(drawn_.slots, tile), first + tiles_per_task_);
  TokenValues kept(simd_, codes_, key_);
  alignas(64) float values[tile * strip_columns] = {};
  for (std::int64_t t = first; t < last; ++t) {
    for (std::int64_t i = 0; i < tile; ++i) {
      const std::int64_t slot = t * tile + i;
      const std::int64_t token = slot >= drawn_.slots      ? -1
                                 : drawn_.token == nullptr ? slot
                                                           : drawn_.token[slot];
      float* const row = values + i * strip_columns;
      if (token < 0) {
        std::fill_n(row, strip_columns, 0.0F);
      } else {
        kept.prefetch(std::min(token + 64, codes_.layout.tokens - 1), col);
        kept.load(token, col, cols, gradient_scale_[token],
                  drawn_.token == nullptr ? 1.0F : drawn_.factor[slot], row);
      }
    }
    visit(t, values);
  }
}

void Contributions::largest(std::int64_t task) const {
  std::uint32_t best[strip_columns] = {};
  tiles(task, [&](std::int64_t, const float* values) { simd_.amax_strip(values, tile, best); });
  for (int c = 0; c < columns(task); ++c) atomic_max(amax() + first_column(task) + c, best[c]);
}

// Writes the codes of tiles of a strip whose largest values are known.
class Contributions::Writer {
 public:
  Writer(const Contributions& of, std::int64_t task)
      : of_(of), col_(of.first_column(task)), cols_(of.columns(task)) {
    for (int c = 0; c < cols_; ++c) {
      const Scale scale = make_scale(of.amax()[col_ + c], 8);
      inv_[c] = scale.inv;
      keep_[c] = scale.keep;
    }
  }

  void write(std::int64_t t, const float* values) {
    const std::int64_t tile_rows = ceil_div(of_.drawn_.slots, tile);
    for (std::int64_t g = 0; of_.stochastic_ && g < cols_ / tile; ++g) {
      tile_bytes(of_.random_, static_cast<std::uint64_t>((col_ / tile + g) * tile_rows + t),
                 bytes_ + tile * g);
    }
    const Operand& out = of_.out_;
    of_.simd_.quantize_tile(values, cols_, inv_, keep_, of_.stochastic_ ? bytes_ : nullptr,
                            out.codes + col_ * out.k_padded + t * tile, out.k_padded);
  }

 private:
  const Contributions& of_;
  std::int64_t col_;
  int cols_;
  float inv_[strip_columns] = {};
  std::uint32_t keep_[strip_columns] = {};
  std::uint8_t bytes_[strip_columns] = {};
};

void Contributions::codes(std::int64_t task) const {
  Writer writer(*this, task);
  tiles(task, [&](std::int64_t t, const float* values) { writer.write(t, values); });
}

// What tokens contribute is computed once, and kept in between.
void Contributions::whole(std::int64_t task) const {
  constexpr std::int64_t size = tile * strip_columns;
  alignas(64) float kept[most_kept_rows * strip_columns];
  std::uint32_t best[strip_columns] = {};
  tiles(task, [&](std::int64_t t, const float* values) {
    simd_.amax_strip(values, tile, best);
    std::memcpy(kept + t * size, values, size * sizeof(float));
  });
  std::copy_n(best, columns(task), amax() + first_column(task));
  Writer writer(*this, task);
  for (std::int64_t t = 0; t < ceil_div(drawn_.slots, tile); ++t) writer.write(t, kept + t * size);
}

UndoTransforms::UndoTransforms(const Context& context, const Product& product, int out_block,
                               int in_block, const Key& out_key, const std::uint8_t* out_exponents,
                               const Key& in_key, const std::uint8_t* in_exponents, bool accumulate,
                               const MatrixOut& out)
    : simd_(simd_kernels(context.isa())),
      product_(product),
      out_block_(out_block),
      in_block_(in_block),
      out_key_(out_key),
      in_key_(in_key),
      out_exponents_(out_exponents),
      in_exponents_(in_exponents),
      accumulate_(accumulate),
      out_(out),
      strips_(ceil_div(product.cols(), strip_columns)) {
  const std::int64_t down = ceil_div(product.rows(), strip_columns);
  slices_ = down == 0 ? 0 : std::min(strips_, ceil_div(std::int64_t{8} * context.threads(), down));
}

void UndoTransforms::add_tiles(Phase& phase) const {
  phase.add<&UndoTransforms::tiles>(ceil_div(product_.rows(), strip_columns) * slices_, *this);
}

// Tiles side by side are one thread's: they may share cache lines of g_w.
void UndoTransforms::tiles(std::int64_t task) const {
  const std::int64_t slice = task % slices_;
  for (std::int64_t strip = strips_ * slice / slices_; strip < strips_ * (slice + 1) / slices_;
       ++strip) {
    tile_of(task / slices_ * strip_columns, strip * strip_columns);
  }
}

void UndoTransforms::tile_of(std::int64_t row, std::int64_t col) const {
  const std::int64_t rows = std::min<std::int64_t>(strip_columns, product_.rows() - row);
  const std::int64_t cols = std::min<std::int64_t>(strip_columns, product_.cols() - col);
  const std::int64_t real_rows = std::min(rows, out_.rows - row);
  const std::int64_t real_cols = std::min(cols, out_.cols - col);
  if (real_rows <= 0 || real_cols <= 0) return;
  alignas(64) float values[strip_columns * strip_columns];
  if (cols < strip_columns) std::fill_n(values, rows * strip_columns, 0.0F);
  product_.block(row, col, {values, DType::f32, rows, cols, strip_columns, 1});
  simd_.fwht_row(values, rows * strip_columns, in_block_);
  for (std::int64_t r = 0; r < rows; r += out_block_) {
    simd_.fwht_strip(values + r * strip_columns, out_block_);
  }
  float in_factors[strip_columns] = {}, out_factors[strip_columns], before[strip_columns];
  feature_factors(in_key_, in_exponents_, false, 1.0F / static_cast<float>(in_block_), col,
                  real_cols, in_factors);
  feature_factors(out_key_, out_exponents_, false, 1.0F / static_cast<float>(out_block_), row,
                  real_rows, out_factors);
  if (real_cols == strip_columns && out_.dtype == DType::f32 && out_.col_stride == 1 &&
      !accumulate_) {
    return simd_.scale_tile(values, real_rows, in_factors, out_factors,
                            static_cast<float*>(out_.data) + row * out_.row_stride + col,
                            out_.row_stride);
  }
  simd_.scale_tile(values, real_rows, in_factors, out_factors, values, strip_columns);
  for (std::int64_t r = 0; r < real_rows; ++r) {
    float* const v = values + r * strip_columns;
    if (accumulate_) {
      load_row(simd_,
               {out_.data, out_.dtype, out_.rows, out_.cols, out_.row_stride, out_.col_stride},
               row + r, col, real_cols, before);
      for (std::int64_t c = 0; c < real_cols; ++c) v[c] = before[c] + v[c];
    }
    store_row(simd_, v, row + r, col, real_cols, out_);
  }
}

}  // namespace hot::detail
