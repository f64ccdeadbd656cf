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

// The signs of features that are asked for in ascending order.
class Signs {
 public:
  explicit Signs(const RandomKey& key) : key_(key) {}
  float operator[](std::int64_t feature) {
    if (feature / 64 != block_) {
      block_ = feature / 64;
      bits_ = rotation_signs(key_, block_);
    }
    return (bits_ >> (feature % 64) & 1U) != 0 ? -1.0F : 1.0F;
  }

 private:
  RandomKey key_;
  std::int64_t block_ = -1;
  std::uint64_t bits_ = 0;
};

// The random bytes of a row of tiles: 16 for each tile of features, byte t that of token t.
void tile_bytes(const RandomKey& key, std::uint64_t first_block, std::int64_t tiles,
                std::uint8_t* out) {
  for (std::int64_t i = 0; i < tiles; ++i) {
    const Philox draw = philox_block(key, first_block + static_cast<std::uint64_t>(i));
    std::memcpy(out + 16 * i, draw.word, sizeof draw.word);
  }
}

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

// Of a token.
float token8_scale(const TokenCodesIn& codes, std::int64_t token) {
  float scale;
  std::memcpy(&scale, codes.scales() + 4 * token, sizeof scale);
  return scale;
}
float packed_scale(const TokenCodesIn& codes, std::int64_t token) {
  std::uint16_t half;
  std::memcpy(&half, codes.scales() + 2 * token, sizeof half);
  return bf16_to_float(half);
}

