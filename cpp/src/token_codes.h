// One code a value: what the token storages are made of, for all backends (docs/numerics.md, "One
// code a value").
#pragma once

#include <cstddef>
#include <cstdint>

#include "hot/backward_linear.h"
#include "hot/context.h"
#include "operands.h"

namespace hot::detail {

inline bool is_token_storage(Storage storage) {
  return storage == Storage::token8 || storage == Storage::token4 || storage == Storage::token2;
}

inline constexpr std::int64_t size_sample = 512;  // tokens that the sizes of features come from
inline constexpr std::int64_t token_group = 32;   // features of a token that share a packed ratio
inline constexpr std::int64_t dither_tile = 16;   // tokens and features that share a draw
inline constexpr std::int64_t max_drawn_tokens = (std::int64_t{1} << 31) - 1;  // of a share

// The transform's block for this width.
inline int feature_block(std::int64_t features, int largest) {
  for (int block = largest; block > 16; block /= 2) {
    if (round_up(features, block) <= features + features / 8) return block;
  }
  return 16;
}

// The token whose values are number j of a sample of `count`. Exact: tokens are below 2^48.
constexpr std::int64_t sampled_token(std::int64_t j, std::int64_t count, std::int64_t tokens) {
  return j * tokens / count;
}

// Where the parts of a kept x lie, from its start.
struct TokenCodesLayout {
  std::int64_t tokens, features, padded;  // L, I, I'
  int block;                              // n_I
  std::int64_t row_bytes, ratio_bytes;    // of a token; ratios: of packed codes
  std::size_t ratio_offset, scale_offset, exponent_offset, bytes;

  TokenCodesLayout(std::int64_t tokens_, std::int64_t features_, const BackwardLinearSpec& spec)
      : tokens(tokens_), features(features_), block(feature_block(features_, spec.hadamard_block)) {
    const bool packed = spec.storage != Storage::token8;
    padded = round_up(features, block);
    row_bytes = spec.storage == Storage::token8   ? padded
                : spec.storage == Storage::token4 ? padded / 2
                                                  : padded / 4;
    ratio_bytes = packed ? ceil_div(padded, token_group) : 0;
    ratio_offset = static_cast<std::size_t>(tokens * row_bytes);
    scale_offset = static_cast<std::size_t>(
        round_up(static_cast<std::int64_t>(ratio_offset) + tokens * ratio_bytes, 4));
    exponent_offset = scale_offset + static_cast<std::size_t>(tokens) * (packed ? 2 : 4);
    bytes = exponent_offset + static_cast<std::size_t>(features);
  }
};

// A kept x [L, I], to be written or read.
template <class Byte>
struct TokenCodes {
  TokenCodesLayout layout;
  Storage storage;
  Byte* data;

  Byte* row(std::int64_t token) const { return data + token * layout.row_bytes; }
  Byte* ratios(std::int64_t token) const {
    return data + layout.ratio_offset + token * layout.ratio_bytes;
  }
  Byte* scales() const { return data + layout.scale_offset; }
  Byte* exponents() const { return data + layout.exponent_offset; }
};
using TokenCodesOut = TokenCodes<std::uint8_t>;
using TokenCodesIn = TokenCodes<const std::uint8_t>;

// Signs of out features where w comes quantised.
inline constexpr Key fixed_signs_key{};
// Signs of in features: fixed, but for codes of 2 bits, whose error is a bias then. `key`: that x
// is kept with.
inline const Key& in_signs_key(Storage storage, const Key& key) {
  return storage == Storage::token2 ? key : fixed_signs_key;
}

}  // namespace hot::detail