// Values of packed codes of features [first, first + count), times `factor` and then `second` by
// way of their scales; `first` and `count` are multiples of 16. `bases`: the random byte of each
// tile of features from `first`.
void load_packed(const SimdKernels& simd, const TokenCodesIn& codes, std::int64_t token,
                 std::int64_t first, std::int64_t count, const std::uint8_t* bases, float factor,
                 float second, float* v) {
  const std::uint8_t* const ratios = codes.ratios(token);
  const float scale = packed_scale(codes, token);
  float factors[Row::chunk / tile];
  for (std::int64_t t = 0; t < count / tile; ++t) {
    const std::uint8_t ratio = ratios[(first + t * tile) / token_group];
    factors[t] =
        ratio == 0 && !std::isnan(scale) ? 0.0F : ratio_value(ratio) * scale * factor * second;
  }
  if (codes.storage == Storage::token4) {
    simd.undither_row(codes.row(token) + first / 2, count, factors, bases, v);
  } else {
    simd.undither_row2(codes.row(token) + first / 4, count, factors, bases, v);
  }
}

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
        dither_(random_key(context.key(), Purpose::activation)),
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

  void draw(std::int64_t token, std::int64_t start, std::int64_t count) {
    const std::int64_t tile_row = token / tile;
    if (start != start_ || tile_row != tile_row_) {
      start_ = start;
      tile_row_ = tile_row;
      const auto blocks = static_cast<std::uint64_t>(out_.layout.padded / tile);
      tile_bytes(
          dither_,
          static_cast<std::uint64_t>(tile_row) * blocks + static_cast<std::uint64_t>(start / tile),
          count / tile, bases_);
    }
    for (std::int64_t t = 0; t < count / tile; ++t) bytes_[t] = bases_[16 * t + token % tile];
  }

  void keep4(std::int64_t token, std::int64_t start, std::int64_t count, const float* v,
             float scale) {
    draw(token, start, count);
    for (std::int64_t first = 0; first < count; first += token_group) {
      const std::int64_t part = std::min(token_group, count - first);
      const std::uint8_t ratio = ratio_rounded_up(simd_.amax(v + first, part, 0), scale);
      out_.ratios(token)[(start + first) / token_group] = ratio;
      std::fill(inv_ + first / tile, inv_ + (first + part) / tile,
                ratio == 0 ? 0.0F : 1.0F / (ratio_value(ratio) * scale));
    }
    simd_.dither_row(v, count, inv_, bytes_, out_.row(token) + start / 2);
  }

  // The scales of groups come first: the token's is the largest of them. A row that is longer than
  // a buffer is gone over twice.
  void keep2(std::int64_t token) {
    const std::int64_t padded = out_.layout.padded;
    float largest = 0;
    const auto groups = [&](std::int64_t start, std::int64_t count, const float* v) {
      draw(token, start, count);
      for (std::int64_t first = 0; first < count; first += token_group) {
        scales_[first / token_group] =
            keep_group(token, start + first, std::min(token_group, count - first), v + first,
                       bytes_ + first / tile);
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
    simd_.dither_row2(y, count, inv, bytes, values, out);
    for (std::int64_t i = 0; i < count; ++i) products[i] = y[i] * values[i];
    return squares / sum_pairs(products, count) * back;
  }

  const SimdKernels& simd_;
  const TokenCodesOut& out_;
  RandomKey dither_;
  Row row_;
  std::int64_t start_ = -1, tile_row_ = -1;
  std::uint8_t bases_[Row::chunk];  // 16 for each tile of features
  std::uint8_t bytes_[Row::chunk / tile];
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
  Signs signs(random_key(key, Purpose::signs));
  for (std::int64_t i = 0; i < count; ++i) {
    const int exponent = exponents[first + i] - 127;
    factors[i] = signs[first + i] * power_of_two(divide ? -exponent : exponent) * scale;
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
  const RandomKey dither = random_key(job.key, Purpose::activation);
  const std::int64_t per_task = tokens_per_task(context, job.out.rows, layout.padded);
  context.pool()->run(ceil_div(job.out.rows, per_task), [&](std::int64_t task) {
    const std::int64_t end = std::min(job.out.rows, (task + 1) * per_task);
    float values[Row::chunk], factors[Row::chunk];
    std::uint8_t draws[Row::chunk], bases[Row::chunk / tile];
    for (std::int64_t start = 0; start < layout.features; start += Row::chunk) {
      const std::int64_t count = std::min(Row::chunk, layout.padded - start);
      const std::int64_t real = std::min(count, layout.features - start);
      feature_factors(in_signs_key(codes.storage, job.key), codes.exponents(), false,
                      1.0F / static_cast<float>(layout.block), start, real, factors);
      std::int64_t drawn = -1;
      for (std::int64_t row = task * per_task; row < end; ++row) {
        const std::int64_t token = job.first + row;
        if (codes.storage == Storage::token8) {
          const auto* const q = reinterpret_cast<const std::int8_t*>(codes.row(token)) + start;
          std::fill_n(values, count, 0.0F);
          simd.axpy(token8_scale(codes, token), q, count, values);
        } else {
          if (token / tile != drawn) {
            drawn = token / tile;
            tile_bytes(dither,
                       static_cast<std::uint64_t>(drawn * (layout.padded / tile) + start / tile),
                       count / tile, draws);
          }
          for (std::int64_t i = 0; i < count / tile; ++i) {
            bases[i] = draws[16 * i + token % tile];
          }
          load_packed(simd, codes, token, start, count, bases, 1.0F, 1.0F, values);
        }
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
std::uint32_t contribution_level(const TokenCodesIn& x, const float* token_scale,
                                 std::int64_t token) {
  const float kept = x.storage == Storage::token8 ? token8_scale(x, token) : packed_scale(x, token);
  const std::uint32_t bits = float_bits(token_scale[token] * kept) & 0x7fffffffU;
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

void draw_tokens(const Context& context, const TokenCodesIn& x, const float* token_scale,
                 std::int64_t slots, std::int64_t* token, float* factor) {
  constexpr std::uint64_t one = std::uint64_t{1} << 32;
  const std::int64_t tokens = x.layout.tokens;
  std::uint32_t count[levels] = {};
  std::uint32_t top = 0;
  for (std::int64_t l = 0; l < tokens; ++l) {
    const std::uint32_t level = contribution_level(x, token_scale, l);
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
    const std::uint32_t level = contribution_level(x, token_scale, l);
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
                             const float* token_scale, const DrawnTokens& drawn, Rounding rounding,
                             const Operand& out)
    : simd_(simd_kernels(context.isa())),
      codes_(codes),
      token_scale_(token_scale),
      drawn_(drawn),
      stochastic_(rounding == Rounding::stochastic),
      dither_(random_key(key, Purpose::activation)),
      random_(random_key(context.key(), Purpose::requantize)),
      out_(out) {
  strips_ = ceil_div(codes.layout.padded, strip_columns);
  const std::int64_t tiles = ceil_div(drawn.slots, tile);
  const std::int64_t wanted = ceil_div(std::int64_t{8} * context.threads(), strips_);
  const std::int64_t least =
      ceil_div(task_elements(context, tiles * tile * codes.layout.padded), tile * strip_columns);
  tiles_per_task_ = std::max(least, ceil_div(tiles, wanted));
  ranges_ = ceil_div(tiles, tiles_per_task_);
  std::fill_n(amax(), out.rows, 0U);
}

std::uint32_t* Contributions::amax() const { return reinterpret_cast<std::uint32_t*>(out_.scale); }

void Contributions::add_largest(Phase& phase) const {
  phase.add<&Contributions::largest>(strips_ * ranges_, *this);
}
void Contributions::add_codes(Phase& phase) const {
  phase.add<&Contributions::codes>(strips_ * ranges_, *this);
}
void Contributions::finish() const { patterns_to_scales(out_.scale, out_.rows, 8); }

template <class Visit>
void Contributions::tiles(std::int64_t task, const Visit& visit) const {
  const TokenCodesLayout& layout = codes_.layout;
  const std::int64_t col = task % strips_ * strip_columns;
  const std::int64_t cols = std::min<std::int64_t>(strip_columns, layout.padded - col);
  const std::int64_t first = task / strips_ * tiles_per_task_;
  const std::int64_t last = std::min(ceil_div(drawn_.slots, tile), first + tiles_per_task_);
  const std::int64_t width = layout.padded / tile;
  alignas(64) float values[tile * strip_columns] = {};
  std::uint8_t draws[strip_columns] = {}, bases[strip_columns / tile] = {};
  for (std::int64_t t = first; t < last; ++t) {
    std::int64_t drawn_tile = -1;
    for (std::int64_t i = 0; i < tile; ++i) {
      const std::int64_t slot = t * tile + i;
      float* const row = values + i * strip_columns;
      const std::int64_t token = slot >= drawn_.slots      ? -1
                                 : drawn_.token == nullptr ? slot
                                                           : drawn_.token[slot];
      if (token < 0) {
        std::fill_n(row, strip_columns, 0.0F);
        continue;
      }
      const float scale = token_scale_[token];
      const float factor = drawn_.token == nullptr ? 1.0F : drawn_.factor[slot];
      if (codes_.storage == Storage::token8) {
        const auto* const q = reinterpret_cast<const std::int8_t*>(codes_.row(token)) + col;
        std::fill_n(row, strip_columns, 0.0F);
        simd_.axpy(token8_scale(codes_, token) * scale * factor, q, cols, row);
        continue;
      }
      if (token / tile != drawn_tile) {
        drawn_tile = token / tile;
        tile_bytes(dither_, static_cast<std::uint64_t>(drawn_tile * width + col / tile),
                   cols / tile, draws);
      }
      for (std::int64_t g = 0; g < cols / tile; ++g) bases[g] = draws[16 * g + token % tile];
      load_packed(simd_, codes_, token, col, cols, bases, scale, factor, row);
    }
    visit(t, col, static_cast<int>(cols), values);
  }
}

void Contributions::largest(std::int64_t task) const {
  std::uint32_t best[strip_columns] = {};
  std::int64_t col = 0;
  int cols = 0;
  tiles(task, [&](std::int64_t, std::int64_t c, int count, const float* values) {
    col = c;
    cols = count;
    simd_.amax_strip(values, tile, best);
  });
  for (int c = 0; c < cols; ++c) atomic_max(amax() + col + c, best[c]);
}

void Contributions::codes(std::int64_t task) const {
  const std::int64_t tile_rows = ceil_div(drawn_.slots, tile);
  float inv[strip_columns] = {};
  std::uint32_t keep[strip_columns] = {};
  bool known = false;
  tiles(task, [&](std::int64_t t, std::int64_t col, int cols, const float* values) {
    if (!known) {
      for (int c = 0; c < cols; ++c) {
        const Scale scale = make_scale(amax()[col + c], 8);
        inv[c] = scale.inv;
        keep[c] = scale.keep;
      }
      known = true;
    }
    std::uint8_t bytes[strip_columns] = {};
    if (stochastic_) {
      for (std::int64_t g = 0; g < cols / tile; ++g) {
        tile_bytes(random_, static_cast<std::uint64_t>((col / tile + g) * tile_rows + t), 1,
                   bytes + tile * g);
      }
    }
    simd_.quantize_tile(values, cols, inv, keep, stochastic_ ? bytes : nullptr,
                        out_.codes + col * out_.k_padded + t * tile, out_.k_padded);
  });
}

void UndoTransforms::add_tiles(Phase& phase) const {
  phase.add<&UndoTransforms::tile_of>(
      ceil_div(product_.rows, strip_columns) * ceil_div(product_.cols, strip_columns), *this);
}

void UndoTransforms::tile_of(std::int64_t task) const {
  const std::int64_t strips = ceil_div(product_.cols, strip_columns);
  const std::int64_t row = task / strips * strip_columns, col = task % strips * strip_columns;
  const std::int64_t rows = std::min<std::int64_t>(strip_columns, product_.rows - row);
  const std::int64_t cols = std::min<std::int64_t>(strip_columns, product_.cols - col);
  const std::int64_t real_rows = std::min(rows, out_.rows - row);
  const std::int64_t real_cols = std::min(cols, out_.cols - col);
  if (real_rows <= 0 || real_cols <= 0) return;
  alignas(64) float values[strip_columns * strip_columns] = {};
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const v = values + r * strip_columns;
    std::memcpy(v, static_cast<const float*>(product_.data) + (row + r) * product_.row_stride + col,
                static_cast<std::size_t>(cols) * sizeof(float));
    simd_.fwht_row(v, cols, in_block_);
  }
  for (std::int64_t r = 0; r < rows; r += out_block_) {
    simd_.fwht_strip(values + r * strip_columns, out_block_);
  }
  float in_factors[strip_columns], out_factors[strip_columns], before[strip_columns];
  feature_factors(in_key_, in_exponents_, false, 1.0F / static_cast<float>(in_block_), col,
                  real_cols, in_factors);
  feature_factors(out_key_, out_exponents_, false, 1.0F / static_cast<float>(out_block_), row,
                  real_rows, out_factors);
  for (std::int64_t r = 0; r < real_rows; ++r) {
    float* const v = values + r * strip_columns;
    simd_.multiply(v, real_cols, in_factors);
    simd_.scale_row(v, out_factors[r]);
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
